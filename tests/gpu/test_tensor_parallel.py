"""Two GPUs that share each layer: rows, operations and text as on one, and one bank of vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from chatspace_lab import SteeringSpec, VLLMSteeringConfig, VLLMSteerModel

from .test_engine import oracle, specs

LAYERS, VOCABULARY = 30, 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model's architecture with 8 heads instead of 9, which two workers can share; random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("eight")
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def hf(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def models(request: pytest.FixtureRequest, folder: str) -> Iterator[tuple[VLLMSteerModel, VLLMSteerModel]]:
    def start(workers: int) -> VLLMSteerModel:
        config = VLLMSteeringConfig(
            folder,
            tensor_parallel_size=workers,
            dtype=request.param,
            max_model_len=512,
            skip_tokenizer_init=True,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=2 << 30,
        )
        return VLLMSteerModel(config)

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(start, (1, 2))
    yield one, two
    one.close()
    two.close()


def test_as_on_one_gpu(models: tuple[VLLMSteerModel, VLLMSteerModel], hf: Any) -> None:
    one, two = models
    prompts = [[(31 * index + 7 * at) % VOCABULARY for at in range(20 + index)] for index in range(4)]

    async def run(model: VLLMSteerModel, spec: SteeringSpec | None) -> list[Any]:
        _, handles = await model.generate(
            prompts,
            temperature=0.0,
            max_tokens=12,
            ignore_eos=True,
            detokenize=False,
            steering=spec or SteeringSpec.none(),
            capture_layers=range(LAYERS),
        )
        await model.fetch_captures_batch(handles)
        return handles

    def distance(handle: Any, want: torch.Tensor, rows: int) -> torch.Tensor:
        got = torch.stack([handle.hidden(layer)[:rows].cuda().float() for layer in range(LAYERS)])
        return (got - want).norm(dim=-1) / want.norm(dim=-1)

    exact, agreed = one.dtype == torch.float32, 0
    for spec in specs(one.hidden_size):
        for single, double in zip(asyncio.run(run(one, spec)), asyncio.run(run(two, spec)), strict=True):
            assert len(double.captures[0]) == 2
            # Partial sums are rounded before the workers add them; greedy answers may part at a near tie.
            same = single.token_ids == double.token_ids
            agreed += same
            rows = len(single.token_ids) if same else single.prompt_len
            want = oracle(hf, single.token_ids[:rows], spec)
            theirs, ours = distance(single, want, rows), distance(double, want, rows)
            if exact:
                assert ours.max() < 1e-2, (spec, ours.max(), theirs.max())  # TF32 in attention
            else:
                assert ours.median() < 1.3 * theirs.median() + 1e-3, (spec, ours.median(), theirs.median())
                assert ours.max() < 2 * theirs.max() + 1e-2, (spec, ours.max(), theirs.max())
    assert agreed >= (19 if exact else 10)  # of 20 answers


def test_updates_reach_both_or_none(models: tuple[VLLMSteerModel, VLLMSteerModel]) -> None:
    _, two = models

    def digests() -> list[str]:
        return two._loop.call(two._client.rpc("chatspace_lab_digest"))

    before = digests()
    assert len(before) == 2
    assert before[0] == before[1]
    spec = SteeringSpec.at([1, 2], *specs(two.hidden_size)[-1].layers[0].steps)
    asyncio.run(two.generate([5, 6, 7], temperature=0.0, max_tokens=2, detokenize=False, steering=spec))
    after = digests()
    assert after[0] == after[1]
    with pytest.raises(Exception, match="shape"):
        two._loop.call(two._client._put_vectors([0], b"\0" * 8))  # not a vector: refused by both
    assert digests() == after
