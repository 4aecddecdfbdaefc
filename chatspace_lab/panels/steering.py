"""The steering panel: vectors with sliders, two chats side by side, and what they do inside the model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import traitlets

from chatspace_lab.analysis.examples import OFFICE, SEA
from chatspace_lab.errors import RequestError
from chatspace_lab.panels import keeping, stills
from chatspace_lab.panels.answers import Answer
from chatspace_lab.panels.asked import Asked, Sampling, check_view, conversation, layers_to_read, turns_from
from chatspace_lab.panels.base import Panel, sentence, static
from chatspace_lab.panels.doses import shown_row
from chatspace_lab.panels.pieces import Pieces
from chatspace_lab.panels.receipt import receipt
from chatspace_lab.panels.rows import plain_where, rows_from, where_from, where_name
from chatspace_lab.panels.runner import REST_S, Runner
from chatspace_lab.panels.session_rows import SessionRows
from chatspace_lab.panels.talk import Talk
from chatspace_lab.panels.vectors import contrast, evidence, frozen, lines, name_in_notebook, snapshot, variables

if TYPE_CHECKING:
    from chatspace_lab.session.lab import LabSession

DEFAULT_PROMPT = "Tell me about rivers."


class SteeringPanel(Panel):
    """Steer by hand and watch: ``lab.panel()`` as the last line of a cell.

    The session owns steering: a slider writes to it, and ``lab.steer(…)`` in a cell moves the slider. A change runs the
    last answer again, as soon as it is let go of or rests; the baseline stays while only steering changes.

    Parameters
    ----------
    lab
        The session.
    prompt
        What stands in the message field at first.
    system
        A system message, for both sides.
    seed, temperature, max_tokens
        Of both sides.
    split_special_tokens
        Whether special tokens that a message spells, such as ``<|im_end|>``, are sent as ordinary text. By default the
        model reads them as it reads those of its chat template, and the panel marks them.

    Attributes
    ----------
    state : dict
        Rows, conversation, sampling and what is looked at, as plain data; may be set, whole or in part.
    """

    _esm = static("steering_panel.js")
    _css = static("panels.css")
    _kept = ("error", "turns", "run", "baseline", "steered", "view")
    _drawn = staticmethod(stills.steering)

    rows = traitlets.List().tag(sync=True)
    vectors = traitlets.List().tag(sync=True)
    turns = traitlets.List().tag(sync=True)
    sampling = traitlets.Dict().tag(sync=True)
    where = traitlets.Unicode("all").tag(sync=True)
    split_special_tokens = traitlets.Bool(False).tag(sync=True)
    baseline = traitlets.Dict().tag(sync=True)
    steered = traitlets.Dict().tag(sync=True)
    view = traitlets.Dict().tag(sync=True)
    draft = traitlets.Unicode("").tag(sync=True)
    busy = traitlets.Unicode("").tag(sync=True)
    built = traitlets.Dict().tag(sync=True)
    saved = traitlets.Unicode("").tag(sync=True)

    def __init__(
        self,
        lab: LabSession,
        prompt: str | None = None,
        *,
        system: str | None = None,
        seed: int = 7,
        temperature: float = 0.0,
        max_tokens: int = 64,
        split_special_tokens: bool = False,
        **traits: Any,
    ) -> None:
        sampling = Sampling().edited({"seed": seed, "temperature": temperature, "max_tokens": max_tokens})
        self._talk = Talk(sampling, system, split_special_tokens)
        self._norms: dict[int, float] = dict(lab.norms)
        self._measured: Answer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        view = {"layers": [lab.layer_count // 2], "direction": None, "plot": "projection", "pinned": None}
        super().__init__(
            lab,
            draft=DEFAULT_PROMPT if prompt is None else prompt,
            sampling=sampling.plain(),
            split_special_tokens=split_special_tokens,
            run={"number": 0, "status": "idle"},
            view=view,
            **traits,
        )
        self._pieces = Pieces(lab.tokenizer)
        self._looked_at = view
        self._runner = Runner(lab.aio, self._ask, lambda: lab.vectors, self._tell, self._show)
        self._handlers = {
            "edit": lambda m: self._book.edit(m["row"], m["patch"]),
            "add": lambda m: self._add(m["vector"], m.get("operation", "add")),
            "use": lambda m: self._add(m["vector"], "add", self._lab.vectors.get(m["vector"])),
            "remove": lambda m: self._book.remove(m["row"]),
            "ask": lambda m: self._say(m["text"]),
            "turn": lambda m: self._edit_turn(m["index"], m["text"]),
            "regenerate": lambda m: self._again(),
            "stop": lambda m: self._runner.stop(),
            "clear": lambda m: self._clear(),
            "sampling": lambda m: self._resample(m["patch"]),
            "where": lambda m: self._book.replace(where=m["where"]),
            "special": lambda m: self._split(m["split"]),
            "variables": lambda m: self._offer(),
            "contrast": lambda m: self._spawn(self._contrast(m["name"], lines(m["positive"]), lines(m["negative"]))),
            "demo": lambda m: self._spawn(self._demo()),
            "save": lambda m: self._spawn(self._save()),
        }
        self.observe(lambda change: self._soon(self._guarded, self._look, change["new"]), "view")
        self._now(self._begin)

    def _begin(self) -> None:
        self._runner.open()
        self._book = SessionRows(self._lab, self._book_changed, self._spawn, self._guarded, lambda: self._norms)
        self._offer()
        self._book.follow(self._lab.export_steering_spec())
        self._book.suggest()
        if not self._norms:
            self._spawn(self._measure())

    # -- from Python -------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        vector: Any = None,
        operation: str = "add",
        *,
        layers: int | Sequence[int] | None = None,
        scale: float = 0.0,
        min: float | None = None,  # noqa: A002
        max: float | None = None,  # noqa: A002
    ) -> None:
        """Add a row. Without a vector, ``name`` is one of ``lab.vectors`` or a variable of the notebook.

        Raises
        ------
        RequestError, SteeringError
        """
        fields = {"layers": layers, "scale": scale, "min": min, "max": max}
        self._now(lambda: self._add(name, operation, vector, {k: v for k, v in fields.items() if v is not None}))

    def ask(self, text: str) -> None:
        """Send a message to both sides; returns at once."""
        self._now(lambda: self._say(text))

    def stop(self) -> None:
        """Stop what runs; the part that has come stays."""
        self._now(self._runner.stop)

    def regenerate(self) -> None:
        """Answer the last message again, with the next seed."""
        self._now(self._again)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing runs any more, and raise what went wrong."""

        async def settled() -> None:
            await asyncio.sleep(0)
            await self._runner.settled()
            await self._book.settled()

        self._thread.call(settled(), timeout_s)
        self._now(self._displays.update)
        if self.error:
            raise RequestError(f"the panel shows an error: {self.error}")

    @property
    def state(self) -> dict[str, Any]:
        """What the panel holds, as plain data: set it, whole or in part, to bring it back."""
        return {
            "rows": [row.plain() for row in self._book.rows],
            "where": plain_where(self._book.where),
            "turns": self._talk.plain(),
            "sampling": self._talk.sampling.plain(),
            "system": self._talk.system,
            "split_special_tokens": self._talk.split_special_tokens,
            "view": dict(self.view),
        }

    @state.setter
    def state(self, new: Mapping[str, Any]) -> None:
        unknown = set(new) - set(self.state)
        if unknown:
            raise RequestError(f"a panel's state has no {', '.join(sorted(unknown))}, only {', '.join(self.state)}")
        sampling = self._talk.sampling.edited(dict(new.get("sampling", {})))
        turns = None if "turns" not in new else turns_from(new["turns"])
        names = {self.view["direction"], *self._lab.vectors, *variables(self._lab.hidden_size)}
        check_view(new.get("view", {}), self._lab.layer_count, names)

        def put() -> None:
            rows = self._book.rows if "rows" not in new else rows_from(new["rows"])
            where = where_from(new.get("where", self._book.where))
            self._book.check(rows, where)
            self._talk.system, self._talk.sampling = new.get("system", self._talk.system), sampling
            self._talk.split_special_tokens = new.get("split_special_tokens", self._talk.split_special_tokens)
            self._talk.turns = self._talk.turns if turns is None else turns
            if "view" in new:
                self.view = {**self.view, **new["view"]}
            self._book.replace(rows, where)
            if not self._talk.turns:
                self._clear()

        self._now(put)

    def save(self, folder: str | Path | None = None) -> Path:
        """Write the session as ``lab.save`` does, and the panel's state with its vectors beside it.

        Parameters
        ----------
        folder
            None is a new one in the working directory, named after the time.

        Returns
        -------
        pathlib.Path
            The folder.

        Raises
        ------
        SessionError
            If the folder cannot be written.
        """
        return self._thread.call(self._save(folder))

    def load(self, folder: str | Path) -> None:
        """Bring back a saved panel: its vectors are in ``lab.vectors``, and its last message is answered anew.

        The session's history is brought back by ``lab.load``.

        Raises
        ------
        SessionError
            If there is none, or it is damaged.
        RequestError, SteeringError
            If it was saved with a model of another shape.
        """
        state, vectors = keeping.read(Path(folder).expanduser())
        checked = {name: snapshot(vector, self._lab.hidden_size, name) for name, vector in vectors.items()}
        self._lab.vectors.update(checked)
        self.state = state

    def _let_go(self) -> None:
        self._book.close()
        self._runner.close()

    # -- rows, on the engine's loop ----------------------------------------------------------------------------------

    def _add(self, name: str, operation: str, vector: Any = None, fields: Mapping[str, Any] | None = None) -> None:
        row = self._book.add(name, operation, vector, fields)
        if self.view.get("direction") is None:
            self.view = {**self.view, "direction": name, "layers": list(row.layers[-1:]) or self.view["layers"]}
        self._offer()

    def _book_changed(self, by_hand: bool) -> None:
        if self.view.get("direction") is None and self._book.rows and not by_hand:
            self.view = {**self.view, "direction": self._book.rows[0].vector}
        if not by_hand:
            self._offer()
        self._draw()
        self._changed(rest_s=0.0 if by_hand else REST_S)

    def _changed(self, rest_s: float = REST_S) -> None:
        if self._talk.turns:
            self._runner.change(rest_s=rest_s)

    def _draw(self) -> None:
        baseline = self._runner.answers.get("baseline")
        self.rows = [shown_row(row, self._lab.vectors, self._norms, baseline) for row in self._book.rows]
        self.where = where_name(self._book.where)
        self.sampling, self.split_special_tokens = self._talk.sampling.plain(), self._talk.split_special_tokens
        self.turns = self._talk.plain()

    def _offer(self) -> None:
        self.vectors = self._book.offered()

    async def _contrast(self, name: str, positive: Sequence[str], negative: Sequence[str]) -> None:
        """Build a direction and show what its test says; under a known name it takes the other one's place."""
        self.busy = f"building {name}"
        try:
            direction = await contrast(self._lab.aio, name, positive, negative)
        finally:
            self.busy = ""
        self.built = evidence(direction)
        self._offer()
        if any(row.vector == direction.name for row in self._book.rows):
            self._book.replace()

    async def _demo(self) -> None:
        await self._contrast("sea", SEA, OFFICE)
        self._add("sea", "add", self._lab.vectors["sea"])

    async def _save(self, folder: str | Path | None = None) -> Path:
        path = await self._lab.aio.save(keeping.new_folder() if folder is None else folder)
        keeping.write(path, self.state, self._lab.vectors)
        self.saved = str(path)
        return path

    # -- the conversation --------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._talk.say(text, self._runner.answers, self._norms)
        self.draft = ""
        self._draw()
        self._changed(rest_s=0.0)

    def _edit_turn(self, index: int, text: str) -> None:
        self._talk.edit(index, text)
        self._draw()
        self._changed(rest_s=0.0)

    def _again(self) -> None:
        if not self._talk.turns:
            raise RequestError("nothing was asked yet")
        self._runner.forget_baseline()
        self._resample({"seed": self._talk.sampling.seed + 1})

    def _clear(self) -> None:
        self._runner.clear()
        self._talk.turns = ()
        self.baseline, self.steered = {}, {}
        self.run = {"number": self._runner.number, "status": "idle"}
        self._draw()

    def _resample(self, patch: dict[str, Any]) -> None:
        self._talk.sampling = self._talk.sampling.edited(patch)
        self._draw()
        self._changed(rest_s=0.0)

    def _split(self, split: bool) -> None:
        self._talk.split_special_tokens = split
        self._draw()
        self._changed(rest_s=0.0)

    async def _measure(self) -> None:
        if not self._talk.turns and self.draft.strip():
            await self._lab.aio.measure(conversation(self._talk.system, turns_from([{"user": self.draft}]), "baseline"))
            self._norms = dict(self._lab.aio.norms)
            self._draw()

    # -- runs --------------------------------------------------------------------------------------------------------

    def _ask(self, number: int) -> Asked:
        book, lab = self._book, self._lab
        steered = {layer for row in book.rows for layer in row.layers}
        looked_at = {int(layer) for layer in self.view.get("layers", ())}
        layers = layers_to_read(lab.layer_count, sorted(steered | looked_at))
        talk = self._talk
        spec, vectors = book.spec(), frozen(lab.vectors, lab.hidden_size)
        turns, split = talk.open(), talk.split_special_tokens
        return Asked(number, book.rows, spec, book.where, turns, talk.system, talk.sampling, layers, vectors, split)

    def _tell(self, status: str, **facts: Any) -> None:
        run = {**self.run, "number": self._runner.number, "status": status}
        if status in ("waiting", "running"):
            run = {"number": self._runner.number, "status": status, "sides": list(facts.get("sides", ()))}
            self.error = "" if status == "running" else self.error
        if "error" in facts:
            self._show_error(facts["error"])
            run["error"] = sentence(facts["error"])
            run["sides"] = list(facts["sides"])
        if "seconds" in facts and "steered" in self._runner.answers:
            name = name_in_notebook(self._lab) or "lab"
            run["receipt"] = receipt(self._runner.answers, facts["seconds"], self._lab, self._norms, name)
            self._draw()  # what caps have clipped is known now
        self.run = run

    def _show(self, side: str, answer: Answer) -> None:
        direction = self.view.get("direction")
        setattr(self, side, answer.payload(direction, self._pieces))
        norms = answer.prompt_norms() if side == "baseline" and answer is not self._measured else {}
        if norms:
            self._measured, self._norms = answer, norms
            self._lab.aio.norms, self._lab.aio.measured_on = dict(norms), answer.asked.turns[-1].user
            self._draw()

    def _look(self, view: Mapping[str, Any]) -> None:
        """Follow what the page looks at: another direction is read from the captures, without a forward pass."""
        check_view(view, self._lab.layer_count)
        before, self._looked_at = self._looked_at, dict(view)
        name = view.get("direction")
        if name in (None, before.get("direction")):
            return
        if name not in self._lab.vectors:
            found = variables(self._lab.hidden_size).get(name)
            if found is None:
                raise RequestError(f"there is no vector {name!r}")
            self._lab.vectors[name] = snapshot(found, self._lab.hidden_size, name)
        answers = self._runner.answers
        if all(name in answer.vectors for answer in answers.values()):
            for side, answer in answers.items():
                self._show(side, answer)
        else:
            self._spawn(self._runner.read_again(name))

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        """Run a coroutine on the engine's loop; its error is shown in the panel."""

        async def guarded() -> None:
            try:
                await coroutine
            except Exception as error:  # noqa: BLE001 - whatever it is, the user must see it
                self._show_error(error)

        task = self._thread.loop.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
