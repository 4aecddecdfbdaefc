"""Engines and oracles that tests share. Starting an engine takes half a minute, so there is one of the demo model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import pytest
import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from chatspace_lab import VLLMSteeringConfig, VLLMSteerModel
from chatspace_lab.models import demo_model
from tests.oracle import Oracle

ENGINES = {"demo_engine", "shared_lab", "roomy", "narrow", "crowded", "small"}
"""Fixtures that are an engine. Tests that start one of their own carry the mark ``engine``."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs an engine, a browser, or is a notebook: ``make test-fast`` leaves it out."""
    for item in items:
        if ENGINES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.engine)
        if item.path.parent.name == "browser":
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.engine)
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.notebook)


NOTHING = {"requests": 0, "buffers": 0, "nbytes": 0}
"""What a worker holds for us when nobody wants anything."""


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0, what: str = "") -> None:
    """Poll until ``condition`` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.02)


def held(model: VLLMSteerModel) -> dict[str, int]:
    """Return what the worker holds for us."""
    found = model._loop.call(model._client.stats())
    return {name: found[name] for name in NOTHING}


def unfinished(model: VLLMSteerModel) -> int:
    """Return how many requests the engine's front end still has."""
    return model._client._engine.output_processor.get_num_unfinished_requests()


def children() -> set[psutil.Process]:
    """Return the processes below this one. Python's resource tracker stays until the end, and is left out."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.add(child)
    return found


def shared_memory(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the files in /dev/shm that these processes have mapped or open."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            found |= {mapping.path for mapping in process.memory_maps() if mapping.path.startswith("/dev/shm/")}
            found |= {file.path for file in process.open_files() if file.path.startswith("/dev/shm/")}
    return {path for path in found if not path.endswith("(deleted)")}


@contextlib.contextmanager
def started(path: str, *, enforce_eager: bool | None = True, **config: Any) -> Iterator[VLLMSteerModel]:
    """Start an engine for a ``with`` block, and check that nothing of it is left afterwards."""
    before = children()
    options = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 27, **config}
    model = VLLMSteerModel(VLLMSteeringConfig(path, **options), enforce_eager=enforce_eager)
    shared = shared_memory(children() - before)
    try:
        yield model
    finally:
        model.close()
        wait_until(lambda: children() <= before, what="the engine's processes end")
        wait_until(lambda: not any(map(os.path.exists, shared)), what=f"{shared} is freed")


@pytest.fixture(scope="session")
def demo_model_path() -> str:
    return demo_model()


@pytest.fixture(scope="session")
def hf(demo_model_path: str) -> Oracle:
    return Oracle(demo_model_path)


@pytest.fixture(scope="session")
def demo_engine(demo_model_path: str) -> Iterator[VLLMSteerModel]:
    """The model of the contract's first example, in float32."""
    cfg = VLLMSteeringConfig(
        model_name=demo_model_path,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        max_model_len=2048,
        dtype="float32",
    )
    model = VLLMSteerModel(cfg, bootstrap_layers=(2, 4, 6))
    yield model
    model.close()


@pytest.fixture
def model(demo_engine: VLLMSteerModel) -> Iterator[VLLMSteerModel]:
    """The shared engine: unsteered at the start of each test, and holding nothing at its end."""
    yield demo_engine
    asyncio.run(demo_engine.clear_all_vectors())
    demo_engine._steering.stack.clear()
    wait_until(lambda: held(demo_engine) == NOTHING, what=f"the worker drops everything, it holds {held(demo_engine)}")
    assert unfinished(demo_engine) == 0
    assert demo_engine._client.captures.held_bytes == 0


@pytest.fixture
def vector(demo_engine: VLLMSteerModel) -> torch.Tensor:
    """A vector that is the same in each run, about as long as the residual stream in the middle of the model."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(demo_engine.hidden_size, generator=generator)
