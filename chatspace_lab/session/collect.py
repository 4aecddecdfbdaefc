"""Activations of thousands of prompts in bounded memory: each is reduced in the worker, and its rows freed, at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from chatspace_lab.analysis.frames import readings_frame
from chatspace_lab.capture import CaptureHandle
from chatspace_lab.engine.model import VLLMSteerModel
from chatspace_lab.engine.observer import Progress
from chatspace_lab.engine.requests import seeds_of
from chatspace_lab.engine.together import together
from chatspace_lab.errors import RequestError
from chatspace_lab.readings import POOLS, Readings, sinks
from chatspace_lab.session.history import History
from chatspace_lab.session.measure import left_out_frame, left_out_rows
from chatspace_lab.session.pooled import PooledActivations, steered
from chatspace_lab.spans import rank
from chatspace_lab.steering.directions import DirectionSet
from chatspace_lab.steering.specs import SteeringSpec
from chatspace_lab.steering.where import Where

if TYPE_CHECKING:
    import pandas as pd

REDUCTIONS = (*POOLS, "norm", "projection")
AT_ONCE = 256
"""Requests under way together, at most."""


class Row(NamedTuple):
    """What is kept of one prompt."""

    values: np.ndarray | Readings
    rows: int
    prompt_len: int
    locations: Any
    request_id: str
    text: str
    tokens: int
    left_out: list[tuple[Any, ...]]


class Collection:
    """A batch of captures under way.

    Parameters
    ----------
    model, history
        Runs the prompts; takes note of readings.
    prompts
        Each one a prompt, or each one a conversation; all are checked here, before any runs.
    layers, reduce, directions, where, steering, attention_sinks, chat_options, sampling, progress
        As for :meth:`chatspace_lab.session.aio.AsyncLab.capture`.

    Raises
    ------
    RequestError, SteeringError, MessageLocationError
        Naming what cannot be used.
    """

    def __init__(
        self,
        model: VLLMSteerModel,
        history: History,
        prompts: Sequence[Any],
        layers: Sequence[int],
        reduce: str,
        *,
        directions: Mapping[str, Any] | None,
        where: Where | str,
        steering: SteeringSpec,
        attention_sinks: bool,
        chat_options: dict[str, Any] | None,
        sampling: dict[str, Any],
        progress: Progress | None,
    ) -> None:
        if reduce not in REDUCTIONS:
            raise RequestError(f"capture: reduce is one of {', '.join(REDUCTIONS)}, got {reduce!r}")
        if attention_sinks and reduce != "mean":
            raise RequestError(f"capture: attention_sinks goes with reduce='mean', not {reduce!r}")
        named = DirectionSet.of(directions, layers, model.hidden_size).names  # checked before anything runs
        if reduce == "projection" and not named:
            raise RequestError("capture: reduce='projection' needs directions={name: vector}")
        if named and reduce != "projection":
            raise RequestError(f"capture: directions go with reduce='projection', not {reduce!r}")
        self._model, self._history, self._layers, self._reduce = model, history, list(layers), reduce
        self._directions, self._sinks = directions, attention_sinks
        one_sample("capture", sampling)
        chat = _is_chat(prompts)
        self._options = {"capture_layers": self._layers, "capture_where": where, **sampling}
        self._prompts = model.prepare(list(prompts), chat=chat, chat_options=chat_options, **self._options)
        self._names = [asked(prompt) for prompt in prompts]
        self._options |= {"steering": steering, "progress": progress}
        self._seeds = seeds_of(self._prompts, self._options.pop("seed", None))
        self._kept: dict[int, Row] = {}

    async def run(self) -> Any:
        """Run everything, so many at once as memory allows. What is finished stays, also when this is cancelled."""
        waiting = iter(range(len(self._prompts)))
        await together(self._work(waiting) for _ in range(min(AT_ONCE, len(self._prompts))))
        return self.result()

    async def _work(self, waiting: Any) -> None:
        for index in waiting:
            await self._one(index)

    async def _one(self, index: int) -> None:
        [text], [handle] = await self._model.generate(self._prompts[index], **self._options, **self._seeds[index])
        async with handle:
            self._kept[index] = await self._row(text, handle)

    async def _row(self, text: str, handle: CaptureHandle) -> Row:
        values: np.ndarray | Readings
        rows = rank(handle.spans, handle.computed)
        left_out: list[tuple[Any, ...]] = []
        if self._reduce == "mean" and rows and not self._sinks:
            means, norms = await handle.pool_typical()
            values = means.numpy()
            places = handle.positions, handle.token_ids
            left_out = left_out_rows(handle.prompt_index, handle.layer_indices, norms, sinks(norms), *places)
        elif self._reduce in POOLS and rows:
            values = (await handle.pool("mean" if self._reduce == "mean" else "last")).numpy()
        elif self._reduce in POOLS:  # an answer of one token has no row
            values = np.full((len(self._layers), self._model.hidden_size), np.nan, dtype=np.float32)
        else:
            values = await handle.read(self._directions)
            self._history.attach(handle.request_id, values)
        found = handle.prompt_len, handle.message_locations, handle.request_id, text, handle.generated_len
        return Row(values, rows, *found, left_out)

    def result(self) -> PooledActivations | pd.DataFrame:
        """Return what is finished, in the order of the prompts."""
        kept = sorted(self._kept.items())
        if self._reduce in POOLS:
            return self._pooled(kept)
        return self._frame(kept)

    def _pooled(self, kept: list[tuple[int, Row]]) -> PooledActivations:
        import pandas as pd

        labels = pd.DataFrame(
            [(at, self._names[at], row.text, row.prompt_len, row.tokens, row.rows) for at, row in kept],
            columns=["prompt_index", "asked", "text", "prompt_tokens", "tokens", "rows"],
        )
        empty = np.empty((0, len(self._layers), self._model.hidden_size), dtype=np.float32)
        values = np.stack([np.asarray(row.values) for _, row in kept]) if kept else empty
        left_out = [(at, *place[1:]) for at, row in kept for place in row.left_out]
        found = left_out_frame(left_out, self._model.tokenizer)
        return PooledActivations(values, tuple(self._layers), labels, self._reduce, self._options["steering"], found)

    def _frame(self, kept: list[tuple[int, Row]]) -> pd.DataFrame:
        import pandas as pd

        frames = [
            readings_frame(
                row.values,
                prompt_len=row.prompt_len,
                tokenizer=self._model.tokenizer,
                locations=row.locations,
                request=row.request_id,
                prompt_index=at,
            )
            for at, row in kept
            if isinstance(row.values, Readings)
        ]
        frame = pd.concat(frames or [self._no_rows()], ignore_index=True)
        frame.attrs["steering"] = steered(self._options["steering"])
        return frame

    def _no_rows(self) -> pd.DataFrame:
        layers, names = tuple(self._layers), tuple(self._directions or ())
        nothing, values = np.empty(0, dtype=np.int64), np.empty((len(layers), 0, 1 + len(names)), dtype=np.float32)
        return readings_frame(Readings(nothing, nothing, layers, names, values), prompt_len=0)


def asked(prompt: Any) -> str:
    """Return what to call a prompt that can be used: its text, or the last message's."""
    if isinstance(prompt, str):
        return prompt
    if is_conversation(prompt):
        return str(prompt[-1].get("content") or "")
    if isinstance(prompt, Sequence) and isinstance(prompt[0], str | Sequence | Mapping):  # a list of one prompt
        return asked(prompt[0])
    ids = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt
    return f"{len(ids)} token ids"


def one_sample(what: str, sampling: Mapping[str, Any]) -> None:
    """Check that a prompt is answered once.

    Raises
    ------
    RequestError
    """
    if sampling.get("n", 1) != 1:
        raise RequestError(f"{what}: n={sampling['n']} is not supported here; repeat the prompt instead")


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return (
        isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
    )


def _is_chat(prompts: Sequence[Any]) -> bool:
    if not prompts:
        raise RequestError("capture: there are no prompts")
    kinds = {is_conversation(prompt) for prompt in prompts}
    if len(kinds) > 1:
        raise RequestError("capture: the prompts are mixed; give only prompts, or only conversations")
    return kinds.pop()
