"""Rows and the steering that they stand for: both ways, without an engine."""

from __future__ import annotations

import pytest
import torch

from chatspace_lab import AblationSpec, AddSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec
from chatspace_lab.analysis import Direction
from chatspace_lab.errors import RequestError, SteeringError
from chatspace_lab.panels.asked import Asked, Sampling, Turn, layers_to_read
from chatspace_lab.panels.code import code_of
from chatspace_lab.panels.rows import Row, rows_from, rows_of, spec_of
from chatspace_lab.steering.where import Where, as_where

U, V = torch.tensor([3.0, 0.0, 4.0]), torch.tensor([0.0, 2.0, 0.0])
D = Direction("d", {1: U, 2: V})
VECTORS = {"u": U, "v": V, "d": D}
ROWS = [
    Row("r1", "u", "add", (1, 2), scale=2.0),
    Row("r2", "v", "cap", (2,), min=-1.0, max=None),
    Row("r3", "d", "ablate", (1, 2), scale=0.5),
    Row("r4", "v", "add", (0,), scale=9.0, muted=True),
    Row("r5", "v", "add", ()),
    Row("r6", "v", "cap", (0,)),
]


def test_a_spec_has_the_operations_in_the_order_of_the_rows() -> None:
    spec = spec_of(ROWS, VECTORS, "answer")
    unit_v = V / 2
    assert spec == SteeringSpec(
        {
            1: LayerSteeringSpec(operations=[AddSpec(U, 2.0), AblationSpec(D.at(1), 0.5)]),
            2: LayerSteeringSpec(
                operations=[AddSpec(U, 2.0), ProjectionCapSpec(unit_v, -1.0), AblationSpec(D.at(2), 0.5)]
            ),
        },
        where="answer",
    )
    assert not spec_of(ROWS[3:], VECTORS)


def test_rows_come_back_from_their_spec_unchanged() -> None:
    rows, new = rows_of(spec_of(ROWS, VECTORS), ROWS, VECTORS)
    assert rows == ROWS
    assert new == {}


def test_a_cell_that_steers_changes_adds_and_removes_rows() -> None:
    spec = spec_of(ROWS[:1], VECTORS)
    spec = spec.with_layer(5, LayerSteeringSpec(add=AddSpec(U, 2.0)))
    rows, _ = rows_of(spec, ROWS, VECTORS)
    assert rows[0] == Row("r1", "u", "add", (1, 2, 5), scale=2.0)
    assert [row.id for row in rows] == ["r1", "r4", "r5", "r6"]  # what was cleared is gone, what does not act stays
    rows, new = rows_of(
        SteeringSpec.at([3, 4], AddSpec([1.0, 1.0, 1.0], 7.0), ProjectionCapSpec(V, max=2.0)), [], VECTORS
    )
    assert rows == [Row("r1", "vector 1", "add", (3, 4), scale=7.0), Row("r2", "v", "cap", (3, 4), max=2.0)]
    assert list(new) == ["vector 1"]
    assert torch.equal(new["vector 1"], torch.ones(3))


def test_one_dose_at_several_layers_is_one_row_and_moves_as_one() -> None:
    spec = SteeringSpec({1: LayerSteeringSpec(add=AddSpec(U, 2.0)), 2: LayerSteeringSpec(add=AddSpec(U, 4.0))})
    [row], _ = rows_of(spec, [], VECTORS)
    assert (row.layers, row.scale) == ((1, 2), 3.0)
    assert [row.scale_at(layer) for layer in (1, 2)] == [2.0, 4.0]
    assert [op.scale for _, op in spec_of([row.edited({"scale": 6.0})], VECTORS)] == [4.0, 8.0]
    assert spec_of([row], VECTORS) == spec_of(rows_from([row.plain()]), VECTORS)


def test_a_vector_that_is_added_twice_at_a_layer_is_two_rows() -> None:
    spec = SteeringSpec.at(1, AddSpec(U, 1.0), AddSpec(U, 2.0))
    rows, _ = rows_of(spec, [], VECTORS)
    assert [(row.scale, row.layers) for row in rows] == [(1.0, (1,)), (2.0, (1,))]
    assert spec_of(rows, VECTORS) == spec


