"""A lab in this process for what needs no kernel; kernels are started by tests/session/kernels.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from chatspace_lab import LabSession
from tests.conftest import held, wait_until


@pytest.fixture(scope="package")
def shared_lab(demo_model_path: str) -> Iterator[LabSession]:
    """The demo model in float32."""
    lab = LabSession(demo_model_path, dtype="float32", max_model_len=1024, kv_cache_memory_bytes=1 << 28)
    yield lab
    lab.close()


@pytest.fixture
def lab(shared_lab: LabSession) -> Iterator[LabSession]:
    """Unsteered and without a history at the start of each test, and holding nothing at its end."""
    shared_lab.history.clear()
    shared_lab.partial = None
    shared_lab.aio.norms.clear()
    shared_lab.aio.names.forget()
    yield shared_lab
    asyncio.run(shared_lab.aio.clear_all_vectors())
    nothing = {"requests": 0, "buffers": 0, "nbytes": 0}
    wait_until(lambda: nothing.items() <= held(shared_lab.model).items(), what=f"{held(shared_lab.model)} is dropped")
