"""What ``chatspace-lab bench`` measures: our engine beside a plain one, in the same run.

Both engines are up all the time and take turns: plain, ours, plain, ours, … Each of our runs is compared with the mean
of the plain runs before and after it, on the same prompts' lengths, so that a machine that slows down slows both. What
is reported is the median of these ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import os
import platform
import random
import shlex
import statistics
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from chatspace_lab import __version__
from chatspace_lab.models import DEMO_NAME, chosen_model

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from chatspace_lab.engine.config import VLLMSteeringConfig
    from chatspace_lab.engine.loop import LoopThread
    from chatspace_lab.engine.model import VLLMSteerModel

PROMPT_TOKENS = 32
KV_CACHE_BYTES = 1 << 30

Prompts = list[list[int]]
Run = Callable[[Prompts, int], Awaitable[int]]
"""Answers prompts with so many tokens each, and returns how many tokens were generated."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that is measured.

    Attributes
    ----------
    title
        As printed.
    target
        Least median ratio, of plain vLLM's throughput; None where there is none (yet).
    run
        How it is done.
    """

    title: str
    target: float | None
    run: Run


@dataclasses.dataclass
class Measured:
    """The ratios of one case: throughput over that of plain vLLM."""

    case: Case
    ratios: list[float]
    speeds: list[float]

    @property
    def median(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def missed(self) -> bool:
        """Whether there is a target and the median is below it."""
        return self.case.target is not None and self.median < self.case.target

    def line(self) -> str:
        """Return a row of the report."""
        low, high = _quartiles(self.ratios)
        target = "" if self.case.target is None else f"{self.case.target:.2f}"
        verdict = "" if self.case.target is None else "missed" if self.missed else "met"
        line = (
            f"{self.case.title:<52}{statistics.median(self.speeds):>9.0f}{self.median:>9.3f}"
            f"   {low:.3f}-{high:.3f}{target:>8}  {verdict}"
        )
        return line.rstrip()


class PlainEngine:
    """vLLM as it is, with the same options as ours. ``sampling`` is added to that of every request."""

    def __init__(self, config: VLLMSteeringConfig, enforce_eager: bool | None = None, **sampling: Any) -> None:
        from chatspace_lab import wire
        from chatspace_lab.engine.loop import LoopThread

        os.environ["VLLM_PLUGINS"] = ""  # any plugin that is installed would change what "plain" means
        self._sampling = sampling
        options = config.engine_kwargs(enforce_eager)
        del options["worker_extension_cls"]
        del options["additional_config"][wire.EXTRA]
        self._loop: LoopThread = LoopThread("plain-vllm")
        self._engine: AsyncLLM = self._loop.call(self._start(options))

    async def _start(self, options: dict[str, Any]) -> AsyncLLM:
        from vllm.v1.engine.async_llm import AsyncLLM

        from chatspace_lab.engine.config import engine_arguments

        return AsyncLLM.from_engine_args(engine_arguments(options))

    async def run(self, prompts: Prompts, tokens: int) -> int:
        """Answer every prompt."""
        return await self._loop.run(self._run(prompts, tokens))

    async def _run(self, prompts: Prompts, tokens: int) -> int:
        return sum(await asyncio.gather(*(self._one(prompt, tokens) for prompt in prompts)))

    async def _one(self, prompt: list[int], tokens: int) -> int:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**greedy(tokens), output_kind=RequestOutputKind.FINAL_ONLY, **self._sampling)
        count = 0
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params, uuid.uuid4().hex):
            count += len(output.outputs[0].token_ids)
        return count

    def close(self) -> None:
        """Stop it."""

        async def shutdown() -> None:
            self._engine.shutdown()

        self._loop.call(shutdown())
        self._loop.close()
        del self._engine  # its finaliser needs modules that are gone when Python ends


def our_cases(model: VLLMSteerModel, targets: dict[str, float]) -> list[Case]:
    """Return what is measured of our engine."""
    import torch

    from chatspace_lab import AblationSpec, AddSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec

    generator = torch.Generator().manual_seed(0)

    def direction() -> torch.Tensor:
        return torch.randn(model.hidden_size, generator=generator)

    everywhere = SteeringSpec(
        layers={
            layer: LayerSteeringSpec(
                add=AddSpec(direction(), 0.01),
                projection_cap=ProjectionCapSpec(direction(), min=-50.0, max=50.0),
                ablation=AblationSpec(direction(), 0.5),
            )
            for layer in range(model.layer_count)
        }
    )
    middle = model.layer_count // 2

    async def generate(prompts: Prompts, tokens: int, **options: Any) -> list[Any] | tuple[list[Any], list[Any]]:
        return await model.generate(prompts, raw_output=True, **greedy(tokens), **options)

    async def nothing(prompts: Prompts, tokens: int) -> int:
        return _count(await generate(prompts, tokens))

    async def steered(prompts: Prompts, tokens: int) -> int:
        return _count(await generate(prompts, tokens, steering=everywhere))

    async def captured(prompts: Prompts, tokens: int) -> int:
        outputs, handles = await generate(prompts, tokens, capture_layers=[middle])
        await model.fetch_captures_batch(handles)
        for handle in handles:
            handle.close()
        return _count(outputs)

    return [
        Case("nothing steered", targets.get("nothing"), nothing),
        Case(f"add + cap + ablate at all {model.layer_count} layers", targets.get("steered"), steered),
        Case(f"layer {middle} captured and fetched", targets.get("captured"), captured),
    ]


CPU_TARGETS = {"nothing": 0.98, "steered": 0.94, "captured": 0.96}


async def bench(arguments: argparse.Namespace) -> int:
    """Measure, print the report, and return the exit code."""
    if arguments.gpu:
        from chatspace_lab.bench_gpu import bench_gpu

        print("\n".join(_facts("random weights", arguments)), flush=True)
        return await bench_gpu(arguments)
    name = chosen_model(arguments.model_name)
    print("\n".join(_facts(name, arguments)), flush=True)
    if arguments.transport:
        from chatspace_lab.bench_transport import bench_transport

        return await bench_transport(name, arguments)
    if arguments.sweep:
        from chatspace_lab.bench_sweep import bench_sweep

        return await bench_sweep(name, arguments)
    from vllm.platforms import current_platform

    from chatspace_lab import VLLMSteeringConfig, VLLMSteerModel

    config = VLLMSteeringConfig(
        model_name=name,
        dtype=arguments.dtype,
        max_model_len=PROMPT_TOKENS + arguments.tokens,
        max_num_seqs=arguments.batch,
        use_tqdm_on_load=False,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
    )
    print("starting two engines, plain and ours", flush=True)
    plain = PlainEngine(config)
    try:
        async with VLLMSteerModel(config) as model:
            cases = our_cases(model, CPU_TARGETS if current_platform.is_cpu() else {})
            vocabulary = len(model.tokenizer)
            measured, speeds = await _measure(plain, cases, arguments, vocabulary)
    finally:
        plain.close()
    print(f"\n{'':<52}{'tokens/s':>9}{'ratio':>9}   {'quartiles':<11}{'target':>8}")
    print(f"{'plain vLLM':<52}{statistics.median(speeds):>9.0f}")
    for result in measured:
        print(result.line())
    return int(arguments.check and any(result.missed for result in measured))


async def _measure(
    plain: PlainEngine, cases: Sequence[Case], arguments: argparse.Namespace, vocabulary: int
) -> tuple[list[Measured], list[float]]:
    """Take turns, and return the ratios of each case and the speeds of plain vLLM in tokens/s."""
    chance = random.Random(0)

    def prompts() -> Prompts:  # new ones each time: the prefix cache must serve nobody
        return [[chance.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(arguments.batch)]

    async def speed(run: Run) -> float:
        asked = prompts()
        start = time.perf_counter()
        count = await run(asked, arguments.tokens)
        seconds = time.perf_counter() - start
        if count != arguments.batch * arguments.tokens:
            raise RuntimeError(f"{count} tokens were generated, {arguments.batch * arguments.tokens} asked for")
        return count / seconds

    for run in (plain.run, *(case.run for case in cases)):
        await speed(run)  # warm
    measured = [Measured(case, [], []) for case in cases]
    speeds = [await speed(plain.run)]
    with tqdm(total=arguments.pairs * len(cases), desc="measuring", unit="pair", leave=False) as progress:
        for _ in range(arguments.pairs):
            for result in measured:
                ours = await speed(result.case.run)
                speeds.append(await speed(plain.run))
                result.speeds.append(ours)
                # time per token of the plain runs on either side, averaged
                result.ratios.append(ours * (1 / speeds[-2] + 1 / speeds[-1]) / 2)
                progress.update(1)
    return measured, speeds


def _facts(name: str, arguments: argparse.Namespace) -> list[str]:
    """Return what must be known to read the numbers."""
    import torch
    import vllm

    shown = DEMO_NAME if arguments.model_name is None else name
    load = (
        f"{shown}, dtype {arguments.dtype}, {arguments.batch} requests of {PROMPT_TOKENS} + {arguments.tokens} tokens"
    )
    if arguments.transport:
        load = f"{shown}, dtype {arguments.dtype}, {arguments.mib} MiB of captured rows"
    if arguments.sweep:
        load = f"{shown}, dtype {arguments.dtype}, a sweep of 8 layers by 9 scales by 24 tokens"
    if arguments.gpu:
        load = f"{' and '.join(arguments.shapes)}, random weights, bfloat16, 64 tokens each"
        if arguments.tensor_parallel_size > 1:
            load += f", tensor parallel {arguments.tensor_parallel_size}"
    facts = {
        "command": shlex.join(["chatspace-lab", *sys.argv[1:]]),
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "versions": f"chatspace-lab {__version__}, vLLM {vllm.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "load": f"{load}, {arguments.pairs} pairs",
    }
    return [f"{key:<11}{value}" for key, value in facts.items()]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"


def greedy(tokens: int) -> dict[str, Any]:
    """Greedy, and always the whole length."""
    return {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}


def _count(outputs: Sequence[Any]) -> int:
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
