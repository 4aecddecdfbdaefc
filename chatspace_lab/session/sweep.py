"""A grid of layers and scales as one batch: what each does to the text, and whether the text still makes sense."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from chatspace_lab.analysis.text import perplexity, repetition
from chatspace_lab.engine.model import VLLMSteerModel
from chatspace_lab.engine.requests import Prompt
from chatspace_lab.engine.together import together
from chatspace_lab.errors import RequestError, SteeringError
from chatspace_lab.steering.directions import at_layer
from chatspace_lab.steering.program import check_layer
from chatspace_lab.steering.specs import AblationSpec, AddSpec, SteeringSpec
from chatspace_lab.steering.vectors import as_list, as_number, as_vector

if TYPE_CHECKING:
    import pandas as pd

OPERATIONS: dict[str, type[AddSpec] | type[AblationSpec]] = {"add": AddSpec, "ablate": AblationSpec}
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
)


class Cell(NamedTuple):
    """One run of the grid. ``scale`` is a dose until :meth:`scaled`, if the grid is one of doses."""

    layer: int
    scale: float
    vector: torch.Tensor

    def scaled(self, norm: float) -> Cell:
        """Return this cell with the scale that adds its dose to a residual stream of this norm."""
        return self._replace(scale=self.scale * norm / float(self.vector.norm()))


class Grid:
    """The runs of a sweep and what came of them, in the order of the grid.

    Parameters
    ----------
    model
        Runs them.
    prompt
        As ``model.prepare`` gives it.
    cells
        What to run.
    operation
        ``"add"`` or ``"ablate"``.
    read_layer
        Where projections are read; None is each run's own layer.
    norms
        Mean residual norm per layer on this prompt; dose is relative to it.
    sampling
        Of every run.
    """

    def __init__(
        self,
        model: VLLMSteerModel,
        prompt: Prompt,
        cells: Sequence[Cell],
        *,
        operation: str,
        read_layer: int | None,
        norms: Mapping[int, float],
        perplexity: bool,
        sampling: dict[str, Any],
    ) -> None:
        self._model, self._prompt, self._cells = model, prompt, list(cells)
        self._operation, self._read_layer, self._norms = operation, read_layer, norms
        self._perplexity, self._sampling = perplexity, sampling
        self._rows: dict[int, tuple[Any, ...]] = {}

    async def run(self) -> pd.DataFrame:
        """Run everything together. What is finished stays in :meth:`frame`, also when this is cancelled."""
        await together(self._one(index) for index in range(len(self._cells)))
        return self.frame()

    async def _one(self, index: int) -> None:
        cell = self._cells[index]
        layer = cell.layer if self._read_layer is None else self._read_layer
        spec = SteeringSpec.at(cell.layer, OPERATIONS[self._operation](cell.vector, cell.scale))
        [output], [handle] = await self._model.generate(
            self._prompt,
            steering=spec,
            capture_layers=[layer],
            capture_where="answer",
            raw_output=True,
            **self._sampling,
        )
        async with handle:
            readings = await handle.read({"v": cell.vector})
        answer = output.outputs[0]
        tokens = list(answer.token_ids)
        dose = (
            cell.scale * float(cell.vector.norm()) / self._norms[cell.layer] if self._operation == "add" else math.nan
        )
        self._rows[index] = (
            cell.layer,
            cell.scale,
            dose,
            answer.text,
            float(readings.projection("v").mean()) if len(readings) else math.nan,
            await self._perplexity_of(tokens) if self._perplexity else math.nan,
            repetition(tokens),
            len(tokens),
            answer.finish_reason,
        )

    async def _perplexity_of(self, answer: list[int]) -> float:
        """Return the perplexity of the answer, given the prompt, without any steering.

        Scoring generates a token that does not count; an answer that fills the model's whole context is scored without
        its last token.
        """
        prompt = self._prompt.token_ids
        ids = [*prompt, *answer][: self._model.max_model_len - 1]
        [output] = await self._model.generate(
            {"prompt_token_ids": ids},
            steering=SteeringSpec.none(),
            raw_output=True,
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
        )
        return perplexity(output.prompt_logprobs[at][ids[at]].logprob for at in range(len(prompt), len(ids)))

    def frame(self) -> pd.DataFrame:
        """Return the finished runs, in the order of the grid."""
        frame = frame_of([self._rows[index] for index in sorted(self._rows)], planned=len(self._cells))
        frame.attrs["norms"] = {layer: float(norm) for layer, norm in self._norms.items()}
        return frame


def frame_of(rows: Sequence[tuple[Any, ...]], *, planned: int) -> pd.DataFrame:
    """Return runs of a grid as a frame, of so many that are planned."""
    import pandas as pd

    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    frame.attrs["planned"] = planned
    return frame


def lay_out(
    model: VLLMSteerModel, layers: Any, vector: Any, scales: Any, operation: str, doses: Any = None
) -> list[Cell]:
    """Return the cells of a grid of scales, or else of doses, layer by layer.

    Raises
    ------
    RequestError, SteeringError
        Naming the argument that cannot be used. Nothing has run then.
    """
    if operation not in OPERATIONS:
        raise RequestError(f"sweep: operation is one of {', '.join(OPERATIONS)}, got {operation!r}")
    if (scales is None) == (doses is None):
        raise RequestError("sweep: give scales or doses, one of the two")
    if doses is not None and operation != "add":
        raise RequestError(f"sweep: only an addition has a dose; give scales for {operation!r}")
    chosen = as_layers(layers, model.layer_count, "sweep")
    name, given = ("scales", scales) if doses is None else ("doses", doses)
    wanted = [as_number(value, f"sweep: one of {name}") for value in as_list(given)]
    if not wanted:
        raise RequestError(f"sweep: {name} is empty")
    cells = []
    for layer in chosen:
        here = vector_at(vector, layer, model.hidden_size, "sweep")
        if not here.any():  # it could be added, but nothing be read along it, nor be a dose of it
            raise SteeringError(f"sweep: the vector for layer {layer} is zero, it has no direction")
        cells += [Cell(layer, scale, here) for scale in wanted]
    return cells


def as_layers(layers: Any, layer_count: int, what: str) -> list[int]:
    """Return one layer or several as a list of checked numbers, each once, in the given order.

    Raises
    ------
    RequestError, SteeringError
    """
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
