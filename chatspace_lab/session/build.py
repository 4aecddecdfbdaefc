"""A direction from two lists of texts: captured unsteered, tested on pairs that were held out, and named."""

from __future__ import annotations

import asyncio
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from chatspace_lab.analysis.direction import Direction
from chatspace_lab.analysis.groups import groups_of_texts
from chatspace_lab.errors import AnalysisError, RequestError, TrainingTextsWarning
from chatspace_lab.session.collect import is_conversation
from chatspace_lab.session.history import describe_where
from chatspace_lab.session.pooled import PooledActivations
from chatspace_lab.session.sweep import as_layers
from chatspace_lab.steering.where import Where, as_where

if TYPE_CHECKING:
    from chatspace_lab.engine.observer import Progress
    from chatspace_lab.session.aio import AsyncLab

MIN_TEXTS = 6
"""Texts a side that a direction is made from, at least. Fewer cannot tell it from chance."""

METHODS = ("difference of means", "pca of differences", "logistic probe")


async def build(
    lab: AsyncLab,
    positive: Sequence[Any],
    negative: Sequence[Any],
    *,
    name: str,
    layers: int | Sequence[int] | None,
    method: str,
    groups: Iterable[Hashable] | None,
    reduce: str | None,
    where: Where | str | None,
    steering: Any,
    chat_options: dict[str, Any] | None,
    progress: Progress | None,
    **test: Any,
) -> Direction:
    """Return the direction; see :meth:`chatspace_lab.session.aio.AsyncLab.direction`."""
    if not isinstance(name, str) or not name.strip():
        raise RequestError(f"direction: name must be a text that is not empty, got {name!r}")
    if method not in METHODS:
        raise RequestError(f"direction: method must be one of {', '.join(METHODS)}, got {method!r}")
    for side, given in (("positive", positive), ("negative", negative)):
        if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
            raise RequestError(
                f"direction: {side} must be a list of texts or conversations, got {type(given).__name__}"
            )
        if len(given) < MIN_TEXTS:
            raise RequestError(
                f"direction: {side} has {len(given)} texts; give at least {MIN_TEXTS} a side: with fewer, nothing can "
                f"be said of how far the direction can be trusted"
            )
    if len(positive) != len(negative):
        raise RequestError(
            f"direction: positive has {len(positive)} texts and negative {len(negative)}; give as many on both sides: "
            f"text i of one is the counterpart of text i of the other"
        )
    together = groups_of_texts(positive, negative, groups)
    chat = is_conversation(positive[0])
    reduce = reduce or ("last" if chat else "mean")
    if reduce not in ("mean", "last"):
        raise RequestError(f"direction: reduce must be 'mean' or 'last', got {reduce!r}")
    whole = reduce == "mean" and where is None
    chosen = Where.span(1, lab.max_model_len) if whole else as_where("prompt" if where is None else where)
    everywhere = range(lab.layer_count) if layers is None else as_layers(layers, lab.layer_count, "direction")
    capture = {"where": chosen, "steering": steering, "chat_options": chat_options}
    pooled = await _captured(lab, [*positive, *negative], everywhere, reduce, {**capture, "progress": progress})
    count = len(positive)
    sides = [
        {layer: rows[part] for layer, rows in pooled.by_layer().items()} for part in (slice(count), slice(count, None))
    ]
    fitted = await asyncio.to_thread(partial(_fit(method), *sides, name=name.strip(), groups=together, **test))
    averaged = "the mean over each text's tokens but attention sinks"
    words = averaged if whole else f"the {reduce} of {describe_where(chosen)}"
    details = {
        **fitted.details,
        "layer_count": lab.layer_count,
        "positions": words,
        "steering": pooled.steered,
        "model": lab.model_name,
    }
    direction = dataclasses.replace(fitted, details=details).tied(
        partial(
            _capture_again, weakref.ref(lab), frozenset(map(repr, (*positive, *negative))), everywhere, reduce, capture
        )
    )
    lab.vectors[direction.name] = direction
    return direction


def _fit(method: str) -> Callable[..., Direction]:
    from chatspace_lab.analysis import fit  # scikit-learn takes a second to load

    return (fit.difference_of_means, fit.pca_of_differences, fit.logistic_probe)[METHODS.index(method)]


async def _captured(
    lab: AsyncLab, texts: list[Any], layers: Iterable[int], reduce: str, options: dict[str, Any]
) -> PooledActivations:
    pooled = await lab.capture(texts, list(layers), reduce, **options)
    assert isinstance(pooled, PooledActivations)
    for text, rows in zip(pooled.rows["asked"], pooled.rows["rows"], strict=True):
        if not rows:
            raise RequestError(f"direction: {text!r} has no token that counts; the first token of a text never does")
    return pooled


def _capture_again(
    lab: weakref.ref[AsyncLab],
    made_from: frozenset[str],
    layers: Iterable[int],
    reduce: str,
    options: dict[str, Any],
    texts: list[Any],
) -> PooledActivations:
    """Capture other texts in the same way, and wait for it. Called by ``Direction.auc_on``.

    ``made_from`` has the reprs of the texts that the direction was made from.
    """
    found = lab()
    if found is None or not found.is_alive:
        raise AnalysisError("the lab that made this direction is closed, so it cannot run texts: give samples")
    seen = sum(repr(text) in made_from for text in texts)
    if seen:
        note = f"auc_on: the direction was made from {seen} of these {len(texts)} texts, so that an AUC on them is no "
        warnings.warn(note + "evidence; test it on others", TrainingTextsWarning, stacklevel=4)
    return found.execution.loop.call(_captured(found, list(texts), layers, reduce, options))
