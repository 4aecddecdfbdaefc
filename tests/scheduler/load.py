"""Hundreds of concurrent requests, each with its own steering and captures, for minutes; beside plain vLLM.

``python -m tests.scheduler.load [--seconds 600] [--concurrent 512]`` starts our engine and a plain one, and gives ours
list after list of requests; every second list is then given to the plain engine too, without steering and captures, and
the two times are compared. Between lists nothing runs: then the memory of our processes is noted, and a sample of the
rows is compared with Hugging Face in float32. The exit code is 1 if a row is wrong, memory grows, something is left
behind, or our throughput is below 0.85 of plain vLLM's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import psutil
import torch

from chatspace_lab import AblationSpec, AddSpec, CaptureHandle, ProjectionCapSpec, SteeringSpec, VLLMSteerModel
from chatspace_lab.bench import PlainEngine
from chatspace_lab.spans import below
from tests.oracle import Oracle, error

TOLERANCE = 1e-4
TARGET = 0.85
FLAT_BYTES = 64 << 20
"""Growth of a process between the first and the last third of the lists that is still called flat."""
MOST_PROMPT, MOST_NEW = 32, 24
"""Tokens of a prompt and of an answer."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: list[int]
    max_tokens: int
    steering: SteeringSpec
    layers: list[int] | None
    capture_where: str


@dataclasses.dataclass
class Answer:
    """What came of a request that is to be compared."""

    ask: Ask
    token_ids: list[int]
    handle: CaptureHandle


class Requests:
    """Draws requests: half of their specs from a few that recur, half never seen before."""

    def __init__(self, model: VLLMSteerModel, seed: int) -> None:
        self._hidden, self._layers = model.hidden_size, model.layer_count
        self._vocabulary = model._client.facts.vocab_size
        self._dice = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._known = [self._spec() for _ in range(64)]

    def _spec(self) -> SteeringSpec:
        v, u = torch.randn(2, self._hidden, generator=self._generator)
        step = self._dice.choice([AddSpec(v, 2.0), ProjectionCapSpec(u, -1.0, 1.0), AblationSpec(u, 0.5)])
        steps = [step, AddSpec(v, 0.5)] if self._dice.random() < 0.3 else [step]
        at = self._dice.sample(range(self._layers), self._dice.choice([1, 1, 3]))
        return SteeringSpec.at(at, *steps, where=self._dice.choice(["all", "all", "prompt", "answer"]))

    def draw(self, count: int) -> list[Ask]:
        """Return new requests."""
        return [self._draw() for _ in range(count)]

    def longest(self, count: int) -> list[Ask]:
        """Return new requests of the greatest length, to warm up with: no later list needs more memory."""
        more = [self._dice.randrange(3, self._vocabulary) for _ in range(MOST_PROMPT)]
        return [
            dataclasses.replace(ask, prompt=(ask.prompt + more)[:MOST_PROMPT], max_tokens=MOST_NEW)
            for ask in self.draw(count)
        ]

    def _draw(self) -> Ask:
        dice = self._dice
        kind = dice.random()
        steering = SteeringSpec.none() if kind < 0.2 else dice.choice(self._known) if kind < 0.6 else self._spec()
        every = range(self._layers)
        captured = [None, dice.sample(every, 1), sorted(dice.sample(every, 3)), list(every)]
        layers = dice.choices(captured, weights=[3, 4, 2, 1])[0]
        return Ask(
            [dice.randrange(3, self._vocabulary) for _ in range(dice.randrange(4, MOST_PROMPT + 1))],
            dice.randrange(4, MOST_NEW + 1),
            steering,
            layers,
            dice.choice(["all", "all", "prompt", "answer"]),
        )


def greedy(max_tokens: int) -> dict[str, Any]:
    """Greedy, and always the whole length."""
    return {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "max_tokens": max_tokens}


async def together(asks: Sequence[Ask], concurrent: int, one: Callable[[Ask], Awaitable[None]]) -> float:
    """Run all, ``concurrent`` at a time, and return the seconds that it took."""
    waiting = iter(asks)

    async def client() -> None:
        for ask in waiting:
            await one(ask)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrent)))
    return time.perf_counter() - start


