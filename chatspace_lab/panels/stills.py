"""What a panel last showed, as HTML without scripts: for a notebook that is read without a kernel."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from chatspace_lab.panels.buffers import short
from chatspace_lab.panels.pictures import (
    AMBER,
    TEXT_GREY,
    Numbers,
    heatmap,
    largest,
    message_plot,
    overflowed,
    projection_plot,
    tint,
)
from chatspace_lab.session.history import AS_TYPED

MAX_TINTED = 2000
"""Tokens that are tinted, the newest; earlier ones are plain text."""
DIM = f"color: {TEXT_GREY}; font-size: 12px"
NOT_MADE, NOT_ANSWERED = "given, not made here", "no answer"
"""Said of earlier answers without values; the front end says the same."""
TYPED = (
    "white-space: pre-wrap; overflow-wrap: anywhere; word-break: normal; margin: 0; padding: 0; "
    "background: transparent; color: inherit; font-family: inherit"
)
ROW = "<tr style='background: #ffffff'>"
"""Without the page's own colour of rows."""
NOTE = "a picture of the last state: run the cell again to go on"
UNDER_WAY = ("waiting", "running")


def frame(mark: str, title: str, note: str, parts: Sequence[str]) -> str:
    """Return a panel's HTML.

    Parameters
    ----------
    mark
        A class that no other panel has.
    title, note
        Its first line, as text.
    parts
        HTML.
    """
    head = f"<div><strong>{html.escape(title)}</strong> <span style='{DIM}'>{html.escape(note)}</span></div>"
    ground = "background: #ffffff; color: #1c1c1c"  # its own, like a sheet of paper: the page's may be any
    style = f"{ground}; border: 1px solid #888888; padding: 6px 10px; font-family: sans-serif; font-size: 13px"
    classes = f"cl-snapshot {mark} {AS_TYPED}"
    return f"<div class='{classes}' style='{style}'>{head}{''.join(parts)}</div>"


def text(content: str, *, dim: bool = False) -> str:
    """Return a text as it was typed."""
    return _pre(html.escape(content), dim=dim)


def error(content: str) -> str:
    """Return an error as it is shown."""
    return f"<div style='color: #b91c1c'>{text(content)}</div>" if content else ""


def steering(mark: str, shown: Mapping[str, Any]) -> str:
    """Return the steering panel.

    Parameters
    ----------
    shown
        Its traits, by name.
    """
    view, run = shown["view"], shown["run"]
    answers = {side: shown[side] for side in ("baseline", "steered")}
    sides = {side: Numbers.of(answer) for side, answer in answers.items()}
    layer, direction = view["layers"][0], view["direction"] or "no direction"
    most = largest(sides, layer)
    panes = "".join(
        f"<div class='cl-kept-{side}' style='flex: 1 1 0; min-width: 240px; padding: 4px'>"
        f"{_side(side, shown, sides[side], layer, most)}</div>"
        for side in answers
    )
    parts = [error(shown["error"]), f"<div style='display: flex; flex-wrap: wrap'>{panes}</div>"]
    if most > 0:
        tinted = f"tints: projection on {direction} at layer {layer}, from {short(-most)} (red) to {short(most)} (blue)"
        parts.append(f"<div style='{DIM}'>{html.escape(tinted)}</div>")
    if any(side is not None for side in sides.values()):
        layers = ", ".join(map(str, view["layers"]))
        parts.append(f"<div style='{DIM}'>plots: baseline grey, steered in colour, layers {layers}</div>")
        pinned = view["pinned"]["position"] if view["pinned"] else None
        parts.append(projection_plot(sides, view["layers"], direction, pinned))
        parts += [message_plot(sides, view["layers"], what, direction) for what in ("norm", "cosine")]
        parts.append(heatmap(sides, direction))
    if "receipt" in run:
        parts.append(text(run["receipt"]["text"], dim=True))
    facts = shown["facts"]
    title = f"chatspace-lab · {facts['model']}"
    return frame(mark, title, f"{facts['dtype']}, {facts['layers']} layers; {NOTE}", parts)


def _side(side: str, shown: Mapping[str, Any], numbers: Numbers | None, layer: int, most: float) -> str:
    answer, run, turns = shown[side], shown["run"], shown["turns"]
    parts = [f"<div style='{DIM}'><strong>{side}</strong></div>"]
    if run["status"] == "failed" and side in run.get("sides", ()):
        return "".join([*parts, error(run.get("error", "it failed"))])  # in place of an answer to something else
    if not answer:
        return "".join([*parts, *(_message("user", html.escape(turn["user"])) for turn in turns)])
    values = None if numbers is None else numbers.along(layer)
    row = () if values is None else np.where(overflowed(values), np.inf, values)
    spelt = set(answer.get("special", ()))
    plain_before = len(answer["texts"]) - MAX_TINTED // 2

    def tokens(start: int, end: int) -> str:
        return "".join(
            _token(each, row[at] if plain_before <= at < len(row) else 0.0, most, answer["first"] + at in spelt)
            for at, each in enumerate(answer["texts"][start:end], start)
        )

    asked = 0
    for index, message in enumerate(answer["messages"]):
        band = next((each for each in answer["bands"] if each["message"] == index), None)
        content = html.escape(message["content"])
        if band is not None and band["start"] >= answer["first"]:
            start, end = band["start"] - answer["first"], band["end"] - answer["first"]
            if "".join(answer["texts"][start:end]) == message["content"]:
                content = tokens(start, end)
        note = ""
        if message["role"] == "assistant" and 0 < asked <= len(turns):
            turn = turns[asked - 1]
            note = turn["made"].get(side, NOT_MADE if turn[side] is not None else NOT_ANSWERED)
        asked += message["role"] == "user"
        parts.append(_message(message["role"], content, note))
    start = max(answer["prompt"] - answer["first"], 0)
    note = (
        "" if answer["number"] == run["number"] or side == "baseline" else "an answer to other values than the panel's"
    )
    parts.append(_message("assistant", html.escape(answer["head"]) + tokens(start, len(answer["texts"])), note))
    return "".join(parts)


