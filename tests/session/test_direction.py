"""``lab.direction``: from two lists of texts to a tested, named direction; and named vectors on disk."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatspace_lab import AddSpec, LabSession, SteeringSpec
from chatspace_lab.analysis import Direction, difference_of_means
from chatspace_lab.demo import OFFICE, SEA
from chatspace_lab.errors import AnalysisError, NearCopiesWarning, RequestError, SessionError, TrainingTextsWarning
from tests.oracle import Oracle

MORE_SEA = ("The harbour smelled of salt and fish.", "Dolphins swam beside the boat.", "The tide rose over the sand.")
MORE_OFFICE = ("The desk smelled of paper and ink.", "The printer stood beside the door.")


@pytest.fixture
def clean(lab: LabSession) -> Iterator[LabSession]:
    lab.vectors.clear()
    yield lab
    lab.vectors.clear()


def cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(left.double(), right.double(), dim=0))


def ordinary(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of rows [tokens, hidden_size] without attention sinks."""
    norms = rows.double().norm(dim=-1)
    return rows[norms <= 3 * norms.quantile(0.25, interpolation="lower")].double().mean(0)


def test_a_direction_is_unsteered_tested_named_and_shown(clean: LabSession, hf: Oracle) -> None:
    clean.steer([4, 16], torch.ones(clean.hidden_size), 8.0)
    sea = clean.direction(SEA, OFFICE, name="sea")
    assert clean.vectors == {"sea": sea}
    assert sea.details["steering"] == "unsteered"
    for layer in (4, 12, 29):
        means = []
        for side in (SEA, OFFICE):
            rows = [hf.residuals(clean.tokenizer(text)["input_ids"])[layer][1:] for text in side]
            means.append(torch.stack([ordinary(each) for each in rows]).mean(0))
        assert cosine(sea.at(layer), means[0] - means[1]) > 0.9999
        assert sea.norms[layer] == pytest.approx(float((means[0] - means[1]).norm()), rel=1e-3)
    steered = clean.direction(SEA, OFFICE, name="steered", steering="session")
    assert steered.details["steering"].startswith("steered: add 8·v")
    assert cosine(sea.at(29), steered.at(29)) < 0.99
    assert set(sea.auc) == set(range(30))
    best, steering = sea.best_layer(), sea.steering_layers()
    assert sea.auc[best.layer] > 0.9
    assert 9 <= steering.layers[0] <= steering.layer <= steering.layers[-1] < 24
    for part in (
        "6 pairs",
        "unsteered",
        "the mean over each text's tokens but attention sinks",
        f"read at layer {best.layer}",
    ):
        assert part in repr(sea)
        assert part.replace("'", "&#x27;") in sea._repr_html_()
    before = clean.vectors["sea"]
    clean.direction(OFFICE, SEA, name="sea", layers=[12], method="logistic probe", shuffles=2, splits=2)
    assert clean.vectors["sea"] is not before  # a rebuild replaces
    assert clean.vectors["sea"].layers == (12,)
    clean.clear()
    clean.steer(12, "sea", 3.0)
    assert clean.export_steering_spec() == SteeringSpec.at(12, AddSpec(clean.vectors["sea"].at(12), 3.0))


def test_a_direction_is_tried_on_other_texts(clean: LabSession) -> None:
    sea = clean.direction(SEA, OFFICE, name="sea", layers=[12, 20])
    clean.steer(4, torch.ones(clean.hidden_size), 50.0)  # is left out again
    found = sea.auc_on(MORE_SEA, MORE_OFFICE)
    assert list(found) == [12, 20]
    pooled = [clean.capture(list(side), [12], "mean", where="prompt") for side in (MORE_SEA, MORE_OFFICE)]
    assert min(sea.auc_on(*pooled)) == 12
    assert min(found.values()) >= 5 / 6
    with pytest.warns(TrainingTextsWarning, match="made from 1 of these 2 texts"):
        sea.auc_on([SEA[0], MORE_SEA[0]], MORE_OFFICE)
    with pytest.raises(AnalysisError, match="not tied to a lab"):
        pickle.loads(pickle.dumps(sea)).auc_on(MORE_SEA, MORE_OFFICE)


