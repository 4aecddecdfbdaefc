"""The text of single tokens, such that a person can read it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

_SHOWN = {"\n": "⏎", "\r": "␍", "\t": "⇥"}


def token_texts(token_ids: Iterable[int], tokenizer: Any) -> list[str]:
    """Return the text of each token on its own.

    A leading space is kept as a space, special tokens read as they are written (``<|im_start|>``), and a token that
    holds only a part of a character reads as its bytes, ``<0xE2><0x80>``.

    Parameters
    ----------
    token_ids
        ``[tokens]``.
    tokenizer
        A Hugging Face tokenizer.
    """
    ids = [int(token) for token in token_ids]
    known = {token: _text(token, tokenizer) for token in set(ids)}
    return [known[token] for token in ids]


def visible(text: str) -> str:
    """Return a token's text with its white space visible: ``·`` for an outer space, ``⏎`` and ``⇥`` for others."""
    for character, shown in _SHOWN.items():
        text = text.replace(character, shown)
    inner = text.strip(" ")
    if not inner:
        return "·" * len(text)
    left, right = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    return "·" * left + inner + "·" * right


def _text(token: int, tokenizer: Any) -> str:
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None:
        return f"<unknown {token}>"
    if "▁" in piece:  # SentencePiece, whose decode drops a leading space
        return str(piece).replace("▁", " ")
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if "�" not in text and text:
        return str(text)
    table = _bytes_of_characters()
    if all(character in table for character in piece):
        return "".join(f"<0x{table[character]:02X}>" for character in piece)
    return str(piece)


@cache
def _bytes_of_characters() -> dict[str, int]:
    """Return which byte each character of a byte-level BPE piece stands for.

    Such vocabularies write a printable byte of Latin-1 as itself, and the others as the characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
