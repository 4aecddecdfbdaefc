"""Rows of the steering panel, and the steering spec that they stand for. Nothing here knows of widgets or engines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from chatspace_lab.errors import RequestError, SteeringError
from chatspace_lab.session.history import describe_where
from chatspace_lab.steering.directions import at_layer
from chatspace_lab.steering.specs import (
    AblationSpec,
    AddSpec,
    LayerSteeringSpec,
    Operation,
    ProjectionCapSpec,
    SteeringSpec,
)
from chatspace_lab.steering.vectors import as_direction, as_index, as_list, as_number, as_vector
from chatspace_lab.steering.where import Where, as_where

OPERATIONS = ("add", "cap", "ablate")
KINDS: dict[str, type] = {"add": AddSpec, "cap": ProjectionCapSpec, "ablate": AblationSpec}
Vectors = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One vector with one operation at some layers.

    Attributes
    ----------
    id
        Names the row for as long as it exists.
    vector
        Name of the vector.
    operation
        ``"add"``, ``"cap"`` or ``"ablate"``.
    layers
        Ascending; may be empty, and then the row does nothing.
    scale
        For add the factor on the vector's own length, for ablate that on the component.
    min, max
        Of a cap, in units of the residual stream; None is no bound.
    muted
        Whether it is left out of the steering.
    factors
        Layer to a further factor on ``scale``, where that is not 1: an addition of one dose has another scale at each
        layer.
    """

    id: str
    vector: str
    operation: str = "add"
    layers: tuple[int, ...] = ()
    scale: float = 0.0
    min: float | None = None
    max: float | None = None
    muted: bool = False
    factors: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise SteeringError(f"row {self.vector!r}: operation is one of {', '.join(OPERATIONS)}")
        if not isinstance(self.muted, bool):
            raise RequestError(f"row {self.vector!r}: muted is True or False, got {self.muted!r}")
        layers = tuple(sorted({as_index(layer, "a row's layer") for layer in as_list(self.layers)}))
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "scale", as_number(self.scale, f"row {self.vector!r}: scale"))
        for name in ("min", "max"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_number(getattr(self, name), f"row {self.vector!r}: {name}"))
        if self.min is not None and self.max is not None and self.min > self.max:
            raise SteeringError(f"row {self.vector!r}: min {self.min:g} is greater than max {self.max:g}")
        try:
            factors = {int(layer): float(factor) for layer, factor in self.factors.items()}
        except (AttributeError, TypeError, ValueError):
            raise RequestError(f"row {self.vector!r}: factors is a dict of layer to number") from None
        object.__setattr__(self, "factors", {at: factor for at, factor in factors.items() if at in layers})

    def edited(self, patch: Mapping[str, Any]) -> Row:
        """Return the row with some fields changed.

        Raises
        ------
        RequestError, SteeringError
            Naming the field that does not exist or cannot be used.
        """
        unknown = set(patch) - {"vector", "operation", "layers", "scale", "factors", "min", "max", "muted"}
        if unknown:
            raise RequestError(f"a row has no {', '.join(sorted(unknown))}")
        changed = dict(patch)
        if "layers" in changed:
            changed["layers"] = tuple(as_list(changed["layers"]))
        if changed.get("operation", self.operation) != self.operation:
            changed = {"scale": 0.0, "min": None, "max": None, "factors": {}, **changed}
        return replace(self, **changed)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {**asdict(self), "layers": list(self.layers), "factors": {str(k): v for k, v in self.factors.items()}}

    @property
    def acts(self) -> bool:
        """Whether it is part of the steering."""
        return not self.muted and bool(self.layers) and not (self.operation == "cap" and self.min is self.max is None)

    def scale_at(self, layer: int) -> float:
        """Return the scale at a layer."""
        return self.scale * self.factors.get(layer, 1.0)

    def operation_at(self, layer: int, vectors: Vectors) -> Operation:
        """Return what is done at a layer."""
        vector = at_layer(vectors[self.vector], layer, f"{self.vector!r}")
        if self.operation == "add":
            return AddSpec(vector, self.scale_at(layer))
        if self.operation == "ablate":
            return AblationSpec(vector, self.scale_at(layer))
        return ProjectionCapSpec(vector, self.min, self.max)


