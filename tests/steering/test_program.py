"""Compiling: checked against the model, vectors once each, and a salt that names what a program does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from chatspace_lab import AblationSpec, AddSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec, wire
from chatspace_lab.errors import SteeringError
from chatspace_lab.steering.program import Program, check_layer, compile_spec

V, U = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
EVERYWHERE = [0, -1]


def compiled(spec: SteeringSpec, **limits: int) -> Program:
    program = compile_spec(spec, **{"layer_count": 4, "hidden_size": 2, "max_ops_per_layer": 3, **limits})
    assert program is not None
    return program


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (SteeringSpec.at(4, AddSpec(V)), "layer 4 does not exist: this model has layers 0 to 3"),
        (SteeringSpec.at(999, AddSpec(V)), "layer 999"),
        (SteeringSpec.at(-1, AddSpec(V)), "layer -1"),
        (SteeringSpec.at(1, AddSpec([1.0, 2.0, 3.0])), r"layer 1: AddSpec\.vector has 3 entries.* hidden size is 2"),
        (SteeringSpec.at([0, 2], AddSpec(V), AblationSpec([1.0])), r"layer 0: AblationSpec\.vector has 1 entries"),
        (SteeringSpec.at(2, *[AddSpec(V)] * 4), "layer 2: 4 operations, at most 3 fit; raise max_ops_per_layer"),
        ({2: AddSpec(V)}, "expected a SteeringSpec, got dict"),
        (None, "expected a SteeringSpec, got NoneType"),
    ],
)
def test_specs_that_do_not_fit_the_model(spec: Any, words: str) -> None:
    with pytest.raises(SteeringError, match=words):
        compiled(spec)


@pytest.mark.parametrize("layer", [True, 1.0, "1", None, torch.tensor([1, 2]), torch.tensor(1.5)])
def test_layers_that_are_no_whole_numbers(layer: Any) -> None:
    with pytest.raises(SteeringError, match="whole number"):
        check_layer(layer, 4)


@pytest.mark.parametrize("layer", [3, np.int64(3), torch.tensor(3)])
def test_layers_that_are(layer: Any) -> None:
    assert check_layer(layer, 4) == 3


def test_a_spec_made_in_inference_mode() -> None:
    """There torch does not count the edits of a tensor, so nothing may be kept of it."""
    with torch.inference_mode():
        spec = SteeringSpec.at([0, 1], AddSpec(V), AblationSpec(U))
        first = compiled(spec)
        spec.layers[0].steps[0].vector.mul_(2)
        second = compiled(spec)
    assert first.salt(EVERYWHERE) == compiled(SteeringSpec.at([0, 1], AddSpec(V), AblationSpec(U))).salt(EVERYWHERE)
    assert second.salt(EVERYWHERE) == compiled(spec).salt(EVERYWHERE)
    assert second.salt(EVERYWHERE) == compiled(SteeringSpec.at([0, 1], AddSpec(2 * V), AblationSpec(U))).salt(
        EVERYWHERE
    )


def test_nothing_compiles_to_nothing() -> None:
    assert compile_spec(SteeringSpec.none(), layer_count=4, hidden_size=2, max_ops_per_layer=3) is None


def test_names_are_looked_up_by_a_lab_alone() -> None:
    with pytest.raises(SteeringError, match="names a vector, 'joy'; names are looked up by a lab or a model"):
        compiled(SteeringSpec.at(1, AddSpec("joy", 2.0)))


def test_operations_in_order_with_each_vector_once() -> None:
    spec = SteeringSpec(
        layers={
            3: LayerSteeringSpec(operations=[AblationSpec(U, 0.5), AddSpec(V, 2.0), AblationSpec(3 * U)]),
            0: LayerSteeringSpec(add=AddSpec(V), projection_cap=ProjectionCapSpec(V, max=1.5)),
        }
    )
    program = compiled(spec)
    unit_v, unit_u = V / 5, U / 2
    vectors = list(program.vectors.values())
    assert len(vectors) == 3
    ops = np.frombuffer(program.payload([10, 11, 12]), dtype=wire.OP)
    rows = {10: vectors[0], 11: vectors[1], 12: vectors[2]}
    wanted = [
        (0, wire.ADD, V, 1.0, 0.0),
        (0, wire.CAP, unit_v, -np.inf, 1.5),
        (3, wire.ABLATE, unit_u, 0.5, 0.0),
        (3, wire.ADD, V, 2.0, 0.0),
        (3, wire.ABLATE, unit_u, 0.0, 0.0),
    ]
    assert len(ops) == len(wanted)
    for op, (layer, kind, vector, a, b) in zip(ops, wanted, strict=True):
        assert (op["layer"], op["kind"], op["a"], op["b"]) == (layer, kind, a, b)
        assert torch.allclose(rows[int(op["row"])], vector)
    for placed in ([2, 0, 1], [2, 0, 1], [10, 11, 12]):  # the vectors were moved
        again = np.frombuffer(program.payload(placed), dtype=wire.OP)
        assert again["row"].tolist() == [placed[row - 10] for row in ops["row"].tolist()]
        assert (again[["layer", "kind", "a", "b"]] == ops[["layer", "kind", "a", "b"]]).all()


def test_equal_programs_have_equal_salts() -> None:
    one = compiled(SteeringSpec.at([0, 1], AddSpec(V), AblationSpec(U)))
    other = compiled(SteeringSpec.at([1, 0], AddSpec(V.clone()), AblationSpec(5 * U)))
    assert one.salt(EVERYWHERE) == other.salt(EVERYWHERE)
    assert one.payload([7, 8]) == other.payload([7, 8])


def test_different_programs_have_different_salts() -> None:
    specs = [
        SteeringSpec.at(0, AddSpec(V)),
        SteeringSpec.at(1, AddSpec(V)),
        SteeringSpec.at([0, 1], AddSpec(V)),
        SteeringSpec.at(0, AddSpec(V, 1.0001)),
        SteeringSpec.at(0, AddSpec(V, -1)),
        SteeringSpec.at(0, AddSpec(U)),
        SteeringSpec.at(0, AblationSpec(V)),
        SteeringSpec.at(0, ProjectionCapSpec(V, max=1)),
        SteeringSpec.at(0, ProjectionCapSpec(V, min=1)),
        SteeringSpec.at(0, AddSpec(V), AblationSpec(U)),
        SteeringSpec.at(0, AblationSpec(U), AddSpec(V)),
        SteeringSpec.at(0, AddSpec(V), AddSpec(U)),
        SteeringSpec.at(0, AddSpec(U), AddSpec(V)),
    ]
    salts = {compiled(spec).salt(EVERYWHERE) for spec in specs}
    assert len(salts) == len(specs)
    assert compiled(specs[0]).salt([0, 4]) not in salts  # nor is it the same where it acts on other positions
