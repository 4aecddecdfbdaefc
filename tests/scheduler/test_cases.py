"""Cases that need the demo model, or an engine of their own; tests/cases.py says where each case is tested."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chatspace_lab import AddSpec, LabError, ProjectionCapSpec, SteeringSpec, VLLMSteeringConfig, VLLMSteerModel, Where
from chatspace_lab.bench import PlainEngine
from tests.conftest import started
from tests.oracle import Oracle, error
from tests.scheduler.test_paths import ALL, check, generate, spec
from tests.tiny import HIDDEN, build

PROMPT = "The capital of France is"
CHAT = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "What do rivers carry to the sea?"},
]
SHORT: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}


def test_what_each_layer_adds(model: VLLMSteerModel, hf: Oracle) -> None:
    """Layer k + 1 − layer k, for every k: a layer that is off by one, or that is another's, shows."""
    every = range(model.layer_count)
    _, [handle] = asyncio.run(model.generate(PROMPT, **SHORT, capture_layers=every))
    asyncio.run(handle.fetch())
    got, wanted = torch.stack([handle.hidden(layer) for layer in every]), hf.residuals(handle.token_ids)
    assert error(got[0], wanted[0]) < 1e-4
    assert error(got[-1], wanted[-1]) < 1e-4
    for layer in range(1, model.layer_count):
        size = wanted[layer].norm(dim=-1)
        added, should = got[layer] - got[layer - 1], wanted[layer] - wanted[layer - 1]
        assert ((added - should).norm(dim=-1) < 1e-3 * should.norm(dim=-1) + 2e-5 * size).all(), layer


def test_one_message_is_steered(model: VLLMSteerModel, hf: Oracle, vector: torch.Tensor) -> None:
    """Its rows move by the vector, those before it not at all, and those after it as Hugging Face says."""
    used = SteeringSpec.at(9, AddSpec(vector, 4.0), where=Where.messages(1))
    _, [handle] = asyncio.run(model.chat(CHAT, **SHORT, steering=used, capture_layers=[9, 20]))
    asyncio.run(handle.fetch())
    where = handle.message_boundary(1)
    residuals = hf.residuals(handle.token_ids, used, slice(where.start, where.end))
    plain = hf.residuals(handle.token_ids)
    for layer in (9, 20):
        assert error(handle.hidden(layer), residuals[layer]) < 1e-4
    moved = handle.hidden(9) - plain[9]
    assert torch.allclose(moved[where.start : where.end], 4.0 * vector.expand(where.num_tokens, -1), atol=2e-2)
    assert float(moved[: where.start].abs().max()) < 2e-2


def test_ids_of_a_chat_are_those_that_the_engine_saw(model: VLLMSteerModel) -> None:
    answers, [handle] = asyncio.run(model.chat(CHAT, **SHORT, capture_layers=[0], raw_output=True))
    template = model.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    [output] = answers
    assert list(output.prompt_token_ids) == list(template) == handle.token_ids[: handle.prompt_len]
    assert handle.token_ids[handle.prompt_len :] == list(output.outputs[0].token_ids)[:-1]
    first = handle.token_ids[0]
    assert handle.token_ids[1] != first  # no second beginning of sequence
    handle.close()


BAD_SPECS = {
    "layer 999": SteeringSpec.at(999, AddSpec(torch.ones(576))),
    "577": SteeringSpec.at(3, AddSpec(torch.ones(577))),
}


@contextlib.asynccontextmanager
async def _unchanged(model: VLLMSteerModel) -> AsyncIterator[None]:
    before = model.export_steering_spec()
    yield
    assert model.export_steering_spec() == before
    assert not model._steering.stack


@pytest.mark.parametrize("words", list(BAD_SPECS))
def test_a_bad_spec_at_every_entry_point(model: VLLMSteerModel, words: str) -> None:
    bad = BAD_SPECS[words]

    async def enter() -> None:
        async with model.steering(bad):
            raise AssertionError("entered")

    async def read(stream: Any) -> None:
        async for _ in stream:
            raise AssertionError("an answer came")

    entries: list[Callable[[], Awaitable[Any]]] = [
        lambda: model.generate(PROMPT, **SHORT, steering=bad),
        lambda: model.generate([PROMPT] * 2, **SHORT, steering=[None, bad]),
        lambda: model.generate(PROMPT, **SHORT, steering=bad, capture_layers=[0]),
        lambda: model.chat(CHAT, **SHORT, steering=bad),
        lambda: model.chat([CHAT, CHAT], **SHORT, steering=[bad, None]),
        lambda: read(model.stream(PROMPT, **SHORT, steering=bad)),
        lambda: read(model.stream_chat(CHAT, **SHORT, steering=bad)),
        lambda: model.apply_steering_spec(bad),
        lambda: model.push_steering_spec(bad),
        enter,
    ]

    async def main() -> None:
        wanted = await model.generate(PROMPT, **SHORT)
        async with _unchanged(model):
            for entry in entries:
                with pytest.raises(LabError, match=words):
                    await entry()
        assert await model.generate(PROMPT, **SHORT) == wanted

    asyncio.run(main())


