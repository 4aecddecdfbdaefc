"""What stands under an answer: what was done to how many tokens, and how to do it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chatspace_lab.panels.answers import Answer
from chatspace_lab.panels.asked import Asked
from chatspace_lab.panels.buffers import short
from chatspace_lab.panels.code import code_of
from chatspace_lab.panels.doses import doses_of, first_difference
from chatspace_lab.panels.rows import Row, where_name
from chatspace_lab.session.history import ranges

if TYPE_CHECKING:
    from chatspace_lab.session.lab import LabSession


def receipt(
    answers: Mapping[str, Answer], seconds: float, lab: LabSession, norms: Mapping[int, float], name: str
) -> dict[str, Any]:
    """Return the facts of a finished or stopped run, in words, and a cell that does it again.

    Parameters
    ----------
    answers
        By side; ``"steered"`` is there.
    seconds
        That the run took.
    lab
        The session.
    norms
        Residual norms on this prompt, for the doses.
    name
        What the session is called in the notebook.
    """
    steered = answers["steered"]
    asked = steered.asked
    steps = steps_of(asked, norms)
    baseline = answers.get("baseline")
    parts = None if baseline is None else first_difference(baseline.token_ids, steered.token_ids)
    count = len(steered.token_ids)
    said = [
        steps,
        *([f"{steered.touched} rows each ({where_name(asked.where)})"] if any(row.acts for row in asked.rows) else []),
        drawn(asked),
        f"{steered.stream.cached_tokens} cached",
        f"{count} {'token' if count == 1 else 'tokens'} in {seconds:.1f} s",
        *([] if parts is None else [f"answers differ from token {parts} on"]),
    ]
    return {"number": asked.number, "text": " · ".join(said), "code": code_of(asked, name)}


def made(asked: Asked, side: str, norms: Mapping[int, float]) -> str:
    """Return in words with which values an answer of a side was made."""
    return f"{steps_of(asked, norms) if side == 'steered' else 'not steered'} · {drawn(asked)}"


def steps_of(asked: Asked, norms: Mapping[int, float]) -> str:
    """Return the operations in words, with layers and doses."""
    steps = [_step(row, doses_of(row, asked.vectors, norms)) for row in asked.rows if row.acts]
    return " + ".join(steps) or "not steered"


def drawn(asked: Asked) -> str:
    """Return in words how answers were drawn."""
    spelt = " · special tokens as text" if asked.split_special_tokens else ""
    return f"seed {asked.sampling.seed} · T {asked.sampling.temperature:g}{spelt}"


def _step(row: Row, doses: Mapping[int, float] | None) -> str:
    if row.operation == "cap":
        low = "−∞" if row.min is None else short(row.min)
        what = f"cap {row.vector} [{low}, {'∞' if row.max is None else short(row.max)}]"
    else:
        what = f"{row.operation} {between([row.scale_at(layer) for layer in row.layers])}·{row.vector}"
    return f"{what} @ {ranges(list(row.layers))}{'' if doses is None else f' · dose {_dose(list(doses.values()))}'}"


def _dose(doses: Sequence[float]) -> str:
    if len(doses) == 1:
        return short(doses[0])
    return f"{between(doses)} at each layer, {short(sum(doses))} together"


def between(values: Sequence[float]) -> str:
    """Return one number, or the least and the largest of several, in as few characters as say it."""
    ends = list(dict.fromkeys([short(min(values)), short(max(values))]))
    return ends[0] if len(ends) == 1 else f"({' to '.join(ends)})"
