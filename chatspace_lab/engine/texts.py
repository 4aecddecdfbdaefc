"""The text of an answer's tokens, where the engine's own is not that: all of it, and nothing of the prompt's."""

from __future__ import annotations

import copy
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chatspace_lab.errors import RequestError

if TYPE_CHECKING:
    from vllm import SamplingParams

PART = "�"
"""What a part of a character decodes to."""

LONGEST = 8
"""Tokens that one character takes, at most."""


def repeated(tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams) -> str:
    """Return what the engine's text of an answer begins with although it is the prompt's; mostly nothing.

    vLLM's detokenizer takes the prompt's text for the answer's where the prompt ends inside a character.
    """
    if tokenizer is None or not params.detokenize:
        return ""
    ids, special = list(prompt_token_ids), params.skip_special_tokens
    if not tokenizer.decode(ids[-LONGEST:], skip_special_tokens=special).endswith(PART):
        return ""
    return str(tokenizer.decode(ids, skip_special_tokens=special))


def check_stop(tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
    """Check that no stop string is found in what the engine takes for the answer.

    Raises
    ------
    RequestError
        If the prompt ends inside a character and has a stop string in its text.
    """
    if not params.stop:
        return
    text = repeated(tokenizer, prompt_token_ids, params)
    found = next((stop for stop in params.stop if stop in text), None)
    if found is not None:
        raise RequestError(
            f"stop: the prompt has {found!r} in its text and ends inside a character, where vLLM looks for stop "
            f"strings in the prompt too; give whole characters, or stop_token_ids"
        )


class Echo:
    """Takes the prompt's text out of the pieces of an answer that repeats it.

    Parameters
    ----------
    text
        As :func:`repeated` returns it.
    """

    def __init__(self, text: str) -> None:
        self._whole = text.rstrip(PART)
        self._parts = len(text) - len(self._whole)
        self._held = ""
        self._open = bool(text)

    def without(self, piece: str) -> str:
        """Return a piece without it."""
        if not self._open:
            return piece
        self._held += piece
        if len(self._held) <= len(self._whole) and self._whole.startswith(self._held):
            return ""
        self._open = False
        own = self._held.removeprefix(self._whole)
        for _ in range(self._parts if len(own) < len(self._held) or not self._whole else 0):
            own = own.removeprefix(PART)
        return own


def held_back(
    tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams, token_ids: Sequence[int], sent: str
) -> str:
    """Return the text of an unfinished answer that was not sent yet, because a stop string may begin in it.

    Parameters
    ----------
    tokenizer
        The engine's.
    prompt_token_ids, params
        Of the request.
    token_ids, sent
        The answer's tokens, and the text that came with them.
    """
    if tokenizer is None or not params.stop or not params.detokenize or params.include_stop_str_in_output:
        return ""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    plain = copy.copy(params)
    plain.stop = []
    request: Any = types.SimpleNamespace(
        sampling_params=plain, prompt_token_ids=list(prompt_token_ids), prompt_embeds=None, request_id=""
    )
    detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer, request)
    detokenizer.update(list(token_ids), False)
    text = Echo(repeated(tokenizer, prompt_token_ids, params)).without(detokenizer.output_text)
    return text[len(sent) :] if text.startswith(sent) else ""
