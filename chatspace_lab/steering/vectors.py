"""Checking a vector that a user gave, and keeping it safe from later edits."""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import numpy as np
import torch

from chatspace_lab.errors import SteeringError


def as_vector(value: Any, what: str) -> torch.Tensor:
    """Copy ``value`` into a float32 CPU vector that nobody else can edit.

    Parameters
    ----------
    value
        A 1-d ``torch.Tensor`` of any float or integer dtype and device, a ``numpy`` array, or a list of numbers.
        ``[1, n]`` and ``[n, 1]`` are taken as ``[n]``.
    what
        Names the vector in an error message.

    Returns
    -------
    torch.Tensor
        ``[n]``, float32, on the CPU, contiguous, without gradient.

    Raises
    ------
    SteeringError
        If it is not a vector of finite numbers.
    """
    try:
        given = tensor = _tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        one = "; take one layer's vector of it: .raw(layer) or .at(layer)" if hasattr(value, "raw") else ""
        raise SteeringError(f"{what}: expected a vector of numbers, got {type(value).__name__}{one}") from error
    if tensor.is_meta or tensor.layout != torch.strided:
        raise SteeringError(f"{what}: expected a dense vector, got {tensor.layout} on device {tensor.device}")
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise SteeringError(f"{what}: expected a vector of real numbers, got dtype {tensor.dtype}")
    if tensor.ndim == 2 and 1 in tensor.shape:
        tensor = tensor.reshape(-1)
    if tensor.ndim != 1 or not tensor.numel():
        raise SteeringError(f"{what}: expected a vector of shape [hidden_size], got shape {list(tensor.shape)}")
    tensor = tensor.to(device="cpu", dtype=torch.float32, copy=True).contiguous()
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise SteeringError(f"{what}: {bad} of {tensor.numel()} entries are NaN or infinite")
    if not bool(tensor.any()) and bool((given != 0).any()):
        raise SteeringError(f"{what}: all entries are too small for float32; give the vector at a larger length")
    return tensor


def _tensor(value: Any) -> torch.Tensor:
    """Return ``value`` as a tensor: also an array that is read-only, reversed, or of another byte order."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    array = np.asarray(value)
    if array.dtype.kind in "iuf":
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite
            array = array.astype(
                np.float64 if array.dtype.kind == "f" and array.itemsize > 4 else np.float32, order="C"
            )
    return torch.as_tensor(array)


def as_direction(value: Any, what: str) -> torch.Tensor:
    """Like :func:`as_vector`, scaled to unit length (computed in float64).

    Raises
    ------
    SteeringError
        Also if the vector is zero: it has no direction.
    """
    vector = as_vector(value, what).double()
    norm = float(vector.norm())
    if norm == 0.0:
        raise SteeringError(f"{what}: the vector is zero, it has no direction")
    return (vector / norm).float()


def as_number(value: Any, what: str) -> float:
    """Return ``value`` as a finite float that float32 can hold.

    Raises
    ------
    SteeringError
        If it is no number, not finite, or too large.
    """
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise SteeringError(f"{what}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = np.inf
    if not np.isfinite(number) or abs(number) > float(np.finfo(np.float32).max):
        raise SteeringError(f"{what}: expected a finite number within float32, got {value}")
    return number


def as_index(value: Any, what: str) -> int:
    """Return ``value`` as an int, if it is a whole number of any kind.

    Raises
    ------
    SteeringError
        If it is none.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise SteeringError(f"{what} must be a whole number, got {value!r}")


def as_list(values: Any) -> list[Any]:
    """Return one thing, or several in any kind of collection, as a list; a text, and an array of no axis, is one."""
    return list(values) if np.iterable(values) and not isinstance(values, str) else [values]


def content_key(vector: torch.Tensor) -> bytes:
    """Return 16 bytes that name a float32 CPU vector by its content."""
    return hashlib.blake2b(vector.numpy().tobytes(), digest_size=16).digest()
