"""Specs: frozen, checked when they are made, and safe from later edits."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from chatspace_lab import AblationSpec, AddSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec
from chatspace_lab.errors import SteeringError

V = torch.tensor([3.0, 0.0, 4.0])
MAKERS: list[Callable[[Any], Any]] = [AddSpec, lambda v: ProjectionCapSpec(v, max=1.0), AblationSpec]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("vector", "words"),
    [
        (torch.tensor([1.0, math.nan]), "1 of 2 entries are NaN or infinite"),
        ([1.0, math.inf, math.nan], "2 of 3 entries"),
        (np.array([1e300, 0.0]), "1 of 2 entries"),
        ([], r"shape \[hidden_size\], got shape \[0\]"),
        (torch.ones(2, 3), r"got shape \[2, 3\]"),
        (torch.tensor(1.0), r"got shape \[\]"),
        (b"vector", "vector of numbers"),
        (None, "vector"),
        ([object()], "vector of numbers"),
        ([True, False], "real numbers"),
        (["1", "2"], "vector of numbers"),
        ([torch.tensor(1.0, requires_grad=True)], "vector of numbers"),
        (torch.ones(3, device="meta"), "dense vector, got torch.strided on device meta"),
        (torch.ones(3).to_sparse(), "dense vector, got torch.sparse_coo"),
        ([1j, 2j], "real numbers"),
    ],
)
def test_vectors_that_cannot_be_used(make: Callable[[Any], Any], vector: Any, words: str) -> None:
    with pytest.raises(SteeringError, match=words) as caught:
        make(vector)
    assert "Spec.vector" in str(caught.value)


@pytest.mark.parametrize(
    "vector",
    [
        [3.0, 0.0, 4.0],
        (3, 0, 4),
        np.array([3.0, 0.0, 4.0]),
        np.array([3, 0, 4], dtype=np.int16),
        np.array([3, 0, 4], dtype=">f8"),
        np.array([3, 0, 4], dtype=np.longdouble),
        np.array([4.0, 0.0, 3.0], dtype=np.float32)[::-1],
        V.double(),
        V.to(torch.bfloat16),
        V.to(torch.int64),
        V[None],
        V[:, None],
        torch.stack([V, V], dim=1)[:, 0],
        V.clone().requires_grad_(),
    ],
)
def test_vectors_that_can(vector: Any) -> None:
    stored = AddSpec(vector).vector
    assert torch.equal(stored, V)
    assert (stored.dtype, stored.device.type, stored.requires_grad) == (torch.float32, "cpu", False)
    assert stored.is_contiguous()
    assert torch.equal(AblationSpec(vector).vector, V / 5)


def test_a_vector_that_is_too_small_for_float32_does_not_become_zero() -> None:
    for make in (AddSpec, AblationSpec):
        for vector in (np.full(4, 1e-60), torch.full((4,), 1e-60, dtype=torch.float64), [1e-60, 0.0]):
            with pytest.raises(SteeringError, match="too small for float32"):
                make(vector)
    assert AddSpec(np.full(4, 1e-45)).vector.all()  # float32 holds it, with few digits
    assert not AddSpec(np.zeros(4)).vector.any()


def test_what_is_stored() -> None:
    """AddSpec keeps the vector as given; directions are stored at unit length."""
    assert torch.equal(AddSpec(V, 2).vector, V)
    assert AddSpec(V, 2).scale == 2.0
    for spec in (ProjectionCapSpec(100 * V, min=-1), AblationSpec(1e-30 * V)):
        assert torch.allclose(spec.vector, V / 5)
        assert float(spec.vector.norm()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.filterwarnings("error")
def test_an_array_that_must_not_be_written() -> None:
    array = V.numpy().copy()
    array.flags.writeable = False
    assert torch.equal(AddSpec(array).vector, V)


def test_a_later_edit_changes_nothing() -> None:
    mine = V.clone()
    specs = [make(mine) for make in MAKERS]
    before = copy.deepcopy([spec.vector for spec in specs])
    mine.fill_(7.0)
    assert all(torch.equal(spec.vector, vector) for spec, vector in zip(specs, before, strict=True))
    array = np.array([1.0, 2.0], dtype=np.float32)
    spec = AddSpec(array)
    array[:] = 0
    assert torch.equal(spec.vector, torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("make", MAKERS[1:])
def test_a_zero_vector_has_no_direction(make: Callable[[Any], Any]) -> None:
    with pytest.raises(SteeringError, match="the vector is zero"):
        make(torch.zeros(3))


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e39, 10**400, "2", None, True, [1.0], 1j])
def test_numbers_that_cannot_be_used(number: Any) -> None:
    with pytest.raises(SteeringError, match=r"AddSpec\.scale"):
        AddSpec(V, number)
    with pytest.raises(SteeringError, match=r"AblationSpec\.scale"):
        AblationSpec(V, number)
    if number is not None:
        with pytest.raises(SteeringError, match=r"ProjectionCapSpec\.min"):
            ProjectionCapSpec(V, min=number)


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.int64(2), torch.tensor(2.0), np.array(2)])
def test_numbers_that_can(number: Any) -> None:
    assert AddSpec(V, number).scale == 2.0
    assert type(AddSpec(V, number).scale) is float


def test_more_than_a_stream_can_hold() -> None:
    for vector, scale in ((V, 1e30), (2e37 * V, -1.0), (1e20 * V, 1e15)):
        with pytest.raises(SteeringError, match=r"AddSpec: scale · vector reaches .*, at most 1e\+30 can be added"):
            AddSpec(vector, scale)
    assert AddSpec(1e-30 * V, 1e38).scale == 1e38


def test_bounds() -> None:
    with pytest.raises(SteeringError, match=r"min 2\.0 is greater than max 1\.0"):
        ProjectionCapSpec(V, min=2.0, max=1.0)
    with pytest.raises(SteeringError, match="without a bound"):
        ProjectionCapSpec(V)
    assert (ProjectionCapSpec(V, min=1, max=1).min, ProjectionCapSpec(V, max=3).min) == (1.0, None)


def test_a_layer_spec() -> None:
    add, cap, ablate = AddSpec(V), ProjectionCapSpec(V, max=1), AblationSpec(V)
    assert LayerSteeringSpec(ablation=ablate, add=add, projection_cap=cap).steps == (add, cap, ablate)
    assert LayerSteeringSpec(operations=[ablate, add, add]).steps == (ablate, add, add)
    with pytest.raises(SteeringError, match="empty"):
        LayerSteeringSpec()
    with pytest.raises(SteeringError, match="empty"):
        LayerSteeringSpec(operations=[])
    with pytest.raises(SteeringError, match="not both"):
        LayerSteeringSpec(add=add, operations=[cap])
    with pytest.raises(SteeringError, match=r"LayerSteeringSpec\.add: expected AddSpec or None, got AblationSpec"):
        LayerSteeringSpec(add=ablate)  # type: ignore[arg-type]
    with pytest.raises(SteeringError, match=r"operations: expected a list of operations, got AddSpec"):
        LayerSteeringSpec(operations=add)  # type: ignore[arg-type]
    with pytest.raises(SteeringError, match=r"operations\[1\]"):
        LayerSteeringSpec(operations=[add, V])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        LayerSteeringSpec(addd=add)  # type: ignore[call-arg]


def test_replacing_and_removing_operations() -> None:
    add, other, cap, ablate = AddSpec(V), AddSpec(V, 2), ProjectionCapSpec(V, max=1), AblationSpec(V)
    spec = LayerSteeringSpec(add=add)
    spec = spec.with_operation(ablate).with_operation(cap).with_operation(other)
    assert spec == LayerSteeringSpec(add=other, projection_cap=cap, ablation=ablate)
    assert spec.without(ProjectionCapSpec) == LayerSteeringSpec(add=other, ablation=ablate)
    assert LayerSteeringSpec(add=add).without(AddSpec) is None
    assert LayerSteeringSpec(operations=[ablate, add, ablate]).without(AblationSpec) == LayerSteeringSpec(add=add)


def test_a_steering_spec() -> None:
    layer = LayerSteeringSpec(add=AddSpec(V))
    spec = SteeringSpec(layers={np.int64(4): layer, 2: layer})
    assert list(spec.layers) == [2, 4]
    assert all(type(index) is int for index in spec.layers)
    assert [index for index, _ in spec] == [2, 4]
    for layers, words in (
        ({}, "empty"),
        ([layer], "expected a dict"),
        ({"4": layer}, "whole number"),
        ({True: layer}, "whole number"),
        ({4.0: layer}, "whole number"),
        ({4: AddSpec(V)}, r"layers\[4\]: expected LayerSteeringSpec, got AddSpec"),
        ({4: None}, "expected LayerSteeringSpec"),
    ):
        with pytest.raises(SteeringError, match=words):
            SteeringSpec(layers=layers)  # type: ignore[arg-type]
    with pytest.raises(SteeringError, match="empty"):
        SteeringSpec()
    with pytest.raises(TypeError):
        SteeringSpec(layer={4: layer})  # type: ignore[call-arg]


def test_at() -> None:
    add, ablate = AddSpec(V), AblationSpec(V)
    assert SteeringSpec.at(3, add) == SteeringSpec(layers={3: LayerSteeringSpec(add=add)})
    assert SteeringSpec.at([3, 1], ablate, add).layers[1] == LayerSteeringSpec(operations=[ablate, add])
    assert SteeringSpec.at(np.int64(3), add) == SteeringSpec.at(3, add)
    assert SteeringSpec.at(range(2), add) == SteeringSpec.at([0, 1], add)
    with pytest.raises(SteeringError, match="at least one operation"):
        SteeringSpec.at(3)
    with pytest.raises(SteeringError, match="whole number"):
        SteeringSpec.at("3", add)  # type: ignore[arg-type]
    with pytest.raises(SteeringError, match="empty"):
        SteeringSpec.at([], add)


def test_a_repr_has_no_vector_in_full() -> None:
    add, cap = AddSpec(torch.ones(400), 0.5), ProjectionCapSpec(torch.ones(400), max=2.0)
    assert repr(add) == "AddSpec(vector=<400 numbers, length 20>, scale=0.5)"
    assert repr(AddSpec("joy")) == "AddSpec(vector='joy', scale=1.0)"
    assert repr(cap) == "ProjectionCapSpec(vector=<400 numbers, length 1>, max=2.0)"
    assert repr(SteeringSpec.at(3, add)) == f"SteeringSpec({{3: LayerSteeringSpec(add={add!r})}})"
    both = SteeringSpec.at(3, cap, add, where="answer")
    assert repr(both).startswith(f"SteeringSpec({{3: LayerSteeringSpec(operations=({cap!r}, {add!r}))}}, where=Where(")
    assert repr(SteeringSpec.none()) == "SteeringSpec.none()"


def test_none_is_no_steering() -> None:
    assert not SteeringSpec.none()
    assert SteeringSpec.none() == SteeringSpec.none()
    assert SteeringSpec.none() != SteeringSpec.at(0, AddSpec(V))
    assert list(SteeringSpec.none()) == []
    assert SteeringSpec.at(0, AddSpec(V)).with_layer(0, None) == SteeringSpec.none()
    assert SteeringSpec.none().with_layer(1, LayerSteeringSpec(add=AddSpec(V))) == SteeringSpec.at(1, AddSpec(V))


def test_frozen() -> None:
    spec = SteeringSpec.at(0, AddSpec(V))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.layers = {}  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.layers[0].add.scale = 3.0  # type: ignore[union-attr, misc]
    with pytest.raises(TypeError):
        spec.layers[1] = spec.layers[0]  # type: ignore[index]
    given = {0: LayerSteeringSpec(add=AddSpec(V))}
    spec = SteeringSpec(layers=given)
    given.clear()
    assert list(spec.layers) == [0]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec))])
def test_equal_by_value_and_copyable(copied: Callable[[Any], Any]) -> None:
    for spec in (
        SteeringSpec.none(),
        SteeringSpec.at([1, 2], AddSpec(V), AblationSpec(V)),
        SteeringSpec.at(1, AblationSpec(V), AddSpec(V)),
    ):
        assert copied(spec) == spec
    assert AddSpec(V) == AddSpec(V.clone())
    assert AddSpec(V) != AddSpec(V, 2.0)
    assert AddSpec(V) != AddSpec(2 * V)
    assert AddSpec(V) != AblationSpec(V)
    assert AddSpec(V) != AddSpec(torch.ones(2))
