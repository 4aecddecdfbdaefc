"""A named direction per layer, with the evidence for it."""

from __future__ import annotations

import contextlib
import html
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from chatspace_lab.analysis.samples import Samples, auc_of, sides
from chatspace_lab.errors import AnalysisError, LabError
from chatspace_lab.steering.vectors import as_direction, as_index, as_number

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_FORMAT = 1
SUFFIXES = (".safetensors", ".json")
LAST, FIRST = 0.8, 0.3
"""Shares of the depth between which steering is suggested. Later additions change the next token and little else."""
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


@dataclass(frozen=True)
class SteeringChoice:
    """Layers to try steering at, and why.

    Attributes
    ----------
    layers
        Neighbours, ascending. Add the vector at one of them, or at all of them with a part of the dose each.
    layer
        The one to start with.
    trusted
        As of :class:`LayerChoice`, at :attr:`layer`.
    reason
        In words.
    """

    layers: tuple[int, ...]
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

    Examples
    --------
    ``lab.direction`` makes one from two lists of texts. From samples at hand:

    >>> import numpy as np
    >>> from chatspace_lab.analysis import difference_of_means
    >>> random = np.random.default_rng(0)
    >>> negative = random.normal(size=(12, 64))
    >>> positive = random.normal(size=(12, 64)) + 2.0
    >>> joy = difference_of_means({7: positive}, {7: negative}, name="joy")
    >>> joy.best_layer().layer, joy.auc[7]
    (7, 1.0)
    >>> joy.auc_on({7: random.normal(size=(5, 64)) + 2.0}, {7: random.normal(size=(9, 64))})
    {7: 1.0}
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

    def __reduce__(self) -> tuple[Any, ...]:
        names = (field.name for field in fields(self))
        state = {name: getattr(self, name) for name in names}
        return _restored, ({k: dict(v) if isinstance(v, Mapping) else v for k, v in state.items()},)

    def __copy__(self) -> Direction:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Direction:
        return self  # frozen

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

    def auc_on(
        self, positive: Samples | Sequence[Any], negative: Samples | Sequence[Any], *, tokens: str | int = "last"
    ) -> dict[int, float]:
        """Return layer to the area under the ROC curve on other samples: 0.5 is chance, 1 is perfect.

        Parameters
        ----------
        positive, negative
            Samples as for :func:`difference_of_means`, but they need not be pairs: the sides may differ in number. Or
            texts or conversations, while the lab whose :meth:`~chatspace_lab.LabSession.direction` made this is open:
            they are captured as those were that it was made from.
        tokens
            For capture handles: which rows make a sample.

        Raises
        ------
        AnalysisError
            If a side is empty, holds NaN, or shares no layer with this direction; or texts are given and no lab is
            there to run them.
        """
        positive, negative = (self._samples(side) for side in (positive, negative))
        left, right = sides(positive, negative, tokens, None)
        shared = [layer for layer in self.layers if layer in left and layer in right]
        if not shared:
            raise AnalysisError(
                f"direction {self.name!r} has layers {list(self.layers)}; the samples have {sorted(left)} and "
                f"{sorted(right)}"
            )
        found = {}
        for layer in shared:
            unit = self.vectors[layer].double().numpy()
            for side in (left, right):
                if side[layer].shape[1] != len(unit):
                    raise AnalysisError(
                        f"layer {layer}: samples have {side[layer].shape[1]} entries, direction {self.name!r} has "
                        f"{len(unit)}"
                    )
            found[layer] = auc_of(left[layer] @ unit, right[layer] @ unit)
        return found

    def _samples(self, side: Any) -> Samples:
        """Return samples; texts and conversations are run by the lab that made this direction."""
        texts = isinstance(side, list | tuple) and bool(side) and isinstance(side[0], str | list | tuple | Mapping)
        if not texts and not isinstance(side, str):
            found: Samples = side
            return found
        capture: Callable[[Any], Samples] | None = self.__dict__.get("_capture")
        if capture is None:
            raise AnalysisError(
                f"direction {self.name!r} is not tied to a lab, so it cannot run texts: give samples, as "
                f"lab.capture(texts, layers, ...) returns them"
            )
        return capture([side] if isinstance(side, str) else side)

    def tied(self, capture: Callable[[Any], Samples]) -> Direction:
        """Return this direction with a way to turn texts into samples, for :meth:`auc_on`; it is never saved."""
        other: Direction = _restored({field.name: getattr(self, field.name) for field in fields(self)})
        object.__setattr__(other, "_capture", capture)
        return other

    @property
    def _depth(self) -> int:
        """Number of decoder blocks, as far as it is known."""
        return max(int(self.details.get("layer_count", 0)), self.layers[-1] + 1)

    def _middle_first(self, layers: Sequence[int]) -> list[int]:
        """Return layers by their distance to the middle of the model, or of the direction's own layers."""
        known = "layer_count" in self.details
        middle = (self._depth - 1) / 2 if known else (self.layers[0] + self.layers[-1]) / 2
        half, auc = self.split_half, self.auc
        return sorted(layers, key=lambda at: (abs(at - middle), -half.get(at, 0.0), -auc.get(at, 0.0), at))

    def _equal(self, layers: Sequence[int]) -> list[int]:
        """Return those of some layers that read as well as the best of them, and whose halves agree about as well."""
        best = max(self.auc[layer] for layer in layers)
        near = [layer for layer in layers if self.auc[layer] >= best - 0.01]
        agreeing = max(self.split_half.get(layer, 0.0) for layer in near)
        return [layer for layer in near if self.split_half.get(layer, 0.0) >= agreeing - 0.2]

    def best_layer(self) -> LayerChoice:
        """Suggest a layer to read at: of those that separate held-out pairs equally well, the one nearest the middle.

        Equally well: a held-out AUC within 0.01 of the best, and a cosine of halves within 0.2 of theirs. The layer
        that reads best is often not the best to steer at; :meth:`steering_layers` suggests where to try that. The last
        fifth of the layers is offered for reading only.

        Raises
        ------
        AnalysisError
            If no AUC is known.
        """
        if not self.auc:
            raise AnalysisError(f"direction {self.name!r} was not tested: no AUC is known for any layer")
        near = self._equal(list(self.auc))
        layer = self._middle_first(near)[0]
        others = f"; {len(near)} layers do equally well, this one is nearest the middle" if len(near) > 1 else ""
        trusted, said = self._judged(layer, others)
        if layer >= LAST * self._depth:
            said += ". This late it is for reading only: an addition here changes the next token and little else"
        return LayerChoice(layer, trusted, said)

    def steering_layers(self) -> SteeringChoice:
        """Suggest layers to try steering at: neighbours around the middle at which the direction is readable as well.

        The first three tenths and the last fifth of the layers are left out, and at most a fifth of all layers are
        suggested. It is a place to begin: only a sweep (``lab.sweep``) says where steering works.
        """
        depth = self._depth
        inside = [layer for layer in self.layers if FIRST * depth <= layer < LAST * depth]
        window = inside or list(self.layers)
        tested = [layer for layer in window if layer in self.auc]
        eligible = set(self._equal(tested) if tested else window)
        start = self._middle_first(sorted(eligible))[0]
        run = [start]
        for layer in self._middle_first(window):  # grows on both sides, as long as neighbours are eligible
            at = sorted(run)
            steps = [window[i] for i in (window.index(at[0]) - 1, window.index(at[-1]) + 1) if 0 <= i < len(window)]
            if layer in eligible and layer in steps and len(run) < max(1, depth // 5):
                run.append(layer)
        layers = tuple(sorted(run))
        where = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        if not tested:
            return SteeringChoice(layers, start, False, f"{where}, by their depth alone: the direction was not tested")
        trusted, said = self._judged(start, "")
        if not inside:
            said += ". It has no layer in the middle of the model, where steering mostly works"
        return SteeringChoice(layers, start, trusted, f"{where}; {said}")

    def _judged(self, layer: int, others: str) -> tuple[bool, str]:
        """Return whether a layer can be trusted, and why, in words."""
        auc, chance, half = self.auc[layer], self.shuffled_high.get(layer), self.split_half.get(layer)
        if chance is not None:  # the layer was chosen among several: so is the best of shuffled labels
            chance = max(chance, float(self.details.get("shuffled_best", chance)))
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
        return separates and agrees, said

    def save(self, path: str | Path) -> None:
        """Write ``path.safetensors`` (the unit vectors) and ``path.json`` (all else); folders are made.

        Raises
        ------
        AnalysisError
            If the path's ending is that of another format, or it cannot be written.
        """
        tensors, facts = _files(path)
        # Written beside and moved: a save that fails, or is interrupted, leaves an older one whole.
        written = [file.with_name(file.name + ".new") for file in (tensors, facts)]
        try:
            text = json.dumps({"format": _FORMAT, **self.facts()}, indent=1, allow_nan=False)
            tensors.parent.mkdir(parents=True, exist_ok=True)
            save_file({str(layer): vector for layer, vector in self.vectors.items()}, written[0])
            written[1].write_text(text, encoding="utf-8")
            for file, new in zip((tensors, facts), written, strict=True):
                os.replace(new, file)
        except (OSError, TypeError, ValueError, SafetensorError) as error:
            raise AnalysisError(f"direction {self.name!r} cannot be written to {tensors}: {error}") from error
        finally:
            for new in written:
                with contextlib.suppress(OSError):
                    new.unlink(missing_ok=True)

    def facts(self) -> dict[str, Any]:
        """Return all but the vectors, as plain data that JSON holds; with the vectors, :meth:`from_facts` reads it."""
        measures = {name: {str(k): v for k, v in getattr(self, name).items()} for name in MEASURES}
        return {"name": self.name, "method": self.method, "details": dict(self.details), **measures}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], vectors: Mapping[int, torch.Tensor]) -> Direction:
        """Return the direction that :meth:`facts` describes.

        Raises
        ------
        AnalysisError, SteeringError, KeyError, TypeError, ValueError
            If something is missing or damaged.
        """
        content = dict(facts)
        for name in MEASURES:
            content[name] = {int(layer): value for layer, value in content[name].items()}
        return cls(vectors=vectors, **content)

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
            content: dict[str, Any] = json.loads(facts.read_text(encoding="utf-8"))
            if content.pop("format") != _FORMAT:
                raise AnalysisError(f"{facts} is of a format that this version does not read")
            vectors = {int(layer): vector for layer, vector in load_file(tensors).items()}
            return cls.from_facts(content, vectors)
        except LabError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise AnalysisError(f"no direction can be read from {tensors} and {facts.name}: {error}") from error

    def figure(self) -> Figure:
        """Draw AUC, shuffled level, cosine of halves and raw length per layer: ``direction_quality(self.frame())``."""
        from chatspace_lab.analysis.figures.directions import direction_quality

        return direction_quality(self.frame())

    def __repr__(self) -> str:
        layers = f"layers {self.layers[0]} to {self.layers[-1]}" if len(self.layers) > 1 else f"layer {self.layers[0]}"
        head = f"Direction({self.name!r}, {self.method}, {layers})"
        return "\n  ".join([head, *self._summary()])

    def _summary(self) -> list[str]:
        """Return the evidence in a few lines; none if there is none."""
        made = []
        if "pairs" in self.details:
            groups = f" in {self.details['groups']} groups" if "groups" in self.details else ""
            made.append(f"{self.details['pairs']} pairs{groups}")
        made += [str(self.details[key]) for key in ("positions", "steering") if key in self.details]
        lines = [f"made from {', '.join(made)}"] if made else []
        if not self.auc:
            return lines
        choice, steering = self.best_layer(), self.steering_layers()
        level = (
            f"; shuffled labels {self.shuffled[choice.layer]:.2f} on average" if choice.layer in self.shuffled else ""
        )
        length = f"; raw length {self.norms[choice.layer]:.3g}" if choice.layer in self.norms else ""
        steer = ", ".join(map(str, steering.layers))
        return [
            *lines,
            f"read at {choice.reason}{level}{length}",
            f"try steering at layer {steering.layer} (of {steer}; lab.sweep says where it works)",
            *([] if choice.trusted else ["not to be trusted as it is"]),
        ]

    def _repr_html_(self) -> str:
        lines = "<br>".join(html.escape(line) for line in self._summary())
        table = self.frame().drop(columns=["direction", "method"]).round(3).to_html(index=False, na_rep="–", border=0)
        return (
            f"<div class='mathjax_ignore tex2jax_ignore'><b>{html.escape(self.name)}</b>: {html.escape(self.method)}"
            f"<br>{lines}<details><summary>every layer; .figure() draws it</summary>{table}</details></div>"
        )


def _restored(state: dict[str, Any]) -> Direction:
    """Return a direction with just these fields, which were checked before."""
    direction = object.__new__(Direction)
    for name, value in state.items():
        object.__setattr__(direction, name, MappingProxyType(dict(value)) if isinstance(value, Mapping) else value)
    return direction


def _files(path: str | Path) -> tuple[Path, Path]:
    """Return the two files of a direction; ``path`` may carry the ending of either, or a number (``v1.2``).

    Raises
    ------
    AnalysisError
        If it has the ending of another format.
    """
    base = Path(path).expanduser()
    if base.suffix in SUFFIXES:
        base = base.with_suffix("")
    elif base.suffix and not base.suffix[1:].isdigit():
        raise AnalysisError(
            f"{base.name}: a direction is kept as two files, .safetensors and .json, not as {base.suffix}; give a name "
            f"with one of these endings, or with none"
        )
    if not base.name:
        raise AnalysisError(f"{path}: a direction needs a file's name")
    return base.with_name(base.name + ".safetensors"), base.with_name(base.name + ".json")
