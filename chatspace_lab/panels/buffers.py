"""Numbers on their way to the page: float32, exactly as they were read, and few enough for a saved notebook."""

from __future__ import annotations

from typing import Any

import numpy as np

MAX_BYTES, MIN_BYTES = 120_000, 20_000
"""Of one array. A panel holds four, and with them stays below 1 MiB also where bytes are written as text."""


def pack(values: np.ndarray) -> dict[str, Any]:
    """Return ``{"shape", "data"}``, where ``data`` is little-endian float32.

    Readings are float32, so nothing is rounded: each value is independent of the others, and an infinite one stays
    infinite. NaN stands for a value that was not read.

    Parameters
    ----------
    values
        Any shape and float dtype; what float32 cannot hold becomes infinite.
    """
    with np.errstate(over="ignore"):
        data = np.ascontiguousarray(values, dtype="<f4").tobytes()
    return {"shape": list(values.shape), "data": data}


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """Return what :func:`pack` was given, in float32 precision, as float64."""
    return np.frombuffer(packed["data"], dtype="<f4").astype("float64").reshape(packed["shape"])


def short(value: float | None) -> str:
    """Return a number in as few characters as say it."""
    if value is None or np.isnan(value):
        return "–"
    return f"{value:.3g}" if np.isfinite(value) else "∞" if value > 0 else "−∞"


def tokens_that_fit(layers: int, tokens: int, characters: int = 0) -> int:
    """Return how many tokens' values one array may hold, of ``tokens``, beside texts of so many characters."""
    return min(tokens, max(MAX_BYTES - characters, MIN_BYTES) // (4 * max(layers, 1)))
