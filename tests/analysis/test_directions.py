"""Directions found in samples where one was planted, and not found where there is none."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from chatspace_lab.analysis import (
    Direction,
    difference_of_means,
    logistic_probe,
    pca_frame,
    pca_of_differences,
    samples_of,
)
from chatspace_lab.analysis.groups import groups_of_texts
from chatspace_lab.analysis.samples import auc_of
from chatspace_lab.errors import AnalysisError, NearCopiesWarning, SteeringError
from tests.analysis.handles import handle

METHODS = (difference_of_means, pca_of_differences, logistic_probe)
PAIRS, HIDDEN = 48, 96
NOISE, FAINT, STRONG = 0, 1, 2  # the layers, by how far the two sides are apart


def planted() -> tuple[dict[int, np.ndarray], dict[int, np.ndarray], np.ndarray]:
    random = np.random.default_rng(5)
    unit = random.normal(size=HIDDEN)
    unit /= np.linalg.norm(unit)
    positive, negative = {}, {}
    for layer, apart in ((NOISE, 0.0), (FAINT, 1.5), (STRONG, 30.0)):
        topic = 5 * random.normal(size=(PAIRS, HIDDEN))  # what both sides of a pair share
        negative[layer] = topic * 0.2 + random.normal(size=(PAIRS, HIDDEN))
        positive[layer] = topic * 0.2 + random.normal(size=(PAIRS, HIDDEN)) + apart * unit
    return positive, negative, unit


@pytest.fixture(scope="module")
def samples() -> tuple[dict[int, np.ndarray], dict[int, np.ndarray], np.ndarray]:
    return planted()


@pytest.fixture(scope="module", params=METHODS, ids=lambda method: method.__name__)
def found(request: pytest.FixtureRequest, samples: tuple) -> tuple[Direction, np.ndarray]:
    positive, negative, unit = samples
    return request.param(positive, negative, name="planted", seed=1), unit


def test_the_planted_direction_is_found(found: tuple[Direction, np.ndarray]) -> None:
    direction, unit = found
    assert float(direction.at(STRONG) @ torch.from_numpy(unit).float()) > 0.99
    assert direction.auc[STRONG] == 1.0
    assert direction.split_half[STRONG] > 0.97
    assert abs(direction.shuffled[STRONG] - 0.5) < 0.1
    assert direction.shuffled[STRONG] < direction.shuffled_high[STRONG] < 0.85
    assert direction.norms[STRONG] == pytest.approx(30.0, rel=0.1)
    choice = direction.best_layer()
    assert (choice.layer, choice.trusted) == (STRONG, True)
    assert "AUC 1.000 on held-out pairs" in choice.reason
    for layer in direction.layers:
        assert float(direction.at(layer).norm()) == pytest.approx(1.0, abs=1e-6)


def test_noise_is_no_direction(found: tuple[Direction, np.ndarray]) -> None:
    direction, _ = found
    assert abs(direction.auc[NOISE] - 0.5) < 0.2
    assert abs(direction.shuffled[NOISE] - 0.5) < 0.1
    assert abs(direction.split_half[NOISE]) < 0.3
    assert abs(direction.auc[NOISE] - 0.5) < abs(direction.auc[STRONG] - 0.5)


def test_noise_alone_is_not_trusted(samples: tuple) -> None:
    positive, negative, _ = samples
    choice = difference_of_means(positive, negative, layers=NOISE).best_layer()
    assert not choice.trusted
    assert "trust" in choice.reason


def test_values_by_hand() -> None:
    positive = {4: [[3.0, 1.0], [3.0, -1.0], [5.0, 1.0], [5.0, -1.0]]}
    negative = {4: [[1.0, 5.0], [1.0, 3.0], [3.0, 5.0], [3.0, 3.0]]}
    direction = difference_of_means(positive, negative, folds=2)
    assert direction.norms[4] == pytest.approx(np.sqrt(20))  # (2, −4)
    assert direction.raw(4).tolist() == pytest.approx([2, -4])
    assert direction.at(4).tolist() == pytest.approx([1 / np.sqrt(5), -2 / np.sqrt(5)])
    assert (direction.auc[4], direction.split_half[4]) == (1.0, pytest.approx(1.0))
    assert direction.details == {"pairs": 4, "folds": 2, "shuffles": 20, "splits": 10, "seed": 0}


def test_against_scikit_learn(samples: tuple) -> None:
    """Turning each layer into a basis of its span loses nothing, and the quick ones give scikit-learn's numbers."""
    positive, negative, _ = samples
    for layer in (FAINT, STRONG):
        left, right = positive[layer][:20], negative[layer][:20]  # fewer samples than dimensions
        axis = PCA(1, svd_solver="full").fit(np.concatenate([left - right, right - left])).components_[0]
        ours = pca_of_differences({0: left}, {0: right}, shuffles=1, splits=1).at(0).numpy()
        assert abs(axis @ ours) == pytest.approx(1.0, abs=1e-5)
        both = np.concatenate([left, right]) - np.concatenate([left, right]).mean(axis=0)
        scaled = both / np.sqrt((both**2).sum(axis=1).mean())
        weights = LogisticRegression(C=0.5, tol=1e-8, max_iter=5000).fit(scaled, [1] * 20 + [0] * 20).coef_[0]
        ours = logistic_probe({0: left}, {0: right}, regularisation=0.5, shuffles=1, splits=1).at(0).numpy()
        assert weights @ ours / np.linalg.norm(weights) == pytest.approx(1.0, abs=1e-4)
    scores = np.random.default_rng(0).integers(0, 5, size=(2, 30)).astype(float)  # with many ties
    assert auc_of(*scores) == pytest.approx(roc_auc_score([1] * 30 + [0] * 30, scores.reshape(-1)))


