"""The sweep panel: a grid of layers and scales that fills while it runs."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import traitlets

from chatspace_lab.analysis.examples import OFFICE, SEA
from chatspace_lab.engine.together import ended
from chatspace_lab.errors import RequestError
from chatspace_lab.panels import stills
from chatspace_lab.panels.asked import Sampling
from chatspace_lab.panels.base import Panel, sentence, static
from chatspace_lab.panels.vectors import contrast, layers_with, snapshot, usable, variables
from chatspace_lab.session.measure import plain_projections
from chatspace_lab.session.sweep import BOUNDS, Cell, Grid, lay_out, vector_at
from chatspace_lab.steering.names import did_you_mean
from chatspace_lab.steering.program import check_layer
from chatspace_lab.steering.vectors import as_list, as_number

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from chatspace_lab.session.lab import LabSession

POLL_S = 0.15
"""The grid is drawn at most this often."""
VALUES = {"add": (-1.0, -0.5, -0.25, 0.25, 0.5, 1.0), "ablate": (0.0, 0.5), "cap": (-0.4, -0.2, 0.0, 0.2)}
"""What is swept at first: doses that are added, how much of the component is kept, or bounds in doses."""
READ = ("projection", "relative", "text_projection")
SAMPLING = ("max_tokens", "seed", "temperature")
MAX_CHARACTERS = 200_000
"""Of all texts of a grid in the page."""
REPETITIVE = 0.5
"""An answer is called incoherent from this share of repeated 3-grams on, …"""
PERPLEXING = 4.0
"""… or from this many times the perplexity of the unsteered answer. Both as advice."""


class SweepPanel(Panel):
    """Every layer with every scale in one batch: ``lab.sweep_panel()`` as the last line of a cell.

    Colour is what a run does to its text: the unsteered model reads the answer, and its mean x·u at one layer is
    compared with that of the unsteered answer, in standard deviations of x·u on plain text. What is added is not in it,
    so late layers do not look stronger for having longer activations. Hatched runs have fallen apart. A click shows the
    text. The session's steering is left out.

    Parameters
    ----------
    lab
        The session.
    prompt
        What is asked.
    prompts
        In its place: several, each of which is asked in every cell. A cell shows the mean over them, and their spread.
    score
        A function of your own from an answer's text to a number, which the grid then shows. It runs in a thread.
    vector
        Name of a vector, or None to choose one in the panel.
    layers
        All, with None.
    doses
        Of the added vector; dose 1 is the residual's mean norm at that layer on this prompt. With ``"cap"`` the bounds,
        as doses; with ``"ablate"`` the factors on the component.
    operation, bound
        ``"add"``, ``"ablate"`` or ``"cap"``, and which bound a cap has: ``"min"`` or ``"max"``.
    read_layer
        Where answers are read; None is the last but one.

    Attributes
    ----------
    frame : pandas.DataFrame or None
        The finished part, as ``lab.sweep`` gives it.
    """

    _esm = static("sweep_panel.js")
    _css = static("panels.css")
    _kept = ("error", "plan", "cells", "run", "chosen", "scored")
    _drawn = staticmethod(stills.sweep)

    plan = traitlets.Dict().tag(sync=True)
    vectors = traitlets.List().tag(sync=True)
    cells = traitlets.List().tag(sync=True)
    chosen = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True)
    scored = traitlets.Bool(False).tag(sync=True)
    busy = traitlets.Unicode("").tag(sync=True)

    def __init__(
        self,
        lab: LabSession,
        prompt: str | None = None,
        *,
        prompts: Sequence[str] | None = None,
        score: Callable[[str], float] | None = None,
        vector: str | None = None,
        layers: int | Sequence[int] | None = None,
        doses: Sequence[float] | None = None,
        operation: str = "add",
        bound: str = "max",
        read_layer: int | None = None,
        max_tokens: int = 32,
        seed: int = 7,
        temperature: float = 0.0,
        **traits: Any,
    ) -> None:
        if prompt is not None and prompts is not None:
            raise RequestError("sweep: give prompt or prompts, one of the two")
        if score is not None and not callable(score):
            raise RequestError(f"sweep: score must be a function of an answer's text, got {type(score).__name__}")
        plan = {
            "operation": operation,
            "bound": bound,
            "vector": vector,
            "layers": range(lab.layer_count) if layers is None else layers,
            "doses": VALUES.get(operation, ()) if doses is None else doses,
            "read_layer": max(lab.layer_count - 2, 0) if read_layer is None else read_layer,
            "prompts": ["Tell me about rivers." if prompt is None else prompt] if prompts is None else prompts,
            "max_tokens": max_tokens,
            "seed": seed,
            "temperature": temperature,
        }
        idle = {"status": "idle", "number": 0}
        super().__init__(lab, plan={**plan, **_checked(plan, lab)}, run=idle, scored=score is not None, **traits)
        self._score = score
        self.frame: pd.DataFrame | None = None
        self._task: asyncio.Task[None] | None = None
        self._making: asyncio.Task[None] | None = None
        self._number = self._done = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._handlers = {
            "plan": lambda m: self._change(m["patch"]),
            "start": lambda m: self._start(),
            "stop": lambda m: self._stop(),
            "variables": lambda m: self._offer(),
            "demo": lambda m: self._make_demo(),
        }
        self._now(self._begin)

    def _begin(self) -> None:
        self._offer()

    # -- from Python -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the grid; returns at once.

        Raises
        ------
        RequestError, SteeringError
            If it cannot be run as planned. What runs, and what has been run, stays then.
        """
        self._now(self._start)

    def stop(self) -> None:
        """Stop; the finished part stays."""
        self._now(self._stop)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the grid has been run, and raise what went wrong."""

        async def settled() -> None:
            await self._quiet.wait()

        self._thread.call(settled(), timeout_s)
        self._now(self._displays.update)
        if self.error:
            raise RequestError(f"the panel shows an error: {self.error}")

    @property
    def state(self) -> dict[str, Any]:
        """The plan, as plain data; set it, whole or in part. One prompt may be set as ``prompt``."""
        return dict(self.plan)

    @state.setter
    def state(self, new: dict[str, Any]) -> None:
        self._now(lambda: self._change(new))

    # -- on the engine's loop ----------------------------------------------------------------------------------------

    def _change(self, patch: dict[str, Any]) -> None:
        unknown = set(patch) - {*self.plan, "prompt"}
        if unknown:
            raise RequestError(f"a sweep has no {', '.join(sorted(unknown))}, only {', '.join(self.plan)}")
        checked = _checked(patch, self._lab)
        operation = patch.get("operation", self.plan["operation"])
        fresh = {} if operation == self.plan["operation"] else {"doses": list(VALUES[operation])}
        self.plan = {**self.plan, **fresh, **checked}

    def _offer(self) -> None:
        size = self._lab.hidden_size
        mine = usable(self._lab.vectors, size)
        found = {**dict(reversed(mine.items())), **{n: v for n, v in variables(size).items() if n not in mine}}
        self.vectors = [{"name": name, "layers": layers_with(vector)} for name, vector in found.items()]
        if self.plan["vector"] is None and found:
            self.plan = {**self.plan, "vector": next(iter(found))}  # the session's newest

    def _make_demo(self) -> None:
        if self._making is None or self._making.done():
            self._making = self._thread.loop.create_task(self._demo())

    async def _demo(self) -> None:
        """Make the demo vector, and choose it."""
        self.busy = "building sea"
        try:
            await contrast(self._lab.aio, "sea", SEA, OFFICE)
            self._offer()
        except Exception as error:  # noqa: BLE001 - whatever it is, the user must see it
            self._show_error(error)
        finally:
            self.busy = ""

    def _let_go(self) -> None:
        self._stop()

    def _start(self) -> None:
        plan, vector = self._ready()
        self._stop()
        self._number += 1
        self._quiet.clear()
        self._task = self._thread.loop.create_task(self._sweep(self._number, plan, vector, self._task))

    def _ready(self) -> tuple[dict[str, Any], Any]:
        """Return the plan and its vector as they are now, checked before anything is run or thrown away."""
        plan, lab = dict(self.plan), self._lab
        name, layers = plan["vector"], plan["layers"]
        if not layers:
            raise RequestError("sweep: choose at least one layer")
        if name is None:
            raise RequestError("sweep: choose a vector first")
        found = {**variables(lab.hidden_size), **lab.vectors}
        if name not in found:
            near = did_you_mean(name, found)
            raise RequestError(f"there is no vector {name!r} in lab.vectors and the notebook's variables{near}")
        vector = snapshot(found[name], lab.hidden_size, name)
        known = layers_with(vector)
        missing = [] if known is None else [layer for layer in layers if layer not in known]
        if missing:
            raise RequestError(f"{name!r} has no vector for layers {missing}, only for {known}")
        lab.model.prepare(_conversations(plan), chat=True, **_sampling(plan))
        return plan, vector

    def _stop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def _tell(self, number: int, status: str, **facts: Any) -> None:
        if number == self._number:
            self.run = {"number": number, "status": status, "plan": self.run.get("plan", self.plan), **facts}
            if status != "running":
                self._quiet.set()

    async def _sweep(self, number: int, plan: dict[str, Any], vector: Any, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self.cells, self.chosen, self.frame = [], None, None
        self._done = 0
        self._tell(number, "running", total=_runs(plan), done=0, plan=plan)
        try:
            await self._fill(number, plan, vector)
        except asyncio.CancelledError:
            kept = {name: self.run.get(name) for name in ("total", "references")}
            self._tell(number, "stopped", done=self._done, **kept)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the user must see it
            self._show_error(error)
            self._tell(number, "failed", error=sentence(error))
            return
        self._tell(number, "done", done=self._done, total=self._done, references=self.run.get("references"))

    async def _fill(self, number: int, plan: dict[str, Any], vector: Any) -> None:
        conversations, sampling, layers = _conversations(plan), _sampling(plan), list(plan["layers"])
        await self._lab.aio.measure(conversations if len(conversations) > 1 else conversations[0])
        reader = reader_of(vector, plan["read_layer"], self._lab.hidden_size)
        references = await self._references(conversations, vector, plan, sampling, reader)
        facts = {"total": _runs(plan), "references": references}
        self._tell(number, "running", done=0, **facts)
        cells = self._cells(layers, vector, plan)
        grid = self._grid(conversations, sampling, plan, cells, plan["operation"], reader)
        run = asyncio.ensure_future(grid.run())
        try:
            while not run.done():
                await asyncio.wait([run], timeout=POLL_S)
                self._draw(grid, plan, references)
                self._tell(number, "running", done=self._done, **facts)
            run.result()
        finally:
            await ended([run])
            self._draw(grid, plan, references)

    def _cells(self, layers: Sequence[int], vector: Any, plan: dict[str, Any]) -> list[Cell]:
        model, values, operation = self._lab.model, plan["doses"], plan["operation"]
        if operation == "ablate":
            return lay_out(model, layers, vector, values, operation)
        cells = lay_out(model, layers, vector, None, operation, values, plan["bound"])
        return [cell.scaled(cell.bound.at(cell.layer, self._lab.aio.norms, {}), operation) for cell in cells]

    def _grid(
        self,
        conversations: Any,
        sampling: dict[str, Any],
        plan: dict[str, Any],
        cells: Sequence[Cell],
        operation: str,
        reader: tuple[int, torch.Tensor],
    ) -> Grid:
        lab = self._lab
        return Grid(
            lab.model,
            lab.model.prepare(conversations, chat=True, **sampling),
            cells,
            operation=operation,
            bound=plan["bound"],
            read_layer=plan["read_layer"],
            norms=lab.aio.norms,
            perplexity=True,
            score=self._score,
            reader=reader,
            sampling=sampling,
        )

    async def _references(
        self,
        conversations: Any,
        vector: Any,
        plan: dict[str, Any],
        sampling: dict[str, Any],
        reader: tuple[int, torch.Tensor],
    ) -> list[dict[str, Any]]:
        """Return each unsteered answer with its projections and perplexity, and the spread of x·u on plain text."""
        model, (layer, unit) = self._lab.model, reader
        cells = lay_out(model, plan["layers"][:1], vector, [0.0], "add")
        grid = self._grid(conversations, sampling, plan, cells, "add", reader)
        frame, seen = await asyncio.gather(grid.run(), plain_projections(model, {layer: unit}))
        spread = plain(float(seen[layer].std())) or None
        names = ("text", *READ, "perplexity", "repetition", *["score"] * self.scored)
        return [
            {**{name: plain(row[name]) for name in names}, "prompt": prompt, "spread": spread}
            for row, prompt in zip(frame.to_dict("records"), plan["prompts"], strict=True)
        ]

    def _draw(self, grid: Grid, plan: dict[str, Any], references: Sequence[dict[str, Any]]) -> None:
        frame = grid.frame()
        self._done = len(frame)
        if len(frame):
            self.frame = frame
            value = "scale" if plan["operation"] == "ablate" else "dose"
            most = MAX_CHARACTERS // _runs(plan)
            found: dict[tuple[int, float], list[dict[str, Any]]] = {}
            for row in frame.to_dict("records"):
                cell = cell_of(row, row[value], plan["doses"], references[row["prompt_index"]], most)
                found.setdefault((cell["layer"], cell["dose"]), []).append(cell)
            self.cells = [over_prompts(cells) if len(references) > 1 else cells[0] for cells in found.values()]


def cell_of(
    row: dict[str, Any], value: float, doses: Sequence[float], reference: dict[str, Any], most: int = MAX_CHARACTERS
) -> dict[str, Any]:
    """Return a run as the page shows it, at the one of ``doses`` that ``value`` is up to rounding.

    Of its text the page has at most ``most`` characters, and says so.

    ``effect`` is x·u of the text as the unsteered model reads it, beside that of the unsteered answer and in units of
    the spread on plain text; ``inside`` is x·u in the run itself beside the unsteered run's, over the residual norm at
    the reading layer. ``broken`` is whether the answer has fallen apart, by repetition or by its perplexity under the
    unsteered model. A row without ``text_projection`` is compared by what is read inside.
    """
    text = row["text"]
    dose = min(doses, key=lambda each: abs(each - value))
    repetition, perplexity, usual = row["repetition"], row["perplexity"], reference["perplexity"]
    repetitive = not math.isnan(repetition) and repetition >= REPETITIVE
    perplexing = usual is not None and not math.isnan(perplexity) and perplexity >= PERPLEXING * max(usual, 1.0)
    read = "text_projection" if "text_projection" in row else "relative"
    return {
        "layer": int(row["layer"]),
        "dose": dose,
        "scale": plain(row["scale"]),
        "text": text if len(text) <= most else f"{text[:most]} … (the whole is in the panel's frame)",
        "effect": plain(_beyond(row, reference, read) / (reference.get("spread") or 1.0)),
        "inside": plain(_beyond(row, reference, "relative")),
        "perplexity": plain(perplexity),
        "repetition": plain(repetition),
        "tokens": int(row["tokens"]),
        "prompt_index": int(row.get("prompt_index", 0)),
        **({} if "score" not in row else _scores(row["score"], reference["score"])),
        "broken": bool(repetitive or perplexing),
    }


def _scores(score: float, usual: float | None) -> dict[str, float | None]:
    """Return an answer's score, and how far it is from that of the unsteered answer."""
    change = math.nan if usual is None else score - usual
    return {"score": plain(score), "score_change": plain(change)}