def _message(role: str, content: str, note: str = "") -> str:
    below = f"<div style='{DIM}'>{html.escape(note)}</div>" if note else ""
    return f"<div style='{DIM}'>{html.escape(role)}</div>{_pre(content)}{below}"


def _token(content: str, value: float, most: float, control: bool = False) -> str:
    colour = tint(value, most)
    escaped = html.escape(content)
    if control:
        escaped = (
            f"<span style='outline: 1px dashed {AMBER}' title='a control token, spelt by the message'>{escaped}</span>"
        )
    if value == np.inf and content:
        return f"<span style='border-bottom: 3px double {AMBER}' title='not finite'>{escaped}</span>"
    return f"<span style='background-color:{colour}'>{escaped}</span>" if colour and content else escaped


def _pre(content: str, *, dim: bool = False) -> str:
    # the first line's end would be taken for the element's own
    return f"<pre style='{TYPED}{'; ' + DIM if dim else ''}'>\n{content}</pre>"


def sweep(mark: str, shown: Mapping[str, Any]) -> str:
    """Return the sweep panel: its grid, and all texts below each other.

    Parameters
    ----------
    shown
        Its traits, by name.
    """
    run, facts = shown["run"], shown["facts"]
    plan = run.get("plan", shown["plan"])
    cells = {(cell["layer"], cell["dose"]): cell for cell in shown["cells"]}
    shade = "score_change" if shown.get("scored") else "effect"
    whole = [abs(cell[shade] or 0.0) for cell in cells.values() if not cell["broken"]]
    most = max(whole or [abs(cell[shade] or 0.0) for cell in cells.values()], default=0.0)
    unit = {"add": "dose", "ablate": "keep", "cap": plan.get("bound")}[plan["operation"]]
    heads = "".join(f"<th>{unit} {short(dose)}</th>" for dose in plan["doses"])
    lines = []
    for layer in sorted(plan["layers"], reverse=True):
        found = [cells.get((layer, dose)) for dose in plan["doses"]]
        lines.append(f"{ROW}<th>{layer}</th>{''.join(_cell(each, shade, most) for each in found)}</tr>")
    prompts = plan["prompts"]
    mean = f"mean over {len(prompts)} prompts; " if len(prompts) > 1 else ""
    caption = (
        f"{mean}your score; coloured by its difference to the unsteered answer's; "
        if shown.get("scored")
        else f"{mean}x·u along {plan['vector']} of the answer's text, as the unsteered model reads it at layer "
        f"{plan['read_layer']}, beside the unsteered answer; 1 is the standard deviation on plain text; "
    ) + f"✕ and dashed: the answer fell apart; {run['status']}"
    parts = [
        error(shown["error"]),
        *map(text, prompts),
        f"<table>{ROW}<th>layer</th>{heads}</tr>{''.join(lines)}</table>",
        f"<div style='{DIM}'>{html.escape(caption)}</div>",
    ]
    parts += [_message("unsteered", html.escape(each["text"])) for each in run.get("references") or ()]
    chosen = shown["chosen"]
    picked = None if chosen is None else cells.get((chosen["layer"], chosen["dose"]))
    if picked is not None:
        parts += _texts(picked, unit)
    texts = "".join("".join(_texts(cell, unit)) for _, cell in sorted(cells.items()))
    if texts:
        parts.append(f"<details><summary>all texts</summary>{texts}</details>")
    return frame(mark, f"sweep · {facts['model']}", NOTE, parts)


def _texts(cell: Mapping[str, Any], unit: str) -> list[str]:
    title = f"layer {cell['layer']}, {unit} {short(cell['dose'])}"
    return [_message(title, html.escape(each["text"])) for each in cell.get("runs", [cell])]


def _cell(cell: Mapping[str, Any] | None, shade: str, most: float) -> str:
    if cell is None:
        return "<td>·</td>"
    colour = tint(float("nan") if cell[shade] is None else cell[shade], most)
    border = "border: 1px dashed #888888" if cell["broken"] else "border: 1px solid transparent"
    background = f"; background-color: {colour}" if colour else ""
    value = short(cell["score" if shade == "score_change" else shade])
    return f"<td style='{border}{background}'>{value}{' ✕' if cell['broken'] else ''}</td>"
