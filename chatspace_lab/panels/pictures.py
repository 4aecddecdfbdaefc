"""Plots of a panel's numbers as images for a page without scripts: the front end's own plots, drawn again in Python.

As images, since JupyterLab takes SVG elements out of a notebook that it does not trust, and keeps
images with their data.
"""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from chatspace_lab.panels.buffers import short, unpack
from chatspace_lab.readings import typical_norms

BLUE, RED, GREY, AMBER = (37, 99, 235), (220, 38, 38), "#888888", "#d97706"
TEXT_GREY, TEXT_AMBER = "#595959", "#b45309"
"""Of texts; their contrasts with white are 7 and 5."""
LINES = ("#2563eb", "#c2410c", "#15803d", "#9333ea", "#db2777", "#0e7490")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 880, 210, 52, 8, 16, 26
SHADES = 31
"""Strengths of a colour that a heatmap tells apart, on each side of zero."""
MAX_POINTS = 3000
"""Points of a plot's lines together; of more, each second, third, … is drawn."""


@dataclass(frozen=True)
class Numbers:
    """Numbers of one side: ``norm`` and ``projection`` are ``[layers, tokens]`` float64; tokens from ``first`` on."""

    first: int
    layers: tuple[int, ...]
    norm: np.ndarray
    projection: np.ndarray | None
    bands: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Numbers | None:
        """Return the numbers of an answer as it is sent to the page; None while there are none."""
        if not answer or answer["norm"] is None:
            return None
        projection = None if answer["projection"] is None else unpack(answer["projection"])
        return cls(answer["first"], tuple(answer["layers"]), unpack(answer["norm"]), projection, tuple(answer["bands"]))

    def along(self, layer: int) -> np.ndarray | None:
        """Return x·u of each token at a layer; None where it was not read."""
        if self.projection is None or layer not in self.layers:
            return None
        return self.projection[self.layers.index(layer)]

    def cosines(self) -> np.ndarray | None:
        """Return x·u / |x|, ``[layers, tokens]``; infinite where one of the two numbers is."""
        if self.projection is None:
            return None
        with np.errstate(invalid="ignore", divide="ignore"):
            values = self.projection / self.norm
        return np.where(np.isinf(self.norm) & ~np.isnan(self.projection), np.inf, values)

    @cached_property
    def sinks(self) -> np.ndarray:
        """Which tokens no mean and no range of colours counts, ``[layers, tokens]`` bool: attention sinks."""
        return typical_norms(self.norm, self.first + np.arange(self.norm.shape[1]))[1]

    def counted(self, layer: int) -> np.ndarray:
        """Return x·u at a layer of the tokens that count, ``[tokens]``; empty where it was not read."""
        row = self.along(layer)
        return np.zeros(0) if row is None else row[~self.sinks[self.layers.index(layer)]]

    def per_message(self, layer: int, what: str) -> list[float]:
        """Return the mean ``"norm"`` or ``"cosine"`` of each message, without attention sinks; NaN if none is known."""
        values = self.norm if what == "norm" else self.cosines()
        if values is None or layer not in self.layers:
            return [float("nan")] * len(self.bands)
        at = self.layers.index(layer)
        row = np.where(self.sinks[at], np.nan, values[at])
        spans = [(max(band["start"] - self.first, 0), band["end"] - self.first) for band in self.bands]
        known = [row[start:end][np.isfinite(row[start:end])] if end > start else row[:0] for start, end in spans]
        return [float(each.mean()) if len(each) else float("nan") for each in known]


Sides = Mapping[str, Numbers | None]


def largest(sides: Sides, layer: int) -> float:
    """Return the largest finite size of x·u at a layer, of both sides, attention sinks left out."""
    return max((_largest(side.counted(layer)) for side in sides.values() if side is not None), default=0.0)


def overflowed(values: np.ndarray) -> np.ndarray:
    """Return which of a layer's values were read and are not finite, ``[tokens]``: a row of only NaN was not read."""
    return ~np.isfinite(values) & ~np.isnan(values).all()


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def strength(value: float, most: float) -> float:
    """Return how strong a value's colour is, from 0 to 1."""
    return min(abs(value) / most, 1.0) if most > 0 and np.isfinite(value) else 0.0


