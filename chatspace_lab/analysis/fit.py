"""Directions from contrasting pairs, each tested on pairs that it has not seen.

All three methods find a direction inside the span of the samples and do not care how the axes are turned. So each
layer's samples are first written in an orthonormal basis of their span, which loses nothing and makes the many fits
small.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from chatspace_lab.analysis.direction import Direction
from chatspace_lab.analysis.groups import groups_of
from chatspace_lab.analysis.samples import MIN_PAIRS, Samples, auc_of, paired
from chatspace_lab.errors import AnalysisError

Fit = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From ``positive`` and ``negative``, ``[pairs, dimensions]``, to a vector ``[dimensions]`` that points to positive."""


@dataclass(frozen=True)
class _Plan:
    """How a fit is tested."""

    folds: int
    shuffles: int
    splits: int
    seed: int
    groups: Iterable[Hashable] | None


def difference_of_means(
    positive: Samples,
    negative: Samples,
    *,
    name: str = "difference",
    tokens: str | int = "last",
    layers: Sequence[int] | int | None = None,
    folds: int = 5,
    shuffles: int = 20,
    splits: int = 10,
    seed: int = 0,
    groups: Iterable[Hashable] | None = None,
) -> Direction:
    """Return the mean of ``positive`` minus that of ``negative``, per layer.

    Parameters
    ----------
    positive, negative
        Contrasting pairs: sample i of one is the counterpart of sample i of the other. Either dicts of layer to
        ``[pairs, hidden_size]`` (numpy or torch, any float dtype), sequences of fetched capture handles, or what
        ``lab.capture`` returned with ``reduce="mean"`` or ``"last"``.
    name
        Names the direction.
    tokens
        For handles, which token rows make a sample: ``"last"`` (the prompt's last token), ``"prompt"``, ``"answer"``,
        ``"all"`` (their mean), or a message's index.
    layers
        All that are there, with None.
    folds
        Parts that the pairs are divided into; each is held out once. The AUC is the mean over parts.
    shuffles
        How often the whole test is repeated with the two sides of each pair swapped at random.
    splits
        How often the pairs are halved for the split-half cosine.
    seed
        Of folds, shuffles and halves: the same seed gives the same numbers.
    groups
        A label per pair. Pairs with the same label (a question and its paraphrases, runs of one prompt) are never
        divided: they are held out, swapped and halved together. Near copies are grouped without being named.

    Raises
    ------
    AnalysisError
        If there are fewer than four pairs, or groups of them, the sides do not match, a sample holds NaN, or they do
        not differ.

    Warns
    -----
    NearCopiesWarning
        If pairs that ``groups`` does not keep together are near copies.
    """
    plan = _Plan(folds, shuffles, splits, seed, groups)
    return _build("difference of means", _difference, positive, negative, name, tokens, layers, plan, {})


def pca_of_differences(
    positive: Samples,
    negative: Samples,
    *,
    name: str = "pca",
    tokens: str | int = "last",
    layers: Sequence[int] | int | None = None,
    folds: int = 5,
    shuffles: int = 20,
    splits: int = 10,
    seed: int = 0,
    groups: Iterable[Hashable] | None = None,
) -> Direction:
    """Return the axis along which the differences of the pairs are largest, pointing to ``positive``, per layer.

    The differences are not centred: each stands in the PCA with both signs, so what they have in common counts.
    Arguments, result and errors as in :func:`difference_of_means`.
    """
    plan = _Plan(folds, shuffles, splits, seed, groups)
    return _build("pca of differences", _principal, positive, negative, name, tokens, layers, plan, {})