def test_conversations_and_groups(clean: LabSession) -> None:
    def chats(texts: tuple[str, ...]) -> list[Any]:
        return [[{"role": "user", "content": text}] for text in texts]

    direction = clean.direction(chats(SEA), chats(OFFICE), name="chat", layers=[12])
    assert direction.details["positions"] == "the last of prompt"
    with pytest.warns(NearCopiesWarning, match="6 of 12 pairs"):
        again = clean.direction([*SEA, *SEA], [*OFFICE, *OFFICE], name="twice", layers=[12])
    assert again.details["groups"] == 6
    with pytest.warns(NearCopiesWarning, match="6 of 12 pairs"):
        nearly = clean.direction(
            [*SEA, *(f" {text.upper()}!" for text in SEA)], [*OFFICE, *map(str.lower, OFFICE)], name="near", layers=[12]
        )
    assert nearly.details["groups"] == 6
    named = clean.direction([*SEA, *SEA], [*OFFICE, *OFFICE], name="g", layers=[12], groups=[*range(6)] * 2)
    assert named.frame().drop(columns="direction").equals(again.frame().drop(columns="direction"))


def test_what_cannot_be_built(clean: LabSession) -> None:
    doings: list[tuple[Callable[[], Any], str]] = [
        (lambda: clean.direction(SEA[:5], OFFICE[:5], name="x"), "positive has 5 texts; give at least 6 a side"),
        (lambda: clean.direction([*SEA, "The sea"], OFFICE, name="x"), "positive has 7 texts and negative 6"),
        (lambda: clean.direction("a text", OFFICE, name="x"), "positive must be a list of texts"),
        (lambda: clean.direction(SEA, OFFICE, name=" "), "name must be a text"),
        (lambda: clean.direction(SEA, OFFICE, name="x", method="lda"), "method must be one of difference of means"),
        (lambda: clean.direction(SEA, OFFICE, name="x", reduce="norm"), "reduce must be"),
        (lambda: clean.direction(SEA, OFFICE, name="x", steering="sesion"), "steering must be a SteeringSpec"),
        (lambda: clean.direction([*SEA[:5], "same"], OFFICE, name="x"), "'same' has no token that counts"),
        (lambda: clean.direction(SEA, SEA, name="x"), "the same on average"),
        (lambda: clean.direction(SEA, OFFICE[:1] * 6, name="x"), "too few to hold any out"),
    ]
    for do, said in doings:
        with pytest.raises((RequestError, AnalysisError), match=said):
            do()
    assert clean.vectors == {}


def test_captures_are_unsteered_unless_asked_otherwise(clean: LabSession) -> None:
    texts = ["The river flows to the sea.", "A day in the office."]
    plain = clean.capture(texts, [5, 20], "mean", attention_sinks=True)
    vector = torch.ones(clean.hidden_size)
    clean.steer(5, vector, 10.0)
    spec = clean.export_steering_spec()
    unsteered, session, given = (
        clean.capture(texts, [5, 20], "mean", steering=each, attention_sinks=True) for each in (None, "session", spec)
    )
    np.testing.assert_allclose(unsteered.values, plain.values, rtol=1e-4, atol=1e-3)
    assert (unsteered.steering, session.steering) == (SteeringSpec.none(), spec)
    assert "unsteered" in repr(unsteered)
    assert "steered: add 10·v" in repr(session)
    np.testing.assert_allclose(session.values[:, 0] - plain.values[:, 0], 10.0, rtol=1e-3, atol=1e-2)
    np.testing.assert_array_equal(session.values, given.values)
    frames = [clean.capture(texts, [5], "norm", steering=each) for each in (None, "session")]
    assert frames[0].attrs["steering"] == "unsteered"
    assert frames[1].attrs["steering"].startswith("steered: add 10·v")
    norms = clean.measure(texts[0])["norm"]
    clean.clear()
    np.testing.assert_allclose(norms, clean.measure(texts[0])["norm"], rtol=1e-5)
    many = [f"The {word} river" for word in ("long", "old", "blue", "wide", "cold", "slow")]
    sides = [clean.capture([f"{text} {end}" for text in many], [5], "mean", steering=spec) for end in ("ran", "stood")]
    assert difference_of_means(*sides).details["steering"].startswith("steered: add")
    clean.steer(5, vector, 10.0)
    _, handles = clean.generate(many, capture_layers=[8], max_tokens=1)
    _, others = clean.generate(many, capture_layers=[8], max_tokens=1, steering=SteeringSpec.none())
    clean.fetch_captures_batch([*handles, *others])
    assert (handles[0].steering, others[0].steering) == (spec, SteeringSpec.none())
    with pytest.warns(UserWarning, match="captured under different steering"):
        mixed = difference_of_means(handles, others)
    assert mixed.details["steering"] == "steered and unsteered"
    for handle in (*handles, *others):
        handle.close()


