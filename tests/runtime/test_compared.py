"""What is said of models that were never compared with Hugging Face."""

from __future__ import annotations

import pytest

from chatspace_lab.runtime.compared import RIGHT, doubt
from chatspace_lab.runtime.deviations import DEVIATIONS


@pytest.mark.parametrize(
    ("architecture", "quantization", "words"),
    [
        ("SomeNewForCausalLM", None, ["SomeNewForCausalLM", "chatspace-lab verify"]),
        ("LlamaForCausalLM", "mxfp4", ["quantised by mxfp4"]),
        ("SomeNewForCausalLM", "fp8", ["SomeNewForCausalLM", "quantised by fp8"]),
    ],
)
def test_a_doubt_names_what_it_is_about(architecture: str, quantization: str | None, words: list[str]) -> None:
    assert all(word in doubt(architecture, quantization) for word in words)


def test_another_implementation() -> None:
    assert "model_impl='transformers'" in doubt("LlamaForCausalLM", None, "transformers")


def test_no_doubt() -> None:
    assert doubt("LlamaForCausalLM", None) == ""
    assert doubt("LlamaForCausalLM", "gptq") == ""


def test_what_is_refused_is_not_right() -> None:
    # Right up to a sliding window, and without ALiBi or in short contexts; refused otherwise.
    assert set(DEVIATIONS) & RIGHT == {"Cohere2ForCausalLM", "FalconForCausalLM"}
