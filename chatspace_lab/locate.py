"""Finding what a chat template made of each message's content, by rendering the conversation again with marks in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

Template = Callable[[Mapping[int, str]], str]
"""Renders the conversation, with other contents for the messages of these numbers."""

Places = dict[int, list[int] | None]
"""Message to the places of its mark in the text; None where the mark changes the text."""

RENDERS = 1000
"""Renderings of one conversation, at most; of a long one fewer (:data:`CHARACTERS`)."""

CHARACTERS = 3_000_000
"""Characters that all renderings of a conversation may have together; 64 renderings are always allowed."""

TRIED = 16
"""Offsets that are tried for an edge of a message of which the template has kept a part."""


class _Marks:
    """Renders contents with a mark at one offset each, and tells where in the text the marks stand.

    An answer counts only if the text is the same as without marks, so what it says is how the text was really made.
    """

    def __init__(self, template: Template, contents: Sequence[str], text: str) -> None:
        self._template, self._contents, self._text = template, contents, text
        everything = "\n".join([text, *contents]).upper()
        number = next(number for number in range(len(everything) + 1) if f"QX{number}X" not in everything)
        self._mark = f"QX{number}X"
        self._pattern = re.compile(rf"{self._mark}(\d+)XZ", re.IGNORECASE)
        self._left = max(64, min(RENDERS, CHARACTERS // (len(text) + 1)))

    def together(self, offsets: Mapping[int, int]) -> Places | None:
        """Return per message where its mark stands; None if the marks change the text."""
        if not self._left or not offsets:
            return None if offsets else {}
        self._left -= 1
        marked = {
            index: f"{self._contents[index][:at]}{self._mark}{index}XZ{self._contents[index][at:]}"
            for index, at in offsets.items()
        }
        try:
            pieces = self._pattern.split(self._template(marked))  # literal text, number, literal text, …
        except Exception:  # noqa: BLE001 - templates raise what they like, and it means that they cannot render this
            return None
        if "".join(pieces[::2]) != self._text:
            return None
        found: Places = {index: [] for index in offsets}
        at = 0
        for literal, number in zip(pieces[::2], pieces[1::2], strict=False):
            at += len(literal)
            places = found.get(int(number))
            if places is None:
                return None
            places.append(at)
        return found

    def apart(self, offsets: Mapping[int, int]) -> Places:
        """Do the same, but single out by halving the messages whose marks change the text."""
        found = self.together(offsets)
        if found is not None:
            return found
        if len(offsets) == 1:
            return dict.fromkeys(offsets)
        items = list(offsets.items())
        half = len(items) // 2
        return {**self.apart(dict(items[:half])), **self.apart(dict(items[half:]))}

    def first(self, offsets: Mapping[int, Sequence[int]]) -> Places:
        """Return per message the place of its first offset whose mark stands at one place; None where there is none."""
        for turn in range(max(map(len, offsets.values()), default=0)):  # messages are often treated alike
            found = self.together({index: each[min(turn, len(each) - 1)] for index, each in offsets.items()})
            if found is not None and all(places is not None and len(places) == 1 for places in found.values()):
                return found
        single: Places = {}
        for index, each in offsets.items():
            tried = (self.apart({index: at})[index] for at in each)
            single[index] = next((places for places in tried if places is not None and len(places) == 1), None)
        return single


def locate(template: Template, contents: Sequence[str], text: str) -> list[tuple[int, int] | str]:
    """Return for each content the characters ``[start, end)`` of ``text`` that it became, or why it cannot be located.

    A content may have been trimmed, escaped, quoted, or have lost its beginning or its end: its place is what the
    template made of it. One that is empty and that the template treats apart stands, empty, behind the one before it.

    Parameters
    ----------
    template
        Renders the conversation.
    contents
        Of the messages.
    text
        The conversation as rendered.
    """
    marks = _Marks(template, contents, text)
    inner = {index: _inner(content) for index, content in enumerate(contents) if content}
    starts = marks.apart({index: start for index, (start, _) in inner.items()})
    ends = marks.apart({index: end for index, (_, end) in inner.items()})
    _find_missing_edges(marks, contents, text, inner, starts, ends)
    _take_in_white_space(marks, contents, text, inner, starts, ends)
    empty = marks.together({index: 0 for index, content in enumerate(contents) if not content}) or {}
    places: list[tuple[int, int] | str] = []
    last = 0
    for index, content in enumerate(contents):
        if not content:
            at = (empty.get(index) or [last])[0]
            places.append((at, at))
            continue
        start, end = starts[index], ends[index]
        times = max(len(start or ()), len(end or ()))
        if start == end == []:
            places.append("the template leaves it out")
        elif times > 1:
            places.append(f"the template repeats it {times} times")
        elif not start or not end or start[0] > end[0]:
            places.append("the template changes its content in a way that is not known")
        else:
            places.append((start[0], end[0]))
            last = end[0]
    return places


def _inner(content: str) -> tuple[int, int]:
    """Return the content without the white space around it, as offsets; all of it where there is nothing else."""
    inner = content.strip()
    if not inner:
        return 0, len(content)
    start = len(content) - len(content.lstrip())
    return start, start + len(inner)


def _find_missing_edges(
    marks: _Marks, contents: Sequence[str], text: str, inner: dict[int, tuple[int, int]], starts: Places, ends: Places
) -> None:
    """Find the other edge of contents of which only one is known, such as those that have lost their thinking.

    Either all of such a content stands there but for white space, or a part of it that equals the text.
    """
    for known, wanted, step in ((ends, starts, -1), (starts, ends, 1)):
        tried: dict[int, list[int]] = {}
        for index, places in known.items():
            if places is None or len(places) != 1 or wanted[index]:
                continue
            first, last = inner[index]
            content = contents[index][first:last][::step]
            beside = text[: places[0]][::-1] if step < 0 else text[places[0] :]
            whole = _same_but_for_white_space(content, beside)
            same = _common(content, beside)
            if whole is not None:
                wanted[index] = [places[0] + step * whole]
            elif same:  # the template may have written the outermost of the equal characters itself
                offsets = [(last - at) if step < 0 else (first + at) for at in range(same, max(same - TRIED, 0), -1)]
                tried[index] = [at for at in offsets if not contents[index][at if step < 0 else at - 1].isspace()]
        for index, places in marks.first({index: offsets for index, offsets in tried.items() if offsets}).items():
            if places is None:
                continue
            wanted[index] = places
            first, last = inner[index]
            length = abs(places[0] - (known[index] or places)[0])
            inner[index] = (last - length, last) if step < 0 else (first, first + length)


def _take_in_white_space(
    marks: _Marks, contents: Sequence[str], text: str, inner: dict[int, tuple[int, int]], starts: Places, ends: Places
) -> None:
    """Take in the white space around contents that the template has kept."""
    for places, edge, step in ((starts, 0, -1), (ends, 1, 1)):
        tried: dict[int, int] = {}
        for index, found in places.items():
            content = contents[index]
            if content.isspace():
                if found is None:  # a mark outside what is trimmed keeps it from being trimmed
                    offsets = range(1, len(content) + 1) if step < 0 else range(len(content) - 1, -1, -1)
                    places[index] = marks.first({index: offsets})[index]
                continue
            if not found or len(found) != 1:
                continue
            at, here = inner[index][edge], found[0]
            outside = content[:at][::-1] if step < 0 else content[at:]
            white = len(outside) - len(outside.lstrip())
            beside = text[max(here - white, 0) : here][::-1] if step < 0 else text[here : here + white]
            kept = _common(outside[:white], beside)
            if kept:
                tried[index] = at + step * kept
        for index, found in marks.apart(tried).items():
            while found is None and tried[index] - step != inner[index][edge]:  # perhaps only some of it was kept
                tried[index] -= step
                found = marks.apart({index: tried[index]})[index]
            if found and len(found) == 1:
                places[index] = found


def _common(one: str, other: str) -> int:
    """Return how many characters the two begin with together."""
    length = min(len(one), len(other))
    low = 0
    while low < length and one[low] == other[low]:
        low += 1
    return low


def _same_but_for_white_space(content: str, text: str) -> int | None:
    """Return how many characters of ``text`` the whole content takes from its beginning on, or None."""
    at = 0
    for character in content:
        if character.isspace():
            continue
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text) or text[at] != character:
            return None
        at += 1
    return at
