"""What a user says about steering: frozen, checked when made, independent of any engine.

The operations act on the whole residual stream x after a decoder block (TransformerLens: ``resid_post``), in float32:

=============  ==========================================  ==============================
operation      effect on x                                 source of the method
=============  ==========================================  ==============================
add            ``x + scale·v``                             activation addition, Turner et al. 2023, arXiv:2308.10248
projection cap ``x + (clip(x·u, min, max) − x·u)·u``       projection clamping; u of unit length
ablation       ``x + (scale − 1)(x·u)·u``                  directional ablation (scale 0), Arditi et al. 2024,
                                                           arXiv:2406.11717
=============  ==========================================  ==============================

None moves x by more than 1e30, and in float16 a steered x stays within 6e4: a stream that overflows would spoil other
requests (:data:`chatspace_lab.wire.LARGEST`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from chatspace_lab.errors import SteeringError, kind_of
from chatspace_lab.steering.vectors import as_direction, as_index, as_list, as_number, as_vector
from chatspace_lab.steering.where import Where, as_where
from chatspace_lab.wire import LARGEST

HOW_TO_SPECIFY = "write SteeringSpec.at(layer, AddSpec(vector, scale))"


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return bool(left == right)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"<{value.numel()} numbers, length {float(value.norm()):.3g}>"
    return repr(value)


def _is_empty(value: Any) -> bool:
    return isinstance(value, tuple) and not value


class _ByValue:
    """Equality over dataclass fields that may be tensors, and a repr that has no vector in full."""

    __dataclass_fields__: dict[str, Any]
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)

    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        given = [f"{name}={_shown(value)}" for name, value in values if value is not None and not _is_empty(value)]
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, eq=False, repr=False)
class AddSpec(_ByValue):
    """Add ``scale · vector`` to the residual stream.

    Attributes
    ----------
    vector
        ``[hidden_size]``, kept as given (not normalised) in a float32 CPU copy: editing the original changes nothing.
        In a spec for a lab or a model, a name in its ``vectors`` will do, for every operation: the vector is looked up
        when the spec is used.
    scale
        Factor, in units of the vector's own length.
    """

    vector: torch.Tensor
    scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", as_number(self.scale, "AddSpec.scale"))
        if isinstance(self.vector, str):
            return
        object.__setattr__(self, "vector", as_vector(self.vector, "AddSpec.vector"))
        reach = abs(self.scale) * float(self.vector.abs().max())
        if reach > LARGEST:
            raise SteeringError(f"AddSpec: scale · vector reaches {reach:.3g}, at most {LARGEST:g} can be added")


@dataclass(frozen=True, eq=False, repr=False)
class ProjectionCapSpec(_ByValue):
    """Clamp the component along a direction to ``[min, max]``; the orthogonal part does not move.

    Attributes
    ----------
    vector
        ``[hidden_size]``. Stored at unit length, whatever length was given.
    min, max
        Bounds of ``x · vector`` in residual-stream units; None is no bound. At least one is needed.
    """

    vector: torch.Tensor
    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.vector, str):
            object.__setattr__(self, "vector", as_direction(self.vector, "ProjectionCapSpec.vector"))
        for name in ("min", "max"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_number(getattr(self, name), f"ProjectionCapSpec.{name}"))
        if self.min is None and self.max is None:
            raise SteeringError("ProjectionCapSpec: give min, max or both; without a bound nothing is capped")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise SteeringError(f"ProjectionCapSpec: min {self.min} is greater than max {self.max}")


@dataclass(frozen=True, eq=False, repr=False)
class AblationSpec(_ByValue):
    """Multiply the component along a direction by ``scale``.

    Attributes
    ----------
    vector
        ``[hidden_size]``. Stored at unit length, whatever length was given.
    scale
        0 removes the component, 1 leaves it, 2 doubles it, −1 reflects it.
    """

    vector: torch.Tensor
    scale: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.vector, str):
            object.__setattr__(self, "vector", as_direction(self.vector, "AblationSpec.vector"))
        object.__setattr__(self, "scale", as_number(self.scale, "AblationSpec.scale"))


Operation = AddSpec | ProjectionCapSpec | AblationSpec


def _apart(operation: Operation) -> Any:
    """Return an equal operation with a vector of its own."""
    found = copy.copy(operation)
    vector = operation.vector
    object.__setattr__(found, "vector", vector.clone() if isinstance(vector, torch.Tensor) else vector)
    return found


@dataclass(frozen=True, eq=False, repr=False)
class LayerSteeringSpec(_ByValue):
    """The operations on one layer, in the order in which they act.

    ``add``, ``projection_cap`` and ``ablation`` act in that order. ``operations`` gives any number in any order and
    excludes the other three.

    Attributes
    ----------
    add, projection_cap, ablation
        At most one operation of each kind.
    operations
        As given, in the order in which they act; empty when the other three are used. :attr:`steps` has both cases.

    Raises
    ------
    SteeringError
        If there is no operation, or both forms are used.
    """

    add: AddSpec | None = None
    projection_cap: ProjectionCapSpec | None = None
    ablation: AblationSpec | None = None
    operations: Sequence[Operation] = ()

    def __post_init__(self) -> None:
        named: list[Operation] = []
        for name, kind in (("add", AddSpec), ("projection_cap", ProjectionCapSpec), ("ablation", AblationSpec)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise SteeringError(
                    f"LayerSteeringSpec.{name}: expected {kind.__name__} or None, got {kind_of(value, kind)}"
                )
            if value is not None:
                named.append(value)
        if not isinstance(self.operations, Iterable):
            raise SteeringError(
                f"LayerSteeringSpec.operations: expected a list of operations, got {type(self.operations).__name__}"
            )
        given = tuple(self.operations)
        for index, operation in enumerate(given):
            if not isinstance(operation, Operation):
                raise SteeringError(
                    f"LayerSteeringSpec.operations[{index}]: expected AddSpec, ProjectionCapSpec or AblationSpec, "
                    f"got {kind_of(operation, AddSpec, ProjectionCapSpec, AblationSpec)}; "
                    f"write AddSpec(vector, scale)"
                )
        if named and given:
            raise SteeringError("LayerSteeringSpec: use add/projection_cap/ablation or operations, not both")
        if not named and not given:
            raise SteeringError("LayerSteeringSpec is empty: give at least one operation")
        object.__setattr__(self, "operations", given)

    @property
    def steps(self) -> tuple[Operation, ...]:
        """All operations in the order in which they act."""
        named = (self.add, self.projection_cap, self.ablation)
        return tuple(self.operations) or tuple(op for op in named if op is not None)

    def apart(self) -> LayerSteeringSpec:
        """Return an equal spec with vectors of its own."""
        named = {"add": self.add, "projection_cap": self.projection_cap, "ablation": self.ablation}
        copies = {name: _apart(each) for name, each in named.items() if each is not None}
        return replace(self, operations=tuple(map(_apart, self.operations)), **copies)

    def without(self, kind: type) -> LayerSteeringSpec | None:
        """Return this spec without its operations of one kind; None if none is left."""
        left = tuple(op for op in self.steps if not isinstance(op, kind))
        return _layer_spec(left)

    def with_operation(self, operation: Operation) -> LayerSteeringSpec:
        """Return this spec with ``operation`` in place of those of its kind (in add, cap, ablate order)."""
        others = [op for op in self.steps if not isinstance(op, type(operation))]
        order = (AddSpec, ProjectionCapSpec, AblationSpec)
        merged = sorted([*others, operation], key=lambda op: order.index(type(op)))
        spec = _layer_spec(tuple(merged))
        assert spec is not None
        return spec


def _layer_spec(operations: tuple[Operation, ...]) -> LayerSteeringSpec | None:
    """Build a layer spec, with the named fields filled where the operations allow it."""
    if not operations:
        return None
    names = {AddSpec: "add", ProjectionCapSpec: "projection_cap", AblationSpec: "ablation"}
    kinds = [type(op) for op in operations]
    ordered = [kind for kind in names if kind in kinds]
    if kinds == ordered:
        return LayerSteeringSpec(**{names[type(op)]: op for op in operations})  # type: ignore[arg-type]
    return LayerSteeringSpec(operations=operations)


@dataclass(frozen=True, eq=False, repr=False)
class SteeringSpec(_ByValue):
    """What is done at which layers.

    ``SteeringSpec.none()`` says "no steering" explicitly: to run one request unsteered while the model is steered, or
    to clear. A spec without layers that is written any other way is an error, since it is nearly always a mistake.

    Attributes
    ----------
    layers
        Layer index (0-based; the output of that decoder block) to :class:`LayerSteeringSpec`. Read-only.
    where
        Which positions are steered: ``"all"``, ``"prompt"``, ``"answer"``, or a :class:`Where` for some messages, a
        span, or all but special tokens.
    """

    layers: Mapping[int, LayerSteeringSpec] = field(default_factory=dict)
    where: Where | str = "all"

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Mapping):
            raise SteeringError(
                f"SteeringSpec.layers: expected a dict of layer to spec, got {type(self.layers).__name__}"
            )
        layers: dict[int, LayerSteeringSpec] = {}
        for layer, spec in self.layers.items():
            index = as_index(layer, "SteeringSpec.layers: a layer")
            if not isinstance(spec, LayerSteeringSpec):
                raise SteeringError(
                    f"SteeringSpec.layers[{layer}]: expected LayerSteeringSpec, got "
                    f"{kind_of(spec, LayerSteeringSpec)}; {HOW_TO_SPECIFY}"
                )
            layers[index] = spec
        if not layers:
            raise SteeringError("SteeringSpec is empty: name at least one layer, or say SteeringSpec.none()")
        object.__setattr__(self, "layers", MappingProxyType(dict(sorted(layers.items()))))
        object.__setattr__(self, "where", as_where(self.where))

    @classmethod
    def none(cls) -> SteeringSpec:
        """Return the spec that does nothing, on purpose."""
        spec = object.__new__(cls)
        object.__setattr__(spec, "layers", MappingProxyType({}))
        object.__setattr__(spec, "where", Where())
        return spec

    @classmethod
    def at(cls, layers: int | Sequence[int], *operations: Operation, where: Where | str = "all") -> SteeringSpec:
        """Return a spec with the same operations at one or several layers."""
        spec = _layer_spec(tuple(operations))
        if spec is None:
            raise SteeringError("SteeringSpec.at: give at least one operation")
        return cls(layers=dict.fromkeys(as_list(layers), spec), where=where)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_spec_from, (dict(self.layers), self.where))

    def __deepcopy__(self, memo: dict[int, Any]) -> SteeringSpec:
        return self

    def __bool__(self) -> bool:
        return bool(self.layers)

    def __repr__(self) -> str:
        if not self:
            return "SteeringSpec.none()"
        where = "" if self.where == Where() else f", where={self.where!r}"
        return f"SteeringSpec({dict(self.layers)!r}{where})"

    def __iter__(self) -> Iterator[tuple[int, Operation]]:
        """Yield (layer, operation) in the order in which they act."""
        for layer, spec in self.layers.items():
            for operation in spec.steps:
                yield layer, operation

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names that stand for vectors, which a lab or a model looks up; counted once, since every request asks."""
        return tuple(str(operation.vector) for _, operation in self if isinstance(operation.vector, str))

    def apart(self) -> SteeringSpec:
        """Return an equal spec with vectors of its own: an edit in place of one spec does not reach the other."""
        return SteeringSpec({at: spec.apart() for at, spec in self.layers.items()}, self.where) if self else self

    def with_layer(self, layer: int, spec: LayerSteeringSpec | None) -> SteeringSpec:
        """Return this spec with the operations of one layer replaced, or removed with None."""
        layers = dict(self.layers)
        layers.pop(layer, None)
        if spec is not None:
            layers[layer] = spec
        return replace(self, layers=layers) if layers else type(self).none()


def _spec_from(layers: dict[int, LayerSteeringSpec], where: Where) -> SteeringSpec:
    return SteeringSpec(layers, where) if layers else SteeringSpec.none()
