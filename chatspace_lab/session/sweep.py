"""A grid of layers and scales as one batch: what each does to the text, and whether the text still makes sense."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from chatspace_lab.analysis.text import perplexity, repetition
from chatspace_lab.engine.model import VLLMSteerModel
from chatspace_lab.engine.observer import Progress
from chatspace_lab.engine.requests import Prompt, seeds_of
from chatspace_lab.engine.together import together
from chatspace_lab.errors import RequestError, SteeringError
from chatspace_lab.readings import Readings, mean_without, sinks
from chatspace_lab.session.measure import Bound
from chatspace_lab.steering.directions import at_layer
from chatspace_lab.steering.program import check_layer
from chatspace_lab.steering.specs import AblationSpec, AddSpec, ProjectionCapSpec, SteeringSpec
from chatspace_lab.steering.vectors import as_list, as_number, as_vector
from chatspace_lab.steering.where import Where

if TYPE_CHECKING:
    import pandas as pd

OPERATIONS = ("add", "ablate", "cap")
BOUNDS = ("min", "max")
COLUMNS = (
    "layer",
    "scale",
    "dose",
    "text",
    "projection",
    "perplexity",
    "repetition",
    "tokens",
    "finish_reason",
    "relative",
    "prompt_index",
)


class Cell(NamedTuple):
    """One cell of the grid. ``scale`` is known once :meth:`scaled`, if it was asked for as a dose or a quantile."""

    layer: int
    bound: Bound
    vector: torch.Tensor
    scale: float = math.nan

    def scaled(self, value: float, operation: str = "add") -> Cell:
        """Return this cell with its scale; ``value`` is what its bound is in units of the residual stream."""
        adds = operation == "add" and self.bound.kind == "dose"
        return self._replace(scale=value / float(self.vector.double().norm()) if adds else value)


class Grid:
    """The runs of a sweep and what came of them, in the order of the grid.

    Parameters
    ----------
    model
        Runs them.
    prompts
        As ``model.prepare`` gives them; each cell answers each.
    cells
        What to run.
    operation, bound
        ``"add"``, ``"ablate"`` or ``"cap"``, and which bound a cap has.
    read_layer
        Where projections are read; None is each run's own layer.
    norms
        Mean residual norm per layer on the prompts; doses are relative to it.
    score
        From an answer's text to a number, or None.
    reader
        A layer and a vector: the unsteered model reads each answer again after its prompt, and the frame has the mean
        of x·u there as ``text_projection``: not what was added, only what it did to the text. Needs ``perplexity``.
    sampling
        Of every run.
    progress
        Is told of every request.
    """

    def __init__(
        self,
        model: VLLMSteerModel,
        prompts: Sequence[Prompt],
        cells: Sequence[Cell],
        *,
        operation: str,
        bound: str = "max",
        read_layer: int | None,
        norms: Mapping[int, float],
        perplexity: bool,
        score: Callable[[str], float] | None = None,
        reader: tuple[int, torch.Tensor] | None = None,
        sampling: dict[str, Any],
        progress: Progress | None = None,
    ) -> None:
        self._model, self._prompts, self._cells = model, list(prompts), list(cells)
        self._operation, self._bound, self._read_layer, self._norms = operation, bound, read_layer, norms
        self._perplexity, self._score, self._reader, self._sampling = perplexity, score, reader, sampling
        self._seeds, self._progress = seeds_of(self._prompts, sampling.get("seed")), progress
        self._rows: dict[tuple[int, int], tuple[Any, ...]] = {}

    async def run(self) -> pd.DataFrame:
        """Run everything together. What is finished stays in :meth:`frame`, also when this is cancelled."""
        everything = product(range(len(self._cells)), range(len(self._prompts)))
        await together(self._one(cell, prompt) for cell, prompt in everything)
        return self.frame()

    def _spec(self, cell: Cell) -> SteeringSpec:
        if self._operation == "cap":
            return SteeringSpec.at(cell.layer, ProjectionCapSpec(cell.vector, **{self._bound: cell.scale}))
        kind = AddSpec if self._operation == "add" else AblationSpec
        return SteeringSpec.at(cell.layer, kind(cell.vector, cell.scale))

    def _dose(self, cell: Cell) -> float:
        length = {"add": float(cell.vector.double().norm()), "cap": 1.0}.get(self._operation, math.nan)
        return cell.scale * length / self._norms[cell.layer]

    async def _one(self, index: int, prompt_index: int) -> None:
        cell, prompt = self._cells[index], self._prompts[prompt_index]
        layer = cell.layer if self._read_layer is None else self._read_layer
        [output], [handle] = await self._model.generate(
            prompt,
            steering=self._spec(cell),
            capture_layers=[layer],
            capture_where="answer",
            raw_output=True,
            progress=self._progress,
            **{**self._sampling, **self._seeds[prompt_index]},
        )
        async with handle:
            readings = await handle.read({"v": cell.vector})
        answer = output.outputs[0]
        tokens = list(answer.token_ids)
        projection = _mean_projection(readings)
        unsteered = await self._reread(prompt.token_ids, tokens) if self._perplexity else (math.nan, math.nan)
        row = (
            cell.layer,
            cell.scale,
            self._dose(cell),
            answer.text,
            projection,
            unsteered[0],
            repetition(tokens),
            len(tokens),
            answer.finish_reason,
            projection / self._norms[layer],
            prompt_index,
        )
        scores = () if self._score is None else (await self._scored(self._score, answer.text),)
        self._rows[index, prompt_index] = (*row, *scores, *(() if self._reader is None else unsteered[1:]))

    @staticmethod
    async def _scored(score: Callable[[str], float], text: str) -> float:
        try:
            return float(await asyncio.to_thread(score, text))
        except Exception as error:
            raise RequestError(f"sweep: score failed for the answer {text[:60]!r}: {error!r}") from error

    async def _reread(self, prompt: Sequence[int], answer: list[int]) -> tuple[float, float]:
        """Return the perplexity of the answer, given the prompt, without any steering, and the reader's mean of x·u.

        Scoring generates a token that does not count; an answer that fills the model's whole context is scored without
        its last token.
        """
        ids = [*prompt, *answer][: self._model.max_model_len - 1]
        options: dict[str, Any] = {"steering": SteeringSpec.none(), "raw_output": True, "detokenize": False}
        options |= {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "progress": self._progress}
        projection = math.nan
        if self._reader is None or len(ids) == len(prompt):
            [output] = await self._model.generate({"prompt_token_ids": ids}, **options)
        else:
            layer, vector = self._reader
            options |= {"capture_layers": [layer], "capture_where": Where.span(len(prompt), len(ids))}
            [output], [handle] = await self._model.generate({"prompt_token_ids": ids}, **options)
            async with handle:
                projection = _mean_projection(await handle.read({"v": vector}))
        logprobs = (output.prompt_logprobs[at][ids[at]].logprob for at in range(len(prompt), len(ids)))
        return perplexity(logprobs), projection

    def frame(self) -> pd.DataFrame:
        """Return the finished runs, in the order of the grid."""
        rows = [self._rows[key] for key in sorted(self._rows)]
        planned = len(self._cells) * len(self._prompts)
        frame = frame_of(rows, planned=planned, scored=self._score is not None, read=self._reader is not None)
        frame.attrs["norms"] = {layer: float(norm) for layer, norm in self._norms.items()}
        return frame


def _mean_projection(readings: Readings) -> float:
    return float(mean_without(readings.projection("v"), sinks(readings.norm))[0])


def frame_of(
    rows: Sequence[tuple[Any, ...]], *, planned: int, scored: bool = False, read: bool = False
) -> pd.DataFrame:
    """Return runs of a grid as a frame, of so many that are planned; ``score`` and ``text_projection`` if asked for."""
    import pandas as pd

    frame = pd.DataFrame(rows, columns=[*COLUMNS, *["score"] * scored, *["text_projection"] * read])
    frame.attrs["planned"] = planned
    return frame


def lay_out(
    model: VLLMSteerModel,
    layers: Any,
    vector: Any,
    scales: Any,
    operation: str,
    doses: Any = None,
    bound: str = "max",
) -> list[Cell]:
    """Return the cells of a grid of scales, or else of doses, layer by layer.

    Raises
    ------
    RequestError, SteeringError
        Naming the argument that cannot be used. Nothing has run then.
    """
    if operation not in OPERATIONS:
        raise RequestError(f"sweep: operation is one of {', '.join(OPERATIONS)}, got {operation!r}")
    if bound not in BOUNDS:
        raise RequestError(f"sweep: bound is one of {', '.join(BOUNDS)}, got {bound!r}")
    if (scales is None) == (doses is None):
        raise RequestError("sweep: give scales or doses, one of the two: doses=[0.0, 0.1, 0.2, 0.4], for example")
    if doses is not None and operation == "ablate":
        raise RequestError(f"sweep: only additions and caps have a dose; give scales for {operation!r}")
    chosen = as_layers(layers, model.layer_count, "sweep")
    name, given = ("scales", scales) if doses is None else ("doses", doses)
    kind = "number" if doses is None else "dose"
    wanted = [_bound(value, f"sweep: one of {name}", kind, operation) for value in as_list(given)]
    if not wanted:
        raise RequestError(f"sweep: {name} is empty")
    cells = []
    for layer in chosen:
        here = vector_at(vector, layer, model.hidden_size, "sweep")
        if not here.any():  # it could be added, but nothing be read along it, nor be a dose of it
            raise SteeringError(f"sweep: the vector for layer {layer} is zero, it has no direction")
        cells += [Cell(layer, each, here, each.value if each.kind == "number" else math.nan) for each in wanted]
    return cells


def _bound(value: Any, what: str, kind: str, operation: str) -> Bound:
    return Bound.of(value, what, kind) if operation == "cap" else Bound(kind, as_number(value, what))


def as_layers(layers: Any, layer_count: int, what: str) -> list[int]:
    """Return one layer or several as a list of checked numbers, each once, in the given order.

    Raises
    ------
    RequestError, SteeringError
    """
    if isinstance(layers, str):
        raise SteeringError(
            f"{what}: a layer must be a whole number, got {layers!r}; 0 is the first decoder block, and layers come "
            f"before the vector"
        )
    given = as_list(layers)
    if not given:
        raise RequestError(f"{what}: layers is empty: name at least one")
    return list(dict.fromkeys(check_layer(layer, layer_count) for layer in given))


def vector_at(vector: Any, layer: int, hidden_size: int, what: str) -> torch.Tensor:
    """Return the vector for a layer: ``vector`` itself, or what it holds for that layer.

    Raises
    ------
    RequestError, SteeringError
    """
    found = as_vector(at_layer(vector, layer, f"{what}: vector"), f"{what}: vector")
    if found.numel() != hidden_size:
        raise SteeringError(f"{what}: vector has {found.numel()} entries, this model's hidden_size is {hidden_size}")
    return found
