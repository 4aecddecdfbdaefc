"""Captured activations, as the user holds them."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch

from chatspace_lab.chat import MessageBoundary
from chatspace_lab.errors import (
    CaptureClosedError,
    CaptureError,
    CaptureNotFetchedError,
    MessageLocationError,
    RequestError,
)
from chatspace_lab.readings import POOLS, TYPICAL, Readings
from chatspace_lab.spans import below
from chatspace_lab.steering.directions import DirectionSet
from chatspace_lab.steering.specs import SteeringSpec
from chatspace_lab.steering.vectors import as_list

NO_UNITS = np.zeros((1, 0, 1), dtype=np.float32)


class CaptureSource(Protocol):
    """Where a handle's rows are until they are fetched."""

    def fetch(self, handles: Sequence[CaptureHandle]) -> Awaitable[None]:
        """Bring the rows of these handles here."""
        ...

    def reduce(
        self, handles: Sequence[CaptureHandle], layers: Sequence[int], how: str, units: np.ndarray
    ) -> Awaitable[list[np.ndarray]]:
        """Read numbers off the rows of these handles where they are."""
        ...

    def discard(self, key: str) -> None:
        """Drop the rows named ``key`` in the workers; may be called from any thread."""
        ...


class CaptureHandle:
    """The activations of one request: a row per token that the model computed, at each captured layer.

    There are ``prompt + generated − 1`` rows (those of them that ``capture_where`` chose): the last generated token is
    sampled but never computed. The rows stay in the workers until they are fetched. A handle frees them when it is
    closed, or left as a context manager; one that is dropped without either warns.

    The methods that bring something into this process are awaited. A lab returns
    :class:`chatspace_lab.session.handle.LabCaptureHandle`, where the same methods block.

    Attributes
    ----------
    request_id : str
        Names the request.
    layer_indices : tuple of int
        Captured layers, sorted. Layer i is the output of decoder block i.
    token_ids : list of int
        The token of each row, ``[rows]``.
    positions : list of int
        The absolute position of each row's token, ``[rows]``.
    spans : list of int
        The captured positions, as flat spans (:mod:`chatspace_lab.spans`).
    prompt_len : int
        Tokens of the prompt.
    generated_len : int
        Generated tokens, the last one included.
    prompt_index, sample_index : int
        Which prompt of the call, and which of its ``n`` samples.
    steering : SteeringSpec or None
        What was in force for the request; ``SteeringSpec.none()`` if nothing was, None if it is not known.
    """

    def __init__(
        self,
        source: CaptureSource,
        *,
        request_id: str,
        layers: Sequence[int],
        spans: Sequence[int],
        hidden_size: int,
        prompt_token_ids: Sequence[int],
        boundaries: Sequence[MessageBoundary | MessageLocationError] | None = None,
        copies: int = 1,
        prompt_index: int = 0,
        sample_index: int = 0,
        steering: SteeringSpec | None = None,
    ) -> None:
        self._source = source
        self.steering = steering
        self._boundaries = boundaries
        self._copies, self._hidden_size = copies, hidden_size
        self._captures: dict[int, list[dict[str, torch.Tensor]]] | None = None
        self._state = "running"
        self._prompt = list(prompt_token_ids)
        self._generated: list[int] = []
        self.request_id = request_id
        self.layer_indices = tuple(layers)
        self.spans = list(spans)
        self.prompt_len = len(self._prompt)
        self.prompt_index, self.sample_index = prompt_index, sample_index
        self.positions: list[int] = []
        self.token_ids: list[int] = []

    @property
    def generated_len(self) -> int:
        """Generated tokens, the last one included."""
        return len(self._generated)

    @property
    def computed(self) -> int:
        """Positions that the model computed: prompt + generated − 1, or fewer if the request was cut off early."""
        return self.prompt_len + max(self.generated_len - 1, 0) if self._generated else 0

    def advance(self, generated_token_ids: Sequence[int]) -> None:
        """Say that the request has generated these tokens so far. Called by the model."""
        self._generated = list(generated_token_ids)
        sequence = [*self._prompt, *self._generated]
        self.positions = below(self.spans, self.computed)
        self.token_ids = [sequence[position] for position in self.positions]

    def complete(self, generated_token_ids: Sequence[int]) -> None:
        """Say that the request has ended with these tokens. Called by the model."""
        self.advance(generated_token_ids)
        if self._state == "running":
            self._state = "ready"

    def receive(self, rows: torch.Tensor) -> None:
        """Take ``rows`` [layers, rows, hidden_size] as this handle's own. Called by the model."""
        self._captures = {
            layer: [{"hidden": rows[index]} for _ in range(self._copies)]
            for index, layer in enumerate(self.layer_indices)
        }
        self._state = "fetched"

    @property
    def is_fetched(self) -> bool:
        """Whether the rows are in this process."""
        return self._captures is not None

    @property
    def state(self) -> str:
        """``running``, ``ready``, ``fetched`` or ``closed``."""
        return self._state

    @property
    def captures(self) -> dict[int, list[dict[str, torch.Tensor]]]:
        """Per layer a list with one entry per tensor-parallel worker, ``{"hidden": [rows, hidden_size]}``.

        The tensors are on the CPU, in the model's dtype. The workers of a tensor-parallel engine hold equal copies of
        the residual stream, so the entries of a list are the same tensor.

        Raises
        ------
        CaptureNotFetchedError, CaptureClosedError
        """
        if self._state == "closed":
            raise CaptureClosedError(f"the captures of request {self.request_id} were closed")
        if self._captures is None:
            raise CaptureNotFetchedError(
                f"the captures of request {self.request_id} are still in the engine: "
                f"lab.fetch_captures_batch(handles) brings them; in async code await handle.fetch()"
            )
        return self._captures

    def hidden(self, layer_idx: int) -> torch.Tensor:
        """Return ``[rows, hidden_size]``, the model's dtype, on the CPU: short for ``captures[layer][0]["hidden"]``.

        A part of it, such as ``hidden(layer)[-1]``, keeps all rows of all layers in memory: ``clone()`` what you keep.

        Raises
        ------
        CaptureError
            If that layer was not captured.
        """
        captures = self.captures
        if layer_idx not in captures:
            raise CaptureError(f"layer {layer_idx} was not captured, only {list(self.layer_indices)}")
        return captures[layer_idx][0]["hidden"]

    async def fetch(self) -> Self:
        """Bring the rows into this process; a second time does nothing. Returns the handle.

        ``model.fetch_captures_batch`` fetches many handles in one round.
        """
        await self._source.fetch([self])
        return self

    async def read(
        self, directions: Mapping[str, Any] | None = None, *, layers: Sequence[int] | None = None
    ) -> Readings:
        """Return each row's norm, and its projection on directions; the rows stay where they are.

        Parameters
        ----------
        directions
            ``{name: vector}`` or ``{name: {layer: vector}}``; a vector has ``[hidden_size]`` entries, of any length but
            zero.
        layers
            Of the captured ones; None is all.

        Raises
        ------
        CaptureError, CaptureClosedError, RequestError, SteeringError
        """
        chosen = self.check_layers(layers)
        laid = DirectionSet.of(directions, chosen, self._hidden_size)
        values = (await self._source.reduce([self], chosen, "read", laid.units))[0]
        return self.label(values, laid)

    async def pool(
        self, how: Literal["mean", "last"] = "mean", *, layers: Sequence[int] | None = None, sinks: bool = True
    ) -> torch.Tensor:
        """Return one row per layer, ``[layers, hidden_size]`` float32: the ``"mean"`` over rows, or the ``"last"`` row.

        Parameters
        ----------
        layers
            Of the captured ones; None is all.
        sinks
            Whether attention sinks (:mod:`chatspace_lab.readings`) count in a mean. They are up to a hundred times
            longer than all other rows: a mean with one is a mean of that one.

        Raises
        ------
        CaptureError, CaptureClosedError, RequestError
        """
        if how not in POOLS:
            raise RequestError(f"pool: how must be one of {', '.join(POOLS)}, got {how!r}")
        if how == "mean" and not sinks:
            return (await CaptureHandle.pool_typical(self, layers=layers))[0]
        chosen = self.check_layers(layers)
        return torch.from_numpy((await self._source.reduce([self], chosen, how, NO_UNITS))[0])

    async def pool_typical(self, *, layers: Sequence[int] | None = None) -> tuple[torch.Tensor, np.ndarray]:
        """Return the mean over the rows that are no attention sinks, and the norm of every row.

        Returns
        -------
        means : torch.Tensor
            ``[layers, hidden_size]`` float32.
        norms : numpy.ndarray
            ``[layers, rows]`` float32; :func:`chatspace_lab.readings.sinks` of it says which rows were left out.

        Raises
        ------
        CaptureError, CaptureClosedError
        """
        chosen = self.check_layers(layers)
        values = (await self._source.reduce([self], chosen, TYPICAL, NO_UNITS))[0]
        return torch.from_numpy(values[:, : self._hidden_size].copy()), values[:, self._hidden_size :]

    def check_layers(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        """Return the layers to read, as Python's own numbers; None is all captured ones.

        Raises
        ------
        CaptureError
            If one was not captured.
        """
        if layers is None:
            return self.layer_indices
        chosen = as_list(layers)
        for layer in chosen:
            if layer not in self.layer_indices:
                raise CaptureError(f"layer {layer} was not captured, only {list(self.layer_indices)}")
        return tuple(int(layer) for layer in chosen)

    def label(self, values: np.ndarray, directions: DirectionSet, first: int = 0) -> Readings:
        """Return ``values`` [layers, rows, 1 + directions] of the rows from the ``first`` on as readings."""
        rows = slice(first, first + values.shape[1])
        return Readings(
            np.asarray(self.positions[rows], dtype=np.int64),
            np.asarray(self.token_ids[rows], dtype=np.int64),
            directions.layers,
            directions.names,
            values,
        )

    @property
    def message_boundaries(self) -> list[MessageBoundary]:
        """Where each message of the conversation stands.

        Raises
        ------
        MessageLocationError
            If any message cannot be located, or the request was no chat. :meth:`message_boundary` asks for one.
        """
        if self._boundaries is None:
            raise MessageLocationError("this request was a plain prompt; only a chat has messages")
        return [self.message_boundary(index) for index in range(len(self._boundaries))]

    @property
    def message_locations(self) -> tuple[MessageBoundary | MessageLocationError, ...] | None:
        """Per message its boundary, or the error that says why it cannot be located; None if this was no chat."""
        return None if self._boundaries is None else tuple(self._boundaries)

    def message_boundary(self, message_idx: int) -> MessageBoundary:
        """Return where one message stands. Negative indices count from the end.

        Raises
        ------
        MessageLocationError
            If it cannot be located, or there is no such message; says why.
        """
        if self._boundaries is None:
            raise MessageLocationError("this request was a plain prompt; only a chat has messages")
        try:
            boundary = self._boundaries[message_idx]
        except IndexError:
            raise MessageLocationError(
                f"message {message_idx} does not exist: the conversation has {len(self._boundaries)} messages"
            ) from None
        if isinstance(boundary, MessageLocationError):
            raise boundary
        return boundary

    def get_message_activations(
        self, message_idx: int, layer_idx: int, *, include_generated: bool = False
    ) -> torch.Tensor:
        """Return the rows of one message's own tokens.

        Parameters
        ----------
        message_idx
            Index into the conversation.
        layer_idx
            A captured layer.
        include_generated
            Append the rows of the generated tokens; for the last message only, which they answer or continue.

        Returns
        -------
        torch.Tensor
            ``[num_tokens (+ generated − 1), hidden_size]``, the model's dtype, on the CPU.

        Raises
        ------
        MessageLocationError
            If the message cannot be located.
        CaptureError
            If a row of it was not captured, or ``include_generated`` is asked of another than the last message.
        """
        boundary = self.message_boundary(message_idx)
        hidden = self.hidden(layer_idx)
        wanted = list(range(boundary.start, boundary.end))
        if include_generated:
            assert self._boundaries is not None
            if message_idx % len(self._boundaries) != len(self._boundaries) - 1:
                raise CaptureError("include_generated goes with the last message: the answer follows that one")
            wanted += range(self.prompt_len, self.computed)
        rows = np.searchsorted(self.positions, wanted)
        if any(row >= len(self.positions) or self.positions[row] != at for row, at in zip(rows, wanted, strict=True)):
            raise CaptureError(f"message {message_idx} was not captured whole: this request captured other positions")
        return hidden[torch.from_numpy(rows)]

    def close(self) -> None:
        """Free the rows, here and in the workers. Again is fine."""
        if self._state in ("running", "ready"):
            self._source.discard(self.request_id)
        self._captures = None
        self._state = "closed"

    def lose(self) -> None:
        """Take note that the workers dropped the rows. Called by the model when a request did not end."""
        self._captures = None
        self._state = "closed"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_state", "closed") in ("running", "ready"):
            self._source.discard(self.request_id)  # first: a warning may be an error
            warnings.warn(
                f"captures of request {self.request_id} were dropped without fetching or closing them",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        rows = f"{len(self.positions)} rows" if self._state != "running" else "running"
        return f"CaptureHandle({self.request_id}, layers {list(self.layer_indices)}, {rows}, {self._state})"