def rows_from(plain: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return rows that were written as :meth:`Row.plain` does; an ``id`` may be left out, and all but ``vector``.

    Raises
    ------
    RequestError, SteeringError
    """
    known, rows = set(Row.__dataclass_fields__), list[Row]()
    plain = as_dicts(plain, "rows")
    taken = {str(row["id"]) for row in plain if "id" in row}
    for given in plain:
        if set(given) - known or "vector" not in given:
            raise RequestError(f"a row is a dict with vector, and any of {', '.join(sorted(known))}, got {dict(given)}")
        free = next(name for name in map("r{}".format, itertools.count(1)) if name not in taken)
        name = str(given.get("id", free))
        taken.add(name)
        rows.append(Row(**{**given, "id": name}))
    return rows


def as_dicts(plain: Any, what: str) -> list[Mapping[str, Any]]:
    """Return what was written as a list of dicts.

    Raises
    ------
    RequestError
        If it is something else.
    """
    if not isinstance(plain, list | tuple) or not all(isinstance(each, Mapping) for each in plain):
        raise RequestError(f"{what} is a list of dicts")
    return list(plain)


def spec_of(rows: Sequence[Row], vectors: Vectors, where: Where | str = "all") -> SteeringSpec:
    """Return the steering that the rows stand for: at each layer their operations, in the order of the rows.

    Raises
    ------
    SteeringError, RequestError
        Naming the vector that cannot be used, or the layer for which it has none.
    """
    operations: dict[int, list[Operation]] = {}
    for row in rows:
        if row.acts:
            if row.vector not in vectors:
                known = ", ".join(sorted(vectors)) or "none"
                raise SteeringError(
                    f"there is no vector {row.vector!r}, only {known}; put it into lab.vectors, or remove its row"
                )
            for layer in row.layers:
                operations.setdefault(layer, []).append(row.operation_at(layer, vectors))
    if not operations:
        return SteeringSpec.none()
    return SteeringSpec({layer: LayerSteeringSpec(operations=ops) for layer, ops in operations.items()}, where)


def rows_of(spec: SteeringSpec, rows: Sequence[Row], vectors: Vectors) -> tuple[list[Row], dict[str, torch.Tensor]]:
    """Return the rows that stand for a spec which somebody else has set, and vectors that no name was known for.

    Rows that still fit keep their identity and their place; muted and empty ones stay as they are.

    Parameters
    ----------
    spec
        In force now.
    rows, vectors
        What the panel shows, and the vectors by name.
    """
    left = list(spec)
    found: list[Row] = []
    for row in rows:
        if not row.acts:
            found.append(row)
            continue
        parts = _alike(_one_per_layer([entry for entry in left if _fits(row.operation, row.vector, vectors, *entry)]))
        if parts:
            left = [entry for entry in left if not any(entry is each for each in parts[0])]
            found.append(_row(row.id, row.vector, parts[0]))
    new: dict[str, torch.Tensor] = {}
    while left:
        layer, operation = left[0]
        known = {**vectors, **new}
        kind = _kind(operation)
        name = next((name for name in known if _fits(kind, name, known, layer, operation)), None)
        if name is None:
            name = _free_name("vector", known)
            new[name] = operation.vector.clone()
            known = {**vectors, **new}
        part = _alike(_one_per_layer([entry for entry in left if _fits(kind, name, known, *entry)]))[0]
        left = [entry for entry in left if not any(entry is each for each in part)]
        found.append(_row(free_id([*rows, *found]), name, part))
    return found, new


def free_id(rows: Sequence[Row]) -> str:
    """Return an id that no row has."""
    taken = {row.id for row in rows}
    return next(name for name in map("r{}".format, itertools.count(1)) if name not in taken)


def _free_name(stem: str, taken: Mapping[str, Any]) -> str:
    return next(name for name in (f"{stem} {number}" for number in itertools.count(1)) if name not in taken)


def _kind(operation: Operation) -> str:
    return next(name for name, kind in KINDS.items() if isinstance(operation, kind))


def _fits(operation: str, name: str, vectors: Vectors, layer: int, entry: Operation) -> bool:
    """Whether an entry of a spec is this operation with this vector."""
    if not isinstance(entry, KINDS[operation]) or name not in vectors:
        return False
    try:
        vector = at_layer(vectors[name], layer, name)
        stored = as_vector(vector, name) if operation == "add" else as_direction(vector, name)
    except (RequestError, SteeringError):
        return False
    return bool(torch.equal(stored, entry.vector))


def _one_per_layer(entries: list[tuple[int, Operation]]) -> list[tuple[int, Operation]]:
    """Return the first entry of each layer: where a vector is added twice, two rows do it."""
    first: dict[int, tuple[int, Operation]] = {}
    for entry in entries:
        first.setdefault(entry[0], entry)
    return list(first.values())


def _alike(entries: list[tuple[int, Operation]]) -> list[list[tuple[int, Operation]]]:
    """Return entries of one vector in parts that one row can hold: the same bounds, or scales of one sign."""
    parts: dict[Any, list[tuple[int, Operation]]] = {}
    for entry in entries:
        operation = entry[1]
        if isinstance(operation, ProjectionCapSpec):
            key: Any = (operation.min, operation.max)
        elif isinstance(operation, AddSpec):
            key = (operation.scale > 0) - (operation.scale < 0)
        else:
            key = operation.scale
        parts.setdefault(key, []).append(entry)
    return sorted(parts.values(), key=len, reverse=True)


def _row(name: str, vector: str, entries: list[tuple[int, Operation]]) -> Row:
    layers = tuple(layer for layer, _ in entries)
    first = entries[0][1]
    if isinstance(first, ProjectionCapSpec):
        return Row(name, vector, "cap", layers, min=first.min, max=first.max)
    scales = {layer: operation.scale for layer, operation in entries if not isinstance(operation, ProjectionCapSpec)}
    same = len(set(scales.values())) == 1
    mean = first.scale if same else sum(scales.values()) / len(scales)
    factors = {} if same or mean == 0 else {layer: scale / mean for layer, scale in scales.items()}
    return Row(name, vector, _kind(first), layers, scale=mean, factors=factors)


def where_name(where: Where | str) -> str:
    """Return ``"all"``, ``"prompt"`` or ``"answer"``, or in words what else a cell has chosen."""
    plain = plain_where(where)
    return plain if isinstance(plain, str) else describe_where(as_where(where))


def plain_where(where: Where | str) -> str | dict[str, Any]:
    """Return ``"all"``, ``"prompt"`` or ``"answer"``, or another choice as JSON holds it."""
    chosen = as_where(where)
    plain = chosen.special_tokens and chosen.first_token and not chosen.indices
    return chosen.part if plain else {**asdict(chosen), "indices": list(chosen.indices)}


def where_from(plain: Any) -> Where:
    """Return what was written by :func:`plain_where`, or is a :class:`Where` still.

    Raises
    ------
    RequestError
    """
    if not isinstance(plain, Mapping):
        return as_where(plain)
    if set(plain) != set(Where.__dataclass_fields__):
        raise RequestError(f"where: a dict with {', '.join(Where.__dataclass_fields__)}, got {dict(plain)}")
    return Where(**{**plain, "indices": tuple(plain["indices"])})
