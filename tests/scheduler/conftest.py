"""Engines of a tiny model that force the scheduler onto one path or another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chatspace_lab import VLLMSteerModel
from tests.conftest import started
from tests.oracle import Oracle
from tests.tiny import build


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build("llama", tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="session")
def tiny_hf(tiny_path: str) -> Oracle:
    return Oracle(tiny_path)


@pytest.fixture(scope="module")
def roomy(tiny_path: str) -> Iterator[VLLMSteerModel]:
    """Prefix caching on, memory for everything."""
    with started(
        tiny_path, skip_tokenizer_init=True, enable_prefix_caching=True, max_model_len=256, block_size=32
    ) as model:
        yield model


@pytest.fixture(scope="module")
def narrow(tiny_path: str) -> Iterator[VLLMSteerModel]:
    """At most 16 tokens a step."""
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_chunked_prefill": True}
    with started(tiny_path, skip_tokenizer_init=True, max_model_len=256, **options) as model:
        yield model


@pytest.fixture(scope="module")
def crowded(tiny_path: str) -> Iterator[VLLMSteerModel]:
    """A KV cache that does not hold the requests that are under way, and a small token budget."""
    options = {
        "num_gpu_blocks_override": 12,
        "block_size": 32,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
    }
    with started(tiny_path, skip_tokenizer_init=True, max_model_len=160, **options) as model:
        yield model