def test_the_seed_decides(samples: tuple) -> None:
    positive, negative, _ = samples
    first, again, other = (difference_of_means(positive, negative, layers=FAINT, seed=seed) for seed in (3, 3, 4))
    assert first.frame().equals(again.frame())
    assert first.shuffled != other.shuffled
    assert torch.equal(first.at(FAINT), other.at(FAINT))


def test_any_kind_of_samples(samples: tuple) -> None:
    positive, negative, _ = samples
    wanted = difference_of_means(positive, negative, layers=[STRONG])
    tensors = [{STRONG: torch.from_numpy(side[STRONG]).float()} for side in (positive, negative)]
    assert torch.allclose(difference_of_means(*tensors).at(STRONG), wanted.at(STRONG), atol=1e-6)
    handles = [
        [handle(side[STRONG][[i, i, i]][None], prompt=[1, 2, 3], answer=[4], layers=(STRONG,)) for i in range(PAIRS)]
        for side in (positive, negative)
    ]
    direction = difference_of_means(*handles, tokens="prompt")
    assert torch.allclose(direction.at(STRONG), wanted.at(STRONG), atol=1e-6)
    assert direction.details["tokens"] == "prompt"
    with pytest.raises(AnalysisError, match=r"the answer .* was captured"):
        difference_of_means(*handles, tokens="answer")


def test_samples_of_handles() -> None:
    rows = [[[9.0, 9.0], [1.0, 3.0], [3.0, 5.0], [4.0, 4.0], [6.0, 8.0]]]
    made = [handle(rows, prompt=[1, 2, 3], answer=[4, 5, 6]), handle(rows, prompt=[1, 2, 3], answer=[4, 5, 6])]
    assert samples_of(made)[3].tolist() == [[3, 5]] * 2
    assert samples_of(made, "prompt")[3].tolist() == [[2, 4]] * 2
    assert samples_of(made, "answer")[3].tolist() == [[5, 6]] * 2