def tint(value: float, most: float) -> str | None:
    """Return a value's colour as CSS, as the front end tints; None for no colour."""
    size = strength(value, most)
    red, green, blue = RED if value < 0 else BLUE
    return None if size == 0 else f"#{red:02x}{green:02x}{blue:02x}{round(255 * 0.62 * size):02x}"


def image(svg: str, alt: str) -> str:
    """Return an HTML image of an SVG text."""
    data = base64.b64encode(svg.encode()).decode()
    style = f"display: block; width: 100%; max-width: {WIDTH}px"
    return f'<img alt="{html.escape(alt)}" style="{style}" src="data:image/svg+xml;base64,{data}">'


def projection_plot(sides: Sides, layers: Sequence[int], direction: str, pinned: int | None) -> str:
    """Return the projections per token as an image: baseline grey, steered coloured, a line per layer.

    Of the layers as many as there are colours.
    """
    known = [side for side in sides.values() if side is not None]
    first = min((side.first for side in known), default=0)
    end = max([side.first + side.norm.shape[1] for side in known] + [first + 2])
    rows = [
        (name, side, index, values)
        for index, layer in enumerate(layers[: len(LINES)])
        for name, side in sides.items()
        if side is not None and (values := side.along(layer)) is not None
    ]
    shown = layers[: len(LINES)]
    seen = np.concatenate([side.counted(shown[index]) for _, side, index, _ in rows] or [np.zeros(1)])
    low, high = _ends(seen)
    x = _scale(first, end - 1, LEFT + 4, WIDTH - RIGHT - 4)
    y = _scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [*_bands_behind(sides, x, first), *_axis(low, high, y, "x·u")]
    step = -(-sum(len(values) for *_, values in rows) // MAX_POINTS) or 1
    for name, side, index, values in rows:
        places = [
            f"{x(side.first + at):.1f} {min(max(y(values[at]), TOP), HEIGHT - BOTTOM):.1f}"
            for at in range(0, len(values), step)
            if np.isfinite(values[at])
        ]
        colour = GREY if name == "baseline" else LINES[index % len(LINES)]
        if places:
            parts.append(f'<path d="M{"L".join(places)}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        if step == 1:
            dots = "".join(f"M{place}h0" for place in places)
            parts.append(f'<path d="{dots}" stroke="{colour}" stroke-width="4" stroke-linecap="round"/>')
        for at in np.flatnonzero(overflowed(values)):
            place = HEIGHT - BOTTOM - 2 if values[at] < 0 else TOP + 8
            parts.append(_text(x(side.first + at), place, short(values[at]), colour=TEXT_AMBER))
    if pinned is not None and first <= pinned < end:
        parts.append(f'<path d="M{x(pinned):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{GREY}" stroke-width="1.5"/>')
    return image(_svg(HEIGHT, parts), f"projection per token on {direction}")


def message_plot(sides: Sides, layers: Sequence[int], what: str, direction: str) -> str:
    """Return the mean norm or cosine of each message as an image of bars."""
    shown = sides.get("steered") or sides.get("baseline")
    bands = () if shown is None else shown.bands
    bars = [
        (GREY if name == "baseline" else LINES[index % len(LINES)], side.per_message(layer, what))
        for index, layer in enumerate(layers[: len(LINES)])
        for name, side in sides.items()
        if side is not None
    ]
    low, high = _ends(np.array([value for _, values in bars for value in values] or [0.0]))
    y = _scale(low, high * 1.05, HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / max(len(bands), 1)
    width = min(step * 0.7 / max(len(bars), 1), 40)
    parts = _axis(low, high, y, "|x|" if what == "norm" else "cosine")
    for at, band in enumerate(bands):
        start = LEFT + at * step + (step - width * len(bars)) / 2
        for index, (colour, values) in enumerate(bars):
            value = values[at] if at < len(values) and np.isfinite(values[at]) else 0.0
            top, size = min(y(value), y(0)), abs(y(value) - y(0))
            parts.append(
                f'<rect x="{start + index * width:.1f}" y="{top:.1f}" width="{width * 0.9:.1f}" height="{size:.1f}" '
                f'fill="{colour}"/>'
            )
        parts.append(_text(LEFT + (at + 0.5) * step, HEIGHT - 8, f"{band['role']} ({band['end'] - band['start']})"))
    title = "mean activation norm per message" if what == "norm" else f"mean cosine to {direction} per message"
    return image(_svg(HEIGHT, parts), title)


def heatmap(sides: Sides, direction: str) -> str:
    """Return the cosine of each token at each layer as one image, the sides below each other."""
    found = {
        name: (side, values)
        for name, side in sides.items()
        if side is not None and (values := side.cosines()) is not None and values.size
    }
    parts, top, size, wide = [], 4, 110, WIDTH - 118
    most = max((_largest(values[~side.sinks]) for side, values in found.values()), default=0.0)
    for name, (side, values) in found.items():
        step = -(-values.shape[1] // wide)  # no more columns than pixels
        marked = np.where([overflowed(row) for row in values], np.inf, values)
        data = base64.b64encode(png(marked[::-1, ::step], most)).decode()
        parts.append(_text(4, top + 14, name, "start"))
        parts.append(_text(4, top + 30, f"layers {side.layers[-1]} to {side.layers[0]}", "start"))
        parts.append(
            f'<image x="110" y="{top}" width="{wide}" height="{size}" preserveAspectRatio="none" '
            f'style="image-rendering: pixelated" href="data:image/png;base64,{data}"/>'
            f'<rect x="110" y="{top}" width="{wide}" height="{size}" fill="none" stroke="{GREY}"/>'
        )
        top += size + 8
    return image(_svg(max(top, 8), parts), f"cosine to {direction} by layer and token") if parts else ""


def png(values: np.ndarray, most: float) -> bytes:
    """Return a PNG with a pixel per value, ``[rows, columns]``: zero and NaN transparent, negative red, positive blue.

    Infinite ones are amber. Of a palette with :data:`SHADES` strengths on each side: a byte per pixel, compressed.
    """
    sizes = np.round(np.clip(np.nan_to_num(values, posinf=0, neginf=0) / (most or 1.0), -1, 1) * SHADES).astype(int)
    palette = [BLUE] * (SHADES + 1) + [RED] * SHADES + [(217, 119, 6)]
    opacity = [round(255 * at / SHADES) for at in [*range(SHADES + 1), *range(1, SHADES + 1), SHADES]]
    pixels = np.where(sizes < 0, SHADES - sizes, sizes).astype("u1")
    pixels[np.isinf(values)] = len(palette) - 1
    rows, columns = pixels.shape
    lines = np.hstack([np.zeros((rows, 1), "u1"), pixels]).tobytes()  # each line begins with its filter: none
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(channel for colour in palette for channel in colour)),
        (b"tRNS", bytes(opacity)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    ]
    packed = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def _ends(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    low, high = min(0.0, float(known.min(initial=0))), max(0.0, float(known.max(initial=0)))
    return (low, high) if low < high else (0.0, 1.0)


def _scale(low: float, high: float, start: float, end: float) -> Any:
    return lambda value: start + (value - low) / ((high - low) or 1) * (end - start)


def _axis(low: float, high: float, y: Any, unit: str) -> list[str]:
    rough = (high - low) / 4
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough * (1 - 1e-9))
    marks = [at * step for at in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]
    lines = [
        f'<path d="M{LEFT} {y(mark):.1f}H{WIDTH - RIGHT}" stroke="{GREY}" stroke-width="{0.3 if mark else 1}"/>'
        + _text(LEFT - 6, y(mark) + 4, short(mark), "end")
        for mark in marks
    ]
    return [*lines, _text(4, 12, unit, "start")]


def _bands_behind(sides: Sides, x: Any, first: int) -> list[str]:
    shown = sides.get("steered") or sides.get("baseline")
    parts = []
    for at, band in enumerate(() if shown is None else shown.bands):
        start = x(max(band["start"], first) - 0.5)
        width = max(x(band["end"] - 0.5) - start, 0)
        opacity = 0.16 if at % 2 else 0.06
        parts.append(
            f'<rect x="{start:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}" fill="{GREY}" '
            f'fill-opacity="{opacity}"/>'
        )
        if width > 24:
            parts.append(_text(start + 3, HEIGHT - 8, band["role"], "start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = TEXT_GREY) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{html.escape(text)}</text>'


def _svg(height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11">{"".join(parts)}</svg>'
    )
