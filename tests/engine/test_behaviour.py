"""How a running engine behaves: cancelled, used from many loops and threads, and never holding what nobody wants."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from chatspace_lab import AddSpec, LabError, SteeringSpec, VLLMSteerModel
from chatspace_lab.errors import (
    CaptureClosedError,
    CaptureError,
    CaptureNotFetchedError,
    PromptTooLongError,
    ReadOnlyError,
    RequestError,
    SteeringError,
)
from tests.conftest import NOTHING, held, unfinished, wait_until
from tests.oracle import Oracle, error

PROMPT = "The capital of France is"
LONG: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1500, "ignore_eos": True}
SHORT: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    await asyncio.to_thread(wait_until, condition, timeout_s)


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def prompt_rows(model: VLLMSteerModel, layer: int, **arguments: Any) -> torch.Tensor:
    _, (handle,) = await model.generate(PROMPT, **SHORT, capture_layers=[layer], **arguments)
    await handle.fetch()
    return handle.hidden(layer)[: handle.prompt_len]


# -- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", [None, [0, 5]])
def test_cancelling_a_generate_frees_its_lock_and_the_engine(model: VLLMSteerModel, capture: Any, vector: Any) -> None:
    async def main() -> None:
        task = asyncio.create_task(model.generate([PROMPT] * 3, **LONG, capture_layers=capture))
        await until(lambda: unfinished(model) == 3)
        await cancelled(task)
        assert unfinished(model) == 0
        async with asyncio.timeout(5):
            await model.set_layer_vector(4, vector)
        await until(lambda: held(model) == NOTHING)
        assert (await model.generate(PROMPT, **SHORT))[0]

    asyncio.run(main())


def test_cancelling_again_while_the_first_takes_effect(model: VLLMSteerModel, vector: Any) -> None:
    """As ``asyncio.gather`` does to its calls when one of them fails and the caller then ends the others."""
    steering = SteeringSpec.at(4, AddSpec(vector))

    async def main(turns: int) -> None:
        task = asyncio.create_task(model.generate([PROMPT] * 3, **LONG, capture_layers=[0, 5], steering=steering))
        await until(lambda: unfinished(model) == 3)
        task.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        await cancelled(task)
        assert unfinished(model) == 0

    gc.disable()  # what only the collector finds is held
    try:
        for turns in range(8):
            model._loop.call(main(turns))  # there, every turn of the loop is one of the call's own
            wait_until(lambda: held(model) == NOTHING, what=f"cancelled again after {turns} turns: all is dropped")
    finally:
        gc.enable()


def test_cancelling_a_generate_that_waits_for_the_lock(model: VLLMSteerModel, vector: Any) -> None:
    async def main() -> None:
        running = asyncio.create_task(model.generate(PROMPT, **LONG))
        await until(lambda: unfinished(model) == 1)
        change = asyncio.create_task(model.set_layer_vector(4, vector))
        await until(lambda: len(model._steering.lock._queue) == 1)
        waiting = asyncio.create_task(model.generate(PROMPT, **SHORT, capture_layers=[0]))
        await until(lambda: len(model._steering.lock._queue) == 2)
        await cancelled(waiting)
        await cancelled(change)
        assert not model.export_steering_spec()
        await cancelled(running)
        assert (await model.generate(PROMPT, **SHORT))[0]

    asyncio.run(main())


def test_a_timeout_works(model: VLLMSteerModel) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await model.chat([{"role": "user", "content": "Tell a story."}], **LONG)
        assert unfinished(model) == 0

    asyncio.run(main())


def test_cancelling_a_fetch_leaks_nothing(model: VLLMSteerModel) -> None:
    async def main() -> None:
        for _ in range(5):
            _, handles = await model.generate([PROMPT * 10] * 4, **SHORT, capture_layers=list(range(30)))
            task = asyncio.create_task(model.fetch_captures_batch(handles))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            for handle in handles:
                handle.close()
        await until(lambda: held(model) == NOTHING)

    asyncio.run(main())


# -- loops and threads -----------------------------------------------------------------------------------------------


def test_two_runs_in_a_row_and_handles_that_cross_them(model: VLLMSteerModel) -> None:
    first, handles = asyncio.run(model.generate(PROMPT, **SHORT, capture_layers=[3]))
    asyncio.run(model.fetch_captures_batch(handles))
    second, _ = asyncio.run(model.generate(PROMPT, **SHORT)), None
    assert first == second
    assert handles[0].hidden(3).shape[0] == len(handles[0].token_ids)


def test_from_four_threads_each_with_its_own_vector(model: VLLMSteerModel) -> None:
    """Each thread's requests are steered by its own vector, under load, and nobody else's."""
    vectors = [torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    plain = asyncio.run(prompt_rows(model, 7))
    failures: list[BaseException] = []

    def work(vector: torch.Tensor) -> None:
        async def many() -> None:
            for _ in range(5):
                rows = await asyncio.gather(
                    *(prompt_rows(model, 7, steering=SteeringSpec.at(7, AddSpec(vector, k))) for k in (1.0, 20.0))
                )
                for k, got in zip((1.0, 20.0), rows, strict=True):
                    assert error(got, plain + k * vector) < 1e-4

        try:
            asyncio.run(many())
        except BaseException as failure:  # noqa: BLE001 - carried to the test's own thread
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(vector,)) for vector in vectors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_sixteen_tasks_with_their_own_vectors_in_one_batch(model: VLLMSteerModel) -> None:
    generator = torch.Generator().manual_seed(3)
    vectors = torch.randn(16, model.hidden_size, generator=generator) * 30

    async def main() -> None:
        alone = []
        for vector in vectors:
            alone += await model.generate(PROMPT, **SHORT, steering=SteeringSpec.at(9, AddSpec(vector)))
        assert len(set(alone)) > 8
        for _ in range(3):
            tasks = [model.generate(PROMPT, **SHORT, steering=SteeringSpec.at(9, AddSpec(v))) for v in vectors]
            assert [texts[0] for texts in await asyncio.gather(*tasks)] == alone

    asyncio.run(main())


# -- steering is put back --------------------------------------------------------------------------------------------


def test_steering_is_restored_after_an_exception(model: VLLMSteerModel, vector: Any) -> None:
    before, inside = SteeringSpec.at(3, AddSpec(vector, 0.5)), SteeringSpec.at(4, AddSpec(vector))

    async def main() -> None:
        await model.apply_steering_spec(before)

        async def block() -> None:
            async with model.steering(inside):
                assert model.export_steering_spec() == inside
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await block()
        assert model.export_steering_spec() == before

    asyncio.run(main())


def test_steering_is_restored_after_a_cancellation(model: VLLMSteerModel, vector: Any) -> None:
    before, inside = SteeringSpec.at(3, AddSpec(vector, 0.5)), SteeringSpec.at(4, AddSpec(vector))

    async def main() -> None:
        await model.apply_steering_spec(before)

        async def block() -> None:
            async with model.steering(inside):
                await model.generate(PROMPT, **LONG)

        task = asyncio.create_task(block())
        await until(lambda: unfinished(model) == 1)
        await cancelled(task)
        assert model.export_steering_spec() == before
        assert unfinished(model) == 0

    asyncio.run(main())


def test_steering_is_restored_whenever_the_entry_is_cancelled(model: VLLMSteerModel, vector: Any) -> None:
    """Cancelled at each step of entering: also when the push has happened and its answer is under way."""
    inside = SteeringSpec.at(4, AddSpec(vector))

    async def main() -> None:
        for steps in range(30):

            async def block() -> None:
                async with model.steering(inside):
                    await asyncio.Event().wait()

            task = asyncio.create_task(block())
            for _ in range(steps):
                await asyncio.sleep(0)
            await cancelled(task)
            assert not model.export_steering_spec(), f"cancelled after {steps} steps"
            assert not model._steering.stack

    asyncio.run(main())


def test_steering_is_restored_over_what_was_pushed_inside(model: VLLMSteerModel, vector: Any) -> None:
    before, inside, more = (SteeringSpec.at(layer, AddSpec(vector)) for layer in (3, 4, 5))

    async def main() -> None:
        await model.push_steering_spec(before)

        async def block() -> None:
            async with model.steering(inside):
                await model.push_steering_spec(more)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await block()
        assert model.export_steering_spec() == before
        await model.pop_steering_spec()
        assert not model.export_steering_spec()
        with pytest.raises(SteeringError, match="nothing was pushed"):
            await model.pop_steering_spec()

    asyncio.run(main())


def test_a_task_made_in_a_steering_block_is_steered(model: VLLMSteerModel, vector: Any) -> None:
    """Also if it has not begun when the block is left: changes come behind the requests that were made before."""

    async def main() -> None:
        plain = await prompt_rows(model, 5)
        async with model.steering(SteeringSpec.at(5, AddSpec(vector))):
            task = asyncio.create_task(prompt_rows(model, 5))
        assert error(await task, plain + vector) < 1e-5
        assert error(await prompt_rows(model, 5), plain) < 1e-5

    asyncio.run(main())


def test_a_bad_spec_changes_nothing(model: VLLMSteerModel, vector: Any) -> None:
    before = SteeringSpec.at(3, AddSpec(vector))
    bad = SteeringSpec.at([4, 999], AddSpec(vector))

    async def main() -> None:
        await model.apply_steering_spec(before)
        for attempt in (model.apply_steering_spec, model.push_steering_spec):
            with pytest.raises(SteeringError, match="layer 999"):
                await attempt(bad)
        with pytest.raises(SteeringError, match="layer 999"):
            async with model.steering(bad):
                pass
        assert model.export_steering_spec() == before
        assert not model._steering.stack

    asyncio.run(main())


def test_set_clear_set_adds_the_vector_once(model: VLLMSteerModel, vector: Any) -> None:
    async def main() -> None:
        plain = await prompt_rows(model, 5)
        await model.set_layer_vector(5, vector)
        await model.clear_layer_vector(5)
        await model.set_layer_vector(5, vector)
        await model.set_layer_vector(5, vector)
        assert error(await prompt_rows(model, 5), plain + vector) < 1e-5
        for scale in (8.0, 0.0, -8.0, 0.0):
            await model.set_layer_vector(5, vector, scale)
            assert error(await prompt_rows(model, 5), plain + scale * vector) < 1e-5

    asyncio.run(main())


def test_a_vector_edited_in_place(model: VLLMSteerModel, vector: Any) -> None:
    mine = vector.clone()

    async def main() -> None:
        plain = await prompt_rows(model, 5)
        await model.set_layer_vector(5, mine)
        mine.mul_(3.0)  # what is in force is a copy
        assert error(await prompt_rows(model, 5), plain + vector) < 1e-5
        await model.set_layer_vector(5, mine)
        assert error(await prompt_rows(model, 5), plain + 3 * vector) < 1e-5

    asyncio.run(main())


def test_a_change_waits_for_requests_that_were_made_before_it(model: VLLMSteerModel, vector: Any) -> None:
    """Also for those whose tasks have not run yet, as in the contract's example."""

    async def main() -> None:
        plain = await prompt_rows(model, 5)
        tasks = []
        for scale in (1.0, 2.0, 3.0):
            tasks.append(asyncio.create_task(prompt_rows(model, 5)))
            await model.set_layer_vector(5, vector, scale)
        for scale, rows in zip((0.0, 1.0, 2.0), await asyncio.gather(*tasks), strict=True):
            assert error(rows, plain + scale * vector) < 1e-5

    asyncio.run(main())


