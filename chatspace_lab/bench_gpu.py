"""What steering and captures cost on a GPU, against plain vLLM with CUDA graphs in the same run.

Two engines live on one GPU, plain vLLM and ours, and take turns; a figure is the median of the ratios of neighbouring
runs. Weights are random: the cost does not depend on them. Every run goes through ``AsyncLLM`` on both sides.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from chatspace_lab.engine.config import VLLMSteeringConfig
from chatspace_lab.engine.loop import LoopThread
from chatspace_lab.engine.model import VLLMSteerModel
from chatspace_lab.steering.specs import AblationSpec, AddSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
}
BATCHES = (1, 32, 256)
NEW_TOKENS = 64
PREFILL = (8, 1500)
POOL = 256
"""Distinct vectors; every request combines and scales them differently."""


class Figure(NamedTuple):
    """One measured ratio of times, ours over theirs; below ``target`` is met."""

    shape: str
    what: str
    batch: int
    base_ms: float
    ours_ms: float
    ratio: float
    low: float
    high: float
    target: float | None

    def __str__(self) -> str:
        met = "" if self.target is None else ("  met" if self.ratio <= self.target else "  MISSED")
        aim = "" if self.target is None else f"  (at most {self.target:.2f}){met}"
        return (
            f"{self.shape:11} {self.what:52} batch {self.batch:4}  {self.base_ms:9.3f} -> {self.ours_ms:9.3f} ms  "
            f"ratio {self.ratio:6.3f} [{self.low:.3f} to {self.high:.3f}]{aim}"
        )


def write_shape(name: str) -> str:
    """Write a Qwen3 configuration of the given shape and return its folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
        **SHAPES[name],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class PlainEngine:
    """vLLM as it comes, on a loop thread like ours."""

    def __init__(self, model: str, **options: Any) -> None:
        self.loop = LoopThread("plain-vllm")
        self._numbers = itertools.count()
        self.engine = self.loop.call(self._start(model, options))

    @staticmethod
    async def _start(model: str, options: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, disable_log_stats=True, **options))

    async def _one(self, ids: list[int], params: Any) -> None:
        async for _ in self.engine.generate({"prompt_token_ids": ids}, params, str(next(self._numbers))):
            pass

    async def _all(self, prompts: list[list[int]], params: Any) -> None:
        await asyncio.gather(*(self._one(ids, params) for ids in prompts))

    def run(self, prompts: list[list[int]], params: Any) -> None:
        """Complete all prompts together."""
        self.loop.call(self._all(prompts, params))

    def close(self) -> None:
        """Stop the engine."""
        self.engine.shutdown()
        self.loop.close()


def params(new_tokens: int) -> Any:
    """Return greedy sampling of exactly ``new_tokens``, without detokenising."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=new_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def prompts(batch: int, length: int = 16) -> list[list[int]]:
    """Return ``batch`` different prompts of token ids."""
    return [[(7 * index + at) % 1000 + 10 for at in range(length)] for index in range(batch)]


def random_specs(count: int, layers: int, hidden_size: int) -> list[SteeringSpec]:
    """Return ``count`` different specs, each with add, cap and ablate at every layer."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.nn.functional.normalize(torch.randn(POOL, hidden_size, generator=generator), dim=-1)
    specs = []
    for index in range(count):
        chosen = torch.randint(0, POOL, (layers, 3), generator=generator).tolist()
        scale = 0.1 + index / (4 * count)
        specs.append(
            SteeringSpec(
                {
                    layer: LayerSteeringSpec(
                        add=AddSpec(pool[a], scale),
                        projection_cap=ProjectionCapSpec(pool[b], -1.0 - scale, 1.0 + scale),
                        ablation=AblationSpec(pool[c], scale),
                    )
                    for layer, (a, b, c) in enumerate(chosen)
                }
            )
        )
    return specs


def compare(base: Callable[[], None], ours: Callable[[], None], pairs: int) -> tuple[float, float, list[float]]:
    """Return the median seconds of both and the ratios of ``pairs`` neighbouring runs, after one warm-up of each."""
    base()
    ours()
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs):
        order = ((0, base), (1, ours)) if number % 2 == 0 else ((1, ours), (0, base))
        for which, run in order:
            before = time.perf_counter()
            run()
            seconds[which].append(time.perf_counter() - before)
    ratios = [b / a for a, b in zip(*seconds, strict=True)]
    return statistics.median(seconds[0]), statistics.median(seconds[1]), ratios


