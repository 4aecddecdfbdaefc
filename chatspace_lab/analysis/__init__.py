"""Look at activations: tidy frames, tested directions, doses and figures. No engine inside.

Everything is a function of fetched captures, arrays or frames. Names are resolved when they are first used; they need
the extra ``lab`` (pandas, plotly, scikit-learn).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatspace_lab import lazy

if TYPE_CHECKING:
    from chatspace_lab.analysis.direction import Direction, LayerChoice, SteeringChoice
    from chatspace_lab.analysis.dose import (
        dose_frame,
        dose_of_scale,
        level_of,
        residual_norms,
        scale_for_dose,
        steering_frame,
        sweep_cells,
    )
    from chatspace_lab.analysis.figures.directions import direction_quality
    from chatspace_lab.analysis.figures.export import save_figure
    from chatspace_lab.analysis.figures.heatmaps import cosine_matrix, token_heatmap
    from chatspace_lab.analysis.figures.layers import layer_profile
    from chatspace_lab.analysis.figures.messages import message_norm_bars
    from chatspace_lab.analysis.figures.pca import pca_scatter
    from chatspace_lab.analysis.figures.sweep import dose_response
    from chatspace_lab.analysis.figures.tokens import projection_lines
    from chatspace_lab.analysis.fit import difference_of_means, logistic_probe, pca_of_differences
    from chatspace_lab.analysis.frames import attention_sinks, directions_of, layer_frame, readings_frame, token_frame
    from chatspace_lab.analysis.messages import (
        cosine_frame,
        message_cosines,
        message_frame,
        message_means,
        message_summary,
    )
    from chatspace_lab.analysis.pca import pca_frame
    from chatspace_lab.analysis.rows import mean_activation, token_rows
    from chatspace_lab.analysis.samples import samples_of
    from chatspace_lab.analysis.text import perplexity, repetition
    from chatspace_lab.analysis.tokens import token_texts, visible

_HOME = {
    "Direction": "direction",
    "LayerChoice": "direction",
    "SteeringChoice": "direction",
    "attention_sinks": "frames",
    "cosine_frame": "messages",
    "cosine_matrix": "figures.heatmaps",
    "difference_of_means": "fit",
    "direction_quality": "figures.directions",
    "directions_of": "frames",
    "dose_frame": "dose",
    "dose_of_scale": "dose",
    "dose_response": "figures.sweep",
    "layer_frame": "frames",
    "layer_profile": "figures.layers",
    "level_of": "dose",
    "logistic_probe": "fit",
    "mean_activation": "rows",
    "message_cosines": "messages",
    "message_frame": "messages",
    "message_means": "messages",
    "message_norm_bars": "figures.messages",
    "message_summary": "messages",
    "pca_frame": "pca",
    "pca_of_differences": "fit",
    "pca_scatter": "figures.pca",
    "perplexity": "text",
    "projection_lines": "figures.tokens",
    "readings_frame": "frames",
    "repetition": "text",
    "residual_norms": "dose",
    "samples_of": "samples",
    "save_figure": "figures.export",
    "scale_for_dose": "dose",
    "steering_frame": "dose",
    "sweep_cells": "dose",
    "token_frame": "frames",
    "token_heatmap": "figures.heatmaps",
    "token_rows": "rows",
    "token_texts": "tokens",
    "visible": "tokens",
}

__all__ = [
    "Direction",
    "LayerChoice",
    "SteeringChoice",
    "attention_sinks",
    "cosine_frame",
    "cosine_matrix",
    "difference_of_means",
    "direction_quality",
    "directions_of",
    "dose_frame",
    "dose_of_scale",
    "dose_response",
    "layer_frame",
    "layer_profile",
    "level_of",
    "logistic_probe",
    "mean_activation",
    "message_cosines",
    "message_frame",
    "message_means",
    "message_norm_bars",
    "message_summary",
    "pca_frame",
    "pca_of_differences",
    "pca_scatter",
    "perplexity",
    "projection_lines",
    "readings_frame",
    "repetition",
    "residual_norms",
    "samples_of",
    "save_figure",
    "scale_for_dose",
    "steering_frame",
    "sweep_cells",
    "token_frame",
    "token_heatmap",
    "token_rows",
    "token_texts",
    "visible",
]

__getattr__, __dir__ = lazy.names(__name__, _HOME, lazy.LAB_EXTRA)