def noise(groups: int, copies: int, spread: float, layers: int = 3, hidden: int = 96) -> list[dict[int, np.ndarray]]:
    """Return two sides that differ by nothing: each pair many times, moved by a share of its own length."""
    random = np.random.default_rng(11)
    made: list[dict[int, np.ndarray]] = [{}, {}]
    for layer in range(layers):
        for side in made:
            one = random.normal(size=(groups, hidden)).repeat(copies, axis=0)
            side[layer] = one + spread * random.normal(size=one.shape)
    return made


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
@pytest.mark.parametrize("spread", [0.0, 1e-6, 0.02, 0.08, 0.3])
def test_copies_are_no_evidence(method: Callable[..., Direction], spread: float) -> None:
    positive, negative = noise(10, 5, spread, layers=1 if method is logistic_probe else 3)
    with pytest.warns(NearCopiesWarning, match="40 of 50 pairs are near copies"):
        direction = method(positive, negative)
    assert direction.details["groups"] == 10
    assert max(direction.auc.values()) < 0.85  # 0.95 and more when a copy of each held-out pair is fitted to
    assert abs(np.mean(list(direction.auc.values())) - 0.5) < 0.2
    assert abs(np.mean(list(direction.shuffled.values())) - 0.5) < 0.1
    assert max(map(abs, direction.split_half.values())) < 0.4  # 0.8 and more
    assert not direction.best_layer().trusted


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
@pytest.mark.parametrize(("factor", "shift"), [(1.3, 0.0), (1.0, 1.0)])
def test_copies_that_are_scaled_or_shifted_are_no_evidence(
    method: Callable[..., Direction], factor: float, shift: float
) -> None:
    """The same pairs in five wordings, each of which moves both sides alike."""
    sides = [{0: np.concatenate([side[0] * factor**at + shift * at for at in range(5)])} for side in noise(10, 1, 0.0)]
    with pytest.warns(NearCopiesWarning, match="of 50 pairs are near copies"):
        assert not method(*sides).best_layer().trusted


