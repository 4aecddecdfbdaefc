"""Measures of a text that tell when steering has broken it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from chatspace_lab.errors import AnalysisError


def repetition(token_ids: Sequence[int], n: int = 3) -> float:
    """Return the share of n-grams that occurred before in the same text: 0 is none, near 1 is a loop.

    Parameters
    ----------
    token_ids
        ``[tokens]``, of the answer.
    n
        Tokens per n-gram.

    Returns
    -------
    float
        From 0 to 1; NaN for a text shorter than ``n``, which has no n-gram.

    Raises
    ------
    AnalysisError
        If ``n`` is below 1.
    """
    if n < 1:
        raise AnalysisError(f"n is the number of tokens of an n-gram, at least 1, got {n}")
    ids = [int(token) for token in token_ids]
    grams = [tuple(ids[at : at + n]) for at in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else math.nan


def perplexity(logprobs: Iterable[float]) -> float:
    """Return ``exp(−mean logprob)``: 1 is certain; the size of the vocabulary is a blind guess.

    Parameters
    ----------
    logprobs
        Natural logarithms of each token's probability. A prompt's first token has none: leave it out.

    Returns
    -------
    float
        NaN if there is none; infinite if one is −inf or the mean is beyond what a float holds.

    Raises
    ------
    AnalysisError
        If one is missing, NaN, or above 0 by more than rounding.
    """
    values = list(logprobs)
    for index, value in enumerate(values):
        if value is None or not value <= 1e-4:
            raise AnalysisError(f"logprob {index} is {value}: a logarithm of a probability is a number of at most 0")
    if not values:
        return math.nan
    mean = math.fsum(values) / len(values) if -math.inf not in values else -math.inf
    try:
        return math.exp(-mean)
    except OverflowError:
        return math.inf