async def ours(
    model: VLLMSteerModel, asks: Sequence[Ask], concurrent: int, sample: int, dice: random.Random
) -> tuple[float, list[Answer]]:
    """Run a list on our engine; return the seconds, and a sample of the answers that were captured."""
    kept: list[Answer] = []
    wanted = set(dice.sample([index for index, ask in enumerate(asks) if ask.layers], sample))
    wanted_asks = {id(asks[index]) for index in wanted}

    async def one(ask: Ask) -> None:
        options: dict[str, Any] = {"steering": ask.steering, "raw_output": True, **greedy(ask.max_tokens)}
        if ask.layers is None:
            await model.generate(ask.prompt, **options)
            return
        [output], [handle] = await model.generate(
            ask.prompt, capture_layers=ask.layers, capture_where=ask.capture_where, **options
        )
        await handle.fetch()
        rows = len(handle.positions)
        assert all(handle.hidden(layer).shape[0] == rows for layer in ask.layers)
        if id(ask) in wanted_asks:
            kept.append(Answer(ask, list(output.outputs[0].token_ids), handle))
        else:
            handle.close()

    return await together(asks, concurrent, one), kept


async def plainly(engine: PlainEngine, asks: Sequence[Ask], concurrent: int) -> float:
    """Run a list on plain vLLM, on its own loop; return the seconds."""

    async def one(ask: Ask) -> None:
        assert await engine._one(ask.prompt, ask.max_tokens) == ask.max_tokens

    return await engine._loop.run(together(asks, concurrent, one))


def wrong_rows(answer: Answer, hf: Oracle) -> list[str]:
    """Compare an answer with Hugging Face, and free it; return what is wrong, in words."""
    ask, handle = answer.ask, answer.handle
    computed = [*ask.prompt, *answer.token_ids[:-1]]
    spans = {"all": [0, -1], "prompt": [0, len(ask.prompt)], "answer": [len(ask.prompt), -1]}
    steered = below(spans[ask.steering.where.part], len(computed))  # type: ignore[union-attr]
    residuals, logits = hf.run(computed, ask.steering or None, steered)  # type: ignore[arg-type]
    wrong = []
    if handle.positions != below(spans[ask.capture_where], len(computed)):
        wrong.append(f"positions {handle.positions}")
    for layer in handle.layer_indices if handle.positions else ():
        far = error(handle.hidden(layer), residuals[layer][handle.positions])
        if far > TOLERANCE:
            wrong.append(f"layer {layer} differs by {far:.0e}")
    wrong += [
        f"token {token} at {at + 1} is not the most likely one"
        for at, token in enumerate(answer.token_ids, start=len(ask.prompt) - 1)
        if logits[at][token] < logits[at].max() - 1e-2
    ]
    handle.close()
    return wrong


@dataclasses.dataclass
class Memory:
    """What our processes hold while nothing runs, in bytes, but for ``rows`` (of the vector bank, in use)."""

    kernel: int
    worker: int
    buffers: int
    mapped: int
    rows: int
    requests: int


async def memory(model: VLLMSteerModel) -> Memory:
    """Measure; waits until what was released has reached the worker."""
    loop = model._client.loop
    for _ in range(200):
        found = await loop.run(model._client.stats())
        if not (found["requests"] or found["buffers"] or found["nbytes"]):
            break
        await asyncio.sleep(0.05)
    resident = [process.memory_info().rss for process in model._client._processes]
    bank = model._client.bank
    return Memory(
        psutil.Process().memory_info().rss,
        sum(resident),
        found["nbytes"],
        found["mapped"],
        sum(row.users for row in bank._rows.values()),
        found["requests"] + found["buffers"],
    )