def test_a_request_with_its_own_steering_needs_no_lock(model: VLLMSteerModel, vector: Any) -> None:
    spec = SteeringSpec.at(5, AddSpec(vector))

    async def main() -> None:
        async with asyncio.timeout(60):
            running = asyncio.create_task(model.generate(PROMPT, **LONG))
            await until(lambda: unfinished(model) == 1)
            change = asyncio.create_task(model.set_layer_vector(4, vector))
            await until(lambda: len(model._steering.lock._queue) == 1)
            assert (await model.generate(PROMPT, **SHORT, steering=spec))[0]
            assert (await model.generate(PROMPT, **SHORT, steering=SteeringSpec.none()))[0]
            await cancelled(running)
            await change

    asyncio.run(main())


# -- captures --------------------------------------------------------------------------------------------------------


def test_fetching_in_any_way(model: VLLMSteerModel, hf: Oracle) -> None:
    async def main() -> None:
        prompts = [PROMPT, "One two three", "Rivers carry water from", "def f(x):"]
        _, handles = await model.generate(prompts, **SHORT, capture_layers=[29, 0])
        assert all(handle.state == "ready" for handle in handles)
        with pytest.raises(CaptureNotFetchedError):
            _ = handles[0].captures
        await model.fetch_captures_batch([handles[3], handles[1]])  # two of four, in reverse order
        assert [handle.is_fetched for handle in handles] == [False, True, False, True]
        await model.fetch_captures_batch(handles[::-1])
        await model.fetch_captures_batch([*handles, *handles])  # again, and twice at once
        for no_handles in ([None], [handles], "handles"):
            with pytest.raises(CaptureError, match="expected a list of CaptureHandle"):
                await model.fetch_captures_batch(no_handles)
        assert await handles[0].fetch() is handles[0]
        for prompt, handle in zip(prompts, handles, strict=True):
            assert handle.layer_indices == (0, 29)
            assert handle.token_ids[: handle.prompt_len] == model.tokenizer(prompt)["input_ids"]
            wanted = hf.residuals(handle.token_ids)
            assert error(handle.hidden(0), wanted[0]) < 1e-4
            assert error(handle.hidden(29), wanted[29]) < 1e-4
            with pytest.raises(CaptureError, match="layer 4 was not captured"):
                handle.hidden(4)

    asyncio.run(main())