def test_labels_of_groups() -> None:
    """Equal labels are one group in whatever they come; what is no list of labels is refused."""
    positive, negative = noise(12, 1, 0.0)
    labels = [at // 2 for at in range(12)]
    given = (labels, torch.tensor(labels), [torch.tensor(at) for at in labels], np.array(labels), map(str, labels))
    for groups in given:
        assert difference_of_means(positive, negative, groups=groups).details["groups"] == 6
    for wrong, said in (
        ("aabbccddeeff", "list of names or numbers, one per pair, got str"),
        (dict.fromkeys(range(12)), "got dict"),
        (set(range(12)), "got set"),
        ([*range(11), None], r"groups\[11\] must be a label, got None"),
        (np.full(12, np.nan), r"groups\[0\] must be a label, got .*nan"),
    ):
        with pytest.raises(AnalysisError, match=said):
            difference_of_means(positive, negative, groups=wrong)


def test_texts_that_repeat_with_a_few_words_more_are_copies() -> None:
    words = [
        first + second for first in ("ri", "sto", "clou", "pa", "en", "bri", "gar") for second in "abcdefghijklmno"
    ]
    random = np.random.default_rng(0)
    texts = [[" ".join(random.permutation(words)[:6]) for _ in range(10)] for _ in range(2)]
    changes: list[Callable[[int, str], str]] = [
        lambda at, text: f"{at}. {text}",
        lambda at, text: f"Question {at}: {text.upper()}?",
        lambda at, text: f"{text} {['yes', 'no', 'well', 'now', 'then'][at]}",
        lambda at, text: ["", "Please read: ", "Well, ", "So: ", "Note that "][at] + text,
    ]
    for change in changes:
        sides = [[change(at, text) for at in range(5) for text in side] for side in texts]
        with pytest.warns(NearCopiesWarning, match="40 of 50 pairs are near copies"):
            assert groups_of_texts(sides[0], sides[1], None) == list(range(10)) * 5
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert groups_of_texts(sides[0], sides[1], range(50)) is None  # told apart by name
    with warnings.catch_warnings():  # words of a template make no copies
        warnings.simplefilter("error")
        for template in ("I am feeling very {} today.", "The {} was here."):
            assert (
                groups_of_texts(*[[template.format(word) for word in words[at : at + 7]] for at in (0, 7)], None)
                is None
            )


def test_groups_stay_together() -> None:
    positive, negative = noise(10, 5, 0.6)  # paraphrases: alike, and no copies
    labels = [f"question {at}" for at in range(10) for _ in range(5)]
    alone = difference_of_means(positive, negative)
    assert min(alone.auc.values()) > 0.85
    grouped = difference_of_means(positive, negative, groups=labels)
    assert grouped.details["groups"] == 10
    assert max(grouped.auc.values()) < 0.85
    assert max(map(abs, grouped.split_half.values())) < 0.4
    assert not grouped.best_layer().trusted
    same = difference_of_means(positive, negative, groups=range(50))
    assert same.frame().equals(alone.frame())
    with pytest.raises(AnalysisError, match="a label per pair, got 3 for 50 pairs"):
        difference_of_means(positive, negative, groups=labels[:3])


def test_what_is_one_sample_many_times() -> None:
    positive, negative = noise(10, 1, 0.0)
    one = {layer: np.repeat(rows[:1], 10, axis=0) for layer, rows in negative.items()}
    for sides in ((positive, one), (one, positive), *[noise(count, 8, 0.0) for count in (1, 2, 3)]):
        with pytest.warns(NearCopiesWarning), pytest.raises(AnalysisError, match="too few to hold any out"):
            difference_of_means(*sides)
    # The same sample on both sides, at different places.
    mixed = {layer: np.roll(rows, 1, axis=0) + 1e-9 * negative[layer] for layer, rows in positive.items()}
    with pytest.warns(NearCopiesWarning), pytest.raises(AnalysisError, match="too few to hold any out"):
        difference_of_means(positive, mixed)


def test_samples_apart_are_no_copies(samples: tuple) -> None:
    """Neither a wide gap between the sides nor one sample far away makes the others copies."""
    positive, negative, _ = samples
    far = {layer: np.concatenate([rows[:20], 1e4 * rows[20:21]]) for layer, rows in positive.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        difference_of_means(positive, negative, shuffles=1, splits=1)
        difference_of_means({0: positive[STRONG] + 1e5}, {0: negative[STRONG] - 1e5}, shuffles=1, splits=1)
        difference_of_means(far, {layer: rows[:21] for layer, rows in negative.items()}, shuffles=1, splits=1)


def test_auc_on_other_samples(samples: tuple) -> None:
    positive, negative, unit = samples
    direction = difference_of_means(positive, negative, layers=[FAINT, STRONG])
    random = np.random.default_rng(9)
    others = random.normal(size=(30, HIDDEN)) + 1.5 * unit, random.normal(size=(17, HIDDEN))
    found = direction.auc_on({FAINT: others[0], 7: others[0]}, {FAINT: others[1]})
    scores = np.concatenate(others) @ direction.at(FAINT).numpy()
    assert found == {FAINT: pytest.approx(roc_auc_score([1] * 30 + [0] * 17, scores))}
    assert direction.auc_on(negative, positive)[STRONG] == 0.0
    for bad, said in (
        (({9: others[0]}, {9: others[1]}), r"has layers \[1, 2\]; the samples have \[9\]"),
        (({FAINT: others[0][:, :4]}, {FAINT: others[1]}), "samples have 4 entries"),
        ((["a text"], ["another"]), "not tied to a lab"),
        (("a text", "another"), "not tied to a lab"),
        (({FAINT: others[0] * np.nan}, {FAINT: others[1]}), "hold NaN"),
    ):
        with pytest.raises(AnalysisError, match=said):
            direction.auc_on(*bad)


def test_copied_and_pickled(samples: tuple) -> None:
    positive, negative, _ = samples
    direction = difference_of_means(positive, negative, name="joy")
    for other in (
        copy.copy(direction),
        copy.deepcopy({"a": direction})["a"],
        pickle.loads(pickle.dumps(direction)),
        pickle.loads(pickle.dumps(direction.tied(lambda texts: positive))),
    ):
        assert (other.name, other.method, other.details) == (direction.name, direction.method, direction.details)
        assert other.frame().equals(direction.frame())
        assert all(torch.equal(other.at(layer), direction.at(layer)) for layer in direction.layers)
        with pytest.raises(TypeError):
            other.auc[0] = 1.0  # type: ignore[index]


def test_it_shows_its_evidence(samples: tuple) -> None:
    positive, negative, _ = samples
    direction = difference_of_means(positive, negative, name="<joy>")
    choice = direction.best_layer()
    for shown in (repr(direction), direction._repr_html_()):
        for part in ("48 pairs", f"layer {choice.layer}", "AUC 1.000", "shuffled labels", "halves", "raw length"):
            assert part in shown
    assert "<joy>" not in direction._repr_html_()
    assert "shuffled_high" in direction._repr_html_()
    assert len(direction.figure().data) == 5
    assert repr(Direction("d", {2: [1.0, 0.0]})) == "Direction('d', given, layer 2)"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda p, n: ({0: p[:3]}, {0: n[:3]}), "3 pairs are too few"),
        (lambda p, n: ({0: p}, {0: n[:-1]}), r"positive is \[8, 5\] and negative \[7, 5\]"),
        (lambda p, n: ({0: p}, {1: n}), r"positive has layers \[0\] and negative has layers \[1\]"),
        (lambda p, n: ({0: p}, {0: p}), "the same on average"),
        (lambda p, n: ({0: p[0]}, {0: n}), r"expected numbers of shape \[samples, hidden_size\]"),
        (lambda p, n: ({0: np.where(p == p[2, 1], np.nan, p)}, {0: n}), r"samples \[2\] hold NaN"),
        (lambda p, n: ({0: p}, {}), "negative is empty"),
    ],
)
def test_what_cannot_be_fitted(method: Callable[..., Direction], spoil: Callable[..., tuple], said: str) -> None:
    random = np.random.default_rng(0)
    with pytest.raises(AnalysisError, match=said):
        method(*spoil(random.normal(size=(8, 5)), random.normal(size=(8, 5))))


