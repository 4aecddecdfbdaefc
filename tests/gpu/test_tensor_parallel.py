"""Two GPUs that share each layer: rows, readings and operations as Hugging Face's, and one bank of vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from chatspace_lab import SteeringSpec, VLLMSteeringConfig, VLLMSteerModel, wire

from .test_engine import EXACT, check, oracle, rounding_like, specs

LAYERS, VOCABULARY = 30, 1024
PROMPTS = [[(31 * index + 7 * at) % VOCABULARY for at in range(20 + index)] for index in range(4)]
SAMPLING = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "detokenize": False}


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

    assert not torch.backends.cuda.matmul.allow_tf32  # the reference multiplies float32 in full
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()


@pytest.fixture(scope="module", params=[EXACT, "float32", "bfloat16"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def two(precision: str, folder: str) -> Iterator[VLLMSteerModel]:
    config = VLLMSteeringConfig(
        folder,
        tensor_parallel_size=2,
        dtype=precision.split(",")[0],
        max_model_len=512,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2 << 30,
        **({"attention_backend": "FLEX_ATTENTION"} if precision == EXACT else {}),
    )
    model = VLLMSteerModel(config)
    yield model
    model.close()


class Halves(torch.nn.Module):
    """A linear layer as two workers compute it: each a half of the inputs, its part rounded before the sum."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (a @ b.T for a, b in zip(x.chunk(2, dim=-1), self.weight.chunk(2, dim=1), strict=True))
        return sum(part.float() for part in parts).to(x.dtype)


@pytest.fixture(scope="module")
def rounded(hf: Any, precision: str) -> Any:
    """Hugging Face's model with the engine's rounding; None where the engine's float32 is exact."""
    if precision == EXACT:
        return None
    model = rounding_like(hf, precision)
    for block in model.model.layers:
        block.self_attn.o_proj, block.mlp.down_proj = Halves(block.self_attn.o_proj), Halves(block.mlp.down_proj)
    return model


def compare(handles: list[Any], used: list[SteeringSpec | None], hf: Any, rounded: Any, told: str) -> None:
    """Compare all rows of requests, those of one spec together."""
    for spec in used[:: len(PROMPTS)]:
        mine = [handle for handle, each in zip(handles, used, strict=True) if each is spec]
        got = [torch.stack([handle.hidden(layer).cuda() for layer in range(LAYERS)]) for handle in mine]
        want = [oracle(hf, handle.token_ids, spec) for handle in mine]
        theirs = None if rounded is None else [oracle(rounded, handle.token_ids, spec) for handle in mine]
        check(got, want, theirs, (told, spec))


def test_rows_and_operations_match_hugging_face(two: VLLMSteerModel, hf: Any, rounded: Any, precision: str) -> None:
    """Unsteered, add, cap, ablate and all three stacked at every layer: each alone, then all in one batch."""

    async def main() -> None:
        each = specs(two.hidden_size)
        for used in ([spec] * len(PROMPTS) for spec in each):
            compare(await rows(used), used, hf, rounded, precision)
        mixed = [spec for spec in each for _ in PROMPTS]
        compare(await rows(mixed), mixed, hf, rounded, f"{precision}, one batch")

    async def rows(used: list[SteeringSpec | None]) -> list[Any]:
        steering = [spec or SteeringSpec.none() for spec in used]
        prompts = PROMPTS * (len(used) // len(PROMPTS))
        _, handles = await two.generate(prompts, **SAMPLING, steering=steering, capture_layers=range(LAYERS))
        await two.fetch_captures_batch(handles)
        for handle in handles:
            assert len(handle.token_ids) == handle.prompt_len + SAMPLING["max_tokens"] - 1
            assert len(handle.captures[0]) == 2  # an entry per worker
        return handles

    asyncio.run(main())


def test_readings_and_reductions_from_one_worker(two: VLLMSteerModel, hf: Any, precision: str) -> None:
    """Norms, projections and pooled rows as of Hugging Face's rows; the rows lie with the first worker alone."""
    spec = specs(two.hidden_size)[-1]
    direction = torch.randn(two.hidden_size, generator=torch.Generator().manual_seed(5))
    unit = (direction / direction.norm()).cuda()

    def stats() -> list[dict[str, int]]:
        return two._loop.call(two._client.rpc(wire.RPC_STATS))

    async def main() -> None:
        before = stats()
        _, handles = await two.generate(PROMPTS, **SAMPLING, steering=spec, capture_layers=range(LAYERS))
        held = stats()
        assert held[0]["buffers"] == before[0]["buffers"] + len(PROMPTS)
        assert held[0]["nbytes"] > before[0]["nbytes"]
        assert (held[1]["buffers"], held[1]["nbytes"], held[1]["mapped"]) == (0, 0, 0)
        readings = await two.read_captures(handles, {"d": direction})
        for handle, read in zip(handles, readings, strict=True):
            pooled = {how: (await handle.pool(how)).cuda() for how in ("mean", "last")}
            rows = oracle(hf, handle.token_ids, spec)
            want = {"mean": rows.mean(dim=1), "last": rows[:, -1]}
            if precision != EXACT:  # what the engine itself holds; how far that is from float32 the other test says
                await handle.fetch()
                rows = torch.stack([handle.hidden(layer).cuda().float() for layer in range(LAYERS)])
                want = {"mean": rows.mean(dim=1), "last": rows[:, -1]}
            size = rows.norm(dim=-1)
            norm, projection = (
                torch.from_numpy(np.ascontiguousarray(each)).cuda() for each in (read.norm, read.projection("d"))
            )
            assert ((norm - size).abs() / size).max() < 1e-4
            assert ((projection - rows @ unit).abs() / size).max() < 1e-4
            for how, got in pooled.items():
                assert ((got - want[how]).norm(dim=-1) / want[how].norm(dim=-1)).max() < 1e-4, how
            handle.close()

    asyncio.run(main())


def test_updates_reach_both_or_none(two: VLLMSteerModel) -> None:
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
