"""Captures and steering under every path of the scheduler, each compared with Hugging Face on the same tokens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from chatspace_lab import AblationSpec, AddSpec, CaptureHandle, ProjectionCapSpec, SteeringSpec, VLLMSteerModel, Where
from chatspace_lab.errors import RequestError
from tests.conftest import held
from tests.oracle import Oracle, error
from tests.tiny import HIDDEN, LAYERS

GREEDY = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
ALL = list(range(LAYERS))
ROUNDS = int(os.environ.get("CHATSPACE_LAB_ROUNDS", "5"))


def fingerprints(count: int, shortest: int = 2, step: int = 1) -> list[list[int]]:
    """Return prompts of one repeated token each, all of different token and length: a wrong row shows at layer 0."""
    return [[20 + 7 * index] * (shortest + step * index) for index in range(count)]


def spec(seed: int, **options: Any) -> SteeringSpec:
    """Return add, cap and ablate at two layers, different for each seed."""
    generator = torch.Generator().manual_seed(seed)
    v, u, w = (torch.randn(HIDDEN, generator=generator) for _ in range(3))
    steps = [AddSpec(v, 1 + seed % 3), ProjectionCapSpec(u, -0.5, 0.5), AblationSpec(w, 0.2)]
    return SteeringSpec.at([seed % LAYERS, (seed + 2) % LAYERS], *steps, **options)


def check(handle: CaptureHandle, hf: Oracle, used: SteeringSpec | None, positions: Any = slice(None)) -> None:
    """Compare every captured row with the oracle, and the generated tokens with what it finds most likely."""
    sequence = [*handle._prompt, *handle._generated]
    residuals, logits = hf.run(sequence[: handle.computed], used or None, positions)
    for layer in handle.layer_indices:
        assert error(handle.hidden(layer), residuals[layer][handle.positions]) < 1e-4, (handle, layer)
    for at in range(handle.prompt_len - 1, handle.computed):
        assert logits[at][sequence[at + 1]] > logits[at].max() - 1e-2, (handle, at)


def generate(model: VLLMSteerModel, prompts: Any, **options: Any) -> Any:
    """Generate, fetch if captures were asked for, and return what generate returns."""

    async def run() -> Any:
        answer = await model.generate(prompts, **{**GREEDY, **options})
        if "capture_layers" in options:
            await model.fetch_captures_batch(answer[1])
        return answer

    return asyncio.run(run())


def test_waves_of_requests(roomy: VLLMSteerModel, tiny_hf: Oracle) -> None:
    """24 requests in three waves with different lengths, half of them steered: each row is its own."""
    prompts = fingerprints(24)

    async def one(index: int) -> CaptureHandle:
        await asyncio.sleep(0.03 * (index % 3))
        used = spec(index) if index % 2 else SteeringSpec.none()
        _, [handle] = await roomy.generate(
            prompts[index], steering=used, capture_layers=ALL, max_tokens=3 + index % 11, **GREEDY
        )
        return handle

    async def run() -> list[CaptureHandle]:
        handles = await asyncio.gather(*(one(index) for index in range(24)))
        await roomy.fetch_captures_batch(handles)
        return handles

    for index, handle in enumerate(asyncio.run(run())):
        assert handle.computed == len(prompts[index]) + 2 + index % 11
        check(handle, tiny_hf, spec(index) if index % 2 else None)


def test_cached_prefixes(roomy: VLLMSteerModel, tiny_hf: Oracle) -> None:
    """A, then A + suffix, A and C in one batch: the cache is warm, and no captured token is missing."""
    first = [31 + index % 17 for index in range(70)]
    generate(roomy, first, max_tokens=4)
    [warm] = generate(roomy, first, max_tokens=4, raw_output=True)
    assert warm.num_cached_tokens >= 64
    prompts = [[*first, 9, 8, 7], first, [400] * 33]
    _, handles = generate(roomy, prompts, max_tokens=5, capture_layers=ALL)
    for prompt, handle in zip(prompts, handles, strict=True):
        assert len(handle.token_ids) == len(prompt) + 4
        check(handle, tiny_hf, None)


def test_only_the_answer_is_captured_from_a_warm_prefix(roomy: VLLMSteerModel, tiny_hf: Oracle) -> None:
    prompt = [211 + index % 13 for index in range(80)]
    generate(roomy, prompt, max_tokens=2)
    before = roomy._loop.call(roomy._client.stats())["continued"]
    _, [handle] = generate(roomy, prompt, max_tokens=6, capture_layers=ALL, capture_where="answer")
    assert roomy._loop.call(roomy._client.stats())["continued"] > before  # it began behind the cached prefix
    assert handle.positions == list(range(80, 85))
    check(handle, tiny_hf, None)


@pytest.mark.parametrize("length", [15, 16, 17, 48, 63])
def test_chunked_prefill(narrow: VLLMSteerModel, tiny_hf: Oracle, length: int) -> None:
    """16 tokens a step: a longer prompt takes several, and neither its rows nor its steering lose their place."""
    before = roomy_paths = narrow._loop.call(narrow._client.stats())["continued"]
    prompt = [40 + index for index in range(length)]
    used = spec(length)
    _, [handle] = generate(narrow, prompt, max_tokens=3, steering=used, capture_layers=ALL)
    check(handle, tiny_hf, used)
    parts = narrow._loop.call(narrow._client.stats())["continued"] - before
    assert parts == (length - 1) // 16 - (length % 16 == 1), roomy_paths


def test_different_layers_in_one_batch(roomy: VLLMSteerModel, tiny_hf: Oracle) -> None:
    """None, [1], [0, 3] and all layers at once, half of it a warm prefix."""
    warm = [[71 + index] * 40 for index in range(4)]
    generate(roomy, warm, max_tokens=2)
    wanted = [None, [1], [0, 3], ALL]

    async def run() -> list[Any]:
        calls = [
            roomy.generate([*prompt, *extra], capture_layers=layers, max_tokens=6, **GREEDY)
            for prompt, layers in zip(warm, wanted, strict=True)
            for extra in ([], [5, 6, 7])
        ]
        answers = await asyncio.gather(*calls)
        handles = [answer[1][0] for answer in answers if isinstance(answer, tuple)]
        await roomy.fetch_captures_batch(handles)
        return handles

    handles = asyncio.run(run())
    assert [list(handle.layer_indices) for handle in handles] == [[1], [1], [0, 3], [0, 3], ALL, ALL]
    for handle in handles:
        check(handle, tiny_hf, None)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_rows_are_prompt_plus_generated_minus_one(roomy: VLLMSteerModel, tiny_hf: Oracle, max_tokens: int) -> None:
    _, [handle] = generate(roomy, [9, 9, 9, 9], max_tokens=max_tokens, capture_layers=ALL)
    assert (handle.generated_len, len(handle.positions)) == (max_tokens, 3 + max_tokens)
    check(handle, tiny_hf, None)


def test_rows_after_a_stop_token_and_after_an_end_of_sequence(roomy: VLLMSteerModel, tiny_hf: Oracle) -> None:
    prompt = [12, 13, 14, 15]
    [free] = generate(roomy, prompt, max_tokens=12, raw_output=True)
    tokens = list(free.outputs[0].token_ids)
    stop = tokens[5]
    end = tokens.index(stop) + 1
    for options in ({"stop_token_ids": [stop]}, {"stop_token_ids": [stop], "min_tokens": 1}):
        _, [handle] = generate(roomy, prompt, max_tokens=12, capture_layers=ALL, **options)
        assert handle.generated_len == end
        assert len(handle.positions) == len(prompt) + end - 1
        check(handle, tiny_hf, None)


@pytest.mark.parametrize("words", [{"stop": ["a"]}, {"bad_words": ["a"]}])
def test_words_without_a_tokenizer(roomy: VLLMSteerModel, words: Any) -> None:
    """The engine would take them, and neither stop there nor avoid them."""
    with pytest.raises(RequestError, match="without a tokenizer: give stop_token_ids"):
        asyncio.run(roomy.generate([5, 6], max_tokens=2, **words))
    with pytest.raises(RequestError, match="without a tokenizer"):
        roomy.prepare([5, 6], **words)


def test_samples_of_one_prompt(roomy: VLLMSteerModel, tiny_hf: Oracle) -> None:
    used = spec(5)
    _, handles = generate(
        roomy, [50, 51, 52], n=3, temperature=1.0, seed=7, max_tokens=9, steering=used, capture_layers=ALL
    )
    assert [handle.sample_index for handle in handles] == [0, 1, 2]
    assert len({tuple(handle._generated) for handle in handles}) == 3
    for handle in handles:
        residuals = tiny_hf.residuals(handle.token_ids, used)
        for layer in ALL:
            assert error(handle.hidden(layer), residuals[layer]) < 1e-4


@pytest.mark.parametrize(
    ("where", "positions"),
    [
        ("all", slice(None)),
        ("prompt", slice(0, 20)),
        ("answer", slice(20, None)),
        (Where.span(7, 31), slice(7, 31)),
    ],
)
def test_where_it_applies(
    roomy: VLLMSteerModel, narrow: VLLMSteerModel, tiny_hf: Oracle, where: Where | str, positions: slice
) -> None:
    """60 generated tokens: each row moved that should be, and no other; in one piece and in chunks."""
    used = spec(2, where=where)
    for model in (roomy, narrow):
        _, [handle] = generate(model, [60 + i for i in range(20)], max_tokens=60, steering=used, capture_layers=ALL)
        assert len(handle.positions) == 79
        check(handle, tiny_hf, used, positions)


def test_one_prompt_under_many_steerings(roomy: VLLMSteerModel, tiny_hf: Oracle) -> None:
    """Steered, plain, steered otherwise, plain, prompt only, answer only: caching on, and never another's cache."""
    prompt = [90 + index % 31 for index in range(66)]
    sequence: Sequence[SteeringSpec] = [
        spec(1),
        SteeringSpec.none(),
        spec(2),
        SteeringSpec.none(),
        spec(1, where="prompt"),
        spec(1, where="answer"),
        spec(1),
    ]
    where = {"all": slice(None), "prompt": slice(0, 66), "answer": slice(66, None)}
    cached = []
    for used in sequence:
        [output] = generate(roomy, prompt, max_tokens=8, steering=used, raw_output=True)
        cached.append(output.num_cached_tokens)
        tokens = list(output.outputs[0].token_ids)
        _, logits = tiny_hf.run([*prompt, *tokens[:-1]], used or None, where[used.where.part])  # type: ignore[union-attr]
        for at, token in enumerate(tokens, start=65):
            assert logits[at][token] > logits[at].max() - 1e-2, used
    assert cached == [0, 0, 0, 64, 0, 0, 64]


