"""The model: an engine that can be steered and read, for use with ``await`` from any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from chatspace_lab.capture import CaptureHandle
from chatspace_lab.chat import ChatResponse, is_batch, render
from chatspace_lab.engine.client import EngineClient
from chatspace_lab.engine.config import VLLMSteeringConfig
from chatspace_lab.engine.requests import (
    OWN_ARGUMENTS,
    Prompt,
    Steering,
    Submission,
    check_capture_layers,
    check_length,
    prompts_from,
    sampling_from,
    steering_per_prompt,
)
from chatspace_lab.engine.state import SessionSteering
from chatspace_lab.engine.stream import StreamDelta, TextStream
from chatspace_lab.errors import RequestError, SteeringError
from chatspace_lab.steering.program import Program, check_layer, compile_spec
from chatspace_lab.steering.specs import AblationSpec, AddSpec, Operation, ProjectionCapSpec, SteeringSpec

if TYPE_CHECKING:
    from vllm import RequestOutput

T = TypeVar("T")


class VLLMSteerModel:
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
        self._target_layer: int | None = None
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
                (sampling_params, sampling, capture_layers, steering, raw_output),
            )
        )

    async def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        *,
        chat_options: dict[str, Any] | None = None,
        capture_layers: Sequence[int] | None = None,
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
        sampling_params, capture_layers, steering, raw_output
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
                (sampling_params, sampling, capture_layers, steering, raw_output),
            )
        )

    def stream(
        self,
        prompt: Any,
        sampling_params: Any = None,
        *,
        capture_layers: Sequence[int] | None = None,
        steering: SteeringSpec | None = None,
        **sampling: Any,
    ) -> TextStream:
        """Complete one prompt piece by piece: ``async for delta in model.stream(…)``. Arguments as :meth:`generate`."""
        arguments = (sampling_params, sampling, capture_layers, steering, False)
        return self._stream(prompts_from(prompt, self.tokenizer, self._client.facts.vocab_size), arguments)

    def stream_chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        *,
        chat_options: dict[str, Any] | None = None,
        capture_layers: Sequence[int] | None = None,
        steering: SteeringSpec | None = None,
        **sampling: Any,
    ) -> TextStream:
        """Answer one conversation piece by piece. Arguments as :meth:`chat`."""
        arguments = (sampling_params, sampling, capture_layers, steering, False)
        return self._stream(self._chat_prompts(messages, chat_options), arguments)

    async def fetch_captures_batch(self, handles: Sequence[CaptureHandle]) -> None:
        """Bring the rows of many handles, of any calls, into this process in one round.

        Raises
        ------
        CaptureClosedError, CaptureError
            If any cannot be given; the others are fetched all the same.
        """
        await self._client.captures.fetch(list(handles))

    # -- session-wide steering -----------------------------------------------------------------------------------

    async def set_layer_vector(self, layer_idx: int, vector: Any, scale: float = 1.0) -> None:
        """Add ``scale · vector`` at a layer from now on, in place of what was added there before."""
        await self._set_operation(layer_idx, AddSpec(vector, scale))

    def set_target_layer(self, layer_idx: int) -> None:
        """Choose the layer of :meth:`set_vector`."""
        self._target_layer = check_layer(layer_idx, self.layer_count)

    async def set_vector(self, vector: Any, scale: float = 1.0) -> None:
        """Like :meth:`set_layer_vector`, at the layer chosen by :meth:`set_target_layer`."""
        if self._target_layer is None:
            raise SteeringError("set_vector: no target layer; call set_target_layer(layer) first")
        await self.set_layer_vector(self._target_layer, vector, scale)

    async def clear_layer_vector(self, layer_idx: int) -> None:
        """Add nothing at a layer any more; its cap and ablation stay."""
        await self._clear_operation(layer_idx, AddSpec)

    async def clear_all_vectors(self) -> None:
        """Remove all session-wide steering: vectors, caps and ablations of every layer."""
        await self._change(lambda _: SteeringSpec.none())

    async def set_layer_projection_cap(
        self,
        layer_idx: int,
        vector: Any,
        min: float | None = None,  # noqa: A002
        max: float | None = None,  # noqa: A002
    ) -> None:
        """Clamp the component along ``vector`` at a layer to ``[min, max]`` from now on, after what is added there."""
        await self._set_operation(layer_idx, ProjectionCapSpec(vector, min, max))

    async def clear_layer_projection_cap(self, layer_idx: int) -> None:
        """Cap nothing at a layer any more."""
        await self._clear_operation(layer_idx, ProjectionCapSpec)

    async def set_layer_ablation(self, layer_idx: int, vector: Any, scale: float = 0.0) -> None:
        """Multiply the component along ``vector`` at a layer by ``scale`` from now on, after add and cap."""
        await self._set_operation(layer_idx, AblationSpec(vector, scale))

    async def clear_layer_ablation(self, layer_idx: int) -> None:
        """Ablate nothing at a layer any more."""
        await self._clear_operation(layer_idx, AblationSpec)

    async def apply_steering_spec(self, spec: SteeringSpec) -> None:
        """Replace all session-wide steering by ``spec``, at all layers at once."""
        self._compile(spec)
        await self._change(lambda _: spec)

    async def push_steering_spec(self, spec: SteeringSpec) -> None:
        """Remember the steering in force on a stack and replace it by ``spec``."""
        self._compile(spec)
        await self._in_turn(lambda: self._session.push(spec))

    async def pop_steering_spec(self) -> SteeringSpec:
        """Bring back, and return, the steering that the last push replaced."""
        return await self._in_turn(self._session.pop)

    def export_steering_spec(self) -> SteeringSpec:
        """Return the session-wide steering in force; ``SteeringSpec.none()`` if there is none."""
        return self._session.spec

    @asynccontextmanager
    async def steering(self, spec: SteeringSpec) -> AsyncIterator[None]:
        """Steer by ``spec`` inside the block; what was in force before comes back, whatever ends the block."""
        self._compile(spec)
        mark = object()
        try:
            await self._in_turn(lambda: self._session.push(spec, mark))
            yield
        finally:
            if self._session.holds(mark):  # also when the cancellation came just after the push
                restored = self._loop.spawn(self._session.leave(mark))
                await asyncio.shield(asyncio.wrap_future(restored.finished))

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

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await self._loop.run(coroutine)

    async def _in_turn(self, action: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a change behind the requests that were made before it."""
        await asyncio.sleep(0)  # tasks that the caller created before this call have not begun yet: they go first
        return await self._run(action())

    async def _change(self, update: Callable[[SteeringSpec], SteeringSpec]) -> None:
        await self._in_turn(lambda: self._session.change(update))

    def _compile(self, spec: SteeringSpec) -> Program | None:
        return compile_spec(
            spec,
            layer_count=self.layer_count,
            hidden_size=self.hidden_size,
            max_ops_per_layer=self.config.max_ops_per_layer,
        )

    async def _set_operation(self, layer_idx: int, operation: Operation) -> None:
        layer = check_layer(layer_idx, self.layer_count)
        self._compile(SteeringSpec.at(layer, operation))

        def update(spec: SteeringSpec) -> SteeringSpec:
            before = spec.layers.get(layer)
            return spec.with_layer(
                layer, before.with_operation(operation) if before else SteeringSpec.at(layer, operation).layers[layer]
            )

        await self._change(update)

    async def _clear_operation(self, layer_idx: int, kind: type) -> None:
        layer = check_layer(layer_idx, self.layer_count)

        def update(spec: SteeringSpec) -> SteeringSpec:
            before = spec.layers.get(layer)
            return spec.with_layer(layer, before.without(kind) if before else None)

        await self._change(update)

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

    def _submissions(self, prompts: list[Prompt], arguments: tuple[Any, ...]) -> list[Submission]:
        """Check everything and lay out one request per prompt and sample."""
        sampling_params, sampling, capture_layers, steering, _ = arguments
        params = sampling_from(sampling_params, sampling, own=OWN_ARGUMENTS)
        for index, prompt in enumerate(prompts):
            check_length(prompt, index, params.max_tokens, self.max_model_len)
        layers = None if capture_layers is None else check_capture_layers(capture_layers, self.layer_count)
        specs = steering_per_prompt(steering, len(prompts))
        compiled = {id(spec): self._compile(spec) for spec in specs if spec is not None}
        submissions = []
        for index, (prompt, spec) in enumerate(zip(prompts, specs, strict=True)):
            for sample in range(params.n):
                request_id = uuid.uuid4().hex[:16]
                handle = layers and CaptureHandle(
                    self._client.captures,
                    request_id=request_id,
                    layers=layers,
                    prompt_token_ids=prompt.token_ids,
                    boundaries=prompt.chat.boundaries if prompt.chat else None,
                    copies=self.config.tensor_parallel_size,
                    prompt_index=index,
                    sample_index=sample,
                )
                program = self._session.program if spec is None else compiled[id(spec)]
                submissions.append(Submission(request_id, prompt, params, program, handle or None, index, sample))
        return submissions

    def _reading(self, arguments: tuple[Any, ...]) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold off changes of the session-wide steering, if any of these requests follows it."""
        steering = arguments[3]
        follows = steering is None or (isinstance(steering, Sequence) and any(spec is None for spec in steering))
        return self._lock.read() if follows else contextlib.nullcontext()

    async def _complete(
        self, prompts: Callable[[], list[Prompt]], finish: Callable[[Submission, Any], Any], arguments: tuple[Any, ...]
    ) -> Any:
        ready = prompts()
        async with self._reading(arguments):
            submissions = self._submissions(ready, arguments)
            outputs = await self._client.run(submissions)
        results: list[Any]
        if arguments[4]:
            results = _merge_samples(submissions, outputs)
        else:
            results = [finish(s, output.outputs[0]) for s, output in zip(submissions, outputs, strict=True)]
        if arguments[2] is None:
            return results
        return results, [submission.handle for submission in submissions]

    def _stream(self, prompts: list[Prompt], arguments: tuple[Any, ...]) -> TextStream:
        if len(prompts) != 1:
            raise RequestError(f"a stream answers one prompt, got {len(prompts)}")
        if arguments[3] is not None and not isinstance(arguments[3], SteeringSpec):
            raise RequestError("a stream takes one SteeringSpec")
        submission, *more = self._submissions(prompts, arguments)
        if more:
            for each in (submission, *more):
                self._client.forget(each)
            raise RequestError("a stream gives one sample; ask for n=1")

        async def pump(put: Callable[[StreamDelta], None]) -> None:
            try:
                async with self._reading(arguments):
                    if arguments[3] is None:
                        submission.program = self._session.program
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