def test_fetching_at_once_from_many_tasks(model: VLLMSteerModel) -> None:
    async def main() -> None:
        _, handles = await model.generate([PROMPT] * 4, **SHORT, capture_layers=[1])
        await asyncio.gather(*(model.fetch_captures_batch(handles) for _ in range(5)))
        assert all(torch.allclose(handle.hidden(1), handles[0].hidden(1), atol=1e-4) for handle in handles)

    asyncio.run(main())


def test_after_close(model: VLLMSteerModel) -> None:
    async def main() -> None:
        _, (first, second, third) = await model.generate([PROMPT] * 3, **SHORT, capture_layers=[1])
        first.close()
        first.close()
        with pytest.raises(CaptureClosedError):
            await first.fetch()
        with pytest.raises(CaptureClosedError):
            _ = first.captures
        with pytest.raises(CaptureClosedError):
            await model.fetch_captures_batch([first, second])
        assert second.hidden(1).shape == (second.prompt_len + 5, model.hidden_size)  # the others arrive all the same
        async with third:
            await third.fetch()
            assert third.is_fetched
        with pytest.raises(CaptureClosedError):
            _ = third.captures

    asyncio.run(main())


def test_rows_outlive_their_handle(model: VLLMSteerModel) -> None:
    async def main() -> None:
        _, (handle,) = await model.generate(PROMPT * 30, **SHORT, capture_layers=list(range(30)))
        await handle.fetch()
        rows = handle.hidden(3)
        copy = rows.clone()
        handle.close()
        del handle
        gc.collect()
        for _ in range(3):  # further captures do not reuse memory that is still looked at
            _, (other,) = await model.generate("Something else " * 40, **SHORT, capture_layers=list(range(30)))
            await other.fetch()
        assert torch.equal(rows, copy)

    asyncio.run(main())