def test_arguments(samples: tuple) -> None:
    positive, negative, _ = samples
    with pytest.raises(AnalysisError, match="at least 2 folds"):
        difference_of_means(positive, negative, folds=1)
    with pytest.raises(AnalysisError, match="regularisation"):
        logistic_probe(positive, negative, regularisation=0.0)
    with pytest.raises(AnalysisError, match=r"no samples of layers \[9\]"):
        difference_of_means(positive, negative, layers=[9])
    for layers in (1.0, [1.9], "1"):
        with pytest.raises(SteeringError, match="a layer must be a whole number"):
            difference_of_means(positive, negative, layers=layers)
    assert difference_of_means(positive, negative, layers=np.array([1, 1])).layers == (1,)
    with pytest.raises(AnalysisError, match="samples_of needs capture handles, got ndarray"):
        difference_of_means(positive[0], negative[0])


def test_saved_and_loaded(samples: tuple, tmp_path: Path) -> None:
    positive, negative, _ = samples
    direction = difference_of_means(positive, negative, name="plänted")
    direction.save(tmp_path / "folder" / "v1.2")
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["v1.2.json", "v1.2.safetensors"]
    for ending in ("", ".json", ".safetensors"):
        loaded = Direction.load(tmp_path / "folder" / f"v1.2{ending}")
        assert loaded.frame().equals(direction.frame())
        assert (loaded.name, loaded.method, loaded.details) == (direction.name, direction.method, direction.details)
        assert all(torch.equal(loaded.at(layer), direction.at(layer)) for layer in direction.layers)
    facts = tmp_path / "folder" / "v1.2.json"
    content = json.loads(facts.read_text())
    for spoilt in ({**content, "format": 99}, {**content, "auc": 3}, {"name": "x"}, {**content, "more": 1}):
        facts.write_text(json.dumps(spoilt))
        with pytest.raises(AnalysisError):
            Direction.load(tmp_path / "folder" / "v1.2")
    with pytest.raises(AnalysisError, match="no direction can be read"):
        Direction.load(tmp_path / "nowhere")


