"""Runs of a panel: idle → waiting → running → done, stopped or failed. At most one at a time; only the newest counts.

Everything here runs on the engine's loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from typing import Any

from chatspace_lab.engine.observer import Observer, Subscription
from chatspace_lab.engine.requests import Submission
from chatspace_lab.engine.stream import StreamDelta
from chatspace_lab.engine.together import together
from chatspace_lab.panels.answers import Answer, for_layers
from chatspace_lab.panels.asked import SIDES, Asked
from chatspace_lab.panels.rows import Vectors
from chatspace_lab.panels.vectors import frozen, same, usable
from chatspace_lab.readings import Readings
from chatspace_lab.session.aio import AsyncLab
from chatspace_lab.special_tokens import special_ids
from chatspace_lab.steering.specs import SteeringSpec
from chatspace_lab.steering.where import resolve

REST_S = 0.15
"""Debounce: seconds a slider must rest before its value is used."""
FLUSH_S = 0.06
"""Seconds between two updates of the page with new tokens, at least."""
MAX_DIRECTIONS = 8
"""Directions that are read while a run goes; others are read when they are chosen."""

Ask = Callable[[int], Asked]


class Runner:
    """Runs what is asked, newest first.

    Parameters
    ----------
    lab
        Runs it.
    ask
        Gives what is asked now, with the number that it was given.
    tell
        Called with the status, and what else is known, at every change of it.
    show
        Called with a side and its answer when there is something new to see.

    Attributes
    ----------
    number
        Of the newest run.
    status
        ``"idle"``, ``"waiting"``, ``"running"``, ``"done"``, ``"stopped"`` or ``"failed"``.
    answers
        Side to its newest answer.
    in_flight, most_in_flight
        Generations now, and the most that there have ever been at once: a run of both sides is one.
    """

    def __init__(
        self,
        lab: AsyncLab,
        ask: Ask,
        vectors: Callable[[], Vectors],
        tell: Callable[..., None],
        show: Callable[[str, Answer], None],
    ) -> None:
        self._lab, self._ask, self._vectors, self._tell, self._show = lab, ask, vectors, tell, show
        self._loop = lab.execution.loop.loop
        self.number = 0
        self.status = "idle"
        self.answers: dict[str, Answer] = {}
        self.in_flight = self.most_in_flight = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._flushes: dict[str, asyncio.TimerHandle] = {}
        self._flushed: dict[str, float] = {}
        self._baseline: Any = None
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._under_way: dict[str, tuple[str, Answer]] = {}
        self._ear = _Ear(self)
        self._hearing: Subscription[Observer] | None = None

    # -- asked by the panel ------------------------------------------------------------------------------------------

    def change(self, *, rest_s: float = REST_S) -> None:
        """Values have changed: drop what runs, and run anew once they have rested for so long."""
        self.number += 1
        self._cancel()
        self._set("waiting")
        self._timer = self._loop.call_later(rest_s, self._start)

    def stop(self) -> None:
        """Stop what waits or runs. What has come stays."""
        if self.status in ("waiting", "running"):
            self._cancel()
            self._set("stopped")

    def forget_baseline(self) -> None:
        """Run the baseline too, next time."""
        self._baseline = None

    async def settled(self) -> None:
        """Wait until nothing waits or runs."""
        await self._quiet.wait()
        if self._task is not None:
            await asyncio.wait([self._task])

    def open(self) -> None:
        """Hear of the engine's requests from now on."""
        self._hearing = self._lab.observe(self._ear)

    def close(self) -> None:
        """Stop, drop all captures, and hear of no request any more."""
        self.clear()
        if self._hearing is not None:
            self._hearing.end()

    def clear(self) -> None:
        """Stop, and forget all answers: what has been stopped says nothing more."""
        self._cancel()
        self.number += 1
        self.status = "idle"
        self._quiet.set()
        self._baseline = None
        for side in list(self.answers):
            self._drop(side)

    def _drop(self, side: str) -> None:
        answer = self.answers.pop(side, None)
        if answer is not None:
            answer.handle.close()

    # -- told of every request: a token is shown before its numbers are read -------------------------------------------

    def received(self, submission: Submission, piece: StreamDelta) -> None:
        """Show a piece as soon as the engine gives it."""
        side, answer = self._under_way.get(submission.request_id, ("", None))
        if answer is not None and answer.asked.number == self.number:
            answer.take(piece)
            self._take(side, answer)

    # -- on the way --------------------------------------------------------------------------------------------------

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            self._task.cancel()

    def _set(self, status: str, **facts: Any) -> None:
        self.status = status
        if status in ("waiting", "running"):
            self._quiet.clear()
        else:
            self._quiet.set()
        self._tell(status, **facts)

    def _start(self) -> None:
        self._timer = None
        self._task = self._loop.create_task(self._run(self.number, self._task))

    async def _run(self, number: int, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])  # the engine has let go of it
        begun = time.perf_counter()
        sides: tuple[str, ...] = ("steered",)
        try:
            asked = self._ask(number)
            key = asked.baseline_key()
            sides = ("steered",) if key == self._baseline and self._reads_the_same(asked) else SIDES
            self._set("running", asked=asked, sides=sides)
            if "baseline" in sides:
                self._baseline = None
            await self._generate(asked, sides)
        except asyncio.CancelledError:
            if number == self.number and self.status in ("running", "stopped"):  # running: the model is being closed
                for side, answer in self.answers.items():
                    if answer.asked.number == number:
                        self._flush(side)
                self._set("stopped", seconds=time.perf_counter() - begun)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the user must see it
            if number == self.number:
                for side in sides:  # the answer that is shown belongs to an earlier prompt or steering
                    self._drop(side)
                self._set("failed", error=error, sides=sides)
            return
        if number == self.number:
            self._baseline = key
            self._set("done", seconds=time.perf_counter() - begun)

    def _reads_the_same(self, asked: Asked) -> bool:
        """Whether the baseline was read along the vectors that now have their names."""
        baseline = self.answers.get("baseline")
        read = {} if baseline is None else baseline.vectors
        return all(name in asked.vectors and same(vector, asked.vectors[name]) for name, vector in read.items())

    async def _generate(self, asked: Asked, sides: tuple[str, ...]) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            made = {side: self._answer(asked, side) for side in sides}
            self._under_way = {answer.stream.request_id: (side, answer) for side, answer in made.items()}
            try:
                await together(self._follow(side, answer) for side, answer in made.items())
            finally:
                for side, answer in made.items():
                    if self.answers.get(side) is not answer:
                        answer.handle.close()  # it never came to be shown
        finally:
            self.in_flight -= 1

    def _answer(self, asked: Asked, side: str) -> Answer:
        model = self._lab.model
        vectors = usable(asked.vectors, model.hidden_size)  # others may be added or kept, but nothing read along them
        chosen = {name: vectors[name] for name in list(vectors)[-MAX_DIRECTIONS:]}
        chosen |= {row.vector: vectors[row.vector] for row in asked.rows if row.vector in vectors}
        messages, sampling = asked.messages(side), asked.sampling.plain()
        [prompt] = model.prepare(messages, chat=True, chat_options=asked.chat_options(), **sampling)
        stream = model.stream(
            prompt,
            steering=asked.spec if side == "steered" else SteeringSpec.none(),
            capture_layers=asked.layers,
            read_layers=asked.layers,
            directions={name: for_layers(vector, asked.layers) for name, vector in chosen.items()},
            **sampling,
        )
        spans = resolve(
            asked.where,
            prompt.token_ids,
            limit=model.max_model_len,
            special_ids=special_ids(model.tokenizer),
            messages=prompt.chat.boundaries if prompt.chat else None,
        )
        return Answer(asked, messages, prompt, stream, chosen, spans, tokenizer=model.tokenizer)

    async def _follow(self, side: str, answer: Answer) -> None:
        async with answer.stream:
            async for _ in answer.stream:  # what it wrote is here already; now its numbers are too
                if answer.asked.number != self.number:
                    return
                self._take(side, answer)
        self._flush(side)

    def _take(self, side: str, answer: Answer) -> None:
        """Show a piece, now if it is the first, else with others that come soon."""
        old = self.answers.get(side)
        if old is not answer:
            self.answers[side] = answer
            if old is not None:
                old.handle.close()
            self._flush(side)
        elif side not in self._flushes:
            wait = max(0.0, self._flushed[side] + FLUSH_S - self._loop.time())
            self._flushes[side] = self._loop.call_later(wait, self._flush, side)

    def _flush(self, side: str) -> None:
        pending = self._flushes.pop(side, None)
        if pending is not None:
            pending.cancel()
        self._flushed[side] = self._loop.time()
        answer = self.answers.get(side)
        if answer is not None:
            self._show(side, answer)

    async def read_again(self, name: str) -> None:
        """Read the answers that are shown along a direction that was not read while they came."""
        vectors = frozen(self._vectors(), self._lab.model.hidden_size)
        for side, answer in list(self.answers.items()):
            if answer.handle.state != "ready" or name not in vectors:
                continue
            wanted = {**answer.vectors, name: vectors[name]}
            laid = {each: for_layers(vector, answer.asked.layers) for each, vector in wanted.items()}
            [readings] = await self._lab.model.read_captures([answer.handle], laid)
            answer.read_again(readings, wanted)
            self._flush(side)


class _Ear:
    """An observer that passes pieces on to a runner, without keeping it alive."""

    def __init__(self, runner: Runner) -> None:
        self._runner = weakref.ref(runner)

    def began(self, submission: Submission) -> None:
        """Nothing to note."""

    def received(self, submission: Submission, piece: StreamDelta) -> None:
        """Pass a piece on."""
        runner = self._runner()
        if runner is not None:
            runner.received(submission, piece)

    def read(self, submission: Submission, readings: Readings) -> None:
        """Nothing to note: the stream brings them."""

    def ended(self, submission: Submission, error: BaseException | None) -> None:
        """Nothing to note: the stream ends."""
