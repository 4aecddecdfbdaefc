"""Which pairs must stay together when a direction is tested: near copies, and those that the user names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from chatspace_lab.errors import AnalysisError, NearCopiesWarning

NEAR = 0.15
"""Samples nearer than this share of the usual distance within their side are copies of each other."""
ALIKE = 0.35
"""So are those nearer than this, unless groups were named. Different sentences, even of one template, are above 0.5."""
SAME = 1e-6
"""So are those nearer than this share of their own length: float32's rounding. More would hit large common offsets."""
OVERLAP = 0.6
"""Texts that share this much of their words, weighted by how rare a word is, are copies, unless groups were named: a
number or a phrase was put before the same text."""


def groups_of(pairs: Mapping[int, tuple[np.ndarray, np.ndarray]], groups: Iterable[Hashable] | None) -> np.ndarray:
    """Return the group of each pair: pairs of a group are held out, shuffled and halved together.

    Near copies are put into one group, with a warning, unless ``groups`` does so already. Two pairs are near copies if
    a sample of one and a sample of the other nearly coincide at every layer; or if the differences between their
    samples do, as where several wordings of one pair shift both samples alike. With ``groups`` only pairs that are
    almost identical count.

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
    return _merged(given, _copies(pairs, groups is None), "pairs" if groups is None else "groups")


def groups_of_texts(
    positive: Sequence[Any], negative: Sequence[Any], groups: Iterable[Hashable] | None
) -> list[int] | None:
    """Return groups in which pairs that share a text, but for case, punctuation and a few words, are together.

    Words that many texts have, such as those of a template, count little.

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
    sides = [[_words(text) for text in side] for side in (positive, negative)]
    known = {word: at for at, word in enumerate(sorted({word for side in sides for text in side for word in text}))}
    has = np.zeros((2, len(positive), len(known)))
    for side, texts in enumerate(sides):
        for at, text in enumerate(texts):
            has[side, at, [known[word] for word in text]] = 1
    share = OVERLAP if groups is None else 1.0
    same = np.any([_overlap(has[one], has[other], share) for one in (0, 1) for other in (0, 1)], axis=0)
    merged = _merged(_numbered(groups, len(positive)), same, "pairs" if groups is None else "groups")
    return None if len(set(merged.tolist())) == len(positive) else merged.tolist()


def _words(text: Any) -> set[str]:
    """Return the words of a text or a conversation; a text without any is one word."""
    plain = str(text).casefold()
    return set(re.findall(r"\w+", plain)) or {plain}


def _overlap(left: np.ndarray, right: np.ndarray, share: float) -> np.ndarray:
    """Return which texts of ``left`` have the words of which of ``right``, or more than a share of them.

    ``left`` and ``right`` ``[texts, words]`` are 1 for each word that a text has; the result is ``[texts, texts]``.
    """
    rare = np.log((len(left) + 1) / np.maximum((left.sum(axis=0) + right.sum(axis=0)) / 2, 0.5))
    common = (left * rare) @ right.T
    total = (left * rare).sum(axis=1)[:, None] + (right * rare).sum(axis=1)[None, :] - common
    equal = (left @ right.T) == np.maximum.outer(left.sum(axis=1), right.sum(axis=1))
    return np.asarray(equal | (common > share * total))


def _numbered(groups: Iterable[Hashable] | None, count: int) -> np.ndarray:
    if groups is None:
        return np.arange(count)
    if isinstance(groups, str | bytes | Mapping | Set):
        raise AnalysisError(f"groups must be a list of names or numbers, one per pair, got {type(groups).__name__}")
    # Two tensors with the same value have different hashes, so each would be a label of its own.
    labels: list[Any] = [
        label.item() if isinstance(label, torch.Tensor) and label.ndim == 0 else label for label in groups
    ]
    if len(labels) != count:
        raise AnalysisError(f"groups must have a label per pair, got {len(labels)} for {count} pairs")
    for at, label in enumerate(labels):
        if label is None or (np.ndim(label) == 0 and label != label):  # NaN is not itself
            raise AnalysisError(f"groups[{at}] must be a label, got {label!r}; give a pair that stands alone its own")
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


def _copies(pairs: Mapping[int, tuple[np.ndarray, np.ndarray]], alike: bool) -> np.ndarray:
    """Return which pairs are near copies, ``[pairs, pairs]`` bool; with ``alike`` also those that are less near."""
    everywhere = np.array(True)
    for left, right in pairs.values():
        within = [_distances(side, side) for side in (left, right)]
        upper = np.triu_indices(len(left), 1)
        reach = _reach(np.concatenate([each[upper] for each in within]), alike)
        lengths = [np.linalg.norm(side, axis=1) for side in (left, right)]
        near = np.zeros((len(left), len(left)), dtype=bool)
        across = _distances(left, right)
        for distance, rows, columns in (
            (within[0], lengths[0], lengths[0]),
            (within[1], lengths[1], lengths[1]),
            (across, lengths[0], lengths[1]),
            (across.T, lengths[1], lengths[0]),
        ):
            near |= distance <= np.maximum(reach, SAME * np.maximum.outer(rows, columns))
        if alike:
            shifts = left - right
            distance = _distances(shifts, shifts)
            reach = _reach(distance[upper], alike)
            if reach > SAME * float(np.median(np.linalg.norm(shifts, axis=1))):  # else one shift made all of them
                near |= distance <= reach
        everywhere = everywhere & near
    return np.asarray(everywhere)


def _reach(distances: np.ndarray, alike: bool) -> float:
    """Return below which distance samples are copies, given the distances of all."""
    reach = NEAR * float(np.quantile(distances, 0.75))
    return max(reach, ALIKE * float(np.quantile(distances, 0.4))) if alike else reach


def _distances(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the distance of each row of ``left`` to each of ``right``."""
    centre = left.mean(axis=0)  # a large mean in common would cost digits
    left, right = left - centre, right - centre
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :] - 2 * left @ right.T
    return np.asarray(np.sqrt(np.maximum(squares, 0)))