def over_prompts(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the answers of one cell to several prompts as one: means, their spread, and each answer in ``runs``.

    The spread is the standard deviation over the prompts. The cell is ``broken`` if half of its answers are.
    """
    found: dict[str, Any] = {**runs[0], "runs": [dict(run) for run in runs]}
    for name in ("effect", "inside", "perplexity", "repetition", "tokens", "score", "score_change"):
        if name in found:
            values = [run[name] for run in runs if run[name] is not None]
            found[name] = statistics.fmean(values) if values else None
            found[f"{name}_spread"] = statistics.stdev(values) if len(values) > 1 else None
    return {**found, "broken": 2 * sum(run["broken"] for run in runs) >= len(runs)}


def _beyond(row: Mapping[str, Any], reference: Mapping[str, Any], name: str) -> float:
    usual = reference.get(name)
    return math.nan if usual is None or name not in row else float(row[name] - usual)


def reader_of(vector: Any, layer: int, hidden_size: int) -> tuple[int, torch.Tensor]:
    """Return a layer with the vector that is read along there: its own, or that of the nearest layer which has one."""
    known = layers_with(vector)
    nearest = layer if known is None else min(known, key=lambda each: abs(each - layer))
    return layer, vector_at(vector, nearest, hidden_size, "sweep")


def _conversations(plan: Mapping[str, Any]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": prompt}] for prompt in plan["prompts"]]


def _runs(plan: Mapping[str, Any]) -> int:
    """Return how many answers a plan has."""
    return len(plan["layers"]) * len(plan["doses"]) * len(plan["prompts"])


def _sampling(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plan[name] for name in SAMPLING}


def _checked(plan: Mapping[str, Any], lab: LabSession) -> dict[str, Any]:
    """Return a plan, or a part of it, as JSON holds it; layers and doses may be of any kind.

    Raises
    ------
    RequestError, SteeringError
        Naming the value that cannot be used.
    """
    found = dict(plan)
    if plan.get("operation", "add") not in VALUES:
        raise RequestError(f"sweep: operation is one of {', '.join(VALUES)}, got {plan['operation']!r}")
    if plan.get("bound", "max") not in BOUNDS:
        raise RequestError(f"sweep: bound is one of {', '.join(BOUNDS)}, got {plan['bound']!r}")
    if not isinstance(plan.get("vector", ""), str | None):
        raise RequestError(f"sweep: vector is a name or None, got {type(plan['vector']).__name__}")
    if "prompt" in found:
        found["prompts"] = [found.pop("prompt")]
    prompts = found.get("prompts", ["a text"])
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
        raise RequestError(f"sweep: prompts must be a list of texts, got {prompts!r}")
    for prompt in prompts:
        if not isinstance(prompt, str) or not prompt.strip():
            raise RequestError(f"sweep: a prompt must be a text that is not empty, got {prompt!r}")
    if "prompts" in found:
        found["prompts"] = list(prompts)
    drawn = {name: plan[name] for name in SAMPLING if name in plan}
    if "temperature" in drawn:
        drawn["temperature"] = as_number(drawn["temperature"], "sweep: temperature")
    checked = Sampling().edited(drawn).plain()
    found |= {name: checked[name] for name in drawn}
    if "read_layer" in plan:
        found["read_layer"] = check_layer(plan["read_layer"], lab.layer_count)
    if "layers" in plan:
        found["layers"] = [check_layer(layer, lab.layer_count) for layer in as_list(plan["layers"])]
    if "doses" in plan:
        found["doses"] = [as_number(dose, "sweep: one of doses") for dose in as_list(plan["doses"])]
        if not found["doses"]:
            raise RequestError("sweep: doses is empty: name at least one")
    return found


def plain(value: Any) -> Any:
    """Return a number as JSON holds it: None for what is not finite."""
    if isinstance(value, str):
        return value
    return float(value) if math.isfinite(value) else None
