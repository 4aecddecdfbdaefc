"""Token texts, with the demo model's tokenizer and one that writes pieces as SentencePiece does."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from chatspace_lab.analysis import token_texts, visible


@pytest.fixture(scope="module")
def tokenizer(demo_model_path: str) -> Any:
    return AutoTokenizer.from_pretrained(demo_model_path)


def test_text_is_as_typed(tokenizer: Any) -> None:
    text = "Héllo <think> &amp; $x$\n\n\tend</script><|im_end|>"
    ids = tokenizer(text)["input_ids"]
    texts = token_texts(ids, tokenizer)
    assert "".join(texts) == text
    assert texts[-1] == "<|im_end|>"
    assert " <" in texts


def test_parts_of_a_character_read_as_bytes(tokenizer: Any) -> None:
    ids = tokenizer("🦜")["input_ids"]
    assert "".join(token_texts(ids, tokenizer)) == "<0xF0><0x9F><0xA6><0x9C>"


def test_sentencepiece() -> None:
    class Pieces:
        pieces = ("▁river", "s", "<0x0A>", None)

        def convert_ids_to_tokens(self, token: int) -> str | None:
            return self.pieces[token]

        def decode(self, ids: list[int], **options: Any) -> str:
            return str(self.pieces[ids[0]])

    assert token_texts([0, 1, 2, 0, 3], Pieces()) == [" river", "s", "<0x0A>", " river", "<unknown 3>"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" a", "·a"), ("a b", "a b"), ("a ", "a·"), ("  ", "··"), ("\n\n", "⏎⏎"), ("\t", "⇥"), ("", ""), ("<b>", "<b>")],
)
def test_white_space_is_visible(text: str, shown: str) -> None:
    assert visible(text) == shown
