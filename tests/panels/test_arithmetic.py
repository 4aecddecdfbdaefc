"""Doses, caps, buffers, tokens and sweeps: pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from chatspace_lab.analysis import Direction
from chatspace_lab.errors import RequestError
from chatspace_lab.panels.answers import for_layers
from chatspace_lab.panels.buffers import MAX_BYTES, pack, tokens_that_fit, unpack
from chatspace_lab.panels.doses import (
    at_dose,
    at_layers,
    cap_range,
    clipped,
    dose_per_scale,
    doses_of,
    first_difference,
)
from chatspace_lab.panels.pieces import Pieces
from chatspace_lab.panels.rows import Row
from chatspace_lab.panels.sweep import cell_of
from chatspace_lab.panels.vectors import expression_of, layers_with, lines, snapshot, variables

V = torch.tensor([3.0, 4.0])


def test_a_dose_is_the_mean_over_the_layers() -> None:
    row = Row("r1", "v", "add", (1, 2))
    assert dose_per_scale(row, {"v": V}, {1: 10.0, 2: 20.0}) == pytest.approx((0.5 + 0.25) / 2)
    factored = Row("r1", "v", "add", (1, 2), factors={1: 1.0, 2: 2.0})
    assert dose_per_scale(factored, {"v": V}, {1: 10.0, 2: 20.0}) == pytest.approx(0.5)
    assert dose_per_scale(row, {"v": V}, {1: 10.0}) is None
    assert dose_per_scale(row, {}, {1: 10.0, 2: 20.0}) is None
    assert dose_per_scale(row, {"v": V * 0}, {1: 10.0, 2: 20.0}) is None
    assert dose_per_scale(Row("r1", "v", "cap", (1,)), {"v": V}, {1: 10.0}) is None


def test_a_row_keeps_its_dose_at_other_layers_and_its_raw_scale_follows() -> None:
    norms, vectors = {2: 50.0, 14: 100.0, 16: 200.0, 29: 1000.0}, {"v": V}  # |V| = 5
    row = at_dose(Row("r1", "v", "add", (16,)), 0.35, vectors, norms)
    assert (row.scale, row.factors) == (pytest.approx(14.0), {})
    more = at_layers(row.edited({"layers": [2, 14, 16]}), row, vectors, norms)
    assert doses_of(more, vectors, norms) == pytest.approx({2: 0.35, 14: 0.35, 16: 0.35})
    assert [more.scale_at(layer) for layer in (2, 14, 16)] == pytest.approx([3.5, 7.0, 14.0])
    assert more.scale == pytest.approx(sum([3.5, 7.0, 14.0]) / 3)
    fewer = at_layers(more.edited({"layers": [2, 29]}), more, vectors, norms)
    assert doses_of(fewer, vectors, norms) == pytest.approx({2: 0.35, 29: 0.35})
    assert doses_of(at_dose(fewer, -0.1, vectors, norms), vectors, norms) == pytest.approx({2: -0.1, 29: -0.1})
    still = at_dose(more, 0.0, vectors, norms)
    assert doses_of(at_dose(still, 0.2, vectors, norms), vectors, norms) == pytest.approx({2: 0.2, 14: 0.2, 16: 0.2})
    raw = Row("r1", "v", "add", (14, 16), scale=4.0)  # a cell's: one raw scale, doses 0.2 and 0.1
    added = at_layers(raw.edited({"layers": [2, 14, 16]}), raw, vectors, norms)
    assert doses_of(added, vectors, norms) == pytest.approx({2: 0.15, 14: 0.2, 16: 0.1})
    unknown = at_layers(row.edited({"layers": [3, 16]}), row, vectors, norms)
    assert (unknown.scale, unknown.factors) == (row.scale, {})
    with pytest.raises(RequestError, match="a dose needs an addition at layers whose residual norm is known"):
        at_dose(unknown, 0.1, vectors, norms)


def test_a_cap_counts_tokens_that_it_moves_at_any_layer() -> None:
    seen = np.array([[1.0, -5.0, 2.0, 0.0], [0.0, 0.0, 9.0, 0.0]])
    assert clipped(seen, -4.0, 8.0) == (2, 4)
    assert clipped(seen, None, 1.5) == (1, 4)
    assert clipped(seen, None, None) == (0, 4)
    assert cap_range(seen) == (-20.0, 20.0)  # 9 · 1.25, to one digit upwards
    assert cap_range(np.zeros((1, 0))) == (-1.0, 1.0)
    seen[0, 0] = np.nan
    seen[1, 1] = np.inf
    assert cap_range(seen) == (-20.0, 20.0)
    assert clipped(seen, None, 8.0) == (2, 4)


def test_answers_part_at_the_first_different_token() -> None:
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) is None


def test_buffers_keep_float32_whatever_stands_beside_it() -> None:
    values = np.array([[25057.0, 0.01, 1e-30, 3e38], [0.0, np.nan, -np.inf, np.inf], [1e300, -1.5, 1e-3, 7.0]])
    back = unpack(pack(values))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(back, values.astype("float32"))
    assert unpack(pack(np.zeros((2, 0)))).shape == (2, 0)
    assert tokens_that_fit(30, 100) == 100
    assert tokens_that_fit(40, 10**6) * 40 * 4 <= MAX_BYTES
    assert tokens_that_fit(40, 10**6, 60_000) * 40 * 4 <= MAX_BYTES - 60_000
    assert tokens_that_fit(10, 10**6, 10**6) == 500, "a few are always kept"


def test_a_direction_is_read_at_layers_that_it_lacks_along_another() -> None:
    direction = Direction("d", {2: V, 5: -V})
    laid = for_layers(direction, (1, 2, 5))
    assert sorted(laid) == [1, 2, 5]
    assert torch.equal(laid[1], direction.at(2))
    assert torch.equal(laid[5], direction.at(5))
    assert for_layers(V, (1, 2)) is V


def test_pieces_are_the_text(demo_model_path: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)
    pieces = Pieces(tokenizer)
    text = "Flüsse 🌊 and <think>\n\n 𝔘 &amp;"
    ids = tokenizer(text)["input_ids"]
    assert "".join(pieces.of(ids)) == text
    assert len(pieces.of(ids)) == len(ids)
    end = tokenizer.eos_token_id
    assert pieces.of([*ids, end])[-1] == tokenizer.eos_token
    assert pieces.of([*ids, end], special=False)[-1] == ""


def test_a_snapshot_does_not_follow_later_edits() -> None:
    vector = torch.ones(2)
    kept, kept_by_layer = snapshot(vector, 2, "v"), snapshot({3: vector}, 2, "v")
    vector += 5
    assert kept.tolist() == kept_by_layer[3].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="v has 2 entries, this model's hidden_size is 3"):
        snapshot(vector, 3, "v")
    assert lines(" a \n\n b") == ["a", "b"]


def test_variables_that_are_vectors_are_offered_whatever_else_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shut(dict[int, torch.Tensor]):
        def __iter__(self) -> Iterator[int]:
            raise RuntimeError("the file is closed")

    array = V.numpy()
    good = {
        "half": V.half(), "array": array, "backwards": array[::-1], "numbers": [3.0, 4.0], "row": V[None],
        "layers": {np.int64(2): array}, "direction": Direction("d", {1: V}), "grown": torch.nn.Parameter(V),
    }  # fmt: skip
    other = {
        "_own": V, "long": torch.ones(3), "zero": 0 * V, "words": ["a", "b"], "texts": {"2": V},
        "mixed": {2: V, "a": V}, "shut": Shut({2: V}), "nowhere": torch.empty(2, device="meta"),
        "unset": torch.nn.UninitializedParameter(), "text": "ab", "kind": Direction, "nothing": None, "empty": {},
    }  # fmt: skip
    shown = {"Out": {1: V}}
    shell = SimpleNamespace(user_ns={**good, **other, **shown}, user_ns_hidden=shown)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert list(variables(2)) == list(good)
    assert [layers_with(vector) for vector in variables(2).values()] == [None] * 5 + [[2], [1], None]
    assert expression_of("half", {"half": V}, "lab") == "half"
    assert expression_of("array", {"array": 2 * V}, "lab") == "lab.vectors['array']"
    for name in other.keys() - {"_own"}:  # the name has come to mean something else
        assert expression_of(name, {name: V}, "lab") == f"lab.vectors[{name!r}]"


def test_a_sweeps_cell_says_what_changed_and_whether_it_holds_together() -> None:
    row = {
        "layer": 3,
        "scale": 2.0,
        "dose": 0.4999,
        "text": "t",
        "relative": 0.5,
        "perplexity": 9.0,
        "repetition": 0.1,
        "tokens": 4,
    }
    usual = {"relative": 0.2, "perplexity": 3.0}
    cell = cell_of(row, row["dose"], [0.25, 0.5], usual)
    assert (cell["dose"], cell["effect"], cell["broken"]) == (0.5, pytest.approx(0.3), False)
    read = {**row, "projection": 90.0, "relative": 0.75, "text_projection": 7.0}
    unsteered = {**usual, "relative": 0.25, "text_projection": 1.0, "spread": 4.0}
    cell = cell_of(read, 0.5, [0.5], unsteered)
    assert (cell["effect"], cell["inside"]) == (1.5, 0.5), "of the text, not of what was added"
    assert cell_of({**row, "text": "x" * 9}, 0.5, [0.5], usual, 4)["text"].startswith("xxxx … (the whole")
    assert cell_of({**row, "text": "x" * 4}, 0.5, [0.5], usual, 4)["text"] == "xxxx"
    assert cell_of({**row, "perplexity": 12.0}, 0.5, [0.5], usual)["broken"]
    assert cell_of({**row, "repetition": 0.5}, 0.5, [0.5], usual)["broken"]
    empty = cell_of({**row, "relative": math.nan, "perplexity": math.nan, "repetition": math.nan}, 0.5, [0.5], usual)
    assert (empty["effect"], empty["perplexity"], empty["broken"]) == (None, None, False)
