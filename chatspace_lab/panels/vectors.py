"""Where the panel's vectors come from: the session, variables of the notebook, and contrasting texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from chatspace_lab.errors import RequestError
from chatspace_lab.session.history import ranges
from chatspace_lab.steering.directions import at_layer, is_per_layer
from chatspace_lab.steering.vectors import as_vector

if TYPE_CHECKING:
    from chatspace_lab.analysis.direction import Direction
    from chatspace_lab.session.aio import AsyncLab


def layers_with(vector: Any) -> list[int] | None:
    """Return the layers for which a vector is given; None is all."""
    if not is_per_layer(vector):
        return None
    return sorted(map(int, vector if isinstance(vector, Mapping) else vector.layers))


def snapshot(vector: Any, hidden_size: int, what: str) -> Any:
    """Return a copy that later edits do not change, checked: a tensor, or one per layer.

    Raises
    ------
    RequestError, SteeringError
        If it is no vector of this model, or zero: nothing could be read along it.
    """
    layers = layers_with(vector)
    if layers is not None and not layers:
        raise RequestError(f"{what} holds no vector")
    for layer in [0] if layers is None else layers:
        found = as_vector(at_layer(vector, layer, what), what)
        if found.numel() != hidden_size:
            raise RequestError(f"{what} has {found.numel()} entries, this model's hidden_size is {hidden_size}")
        if not found.any():
            raise RequestError(f"{what} is zero, it has no direction")
    if layers is None:
        return as_vector(vector, what)
    if isinstance(vector, Mapping):
        return {int(layer): as_vector(vector[layer], what) for layer in layers}
    return vector  # a Direction is frozen


def variables(hidden_size: int) -> dict[str, Any]:
    """Return the notebook's variables that are vectors of this size, or directions; empty outside a notebook."""
    return usable({name: value for name, value in _namespace().items() if not name.startswith("_")}, hidden_size)


def usable(named: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Return those of some things that are vectors of this size, or directions."""
    return {name: value for name, value in named.items() if _is_vector(value, hidden_size)}


def frozen(named: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Return named things such that later edits do not change those that are vectors of this size."""
    now = dict(named)  # a cell may add to it meanwhile
    return {**now, **{name: snapshot(value, hidden_size, name) for name, value in usable(now, hidden_size).items()}}


def _is_vector(value: Any, hidden_size: int) -> bool:
    try:
        if isinstance(value, torch.Tensor | np.ndarray):
            of_a_kind = tuple(value.shape) in ((hidden_size,), (1, hidden_size), (hidden_size, 1))
        elif isinstance(value, list | tuple):
            of_a_kind = len(value) == hidden_size
        else:
            of_a_kind = isinstance(value, Mapping) or _is_direction(value)
        if of_a_kind:
            snapshot(value, hidden_size, "it")
    except Exception:  # noqa: BLE001 - some other thing, which may raise whatever it likes when it is looked at
        return False
    return of_a_kind


def name_in_notebook(value: Any) -> str | None:
    """Return the name of a variable that is this very object, or None."""
    return next((name for name, each in _namespace().items() if each is value and not name.startswith("_")), None)


def same(left: Any, right: Any) -> bool:
    """Whether two vectors, or vectors per layer, have the same numbers."""
    if left is right:
        return True
    try:
        layers = layers_with(left)
        return layers == layers_with(right) and all(
            torch.equal(as_vector(at_layer(left, at, "left"), "left"), as_vector(at_layer(right, at, "right"), "right"))
            for at in layers or [0]
        )
    except Exception:  # noqa: BLE001 - some other thing, which may raise whatever it likes when it is looked at
        return False


def expression_of(name: str, vectors: Mapping[str, Any], lab: str) -> str:
    """Return an expression for a vector: the variable that still holds it, else the session's copy."""
    value = _namespace().get(name)
    if name.isidentifier() and value is not None and same(value, vectors[name]):
        return name
    return f"{lab}.vectors[{name!r}]"


def _is_direction(value: Any) -> bool:
    return (
        not isinstance(value, type) and hasattr(value, "vectors") and hasattr(value, "layers") and hasattr(value, "at")
    )


def _namespace() -> dict[str, Any]:
    try:
        from IPython import get_ipython
    except ModuleNotFoundError:
        return {}
    shell = get_ipython()
    if shell is None:
        return {}
    own = shell.user_ns_hidden  # IPython's: Out among them, a dict of whatever was shown
    return {name: value for name, value in dict(shell.user_ns).items() if own.get(name, own) is not value}


def lines(text: str) -> list[str]:
    """Return the texts of a form's field, one a line."""
    return [line.strip() for line in text.splitlines() if line.strip()]


async def contrast(lab: AsyncLab, name: str, positive: Sequence[str], negative: Sequence[str]) -> Direction:
    """Return the direction from ``negative`` to ``positive`` texts at every layer, as ``lab.direction`` makes it.

    It is in ``lab.vectors`` then, in place of an older one of that name. At least six texts a side are needed; what is
    known of it (held-out AUC, shuffled level, layers) is the direction's own.

    Raises
    ------
    RequestError, AnalysisError
    """
    return await lab.direction(positive, negative, name=name)


def evidence(direction: Direction) -> dict[str, Any]:
    """Return what a direction's test says, for the page: it is shown before the direction is used."""
    read, steer = direction.best_layer(), direction.steering_layers()
    return {
        "name": direction.name,
        "text": f"Read at {read.reason}. Try steering at layer {steer.layer} (of {ranges(list(steer.layers))}).",
        "trusted": read.trusted,
        "layer": steer.layer,
        "auc": direction.auc[read.layer],
        "shuffled": direction.shuffled.get(read.layer),
    }
