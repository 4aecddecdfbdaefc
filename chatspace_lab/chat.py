"""Conversations: what a chat answers, and where each message stands in the prompt that the engine was given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chatspace_lab.errors import MessageLocationError, RequestError

Message = Mapping[str, Any]

MARKER = re.compile(r"CLM(\d+)XQQQQQQ\1MLC")
"""Stands for the content of the message of that number where the template is looked at."""

_Chosen = tuple[Any, ...]
"""Nothing, or (what was chosen before, the last choice): lists that share their beginnings."""


class ChatResponse(str):
    """An assistant's answer. It is the whole text as a string, with its two parts as attributes.

    Attributes
    ----------
    prefill
        The part that the caller gave (``continue_final_message``); empty otherwise.
    generated
        The part that the model wrote.
    finish_reason
        ``"stop"``, ``"length"``, or None if it was cut off.
    """

    __slots__ = ("finish_reason", "generated", "prefill")

    prefill: str
    generated: str
    finish_reason: str | None

    def __new__(cls, generated: str, prefill: str = "", finish_reason: str | None = None) -> ChatResponse:
        """Join the two parts."""
        response = super().__new__(cls, prefill + generated)
        response.prefill, response.generated, response.finish_reason = prefill, generated, finish_reason
        return response

    def __getnewargs__(self) -> tuple[str, str, str | None]:  # type: ignore[override]
        return self.generated, self.prefill, self.finish_reason

    @property
    def has_prefill(self) -> bool:
        """Whether a part of the text was given by the caller."""
        return bool(self.prefill)

    def full_text(self) -> str:
        """Return prefill and generated text together."""
        return str(self)

    def to_message(self) -> dict[str, str]:
        """Return the answer as a message for the next turn."""
        return {"role": "assistant", "content": str(self)}


@dataclass(frozen=True)
class MessageBoundary:
    """Where one message stands in the prompt.

    The span holds the tokens of the message's own content: none of the template's markers, none of another message.

    Attributes
    ----------
    role, content
        As given.
    start, end
        Rows ``[start, end)`` of the prompt's tokens.
    """

    role: str
    content: str
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the content."""
        return self.end - self.start


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as the engine is given it.

    Attributes
    ----------
    text
        The rendered template.
    token_ids
        Its tokens: exactly those that the engine sees, with no second BOS.
    boundaries
        Per message its boundary, or the error that says why it cannot be located.
    prefill
        Content of the final message, if it is to be continued.
    messages
        As given.
    """

    text: str
    token_ids: list[int]
    boundaries: tuple[MessageBoundary | MessageLocationError, ...]
    prefill: str
    messages: list[dict[str, Any]]


def check_conversation(messages: Any) -> list[dict[str, Any]]:
    """Return a conversation as a list of dicts of its own.

    Raises
    ------
    RequestError
        Naming the message that has no role or no content.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"a conversation is a list of messages, got {type(messages).__name__}")
    if not messages:
        raise RequestError("the conversation is empty: give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {index}: expected a dict with role and content, got {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"message {index}: no role")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise RequestError(f"message {index} ({message['role']}): content is no text")
    return [dict(message) for message in messages]


def check_text(text: str) -> str:
    """Return ``text``, if a tokenizer can take it.

    Raises
    ------
    RequestError
        If half a surrogate pair stands in it: JSON and file names can bring those.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text is no valid Unicode: {error}") from error
    return text


def is_batch(messages: Any) -> bool:
    """Whether ``messages`` is a list of conversations rather than one."""
    return (
        isinstance(messages, Sequence)
        and bool(messages)
        and not isinstance(messages[0], Mapping | str)
        and isinstance(messages[0], Sequence)
    )


def render(tokenizer: Any, messages: Any, options: Mapping[str, Any] | None = None) -> RenderedChat:
    """Render a conversation with the model's template and locate its messages.

    Parameters
    ----------
    tokenizer
        A Hugging Face tokenizer with a chat template.
    messages
        The conversation.
    options
        Arguments of ``apply_chat_template``: ``add_generation_prompt`` (default True), ``continue_final_message``,
        ``chat_template``, and whatever the template itself understands.

    Raises
    ------
    RequestError
        If the conversation, or an option, cannot be used.
    """
    conversation = check_conversation(messages)
    arguments: dict[str, Any] = dict(options or {})
    for name in ("tokenize", "return_tensors", "return_dict", "padding", "truncation", "max_length"):
        if name in arguments:
            raise RequestError(f"chat_options: {name} is decided here; the prompt is never cut or padded")
    continues = bool(arguments.get("continue_final_message"))
    arguments.setdefault("add_generation_prompt", not continues)
    if continues and arguments["add_generation_prompt"]:
        raise RequestError("chat_options: continue_final_message and add_generation_prompt exclude each other")
    if continues and conversation[-1]["role"] != "assistant":
        raise RequestError("chat_options: continue_final_message needs a final message of the assistant")

    def template(these: list[dict[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(these, tokenize=False, **arguments))

    try:
        text = template(conversation)
    except Exception as error:
        raise RequestError(f"the chat template cannot render this conversation: {error}") from error
    encoding = tokenizer(check_text(text), add_special_tokens=False, return_offsets_mapping=bool(tokenizer.is_fast))
    return RenderedChat(
        text=text,
        token_ids=list(encoding["input_ids"]),
        boundaries=_locate(template, conversation, text, encoding.get("offset_mapping")),
        prefill=conversation[-1]["content"] if continues else "",
        messages=conversation,
    )


def _locate(
    template: Any, conversation: list[dict[str, Any]], text: str, offsets: Any
) -> tuple[MessageBoundary | MessageLocationError, ...]:
    """Find each message in the rendered text.

    The template is rendered once more with a marker in place of each content. What stands between the markers must
    stand in the real text too; what stands at a marker must be what templates make of a content: itself, trimmed, or
    what follows its closed thinking. Only a division that rebuilds the text exactly, and is the only one, counts.
    """

    def fail(reason: str) -> tuple[MessageLocationError, ...]:
        return tuple(
            MessageLocationError(f"message {index} ({message['role']}) cannot be located: {reason}")
            for index, message in enumerate(conversation)
        )

    if offsets is None:
        return fail("this tokenizer does not say which characters a token stands for")
    if MARKER.search(text):
        return fail("its text contains the markers used to find it")
    try:
        skeleton = template(
            [{**message, "content": f"CLM{index}XQQQQQQ{index}MLC"} for index, message in enumerate(conversation)]
        )
    except Exception as error:  # noqa: BLE001 - templates raise what they like
        return fail(f"the template does not render other contents: {error}")
    spans = _divide(skeleton, [message.get("content") or "" for message in conversation], text)
    if isinstance(spans, str):
        return fail(spans)
    edges = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    found: list[MessageBoundary | MessageLocationError] = []
    for index, (message, places) in enumerate(zip(conversation, spans, strict=True)):
        where = f"message {index} ({message['role']}) cannot be located: "
        if len(places) != 1:
            reason = "the template leaves it out" if not places else f"the template repeats it {len(places)} times"
            found.append(MessageLocationError(where + reason))
            continue
        start, end = _token_span(places[0], edges)
        found.append(MessageBoundary(message["role"], message.get("content") or "", start, end))
    return _without_shared_tokens(found)


def _divide(skeleton: str, contents: list[str], text: str) -> list[list[tuple[int, int]]] | str:
    """Return each message's character spans in ``text``, or why there is no single answer."""
    *pieces, tail = MARKER.split(skeleton)  # literal text, index of the message after it, literal text, …
    forms = [_forms(content) for content in contents]
    # Where in the text one can be so far, and by which choices of (message, start, end): two of them say enough.
    reached: dict[int, list[_Chosen]] = {0: [()]}
    for literal, number in zip(pieces[::2], map(int, pieces[1::2]), strict=True):
        before, reached = reached, {}
        for at, ways in before.items():
            start = at + len(literal)
            for form in forms[number] if text.startswith(literal, at) else ():
                if text.startswith(form, start):
                    span = (number, start, start + len(form))
                    here = reached.setdefault(span[-1], [])
                    here += [(way, span) for way in ways][: 2 - len(here)]
    found = [way for at, ways in reached.items() if text[at:] == tail for way in ways]
    if not found:
        return "the template changes its content in a way that is not known"
    if len(found) > 1:
        return "the rendered text can be divided in more than one way"
    spans: list[list[tuple[int, int]]] = [[] for _ in contents]
    chosen = found[0]
    while chosen:
        chosen, (message, start, end) = chosen
        spans[message].insert(0, (start, end))
    return spans


def _forms(content: str) -> list[str]:
    """Return what templates make of a content, each once, the untouched one first."""
    bases = [content]
    if "</think>" in content:  # reasoning models drop the thinking of earlier turns
        bases.append(content.rsplit("</think>", 1)[1])
    forms = [form for base in bases for form in (base, base.strip(), base.lstrip(), base.rstrip(), base.lstrip("\n"))]
    return list(dict.fromkeys(forms))


def _token_span(characters: tuple[int, int], edges: np.ndarray) -> tuple[int, int]:
    """Return the tokens that share a character with ``[start, end)``; an empty span lies where its text would.

    ``edges`` [tokens, 2] int64 are the characters of each token, as start and end.
    """
    start, end = characters
    behind = np.flatnonzero(edges[:, 1] > start)
    first = int(behind[0]) if len(behind) else len(edges)
    if start == end:
        return first, first
    sharing = behind[edges[behind, 0] < end]
    return first, int(sharing[-1]) + 1 if len(sharing) else first


def _without_shared_tokens(
    found: list[MessageBoundary | MessageLocationError],
) -> tuple[MessageBoundary | MessageLocationError, ...]:
    owners: dict[int, list[int]] = {}
    for index, boundary in enumerate(found):
        if isinstance(boundary, MessageBoundary):
            for token in range(boundary.start, boundary.end):
                owners.setdefault(token, []).append(index)
    for token, sharing in owners.items():
        if len(sharing) > 1:
            for index in sharing:
                boundary = found[index]
                role = boundary.role if isinstance(boundary, MessageBoundary) else "?"
                found[index] = MessageLocationError(
                    f"message {index} ({role}) cannot be located: it shares token {token} with another message"
                )
    return tuple(found)
