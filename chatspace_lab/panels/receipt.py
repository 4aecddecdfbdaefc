"""What stands under an answer: what was done to how many tokens, and how to do it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from chatspace_lab.panels.answers import Answer
from chatspace_lab.panels.code import code_of
from chatspace_lab.panels.doses import dose_per_scale, first_difference
from chatspace_lab.panels.rows import where_name
from chatspace_lab.session.history import ranges

if TYPE_CHECKING:
    from chatspace_lab.session.lab import LabSession


def receipt(
    answers: Mapping[str, Answer], seconds: float, lab: LabSession, norms: Mapping[int, float], name: str
) -> dict[str, Any]:
    """Return the facts of a finished or stopped run as plain data.

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
    steps = []
    for row in asked.rows:
        if row.acts:
            unit = dose_per_scale(row, lab.vectors, norms)
            steps.append(
                {
                    "operation": row.operation,
                    "vector": row.vector,
                    "layers": ranges(list(row.layers)),
                    "scale": row.scale,
                    "min": row.min,
                    "max": row.max,
                    "dose": None if unit is None else row.scale * unit,
                }
            )
    baseline = answers.get("baseline")
    parts = None if baseline is None else first_difference(baseline.token_ids, steered.token_ids)
    return {
        "number": asked.number,
        "steps": steps,
        "where": where_name(asked.where),
        "touched": steered.touched if steps else 0,
        "seed": asked.sampling.seed,
        "temperature": asked.sampling.temperature,
        "cached": steered.stream.cached_tokens,
        "tokens": len(steered.token_ids),
        "seconds": seconds,
        "parts": parts,
        "code": code_of(asked, lab.vectors, name),
    }
