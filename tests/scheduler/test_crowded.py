"""An engine too small for its requests, which caches, chunks and preempts; each answer compared with Hugging Face.

The seed is printed. ``CHATSPACE_LAB_RANDOM_REQUESTS`` and ``CHATSPACE_LAB_RANDOM_SEED`` make a longer or another run::

    CHATSPACE_LAB_RANDOM_REQUESTS=5000 CHATSPACE_LAB_RANDOM_SEED=7 pytest -s tests/scheduler/test_crowded.py
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import torch

from chatspace_lab import AblationSpec, SteeringSpec, VLLMSteerModel, Where
from chatspace_lab.spans import below
from tests.conftest import held, wait_until
from tests.oracle import Oracle, error
from tests.scheduler.test_paths import ALL, check, fingerprints, generate, spec
from tests.tiny import HIDDEN

SEED = int(os.environ.get("CHATSPACE_LAB_RANDOM_SEED", "20261129"))
REQUESTS = int(os.environ.get("CHATSPACE_LAB_RANDOM_REQUESTS", "240"))


def draw(dice: random.Random) -> dict[str, Any]:
    """Return one request: its prompt, steering, captures, sampling, arrival and whether it is left early."""
    prefixes = [[5 + index % 3 for index in range(40)], [9] * 24, []]
    prompt = [*dice.choice(prefixes), *(dice.randrange(3, 500) for _ in range(dice.randrange(1, 40)))]
    temperature = dice.choice([0.0, 0.0, 1.0])
    where = dice.choice(["all", "all", "prompt", "answer", Where.span(dice.randrange(len(prompt)), 90)])
    return {
        "prompt": prompt,
        "steering": dice.choice([SteeringSpec.none(), spec(dice.randrange(30), where=where)]),
        "layers": dice.choice([None, [1], [0, 3], ALL]),
        "capture_where": dice.choice(["all", "all", "answer", "prompt"]),
        "sampling": {
            "temperature": temperature,
            "seed": dice.randrange(1000),
            "max_tokens": dice.randrange(1, 50),
            "ignore_eos": dice.random() < 0.5,
            "detokenize": False,
            "n": dice.choice([1, 2]) if temperature else 1,
        },
        "delay": dice.random() * 2,
        "leave": dice.random() < 0.1,
    }


async def play(model: VLLMSteerModel, ask: dict[str, Any]) -> list[tuple[list[int], Any]]:
    """Run one request; return per sample its tokens and its handle."""
    await asyncio.sleep(ask["delay"])
    options = {"capture_layers": ask["layers"], "capture_where": ask["capture_where"]} if ask["layers"] else {}
    call = model.generate(ask["prompt"], steering=ask["steering"], raw_output=True, **options, **ask["sampling"])
    if ask["leave"]:
        task = asyncio.create_task(call)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        return []
    answer = await call
    outputs, handles = answer if ask["layers"] else (answer, None)
    if handles:
        await model.fetch_captures_batch(handles)
    samples = outputs[0].outputs
    return [(list(each.token_ids), handles[index] if handles else None) for index, each in enumerate(samples)]


def verify(ask: dict[str, Any], tokens: list[int], handle: Any, hf: Oracle) -> None:
    prompt, used = ask["prompt"], ask["steering"]
    computed = [*prompt, *tokens[:-1]]
    where = used.where
    spans = {"all": [0, -1], "prompt": [0, len(prompt)], "answer": [len(prompt), -1], "span": list(where.indices)}
    residuals, logits = hf.run(computed, used or None, below(spans[where.part], len(computed)))  # type: ignore[arg-type]
    if ask["sampling"]["temperature"] == 0.0:
        for at, token in enumerate(tokens, start=len(prompt) - 1):
            assert logits[at][token] > logits[at].max() - 1e-2, (ask, at)
    if handle is None:
        return
    chosen = {"all": [0, -1], "prompt": [0, len(prompt)], "answer": [len(prompt), -1]}[ask["capture_where"]]
    assert handle.positions == below(chosen, len(computed))
    for layer in handle.layer_indices:
        if handle.positions:
            assert error(handle.hidden(layer), residuals[layer][handle.positions]) < 1e-4, (ask, layer)


def test_preemption(crowded: VLLMSteerModel, tiny_hf: Oracle) -> None:
    """Requests that do not fit together are thrown out and computed again: same captures, same tokens."""
    before = crowded._loop.call(crowded._client.stats())["recomputed"]
    prompts = fingerprints(8, 20, 3)
    used = [spec(index) if index % 2 else SteeringSpec.none() for index in range(8)]
    _, handles = generate(crowded, prompts, max_tokens=60, steering=used, capture_layers=ALL)
    assert crowded._loop.call(crowded._client.stats())["recomputed"] > before
    for handle, each in zip(handles, used, strict=True):
        assert handle.generated_len == 60
        check(handle, tiny_hf, each)


def test_random_requests(crowded: VLLMSteerModel, tiny_hf: Oracle) -> None:
    print(f"seed {SEED}, {REQUESTS} requests")
    dice = random.Random(SEED)
    asks = [draw(dice) for _ in range(REQUESTS)]
    before = crowded._loop.call(crowded._client.stats())

    async def run() -> list[Any]:
        return await asyncio.gather(*(play(crowded, ask) for ask in asks))

    results = asyncio.run(run())
    after = crowded._loop.call(crowded._client.stats())
    assert after["continued"] > before["continued"]
    assert after["recomputed"] > before["recomputed"]
    checked = 0
    for ask, samples in zip(asks, results, strict=True):
        for tokens, handle in samples:
            verify(ask, tokens, handle, tiny_hf)
            checked += 1
    assert checked > REQUESTS * 0.8
    del results, samples, handle
    wait_until(lambda: held(crowded) == {"requests": 0, "buffers": 0, "nbytes": 0}, what="the worker drops everything")


def test_steering_without_bounds_spoils_nobody(crowded: VLLMSteerModel, tiny_hf: Oracle) -> None:
    """Keys and values of NaN would stay in the cache's blocks, for whoever has them next."""
    wild = SteeringSpec.at(ALL, *[AblationSpec(torch.ones(HIDDEN), 3e38)] * 2)
    for turn in range(3):
        generate(crowded, fingerprints(8, 30 + turn, 3), max_tokens=20, steering=wild)
    _, handles = generate(crowded, fingerprints(8, 20, 3), max_tokens=20, capture_layers=ALL)
    for handle in handles:
        check(handle, tiny_hf, None)