def logistic_probe(
    positive: Samples,
    negative: Samples,
    *,
    name: str = "probe",
    tokens: str | int = "last",
    layers: Sequence[int] | int | None = None,
    regularisation: float = 1.0,
    folds: int = 5,
    shuffles: int = 20,
    splits: int = 10,
    seed: int = 0,
    groups: Iterable[Hashable] | None = None,
) -> Direction:
    """Return the weights of a logistic regression that tells ``positive`` from ``negative``, per layer.

    Samples are centred and divided by their root mean square before the fit, and ``regularisation`` is scikit-learn's
    ``C`` at that scale: smaller is smoother. Other arguments, result and errors as in :func:`difference_of_means`.
    """
    if not regularisation > 0:
        raise AnalysisError(f"regularisation is a number above 0, got {regularisation}")

    def fit(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        samples = np.concatenate([left, right])
        samples = samples - samples.mean(axis=0)
        scale = np.sqrt((samples**2).sum(axis=1).mean())
        if scale == 0:
            return np.zeros(samples.shape[1])
        probe = LogisticRegression(C=regularisation, solver="newton-cholesky", max_iter=1000)
        probe.fit(samples / scale, np.repeat([1, 0], [len(left), len(right)]))
        return np.asarray(probe.coef_[0])

    plan = _Plan(folds, shuffles, splits, seed, groups)
    details = {"regularisation": regularisation}
    return _build("logistic probe", fit, positive, negative, name, tokens, layers, plan, details)


def _difference(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.asarray((left - right).mean(axis=0))


def _principal(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    # The first right singular vector is the first component of the differences with both signs: their mean is zero.
    differences = left - right
    if not differences.any():
        return np.zeros(left.shape[1])
    axis = np.linalg.svd(differences, full_matrices=False)[2][0]
    return np.asarray(axis if (differences @ axis).sum() >= 0 else -axis)


def _build(
    method: str,
    fit: Fit,
    positive: Samples,
    negative: Samples,
    name: str,
    tokens: str | int,
    layers: Sequence[int] | int | None,
    plan: _Plan,
    details: dict[str, Any],
) -> Direction:
    if plan.folds < 2 or plan.shuffles < 1 or plan.splits < 1:
        raise AnalysisError("at least 2 folds, 1 shuffle and 1 split are needed")
    vectors, norms, auc, shuffled, high, half = {}, {}, {}, {}, {}, {}
    samples = paired(positive, negative, tokens, layers)
    source: dict[str, Any] = {"tokens": tokens}
    if isinstance(positive, Mapping) or hasattr(positive, "by_layer"):
        source = {}
    steered = [word for each in (positive, negative) for word in _steered(each)]
    if steered:
        source["steering"] = " and ".join(dict.fromkeys(steered))
    if len(set(steered)) > 1:
        warnings.warn(
            f"samples of {name!r} were captured under different steering ({source['steering']}), so that the direction "
            "is in part that of the steering; capture all with steering=SteeringSpec.none()",
            stacklevel=3,
        )
    pairs = len(next(iter(samples.values()))[0])
    same = [layer for layer, (left, right) in samples.items() if not _differ(left, right)]
    if same:
        raise AnalysisError(f"layer {same[0]}: positive and negative are the same on average, so there is no direction")
    groups = groups_of(samples, plan.groups)
    count = int(groups.max()) + 1
    if count < MIN_PAIRS:
        raise AnalysisError(
            f"{pairs} pairs in {count} groups of the same or nearly the same samples are too few to hold any out; give "
            f"at least {MIN_PAIRS} that differ"
        )
    best = np.zeros(plan.shuffles)
    for layer, (left, right) in samples.items():
        norms[layer] = float(np.linalg.norm(_difference(left, right)))
        left, right, basis = _reduced(left, right)
        with threadpool_limits(1):  # matrices this small are slower on several threads
            vectors[layer] = (fit(left, right) @ basis).astype(np.float32)
            auc[layer] = _held_out(fit, left, right, groups, plan)
            chance = _shuffled(fit, left, right, groups, plan)
            half[layer] = _split_half(fit, left, right, groups, plan)
        shuffled[layer], high[layer] = float(chance.mean()), float(np.quantile(chance, 0.95))
        best = np.maximum(best, chance)
    made = {"pairs": pairs, "folds": min(plan.folds, count), "shuffles": plan.shuffles, "splits": plan.splits}
    if count < pairs:
        made["groups"] = count
    if len(samples) > 1:
        details = {**details, "shuffled_best": float(np.quantile(best, 0.95))}
    return Direction(
        name=name,
        vectors=vectors,
        norms=norms,
        method=method,
        details={**made, "seed": plan.seed, **source, **details},
        auc=auc,
        shuffled=shuffled,
        shuffled_high=high,
        split_half=half,
    )


def _steered(side: Samples) -> list[str]:
    """Return in words under which steering the samples of a side were captured, as far as it is known."""
    if hasattr(side, "steered"):
        return [side.steered]
    handles = [] if isinstance(side, Mapping) or not isinstance(side, Sequence) else side
    known = [each.steering for each in handles if getattr(each, "steering", None) is not None]
    return ["steered" if spec else "unsteered" for spec in known]


def _differ(left: np.ndarray, right: np.ndarray) -> bool:
    # Sums of equal numbers in another order differ by rounding, so nothing that small is a difference.
    return float(np.linalg.norm(_difference(left, right))) > 1e-12 * float(np.abs(left).max())


def _reduced(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return both sides in an orthonormal basis ``[rank, hidden_size]`` of their span, and that basis."""
    samples = np.concatenate([left, right])
    if samples.shape[0] >= samples.shape[1]:
        return left, right, np.eye(samples.shape[1])
    _, _, basis = np.linalg.svd(samples, full_matrices=False)
    turned = samples @ basis.T
    return turned[: len(left)], turned[len(left) :], basis


def _held_out(fit: Fit, left: np.ndarray, right: np.ndarray, groups: np.ndarray, plan: _Plan) -> float:
    """Return the mean AUC over folds of groups, each scored by a direction from the others."""
    order = np.random.default_rng(plan.seed).permutation(int(groups.max()) + 1)
    scores = []
    for part in np.array_split(order, min(plan.folds, len(order))):
        held = np.isin(groups, part)
        direction = fit(left[~held], right[~held])
        scores.append(auc_of(left[held] @ direction, right[held] @ direction))
    return float(np.mean(scores))


def _shuffled(fit: Fit, left: np.ndarray, right: np.ndarray, groups: np.ndarray, plan: _Plan) -> np.ndarray:
    """Return the held-out AUC of each shuffle, ``[shuffles]``. A shuffle swaps the sides of each group or does not."""
    random = np.random.default_rng([plan.seed, 1])
    scores = []
    for _ in range(plan.shuffles):
        swap = random.integers(0, 2, size=(int(groups.max()) + 1, 1)).astype(bool)[groups]
        scores.append(_held_out(fit, np.where(swap, right, left), np.where(swap, left, right), groups, plan))
    return np.array(scores)


def _split_half(fit: Fit, left: np.ndarray, right: np.ndarray, groups: np.ndarray, plan: _Plan) -> float:
    """Return the mean cosine between the directions from two halves of the groups."""
    random = np.random.default_rng([plan.seed, 2])
    cosines = []
    for _ in range(plan.splits):
        order = random.permutation(int(groups.max()) + 1)
        parts = [np.isin(groups, part) for part in np.array_split(order, 2)]
        halves = [fit(left[part], right[part]) for part in parts]
        length = float(np.linalg.norm(halves[0]) * np.linalg.norm(halves[1]))
        cosines.append(float(halves[0] @ halves[1]) / length if length else 0.0)
    return float(np.mean(cosines))
