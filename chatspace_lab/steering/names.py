"""Vectors by name: wherever a vector is taken, its name among the session's named vectors will do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from chatspace_lab.errors import RequestError
from chatspace_lab.steering.directions import at_layer
from chatspace_lab.steering.specs import LayerSteeringSpec, Operation, SteeringSpec


class Vectors(dict[str, Any]):
    """Named vectors. A dict whose repr has a short line for each."""

    def __repr__(self) -> str:
        return "{" + ",\n ".join(f"{name!r}: {_in_short(vector)}" for name, vector in self.items()) + "}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def _in_short(vector: Any) -> str:
    if isinstance(vector, Mapping):
        return f"{type(vector).__name__}, a vector for each of {len(vector)} layers"
    if hasattr(vector, "shape"):
        return f"{type(vector).__name__} {list(vector.shape)}"
    return repr(vector).partition("\n")[0]


def vector_named(vector: Any, vectors: Mapping[str, Any], what: str) -> Any:
    """Return the vector that a name stands for; anything but a text is returned as it is.

    Parameters
    ----------
    vector
        A name in ``vectors``, or a vector in any form.
    vectors
        The named vectors, ``lab.vectors``.
    what
        Begins an error message.

    Raises
    ------
    RequestError
        If no vector has that name; says which is nearest.
    """
    if not isinstance(vector, str):
        return vector
    known = dict(vectors)
    if vector not in known:
        raise RequestError(f"{what}: {unknown_name(vector, known)}")
    return known[vector]


def unknown_name(name: str, known: Iterable[str]) -> str:
    """Return a sentence for a name that no vector has: the nearest names, or all."""
    names = list(map(str, known))
    said = f"no vector is named {name!r} in lab.vectors"
    if did_you_mean(name, names):
        return said + did_you_mean(name, names)
    if names:
        return f"{said}, only {', '.join(map(repr, names))}"
    return f"{said}, which is empty: lab.vectors[{name!r}] = vector, or lab.direction(…, name={name!r})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'joy'?"`` for a name that is near some that are known, else an empty text."""
    lowered = {each.lower(): each for each in known}
    near = [lowered[each] for each in difflib.get_close_matches(name.lower(), lowered, 3)]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def directions_named(directions: Any, vectors: Mapping[str, Any]) -> Any:
    """Return ``{name: vector}`` for a name, several, or a mapping whose values may be names; None stays None.

    Raises
    ------
    RequestError
        If no vector has one of the names.
    """
    if isinstance(directions, str):
        directions = [directions]
    if isinstance(directions, Mapping):
        return {name: vector_named(each, vectors, f"directions[{name!r}]") for name, each in directions.items()}
    if isinstance(directions, list | tuple | set | frozenset) and all(isinstance(each, str) for each in directions):
        return {name: vector_named(name, vectors, "directions") for name in directions}
    return directions


def spec_named(spec: Any, vectors: Mapping[str, Any]) -> Any:
    """Return a spec with vectors in place of names; one vector per layer, where the name stands for such.

    Anything but a spec, and a spec without names, is returned as it is.

    Raises
    ------
    RequestError, SteeringError
        If no vector has one of the names, or it cannot be used at that layer.
    """
    if not isinstance(spec, SteeringSpec) or not spec.names:
        return spec
    layers = {layer: _layer_named(here, layer, vectors) for layer, here in spec.layers.items()}
    return SteeringSpec(layers, spec.where)


def _layer_named(spec: LayerSteeringSpec, layer: int, vectors: Mapping[str, Any]) -> LayerSteeringSpec:
    if spec.operations:
        return replace(spec, operations=[_operation_named(each, layer, vectors) for each in spec.operations])
    named = {"add": spec.add, "projection_cap": spec.projection_cap, "ablation": spec.ablation}
    return replace(spec, **{k: _operation_named(each, layer, vectors) for k, each in named.items() if each})


def _operation_named(operation: Operation, layer: int, vectors: Mapping[str, Any]) -> Any:
    name = operation.vector
    if not isinstance(name, str):
        return operation
    what = f"{type(operation).__name__}, layer {layer}"
    return replace(operation, vector=at_layer(vector_named(name, vectors, what), layer, f"the vector {name!r}"))
