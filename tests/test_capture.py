"""Capture handles: labelled rows, messages, and a life that ends with a close or a warning."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from chatspace_lab import CaptureHandle, MessageBoundary
from chatspace_lab.errors import (
    CaptureClosedError,
    CaptureError,
    CaptureNotFetchedError,
    MessageLocationError,
    RequestError,
)
from chatspace_lab.readings import reduce_rows

PROMPT, ANSWER = [10, 11, 12, 13, 14, 15], [20, 21, 22]
BOUNDARIES = (
    MessageBoundary("system", "s", 1, 2),
    MessageLocationError("message 1 (user) cannot be located: why"),
    MessageBoundary("user", "u", 3, 5),
)


def test_a_pooled_row_keeps_no_other_alive() -> None:
    found = torch.arange(24.0).reshape(2, 3, 4)
    last = reduce_rows(found, "last", np.zeros((1, 0, 1), dtype=np.float32))
    assert not np.shares_memory(last, found.numpy())


class Source:
    """Plays the workers."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    async def fetch(self, handles: Sequence[CaptureHandle]) -> None:
        for handle in handles:
            handle.receive(rows(handle))

    async def reduce(
        self, handles: Sequence[CaptureHandle], layers: Sequence[int], how: str, units: np.ndarray
    ) -> list[np.ndarray]:
        chosen = [[handle.layer_indices.index(layer) for layer in layers] for handle in handles]
        return [reduce_rows(rows(handle)[at], how, units) for handle, at in zip(handles, chosen, strict=True)]

    def discard(self, key: str) -> None:
        self.dropped.append(key)


def rows(handle: CaptureHandle) -> torch.Tensor:
    """Return [layers, rows, 1]: 100 · layer + position."""
    return torch.tensor([[[100.0 * layer + at] for at in handle.positions] for layer in handle.layer_indices])


def make(source: Source | None = None, **options: Any) -> CaptureHandle:
    settings: dict[str, Any] = {
        "request_id": "r",
        "layers": [2, 5],
        "spans": [0, -1],
        "hidden_size": 1,
        "prompt_token_ids": PROMPT,
        "boundaries": BOUNDARIES,
        **options,
    }
    return CaptureHandle(source or Source(), **settings)


def fetched(**options: Any) -> CaptureHandle:
    handle = make(**options)
    handle.complete(ANSWER)
    asyncio.run(handle.fetch())
    return handle


def test_rows_are_labelled() -> None:
    handle = fetched()
    assert handle.token_ids == [*PROMPT, 20, 21]  # the last token is sampled and never computed
    assert handle.positions == list(range(8))
    assert (handle.prompt_len, handle.generated_len) == (6, 3)
    assert handle.layer_indices == (2, 5)
    assert handle.hidden(5)[:, 0].tolist() == [500.0 + at for at in range(8)]
    assert torch.equal(handle.captures[2][0]["hidden"], handle.hidden(2))


def test_one_entry_per_worker() -> None:
    handle = fetched(copies=3)
    assert len(handle.captures[2]) == 3
    assert all(torch.equal(entry["hidden"], handle.hidden(2)) for entry in handle.captures[2])


def test_messages() -> None:
    handle = fetched()
    assert handle.get_message_activations(0, 2)[:, 0].tolist() == [201.0]
    assert handle.get_message_activations(2, 5)[:, 0].tolist() == [503.0, 504.0]
    assert handle.get_message_activations(-1, 5)[:, 0].tolist() == [503.0, 504.0]
    assert handle.get_message_activations(2, 5, include_generated=True)[:, 0].tolist() == [503.0, 504.0, 506.0, 507.0]
    assert handle.message_boundary(2).num_tokens == 2
    assert handle.message_locations == BOUNDARIES
    assert fetched(boundaries=None).message_locations is None


def test_messages_that_cannot_be_given() -> None:
    handle = fetched()
    with pytest.raises(MessageLocationError, match="why"):
        handle.get_message_activations(1, 2)
    with pytest.raises(MessageLocationError, match="why"):
        _ = handle.message_boundaries
    for index in (3, -4):
        with pytest.raises(MessageLocationError, match="the conversation has 3 messages"):
            handle.get_message_activations(index, 2)
    with pytest.raises(CaptureError, match="goes with the last message"):
        handle.get_message_activations(0, 2, include_generated=True)
    with pytest.raises(CaptureError, match="layer 3 was not captured"):
        handle.get_message_activations(0, 3)
    plain = fetched(boundaries=None)
    with pytest.raises(MessageLocationError, match="plain prompt"):
        _ = plain.message_boundaries
    with pytest.raises(MessageLocationError, match="plain prompt"):
        plain.get_message_activations(0, 2)


