"""The steering in force, by the names of its vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chatspace_lab.analysis.dose import dose_of_scale
from chatspace_lab.errors import LabError
from chatspace_lab.session.history import describe_where, ranges
from chatspace_lab.session.measure import quoted
from chatspace_lab.steering.directions import at_layer, is_per_layer
from chatspace_lab.steering.specs import AblationSpec, AddSpec, Operation, ProjectionCapSpec, SteeringSpec
from chatspace_lab.steering.vectors import as_direction, as_vector, content_key
from chatspace_lab.steering.where import Where, as_where

UNNAMED = "a vector without a name"


class Names:
    """Finds the name of a vector by its contents.

    Parameters
    ----------
    vectors
        Returns the named vectors of the session.
    layer_count
        Of the model.
    """

    def __init__(self, vectors: Callable[[], Mapping[str, Any]], layer_count: int) -> None:
        self._vectors, self._layers = vectors, range(layer_count)
        self._given: dict[bytes, str] = {}
        self._called: dict[str, Any] = {}  # by name the vector that it stood for the last time

    def note(self, vector: Any, operations: Mapping[int, Operation]) -> None:
        """Remember what ``vector``, the argument of a call, is called: a name, or a direction that has one."""
        name = vector if isinstance(vector, str) else getattr(vector, "name", None)
        if isinstance(name, str) and name:
            self._called[name] = self._vectors().get(name) if isinstance(vector, str) else vector
            self._given.update((content_key(each.vector), name) for each in operations.values())

    def forget(self) -> None:
        """Forget what :meth:`note` was told."""
        self._given.clear()
        self._called.clear()

    def known(self) -> dict[bytes, str]:
        """Return the names known now, by the contents of a vector as given and at unit length.

        A vector whose name was given to another one since is called ``"joy (replaced)"``.
        """
        now = {name: _keys(vector, name) for name, vector in {**self._called, **dict(self._vectors())}.items()}
        found = {key: name if key in now[name] else f"{name} (replaced)" for key, name in self._given.items()}
        for name in self._vectors():
            found.update(dict.fromkeys(now[name], name))
        return found


def _keys(vector: Any, name: str) -> set[bytes]:
    """Return the contents of a vector, or of those that it holds per layer, as given and at unit length."""
    parts = [vector]
    if is_per_layer(vector):
        layers = list(vector if isinstance(vector, Mapping) else vector.layers)
        parts = [at_layer(vector, layer, name) for layer in layers]
    found = set()
    for part in parts:
        try:
            found |= {content_key(make(part, name)) for make in (as_vector, as_direction)}
        except LabError:  # a value that is no vector, or zero
            continue
    return found


@dataclass(frozen=True, eq=False, repr=False)
class SteeringInForce:
    """The session's steering as a call has left it; its repr says it in words.

    Attributes
    ----------
    spec
        The steering.
    names
        Names of vectors, by their contents.
    norms
        Layer to the residual norm that doses are relative to; empty if none was measured.
    measured_on
        What it was measured on.
    """

    spec: SteeringSpec
    names: Mapping[bytes, str]
    norms: Mapping[int, float]
    measured_on: str | None

    def __repr__(self) -> str:
        if not self.spec:
            return "no steering in force"
        lines = [f"  {line}" for line in self._lines()]
        where = as_where(self.spec.where)
        on = "" if where == Where() else f", on {describe_where(where)}"
        if any(" dose " in line for line in lines):
            lines.append(f"doses are relative to the mean residual norm on {quoted(self.measured_on)}")
        return "\n".join([f"steering in force{on}:", *lines])

    def doses(self) -> dict[tuple[str, int], float]:
        """Return the dose of each addition by (name, layer), where the norm of the layer is known."""
        return {
            (self._name(operation), layer): dose_of_scale(operation.scale, operation.vector, layer, self.norms)
            for layer, operation in self.spec
            if isinstance(operation, AddSpec) and layer in self.norms
        }

    def _name(self, operation: Operation) -> str:
        return self.names.get(content_key(operation.vector), UNNAMED)

    def _lines(self) -> list[str]:
        groups: dict[Any, list[tuple[int, Operation]]] = {}
        for layer, operation in self.spec:
            name = self._name(operation)
            vector = content_key(operation.vector) if name == UNNAMED else name
            if isinstance(operation, AddSpec):
                key: Any = ("add", vector, operation.scale > 0)
            elif isinstance(operation, AblationSpec):
                key = ("ablate", vector, operation.scale)
            else:
                key = ("cap", vector)
            groups.setdefault(key, []).append((layer, operation))
        return [self._line(entries) for entries in groups.values()]

    def _line(self, entries: list[tuple[int, Operation]]) -> str:
        layers = [layer for layer, _ in entries]
        first, name = entries[0][1], self._name(entries[0][1])
        if isinstance(first, AblationSpec):
            return f"ablate {name} to {first.scale:g} @ {ranges(layers)}"
        if isinstance(first, ProjectionCapSpec):
            caps = [(layer, each) for layer, each in entries if isinstance(each, ProjectionCapSpec)]
            bounds = {layer: f"[{_bound(cap.min, '−∞')}, {_bound(cap.max, '∞')}]" for layer, cap in caps}
            if len(set(bounds.values())) == 1:
                return f"cap {name} to {bounds[layers[0]]} @ {ranges(layers)}"
            return f"cap {name} to " + ", ".join(f"{bounds[layer]} @ {layer}" for layer in layers)
        scales = [each.scale for _, each in entries if isinstance(each, AddSpec)]
        said = f"add {name} @ {ranges(layers)}: "
        if all(layer in self.norms for layer in layers):
            pairs = [(layer, each) for layer, each in entries if isinstance(each, AddSpec)]
            doses = [dose_of_scale(each.scale, each.vector, layer, self.norms) for layer, each in pairs]
            each_layer = f" at each layer, {sum(doses):.2f} in all" if len(layers) > 1 else ""
            form = ".2f" if min(map(abs, doses)) >= 0.01 else ".2g"
            return f"{said}dose {_span(doses, form)}{each_layer} (scale {_span(scales, '.3g')})"
        return f"{said}scale {_span(scales, '.3g')}"


def _bound(value: float | None, none: str) -> str:
    return none if value is None else f"{value:.4g}"


def _span(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"
