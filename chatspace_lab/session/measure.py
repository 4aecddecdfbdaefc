"""What doses and bounds are relative to: the residual stream's norm on a prompt, and x·u on plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from chatspace_lab.analysis.tokens import token_texts
from chatspace_lab.engine.model import VLLMSteerModel
from chatspace_lab.engine.observer import Progress
from chatspace_lab.engine.requests import Prompt
from chatspace_lab.errors import RequestError
from chatspace_lab.readings import SINK, Readings, mean_without, typical_norms
from chatspace_lab.steering.specs import SteeringSpec
from chatspace_lab.steering.vectors import as_number

if TYPE_CHECKING:
    import pandas as pd

PLAIN_TEXTS = tuple(
    """\
The ferry leaves the harbour at eight each morning and comes back before dark. In winter, when the ice is thick, it
stays at its pier, and people walk across instead, pulling sledges with bread, letters and milk behind them.
|
A library lends more than books. This one has tools, seeds, board games and two sewing machines, which may be kept for
three weeks. If nobody else is waiting for them, they can be borrowed again without a fee.
|
To repair a bicycle tyre, take the wheel off and pull the tube out on one side. Hold it under water: where bubbles rise,
there is the hole. Dry it, roughen the rubber, spread the glue thinly, and wait until it no longer shines.
|
Prices rose by two per cent last year, less than in the year before. Rents went up faster, most of all in the large
towns, while bread, fuel and clothes cost about the same. Economists had expected a larger change.
""".strip()
    .replace("\n|\n", "|")
    .replace("\n", " ")
    .split("|")
)
"""Ordinary English prose. What is not said about a user's own prompt is measured on this."""

STOCK = f"a stock text ({len(PLAIN_TEXTS)} paragraphs of English prose)"
"""Its name."""


def quoted(measured_on: str | None) -> str:
    """Return what was measured on as a part of a sentence: a prompt in quotation marks."""
    return STOCK if measured_on == STOCK else f"“{str(measured_on)[:60]}”"


class Measured(NamedTuple):
    """The residual stream's norm on some prompts.

    Attributes
    ----------
    norms
        Layer to the mean norm, attention sinks left out; NaN where no token is left. Of several prompts the mean.
    left_out
        The tokens that were left out, :data:`LEFT_OUT` its columns.
    plain
        Whether the norms are those of ordinary tokens. They may not be where no token of a prompt is much longer than
        the others at any layer: its model has no attention sinks, or most of its tokens are some.
    """

    norms: dict[int, float]
    left_out: pd.DataFrame
    plain: bool


LEFT_OUT = ("prompt_index", "layer", "position", "token_id", "token", "norm", "times")


async def measure(
    model: VLLMSteerModel,
    prompts: Sequence[Prompt],
    progress: Progress | None = None,
    usual: Mapping[int, float] | None = None,
) -> Measured:
    """Run prompts unsteered, and measure the residual stream's norm at every layer.

    ``usual``, if given, is the norm of ordinary tokens per layer: where those of a prompt are more than :data:`SINK`
    times longer on average, its tokens that are so long are left out too.
    """
    layers = range(model.layer_count)
    found, rows, plain = [], list[tuple[Any, ...]](), True
    most = np.array([SINK * usual[layer] if usual else np.inf for layer in layers])[:, None]
    for index, readings in enumerate(await _read(model, prompts, layers, None, progress)):
        means, left_out = typical_norms(readings.norm, readings.positions)
        plain = plain and bool((readings.norm.max(axis=1) > SINK * means).any())
        left_out |= (means[:, None] > most) & (readings.norm > most)
        found.append(mean_without(readings.norm, left_out))
        rows += left_out_rows(index, layers, readings.norm, left_out, readings.positions, readings.token_ids)
    norms = np.mean(found, axis=0)
    by_layer = dict(zip(layers, map(float, norms), strict=True))
    return Measured(by_layer, left_out_frame(rows, model.tokenizer), plain or usual is not None)


