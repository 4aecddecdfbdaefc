"""The model: an engine that can be steered and read, for use with ``await`` from any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from chatspace_lab.capture import CaptureHandle
from chatspace_lab.chat import ChatResponse, is_batch, render
from chatspace_lab.engine.client import EngineClient
from chatspace_lab.engine.config import VLLMSteeringConfig
from chatspace_lab.engine.requests import (
    OWN_ARGUMENTS,
    Ask,
    Prompt,
    Steering,
    Submission,
    check_capture_layers,
    check_length,
    prompts_from,
    sampling_from,
    spans_of,
    steering_per_prompt,
)
from chatspace_lab.engine.state import SessionSteering
from chatspace_lab.engine.steering_methods import SessionSteeringMethods
from chatspace_lab.engine.stream import StreamDelta, TextStream
from chatspace_lab.errors import RequestError, SteeringError
from chatspace_lab.steering.program import check_layer
from chatspace_lab.steering.specs import SteeringSpec
from chatspace_lab.steering.where import Where, as_where

if TYPE_CHECKING:
    from vllm import RequestOutput


class VLLMSteerModel(SessionSteeringMethods):
    """A language model on vLLM whose residual stream can be changed and read.

    Public coroutines may be awaited from any event loop and thread; they run on one loop of the model's own. Close the
    model (:meth:`close`, or ``async with``) to free its memory.

    Parameters
    ----------
    cfg
        A :class:`VLLMSteeringConfig`, or a model's name or folder.
    bootstrap_layers
        Accepted and checked; every layer can be steered and captured without being named ahead.
    enforce_eager
        None is True on a CPU, for its quick start, and False on a GPU, where CUDA graphs are worth several times the
        speed. Steering and captures are the same either way.

    Attributes
    ----------
    model_name : str
        As given.
    hidden_size, layer_count : int
        Of the residual stream, and of the decoder blocks.
    dtype : torch.dtype
        Of captured rows.
    max_model_len : int
        Tokens of a prompt and its answer, together.
    tokenizer
        The Hugging Face tokenizer; None with ``skip_tokenizer_init=True``.

    Raises
    ------
    ConfigError, UnsupportedError, EngineStartError
        If the model cannot be started. Nothing is left running then.
    """

    def __init__(
        self,
        cfg: VLLMSteeringConfig | str,
        *,
        bootstrap_layers: Iterable[int] = (),
        enforce_eager: bool | None = None,
    ) -> None:
        self.config = VLLMSteeringConfig(cfg) if isinstance(cfg, str) else cfg
        if not isinstance(self.config, VLLMSteeringConfig):
            raise TypeError(f"cfg: expected VLLMSteeringConfig or a model's name, got {type(cfg).__name__}")
        layers = list(bootstrap_layers)
        self._client = EngineClient.start(self.config, enforce_eager)
        facts = self._client.facts
        self.model_name = self.config.model_name
        self.hidden_size, self.layer_count, self.dtype = facts.hidden_size, facts.layer_count, facts.dtype
        self.max_model_len, self.tokenizer = facts.max_model_len, facts.tokenizer
        self._loop, self._lock = self._client.loop, self._client.lock
        self._session = SessionSteering(self._lock, self._client.bank, self._compile)
        try:
            for layer in layers:
                check_layer(layer, self.layer_count)
        except SteeringError as error:
            self.close()
            raise SteeringError(f"bootstrap_layers: {error}") from None

    # -- generating ----------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        capture_layers: Sequence[int] | None = None,
        capture_where: Where | str = "all",
        steering: Steering = None,
        raw_output: bool = False,
        **sampling: Any,
    ) -> Any:
        """Complete one prompt or several.

        Parameters
        ----------
        prompts
            Text, token ids, ``{"prompt_token_ids": …}``, or a list of these.
        sampling_params
            ``vllm.SamplingParams``; or give its fields as keywords (``temperature=0.0, max_tokens=8``).
        capture_layers
            Layers whose activations to capture.
        capture_where
            Which positions to capture: ``"all"``, ``"prompt"``, ``"answer"`` or a :class:`Where`. What is not chosen is
            never copied.
        steering
            A spec for this call alone, or one per prompt, in place of the session-wide steering; None in a list, or
            altogether, is the session-wide one, and ``SteeringSpec.none()`` is none.
        raw_output
            Return vLLM's ``RequestOutput`` objects instead of texts.

        Returns
        -------
        list of str, or (list of str, list of CaptureHandle)
            One text per prompt, in order; with ``n > 1`` samples, ``n`` per prompt after each other. Handles, one per
            text, come with ``capture_layers``.

        Raises
        ------
        RequestError, SteeringError, CaptureLimitError
            Before anything runs.
        EngineDeadError
            If the engine is gone.
        """
        return await self._run(
            self._complete(
                lambda: prompts_from(prompts, self.tokenizer, self._client.facts.vocab_size),
                lambda submission, output: output.text,
                Ask(sampling_params, sampling, capture_layers, capture_where, steering, raw_output),
            )
        )

    async def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        *,
        chat_options: dict[str, Any] | None = None,
        capture_layers: Sequence[int] | None = None,
        capture_where: Where | str = "all",
        steering: Steering = None,
        raw_output: bool = False,
        **sampling: Any,
    ) -> Any:
        """Answer one conversation or several.

        Parameters
        ----------
        messages
            A list of ``{"role": …, "content": …}``, or a list of such lists.
        chat_options
            Arguments of the tokenizer's ``apply_chat_template``. ``add_generation_prompt=False`` with
            ``continue_final_message=True`` continues the assistant's own final message.
        sampling_params, capture_layers, capture_where, steering, raw_output
            As for :meth:`generate`.

        Returns
        -------
        list of ChatResponse, or (list of ChatResponse, list of CaptureHandle)
            One per conversation, in order.

        Raises
        ------
        RequestError, SteeringError, CaptureLimitError
            Before anything runs.
        """
        return await self._run(
            self._complete(
                lambda: self._chat_prompts(messages, chat_options),
                lambda submission, output: ChatResponse(
                    output.text, submission.prompt.chat.prefill if submission.prompt.chat else "", output.finish_reason
                ),
                Ask(sampling_params, sampling, capture_layers, capture_where, steering, raw_output),
            )
        )

    def stream(
        self,
        prompt: Any,
        sampling_params: Any = None,
        *,
        capture_layers: Sequence[int] | None = None,
        capture_where: Where | str = "all",
        steering: SteeringSpec | None = None,
        **sampling: Any,
    ) -> TextStream:
        """Complete one prompt piece by piece: ``async for delta in model.stream(…)``. Arguments as :meth:`generate`."""
        ask = Ask(sampling_params, sampling, capture_layers, capture_where, steering)
        return self._stream(prompts_from(prompt, self.tokenizer, self._client.facts.vocab_size), ask)

    def stream_chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        *,
        chat_options: dict[str, Any] | None = None,
        capture_layers: Sequence[int] | None = None,
        capture_where: Where | str = "all",
        steering: SteeringSpec | None = None,
        **sampling: Any,
    ) -> TextStream:
        """Answer one conversation piece by piece. Arguments as :meth:`chat`."""
        ask = Ask(sampling_params, sampling, capture_layers, capture_where, steering)
        return self._stream(self._chat_prompts(messages, chat_options), ask)

    async def fetch_captures_batch(self, handles: Sequence[CaptureHandle]) -> None:
        """Bring the rows of many handles, of any calls, into this process in one round.

        Raises
        ------
        CaptureClosedError, CaptureError
            If any cannot be given; the others are fetched all the same.
        """
        await self._client.captures.fetch(list(handles))

    # -- the model's own life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the engine and free its memory. Requests under way end with an error. Again is fine."""
        self._client.close()

    async def aclose(self) -> None:
        """Like :meth:`close`, without blocking the caller's loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> VLLMSteerModel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        steered = len(self._session.spec.layers)
        return f"VLLMSteerModel({self.model_name!r}, {self.layer_count} layers, {steered} steered)"

    # -- inside --------------------------------------------------------------------------------------------------

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

    def _submissions(self, prompts: list[Prompt], ask: Ask) -> list[Submission]:
        """Check everything and lay out one request per prompt and sample."""
        params = sampling_from(ask.sampling_params, ask.sampling, own=OWN_ARGUMENTS)
        for index, prompt in enumerate(prompts):
            check_length(prompt, index, params.max_tokens, self.max_model_len)
        layers = None if ask.capture_layers is None else check_capture_layers(ask.capture_layers, self.layer_count)
        capture_where = as_where(ask.capture_where)
        specs = steering_per_prompt(ask.steering, len(prompts))
        submissions = []
        for index, (prompt, spec) in enumerate(zip(prompts, specs, strict=True)):
            spans = layers and spans_of(capture_where, prompt, params, self.tokenizer, self.max_model_len)
            for sample in range(params.n):
                request_id = uuid.uuid4().hex[:16]
                handle = None
                if layers and spans:
                    handle = CaptureHandle(
                        self._client.captures,
                        request_id=request_id,
                        layers=layers,
                        spans=spans,
                        prompt_token_ids=prompt.token_ids,
                        boundaries=prompt.chat.boundaries if prompt.chat else None,
                        copies=self.config.tensor_parallel_size,
                        prompt_index=index,
                        sample_index=sample,
                    )
                submissions.append(Submission(request_id, prompt, params, handle, index, sample))
                self._steer(submissions[-1], spec)
        return submissions

    def _steer(self, submission: Submission, spec: SteeringSpec | None) -> None:
        """Give a request its own steering, or with None the session's."""
        program = self._session.program if spec is None else self._compile(spec)
        submission.steer(spec or self._session.spec, program, self.tokenizer, self.max_model_len)

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

    def _stream(self, prompts: list[Prompt], ask: Ask) -> TextStream:
        if len(prompts) != 1:
            raise RequestError(f"a stream answers one prompt, got {len(prompts)}")
        if ask.steering is not None and not isinstance(ask.steering, SteeringSpec):
            raise RequestError("a stream takes one SteeringSpec")
        submission, *more = self._submissions(prompts, ask)
        if more:
            for each in (submission, *more):
                self._client.forget(each)
            raise RequestError("a stream gives one sample; ask for n=1")

        async def pump(put: Callable[[StreamDelta], None]) -> None:
            try:
                async with self._reading(ask):
                    if ask.steering is None:
                        self._steer(submission, None)  # the session's may have changed since
                    await self._client.run_one(submission, put)
            finally:
                if submission.handle is not None and submission.handle.state == "running":
                    self._client.forget(submission)  # it was left before it began

        return TextStream(
            submission.request_id,
            lambda put: self._loop.spawn(pump(put)),
            submission.handle,
            prompts[0].chat,
        )


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