def test_a_save_that_fails_leaves_the_older_one_whole(tmp_path: Path) -> None:
    older, newer = Direction("joy", {2: [1.0, 0.0]}), Direction("joy", {2: [0.0, 1.0]})
    older.save(tmp_path / "joy")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "joy.json.new").mkdir()  # where the second of the two files would be written
    with pytest.raises(AnalysisError, match="'joy' cannot be written"):
        newer.save(tmp_path / "joy")
    (tmp_path / "joy.json.new").rmdir()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    newer.save(tmp_path / "joy")
    assert torch.equal(Direction.load(tmp_path / "joy").at(2), newer.at(2))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["joy.gguf", "joy.pt", "joy.npz", "joy.JSON5", "joy.7z", "joy.pkl", "joy.csv"])
def test_formats_that_it_is_not_kept_in(name: str, tmp_path: Path) -> None:
    direction = Direction("joy", {2: [1.0, 0.0]})
    for do in (direction.save, Direction.load):
        with pytest.raises(AnalysisError, match=r"\.safetensors and \.json, not as \.\w+"):
            do(tmp_path / "folder" / name)
    assert not list(tmp_path.iterdir())
    with pytest.raises(AnalysisError, match="cannot be written"):
        Direction("joy", {2: [1.0, 0.0]}, details={"x": object()}).save(tmp_path / "joy")
    assert not list(tmp_path.iterdir())


def test_a_direction_is_frozen_and_checked() -> None:
    vector = torch.tensor([3.0, 4.0])
    direction = Direction("d", {7: vector, 2: vector})
    vector.zero_()
    direction.at(2).zero_()
    assert direction.at(2).tolist() == pytest.approx([0.6, 0.8])
    assert direction.layers == (2, 7)
    with pytest.raises(AttributeError):
        direction.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        direction.vectors[2] = vector  # type: ignore[index]
    with pytest.raises(AnalysisError, match=r"no vector for layer 3, only for \[2, 7\]"):
        direction.at(3)
    with pytest.raises(AnalysisError, match="raw length"):
        direction.raw(2)
    with pytest.raises(AnalysisError, match="was not tested"):
        direction.best_layer()
    with pytest.raises(SteeringError, match="zero"):
        Direction("d", {2: vector})
    for bad in ({"name": ""}, {"vectors": {}}, {"vectors": {0: [1.0], 1: [1.0, 2.0]}}, {"auc": {5: 1.0}}):
        with pytest.raises(AnalysisError):
            Direction(**{"name": "d", "vectors": {0: [1.0]}, **bad})


def test_the_best_layer_is_the_one_whose_halves_agree() -> None:
    vectors = dict.fromkeys(range(4), (1.0, 0.0))
    known = {"auc": {0: 0.99, 1: 1.0, 2: 0.995, 3: 0.6}, "split_half": {0: 0.7, 1: 0.6, 2: 0.9, 3: 0.99}}
    choice = Direction("d", vectors, shuffled_high=dict.fromkeys(range(4), 0.7), **known).best_layer()
    assert (choice.layer, choice.trusted) == (2, True)
    assert "2 layers do equally well" in choice.reason
    apart = Direction("d", vectors, auc=known["auc"], split_half=dict.fromkeys(range(4), 0.1)).best_layer()
    assert (apart.layer, apart.trusted) == (1, False)
    assert "halves hardly agree" in apart.reason
    chance = Direction("d", vectors, auc=known["auc"], shuffled_high=dict.fromkeys(range(4), 1.0)).best_layer()
    assert not chance.trusted


