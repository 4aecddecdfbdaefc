"""The demo model on a GPU against Hugging Face on the same GPU, CUDA graphs on."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from chatspace_lab import AblationSpec, AddSpec, ProjectionCapSpec, SteeringSpec, VLLMSteeringConfig, VLLMSteerModel

EXACT = "float32, exact attention"
"""vLLM's usual attention kernel multiplies float32 with ten bits of mantissa (TF32); its flexible one does not."""

PROMPTS = [
    "The capital of France is",
    "Rivers carry water from the mountains to the sea, and",
    "One two three four five six",
    "def fibonacci(n):",
]


def folder() -> str:
    given = os.environ.get("CHATSPACE_LAB_DEMO_MODEL")
    if given:
        return given
    from chatspace_lab.models import demo_model

    return demo_model()


def start(precision: str, **options: Any) -> VLLMSteerModel:
    eager = options.pop("enforce_eager", False)
    if precision == EXACT:
        options["attention_backend"] = "FLEX_ATTENTION"
    config = VLLMSteeringConfig(
        folder(),
        max_model_len=1024,
        dtype=precision.split(",")[0],
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2 << 30,
        **options,
    )
    return VLLMSteerModel(config, enforce_eager=eager)


@pytest.fixture(scope="module", params=["float32", EXACT, "bfloat16"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(precision: str) -> Iterator[VLLMSteerModel]:
    model = start(precision)
    yield model
    model.close()


@pytest.fixture(scope="module")
def hf() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32).cuda()


def rounding_like(hf: Any, precision: str) -> Any:
    """Return Hugging Face's model with the engine's rounding: bfloat16, or attention multiplied in TF32."""
    from transformers import AttentionInterface

    model = copy.deepcopy(hf)
    if precision == "bfloat16":
        return model.to(torch.bfloat16)
    AttentionInterface.register("tf32", tf32_attention)
    model.set_attn_implementation("tf32")
    return model


def as_tf32(x: torch.Tensor) -> torch.Tensor:
    """Cut float32 to ten bits of mantissa, as the tensor cores do."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def tf32_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """One whole sequence: [1, heads, tokens, head size]."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
    scores = (as_tf32(query) @ as_tf32(key).transpose(2, 3) * scaling).masked_fill(later, float("-inf"))
    return (as_tf32(scores.softmax(dim=-1)) @ as_tf32(value)).transpose(1, 2).contiguous(), None


def oracle(hf: Any, ids: list[int], spec: SteeringSpec | None) -> torch.Tensor:
    """Return [layers, tokens, hidden_size] on the GPU: hooks on each block, operations redone in float32."""
    rows: list[torch.Tensor] = []

    def hook(layer: int) -> Any:
        def run(module: Any, args: Any, output: Any) -> Any:
            x = output[0] if isinstance(output, tuple) else output
            for at, op in spec or ():
                if at != layer:
                    continue
                v = op.vector.cuda().to(x.dtype)
                if isinstance(op, AddSpec):
                    x = x + op.scale * v
                elif isinstance(op, ProjectionCapSpec):
                    p = x @ v
                    x = x + (p.clamp(op.min, op.max) - p)[..., None] * v
                else:
                    x = x + (op.scale - 1) * (x @ v)[..., None] * v
            rows.append(x[0].detach())
            return (x, *output[1:]) if isinstance(output, tuple) else x

        return run

    handles = [block.register_forward_hook(hook(i)) for i, block in enumerate(hf.model.layers)]
    with torch.no_grad():
        hf(torch.tensor([ids]).cuda())
    for handle in handles:
        handle.remove()
    return torch.stack(rows)


def specs(hidden_size: int) -> list[SteeringSpec | None]:
    g = torch.Generator().manual_seed(1)
    v, u, w = (torch.randn(hidden_size, generator=g) for _ in range(3))
    stacked = [AddSpec(v), ProjectionCapSpec(u, -1.0, 1.0), AblationSpec(w, 0.25)]
    return [
        None,
        SteeringSpec.at(4, AddSpec(v, 2.0)),
        SteeringSpec.at([3, 17], ProjectionCapSpec(u, -2.0, 2.0)),
        SteeringSpec.at([9, 29], AblationSpec(w)),
        SteeringSpec.at(range(30), *stacked),
    ]


def distances(got: list[torch.Tensor], want: list[torch.Tensor]) -> torch.Tensor:
    """Return [layers, rows] distances, relative to the rows that are wanted."""
    a, b = torch.cat(got, dim=1).float(), torch.cat(want, dim=1).float()
    return (a - b).norm(dim=-1) / b.norm(dim=-1)


def check(got: list[torch.Tensor], want: list[torch.Tensor], rounded: list[torch.Tensor] | None, told: Any) -> None:
    """[layers, rows, hidden_size] each. With ``rounded``, Hugging Face's rows under the engine's own rounding: as far
    from float32 as these are, layer by layer, and no row much worse than their worst."""
    ours = distances(got, want)
    if rounded is None:
        assert ours.max() < 1e-4, (told, ours.amax(dim=1))
        return
    theirs = distances(rounded, want)
    assert (ours.median(dim=1).values <= 1.3 * theirs.median(dim=1).values + 1e-5).all(), (
        told,
        ours.median(dim=1).values,
        theirs.median(dim=1).values,
    )
    assert ours.max() < 2.5 * theirs.max() + 1e-4, (told, ours.amax(dim=1), theirs.amax(dim=1))


def test_captures_and_operations_match_hugging_face(model: VLLMSteerModel, hf: Any, precision: str) -> None:
    rounding = None if precision == EXACT else rounding_like(hf, precision)

    async def main() -> None:
        for spec in specs(model.hidden_size):
            _, handles = await model.generate(
                PROMPTS, temperature=0.0, max_tokens=12, steering=spec, capture_layers=range(30)
            )
            await model.fetch_captures_batch(handles)
            got = [torch.stack([handle.hidden(layer).cuda() for layer in range(30)]) for handle in handles]
            want = [oracle(hf, handle.token_ids, spec) for handle in handles]
            rounded = None if rounding is None else [oracle(rounding, handle.token_ids, spec) for handle in handles]
            check(got, want, rounded, (precision, spec))

    asyncio.run(main())


def test_neighbours_are_untouched_bit_for_bit(model: VLLMSteerModel) -> None:
    """The order of arrival decides which requests share a step, and so the last bits of a row; plain runs collect what
    bits there are, and the neighbours of steered requests must show no others."""

    async def main() -> None:
        strong = SteeringSpec.at(range(30), *specs(model.hidden_size)[-1].layers[0].steps)
        fixed = PROMPTS * 4

        async def run(steering: list[SteeringSpec]) -> tuple[list[str], list[torch.Tensor]]:
            texts, handles = await model.generate(
                fixed, temperature=0.0, max_tokens=16, steering=steering, capture_layers=[29]
            )
            await model.fetch_captures_batch(handles)
            return texts, [handle.hidden(29).clone() for handle in handles]

        plain = [await run([SteeringSpec.none()] * len(fixed)) for _ in range(20)]
        for _ in range(3):
            texts, rows = await run([strong if i % 2 else SteeringSpec.none() for i in range(len(fixed))])
            for i in range(0, len(fixed), 2):
                if model.dtype == torch.float32:  # TF32 and the order of arrival: close, and not always the same bits
                    prompt = slice(0, 4)
                    apart = [distances([rows[i][None, prompt]], [known[1][i][None, prompt]]) for known in plain]
                    assert min(float(each.max()) for each in apart) < 1e-2
                    continue
                assert texts[i] == plain[0][0][i]
                assert any(torch.equal(rows[i], known[1][i]) for known in plain)
            for i in range(1, len(fixed), 2):
                assert not any(torch.equal(rows[i][0], known[1][i][0]) for known in plain)

    asyncio.run(main())


def test_prefix_cache_never_mixes(model: VLLMSteerModel, hf: Any, precision: str) -> None:
    """What follows is computed on cached values: the likeliest tokens as likely as Hugging Face finds them, but for the
    rounding, which Hugging Face shows too."""

    def logprobs(of: Any, ids: list[int], spec: SteeringSpec | None) -> torch.Tensor:
        with torch.no_grad():
            return of.lm_head(of.model.norm(oracle(of, ids, spec)[-1, -1])).float().log_softmax(dim=-1)

    async def main() -> None:
        long = "A shared preamble about boats, winds and tides. " * 12
        spec = SteeringSpec.at(
            5, AddSpec(torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(3)), 8)
        )
        ask = {"temperature": 0.0, "max_tokens": 1, "logprobs": 5, "raw_output": True}
        asked = [0, 0, 1, 1, 0]  # plain or steered
        outputs = [(await model.generate(long, steering=spec if each else None, **ask))[0] for each in asked]
        cached = [output.num_cached_tokens for output in outputs]
        assert cached[0] == cached[2] == 0
        assert min(cached[1], cached[3], cached[4]) > 0
        ids = list(outputs[0].prompt_token_ids)
        want = [logprobs(hf, ids, each) for each in (None, spec)]
        allowed = 1e-3
        if precision != EXACT:
            rounding = rounding_like(hf, precision)
            rounded = [logprobs(rounding, ids, each) for each in (None, spec)]
            apart = [(a - b)[a.topk(5).indices].abs().max() for a, b in zip(rounded, want, strict=True)]
            allowed += 3 * float(max(apart))
        for output, each in zip(outputs, asked, strict=True):
            told = {token: found.logprob for token, found in output.outputs[0].logprobs[0].items()}
            own, other = (
                max(abs(logprob - float(of[token])) for token, logprob in told.items())
                for of in (want[each], want[1 - each])
            )
            assert own < allowed < other / 2, (precision, own, other, allowed)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["chunked", "preempted", "v1", "eager"])
