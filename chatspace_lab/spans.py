"""Sets of positions as flat spans: start, end, start, end, …, sorted and disjoint. An end of −1 is no end."""

from __future__ import annotations

from collections.abc import Sequence

FOREVER = 1 << 40
"""More positions than any request has."""


def pairs(spans: Sequence[int]) -> zip[tuple[int, int]]:
    """Return the spans as (start, end)."""
    return zip(spans[::2], spans[1::2], strict=True)


def overlaps(spans: Sequence[int], first: int, count: int) -> list[tuple[int, int]]:
    """Return the parts of positions ``[first, first + count)`` inside ``spans``, as (start, stop)."""
    stop = first + count
    if len(spans) == 2 and spans[0] <= first and (spans[1] < 0 or spans[1] >= stop):
        return [(first, stop)] if count > 0 else []  # nearly always
    parts = []
    for low, high in pairs(spans):
        start, end = max(low, first), stop if high < 0 else min(high, stop)
        if start < end:
            parts.append((start, end))
    return parts


def lasting(spans: Sequence[int], position: int) -> int:
    """Return how many positions right after this one are, like it, in the spans or like it outside."""
    for edge in spans:
        if edge > position:
            return edge - position - 1
    return FOREVER


def below(spans: Sequence[int], stop: int) -> list[int]:
    """Return the positions of ``spans`` below ``stop``, ascending."""
    return [position for low, high in overlaps(spans, 0, stop) for position in range(low, high)]


def rank(spans: Sequence[int], position: int) -> int:
    """Return how many positions of ``spans`` lie below ``position``."""
    if len(spans) == 2 and spans[1] < 0:
        return max(position - spans[0], 0)
    return sum(high - low for low, high in overlaps(spans, 0, position))