def test_chosen_positions() -> None:
    handle = fetched(spans=[3, 5, 6, -1])
    assert handle.positions == [3, 4, 6, 7]
    assert handle.token_ids == [13, 14, 20, 21]
    assert handle.get_message_activations(2, 5, include_generated=True)[:, 0].tolist() == [503.0, 504.0, 506.0, 507.0]
    with pytest.raises(CaptureError, match="message 0 was not captured whole"):
        handle.get_message_activations(0, 2)


def test_an_empty_message_has_no_rows() -> None:
    handle = fetched(boundaries=(MessageBoundary("user", "", 3, 3),))
    assert handle.get_message_activations(0, 2).shape == (0, 1)


def test_its_life() -> None:
    source = Source()
    handle = make(source)
    assert handle.state == "running"
    handle.complete(ANSWER)
    assert handle.state == "ready"
    assert not handle.is_fetched
    with pytest.raises(CaptureNotFetchedError, match="fetch_captures_batch"):
        handle.hidden(2)
    assert asyncio.run(handle.fetch()) is handle
    assert handle.state == "fetched"
    handle.close()
    handle.close()
    assert handle.state == "closed"
    for use in (lambda: handle.captures, lambda: handle.hidden(2), lambda: handle.get_message_activations(0, 2)):
        with pytest.raises(CaptureClosedError):
            use()


def test_closing_tells_the_workers() -> None:
    source = Source()
    with make(source) as handle:
        handle.complete(ANSWER)
    assert source.dropped == ["r"]

    async def main() -> None:
        async with make(source, request_id="s") as other:
            other.complete(ANSWER)

    asyncio.run(main())
    assert source.dropped == ["r", "s"]


def test_dropping_warns_and_tells_the_workers() -> None:
    source = Source()
    handle = make(source)
    handle.complete(ANSWER)
    with pytest.warns(ResourceWarning, match="captures of request r were dropped"):
        del handle
    assert source.dropped == ["r"]


def test_dropping_tells_the_workers_where_warnings_are_errors() -> None:
    source = Source()
    handle = make(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ResourceWarning):
            handle.__del__()
    assert source.dropped == ["r"]
    handle.lose()


def test_no_warning_without_cause() -> None:
    gc.collect()  # what other tests left is theirs
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="captures of request")
        for handle in (fetched(), make()):
            handle.close()
        lost = make()
        lost.lose()
        kept = fetched()
        del handle, lost, kept
        gc.collect()


def test_after_an_early_end() -> None:
    handle = make()
    handle.complete([])
    assert (handle.computed, handle.token_ids, handle.positions) == (0, [], [])
    handle.close()
    handle = make()
    handle.complete([20])
    assert handle.token_ids == PROMPT
    handle.close()
    closed = make()
    closed.close()
    closed.complete(ANSWER)
    assert closed.state == "closed"


def test_it_shows_what_it_is() -> None:
    handle = make()
    assert repr(handle) == "CaptureHandle(r, layers [2, 5], running, running)"
    handle.complete(ANSWER)
    assert "8 rows, ready" in repr(handle)
    handle.close()


def test_reading_gives_labelled_norms_projections_and_cosines() -> None:
    handle = make(spans=[1, -1])
    handle.complete(ANSWER)
    readings = asyncio.run(handle.read({"up": [2.0], "down": {2: [-1.0], 5: [1.0]}}, layers=[5, 2]))
    assert readings.layers == (5, 2)
    assert readings.directions == ("up", "down")
    assert readings.positions.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert readings.token_ids.tolist() == [11, 12, 13, 14, 15, 20, 21]
    assert readings.norm.tolist() == [[501.0 + at for at in range(7)], [201.0 + at for at in range(7)]]
    assert readings.projection("up").tolist() == readings.norm.tolist()
    assert readings.projection("down")[:, 0].tolist() == [501.0, -201.0]
    assert readings.cosine("down")[:, 3].tolist() == [1.0, -1.0]
    for layers in ([np.int64(5)], np.array([5]), torch.tensor([5]), 5, np.int64(5)):  # the workers read Python's own
        (layer,) = handle.check_layers(layers)
        assert (layer, type(layer)) == (5, int)
    with pytest.raises(RequestError, match=r"'left' was not read, only \['up', 'down'\]"):
        readings.projection("left")
    with pytest.raises(CaptureError, match="layer 3 was not captured"):
        asyncio.run(handle.read(layers=[3]))
    with pytest.raises(RequestError, match=r"directions\['a'\] has no vector for layer 5, only for \[2\]"):
        asyncio.run(handle.read({"a": {2: [1.0]}}))
    handle.close()


def test_pooling_gives_one_row_per_layer() -> None:
    handle = make()
    handle.complete(ANSWER)
    assert asyncio.run(handle.pool("last")).tolist() == [[207.0], [507.0]]
    assert asyncio.run(handle.pool("mean", layers=[5])).tolist() == [[503.5]]
    with pytest.raises(RequestError, match="pool: how must be one of mean, last, got 'max'"):
        asyncio.run(handle.pool("max"))
    handle.close()
