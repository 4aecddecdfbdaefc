"""Execution of requests: check them, lay out one per prompt and sample, run them, and gather the answers."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from chatspace_lab.capture import CaptureHandle
from chatspace_lab.chat import Completion, is_batch, render
from chatspace_lab.engine.client import EngineClient
from chatspace_lab.engine.config import VLLMSteeringConfig
from chatspace_lab.engine.live import LiveReader
from chatspace_lab.engine.requests import (
    OWN_ARGUMENTS,
    Ask,
    Directions,
    Prompt,
    Prompts,
    Submission,
    check_capture_layers,
    check_length,
    prompts_from,
    sampling_from,
    seed_apart,
    spans_of,
    steering_per_prompt,
)
from chatspace_lab.engine.session_steering import SessionSteering
from chatspace_lab.engine.stream import StreamDelta, TextStream
from chatspace_lab.engine.texts import check_stop, held_back
from chatspace_lab.errors import RequestError, kind_of
from chatspace_lab.readings import Readings
from chatspace_lab.steering.directions import DirectionSet
from chatspace_lab.steering.names import directions_named
from chatspace_lab.steering.specs import SteeringSpec
from chatspace_lab.steering.where import Where, as_where

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


Answers: TypeAlias = list[Any] | tuple[list[Any], list[CaptureHandle | None]]
"""Texts, responses or vLLM's outputs, and with ``capture_layers`` the handles."""


