"""What the adapter for the V2 runner reads of a batch exists in the vLLM that is installed."""

from __future__ import annotations

import dataclasses

from chatspace_lab.runtime.v2 import BATCH_READS


def test_a_batch_has_what_is_read() -> None:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    assert set(BATCH_READS) <= {field.name for field in dataclasses.fields(InputBatch)}