def test_the_end_of_a_cached_answer_is_not_taken_for_a_steered_prompt(roomy: VLLMSteerModel, tiny_hf: Oracle) -> None:
    """An answer becomes part of the next prompt: where only answers are steered, its cached KV must not serve."""
    used = spec(3, where="answer")
    prompt = [130 + index % 5 for index in range(30)]
    [output] = generate(roomy, prompt, max_tokens=40, steering=used, raw_output=True)
    longer = [*prompt, *output.outputs[0].token_ids]
    _, [handle] = generate(roomy, longer, max_tokens=5, steering=used, capture_layers=ALL, capture_where="answer")
    check(handle, tiny_hf, used, slice(len(longer), None))


def test_threads_and_tasks_under_load(roomy: VLLMSteerModel) -> None:
    """16 tasks and 4 threads, each with its own vector, again and again: always the same tokens.

    ``CHATSPACE_LAB_ROUNDS=100 pytest tests/scheduler/test_paths.py -k threads_and_tasks`` does it 100 times.
    """
    prompt = [7, 8, 9, 10, 11, 12]
    alone = [
        list(generate(roomy, prompt, max_tokens=8, steering=spec(i), raw_output=True)[0].outputs[0].token_ids)
        for i in range(20)
    ]

    async def one(index: int) -> None:
        [output] = await roomy.generate(prompt, max_tokens=8, steering=spec(index), raw_output=True, **GREEDY)
        assert list(output.outputs[0].token_ids) == alone[index]

    async def tasks() -> None:
        threads = [asyncio.to_thread(lambda i=i: asyncio.run(one(i))) for i in range(16, 20) for _ in range(ROUNDS)]
        await asyncio.gather(*(one(index) for index in range(16) for _ in range(ROUNDS)), *threads)

    asyncio.run(tasks())
    assert len({tuple(tokens) for tokens in alone}) > 10
    assert held(roomy) == {"requests": 0, "buffers": 0, "nbytes": 0}
