"""What each token writes, such that the pieces together are the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatspace_lab.analysis.tokens import token_texts
from chatspace_lab.special_tokens import skipped_ids


class Pieces:
    """Texts of tokens, remembered. A character that needs several tokens is written by the first of them.

    Parameters
    ----------
    tokenizer
        A Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._special = skipped_ids(tokenizer)

    def of(self, token_ids: Sequence[int], *, special: bool = True) -> list[str]:
        """Return one text per token; that of a token which completes a character begun before it is empty.

        So is that of a special token, with ``special=False``: an answer's text is without them.
        """
        new = set(token_ids) - set(self._known)
        if new:
            self._known.update(zip(new, token_texts(new, self._tokenizer), strict=True))
        texts = [self._known[token] for token in token_ids]
        at = 0
        while at < len(texts):
            end = at
            while end < len(texts) and texts[end].startswith("<0x"):
                end += 1
            if end > at:
                joined = self._tokenizer.decode(list(token_ids[at:end]), clean_up_tokenization_spaces=False)
                texts[at:end] = [joined, *[""] * (end - at - 1)]
            at = end + 1
        if not special:
            texts = ["" if token in self._special else text for token, text in zip(token_ids, texts, strict=True)]
        return texts