@dataclasses.dataclass
class Report:
    """All of a run."""

    lists: int = 0
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    compared: int = 0
    rows: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    memory: list[Memory] = dataclasses.field(default_factory=list)
    ratios: list[float] = dataclasses.field(default_factory=list)
    plain_tokens: int = 0
    plain_seconds: float = 0.0

    def growth(self, name: str) -> int:
        """Return by how much the last third of the measurements is above the first, in the median."""
        values = [getattr(each, name) for each in self.memory]
        third = max(len(values) // 3, 1)
        return int(statistics.median(values[-third:]) - statistics.median(values[:third])) if values else 0

    def left_behind(self) -> list[str]:
        """Return what was not given back between lists."""
        names = ("buffers", "mapped", "rows", "requests")
        return [f"{name} {getattr(each, name)}" for each in self.memory for name in names if getattr(each, name)]


async def load(
    model: VLLMSteerModel,
    hf: Oracle,
    *,
    seconds: float,
    concurrent: int,
    plain: PlainEngine | None = None,
    sample: int = 4,
    seed: int = 0,
    tell: Callable[[str], None] = print,
) -> Report:
    """Put our engine under load for so many seconds, and say what came of it."""
    requests, dice, report = Requests(model, seed), random.Random(seed), Report()
    while report.seconds < seconds:
        asks = requests.draw(concurrent)
        took, answers = await ours(model, asks, concurrent, sample, dice)
        tokens = sum(ask.max_tokens for ask in asks)
        report.lists += 1
        report.requests += len(asks)
        report.tokens += tokens
        report.seconds += took
        for answer in answers:
            report.compared += 1
            report.rows += len(answer.handle.positions) * len(answer.handle.layer_indices)
            report.wrong += await asyncio.to_thread(wrong_rows, answer, hf)
        del answers, answer
        report.memory.append(await memory(model))
        line = f"list {report.lists:>3}  {tokens / took:>6.0f} tokens/s  {_shown(report.memory[-1])}"
        if plain is not None and report.lists % 2 == 0:
            alone = await plainly(plain, asks, concurrent)
            report.plain_tokens += tokens
            report.plain_seconds += alone
            report.ratios.append(alone / took)
            line += f"  plain {tokens / alone:>6.0f} tokens/s, ratio {alone / took:.3f}"
        tell(line)
    return report


def _shown(now: Memory) -> str:
    mib = 1 << 20
    return (
        f"kernel {now.kernel // mib} MiB, worker and engine {now.worker // mib} MiB, captures {now.buffers} bytes, "
        f"mapped {now.mapped} bytes, vectors in use {now.rows}"
    )


@contextlib.asynccontextmanager
async def engines(concurrent: int) -> AsyncIterator[tuple[VLLMSteerModel, PlainEngine, Oracle]]:
    """Start both engines and the oracle on the demo model, in float32."""
    from chatspace_lab import VLLMSteeringConfig
    from chatspace_lab.models import demo_model

    folder = demo_model()
    config = VLLMSteeringConfig(
        folder, dtype="float32", max_model_len=64, max_num_seqs=concurrent, kv_cache_memory_bytes=2 << 30
    )
    plain = PlainEngine(config, detokenize=False)
    try:
        async with VLLMSteerModel(config) as model:
            yield model, plain, Oracle(folder)
    finally:
        plain.close()


async def _main(arguments: argparse.Namespace) -> int:
    print(f"python -m tests.scheduler.load {' '.join(sys.argv[1:])}")
    print(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, seed {arguments.seed}")
    async with engines(arguments.concurrent) as (model, plain, hf):
        first = Requests(model, arguments.seed + 1).longest(arguments.concurrent)
        await plainly(plain, first, arguments.concurrent)
        await ours(model, first, arguments.concurrent, 0, random.Random())
        report = await load(
            model,
            hf,
            seconds=arguments.seconds,
            concurrent=arguments.concurrent,
            plain=plain,
            seed=arguments.seed,
            tell=lambda line: print(line, flush=True),
        )
    ratio = statistics.median(report.ratios) if report.ratios else None
    grown = {name: report.growth(name) for name in ("kernel", "worker")}
    print(
        f"\n{report.requests} requests, {report.tokens} generated tokens in {report.seconds:.0f} s under load, "
        f"{arguments.concurrent} at a time\n"
        f"{report.compared} of them compared with Hugging Face, {report.rows} rows: {len(report.wrong)} wrong\n"
        f"memory after warm-up: kernel process {grown['kernel'] / (1 << 20):+.0f} MiB, worker and engine "
        f"{grown['worker'] / (1 << 20):+.0f} MiB; left behind: {', '.join(report.left_behind()) or 'nothing'}"
    )
    if ratio is not None:
        low, high = min(report.ratios), max(report.ratios)
        print(
            f"throughput of plain vLLM {report.plain_tokens / report.plain_seconds:.0f} tokens/s; ours over it, on the "
            f"same requests: {ratio:.3f} (median of {len(report.ratios)}, {low:.3f} to {high:.3f}), target {TARGET}"
        )
    for line in report.wrong:
        print(f"WRONG: {line}")
    flat = all(growth < FLAT_BYTES for growth in grown.values())
    fast = ratio is None or ratio >= TARGET
    return int(bool(report.wrong or report.left_behind()) or not flat or not fast)


def bound_caches() -> None:
    """Keep the engines' libraries from growing, so that what grows would be ours.

    Plain vLLM grows by tens of MiB with each list: oneDNN keeps a compiled product for each number of tokens in a step,
    and glibc's heap falls to pieces between tensors of all sizes. Both engines inherit these limits.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8")
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 18))


def main() -> int:
    """Run the command."""
    bound_caches()
    parser = argparse.ArgumentParser(prog="python -m tests.scheduler.load", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="our engine's, under load (default: %(default)s)")
    parser.add_argument("--concurrent", type=int, default=512, help="requests at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