def test_a_dropped_handle_warns_and_frees_its_rows(model: VLLMSteerModel) -> None:
    result = asyncio.run(model.generate([PROMPT] * 2, **SHORT, capture_layers=[1]))
    assert held(model)["buffers"] == 2
    with pytest.warns(ResourceWarning, match="dropped without fetching or closing") as caught:
        del result
    assert len(caught) == 2
    wait_until(lambda: held(model) == NOTHING)


def test_a_call_that_failed_does_not_warn(model: VLLMSteerModel, vector: Any) -> None:
    bad = SteeringSpec.at(999, AddSpec(vector))

    async def main() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(LabError):
                await model.generate([PROMPT, "x" * 100_000], **SHORT, capture_layers=[1])
            with pytest.raises(SteeringError):
                await model.generate([PROMPT] * 2, **SHORT, capture_layers=[1], steering=[SteeringSpec.none(), bad])
            with pytest.raises(RequestError):
                model.stream(PROMPT, n=3, capture_layers=[1])
            task = asyncio.create_task(model.generate(PROMPT, **LONG, capture_layers=[1]))
            await until(lambda: unfinished(model) == 1)
            await cancelled(task)
            del task
            gc.collect()
        assert not [each for each in caught if issubclass(each.category, ResourceWarning)]

    asyncio.run(main())