def measure_shape(
    name: str, pairs: int, show: Callable[[Figure], None], batches: Sequence[int] = BATCHES, **engine: Any
) -> None:
    """Start both engines on a shape and report every figure as it comes."""
    folder = write_shape(name)
    layers, hidden_size = SHAPES[name]["num_hidden_layers"], SHAPES[name]["hidden_size"]
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.4,
        "kv_cache_memory_bytes": 16 << 30,  # stated, so that neither start measures the other's memory
        **engine,
    }
    os.environ["VLLM_PLUGINS"] = ""  # else any plugin in the environment changes what "plain" means
    with concurrent.futures.ThreadPoolExecutor() as executor:
        plain_start = executor.submit(PlainEngine, folder, enforce_eager=False, **options)
        ours_config = VLLMSteeringConfig(folder, max_capture_bytes=24 << 30, **options)
        ours = executor.submit(VLLMSteerModel, ours_config, enforce_eager=False).result()
        plain = plain_start.result()
    call = ours._loop.call

    def generate(batch: int, new_tokens: int, length: int = 16, **extra: Any) -> Callable[[], None]:
        ids, sampling = prompts(batch, length), params(new_tokens)

        async def run() -> None:
            answer = await ours.generate(ids, sampling, **extra)
            if extra.get("capture_layers") is not None:
                await ours.fetch_captures_batch(answer[1])
                for handle in answer[1]:
                    handle.close()

        return lambda: call(run())

    def report(
        what: str,
        batch: int,
        target: float | None,
        steps: int,
        base: Callable[[], None],
        run: Callable[[], None],
        pairs: int = pairs,
    ) -> None:
        base_s, ours_s, ratios = compare(base, run, pairs)
        median = statistics.median(ratios)
        show(
            Figure(
                name, what, batch, 1e3 * base_s / steps, 1e3 * ours_s / steps, median, min(ratios), max(ratios), target
            )
        )

    for batch in batches:
        base = lambda batch=batch: plain.run(prompts(batch), params(NEW_TOKENS))  # noqa: E731
        report("nothing steered", batch, 1.02, NEW_TOKENS, base, generate(batch, NEW_TOKENS))
        specs = random_specs(batch, layers, hidden_size)
        report(
            "add + cap + ablate, every layer, all different",
            batch,
            1.05,
            NEW_TOKENS,
            base,
            generate(batch, NEW_TOKENS, steering=specs),
        )
        one = [layers // 2]
        report(
            "one layer captured and fetched",
            batch,
            1.05,
            NEW_TOKENS,
            base,
            generate(batch, NEW_TOKENS, capture_layers=one),
        )
        report(
            "every layer captured and fetched",
            batch,
            1.15 if batch == 32 else None,
            NEW_TOKENS,
            base,
            generate(batch, NEW_TOKENS, capture_layers=range(layers)),
        )
    count, length = PREFILL
    base_prefill: Callable[[], None] = lambda: plain.run(prompts(count, length), params(1))  # noqa: E731
    report(
        f"prefill of {count} x {length} tokens, nothing steered",
        count,
        None,
        1,
        base_prefill,
        generate(count, 1, length),
    )
    report(
        f"prefill of {count} x {length} tokens, every layer captured",
        count,
        1.5,
        1,
        base_prefill,
        generate(count, 1, length, capture_layers=range(layers)),
    )
    sweep = [SteeringSpec.at(layers // 2, AddSpec(torch.ones(hidden_size), scale / 64)) for scale in range(1, 65)]
    singles = [generate(1, 24, steering=[spec]) for spec in sweep]
    ids, sampling = prompts(1) * 64, params(24)

    def one_by_one() -> None:
        for single in singles:
            single()

    report(
        "a sweep of 64 scales as one batch, over 64 single runs",
        64,
        1 / 20,
        1,
        one_by_one,
        lambda: call(ours.generate(ids, sampling, steering=sweep)) and None,
        pairs=2,
    )
    ours.close()
    plain.close()
