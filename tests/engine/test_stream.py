"""Streams: the same answer as in one piece, from any loop, and let go of however they end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from typing import Any

import pytest
import torch

from chatspace_lab import AddSpec, SteeringSpec, VLLMSteerModel
from chatspace_lab.engine.stream import TextStream
from chatspace_lab.errors import RequestError
from tests.conftest import NOTHING, held, unfinished, wait_until
from tests.oracle import Oracle, error

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Count to five."}]
SHORT: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
LONG: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1500, "ignore_eos": True}


async def until(condition: Any) -> None:
    await asyncio.to_thread(wait_until, condition)


async def rest(stream: TextStream) -> None:
    async for _ in stream:
        pass


def test_a_stream_says_what_a_call_says(model: VLLMSteerModel, vector: torch.Tensor) -> None:
    spec = SteeringSpec.at(9, AddSpec(vector, 20.0))

    async def main() -> None:
        for arguments in ({}, {"steering": spec}):
            (whole,) = await model.generate(PROMPT, **SHORT, **arguments)
            stream = model.stream(PROMPT, **SHORT, **arguments)
            deltas = [delta async for delta in stream]
            assert "".join(delta.text for delta in deltas) == stream.text == whole
            assert [token for delta in deltas for token in delta.token_ids] == stream.token_ids
            assert len(stream.token_ids) == 12
            assert len(deltas) > 3
            assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert deltas[-1].finish_reason == stream.finish_reason == "length"
            assert [delta async for delta in stream] == []

            (answer,) = await model.chat(MESSAGES, **SHORT, **arguments)
            async with model.stream_chat(MESSAGES, **SHORT, **arguments) as chat:
                async for _ in chat:
                    pass
            assert chat.response() == answer
            assert chat.response().finish_reason == answer.finish_reason

    asyncio.run(main())


def test_a_stream_follows_the_session(model: VLLMSteerModel, vector: torch.Tensor) -> None:
    async def main() -> None:
        stream = model.stream(PROMPT, **SHORT)
        await model.set_layer_vector(9, vector * 20)  # before it begins: in force for it
        async for _ in stream:
            pass
        assert [stream.text] == await model.generate(PROMPT, **SHORT)
        await model.clear_all_vectors()
        assert [stream.text] != await model.generate(PROMPT, **SHORT)

    asyncio.run(main())


def test_a_continued_chat(model: VLLMSteerModel) -> None:
    async def main() -> None:
        messages = [*MESSAGES, {"role": "assistant", "content": "One, two"}]
        stream = model.stream_chat(messages, **SHORT, chat_options={"continue_final_message": True})
        async for _ in stream:
            pass
        response = stream.response()
        assert response.prefill == "One, two"
        assert response == "One, two" + stream.text

    asyncio.run(main())


def test_captures_of_a_stream(model: VLLMSteerModel, hf: Oracle) -> None:
    async def main() -> None:
        stream = model.stream(PROMPT, **SHORT, capture_layers=[0, 29])
        async for _ in stream:
            assert stream.handle.state == "running"
            break
        async for _ in stream:
            pass
        handle = await stream.handle.fetch()
        assert handle.token_ids == [*model.tokenizer(PROMPT)["input_ids"], *stream.token_ids[:-1]]
        wanted = hf.residuals(handle.token_ids)
        assert error(handle.hidden(0), wanted[0]) < 1e-4
        assert error(handle.hidden(29), wanted[29]) < 1e-4

    asyncio.run(main())


def test_leaving_early_aborts_and_keeps_the_captures_so_far(model: VLLMSteerModel, hf: Oracle) -> None:
    async def main() -> None:
        async with model.stream(PROMPT, **LONG, capture_layers=[29]) as stream:
            async for _ in stream:
                if len(stream.token_ids) >= 5:
                    break
        assert unfinished(model) == 0
        assert stream.finish_reason is None
        handle = await stream.handle.fetch()
        assert handle.generated_len == len(stream.token_ids) >= 5
        assert error(handle.hidden(29), hf.residuals(handle.token_ids)[29]) < 1e-4

    asyncio.run(main())


def test_a_bare_break_aborts_too(model: VLLMSteerModel, vector: torch.Tensor) -> None:
    async def main() -> None:
        async for _ in model.stream(PROMPT, **LONG):
            break
        gc.collect()
        await until(lambda: unfinished(model) == 0)
        async with asyncio.timeout(5):
            await model.set_layer_vector(4, vector)

    asyncio.run(main())


def test_a_cancelled_consumer_aborts(model: VLLMSteerModel) -> None:
    async def main() -> None:
        async def consume() -> None:
            async for _ in model.stream(PROMPT, **LONG):
                pass

        task = asyncio.create_task(consume())
        await until(lambda: unfinished(model) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert unfinished(model) == 0

    asyncio.run(main())


def test_a_loop_that_ends_takes_its_stream_along(model: VLLMSteerModel) -> None:
    async def main() -> Any:
        stream = model.stream(PROMPT, **LONG)
        await anext(stream)
        return stream

    stream = asyncio.run(main())
    assert stream.text
    del stream
    gc.collect()
    wait_until(lambda: unfinished(model) == 0)


def test_left_while_it_waits_for_the_lock(model: VLLMSteerModel, vector: torch.Tensor) -> None:
    async def main() -> None:
        running = asyncio.create_task(model.generate(PROMPT, **LONG))
        await until(lambda: unfinished(model) == 1)
        change = asyncio.create_task(model.set_layer_vector(4, vector))
        await until(lambda: len(model._steering.lock._queue) == 1)
        stream = model.stream(PROMPT, **LONG, capture_layers=[0])
        waiting = asyncio.create_task(anext(stream))
        await until(lambda: len(model._steering.lock._queue) == 2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert stream.handle.state == "closed"  # it never began: there is nothing to fetch
        running.cancel()
        await asyncio.wait([running])
        await change

    asyncio.run(main())


def test_left_before_the_first_token(model: VLLMSteerModel) -> None:
    async def main() -> None:
        for steps in range(0, 40, 4):
            stream = model.stream(PROMPT, **LONG, capture_layers=[0, 3])
            waiting = asyncio.create_task(anext(stream))
            for _ in range(steps):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            await stream.aclose()
            assert stream.handle.state in ("ready", "closed")  # it knows that it was left, also if it never began
            if stream.handle.state == "ready":
                await stream.handle.fetch()
                assert stream.handle.hidden(3).shape == (len(stream.handle.token_ids), model.hidden_size)
            stream.handle.close()
        await until(lambda: held(model) == NOTHING)
        assert unfinished(model) == 0

    asyncio.run(main())


def test_a_handle_closed_while_the_stream_runs(model: VLLMSteerModel) -> None:
    async def main() -> None:
        for after in range(3):
            stream = model.stream(PROMPT, **SHORT, capture_layers=[0])
            if after == 0:
                stream.handle.close()
            count = 0
            async for _ in stream:
                count += 1
                if count == after:
                    stream.handle.close()
            assert len(stream.token_ids) == 12
        await until(lambda: held(model) == NOTHING)

    asyncio.run(main())


def test_never_started(model: VLLMSteerModel) -> None:
    async def main() -> None:
        stream = model.stream(PROMPT, **SHORT, capture_layers=[0])
        await stream.aclose()
        assert [delta async for delta in stream] == []
        assert unfinished(model) == 0

    asyncio.run(main())


def test_never_started_and_dropped(model: VLLMSteerModel) -> None:
    """Nothing was captured, so nothing is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for layers in ({"read_layers": [0]}, {"capture_layers": [0]}):
            model.stream(PROMPT, **SHORT, **layers)
            stream = model.stream(PROMPT, **SHORT, **layers)
            asyncio.run(stream.aclose())
            del stream
            gc.collect()
    assert not [each for each in caught if issubclass(each.category, ResourceWarning)]