def test_300_captures_that_nobody_fetches(model: VLLMSteerModel) -> None:
    """A third dropped, a third closed, a third cancelled under way: the worker's memory returns each time."""

    async def main() -> None:
        for _ in range(10):
            _, kept = await model.generate([PROMPT] * 10, temperature=0.0, max_tokens=2, capture_layers=[0, 15])
            for handle in kept:
                handle.close()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                dropped = await model.generate([PROMPT] * 10, temperature=0.0, max_tokens=2, capture_layers=[3])
                del dropped
                gc.collect()
            task = asyncio.create_task(model.generate([PROMPT] * 10, **LONG, capture_layers=[3]))
            await until(lambda: unfinished(model) == 10)
            await cancelled(task)
        await until(lambda: held(model) == NOTHING)
        assert model._client.captures.held_bytes == 0

    asyncio.run(main())


def test_samples_have_their_own_rows(model: VLLMSteerModel, hf: Oracle, vector: Any) -> None:
    spec = SteeringSpec.at(10, AddSpec(vector, 3.0))

    async def main() -> None:
        texts, handles = await model.generate(
            ["Once upon a time", PROMPT],
            n=3,
            temperature=1.0,
            seed=5,
            max_tokens=12,
            capture_layers=[9, 10, 29],
            steering=spec,
        )
        assert len(texts) == len(handles) == 6
        assert len(set(texts[:3])) == len(set(texts[3:])) == 3
        assert [(h.prompt_index, h.sample_index) for h in handles] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
        await model.fetch_captures_batch(handles)
        for text, handle in zip(texts, handles, strict=True):
            wanted = hf.residuals(handle.token_ids, spec)
            for layer in (9, 10, 29):
                assert error(handle.hidden(layer), wanted[layer]) < 1e-4
            answer = model.tokenizer.decode(handle.token_ids[handle.prompt_len :], skip_special_tokens=True)
            assert text.startswith(answer.rstrip("\ufffd"))  # a character may be cut after the last row's token

        (output,) = await model.generate(PROMPT, n=3, temperature=1.0, seed=5, max_tokens=4, raw_output=True)
        assert [sample.index for sample in output.outputs] == [0, 1, 2]

    asyncio.run(main())


DRAWN: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "seed": 0, "ignore_eos": True}


def test_a_prompt_that_is_repeated_gives_samples_of_its_own(model: VLLMSteerModel, vector: Any) -> None:
    async def main() -> None:
        eight = await model.generate(["The river"] * 8, **DRAWN)
        assert len(set(eight)) == 8
        assert (
            eight == await model.generate(["The river"] * 8, **DRAWN) == await model.generate("The river", n=8, **DRAWN)
        )
        assert eight == await model.generate(["The river"] * 2, n=4, **DRAWN)
        ids = model.tokenizer("The river")["input_ids"]
        assert eight[:3] == await model.generate(["The river", ids, {"prompt_token_ids": ids}], **DRAWN)
        conversation = [{"role": "user", "content": "Hello"}]
        chats = await model.chat([conversation] * 8, **DRAWN)
        assert len(set(chats)) == 8
        assert chats == await model.chat(conversation, n=8, **DRAWN)
        # Common random numbers: another prompt beside it, and the same one under other steering, change nothing.
        spec = SteeringSpec.at(9, AddSpec(vector, 1e-6))
        mixed = await model.generate(
            ["The river", "The sea", "The river", "The river", "The river"],
            steering=[SteeringSpec.none(), None, spec, None, spec],
            **DRAWN,
        )
        assert mixed[0] == mixed[2] == eight[0]
        assert mixed[3] == mixed[4] == eight[1]
        assert [mixed[1]] == await model.generate("The sea", **DRAWN)

    asyncio.run(main())