async def plain_projections(
    model: VLLMSteerModel, vectors: Mapping[int, Any], progress: Progress | None = None
) -> dict[int, np.ndarray]:
    """Return x·u of the tokens of the stock text, attention sinks left out, ``[tokens]`` for each layer.

    Parameters
    ----------
    vectors
        Layer to ``[hidden_size]``, of any length but zero.
    """
    prompts = model.prepare(list(PLAIN_TEXTS), chat=False, max_tokens=1)
    parts: dict[int, list[np.ndarray]] = {layer: [] for layer in vectors}
    for readings in await _read(model, prompts, sorted(vectors), {"u": dict(vectors)}, progress):
        kept = ~typical_norms(readings.norm, readings.positions)[1]
        for at, layer in enumerate(readings.layers):
            parts[layer].append(readings.projection("u")[at, kept[at]].astype(np.float64))
    return {layer: np.concatenate(values) for layer, values in parts.items()}


async def _read(
    model: VLLMSteerModel,
    prompts: Sequence[Prompt],
    layers: Sequence[int],
    directions: Mapping[str, Any] | None,
    progress: Progress | None,
) -> list[Readings]:
    _, handles = await model.generate(
        list(prompts),
        temperature=0.0,
        max_tokens=1,
        steering=SteeringSpec.none(),
        capture_layers=layers,
        capture_where="prompt",
        progress=progress,
    )
    try:
        return await model.read_captures(handles, directions)
    finally:
        for handle in handles:
            handle.close()


def left_out_rows(
    prompt_index: int,
    layers: Sequence[int],
    norms: np.ndarray,
    left_out: np.ndarray,
    positions: Sequence[int] | np.ndarray,
    token_ids: Sequence[int] | np.ndarray,
) -> list[tuple[Any, ...]]:
    """Return a row of :data:`LEFT_OUT` for each token that a mean leaves out, but for its text.

    Parameters
    ----------
    norms, left_out
        ``[layers, tokens]``.
    """
    rows = []
    for at, token in np.argwhere(left_out):
        kept = norms[at][~left_out[at]].astype(np.float64)
        times = norms[at, token] / kept.mean() if len(kept) else np.nan
        place = prompt_index, int(layers[at]), int(positions[token]), int(token_ids[token])
        rows.append((*place, None, float(norms[at, token]), float(times)))
    return rows


def left_out_frame(rows: Sequence[tuple[Any, ...]], tokenizer: Any) -> pd.DataFrame:
    """Return rows of :func:`left_out_rows` as a table, with the text of each token."""
    import pandas as pd

    frame = pd.DataFrame(rows, columns=list(LEFT_OUT))
    texts = [None] * len(rows) if tokenizer is None else token_texts(frame["token_id"], tokenizer)
    return frame.assign(token=pd.Series(texts, index=frame.index, dtype="str"))


class Bound(NamedTuple):
    """A bound of a cap: a number, in the residual stream's units, a dose, or a quantile of x·u on plain text.

    Attributes
    ----------
    kind
        ``"number"``, ``"dose"`` or ``"quantile"``.
    value
        The number or dose; of a quantile its share, from 0 to 1.
    """

    kind: str
    value: float

    @classmethod
    def of(cls, given: Any, what: str, kind: str = "number") -> Bound:
        """Return a bound as a user writes it: a number, or ``"p90"`` for a quantile.

        Raises
        ------
        RequestError, SteeringError
        """
        if not isinstance(given, str):
            return cls(kind, as_number(given, what))
        found = re.fullmatch(r"p(\d+(?:\.\d+)?)", given.strip())
        if kind == "dose" or found is None or float(found[1]) > 100:
            may = "a number" if kind == "dose" else 'a number, or a quantile of x·u on plain text from "p0" to "p100"'
            raise RequestError(f"{what} must be {may}, got {given!r}")
        return cls("quantile", float(found[1]) / 100)

    def at(self, layer: int, norms: Mapping[int, float], projections: Mapping[int, np.ndarray]) -> float:
        """Return it in units of the residual stream."""
        if self.kind == "dose":
            return self.value * norms[layer]
        if self.kind == "quantile":
            return float(np.quantile(projections[layer], self.value))
        return self.value