def test_scales_of_both_signs_are_two_rows() -> None:
    spec = SteeringSpec({1: LayerSteeringSpec(add=AddSpec(U, 2.0)), 2: LayerSteeringSpec(add=AddSpec(U, -2.0))})
    rows, _ = rows_of(spec, [], VECTORS)
    assert sorted((row.scale, row.layers) for row in rows) == [(-2.0, (2,)), (2.0, (1,))]


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ({"colour": 1}, "a row has no colour"),
        ({"scale": "loud"}, "scale: expected a number"),
        ({"scale": float("nan")}, "finite"),
        ({"min": 3.0, "max": 1.0}, "min 3 is greater than max 1"),
        ({"operation": "multiply"}, "operation is one of add, cap, ablate"),
        ({"layers": ["x"]}, "a row's layer must be a whole number"),
        ({"layers": None}, "a row's layer must be a whole number"),
        ({"muted": "no"}, "muted is True or False"),
    ],
)
def test_an_edit_that_cannot_be_used_is_named(patch: dict[str, object], said: str) -> None:
    with pytest.raises((RequestError, SteeringError), match=said):
        Row("r1", "u").edited(patch)


def test_rows_are_read_with_one_layer_or_several() -> None:
    assert [row.layers for row in rows_from([{"vector": "u", "layers": 3}, {"vector": "u", "layers": [5, 4]}])] == [
        (3,), (4, 5),
    ]  # fmt: skip
    with pytest.raises(RequestError, match="factors is a dict of layer to number"):
        rows_from([{"vector": "u", "layers": 3, "factors": {"x": 1}}])


def test_a_layer_without_a_vector_and_an_unknown_vector_are_named() -> None:
    with pytest.raises(RequestError, match="'d' has no vector for layer 7"):
        spec_of([Row("r1", "d", layers=(7,), scale=1.0)], VECTORS)
    with pytest.raises(SteeringError, match="there is no vector 'w', only d, u, v"):
        spec_of([Row("r1", "w", layers=(7,), scale=1.0)], VECTORS)


def test_another_operation_starts_without_the_old_numbers() -> None:
    row = Row("r1", "u", "add", (1,), scale=5.0).edited({"operation": "cap"})
    assert (row.scale, row.min, row.max, row.layers) == (0.0, None, None, (1,))


def test_layers_that_are_read() -> None:
    assert layers_to_read(30, [3]) == tuple(range(30))
    deep = layers_to_read(80, [33])
    assert {0, 33, 79} <= set(deep)
    assert len(deep) <= 42


def test_sampling_is_checked() -> None:
    assert Sampling().edited({"seed": 3, "temperature": 1}).plain() == {"seed": 3, "temperature": 1.0, "max_tokens": 64}
    for patch in ({"seed": 1.5}, {"max_tokens": 0}, {"temperature": "hot"}, {"top": 1}, {"seed": True}):
        with pytest.raises(RequestError):
            Sampling().edited(patch)


def test_messages_of_a_side_are_its_own() -> None:
    asked = Asked(1, (), SteeringSpec.none(), Where(), (Turn("a", "b", "s"), Turn("c")), "sys", Sampling(), (0,))
    assert [(m["role"], m["content"]) for m in asked.messages("steered")] == [
        ("system", "sys"), ("user", "a"), ("assistant", "s"), ("user", "c"),
    ]  # fmt: skip
    assert asked.messages("baseline")[2]["content"] == "b"


def test_code_runs_and_builds_the_same_spec() -> None:
    for where in ("all", "prompt", Where.messages(0, -1), Where.span(2, 9).without_special_tokens()):
        rows = tuple(ROWS)
        spec = spec_of(rows, VECTORS, where)
        asked = Asked(1, rows, spec, as_where(where), (Turn('say "hi"\n'),), None, Sampling(), (0,), VECTORS)

        class Lab:
            vectors = VECTORS

            def chat(self, messages: object, **options: object) -> list[object]:
                return [(messages, options)]

        names: dict[str, object] = {"lab": Lab()}
        exec(code_of(asked, "lab"), names)
        assert names["spec"] == spec
        assert names["answer"] == (
            [{"role": "user", "content": 'say "hi"\n'}],
            {"steering": spec, "seed": 7, "temperature": 0.0, "max_tokens": 64},
        )