def test_named_vectors_are_saved_with_the_session(clean: LabSession, tmp_path: Path) -> None:
    sea = clean.direction(SEA, OFFICE, name="sea", layers=[12, 20], shuffles=2, splits=2)
    vector = torch.randn(clean.hidden_size, generator=torch.Generator().manual_seed(2))
    clean.vectors |= {"v": vector, "array": vector.numpy() * 2, "layers": {3: vector, 9: vector * 3}}
    clean.vectors |= {"short": torch.ones(3), "text": "no vector", "list": vector.tolist()}
    with pytest.warns(UserWarning, match=r"lab.vectors\['(short|text)'\] is not saved"):
        folder = clean.save(tmp_path / "session.v1")
    clean.vectors.clear()
    clean.vectors["other"] = vector
    clean.load(folder)
    assert set(clean.vectors) == {"sea", "v", "array", "layers", "list", "other"}
    assert clean.vectors["sea"].frame().equals(sea.frame())
    assert clean.vectors["sea"].details == sea.details
    assert all(torch.equal(clean.vectors["sea"].at(layer), sea.at(layer)) for layer in sea.layers)
    assert torch.equal(clean.vectors["v"], vector)
    assert torch.equal(clean.vectors["array"], vector * 2)
    assert torch.equal(clean.vectors["layers"][9], vector * 3)
    clean.steer(12, "sea", 2.0)
    before, steering = dict(clean.vectors), clean.export_steering_spec()
    text, tensors = (folder / "session.json").read_text(), (folder / "session.safetensors").read_bytes()
    saved = json.loads(text)
    changed = bytearray(tensors)
    changed[-1000] ^= 0x10  # one bit of one vector
    spoilt: list[tuple[str, bytes]] = [
        (text[:-40], tensors),
        (text, tensors[:-40]),
        (text, bytes(changed)),
        (json.dumps({**saved, "vectors": {"sea": {"layers": {"12": "vector-none"}}}}), tensors),
        (json.dumps({**saved, "vectors": {"sea": {**saved["vectors"]["sea"], "direction": {}}}}), tensors),
        (json.dumps({**saved, "vectors": 3}), tensors),
    ]
    for described, held in spoilt:
        (folder / "session.json").write_text(described)
        (folder / "session.safetensors").write_bytes(held)
        with pytest.raises(SessionError, match="is damaged"):
            clean.load(folder)
        assert clean.vectors == before
        assert clean.export_steering_spec() == steering
    for name in ("session.json", "lab.zip", "lab.pt", "LAB.GGUF"):
        with pytest.raises(SessionError, match=r"a session is saved as a folder .*, not as \.\w+"):
            clean.save(tmp_path / "new" / name)
    assert not (tmp_path / "new").exists()
    del saved["vectors"]  # as an older version wrote it
    (folder / "session.json").write_text(json.dumps(saved))
    (folder / "session.safetensors").write_bytes(tensors)
    clean.load(folder / "session.json")
    assert isinstance(clean.vectors["sea"], Direction)
