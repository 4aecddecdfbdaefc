"""From what a user asked to requests under way: the part of the model between its public methods and the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chatspace_lab.capture import CaptureHandle
from chatspace_lab.chat import answer, is_batch, render
from chatspace_lab.engine.client import EngineClient
from chatspace_lab.engine.config import VLLMSteeringConfig
from chatspace_lab.engine.live import LiveReader
from chatspace_lab.engine.lock import AsyncRWLock
from chatspace_lab.engine.loop import LoopThread
from chatspace_lab.engine.requests import (
    OWN_ARGUMENTS,
    Ask,
    Prompt,
    Submission,
    check_capture_layers,
    check_length,
    prompts_from,
    sampling_from,
    seed_apart,
    spans_of,
    steering_per_prompt,
)
from chatspace_lab.engine.state import SessionSteering
from chatspace_lab.engine.stream import StreamDelta, TextStream
from chatspace_lab.engine.texts import check_stop, held_back
from chatspace_lab.errors import RequestError, kind_of
from chatspace_lab.readings import Readings
from chatspace_lab.steering.directions import DirectionSet
from chatspace_lab.steering.names import directions_named
from chatspace_lab.steering.program import Program
from chatspace_lab.steering.specs import SteeringSpec
from chatspace_lab.steering.where import Where, as_where

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


class RequestMethods:
    """Checks everything, lays out one request per prompt and sample, runs them and gathers their answers."""

    config: VLLMSteeringConfig
    layer_count: int
    hidden_size: int
    max_model_len: int
    tokenizer: Any
    _client: EngineClient
    _loop: LoopThread
    _lock: AsyncRWLock
    _session: SessionSteering
    vectors: dict[str, Any]
    _compile: Callable[[SteeringSpec], Program | None]
    _named: Callable[[Any], Any]

    def _chat_prompts(self, messages: Any, options: dict[str, Any] | None) -> list[Prompt]:
        if self.tokenizer is None:
            raise RequestError("this model was started without a tokenizer, so it has no chat template")
        conversations = list(messages) if is_batch(messages) else [messages]
        prompts = []
        for index, conversation in enumerate(conversations):
            try:
                chat = render(self.tokenizer, conversation, options)
            except RequestError as error:
                raise RequestError(f"conversation {index}: {error}") from error.__cause__
            prompts.append(Prompt(chat.token_ids, chat.text, chat))
        return prompts

    def _sampling(self, sampling_params: Any, keywords: Mapping[str, Any]) -> SamplingParams:
        params = sampling_from(sampling_params, keywords, own=OWN_ARGUMENTS)
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise RequestError(
                "sampling: stop and bad_words are texts, and this model was started without a tokenizer: "
                "give stop_token_ids or logit_bias"
            )
        return params

    def _check_logprobs(self, ask: Ask) -> None:
        """Refuse log-probabilities that nobody would see."""
        params = self._sampling(ask.sampling_params, ask.sampling)
        names = ("logprobs", "prompt_logprobs", "logprob_token_ids", "prompt_logprob_token_ids")
        if not ask.raw_output and any(getattr(params, name, None) is not None for name in names):
            raise RequestError(
                "sampling: logprobs and prompt_logprobs are in vLLM's own outputs: ask for raw_output=True, in "
                "generate or chat"
            )

    def prepare(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        chat: bool = False,
        chat_options: dict[str, Any] | None = None,
        capture_layers: Any = None,
        capture_where: Where | str = "all",
        **sampling: Any,
    ) -> list[Prompt]:
        """Tokenise prompts, or with ``chat`` conversations, and check all that ``generate`` would.

        The result can be given to ``generate`` in place of prompts, whole or in parts, many times.

        Raises
        ------
        RequestError, MessageLocationError
            Naming the prompt that cannot be used.
        """
        if chat_options is not None and not chat:
            raise RequestError("chat_options go with conversations, and these prompts are none")
        if chat:
            found = self._chat_prompts(prompts, chat_options)
        else:
            found = prompts_from(prompts, self.tokenizer, self._client.facts.vocab_size)
        params = self._sampling(sampling_params, sampling)
        where = as_where(capture_where)
        if capture_layers is not None:
            check_capture_layers(capture_layers, self.layer_count)
        for index, prompt in enumerate(found):
            check_length(prompt, index, params.max_tokens, self.max_model_len)
            if capture_layers is not None:
                spans_of(where, prompt, params, self.tokenizer, self.max_model_len)
        return found

    def _submissions(self, prompts: list[Prompt], ask: Ask) -> list[Submission]:
        """Check everything and lay out one request per prompt and sample."""
        self._check_logprobs(ask)
        params = self._sampling(ask.sampling_params, ask.sampling)
        for index, prompt in enumerate(prompts):
            check_length(prompt, index, params.max_tokens, self.max_model_len)
            check_stop(self.tokenizer, prompt.token_ids, params)
        layers = None if ask.capture_layers is None else check_capture_layers(ask.capture_layers, self.layer_count)
        capture_where = as_where(ask.capture_where)
        if layers is None and capture_where != Where():
            raise RequestError("capture_where says which positions are captured: say at which layers (capture_layers)")
        specs = [self._named(spec) for spec in steering_per_prompt(ask.steering, len(prompts))]
        submissions = [
            Submission(uuid.uuid4().hex[:16], prompt, params, None, index, sample)
            for index, prompt in enumerate(prompts)
            for sample in range(params.n)
        ]
        for each in submissions:
            self._steer(each, specs[each.prompt_index])
        seed_apart(submissions)
        if layers is not None:
            spans = [spans_of(capture_where, each, params, self.tokenizer, self.max_model_len) for each in prompts]
            for each in submissions:  # last, once nothing can be wrong any more: a handle that is dropped warns
                each.handle = self._handle(each, layers, spans[each.prompt_index])
        return submissions

    def _handle(self, submission: Submission, layers: list[int], spans: list[int]) -> CaptureHandle:
        prompt = submission.prompt
        return CaptureHandle(
            self._client.captures,
            request_id=submission.request_id,
            layers=layers,
            spans=spans,
            hidden_size=self.hidden_size,
            prompt_token_ids=prompt.token_ids,
            boundaries=prompt.chat.boundaries if prompt.chat else None,
            copies=self.config.tensor_parallel_size,
            prompt_index=submission.prompt_index,
            sample_index=submission.sample_index,
            steering=submission.spec,
        )

    def _steer(self, submission: Submission, spec: SteeringSpec | None) -> None:
        """Give a request its own steering, or with None the session's."""
        program = self._session.program if spec is None else self._compile(spec)
        submission.steer(self._session.spec if spec is None else spec, program, self.tokenizer, self.max_model_len)

    def _reading(self, ask: Ask) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold off changes of the session-wide steering, if any of these requests follows it."""
        return self._lock.read() if ask.follows_session else contextlib.nullcontext()

    async def _complete(
        self, prompts: Callable[[], list[Prompt]], finish: Callable[[Submission, Any], Any], ask: Ask
    ) -> Any:
        ready = prompts()
        async with self._reading(ask):
            submissions = self._submissions(ready, ask)
            outputs = await self._client.run(submissions)
        results: list[Any]
        if ask.raw_output:
            results = _merge_samples(submissions, outputs)
        else:
            results = [finish(s, output.outputs[0]) for s, output in zip(submissions, outputs, strict=True)]
        if ask.capture_layers is None:
            return results
        return results, [submission.handle for submission in submissions]

    def _stream(
        self, prompts: list[Prompt], ask: Ask, directions: Mapping[str, Any] | Sequence[str] | None = None
    ) -> TextStream:
        if len(prompts) != 1:
            raise RequestError(f"a stream answers one prompt, got {len(prompts)}")
        read_only = ask.read_layers is not None and ask.capture_layers is None
        if read_only:
            ask = dataclasses.replace(ask, capture_layers=ask.read_layers)
        reading = self._directions(ask, directions)
        if ask.steering is not None and not isinstance(ask.steering, SteeringSpec):
            raise RequestError(f"a stream takes one SteeringSpec, got {kind_of(ask.steering, SteeringSpec)}")
        submission, *more = self._submissions(prompts, ask)
        if more:
            for each in (submission, *more):
                self._client.forget(each)
            raise RequestError("a stream gives one sample; ask for n=1")

        def note(readings: Readings) -> None:
            for observer in self._client.observers:
                observer.read(submission, readings)

        async def pump(put: Callable[[StreamDelta], None]) -> None:
            handle = submission.handle
            try:
                async with self._reading(ask):
                    if ask.steering is None:
                        self._steer(submission, None)  # the session's may have changed since
                    if reading is None or handle is None:
                        await self._client.run_one(submission, put)
                    else:
                        reader = LiveReader(self._client.captures, handle, reading, note)
                        await reader.run(self._client.run_one(submission, reader.received), put)
            finally:
                if handle is not None and handle.state == "running":
                    self._client.forget(submission)  # it was left before it began
                elif handle is not None and read_only:
                    handle.close()

        return TextStream(
            submission.request_id,
            lambda put: self._loop.spawn(pump(put)),
            submission.handle,
            lambda text, ids, reason: answer(self.tokenizer, submission.prompt.chat, text, ids, reason),
            lambda ids, sent: held_back(
                self._client.facts.tokenizer, submission.prompt.token_ids, submission.params, ids, sent
            ),
            read_only=read_only,
        )

    def _directions(self, ask: Ask, directions: Mapping[str, Any] | Sequence[str] | None) -> DirectionSet | None:
        """Return what a stream reads, or None."""
        if ask.read_layers is None:
            if directions is not None:
                raise RequestError("directions: say at which layers to read them: read_layers=[…]")
            return None
        layers = check_capture_layers(ask.read_layers, self.layer_count, "read_layers")
        missing = set(layers) - set(check_capture_layers(ask.capture_layers, self.layer_count))
        if missing:
            raise RequestError(f"read_layers: {sorted(missing)} are not among capture_layers; add them there")
        return DirectionSet.of(directions_named(directions, self.vectors), layers, self.hidden_size)


def _merge_samples(submissions: list[Submission], outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Give the samples of one prompt back in one ``RequestOutput``, as vLLM does."""
    merged: dict[int, RequestOutput] = {}
    for submission, output in zip(submissions, outputs, strict=True):
        if submission.prompt_index not in merged:
            merged[submission.prompt_index] = output
        else:
            output.outputs[0].index = submission.sample_index
            merged[submission.prompt_index].outputs.extend(output.outputs)
    return list(merged.values())