def test_ties_go_to_the_middle_and_late_layers_are_for_reading_only() -> None:
    rising = {layer: 0.80 + 0.005 * layer for layer in range(30)}
    tied = Direction("d", dict.fromkeys(range(30), (1.0, 0.0)), auc=dict.fromkeys(range(30), 1.0), split_half=rising)
    assert tied.best_layer().layer == 15
    assert tied.steering_layers().layers == (12, 13, 14, 15, 16, 17)
    assert tied.steering_layers().layer == 15
    late = {**dict.fromkeys(range(30), 0.8), 28: 1.0}
    only = Direction("d", dict.fromkeys(range(30), (1.0, 0.0)), auc=late, split_half=rising)
    assert only.best_layer().layer == 28
    assert "for reading only" in only.best_layer().reason
    assert only.steering_layers().layers[-1] < 24
    some = Direction("d", dict.fromkeys((8, 20), (1.0, 0.0)), details={"layer_count": 30})
    assert some.steering_layers().layer == 20 or some.steering_layers().layer == 9
    assert not some.steering_layers().trusted
    broken = {**dict.fromkeys(range(30), 1.0), 14: 0.6}
    assert Direction("d", dict.fromkeys(range(30), (1.0, 0.0)), auc=broken).steering_layers().layers == (
        15, 16, 17, 18, 19, 20,
    )  # fmt: skip


def test_pca_of_means() -> None:
    """Four means in a plane: 8 of the 10 units of variance lie along (0, 1, 0)."""
    means = {"a": [5.0, 2.0, 1.0], "b": [5.0, -2.0, 1.0], "c": [6.0, 0.0, 1.0], "d": [4.0, 0.0, 1.0]}
    frame, axes = pca_frame(means, {"a": "one", "b": "one"})
    assert frame["label"].tolist() == ["a", "b", "c", "d"]
    assert frame["group"].tolist() == ["one", "one", "", ""]
    assert frame["pc1"].tolist() == pytest.approx([2, -2, 0, 0])
    assert frame["pc2"].tolist() == pytest.approx([0, 0, 1, -1])
    assert frame["explained1"].tolist() == pytest.approx([0.8] * 4)
    assert axes.tolist() == [pytest.approx([0, 1, 0]), pytest.approx([1, 0, 0])]
    for bad, said in (
        ({"a": [1.0], "b": [2.0]}, "2 vectors have at most 1 components"),
        ({"a": [1.0], "b": [2.0, 1.0], "c": [1.0]}, "one length"),
        ({"a": [np.nan, 1.0], "b": [2.0, 1.0], "c": [1.0, 1.0]}, r"\['a'\] hold NaN"),
        ({"a": [1.0], "b": [2.0], "c": [5.0], "d": [6.0]}, "4 vectors have at most 1 components, not 2"),
        (dict.fromkeys("abc", "text"), r"means\['a'\]: expected numbers, got str"),
        (dict.fromkeys("abc", (1.0, 2.0)), "all vectors are the same"),
    ):
        with pytest.raises(AnalysisError, match=said):
            pca_frame(bad)
    with pytest.raises(AnalysisError, match="groups: 'A' is not among the means; did you mean 'a'"):
        pca_frame(means, {"A": "one", "b": "one"})
    tiny = pca_frame({label: np.array(mean) * 1e-200 for label, mean in means.items()})[0]
    assert tiny["explained1"].tolist() == pytest.approx([0.8] * 4)
    assert tiny["pc1"].tolist() == pytest.approx([2e-200, -2e-200, 0, 0], rel=1e-6, abs=1e-206)
    tensors = {label: torch.tensor(mean, requires_grad=True).bfloat16() for label, mean in means.items()}
    pd.testing.assert_frame_equal(pca_frame(tensors)[0], pca_frame(means)[0])
