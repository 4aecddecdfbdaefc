"""Capture handles whose activations are written down, so that what comes out can be worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from chatspace_lab import CaptureHandle, MessageBoundary
from chatspace_lab.errors import MessageLocationError


class Source:
    """Plays the workers: gives out one tensor."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    async def fetch(self, handles: Sequence[CaptureHandle]) -> None:
        for handle in handles:
            handle.receive(self.rows)

    async def reduce(self, *arguments: Any) -> list[np.ndarray]:
        raise AssertionError(f"analysis asks nothing of the workers: {arguments}")

    def discard(self, key: str) -> None:
        raise AssertionError(f"{key} was dropped unfetched")


def handle(
    rows: Any,
    *,
    prompt: Sequence[int],
    answer: Sequence[int],
    layers: Sequence[int] = (3,),
    boundaries: Sequence[MessageBoundary | MessageLocationError] | None = None,
    spans: Sequence[int] = (0, -1),
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> CaptureHandle:
    """Return a fetched handle with activations ``rows`` [layers, rows, hidden_size]."""
    source = Source(torch.as_tensor(rows, dtype=torch.float32).to(dtype))
    made = CaptureHandle(
        source,
        request_id=options.pop("request", "r"),
        layers=layers,
        spans=spans,
        hidden_size=source.rows.shape[-1],
        prompt_token_ids=prompt,
        boundaries=boundaries,
        **options,
    )
    made.complete(answer)
    asyncio.run(made.fetch())
    return made
