"""What is found before anything runs: the engine's process ends by a request that it cannot read."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from vllm import SamplingParams

from chatspace_lab import AddSpec, SteeringSpec, wire
from chatspace_lab.engine.requests import (
    OWN_ARGUMENTS,
    Prompt,
    Submission,
    check_capture_layers,
    prompts_from,
    sampling_from,
    seed_apart,
)
from chatspace_lab.errors import RequestError, SpecialTokenWarning
from chatspace_lab.steering.program import compile_spec

UNREADABLE: list[dict[str, Any]] = [
    {"max_tokens": 2.5},
    {"max_tokens": True},
    {"min_tokens": 0.5},
    {"seed": 1.5},
    {"seed": 2**70},
    {"logprobs": 1.5},
    {"ignore_eos": "yes"},
    {"bad_words": [5]},
    {"allowed_token_ids": [5.5]},
    {"logit_bias": {"a": 1.0}},
    {"extra_args": {"mine": torch.ones(3)}},
    {"extra_args": {"mine": object()}},
]


@pytest.mark.parametrize("keywords", UNREADABLE)
def test_sampling_that_the_engine_cannot_read(keywords: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="sampling: "):
        sampling_from(None, keywords, own=OWN_ARGUMENTS)
    with pytest.raises(RequestError, match="sampling: the engine cannot read it"):
        sampling_from(SamplingParams(**keywords), {}, own=OWN_ARGUMENTS)


def test_the_workers_own_part_of_sampling() -> None:
    """What is not what they expect there ends the engine."""
    for given in ({}, 5):
        with pytest.raises(RequestError, match="sampling: extra_args has 'chatspace_lab', which is ours"):
            sampling_from(None, {"extra_args": {wire.EXTRA: given}}, own=OWN_ARGUMENTS)


def test_sampling_in_other_types_than_pythons_own() -> None:
    given = {
        "max_tokens": np.int64(5),
        "temperature": torch.tensor(0.5),
        "top_p": np.float32(0.5),
        "stop": ("a", "b"),
        "stop_token_ids": np.array([7, 8]),
    }
    params = sampling_from(None, given, own=OWN_ARGUMENTS)
    wanted = SamplingParams(max_tokens=5, temperature=0.5, top_p=0.5, stop=["a", "b"], stop_token_ids=[7, 8])
    assert params == wanted
    own = SamplingParams(max_tokens=5, extra_args={"mine": [1, "x", b"y"]}, stop="a")
    assert sampling_from(own, {}, own=OWN_ARGUMENTS) == own


@pytest.mark.parametrize(
    "ids", [[True, 5], [5.0], [5, None], b"abc", bytearray(b"abc"), [b"abc"], {"prompt_token_ids": b"abc"}]
)
def test_prompts_that_are_no_token_ids(ids: Any) -> None:
    with pytest.raises(RequestError, match="prompt 0: expected text or token ids"):
        prompts_from(ids, None, 100)


def test_token_ids_of_any_kind() -> None:
    for ids in ([5, 6], (5, 6), range(5, 7), [np.int64(5), 6], {"prompt_token_ids": (5, 6)}):
        (prompt,) = prompts_from(ids, None, 100)
        assert prompt.token_ids == [5, 6]
        assert all(type(token) is int for token in prompt.token_ids)


def test_text_that_no_tokenizer_takes() -> None:
    with pytest.raises(RequestError, match="prompt 1: the text is no valid Unicode"):
        prompts_from([[5], "half a pair: \ud83d"], lambda text: {"input_ids": [1]}, 100)
    with pytest.raises(RequestError, match="prompt 0: its text is no text"):
        prompts_from({"prompt_token_ids": [1], "prompt": 5}, None, 100)


@pytest.mark.parametrize(
    "layers", [3, np.int64(3), torch.tensor(3), np.array(3), [np.int64(3)], (3, 3), {3}, iter([3])]
)
def test_layers_of_any_kind(layers: Any) -> None:
    assert check_capture_layers(layers, 4) == [3]


@pytest.mark.parametrize("layers", [True, "3", b"3", [True], [3.0], 3.0, 4, [-1], [], torch.tensor(1.5), None])
def test_layers_that_are_none(layers: Any) -> None:
    with pytest.raises(RequestError, match="capture_layers"):
        check_capture_layers(layers, 4)


@pytest.mark.parametrize(("seed", "second"), [(7, 8), (-5, -4), (2**64 - 2, 2**64 - 1), (2**64 - 1, 0)])
def test_each_sample_has_a_seed_that_torch_takes(seed: int, second: int) -> None:
    params = SamplingParams(seed=seed, n=2)
    samples = [Submission("r", Prompt([5]), params, None, 0, sample) for sample in (0, 1)]
    seed_apart(samples)
    seeds = [each.engine_params([], stream=False).seed for each in samples]
    assert seeds == [seed, second]
    for each in seeds:
        torch.Generator().manual_seed(each)
    assert params.seed == seed


def test_equal_requests_are_samples_and_others_are_drawn_with_common_noise() -> None:
    spec, other = (SteeringSpec.at(1, AddSpec(torch.ones(4), scale)) for scale in (1.0, 2.0))
    asked = [
        ([5, 6], None),
        ([5, 6], spec),
        ([7], None),
        ([5, 6], None),
        ([5, 6], spec),
        ([5, 6], other),
        ([5, 6], None),
    ]
    submissions = []
    for index, (ids, steering) in enumerate(asked):
        each = Submission("r", Prompt(ids), SamplingParams(seed=3), None, index, 0)
        if steering is not None:
            program = compile_spec(steering, layer_count=4, hidden_size=4, max_ops_per_layer=8)
            each.steer(steering, program, 64)
        submissions.append(each)
    seed_apart(submissions)
    assert [each.params.seed for each in submissions] == [3, 3, 3, 4, 4, 3, 5]


@pytest.mark.parametrize("ends", [False, True])
def test_a_special_token_that_the_tokenizer_doubles_is_warned_of(demo_model_path: str, ends: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)
    single = "<|im_start|> $A <|im_end|>" if ends else "<|im_start|> $A"
    names = ("<|im_start|>", "<|im_end|>")
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    assert tokenizer("Hi")["input_ids"][0] == 1
    for text in ["The river", "A <|im_start|><|im_start|> in the midst", [1, 1, 5], {"prompt_token_ids": [1, 1, 5]}]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prompts_from([text], tokenizer, 49152)
    words = r"prompt 1: the tokenizer adds <\|im_start\|>, and the text has it already.*add_special_tokens=False"
    with pytest.warns(SpecialTokenWarning, match=words):
        _, prompt = prompts_from(["fine", "<|im_start|>The river"], tokenizer, 49152)
    assert prompt.token_ids[:2] == [1, 1]
    if ends:
        with pytest.warns(SpecialTokenWarning, match=r"adds <\|im_end\|>,"):
            prompts_from("The river<|im_end|>", tokenizer, 49152)
    begin = "<|im_start|><|im_end|>"  # a tokenizer that adds two
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{' '.join(names)} $A", special_tokens=special
    )
    with pytest.warns(SpecialTokenWarning, match=r"adds <\|im_start\|>, <\|im_end\|>, and the text has it already"):
        prompts_from(f"{begin}The river", tokenizer, 49152)
    demo = AutoTokenizer.from_pretrained(demo_model_path)  # adds nothing: who writes two wants two
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompts_from("<|im_start|><|im_start|>The river", demo, 49152)
