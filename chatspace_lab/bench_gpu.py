"""What steering and captures cost on a GPU, against plain vLLM with CUDA graphs in the same run.

Two engines live on one GPU, plain vLLM and ours, and take turns; a figure is the median of the ratios of neighbouring
runs. Weights are random: the cost does not depend on them. Every run goes through ``AsyncLLM`` on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import getpass
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from chatspace_lab.bench import PlainEngine, greedy
from chatspace_lab.engine.config import VLLMSteeringConfig
from chatspace_lab.engine.model import VLLMSteerModel
from chatspace_lab.errors import RequestError, UnsupportedError
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

Run = Callable[[], Awaitable[Any]]


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

    @property
    def missed(self) -> bool:
        """Whether there is a target and the ratio is above it."""
        return self.target is not None and self.ratio > self.target

    def __str__(self) -> str:
        met = "" if self.target is None else ("  missed" if self.missed else "  met")
        aim = "" if self.target is None else f"  (at most {self.target:.2f}){met}"
        return (
            f"{self.shape:11} {self.what:66} batch {self.batch:4}  {self.base_ms:9.3f} -> {self.ours_ms:9.3f} ms  "
            f"ratio {self.ratio:6.3f} [{self.low:.3f} to {self.high:.3f}]{aim}"
        )


def write_shape(name: str) -> str:
    """Write a Qwen3 configuration of the given shape and return its folder.

    The same each time: vLLM's compile cache goes by the folder's name.
    """
    folder = Path(tempfile.gettempdir()) / f"chatspace-lab-{getpass.getuser()}" / name
    folder.mkdir(parents=True, exist_ok=True)
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


async def bench_gpu(arguments: argparse.Namespace) -> int:
    """Measure every shape asked for, print the figures as they come, and return the exit code."""
    for name in arguments.shapes:
        if name not in SHAPES:
            raise RequestError(f"unknown shape {name}: there are {', '.join(SHAPES)}")
    if not torch.cuda.is_available():
        raise UnsupportedError("bench --gpu needs an NVIDIA GPU; without one, chatspace-lab bench measures the CPU")
    print(f"{'GPU':<11}{torch.cuda.get_device_name()}, {torch.cuda.device_count()} there", flush=True)
    missed = 0
    for name in arguments.shapes:
        async for figure in measure_shape(name, arguments.pairs, arguments.batches, arguments.tensor_parallel_size):
            print(figure, flush=True)
            missed += figure.missed
    return int(arguments.check and missed > 0)


async def compare(base: Run, ours: Run, pairs: int) -> tuple[float, float, list[float]]:
    """Return the median seconds of both and the ratios of ``pairs`` neighbouring runs, after one warm-up of each."""
    await base()
    await ours()
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs):
        order = ((0, base), (1, ours)) if number % 2 == 0 else ((1, ours), (0, base))
        for which, run in order:
            before = time.perf_counter()
            await run()
            seconds[which].append(time.perf_counter() - before)
    ratios = [b / a for a, b in zip(*seconds, strict=True)]
    return statistics.median(seconds[0]), statistics.median(seconds[1]), ratios


async def measure_shape(
    name: str, pairs: int, batches: Sequence[int] = BATCHES, workers: int = 1
) -> AsyncIterator[Figure]:
    """Start both engines on a shape, each on ``workers`` GPUs, and give every figure as it comes."""
    layers, hidden_size = SHAPES[name]["num_hidden_layers"], SHAPES[name]["hidden_size"]
    config = VLLMSteeringConfig(
        write_shape(name),
        tensor_parallel_size=workers,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2048,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=6 << 30,  # stated, so that neither start measures the other's memory
        max_capture_bytes=24 << 30,
    )
    plain_start = asyncio.to_thread(PlainEngine, config, enforce_eager=False, detokenize=False)
    ours_start = asyncio.to_thread(VLLMSteerModel, config, enforce_eager=False)
    started = time.perf_counter()
    plain, ours = await asyncio.gather(plain_start, ours_start)
    print(f"{name:11} both engines up in {time.perf_counter() - started:.0f} s", flush=True)
    # As vLLM's own server does: a collection over all that was imported takes longer than many steps.
    gc.collect()
    gc.freeze()

    def theirs(batch: int, new_tokens: int, length: int = 16) -> Run:
        return lambda: plain.run(prompts(batch, length), new_tokens)

    def generate(batch: int, new_tokens: int, length: int = 16, **options: Any) -> Run:
        async def run() -> None:
            sampling = {**greedy(new_tokens), "detokenize": False}
            answer = await ours.generate(prompts(batch, length), **sampling, **options)
            if "capture_layers" in options:
                await ours.fetch_captures_batch(answer[1])
                for handle in answer[1]:
                    handle.close()

        return run

    async def figure(
        what: str, batch: int, target: float | None, steps: int, base: Run, run: Run, times: int = pairs
    ) -> Figure:
        base_s, ours_s, ratios = await compare(base, run, times)
        median, low, high = statistics.median(ratios), min(ratios), max(ratios)
        return Figure(name, what, batch, 1e3 * base_s / steps, 1e3 * ours_s / steps, median, low, high, target)

    every, middle = range(layers), [layers // 2]
    for batch in batches:
        base = theirs(batch, NEW_TOKENS)
        specs = random_specs(batch, layers, hidden_size)
        cases: list[tuple[str, float | None, dict[str, Any]]] = [
            ("nothing steered", 1.02, {}),
            ("add + cap + ablate, every layer, all different", 1.05, {"steering": specs}),
            ("one layer captured and fetched", 1.05, {"capture_layers": middle}),
            ("every layer captured and fetched", 1.15 if batch == 32 else None, {"capture_layers": every}),
        ]
        for what, target, options in cases:
            yield await figure(what, batch, target, NEW_TOKENS, base, generate(batch, NEW_TOKENS, **options))
        first = theirs(batch, 1)
        for what, _, options in cases[:3]:  # what of it is paid once, before the steps: admission and prefill
            yield await figure(f"{what}, to the first token", batch, None, 1, first, generate(batch, 1, **options))
    count, length = PREFILL
    base = theirs(count, 1, length)
    what = f"prefill of {count} x {length} tokens"
    more = 3 * pairs  # these runs are short
    yield await figure(f"{what}, nothing steered", count, None, 1, base, generate(count, 1, length), more)
    run = generate(count, 1, length, capture_layers=every)
    yield await figure(f"{what}, every layer captured", count, 1.5, 1, base, run, more)

    sweep = [SteeringSpec.at(layers // 2, AddSpec(torch.ones(hidden_size), scale / 64)) for scale in range(1, 65)]

    async def one_by_one() -> None:
        for spec in sweep:
            await ours.generate(prompts(1), steering=spec, detokenize=False, **greedy(24))

    async def together() -> None:
        await ours.generate(prompts(1) * 64, steering=sweep, detokenize=False, **greedy(24))

    yield await figure("a sweep of 64 scales as one batch, over 64 runs", 64, 1 / 20, 1, one_by_one, together, times=2)
    plain.close()
    await ours.aclose()
