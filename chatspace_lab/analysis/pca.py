"""Principal components of a set of means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from sklearn.decomposition import PCA

from chatspace_lab.analysis.rows import as_numbers
from chatspace_lab.errors import AnalysisError
from chatspace_lab.steering.names import did_you_mean
from chatspace_lab.steering.vectors import as_index

FAR = 20.0
"""How many times the median distance from the median a vector may be away, to count for the axes."""


def pca_frame(
    means: Mapping[str, Any], groups: Mapping[str, str] | None = None, components: int = 2
) -> tuple[pd.DataFrame, np.ndarray]:
    """Place named vectors on their principal components.

    Parameters
    ----------
    means
        ``{label: [hidden_size]}``, at least three. Centred, not scaled. One that is further from the median of all than
        :data:`FAR` times the median distance, as an attention sink is, does not count for the axes.
    groups
        Label to group, for colour and symbol; labels without one are in no group.
    components
        How many, at most ``len(means) − 1`` and ``hidden_size``.

    Returns
    -------
    frame : pandas.DataFrame
        A row per label: ``label``, ``group``, ``pc1``, ``pc2``, … (in units of the residual stream) and
        ``explained1``, ``explained2``, … (the share of the variance, from 0 to 1, the same in each row), and
        ``left_out``: whether the vector did not count.
    axes : numpy.ndarray
        ``[components, hidden_size]`` float32, unit vectors. Each points to where its largest entry is positive, so
        signs do not change from run to run.

    Raises
    ------
    AnalysisError, SteeringError
        If there are too few vectors, or they differ in length, hold NaN, or are all the same; or ``groups`` names one
        that is not there.
    """
    labels = list(means)
    unknown = [label for label in groups or {} if label not in means]
    if unknown:
        raise AnalysisError(f"groups: {unknown[0]!r} is not among the means{did_you_mean(str(unknown[0]), labels)}")
    arrays = [as_numbers(means[label], f"means[{label!r}]") for label in labels]
    if len({array.shape for array in arrays}) > 1 or (arrays and arrays[0].ndim != 1):
        raise AnalysisError(f"means: expected vectors of one length, got {sorted({array.shape for array in arrays})}")
    most = min(len(labels) - 1, len(arrays[0])) if arrays else 0
    if not 1 <= as_index(components, "components") <= most:
        raise AnalysisError(f"{len(labels)} vectors have at most {most} components, not {components}")
    matrix = np.stack(arrays)
    fits = (np.abs(matrix) <= np.finfo(np.float32).max).all(axis=1)  # NaN does not
    if not fits.all():
        bad = [label for label, fit in zip(labels, fits, strict=True) if not fit]
        raise AnalysisError(f"means: {bad[:8]} hold NaN, infinite entries, or numbers beyond float32")
    if not np.ptp(matrix, axis=0).any():
        raise AnalysisError("means: all vectors are the same, so there is no axis along which they differ")
    size = float(np.abs(matrix).max())
    matrix = matrix / size  # so that no square vanishes
    distances = np.linalg.norm(matrix - np.median(matrix, axis=0), axis=1)
    left_out = distances > FAR * np.median(distances)
    if not np.median(distances) or len(labels) - left_out.sum() <= components:
        left_out[:] = False
    pca = PCA(components, svd_solver="full").fit(matrix[~left_out])
    axes = pca.components_
    signs = np.sign(axes[np.arange(components), np.abs(axes).argmax(axis=1)])
    scores = pca.transform(matrix) * signs * size
    frame = pd.DataFrame(
        {
            "label": pd.Series(labels, dtype="str"),
            "group": pd.Series([(groups or {}).get(label, "") for label in labels], dtype="str"),
            **{f"pc{index + 1}": scores[:, index] for index in range(components)},
            **{f"explained{index + 1}": float(share) for index, share in enumerate(pca.explained_variance_ratio_)},
            "left_out": left_out,
        }
    )
    return frame, (axes * signs[:, None]).astype(np.float32)
