"""Special tokens in text: which there are, which a tokenizer adds a second time, and how text is sent without them."""

from __future__ import annotations

import json
import re
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

from chatspace_lab.errors import RequestError, SpecialTokenWarning

ANCHOR = "\ue000anchor\ue000"
"""Stands for the special token before a piece of text, where the piece is tokenised apart."""

CONTROL = re.compile(r"[<\[].*(?:\||think|tool|reason|channel).*[>\]]", re.IGNORECASE)
"""How tokens are named that structure an answer."""

_plain: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Tokenizer to its backend without special tokens: taking it apart takes up to a second."""


def skipped_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens that an answer's text leaves out (``skip_special_tokens``)."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset({*tokenizer.all_special_ids, *(token for token, each in added.items() if each.special)})


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens that are no ordinary text: ``<|im_end|>``, ``<s>``, and also ``<think>``.

    Tokens for thinking and for tools often stand in an answer's text, so that tokenizers do not call them special.
    Other added tokens, such as rows of spaces, are ordinary text.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return skipped_ids(tokenizer) | {token for token, each in added.items() if CONTROL.fullmatch(str(each))}


def warn_of_doubled(tokenizer: Any, text: str, ids: Sequence[int], what: str) -> None:
    """Warn if the tokenizer has added special tokens that ``text`` begins or ends with already.

    Parameters
    ----------
    tokenizer
        A Hugging Face tokenizer.
    text
        As given.
    ids
        ``tokenizer(text)``.
    what
        Names the text in the warning.
    """
    outer = [token for token in (*ids[:1], *ids[-1:]) if ids.count(token) > 1]  # it may add several: [gMASK]<sop>
    special = special_ids(tokenizer) if outer else frozenset()
    if not special.intersection(outer):
        return
    own = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    before = next((at for at in range(len(ids) - len(own) + 1) if list(ids[at : at + len(own)]) == own), 0)
    after = len(ids) - len(own) - before
    doubled = [
        *(ids[:before] if ids[:before] == own[:before] else []),
        *(ids[-after:] if own[-after:] == ids[-after:] else []),
    ]
    doubled = [token for token in doubled if token in special] if before or after else []
    if doubled:
        names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(doubled)))
        warnings.warn(
            f"{what}: the tokenizer adds {names}, and the text has it already: the model sees it twice, and that "
            f"changes its activations and its answer. Leave it out of the text, or give token ids: "
            f"tokenizer(text, add_special_tokens=False)['input_ids']. For a conversation, use chat",
            SpecialTokenWarning,
            stacklevel=2,
        )


def split_special(
    tokenizer: Any, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return token ids, and the characters of each, in which the special tokens within ``spans`` are ordinary text.

    What stands between the other special tokens is tokenised again, as it would be if no special token were known.

    Parameters
    ----------
    tokenizer
        A Hugging Face tokenizer with a backend of the tokenizers library.
    text, ids, offsets
        A text, its tokens, and the characters ``[start, end)`` of each.
    spans
        Characters ``[start, end)`` of the text.

    Raises
    ------
    RequestError
        If this tokenizer has a special token that it cannot write as ordinary text.
    """
    special = special_ids(tokenizer)
    kept, typed = list[int](), list[int]()  # indices of tokens
    for index, (token, (low, high)) in enumerate(zip(ids, offsets, strict=True)):
        if token in special:
            inside = any(start < high and low < end for start, end in spans)
            (typed if inside else kept).append(index)
    new_ids, new_offsets = list[int](), list[tuple[int, int]]()
    for first, last in zip([-1, *kept], [*kept, len(ids)], strict=True):
        if any(first < index < last for index in typed):
            start = 0 if first < 0 else offsets[first][1]
            end = len(text) if last == len(ids) else offsets[last][0]
            anchor = "" if first < 0 else ANCHOR
            encoding = _without_special(tokenizer).encode(anchor + text[start:end], add_special_tokens=False)
            skipped = 1 if anchor else 0
            new_ids += encoding.ids[skipped:]
            shift = start - len(anchor)
            new_offsets += [(low + shift, high + shift) for low, high in encoding.offsets[skipped:]]
            if special.intersection(encoding.ids[skipped:]):
                raise RequestError(
                    "split_special_tokens: this tokenizer has no ordinary tokens for the special ones in these messages"
                )
        else:
            new_ids += ids[first + 1 : last]
            new_offsets += offsets[first + 1 : last]
        if last < len(ids):
            new_ids.append(ids[last])
            new_offsets.append(offsets[last])
    return new_ids, new_offsets


def _without_special(tokenizer: Any) -> Any:
    """Return the backend of a tokenizer with no special token but :data:`ANCHOR`."""
    from tokenizers import AddedToken, Tokenizer

    if tokenizer not in _plain:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["added_tokens"] = []
        state["truncation"] = state["padding"] = state["post_processor"] = None
        plain = Tokenizer.from_str(json.dumps(state))
        plain.add_special_tokens([AddedToken(ANCHOR, special=True, normalized=False)])
        _plain[tokenizer] = plain
    return _plain[tokenizer]