class RequestExecution:
    """Checks everything, lays out one request per prompt and sample, runs them and gathers their answers.

    Parameters
    ----------
    config, client
        Of the running engine.
    steering
        The session-wide steering, and the names of vectors.

    Attributes
    ----------
    loop : LoopThread
        Runs the coroutines here.
    """

    def __init__(self, config: VLLMSteeringConfig, client: EngineClient, steering: SessionSteering) -> None:
        self.loop = client.loop
        self._client, self._steering = client, steering
        self._copies = config.tensor_parallel_size
        facts = client.facts
        self._tokenizer, self._vocab_size = facts.tokenizer, facts.vocab_size
        self._layer_count, self._hidden_size = facts.layer_count, facts.hidden_size
        self._max_model_len = facts.max_model_len

    def prompts(self, prompts: Any) -> list[Prompt]:
        """Return one prompt or several, tokenised.

        Raises
        ------
        RequestError
            Naming the prompt that cannot be used.
        """
        return prompts_from(prompts, self._tokenizer, self._vocab_size)

    def conversations(self, messages: Any, options: dict[str, Any] | None) -> list[Prompt]:
        """Return one conversation or several, rendered and tokenised.

        Raises
        ------
        RequestError
            Naming the conversation that cannot be used.
        """
        if self._tokenizer is None:
            raise RequestError("this model was started without a tokenizer, so it has no chat template")
        conversations = list(messages) if is_batch(messages) else [messages]
        prompts = []
        for index, conversation in enumerate(conversations):
            try:
                chat = render(self._tokenizer, conversation, options)
            except RequestError as error:
                raise RequestError(f"conversation {index}: {error}") from error.__cause__
            prompts.append(Prompt(chat.token_ids, chat.text, chat))
        return prompts

    def sampling(self, sampling_params: Any, keywords: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters that a call asks for.

        Raises
        ------
        RequestError
            If they cannot be used with this model.
        """
        params = sampling_from(sampling_params, keywords, own=OWN_ARGUMENTS)
        if self._tokenizer is None and (params.stop or params.bad_words):
            raise RequestError(
                "sampling: stop and bad_words are texts, and this model was started without a tokenizer: "
                "give stop_token_ids or logit_bias"
            )
        return params

    def _check_logprobs(self, ask: Ask) -> None:
        """Refuse log-probabilities that nobody would see."""
        params = self.sampling(ask.sampling_params, ask.sampling)
        names = ("logprobs", "prompt_logprobs", "logprob_token_ids", "prompt_logprob_token_ids")
        if not ask.raw_output and any(getattr(params, name, None) is not None for name in names):
            raise RequestError(
                "sampling: logprobs and prompt_logprobs are in vLLM's own outputs: ask for raw_output=True, in "
                "generate or chat"
            )

    def check(
        self, prompts: list[Prompt], sampling: SamplingParams, capture_layers: Any, capture_where: Where | str
    ) -> None:
        """Check that prompts fit, and that what is to be captured of them exists.

        Raises
        ------
        RequestError, MessageLocationError
            Naming the prompt that cannot be used.
        """
        where = as_where(capture_where)
        if capture_layers is not None:
            check_capture_layers(capture_layers, self._layer_count)
        for index, prompt in enumerate(prompts):
            check_length(prompt, index, sampling.max_tokens, self._max_model_len)
            if capture_layers is not None:
                spans_of(where, prompt, sampling, self._tokenizer, self._max_model_len)

    def _submissions(self, prompts: list[Prompt], ask: Ask) -> list[Submission]:
        """Check everything and lay out one request per prompt and sample."""
        self._check_logprobs(ask)
        params = self.sampling(ask.sampling_params, ask.sampling)
        for index, prompt in enumerate(prompts):
            check_length(prompt, index, params.max_tokens, self._max_model_len)
            check_stop(self._tokenizer, prompt.token_ids, params)
        layers = None if ask.capture_layers is None else check_capture_layers(ask.capture_layers, self._layer_count)
        capture_where = as_where(ask.capture_where)
        if layers is None and capture_where != Where():
            raise RequestError("capture_where says which positions are captured: say at which layers (capture_layers)")
        specs = [self._steering.named(spec) for spec in steering_per_prompt(ask.steering, len(prompts))]
        submissions = [
            Submission(uuid.uuid4().hex[:16], prompt, params, None, index, sample, self._tokenizer, ask.progress)
            for index, prompt in enumerate(prompts)
            for sample in range(params.n)
        ]
        for each in submissions:
            self._steer(each, specs[each.prompt_index])
        seed_apart(submissions)
        if layers is not None:
            spans = [spans_of(capture_where, each, params, self._tokenizer, self._max_model_len) for each in prompts]
            for each in submissions:  # last, once nothing can be wrong any more: a handle that is dropped warns
                each.handle = self._handle(each, layers, spans[each.prompt_index], ask)
        return submissions

    def _handle(self, submission: Submission, layers: list[int], spans: list[int], ask: Ask) -> CaptureHandle:
        prompt = submission.prompt
        return ask.make_handle(
            self._client.captures,
            request_id=submission.request_id,
            layers=layers,
            spans=spans,
            hidden_size=self._hidden_size,
            prompt_token_ids=prompt.token_ids,
            boundaries=prompt.chat.boundaries if prompt.chat else None,
            copies=self._copies,
            prompt_index=submission.prompt_index,
            sample_index=submission.sample_index,
            steering=submission.spec,
        )

    def _steer(self, submission: Submission, spec: SteeringSpec | None) -> None:
        """Give a request its own steering, or with None the session's."""
        program = self._steering.program if spec is None else self._steering.compile(spec)
        submission.steer(self._steering.spec if spec is None else spec, program, self._max_model_len)

    def _reading(self, ask: Ask) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold off changes of the session-wide steering, if any of these requests follows it."""
        return self._steering.lock.read() if ask.follows_session else contextlib.nullcontext()

    async def generate(self, prompts: Prompts, ask: Ask) -> Answers:
        """Complete prompts; see :meth:`VLLMSteerModel.generate`."""
        return await self._complete(
            lambda: self.prompts(prompts), lambda _, output: Completion(output.text, output.finish_reason), ask
        )

    async def chat(self, messages: Any, chat_options: dict[str, Any] | None, ask: Ask) -> Answers:
        """Answer conversations; see :meth:`VLLMSteerModel.chat`."""
        return await self._complete(
            lambda: self.conversations(messages, chat_options),
            lambda each, output: each.response(output.text, output.token_ids, output.finish_reason),
            ask,
        )

    async def _complete(
        self, prompts: Callable[[], list[Prompt]], finish: Callable[[Submission, Any], Any], ask: Ask
    ) -> Answers:
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

    def stream(self, prompts: list[Prompt], ask: Ask, directions: Directions | None) -> TextStream:
        """Return the stream of one prompt's answer; see :meth:`VLLMSteerModel.stream`."""
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
            lambda put: self.loop.spawn(pump(put)),
            submission.handle,
            submission.response,
            lambda ids, sent: held_back(
                self._client.facts.tokenizer, submission.prompt.token_ids, submission.params, ids, sent
            ),
            read_only=read_only,
        )

    def _directions(self, ask: Ask, directions: Directions | None) -> DirectionSet | None:
        """Return what a stream reads, or None."""
        if ask.read_layers is None:
            if directions is not None:
                raise RequestError("directions: say at which layers to read them: read_layers=[…]")
            return None
        layers = check_capture_layers(ask.read_layers, self._layer_count, "read_layers")
        missing = set(layers) - set(check_capture_layers(ask.capture_layers, self._layer_count))
        if missing:
            raise RequestError(f"read_layers: {sorted(missing)} are not among capture_layers; add them there")
        return DirectionSet.of(directions_named(directions, self._steering.vectors), layers, self._hidden_size)


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