def test_what_a_running_engine_does_not_read_again_cannot_be_set(model: VLLMSteerModel) -> None:
    tokenizer, config = model.tokenizer, model.config
    for change, words in (
        (lambda: setattr(tokenizer, "chat_template", "x"), r"chat_options=\{'chat_template'"),
        (lambda: setattr(tokenizer, "eos_token", "x"), "eos_token cannot be changed.*copy.deepcopy"),
        (lambda: setattr(tokenizer, "padding_side", "left"), "padding_side cannot be changed"),
        (lambda: tokenizer.add_tokens(["<new>"]), "add_tokens cannot be changed"),
        (lambda: tokenizer.add_special_tokens({"pad_token": "<new>"}), "add_special_tokens cannot be changed"),
        (lambda: setattr(model, "tokenizer", "x"), "VLLMSteerModel.tokenizer is fixed while the engine runs"),
        (lambda: setattr(model, "max_model_len", 5), "max_model_len is fixed while.*VLLMSteeringConfig"),
        (lambda: setattr(model, "temperature", 0.0), "temperature does not exist.*pass it to the call"),
        (lambda: setattr(config, "max_model_len", 5), "max_model_len is fixed while the engine runs.*copy.deepcopy"),
    ):
        with pytest.raises(ReadOnlyError, match=words) as raised:
            change()
        assert isinstance(raised.value, AttributeError)
    with pytest.raises(TypeError):
        config.engine_args["seed"] = 5
    free = copy.deepcopy(config)
    free.max_model_len, free.engine_args["seed"] = 77, 5
    assert (config.max_model_len, free.max_model_len) == (2048, 77)
    mine = copy.deepcopy(tokenizer)
    mine.chat_template = "just this"
    assert mine.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "just this"
    assert tokenizer.chat_template != "just this"


def test_the_tokenizer_works_like_any(model: VLLMSteerModel, hf: Oracle, tmp_path: Any) -> None:
    view, plain = model.tokenizer, AutoTokenizer.from_pretrained(model.model_name)
    assert isinstance(view, PreTrainedTokenizerBase)
    batch, conversation = ["One", "Two <|im_end|> three"], [{"role": "user", "content": "Hi"}]
    for use in (
        lambda t: t(batch, padding=True)["input_ids"],
        lambda t: t(batch, padding=True, truncation=True, max_length=99, return_tensors="pt")["input_ids"].tolist(),
        lambda t: t.pad({"input_ids": [[1, 2], [3]]})["input_ids"],
        lambda t: t.encode("Hello", split_special_tokens=True),
        lambda t: (t.decode([5, 6]), t.batch_decode([[5], [6]]), t.tokenize("Hello there"), len(t), t.vocab_size),
        lambda t: t.apply_chat_template(conversation, tokenize=True, return_dict=False),
        lambda t: (t.all_special_tokens, t.special_tokens_map, t.convert_tokens_to_ids("<|im_end|>"), t.is_fast),
        lambda t: sorted(t.get_vocab().items())[:5],
        lambda t: len(t.save_pretrained(tmp_path)),
    ):
        assert use(view) == use(plain)
    assert (
        copy.copy(view)("x")["input_ids"]
        == pickle.loads(pickle.dumps(view))("x")["input_ids"]
        == plain("x")["input_ids"]
    )


def test_ends_of_answers(model: VLLMSteerModel, hf: Oracle) -> None:
    """However an answer ends: prompt + generated − 1 rows, right ones, each labelled."""
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    stop_token = model.tokenizer(" Paris")["input_ids"][0]
    ends: list[tuple[str, dict[str, Any]]] = [
        (PROMPT, {"max_tokens": 1}),
        (PROMPT, {"max_tokens": 2}),
        (PROMPT, {"max_tokens": 7}),
        (chat, {"max_tokens": 40}),  # end of sequence
        (chat, {"max_tokens": 40, "stop": ["of Fr"]}),
        (chat, {"max_tokens": 40, "stop_token_ids": [stop_token]}),
    ]

    async def main() -> None:
        for prompt, options in ends:
            (output,), (handle,) = await model.generate(
                prompt, temperature=0.0, capture_layers=[0, 29], raw_output=True, **options
            )
            generated = list(output.outputs[0].token_ids)
            await handle.fetch()
            sequence = [*model.tokenizer(prompt)["input_ids"], *generated]
            assert handle.token_ids == sequence[:-1]
            assert handle.positions == list(range(len(sequence) - 1))
            assert handle.generated_len == len(generated)
            wanted = hf.residuals(handle.token_ids)
            assert error(handle.hidden(0), wanted[0]) < 1e-4
            assert error(handle.hidden(29), wanted[29]) < 1e-4

    asyncio.run(main())


