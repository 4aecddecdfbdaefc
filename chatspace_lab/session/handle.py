"""The captures that a lab returns: methods that reach the engine block."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch

from chatspace_lab.capture import CaptureHandle
from chatspace_lab.readings import Readings

Wait = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the engine's loop, and returns its result."""


class LabCaptureHandle(CaptureHandle):
    """The activations of one request; what brings them into this process blocks. See :class:`CaptureHandle`.

    Parameters
    ----------
    wait
        Runs a coroutine on the engine's loop, and returns its result.
    facts
        As for :class:`CaptureHandle`.

    Examples
    --------
    ::

        texts, [handle] = lab.generate("The river", capture_layers=[15], max_tokens=8)
        with handle:
            handle.fetch().hidden(15)          # [rows, hidden_size]
    """

    def __init__(self, wait: Wait, *args: Any, **facts: Any) -> None:
        super().__init__(*args, **facts)
        self._wait = wait

    def fetch(self) -> Self:  # type: ignore[override]  # it blocks
        """Bring the rows into this process; a second time does nothing. Returns the handle.

        ``lab.fetch_captures_batch`` fetches many handles in one round.
        """
        self._wait(super().fetch())
        return self

    def read(  # type: ignore[override]  # it blocks
        self, directions: Mapping[str, Any] | None = None, *, layers: Sequence[int] | None = None
    ) -> Readings:
        """Return each row's norm, and its projection on directions, as :meth:`CaptureHandle.read`."""
        found: Readings = self._wait(super().read(directions, layers=layers))
        return found

    def pool(  # type: ignore[override]  # it blocks
        self, how: Literal["mean", "last"] = "mean", *, layers: Sequence[int] | None = None, sinks: bool = True
    ) -> torch.Tensor:
        """Return one row per layer, ``[layers, hidden_size]`` float32, as :meth:`CaptureHandle.pool`."""
        found: torch.Tensor = self._wait(super().pool(how, layers=layers, sinks=sinks))
        return found

    def pool_typical(  # type: ignore[override]  # it blocks
        self, *, layers: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Return means without attention sinks, and norms, as :meth:`CaptureHandle.pool_typical`."""
        found: tuple[torch.Tensor, np.ndarray] = self._wait(super().pool_typical(layers=layers))
        return found