def test_bad_arguments_of_a_layers_own_methods(model: VLLMSteerModel) -> None:
    good, zero = torch.ones(model.hidden_size), torch.zeros(model.hidden_size)
    nan = good.clone()
    nan[5] = torch.nan
    calls: list[tuple[Callable[[], Awaitable[Any]], str]] = [
        (lambda: model.set_layer_vector(999, good), "layer 999"),
        (lambda: model.set_layer_vector(3, good[:-1]), "575"),
        (lambda: model.set_layer_vector(3, nan), "[nN]a[nN]|finite"),
        (lambda: model.set_layer_projection_cap(999, good, min=0.0), "layer 999"),
        (lambda: model.set_layer_projection_cap(3, good[:-1], min=0.0), "575"),
        (lambda: model.set_layer_projection_cap(3, nan, min=0.0), "[nN]a[nN]|finite"),
        (lambda: model.set_layer_projection_cap(3, zero, min=0.0), "zero"),
        (lambda: model.set_layer_projection_cap(3, good, min=2.0, max=1.0), "min"),
        (lambda: model.set_layer_projection_cap(3, good), "min"),
        (lambda: model.set_layer_ablation(999, good), "layer 999"),
        (lambda: model.set_layer_ablation(3, good[:-1]), "575"),
        (lambda: model.set_layer_ablation(3, nan), "[nN]a[nN]|finite"),
        (lambda: model.set_layer_ablation(3, zero), "zero"),
        (lambda: model.clear_layer_vector(999), "layer 999"),
    ]

    async def main() -> None:
        async with _unchanged(model):
            for call, words in calls:
                with pytest.raises(LabError, match=words):
                    await call()

    asyncio.run(main())


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_outlier_of_thirty_thousand(dtype: str, tmp_path: Path) -> None:
    """One coordinate of one token's embedding: rows are finite, and as near to float32 as the dtype allows.

    In bfloat16 that is Hugging Face's bfloat16; the other coordinates are looked at apart, where the outlier would hide
    what becomes of them.
    """
    folder = build("llama", tmp_path, seed=7)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][77, 3] = 3e4
    save_file(
        {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}, tmp_path / "model.safetensors"
    )
    exact, rounded = Oracle(folder), Oracle(folder, torch.bfloat16)
    others = [index for index in range(HIDDEN) if index != 3]
    generator = torch.Generator().manual_seed(1)
    v, u = torch.randn(2, HIDDEN, generator=generator)
    used = SteeringSpec.at([0, 2], AddSpec(v, 2.0), ProjectionCapSpec(u, -1.0, 1.0))
    with started(folder, dtype=dtype, skip_tokenizer_init=True, max_model_len=64) as model:
        for steering in (SteeringSpec.none(), used):
            _, [handle] = generate(model, [5, 77, 9, 77, 30], max_tokens=4, steering=steering, capture_layers=ALL)
            wanted = exact.residuals(handle.token_ids, steering)
            got = torch.stack([handle.hidden(layer) for layer in ALL])
            assert got.dtype == getattr(torch, dtype)
            assert float(wanted[..., 3].abs().max()) > 2e4
            if dtype == "float32":
                assert error(got, wanted) < 1e-4
                continue
            reference = rounded.residuals(handle.token_ids, steering).float()
            assert error(got, wanted) < 1.6 * error(reference, wanted) + 1e-3
            theirs = error(reference[..., others], wanted[..., others])
            assert error(got[..., others], wanted[..., others]) < 1.6 * theirs + 1e-3


@pytest.mark.engine
def test_a_compile_cache_that_a_plain_engine_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by plain vLLM first, into the same caches: ours is steered and captured all the same."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    folder = build("llama", tmp_path / "model", seed=3)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 64}

    def compiled() -> set[Path]:
        return {path for path in tmp_path.rglob("*") if path.is_file() and "model" not in path.parts}

    config = VLLMSteeringConfig(folder, dtype="float32", kv_cache_memory_bytes=1 << 27, **options)
    plain = PlainEngine(config, enforce_eager=False, detokenize=False)
    assert asyncio.run(plain.run([[5, 6, 7]], 4)) == 4
    plain.close()
    left = compiled()
    assert left, "the plain engine compiled nothing into the cache"
    hf = Oracle(folder)
    with started(folder, enforce_eager=False, **options) as model:
        _, [handle] = generate(model, [5, 6, 7, 8], max_tokens=6, steering=spec(4), capture_layers=ALL)
        check(handle, hf, spec(4))
    assert left < compiled()  # what it left is there, and ours was compiled beside it
