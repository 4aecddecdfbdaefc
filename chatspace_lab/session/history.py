"""Every request that the engine was given, and what came of it."""

from __future__ import annotations

import asyncio
import datetime
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chatspace_lab.engine.requests import Submission, sampling_of
from chatspace_lab.engine.stream import StreamDelta
from chatspace_lab.readings import Readings
from chatspace_lab.steering.specs import AblationSpec, AddSpec, Operation, SteeringSpec
from chatspace_lab.steering.vectors import content_key
from chatspace_lab.steering.where import Where, as_where

if TYPE_CHECKING:
    import pandas as pd

LIMIT = 10_000
"""Runs kept; the oldest go first."""
AS_TYPED = "mathjax_ignore tex2jax_ignore"
"""Classes of HTML in which nobody's dollars are formulas: MathJax leaves it alone."""


@dataclass
class Run:
    """One request.

    Attributes
    ----------
    number
        Counts from 0.
    request_id
        The engine's name for it.
    started
        When, in ISO 8601, UTC.
    kind
        ``"generate"`` or ``"chat"``.
    prompt
        Text that was given, or the rendered conversation; None if only token ids were given.
    messages
        The conversation; None if there was none.
    prefill
        Content of its last message, if that was to be continued.
    prompt_token_ids, token_ids
        Of the prompt and of the answer.
    steering
        In force for this request.
    sampling
        Sampling parameters that are not vLLM's defaults.
    capture_layers
        Empty if nothing was captured or read.
    text
        The answer so far.
    status
        ``"running"``, ``"done"``, ``"aborted"`` (interrupted, cancelled, or a stream that was left) or ``"failed"``.
    finish_reason
        ``"stop"`` or ``"length"`` when done.
    error
        Why it failed.
    seconds
        From its start to its end.
    readings
        Norms and projections that were read while it ran, or by a capture that reduces to them.
    """

    number: int
    request_id: str
    started: str
    kind: str
    prompt: str | None
    messages: list[dict[str, Any]] | None
    prompt_token_ids: list[int] = field(repr=False)
    steering: SteeringSpec
    sampling: dict[str, Any]
    capture_layers: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list, repr=False)
    status: str = "running"
    finish_reason: str | None = None
    error: str | None = None
    seconds: float = 0.0
    readings: Readings | None = field(default=None, repr=False)
    prefill: str = ""

    @property
    def asked(self) -> str:
        """What to call it: the last message's content, or the prompt."""
        if self.messages:
            return str(self.messages[-1].get("content") or "")
        return self.prompt if self.prompt is not None else f"{len(self.prompt_token_ids)} token ids"