def test_other_scheduler_paths(path: str, hf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}
    if path == "chunked":
        options = {"max_num_batched_tokens": 32, "max_num_seqs": 16, "enable_chunked_prefill": True}
    if path == "preempted":
        options = {"num_gpu_blocks_override": 66, "enable_prefix_caching": False}
    if path == "v1":
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    if path == "eager":
        options = {"enforce_eager": True}
    model, rounding = start("float32", **options), rounding_like(hf, "float32")

    async def main() -> None:
        if path == "v1":
            assert model._client.facts.runner == "vllm.v1.worker.gpu_model_runner"
        prompts = [" ".join([word] * 40) for word in ("river", "stone", "cloud", "horse")]
        spec = specs(model.hidden_size)[-1]
        mixed = [spec, SteeringSpec.none(), spec, SteeringSpec.none()]
        _, handles = await model.generate(
            prompts, temperature=0.0, max_tokens=200, ignore_eos=True, steering=mixed, capture_layers=[0, 11, 29]
        )
        await model.fetch_captures_batch(handles)
        for handle, used in zip(handles, mixed, strict=True):
            assert len(handle.token_ids) == handle.prompt_len + 199
            layers = [0, 11, 29]
            got = torch.stack([handle.hidden(layer).cuda() for layer in layers])
            want = oracle(hf, handle.token_ids, used or None)[layers]
            rounded = oracle(rounding, handle.token_ids, used or None)[layers]
            check([got], [want], [rounded], (path, used))

        task = asyncio.create_task(model.generate(prompts, temperature=0.0, max_tokens=500, ignore_eos=True))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await model.generate("The capital of France is", temperature=0.0, max_tokens=2))[0]

    try:
        asyncio.run(main())
    finally:
        model.close()
