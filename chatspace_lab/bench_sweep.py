"""What ``chatspace-lab bench --sweep`` measures: a grid as one batch against the same runs one after another."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

TARGET = 4.0
"""Least ratio of seconds, one after another over together."""

LAYERS, SCALES, TOKENS = 8, 9, 24


async def bench_sweep(name: str, arguments: argparse.Namespace) -> int:
    """Measure, print the report, and return the exit code."""
    import torch

    from chatspace_lab import AddSpec, SteeringSpec, VLLMSteeringConfig, VLLMSteerModel
    from chatspace_lab.session.aio import AsyncLab

    config = VLLMSteeringConfig(name, dtype=arguments.dtype, max_model_len=1024, use_tqdm_on_load=False)
    async with VLLMSteerModel(config) as model:
        lab = AsyncLab(model)
        vector = torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(0))
        layers = [int(model.layer_count * at / LAYERS) for at in range(LAYERS)]
        scales = [float(scale) for scale in range(-(SCALES // 2), SCALES - SCALES // 2)]
        sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
        chat = [{"role": "user", "content": "Tell me about rivers."}]

        async def together(*, perplexity: bool) -> tuple[float, list[str]]:
            start = time.perf_counter()
            frame = await lab.sweep(chat, layers, vector, scales, perplexity=perplexity, **sampling)
            return time.perf_counter() - start, list(frame["text"])

        async def one_by_one() -> tuple[float, list[str]]:
            start = time.perf_counter()
            texts = []
            for layer in layers:
                for scale in scales:
                    spec = SteeringSpec.at(layer, AddSpec(vector, scale))
                    [answer] = await model.chat(chat, steering=spec, **sampling)
                    texts.append(str(answer))
            return time.perf_counter() - start, texts

        await together(perplexity=True)  # warm
        seconds: dict[str, list[float]] = {"single": [], "sweep": [], "scored": []}
        same = 0
        for _ in range(arguments.pairs):
            single, texts = await one_by_one()
            swept, found = await together(perplexity=False)
            scored, _ = await together(perplexity=True)
            same = sum(a == b for a, b in zip(texts, found, strict=True))
            for key, value in (("single", single), ("sweep", swept), ("scored", scored)):
                seconds[key].append(value)
    runs = LAYERS * SCALES
    print(f"\n{runs} runs of {TOKENS} tokens: {LAYERS} layers by {SCALES} scales; median seconds of {arguments.pairs}")
    print(f"{'one after another, nothing read':<52}{statistics.median(seconds['single']):>8.2f}")
    ratios = {}
    for key, title in (("sweep", "lab.sweep, projections read"), ("scored", "lab.sweep, and every answer scored")):
        ratios[key] = statistics.median(a / b for a, b in zip(seconds["single"], seconds[key], strict=True))
        print(f"{title:<52}{statistics.median(seconds[key]):>8.2f}   {ratios[key]:.1f} times as fast")
    missed = ratios["sweep"] < TARGET
    print(f"target {TARGET:.0f} {'missed' if missed else 'met'}; {same} of {runs} texts are the same")
    return int(arguments.check and missed)
