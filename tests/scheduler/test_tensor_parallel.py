"""Several workers on one host: rows and tokens as with one, steering on all of them, a clear end if one dies."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest
import torch

from chatspace_lab import AddSpec, ProjectionCapSpec, SteeringSpec, VLLMSteerModel
from chatspace_lab.errors import EngineDeadError
from tests.conftest import children, started, unfinished
from tests.oracle import Oracle, error
from tests.scheduler.test_paths import ALL, GREEDY, check, fingerprints, generate, spec
from tests.tiny import build

pytestmark = pytest.mark.engine

WORKERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build("llama", tmp_path_factory.mktemp("tp"), seed=5, num_key_value_heads=2)


@pytest.fixture(autouse=True)
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two cores, and vLLM wants one of its own per worker


def workers(before: set[psutil.Process]) -> list[psutil.Process]:
    return [child for child in children() - before if "Worker" in " ".join(child.cmdline()) or "Worker" in child.name()]


def test_rows_and_tokens_as_with_one_worker_and_the_end_of_one(folder: str) -> None:
    before = children()
    hf = Oracle(folder)
    with started(folder, skip_tokenizer_init=True, max_model_len=256, tensor_parallel_size=WORKERS) as model:
        prompts = fingerprints(6, 5, 3)
        used = [spec(index) for index in range(6)]
        _, handles = generate(model, prompts, max_tokens=12, steering=used, capture_layers=ALL)
        for handle, each in zip(handles, used, strict=True):
            assert len(handle.captures[0]) == WORKERS
            check(handle, hf, each)
        # The bank of every worker holds the same: an update reaches all or none.
        digests = model._loop.call(model._client.rpc("chatspace_lab_digest"))
        assert len(digests) == WORKERS
        assert len(set(digests)) == 1

        async def lose_a_worker() -> list[object]:
            waiting = [asyncio.create_task(model.generate([5, 6, 7], max_tokens=250, **GREEDY)) for _ in range(4)]
            while unfinished(model) < 4:  # noqa: ASYNC110 - the front end counts, and tells nobody
                await asyncio.sleep(0.001)
            victim = max(workers(before), key=lambda process: process.create_time())
            os.kill(victim.pid, 9)
            return await asyncio.gather(*waiting, return_exceptions=True)

        for outcome in asyncio.run(lose_a_worker()):
            assert isinstance(outcome, EngineDeadError), outcome
        with pytest.raises(EngineDeadError, match="make a new one"):
            asyncio.run(model.generate([1, 2], max_tokens=1, **GREEDY))
    with started(folder, skip_tokenizer_init=True, max_model_len=256) as again:  # the same process starts anew
        _, [handle] = generate(again, prompts[0], max_tokens=4, capture_layers=ALL)
        check(handle, hf, None)


@pytest.mark.slow
def test_three_workers_of_the_demo_model(demo_model_path: str, hf: Oracle, model: VLLMSteerModel) -> None:
    """Its nine heads are three for each: rows as Hugging Face's, and the text of one worker."""
    generator = torch.Generator().manual_seed(4)
    v, u = torch.randn(2, model.hidden_size, generator=generator)
    used = [SteeringSpec.none(), SteeringSpec.at([7, 20], AddSpec(v, 8.0), ProjectionCapSpec(u, -1.0, 1.0))]
    prompts = ["The capital of France is", "Rivers carry water from the mountains to"]
    asked = [(prompt, steering) for prompt in prompts for steering in used]
    options = {"temperature": 0.0, "max_tokens": 12, "steering": [steering for _, steering in asked]}
    alone = asyncio.run(model.generate([prompt for prompt, _ in asked], **options))
    with started(demo_model_path, max_model_len=128, tensor_parallel_size=3) as three:
        texts, handles = asyncio.run(
            three.generate([prompt for prompt, _ in asked], **options, capture_layers=range(three.layer_count))
        )
        asyncio.run(three.fetch_captures_batch(handles))
        digests = three._loop.call(three._client.rpc("chatspace_lab_digest"))
        assert (len(digests), len(set(digests))) == (3, 1)
    assert texts == alone
    for (_, steering), handle in zip(asked, handles, strict=True):
        residuals = hf.residuals(handle.token_ids, steering)
        for layer in handle.layer_indices:
            assert len(handle.captures[layer]) == 3
            assert error(handle.hidden(layer), residuals[layer]) < 1e-4, layer