def test_a_stream_read_on_one_loop_after_the_other(model: VLLMSteerModel) -> None:
    whole = asyncio.run(model.generate(PROMPT, **SHORT))
    for steps in (1, 5):
        stream = model.stream(PROMPT, **SHORT)
        for _ in range(steps):
            asyncio.run(anext(stream))  # type: ignore[arg-type]
        asyncio.run(asyncio.wait_for(rest(stream), 30))
        assert [stream.text] == whole
        assert len(stream.token_ids) == 12
    left = model.stream(PROMPT, **LONG)
    asyncio.run(anext(left))  # type: ignore[arg-type]
    asyncio.run(asyncio.wait_for(left.aclose(), 30))
    assert unfinished(model) == 0
    assert 0 < len(left.token_ids) < 1500


def test_one_prompt_and_one_sample(model: VLLMSteerModel) -> None:
    with pytest.raises(RequestError, match="one prompt"):
        model.stream([PROMPT, PROMPT], **SHORT)
    with pytest.raises(RequestError, match="one prompt"):
        model.stream_chat([MESSAGES, MESSAGES], **SHORT)
    with pytest.raises(RequestError, match="one sample"):
        model.stream(PROMPT, n=2)
    with pytest.raises(RequestError, match="one SteeringSpec"):
        model.stream(PROMPT, **SHORT, steering=[SteeringSpec.none()])


