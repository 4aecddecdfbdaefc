"""A cell that does again what a panel has done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatspace_lab.panels.asked import Asked
from chatspace_lab.panels.rows import Row
from chatspace_lab.panels.vectors import expression_of, layers_with
from chatspace_lab.steering.where import Where, as_where

CLASSES = {"add": "AddSpec", "cap": "ProjectionCapSpec", "ablate": "AblationSpec"}


def code_of(asked: Asked, lab: str) -> str:
    """Return Python that gives the steered answer again.

    Parameters
    ----------
    asked
        What to do again. A variable that still holds one of its vectors is written by its name, others are
        ``lab.vectors[…]``.
    lab
        What the session is called in the notebook.
    """
    acting = [row for row in asked.rows if row.acts]
    names = sorted({CLASSES[row.operation] for row in acting} | ({"LayerSteeringSpec"} if acting else set()))
    where = as_where(asked.where)
    special = bool(where.indices) or not where.special_tokens or not where.first_token
    imports = [*names, "SteeringSpec", *(["Where"] if special else [])]
    steps: dict[int, list[str]] = {}
    for row in acting:
        for layer in row.layers:
            steps.setdefault(layer, []).append(_operation(row, layer, asked.vectors, lab))
    parts = [f"from chatspace_lab import {', '.join(imports)}", ""]
    if steps:
        parts.append("spec = SteeringSpec(")
        parts.append("    {")
        parts += [
            f"        {layer}: LayerSteeringSpec(operations=[{', '.join(each)}]),"
            for layer, each in sorted(steps.items())
        ]
        parts.append("    },")
        parts.append(f"    where={_where(where)},")
        parts.append(")")
    else:
        parts.append("spec = SteeringSpec.none()")
    parts.append("messages = [")
    parts += [f"    {message!r}," for message in asked.messages("steered")]
    parts.append("]")
    sampling = ", ".join(f"{name}={value!r}" for name, value in asked.sampling.plain().items())
    options = f", chat_options={asked.chat_options()!r}" if asked.chat_options() else ""
    parts.append(f"[answer] = {lab}.chat(messages, steering=spec, {sampling}{options})")
    parts.append("print(answer)")
    return "\n".join(parts)


def _operation(row: Row, layer: int, vectors: Mapping[str, Any], lab: str) -> str:
    vector = vectors[row.vector]
    expression = expression_of(row.vector, vectors, lab)
    if layers_with(vector) is not None:
        expression += f"[{layer}]" if isinstance(vector, Mapping) else f".at({layer})"
    values = f"min={row.min!r}, max={row.max!r}" if row.operation == "cap" else repr(row.scale_at(layer))
    return f"{CLASSES[row.operation]}({expression}, {values})"


def _where(where: Where) -> str:
    narrow = not (where.special_tokens and where.first_token)
    if where.indices:
        name = "Where.messages" if where.part == "messages" else "Where.span"
        text = f"{name}({', '.join(map(str, where.indices))})"
    else:
        text = f"Where({where.part!r})" if narrow else repr(where.part)
    if not where.special_tokens:
        text += ".without_special_tokens()"
    return text if where.first_token else f"{text}.without_first_token()"
