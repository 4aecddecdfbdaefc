"""The command ``python -m tests.scheduler.load``, for seconds: rows right, nothing left behind."""

from __future__ import annotations

import asyncio

from chatspace_lab import VLLMSteerModel
from tests.oracle import Oracle
from tests.scheduler.load import load


def test_many_requests_with_steering_and_captures_of_their_own(roomy: VLLMSteerModel, tiny_hf: Oracle) -> None:
    lists: list[str] = []
    report = asyncio.run(load(roomy, tiny_hf, seconds=6, concurrent=96, sample=12, tell=lists.append))
    assert report.lists == len(lists)
    assert report.compared == 12 * report.lists
    assert report.rows > 100
    assert report.wrong == []
    assert report.left_behind() == []
