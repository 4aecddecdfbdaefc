"""What a lab looks like as the last line of a cell."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from chatspace_lab.session.history import AS_TYPED, describe_operation, describe_where, ranges
from chatspace_lab.session.measure import quoted
from chatspace_lab.steering.where import Where, as_where

if TYPE_CHECKING:
    from chatspace_lab.session.lab import LabSession

GIB = 1 << 30
CELL = "text-align: left; padding: 2px 12px 2px 0; background: transparent; color: inherit; border: none"


def card(lab: LabSession, name: str, stats: dict[str, Any] | None) -> str:
    """Return the session as HTML: model, layers, steering in force, memory, requests; readable in light and dark."""
    title = f"<b>{html.escape(name)}</b>"
    if stats is None:
        state = "closed" if not lab.is_alive else "not answering"
        return f'<div class="{AS_TYPED}" style="font-family: monospace">{title} · {state}</div>'
    facts = lab.model.facts
    runs = lab.history.runs
    counts = {status: sum(run.status == status for run in runs) for status in ("running", "done", "aborted", "failed")}
    requests = ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "none yet"
    memory = lab.model.memory()
    dtype = f"{facts.dtype}" + (f" ({facts.dtype_reason})" if facts.dtype_reason else "")
    rows = [
        ("model", f"{facts.architecture}, {facts.layer_count} layers × {facts.hidden_size}, {dtype}"[:200]),
        ("engine", f"vLLM {facts.vllm_version}, at most {facts.max_model_len:,} tokens"),
        ("steering", None),
        ("memory", f"engine {memory / GIB:.2f} GiB; captures {_size(stats['nbytes'])} held"),
        ("requests", requests),
    ]
    body = "".join(
        f'<tr><td style="{CELL}; opacity: 0.6">{label}</td>'
        f'<td style="{CELL}">{_steering(lab) if text is None else html.escape(text)}</td></tr>'
        for label, text in rows
    )
    return (
        f'<div class="{AS_TYPED}" style="font-family: monospace; line-height: 1.5">{title} · ready'
        f'<table style="border-collapse: collapse; background: transparent">{body}</table></div>'
    )


def _steering(lab: LabSession) -> str:
    """Return the steering in force, an operation a line, with the dose beside each raw scale."""
    spec = lab.export_steering_spec()
    if not spec:
        return "none"
    names = lab.aio.names.known()
    grouped: dict[str, list[int]] = {}
    for layer, operation in spec:
        grouped.setdefault(describe_operation(operation, lab.norms.get(layer), names), []).append(layer)
    lines = [f"{html.escape(what)} @ {ranges(layers)}" for what, layers in grouped.items()]
    where = as_where(spec.where)
    if where != Where():
        lines.append(f"on {html.escape(describe_where(where))}")
    if lab.norms and "dose" in "".join(grouped):
        asked = html.escape(quoted(lab.aio.measured_on))
        lines.append(f'<span style="opacity: 0.6">dose: of the residual norm on {asked}, at each layer</span>')
    return "<br>".join(lines)


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):.1f} MiB"
