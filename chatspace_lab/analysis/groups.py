"""Which pairs must stay together when a direction is tested: near copies, and those that the user names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from chatspace_lab.errors import AnalysisError, NearCopiesWarning

NEAR = 0.15
"""Samples nearer than this share of the usual distance within their side are copies of each other."""
SAME = 1e-6
"""So are those nearer than this share of their own length: float32's rounding. More would hit large common offsets."""


def groups_of(pairs: Mapping[int, tuple[np.ndarray, np.ndarray]], groups: Iterable[Hashable] | None) -> np.ndarray:
    """Return the group of each pair: pairs of a group are held out, shuffled and halved together.

    Near copies are put into one group, with a warning, unless ``groups`` does so already. Two pairs are near copies if
    a sample of one and a sample of the other nearly coincide at every layer.

    Parameters
    ----------
    pairs
        Layer to ``positive`` and ``negative``, each ``[pairs, hidden_size]`` float64.
    groups
        A label per pair, or None: each pair by itself.

    Returns
    -------
    numpy.ndarray
        ``[pairs]`` int64, counted from 0 in the order in which groups appear.

    Raises
    ------
    AnalysisError
        If there are not as many labels as pairs.
    """
    count = len(next(iter(pairs.values()))[0])
    given = _numbered(groups, count)
    return _merged(given, _copies(pairs), "pairs" if groups is None else "groups")


def groups_of_texts(
    positive: Sequence[Any], negative: Sequence[Any], groups: Iterable[Hashable] | None
) -> list[int] | None:
    """Return groups in which pairs that share a text, but for case, spaces and punctuation, are together.

    Parameters
    ----------
    positive, negative
        Texts or conversations, as many on both sides.
    groups
        A label per pair, or None.

    Returns
    -------
    list of int or None
        None if every pair is by itself.

    Raises
    ------
    AnalysisError
        If there are not as many labels as pairs.
    """
    words = [
        [re.findall(r"\w+", str(text).casefold()) or [str(text)] for text in side] for side in (positive, negative)
    ]
    pairs = list(zip(*words, strict=True))
    same = np.array([[one[0] in other or one[1] in other for other in pairs] for one in pairs])
    merged = _merged(_numbered(groups, len(positive)), same, "pairs" if groups is None else "groups")
    return None if len(set(merged.tolist())) == len(positive) else merged.tolist()


def _numbered(groups: Iterable[Hashable] | None, count: int) -> np.ndarray:
    if groups is None:
        return np.arange(count)
    labels = list(groups)
    if len(labels) != count:
        raise AnalysisError(f"groups must have a label per pair, got {len(labels)} for {count} pairs")
    try:
        numbers = {label: at for at, label in enumerate(dict.fromkeys(labels))}
    except TypeError as error:
        raise AnalysisError("groups must be a list of names or numbers, one per pair") from error
    return np.array([numbers[label] for label in labels])


def _merged(given: np.ndarray, copies: np.ndarray, kind: str) -> np.ndarray:
    """Return groups in which pairs that are copies, ``[pairs, pairs]`` bool, are together; warn if that changed any."""
    found = given.copy()
    for first, second in np.argwhere(np.triu(copies, 1)):
        low, high = sorted((found[first], found[second]))
        found[found == high] = low
    found = np.unique(found, return_inverse=True)[1].reshape(-1)
    before, after = len(set(given.tolist())), int(found.max()) + 1
    if after < before:
        warnings.warn(
            f"{before - after} of {before} {kind} are near copies of others; they are held out, shuffled and halved "
            "together, so that nothing is tested on what it was fitted to. Silence this with groups=, a label per pair",
            NearCopiesWarning,
            stacklevel=4,
        )
    return found


def _copies(pairs: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return which pairs are near copies, ``[pairs, pairs]`` bool."""
    everywhere = np.array(True)
    for left, right in pairs.values():
        within = [_distances(side, side) for side in (left, right)]
        upper = np.triu_indices(len(left), 1)
        usual = float(np.quantile(np.concatenate([each[upper] for each in within]), 0.75))
        lengths = [np.linalg.norm(side, axis=1) for side in (left, right)]
        near = np.zeros((len(left), len(left)), dtype=bool)
        across = _distances(left, right)
        for distance, rows, columns in (
            (within[0], lengths[0], lengths[0]),
            (within[1], lengths[1], lengths[1]),
            (across, lengths[0], lengths[1]),
            (across.T, lengths[1], lengths[0]),
        ):
            near |= distance <= np.maximum(NEAR * usual, SAME * np.maximum.outer(rows, columns))
        everywhere = everywhere & near
    return np.asarray(everywhere)


def _distances(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the distance of each row of ``left`` to each of ``right``."""
    centre = left.mean(axis=0)  # a large mean in common would cost digits
    left, right = left - centre, right - centre
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :] - 2 * left @ right.T
    return np.asarray(np.sqrt(np.maximum(squares, 0)))