class History:
    """Runs, oldest first. ``history[-1]`` is the newest; :meth:`frame` is a table.

    Parameters
    ----------
    limit
        Runs kept.
    names
        Returns the names of vectors by their contents (:class:`chatspace_lab.session.in_force.Names`).
    """

    def __init__(self, limit: int = LIMIT, names: Callable[[], Mapping[bytes, str]] = dict) -> None:
        self._limit, self._names = limit, names
        self._runs: dict[str, Run] = {}
        self._open: dict[str, tuple[Run, float]] = {}
        self._lock = threading.Lock()
        self._count = 0

    # -- told by the engine's client, on its loop --------------------------------------------------------------------

    def began(self, submission: Submission) -> None:
        """Note a request."""
        prompt, chat = submission.prompt, submission.prompt.chat
        run = Run(
            number=self._count,
            request_id=submission.request_id,
            started=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            kind="chat" if chat else "generate",
            prompt=prompt.text,
            messages=chat.messages if chat else None,
            prefill=chat.prefill if chat else "",
            prompt_token_ids=list(prompt.token_ids),
            steering=submission.spec,
            sampling=sampling_of(submission.params),
            capture_layers=list(submission.handle.layer_indices) if submission.handle else [],
        )
        self.add(run)
        self._open[submission.request_id] = run, time.perf_counter()

    def received(self, submission: Submission, piece: StreamDelta) -> None:
        """Note a piece."""
        run, _ = self._open[submission.request_id]
        run.text += piece.text
        run.token_ids.extend(piece.token_ids)
        run.finish_reason = piece.finish_reason or run.finish_reason

    def read(self, submission: Submission, readings: Readings) -> None:
        """Note readings."""
        self.attach(submission.request_id, readings)

    def ended(self, submission: Submission, error: BaseException | None) -> None:
        """Note the end."""
        run, start = self._open.pop(submission.request_id)
        run.seconds = time.perf_counter() - start
        if error is None:
            run.status = "done"
        elif isinstance(error, asyncio.CancelledError):
            run.status = "aborted"
        else:
            run.status, run.error = "failed", f"{type(error).__name__}: {error}"

    # -- read by the user, in any thread -----------------------------------------------------------------------------

    def add(self, run: Run) -> None:
        """Append a run, numbered next."""
        with self._lock:
            run.number = self._count
            self._count += 1
            self._runs[run.request_id] = run
            while len(self._runs) > self._limit:
                del self._runs[next(iter(self._runs))]

    def attach(self, request_id: str, readings: Readings) -> None:
        """Add readings to a run; those that it has come before them."""
        run = self.find(request_id)
        if run is not None:
            run.readings = readings if run.readings is None else Readings.join([run.readings, readings])

    def find(self, request_id: str) -> Run | None:
        """Return the run of a request, or None if it is gone."""
        return self._runs.get(request_id)

    @property
    def runs(self) -> list[Run]:
        """A copy of the list."""
        with self._lock:
            return list(self._runs.values())

    def clear(self) -> None:
        """Forget all runs that have ended."""
        with self._lock:
            self._runs = {key: run for key, run in self._runs.items() if run.status == "running"}

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __getitem__(self, index: int) -> Run:
        return self.runs[index]

    def __repr__(self) -> str:
        return f"History({len(self)} runs; history[-1] is the newest, history.frame() a table)"

    def frame(self) -> pd.DataFrame:
        """Return a row per run: what was asked, how it was steered and sampled, and what came."""
        import pandas as pd

        columns = [
            "run", "started", "kind", "status", "asked", "steering", "sampling", "prompt_tokens", "tokens", "text",
            "finish_reason", "seconds", "capture_layers", "readings", "error",
        ]  # fmt: skip
        names = self._names()
        rows = [
            (
                run.number, run.started, run.kind, run.status, run.asked, describe(run.steering, names=names),
                _as_arguments(run.sampling), len(run.prompt_token_ids), len(run.token_ids), run.text,
                run.finish_reason, run.seconds, run.capture_layers,
                0 if run.readings is None else len(run.readings), run.error,
            )
            for run in self.runs
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=columns).set_index("run")

    def _repr_html_(self) -> str | None:
        table = self.frame()._repr_html_()
        return None if table is None else f'<div class="{AS_TYPED}">{table}</div>'  # None as pandas' options say


def _as_arguments(sampling: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sampling.items())


def describe(
    spec: SteeringSpec, norms: Mapping[int, float] | None = None, names: Mapping[bytes, str] | None = None
) -> str:
    """Return a spec in a few words: ``add 8·v (|v| 2.1) = dose 0.42 @ 6–9; cap [-4, 6.5] @ 12``.

    The dose of an addition is its length over the residual's mean norm at that layer, where ``norms`` has that. A
    vector whose contents are in ``names`` is called by its name.
    """
    if not spec:
        return "none"
    layers: dict[str, list[int]] = {}
    for layer, operation in spec:
        layers.setdefault(describe_operation(operation, (norms or {}).get(layer), names), []).append(layer)
    parts = [f"{what} @ {ranges(at)}" for what, at in layers.items()]
    where = as_where(spec.where)
    return "; ".join(parts) + ("" if where == Where() else f" on {describe_where(where)}")


def describe_operation(
    operation: Operation, norm: float | None = None, names: Mapping[bytes, str] | None = None
) -> str:
    """Return one operation in a few words, with the dose of an addition where the residual's ``norm`` is known."""
    name = names.get(content_key(operation.vector)) if names else None
    along = "" if name is None else f"{name} "
    if isinstance(operation, AddSpec):
        length = operation.vector.double().norm().item()
        dose = "" if norm is None else f" = dose {operation.scale * length / norm:.2f}"
        return f"add {operation.scale:g}·{name or 'v'} (|{name or 'v'}| {length:.3g}){dose}"
    if isinstance(operation, AblationSpec):
        return f"ablate {along}to {operation.scale:g}"
    low = "−∞" if operation.min is None else f"{operation.min:g}"
    high = "∞" if operation.max is None else f"{operation.max:g}"
    return f"cap {along}[{low}, {high}]"


def describe_where(where: Where) -> str:
    """Return a choice of positions in a few words."""
    what = where.part if not where.indices else f"{where.part} {', '.join(map(str, where.indices))}"
    left_out = [
        words
        for words, counts in (("special tokens", where.special_tokens), ("the first token", where.first_token))
        if not counts
    ]
    return what + (f" without {' and '.join(left_out)}" if left_out else "")


def ranges(layers: list[int]) -> str:
    """Return layer numbers with runs joined: ``3, 6–9``."""
    parts: list[list[int]] = []
    for layer in sorted(set(layers)):
        if parts and parts[-1][-1] == layer - 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