# -- bad requests ----------------------------------------------------------------------------------------------------


def test_one_bad_request_among_eight(model: VLLMSteerModel, vector: Any) -> None:
    prompts = [f"Number {index} is" for index in range(8)]

    async def main() -> None:
        wanted = await model.generate(prompts, **SHORT)

        def ask(index: int) -> Awaitable[Any]:
            bad = {"steering": SteeringSpec.at(999, AddSpec(vector))} if index == 3 else {}
            return model.generate(prompts[index], **SHORT, **bad)

        results = await asyncio.gather(*(ask(index) for index in range(8)), return_exceptions=True)
        assert isinstance(results[3], SteeringError)
        assert [r[0] for i, r in enumerate(results) if i != 3] == [w for i, w in enumerate(wanted) if i != 3]
        assert await model.generate(prompts, **SHORT) == wanted

    asyncio.run(main())


def test_nothing_is_cut_in_silence(model: VLLMSteerModel) -> None:
    long = "word " * 2100
    messages = [{"role": "user", "content": long}]

    async def main() -> None:
        with pytest.raises(PromptTooLongError, match="max_model_len is 2048"):
            await model.generate(long, **SHORT)
        with pytest.raises(PromptTooLongError, match="prompt 1"):
            await model.generate([PROMPT, long], **SHORT)
        with pytest.raises(PromptTooLongError):
            await model.chat(messages, **SHORT)
        with pytest.raises(PromptTooLongError):
            model.stream(long, **SHORT)
        with pytest.raises(PromptTooLongError):
            model.stream_chat(messages, **SHORT)
        with pytest.raises(PromptTooLongError, match="ask for at most"):
            await model.generate(PROMPT, max_tokens=2048)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_token": 4}, "max_tokens"),
        ({"temprature": 0.1}, "temperature"),
        ({"capture_layer": [1]}, "capture_layers"),
        ({"sterring": None}, "steering"),
        ({"capture_layers": [30]}, "layer 30"),
        ({"capture_layers": [-1]}, "layer -1"),
        ({"capture_layers": []}, "empty"),
        ({"capture_layers": "4"}, "capture_layers: a layer must be a whole number"),
        ({"capture_layers": [True]}, "whole number"),
        ({"steering": 4}, "SteeringSpec"),
        ({"steering": [SteeringSpec.none()] * 3}, "3 specs for 1"),
        ({"temperature": -1.0}, "temperature"),
        ({"sampling_params": {"temperature": 0}}, "SamplingParams"),
    ],
)
def test_arguments_that_cannot_be_used(model: VLLMSteerModel, arguments: dict[str, Any], words: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]

    async def main() -> None:
        for call in (
            lambda: model.generate(PROMPT, **arguments),
            lambda: model.chat(messages, **arguments),
        ):
            with pytest.raises(LabError, match=words):
                await call()
        with pytest.raises(LabError):
            model.stream(PROMPT, **arguments)
        with pytest.raises(LabError):
            model.stream_chat(messages, **arguments)

    asyncio.run(main())


@pytest.mark.parametrize("prompt", ["", [], [[]], 5, None, {"text": "x"}, [1, 10**6], [1.5], {"prompt_token_ids": []}])
def test_prompts_that_cannot_be_used(model: VLLMSteerModel, prompt: Any) -> None:
    with pytest.raises(RequestError):
        asyncio.run(model.generate(prompt, **SHORT))


def test_sampling_in_both_forms(model: VLLMSteerModel) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=3)

    async def main() -> None:
        with pytest.raises(RequestError, match="not both"):
            await model.generate(PROMPT, params, max_tokens=4)
        with pytest.raises(RequestError, match="ask for raw_output=True"):  # nobody would see them
            await model.generate(PROMPT, logprobs=2, **SHORT)
        both = await model.generate([PROMPT, PROMPT], params, capture_layers=[0], steering=[None, SteeringSpec.none()])
        await model.fetch_captures_batch(both[1])
        assert (params.n, params.max_tokens, params.extra_args) == (1, 3, None)  # the caller's own object is left alone

    asyncio.run(main())
