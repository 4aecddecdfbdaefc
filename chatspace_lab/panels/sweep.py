"""The sweep panel: a grid of layers and scales that fills while it runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import traitlets

from chatspace_lab.engine.together import ended
from chatspace_lab.errors import RequestError
from chatspace_lab.panels import stills
from chatspace_lab.panels.asked import Sampling
from chatspace_lab.panels.base import Panel, sentence, static
from chatspace_lab.panels.vectors import layers_with, snapshot, usable, variables
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
    _kept = ("error", "plan", "cells", "run", "chosen")
    _drawn = staticmethod(stills.sweep)

    plan = traitlets.Dict().tag(sync=True)
    vectors = traitlets.List().tag(sync=True)
    cells = traitlets.List().tag(sync=True)
    chosen = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True)

    def __init__(
        self,
        lab: LabSession,
        prompt: str | None = None,
        *,
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
        plan = {
            "operation": operation,
            "bound": bound,
            "vector": vector,
            "layers": range(lab.layer_count) if layers is None else layers,
            "doses": VALUES.get(operation, ()) if doses is None else doses,
            "read_layer": max(lab.layer_count - 2, 0) if read_layer is None else read_layer,
            "prompt": "Tell me about rivers." if prompt is None else prompt,
            "max_tokens": max_tokens,
            "seed": seed,
            "temperature": temperature,
        }
        super().__init__(lab, plan={**plan, **_checked(plan, lab)}, run={"status": "idle", "number": 0}, **traits)
        self.frame: pd.DataFrame | None = None
        self._task: asyncio.Task[None] | None = None
        self._number = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._handlers = {
            "plan": lambda m: self._change(m["patch"]),
            "start": lambda m: self._start(),
            "stop": lambda m: self._stop(),
            "variables": lambda m: self._offer(),
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
        """The plan, as plain data; set it, whole or in part."""
        return dict(self.plan)

    @state.setter
    def state(self, new: dict[str, Any]) -> None:
        self._now(lambda: self._change(new))

    # -- on the engine's loop ----------------------------------------------------------------------------------------

    def _change(self, patch: dict[str, Any]) -> None:
        unknown = set(patch) - set(self.plan)
        if unknown:
            raise RequestError(f"a sweep has no {', '.join(sorted(unknown))}, only {', '.join(self.plan)}")
        checked = _checked(patch, self._lab)
        operation = patch.get("operation", self.plan["operation"])
        fresh = {} if operation == self.plan["operation"] else {"doses": list(VALUES[operation])}
        self.plan = {**self.plan, **fresh, **checked}

    def _offer(self) -> None:
        size = self._lab.hidden_size
        found = {**variables(size), **usable(self._lab.vectors, size)}
        self.vectors = [{"name": name, "layers": layers_with(vector)} for name, vector in found.items()]
        if self.plan["vector"] is None and found:
            self.plan = {**self.plan, "vector": next(iter(found))}

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
            raise RequestError(f"there is no vector {name!r} among the notebook's variables and lab.vectors{near}")
        vector = snapshot(found[name], lab.hidden_size, name)
        known = layers_with(vector)
        missing = [] if known is None else [layer for layer in layers if layer not in known]
        if missing:
            raise RequestError(f"{name!r} has no vector for layers {missing}, only for {known}")
        lab.model.prepare(_messages(plan), chat=True, **_sampling(plan))
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
        self._tell(number, "running", total=len(plan["layers"]) * len(plan["doses"]), done=0, plan=plan)
        try:
            await self._fill(number, plan, vector)
        except asyncio.CancelledError:
            kept = {name: self.run.get(name) for name in ("total", "reference")}
            self._tell(number, "stopped", done=len(self.cells), **kept)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the user must see it
            self._show_error(error)
            self._tell(number, "failed", error=sentence(error))
            return
        self._tell(number, "done", done=len(self.cells), total=len(self.cells), reference=self.run.get("reference"))

    async def _fill(self, number: int, plan: dict[str, Any], vector: Any) -> None:
        messages, sampling, layers = _messages(plan), _sampling(plan), list(plan["layers"])
        await self._lab.aio.measure(messages)
        reader = reader_of(vector, plan["read_layer"], self._lab.hidden_size)
        reference = await self._reference(messages, vector, plan, sampling, reader)
        facts = {"total": len(layers) * len(plan["doses"]), "reference": reference}
        self._tell(number, "running", done=0, **facts)
        cells = self._cells(layers, vector, plan)
        grid = self._grid(messages, sampling, plan, cells, plan["operation"], reader)
        run = asyncio.ensure_future(grid.run())
        try:
            while not run.done():
                await asyncio.wait([run], timeout=POLL_S)
                self._draw(grid, plan, reference)
                self._tell(number, "running", done=len(self.cells), **facts)
            run.result()
        finally:
            await ended([run])
            self._draw(grid, plan, reference)

    def _cells(self, layers: Sequence[int], vector: Any, plan: dict[str, Any]) -> list[Cell]:
        model, values, operation = self._lab.model, plan["doses"], plan["operation"]
        if operation == "ablate":
            return lay_out(model, layers, vector, values, operation)
        cells = lay_out(model, layers, vector, None, operation, values, plan["bound"])
        return [cell.scaled(cell.bound.at(cell.layer, self._lab.aio.norms, {}), operation) for cell in cells]

    def _grid(
        self,
        messages: Any,
        sampling: dict[str, Any],
        plan: dict[str, Any],
        cells: Sequence[Cell],
        operation: str,
        reader: tuple[int, torch.Tensor],
    ) -> Grid:
        lab = self._lab
        [prompt] = lab.model.prepare(messages, chat=True, **sampling)
        return Grid(
            lab.model,
            [prompt],
            cells,
            operation=operation,
            bound=plan["bound"],
            read_layer=plan["read_layer"],
            norms=lab.aio.norms,
            perplexity=True,
            reader=reader,
            sampling=sampling,
        )

    async def _reference(
        self,
        messages: Any,
        vector: Any,
        plan: dict[str, Any],
        sampling: dict[str, Any],
        reader: tuple[int, torch.Tensor],
    ) -> dict[str, Any]:
        """Return the unsteered answer with its projections and perplexity, and the spread of x·u on plain text."""
        model, (layer, unit) = self._lab.model, reader
        cells = lay_out(model, plan["layers"][:1], vector, [0.0], "add")
        grid = self._grid(messages, sampling, plan, cells, "add", reader)
        frame, seen = await asyncio.gather(grid.run(), plain_projections(model, {layer: unit}))
        [row], spread = frame.to_dict("records"), float(seen[layer].std())
        found = {name: plain(row[name]) for name in ("text", *READ, "perplexity", "repetition")}
        return {**found, "spread": plain(spread) or None}

    def _draw(self, grid: Grid, plan: dict[str, Any], reference: dict[str, Any]) -> None:
        frame = grid.frame()
        if len(frame):
            self.frame = frame
            value = "scale" if plan["operation"] == "ablate" else "dose"
            most = MAX_CHARACTERS // (len(plan["layers"]) * len(plan["doses"]))
            rows = frame.to_dict("records")
            self.cells = [cell_of(row, row[value], plan["doses"], reference, most) for row in rows]


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
        "broken": bool(repetitive or perplexing),
    }


def _beyond(row: Mapping[str, Any], reference: Mapping[str, Any], name: str) -> float:
    usual = reference.get(name)
    return math.nan if usual is None or name not in row else float(row[name] - usual)


def reader_of(vector: Any, layer: int, hidden_size: int) -> tuple[int, torch.Tensor]:
    """Return a layer with the vector that is read along there: its own, or that of the nearest layer which has one."""
    known = layers_with(vector)
    nearest = layer if known is None else min(known, key=lambda each: abs(each - layer))
    return layer, vector_at(vector, nearest, hidden_size, "sweep")


def _messages(plan: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": plan["prompt"]}]


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
    prompt = plan.get("prompt", "a text")
    if not isinstance(prompt, str) or not prompt.strip():
        raise RequestError(f"sweep: prompt must be a text that is not empty, got {prompt!r}")
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
