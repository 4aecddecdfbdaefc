"""Conversations: what a chat answers, and where each message stands in the prompt that the engine was given."""

from __future__ import annotations

import difflib
import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from chatspace_lab.errors import MessageLocationError, RequestError, UnreadOptionWarning
from chatspace_lab.locate import locate
from chatspace_lab.special_tokens import special_ids, split_special

Message = Mapping[str, Any]

OPENED = re.compile(r"<think>\s*\Z")
"""How a prompt ends whose template has begun the thinking already."""

APART = re.compile(r"think|channel|reason", re.IGNORECASE)
"""Special tokens that set a part of an answer apart have names with one of these words."""

CHANNEL = re.compile(
    r"<\|channel\|>(\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>(.*?)(?=<\|(?:end|return|call|start|channel)\|>|\Z)",
    re.DOTALL,
)
"""One part of an answer in channels: its name and its text."""


class Completion(str):
    """A generated text. It is a string that knows why it ended; a notebook cell shows that of one that was cut off.

    Attributes
    ----------
    finish_reason
        ``"stop"``, ``"length"`` (``max_tokens`` or the model's length was reached), or None if it was interrupted.
    """

    __slots__ = ("finish_reason",)

    finish_reason: str | None

    def __new__(cls, text: str, finish_reason: str | None = None) -> Self:
        """Return the text with its reason."""
        completion = super().__new__(cls, text)
        completion.finish_reason = finish_reason
        return completion

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.finish_reason

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the text in a notebook cell, and ``finish_reason`` unless the model ended it by itself."""
        printer.text(repr(self) if self.finish_reason == "stop" else f"{self!r} (finish_reason={self.finish_reason!r})")


class ChatResponse(Completion):
    """An assistant's answer. It is the whole text as a string, with its two parts as attributes.

    Attributes
    ----------
    prefill
        The part that the caller gave (``continue_final_message``), as the template has rendered it; empty otherwise.
    generated
        The part that the model wrote.
    finish_reason
        As of :class:`Completion`.
    """

    __slots__ = ("_message", "generated", "prefill")

    prefill: str
    generated: str
    _message: dict[str, str] | None

    def __new__(
        cls,
        generated: str,
        prefill: str = "",
        finish_reason: str | None = None,
        message: Mapping[str, str] | None = None,
    ) -> Self:
        """Join the two parts. ``message`` is what :meth:`to_message` returns, if that is not simply the text."""
        response = super().__new__(cls, prefill + generated, finish_reason)
        response.prefill, response.generated = prefill, generated
        response._message = None if message is None else dict(message)
        return response

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.generated, self.prefill, self.finish_reason, self._message

    @property
    def has_prefill(self) -> bool:
        """Whether a part of the text was given by the caller."""
        return bool(self.prefill)

    def full_text(self) -> str:
        """Return prefill and generated text together."""
        return str(self)

    def to_message(self) -> dict[str, str]:
        """Return the answer as a message for the next turn.

        Its content is the text, but in three cases. Thinking that the template began in the prompt has its ``<think>``
        again; special tokens around thinking, which the text leaves out, stand there; an answer in channels
        (``<|channel|>final<|message|>``) has the final one as its content, and the others as ``thinking``.
        """
        return {"role": "assistant", "content": str(self)} if self._message is None else dict(self._message)


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
        Content of the final message as the template has rendered it, if it is to be continued.
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
        raise RequestError(
            f"a conversation must be a list of messages, got {type(messages).__name__}; write "
            f'[{{"role": "user", "content": "…"}}], or for one message of a user use lab.ask("…")'
        )
    if not messages:
        raise RequestError("the conversation is empty: give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"message {index} must be a dict with role and content, got {type(message).__name__}; write "
                f'{{"role": "user", "content": "…"}}'
            )
        if not isinstance(message.get("role"), str):
            raise RequestError(f'message {index} must have a role, such as "user"; it has {_keys(message)}')
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            content = message.get("content")
            got = f"got {type(content).__name__}" if "content" in message else f"it has {_keys(message)}"
            raise RequestError(f"message {index} ({message['role']}): content must be text (a str); {got}")
    return [dict(message) for message in messages]


def _keys(message: Mapping[str, Any]) -> str:
    return f"only {', '.join(map(repr, message))}" if message else "nothing"


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
        ``chat_template``, and whatever the template itself understands. And ``split_special_tokens`` (default False):
        whether special tokens that a message's own text spells, such as ``<|im_end|>``, are sent as the ordinary text
        that they are written in. By default the model reads them as it reads those of the template.

    Warns
    -----
    UnreadOptionWarning
        If the template does not read one of the options.

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
    split = arguments.pop("split_special_tokens", False)
    if not isinstance(split, bool):
        raise RequestError(f"chat_options: split_special_tokens must be True or False, got {split!r}")
    continues = bool(arguments.get("continue_final_message"))
    arguments.setdefault("add_generation_prompt", not continues)
    if continues and arguments["add_generation_prompt"]:
        raise RequestError("chat_options: continue_final_message and add_generation_prompt exclude each other")
    if continues and conversation[-1]["role"] != "assistant":
        raise RequestError("chat_options: continue_final_message needs a final message of the assistant")

    def template(these: list[dict[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(these, tokenize=False, **arguments))

    _warn_of_unread(tokenizer, arguments)
    try:
        text = template(conversation)
    except Exception as error:
        raise RequestError(f"the chat template cannot render this conversation: {error}") from error

    def with_contents(contents: Mapping[int, str]) -> str:
        return template(
            [{**each, "content": contents[at]} if at in contents else each for at, each in enumerate(conversation)]
        )

    contents = [message.get("content") or "" for message in conversation]
    places = locate(with_contents, contents, text)
    if continues and not contents[-1]:
        places[-1] = len(text), len(text)
    encoding = tokenizer(check_text(text), add_special_tokens=False, return_offsets_mapping=bool(tokenizer.is_fast))
    ids, offsets = list(encoding["input_ids"]), encoding.get("offset_mapping")
    if split:
        if offsets is None:
            raise RequestError("chat_options: split_special_tokens needs a fast tokenizer, and this one is none")
        for index, (content, place) in enumerate(zip(contents, places, strict=True)):
            spelt = tokenizer(content, add_special_tokens=False)["input_ids"] if isinstance(place, str) else ()
            if special_ids(tokenizer).intersection(spelt):
                raise RequestError(f"chat_options: split_special_tokens: message {index} cannot be located: {place}")
        ids, offsets = split_special(
            tokenizer, text, ids, offsets, [each for each in places if not isinstance(each, str)]
        )
    return RenderedChat(
        text=text,
        token_ids=ids,
        boundaries=_boundaries(conversation, contents, places, offsets),
        prefill=_prefill(text, contents[-1], places[-1]) if continues else "",
        messages=conversation,
    )


def _warn_of_unread(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Warn of options that neither ``apply_chat_template`` nor the template reads."""
    from transformers import PreTrainedTokenizerBase  # the engine's own tokenizer may be wrapped

    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    named = {name for name in arguments if name not in own or name in ("tools", "documents")}
    if not named:
        return
    try:
        template = str(tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools")))
    except (AttributeError, ValueError):  # rendering says what is wrong
        return
    unread = sorted(name for name in named if not re.search(rf"\b{re.escape(name)}\b", template))
    if unread:
        near = difflib.get_close_matches(unread[0], [*own, "split_special_tokens"], 1)
        hint = f"; did you mean {near[0]}?" if near and near[0] not in unread else ""
        warnings.warn(
            f"chat_options: this chat template does not read {', '.join(unread)}, so that it has no effect{hint}",
            UnreadOptionWarning,
            stacklevel=2,
        )


def answer(
    tokenizer: Any, chat: RenderedChat | None, text: str, token_ids: Sequence[int], finish_reason: str | None
) -> ChatResponse:
    """Return what the model wrote as a :class:`ChatResponse`.

    Parameters
    ----------
    tokenizer
        A Hugging Face tokenizer.
    chat
        What was answered.
    text, token_ids
        The answer, as the engine gives it.
    finish_reason
        ``"stop"``, ``"length"``, or None if it was cut off.
    """
    if chat is None:
        return ChatResponse(text, "", finish_reason)
    message = message_of(tokenizer, "" if chat.prefill else chat.text, chat.prefill, text, token_ids)
    return ChatResponse(text, chat.prefill, finish_reason, message)


def message_of(tokenizer: Any, prompt: str, prefill: str, text: str, token_ids: Sequence[int]) -> dict[str, str] | None:
    """Return an answer as a message, as :meth:`ChatResponse.to_message` describes it; None if it is simply the text.

    ``prompt`` is the rendered conversation, empty where its last message is continued.
    """
    special = special_ids(tokenizer)
    ids = list(token_ids)
    while ids and ids[-1] in special and not APART.search(str(tokenizer.convert_ids_to_tokens(ids[-1]))):
        ids.pop()
    whole = text
    if any(token in special and APART.search(str(tokenizer.convert_ids_to_tokens(token))) for token in ids):
        whole = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        shown = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if text and shown.startswith(text) and len(shown) > len(text):  # a stop string was cut off
            whole = whole[: len(text) - len(shown)]
        parts = CHANNEL.findall(whole)
        if parts:
            found = {"role": "assistant", "content": "".join(said for name, said in parts if name == "final")}
            thinking = "\n".join(said for name, said in parts if name == "analysis")
            return {**found, "thinking": thinking} if thinking else found
    elif len(ids) < len(token_ids):  # with skip_special_tokens=False the text has the token that ended it
        for token in reversed(token_ids[len(ids) :]):
            whole = whole.removesuffix(str(tokenizer.convert_ids_to_tokens(token)))
    opened = OPENED.search(prompt)
    if opened and not whole.lstrip().startswith("<think>"):
        whole = opened.group() + whole
    return None if whole == text else {"role": "assistant", "content": prefill + whole}


def _prefill(text: str, content: str, place: tuple[int, int] | str) -> str:
    """Return what the rendered text ends with of the content that is continued."""
    if not isinstance(place, str):
        return text[place[0] :]
    at = text.rfind(content.strip())
    return text[at:] if at >= 0 else content


def _boundaries(
    conversation: list[dict[str, Any]], contents: list[str], places: list[tuple[int, int] | str], offsets: Any
) -> tuple[MessageBoundary | MessageLocationError, ...]:
    """Return the tokens of each message, given the characters that it became and those of each token."""
    edges = np.array(() if offsets is None else offsets, dtype=np.int64).reshape(-1, 2)
    found: list[MessageBoundary | MessageLocationError] = []
    for index, (message, content, place) in enumerate(zip(conversation, contents, places, strict=True)):
        reason = place
        if offsets is None:
            reason = "this tokenizer does not say which characters a token stands for"
        if isinstance(reason, str):
            found.append(MessageLocationError(f"message {index} ({message['role']}) cannot be located: {reason}"))
        else:
            found.append(MessageBoundary(message["role"], content, *_token_span(reason, edges)))
    return _without_shared_tokens(found)


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