STOP = "these are forty characters that never come"
HELD: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "stop": [STOP]}


@pytest.mark.parametrize("reading", [{}, {"read_layers": [3]}])
@pytest.mark.parametrize("how", ["left", "dropped", "cancelled"])
def test_a_stream_that_is_left_has_the_text_of_all_its_tokens(model: VLLMSteerModel, how: str, reading: Any) -> None:
    """The engine holds text back in which a stop string could begin."""

    async def main() -> None:
        (whole,) = await model.generate(PROMPT, **HELD)
        stream = model.stream(PROMPT, **HELD, **reading)

        async def read() -> None:
            async for _ in stream:
                if how != "cancelled" and len(stream.token_ids) >= 6:
                    return

        task = asyncio.create_task(read())
        if how == "cancelled":
            await until(lambda: len(stream.token_ids) >= 6)
            await cancelled(task)
        await task if how != "cancelled" else None
        text = model.tokenizer.decode(stream.token_ids)
        assert len(text) > 10
        assert stream.text == text == str(stream.response())
        if how == "left":
            await stream.aclose()
            assert stream.text == model.tokenizer.decode(stream.token_ids)
        assert whole.startswith(stream.text)

    asyncio.run(main())


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_a_stream_that_ends_has_no_part_of_its_stop_string(model: VLLMSteerModel) -> None:
    async def main() -> None:
        (whole,) = await model.generate(PROMPT, **{**HELD, "stop": None})
        stop = whole[20:28]
        stream = model.stream(PROMPT, **{**HELD, "stop": [stop]})
        pieces = [delta.text async for delta in stream]
        assert "".join(pieces) == stream.text == whole[: whole.index(stop)]
        assert stream.finish_reason == "stop"

    asyncio.run(main())


# -- prompts that end inside a character -------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {"stop": [STOP]}, {"stop": ["zzz"], "include_stop_str_in_output": True}])
def test_a_prompt_that_ends_inside_a_character_is_not_repeated(model: VLLMSteerModel, sampling: Any) -> None:
    tokenizer = model.tokenizer
    ids = tokenizer("What a nice day 🎉")["input_ids"]
    last = ids[-1]

    async def main() -> None:
        for given, bias in ((ids[:-1], {last: 100.0}), (ids[:-1], None), (ids[:-2], {ids[-2]: 100.0, last: 100.0})):
            options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1 if bias else 8, "logit_bias": bias}
            options |= {"ignore_eos": True, **sampling}
            raw = await model.generate(given, raw_output=True, **options)
            output = raw[0].outputs[0]
            both = tokenizer.decode([*given, *output.token_ids])
            assert both.endswith(output.text)
            assert "nice day" not in output.text
            if bias and given == ids[:-1]:
                assert output.text == "🎉"
            assert [output.text] == await model.generate(given, **options)
            stream = model.stream(given, **options)
            assert "".join([delta.text async for delta in stream]) == stream.text == output.text
            stream = model.stream(given, **{**options, "max_tokens": 30})
            async for _ in stream:
                if len(stream.token_ids) >= 4:
                    break
            await stream.aclose()
            assert "nice day" not in stream.text

    asyncio.run(main())


def test_a_stop_string_in_a_prompt_that_ends_inside_a_character(model: VLLMSteerModel) -> None:
    ids = model.tokenizer("What a nice day 🎉")["input_ids"]
    with pytest.raises(RequestError, match="stop: the prompt has 'nice' in its text and ends inside a character"):
        asyncio.run(model.generate(ids[:-1], **SHORT, stop=["nice"]))
    assert asyncio.run(model.generate(ids, **SHORT, stop=["nice"]))
