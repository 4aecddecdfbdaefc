"""A named direction per layer, with the evidence for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from chatspace_lab.errors import AnalysisError, LabError
from chatspace_lab.steering.vectors import as_direction, as_index, as_number

_FORMAT = 1
MEASURES = ("norms", "auc", "shuffled", "shuffled_high", "split_half")


@dataclass(frozen=True)
class LayerChoice:
    """A layer to start with, and why.

    Attributes
    ----------
    layer
        The suggestion.
    trusted
        Whether it separates held-out pairs better than shuffled labels do, and both halves of the pairs agree on it.
    reason
        In words, with the numbers.
    """

    layer: int
    trusted: bool
    reason: str


@dataclass(frozen=True, eq=False)
class Direction:
    """A direction per layer. Frozen; vectors are float32 CPU copies of unit length, whatever length was given.

    Attributes
    ----------
    name
        For columns and legends.
    vectors
        Layer to ``[hidden_size]``, stored at unit length.
    norms
        Layer to the length of the raw difference of means, in units of the residual stream; empty if unknown.
    method
        ``"difference of means"``, ``"pca of differences"``, ``"logistic probe"``, or whatever made it.
    details
        How it was made: numbers of pairs, folds, shuffles, the seed. Only what JSON holds.
    auc
        Layer to the area under the ROC curve on held-out pairs: 0.5 is chance, 1 is perfect.
    shuffled, shuffled_high
        The same procedure on shuffled labels: mean over shuffles, and their 95th percentile.
    split_half
        Mean cosine between the directions from two halves of the pairs.
    """

    name: str
    vectors: Mapping[int, torch.Tensor]
    norms: Mapping[int, float] = field(default_factory=dict)
    method: str = "given"
    details: Mapping[str, Any] = field(default_factory=dict)
    auc: Mapping[int, float] = field(default_factory=dict)
    shuffled: Mapping[int, float] = field(default_factory=dict)
    shuffled_high: Mapping[int, float] = field(default_factory=dict)
    split_half: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise AnalysisError("Direction.name is a text that is not empty")
        if not isinstance(self.vectors, Mapping) or not self.vectors:
            raise AnalysisError(f"direction {self.name!r} has no vectors: give a dict of layer to vector")
        vectors = {
            as_index(layer, f"Direction {self.name!r}: a layer"): as_direction(vector, f"{self.name!r}, layer {layer}")
            for layer, vector in self.vectors.items()
        }
        if len({vector.numel() for vector in vectors.values()}) > 1:
            raise AnalysisError(f"direction {self.name!r}: its vectors have different lengths")
        object.__setattr__(self, "vectors", MappingProxyType(dict(sorted(vectors.items()))))
        object.__setattr__(self, "details", MappingProxyType(dict(self.details)))
        for measure in MEASURES:
            given = {int(layer): as_number(v, f"Direction.{measure}") for layer, v in getattr(self, measure).items()}
            if set(given) - set(vectors):
                raise AnalysisError(f"direction {self.name!r}: {measure} of layers that have no vector")
            object.__setattr__(self, measure, MappingProxyType(dict(sorted(given.items()))))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with a vector, ascending."""
        return tuple(self.vectors)

    def at(self, layer: int) -> torch.Tensor:
        """Return the unit vector of a layer, ``[hidden_size]`` float32 on the CPU, as a copy.

        Raises
        ------
        AnalysisError
            If there is none for that layer.
        """
        if layer not in self.vectors:
            raise AnalysisError(
                f"direction {self.name!r} has no vector for layer {layer}, only for {list(self.layers)}"
            )
        return self.vectors[layer].clone()

    def raw(self, layer: int) -> torch.Tensor:
        """Return the vector of a layer at the length of the raw difference of means, ``[hidden_size]`` float32.

        Raises
        ------
        AnalysisError
            If there is no vector for that layer, or its raw length is not known.
        """
        unit = self.at(layer)
        if layer not in self.norms:
            raise AnalysisError(f"direction {self.name!r}: the raw length at layer {layer} is not known")
        return unit * self.norms[layer]

    def frame(self) -> pd.DataFrame:
        """Return a row per layer: ``direction, method, layer, auc, shuffled, shuffled_high, split_half, norm``.

        What is not known is missing. :func:`direction_quality` draws it.
        """
        columns = {"norm": self.norms, **{measure: getattr(self, measure) for measure in MEASURES[1:]}}
        order = ["auc", "shuffled", "shuffled_high", "split_half", "norm"]
        values = {name: [columns[name].get(layer, float("nan")) for layer in self.layers] for name in order}
        return pd.DataFrame({"direction": self.name, "method": self.method, "layer": list(self.layers), **values})

    def best_layer(self) -> LayerChoice:
        """Suggest a layer: of those whose held-out AUC is within 0.01 of the best, the one whose halves agree most.

        Raises
        ------
        AnalysisError
            If no AUC is known.
        """
        if not self.auc:
            raise AnalysisError(f"direction {self.name!r} was not tested: no AUC is known for any layer")
        best = max(self.auc.values())
        near = [layer for layer, auc in self.auc.items() if auc >= best - 0.01]
        layer = max(near, key=lambda at: (self.split_half.get(at, float("-inf")), self.auc[at], -at))
        auc, chance, half = self.auc[layer], self.shuffled_high.get(layer), self.split_half.get(layer)
        others = f"; {len(near)} layers are within 0.01 of the best" if len(near) > 1 else ""
        said = f"layer {layer}: AUC {auc:.3f} on held-out pairs"
        if chance is not None:
            said += f" (95 % of shuffled labels stay below {chance:.3f})"
        if half is not None:
            said += f", halves agree with cosine {half:.2f}"
        said += others
        separates, agrees = auc > (0.5 if chance is None else chance), half is None or half > 0.5
        if not separates:
            said += ". It separates no better than shuffled labels: trust no layer"
        elif not agrees:
            said += ". The halves hardly agree: more pairs are needed before it can be trusted"
        return LayerChoice(layer, separates and agrees, said)

    def save(self, path: str | Path) -> None:
        """Write ``path.safetensors`` (the unit vectors) and ``path.json`` (all else); folders are made."""
        tensors, facts = _files(path)
        tensors.parent.mkdir(parents=True, exist_ok=True)
        save_file({str(layer): vector for layer, vector in self.vectors.items()}, tensors)
        measures = {name: {str(k): v for k, v in getattr(self, name).items()} for name in MEASURES}
        content = {"format": _FORMAT, "name": self.name, "method": self.method, "details": dict(self.details)}
        facts.write_text(json.dumps({**content, **measures}, indent=1, allow_nan=False), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Direction:
        """Read what :meth:`save` wrote.

        Raises
        ------
        AnalysisError
            If a file is missing or damaged, or of another format.
        """
        tensors, facts = _files(path)
        try:
            content = json.loads(facts.read_text(encoding="utf-8"))
            if content.pop("format") != _FORMAT:
                raise AnalysisError(f"{facts} is of a format that this version does not read")
            vectors = {int(layer): vector for layer, vector in load_file(tensors).items()}
            for name in MEASURES:
                content[name] = {int(layer): value for layer, value in content[name].items()}
            return cls(vectors=vectors, **content)
        except LabError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise AnalysisError(f"no direction can be read from {tensors} and {facts.name}: {error}") from error

    def __repr__(self) -> str:
        layers = f"layers {self.layers[0]} to {self.layers[-1]}" if len(self.layers) > 1 else f"layer {self.layers[0]}"
        return f"Direction({self.name!r}, {self.method}, {layers})"


def _files(path: str | Path) -> tuple[Path, Path]:
    """Return the two files of a direction; ``path`` may carry the ending of either."""
    base = Path(path)
    if base.suffix in (".safetensors", ".json"):
        base = base.with_suffix("")
    return base.with_name(base.name + ".safetensors"), base.with_name(base.name + ".json")
