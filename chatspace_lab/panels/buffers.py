"""Numbers on their way to the page: half precision with one factor, small enough for a saved notebook."""

from __future__ import annotations

from typing import Any

import numpy as np

MAX_BYTES, MIN_BYTES = 120_000, 20_000
"""Of one array. A panel holds four, and with them stays below 1 MiB also where bytes are written as text."""


def pack(values: np.ndarray) -> dict[str, Any]:
    """Return ``{"shape", "factor", "data"}``: ``data`` is float16, and ``value = data · factor``.

    Parameters
    ----------
    values
        Any shape; NaN is nothing to show. The factor is a power of two that brings the largest to at most 1, so that
        nothing overflows and each value keeps 11 bits.
    """
    largest = float(np.abs(np.nan_to_num(values)).max()) if values.size else 0.0
    factor = float(2.0 ** np.ceil(np.log2(largest))) if largest > 0 else 1.0
    data = np.ascontiguousarray(values / factor, dtype="<f2").tobytes()
    return {"shape": list(values.shape), "factor": factor, "data": data}


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """Return what :func:`pack` was given, to 11 bits, as float64."""
    flat = np.frombuffer(packed["data"], dtype="<f2").astype("float64") * packed["factor"]
    return flat.reshape(packed["shape"])


def short(value: float | None) -> str:
    """Return a number in as few characters as say it."""
    return "–" if value is None or not np.isfinite(value) else f"{value:.3g}"


def tokens_that_fit(layers: int, tokens: int, characters: int = 0) -> int:
    """Return how many tokens' values one array may hold, of ``tokens``, beside texts of so many characters."""
    return min(tokens, max(MAX_BYTES - characters, MIN_BYTES) // (2 * max(layers, 1)))
