"""Which positions of a request are steered or captured, in absolute terms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from chatspace_lab.errors import RequestError, SteeringError, kind_of
from chatspace_lab.spans import FOREVER
from chatspace_lab.steering.vectors import as_index


class Located(Protocol):
    """Where a message stands: rows ``[start, end)`` of the prompt."""

    @property
    def start(self) -> int:
        """First row."""
        ...

    @property
    def end(self) -> int:
        """Row after the last."""
        ...


@dataclass(frozen=True)
class Where:
    """A choice of positions: ``"all"``, ``"prompt"``, ``"answer"``, some messages, or a span.

    Write the first three as strings; :meth:`messages` and :meth:`span` make the others, and
    :meth:`without_special_tokens` and :meth:`without_first_token` narrow any of them.

    Attributes
    ----------
    part
        ``"all"``, ``"prompt"``, ``"answer"``, ``"messages"`` or ``"span"``. The answer is what is generated; the token
        that a position holds is computed, and steered, when the next one is predicted from it.
    indices
        Of the messages (negative ones count from the end), or first and last + 1 position of the span.
    special_tokens
        Whether the special tokens in the prompt count that the chat template put there. Those that a message's own text
        spells, and all tokens of an answer, always do. In a prompt that is no chat no special token counts.
    first_token
        Whether position 0 counts. In many models it is an attention sink: its activation is a hundred times longer than
        any other. Other tokens can be sinks too; ``lab.capture`` and the frames of the analysis leave all of them out
        of their means.
    """

    part: str = "all"
    indices: tuple[int, ...] = ()
    special_tokens: bool = True
    first_token: bool = True

    def __post_init__(self) -> None:
        if self.part not in ("all", "prompt", "answer", "messages", "span"):
            raise RequestError(
                f"where: 'all', 'prompt', 'answer', Where.messages(…) or Where.span(…), got {self.part!r}"
            )
        try:
            indices = tuple(as_index(index, f"where: of {self.part}, each index") for index in self.indices)
        except SteeringError as error:
            raise RequestError(str(error)) from None
        object.__setattr__(self, "indices", indices)
        if self.part == "messages" and not self.indices:
            raise RequestError("where: name at least one message")
        if self.part == "span" and (len(self.indices) != 2 or not 0 <= self.indices[0] < self.indices[1]):
            raise RequestError(f"where: a span needs 0 <= start < end, got {self.indices}")

    @classmethod
    def messages(cls, *indices: int) -> Where:
        """Choose the content of these messages of the conversation."""
        return cls("messages", tuple(indices))

    @classmethod
    def span(cls, start: int, end: int) -> Where:
        """Choose positions ``[start, end)``, counted from the first token of the prompt, on into the answer."""
        return cls("span", (start, end))

    def without_special_tokens(self) -> Where:
        """Leave out the special tokens of the prompt, but not those that a message's own text spells."""
        return replace(self, special_tokens=False)

    def without_first_token(self) -> Where:
        """Leave out position 0, and no other token, whether it is an attention sink or not."""
        return replace(self, first_token=False)


def as_where(value: Where | str) -> Where:
    """Return ``value`` as :class:`Where`.

    Raises
    ------
    RequestError
        If it is neither that nor one of its names.
    """
    if isinstance(value, Where):
        return value
    if isinstance(value, str):
        return Where(value)
    raise RequestError(f"where: expected a name or Where, got {kind_of(value, Where)}")


def resolve(
    where: Where,
    token_ids: Sequence[int],
    *,
    limit: int,
    special_ids: Iterable[int] = (),
    messages: Sequence[Located | Exception] | None = None,
) -> list[int]:
    """Return the chosen positions of one request as flat spans: start, end, start, end, …; an end of −1 is open.

    Parameters
    ----------
    where
        The choice.
    token_ids
        The prompt.
    limit
        Positions that prompt and answer may take together.
    special_ids
        The tokenizer's special tokens.
    messages
        Where the messages stand, or why one cannot be located; None for a plain prompt.

    Raises
    ------
    RequestError
        If the choice selects no position of this request.
    MessageLocationError
        If a chosen message cannot be located.
    """
    length = len(token_ids)
    spans: list[tuple[int, int]]
    if where.part == "all":
        spans = [(0, -1)]
    elif where.part == "prompt":
        spans = [(0, length)]
    elif where.part == "answer":
        spans = [(length, -1)]
    elif where.part == "span":
        if where.indices[0] >= limit:
            raise RequestError(f"where: the span starts at {where.indices[0]}, this request ends before {limit}")
        spans = [(where.indices[0], min(where.indices[1], FOREVER))]
    else:
        # As a set: 1 and -1 may be the same message.
        spans = sorted({_message_span(index, messages) for index in where.indices})
    if not where.first_token:
        spans = [(max(start, 1), end) for start, end in spans if end < 0 or end > 1]
    if not where.special_tokens:
        special = set(special_ids)
        left_out = {position for position, token in enumerate(token_ids) if token in special}
        for message in messages or ():
            if not isinstance(message, Exception):
                left_out.difference_update(range(message.start, message.end))
        spans = [part for span in spans for part in _without(span, length, left_out)]
    flat: list[int] = []
    for start, end in spans:
        if start == end:
            continue
        if flat and flat[-1] == start:
            flat[-1] = end
        else:
            flat += [start, end]
    if not flat:
        raise RequestError(f"where: {where.part} {list(where.indices) or ''} selects no token of this request")
    return flat


def _message_span(index: int, messages: Sequence[Located | Exception] | None) -> tuple[int, int]:
    if messages is None:
        raise RequestError("where: a plain prompt has no messages; use chat, or Where.span(start, end)")
    if not -len(messages) <= index < len(messages):
        raise RequestError(f"where: message {index} does not exist, the conversation has {len(messages)}")
    found = messages[index]
    if isinstance(found, Exception):
        raise found
    return found.start, found.end


def _without(span: tuple[int, int], length: int, left_out: set[int]) -> list[tuple[int, int]]:
    """Return ``span`` in parts that leave out these positions of a prompt of ``length`` tokens."""
    start, end = span
    parts = []
    stop = length if end < 0 else min(end, length)
    at = start
    for position in range(start, stop):
        if position in left_out:
            parts.append((at, position))
            at = position + 1
    parts.append((at, end))
    return [(low, high) for low, high in parts if high < 0 or low < high]
