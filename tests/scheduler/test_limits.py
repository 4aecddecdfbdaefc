"""What unfetched captures may take is bounded; past it the newest request learns of it, and nobody else suffers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from chatspace_lab import CaptureHandle, VLLMSteerModel
from chatspace_lab.errors import CaptureLimitError
from tests.conftest import held, started, wait_until
from tests.oracle import Oracle
from tests.scheduler.test_paths import ALL, GREEDY, check, generate

LIMIT = 1 << 20
"""Bytes; a row of all layers takes 1,024."""


@pytest.fixture(scope="module")
def small(tiny_path: str) -> Iterator[VLLMSteerModel]:
    with started(tiny_path, skip_tokenizer_init=True, max_model_len=256, max_capture_bytes=LIMIT) as model:
        yield model


def check_all(model: VLLMSteerModel, hf: Oracle, handles: list[CaptureHandle]) -> None:
    """Fetch, compare and close; then nothing is left."""
    asyncio.run(model.fetch_captures_batch(handles))
    for handle in handles:
        check(handle, hf, None)
        handle.close()
    wait_until(lambda: held(model)["nbytes"] == 0, what="the worker drops everything")


def test_a_prompt_that_does_not_fit_beside_what_nobody_fetched(small: VLLMSteerModel, tiny_hf: Oracle) -> None:
    async def main() -> list[CaptureHandle]:
        _, kept = await small.generate([[9] * 220, [11] * 230], capture_layers=ALL, max_tokens=2, **GREEDY)
        _, more = await small.generate([[12] * 240, [13] * 225], capture_layers=ALL, max_tokens=2, **GREEDY)
        with pytest.raises(
            CaptureLimitError, match=r"4 captures that were not fetched hold .* max_capture_bytes is 1,048,576"
        ):
            await small.generate([[5] * 200], capture_layers=ALL, max_tokens=2, **GREEDY)
        assert (await small.generate([[5] * 200], max_tokens=2, raw_output=True, **GREEDY))[0].finished
        kept[0].close()
        _, [last] = await small.generate([[5] * 200], capture_layers=ALL, max_tokens=2, **GREEDY)
        return [kept[1], *more, last]

    check_all(small, tiny_hf, asyncio.run(main()))


def test_answers_that_grow_past_the_limit(small: VLLMSteerModel, tiny_hf: Oracle) -> None:
    """The prompts fit, their answers together do not: which rows are there is right, the others' handles say why."""
    prompts = [[20 + index] * (6 + index) for index in range(6)]

    async def main() -> tuple[list[str], int]:
        texts, handles = await small.generate(prompts, capture_layers=ALL, max_tokens=240, raw_output=True, **GREEDY)
        failures = []
        for handle in handles:
            try:
                await handle.fetch()
            except CaptureLimitError as error:
                failures.append(str(error))
                handle.close()
            else:
                check(handle, tiny_hf, None)
                handle.close()
        assert all(len(text.outputs[0].token_ids) == 240 for text in texts)
        return failures, len(handles)

    failures, count = asyncio.run(main())
    assert 0 < len(failures) < count
    assert all("fetch or close earlier handles" in failure for failure in failures)
    wait_until(lambda: held(small)["nbytes"] == 0, what="the worker drops everything")
    _, [after] = generate(small, [7, 8, 9], max_tokens=5, capture_layers=ALL)
    check(after, tiny_hf, None)


def test_captures_that_fill_the_limit_exactly(small: VLLMSteerModel, tiny_hf: Oracle) -> None:
    """Nothing is reserved for a token that is never computed: the last byte can be used, and no more than that."""
    rows = LIMIT // (8 * 1024)
    prompts = [[20 + index] * (rows - 9 * (index % 2)) for index in range(8)]  # half of them answer with ten tokens

    async def main() -> list[CaptureHandle]:
        answers = await asyncio.gather(
            *(
                small.generate(prompt, capture_layers=ALL, max_tokens=1 + rows - len(prompt), **GREEDY)
                for prompt in prompts
            )
        )
        handles = [handle for _, [handle] in answers]
        assert small._client.captures.held_bytes == held(small)["nbytes"] == LIMIT
        with pytest.raises(CaptureLimitError):
            await small.generate([5], capture_layers=[0], max_tokens=1, **GREEDY)
        return handles

    check_all(small, tiny_hf, asyncio.run(main()))
