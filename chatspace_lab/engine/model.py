"""The model: an engine that can be steered and read, for use with ``await`` from any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from chatspace_lab.capture import CaptureHandle
from chatspace_lab.chat import ChatResponse, Completion
from chatspace_lab.engine.client import EngineClient, ModelFacts
from chatspace_lab.engine.config import VLLMSteeringConfig
from chatspace_lab.engine.execution import RequestExecution
from chatspace_lab.engine.fixed import Fixed
from chatspace_lab.engine.observer import Observer, Progress, Subscription
from chatspace_lab.engine.requests import Ask, Conversation, Directions, Prompt, PromptLike, Prompts, Steering
from chatspace_lab.engine.session_steering import SessionSteering
from chatspace_lab.engine.stream import TextStream
from chatspace_lab.errors import CaptureError, RequestError, SteeringError, kind_of
from chatspace_lab.readings import Readings
from chatspace_lab.steering.directions import DirectionSet
from chatspace_lab.steering.names import Vectors, directions_named
from chatspace_lab.steering.program import check_layer
from chatspace_lab.steering.specs import AblationSpec, AddSpec, ProjectionCapSpec, SteeringSpec
from chatspace_lab.steering.vectors import as_list
from chatspace_lab.steering.where import Where

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


class VLLMSteerModel(Fixed):
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
    progress
        Called repeatedly in this thread with the current stage of the start.

    Attributes
    ----------
    config : VLLMSteeringConfig
        A copy of ``cfg``. Like the others, but ``vectors``, it cannot be set: a running engine would not read it.
    model_name : str
        As given.
    hidden_size, layer_count : int
        Of the residual stream, and of the decoder blocks.
    dtype : torch.dtype
        Of captured rows.
    max_model_len : int
        Tokens of a prompt and its answer, together.
    tokenizer
        The Hugging Face tokenizer; None with ``skip_tokenizer_init=True``. It cannot be changed: another chat template
        is given with a call (``chat_options``).
    vectors : dict of str to vector
        Named vectors and directions. Where a method takes a vector, a spec or directions, a name in here will do.
    execution : RequestExecution
        Runs the requests; :meth:`generate`, :meth:`chat` and the streams pass on to it what they were asked.

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
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if not isinstance(cfg, VLLMSteeringConfig | str):
            raise TypeError(
                f"cfg: expected VLLMSteeringConfig or a model's name, got {kind_of(cfg, VLLMSteeringConfig)}"
            )
        config = (VLLMSteeringConfig(cfg) if isinstance(cfg, str) else cfg).fixed()
        layers = list(bootstrap_layers)
        client = EngineClient.start(config, enforce_eager, progress)
        self._share(config, client, None)
        try:
            for layer in layers:
                check_layer(layer, self.layer_count)
        except SteeringError as error:
            self.close()
            raise SteeringError(f"bootstrap_layers: {error}") from None
        self._fix()

    def _share(self, config: VLLMSteeringConfig, client: EngineClient, steering: SessionSteering | None) -> None:
        """Use a running engine: one that was just started, or with its ``steering`` that of another model object."""
        facts = client.facts
        self.config, self._client, self._loop = config, client, client.loop
        self.model_name: str = config.model_name
        self.hidden_size: int = facts.hidden_size
        self.layer_count: int = facts.layer_count
        self.dtype: torch.dtype = facts.dtype
        self.max_model_len: int = facts.max_model_len
        self.tokenizer = facts.tokenizer
        self._steering = steering or SessionSteering(
            client.loop,
            client.bank,
            layer_count=facts.layer_count,
            hidden_size=facts.hidden_size,
            max_ops_per_layer=config.max_ops_per_layer,
        )
        self.execution = RequestExecution(config, client, self._steering)

    @property
    def vectors(self) -> dict[str, Any]:
        """Named vectors and directions."""
        return self._steering.vectors

    @vectors.setter
    def vectors(self, vectors: Mapping[str, Any]) -> None:
        self._steering.vectors = Vectors(vectors)

    # -- generating ----------------------------------------------------------------------------------------------

    @overload
    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        capture_layers: None = None,
        capture_where: Where | str = "all",
        steering: Steering = None,
        raw_output: Literal[False] = False,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> list[Completion]: ...

    @overload
    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        capture_layers: Sequence[int],
        capture_where: Where | str = "all",
        steering: Steering = None,
        raw_output: Literal[False] = False,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> tuple[list[Completion], list[CaptureHandle]]: ...

    @overload
    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        capture_layers: None = None,
        capture_where: Where | str = "all",
        steering: Steering = None,
        raw_output: Literal[True],
        progress: Progress | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]: ...

    @overload
    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        capture_layers: Sequence[int],
        capture_where: Where | str = "all",
        steering: Steering = None,
        raw_output: Literal[True],
        progress: Progress | None = None,
        **sampling: Any,
    ) -> tuple[list[RequestOutput], list[CaptureHandle]]: ...

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        capture_layers: Sequence[int] | None = None,
        capture_where: Where | str = "all",
        steering: Steering = None,
        raw_output: bool = False,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> Any:
        """Complete one prompt or several. Without ``max_tokens`` an answer has at most 16 tokens, vLLM's default.

        Parameters
        ----------
        prompts
            Text, token ids, ``{"prompt_token_ids": …}``, or a list of these.
        sampling_params
            ``vllm.SamplingParams``; or give its fields as keywords (``temperature=0.0, max_tokens=8``). With a
            ``seed``, the samples of one prompt have the seeds that follow it: those of ``n``, and those of a prompt
            that stands in the list several times with the same steering. Prompts that differ, and one prompt under
            different steering, share the seed: they are drawn with common random numbers.
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
        progress
            Follows this call: requests done, tokens, and what was generated so far.

        Returns
        -------
        list of Completion, or (list of Completion, list of CaptureHandle)
            One text per prompt, in order; with ``n > 1`` samples, ``n`` per prompt after each other. A
            :class:`~chatspace_lab.chat.Completion` is a str with ``finish_reason``. Handles, one per text, come with
            ``capture_layers``.

        Raises
        ------
        RequestError, SteeringError, CaptureLimitError
            Before anything runs.
        EngineDeadError
            If the engine is gone.
        """
        ask = Ask(sampling_params, sampling, capture_layers, capture_where, steering, raw_output, progress=progress)
        return await self._loop.run(self.execution.generate(prompts, ask))

    @overload
    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | None = None,
        *,
        chat_options: dict[str, Any] | None = None,
        capture_layers: None = None,
        capture_where: Where | str = "all",
        steering: Steering = None,
        raw_output: Literal[False] = False,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> list[ChatResponse]: ...

    @overload
    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | None = None,
        *,
        chat_options: dict[str, Any] | None = None,
        capture_layers: Sequence[int],
        capture_where: Where | str = "all",
        steering: Steering = None,
        raw_output: Literal[False] = False,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> tuple[list[ChatResponse], list[CaptureHandle]]: ...

    @overload
    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | None = None,
        *,
        chat_options: dict[str, Any] | None = None,
        capture_layers: None = None,
        capture_where: Where | str = "all",
        steering: Steering = None,
        raw_output: Literal[True],
        progress: Progress | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]: ...

    @overload
    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | None = None,
        *,
        chat_options: dict[str, Any] | None = None,
        capture_layers: Sequence[int],
        capture_where: Where | str = "all",
        steering: Steering = None,
        raw_output: Literal[True],
        progress: Progress | None = None,
        **sampling: Any,
    ) -> tuple[list[RequestOutput], list[CaptureHandle]]: ...

    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | None = None,
        *,
        chat_options: dict[str, Any] | None = None,
        capture_layers: Sequence[int] | None = None,
        capture_where: Where | str = "all",
        steering: Steering = None,
        raw_output: bool = False,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> Any:
        """Answer one conversation or several. Without ``max_tokens`` an answer has at most 16 tokens, vLLM's default.

        Parameters
        ----------
        messages
            A list of ``{"role": …, "content": …}``, or a list of such lists.
        chat_options
            Arguments of the tokenizer's ``apply_chat_template``: ``chat_template`` is another template, and
            ``add_generation_prompt=False`` with ``continue_final_message=True`` continues the assistant's own final
            message. And ``split_special_tokens=True``: special tokens that a message's own text spells, such as
            ``<|im_end|>``, are sent as ordinary text. By default they end or begin messages, as those of the template
            do; the column ``special`` of a token frame shows them.
        sampling_params, capture_layers, capture_where, steering, raw_output, progress
            As for :meth:`generate`.

        Returns
        -------
        list of ChatResponse, or (list of ChatResponse, list of CaptureHandle)
            One per conversation, in order: a str with ``finish_reason``, ``"length"`` if it was cut at ``max_tokens``.

        Raises
        ------
        RequestError, SteeringError, CaptureLimitError
            Before anything runs.
        """
        ask = Ask(sampling_params, sampling, capture_layers, capture_where, steering, raw_output, progress=progress)
        return await self._loop.run(self.execution.chat(messages, chat_options, ask))

    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        capture_layers: Sequence[int] | None = None,
        capture_where: Where | str = "all",
        steering: SteeringSpec | None = None,
        read_layers: Sequence[int] | None = None,
        directions: Directions | None = None,
        **sampling: Any,
    ) -> TextStream:
        """Complete one prompt piece by piece: ``async for delta in model.stream(…)``.

        Parameters
        ----------
        prompt, sampling_params, capture_layers, capture_where, steering
            As for :meth:`generate`.
        read_layers
            Layers at which each piece brings the norm of every new token, and its projection on ``directions``, as
            :class:`~chatspace_lab.readings.Readings`. The worker computes them; the activations stay there. With
            ``capture_layers``, some of these.
        directions
            ``{name: vector}`` or ``{name: {layer: vector}}``; a vector has ``[hidden_size]`` entries. Or names in
            :attr:`vectors`: ``["joy", "sea"]``.
        """
        ask = Ask(sampling_params, sampling, capture_layers, capture_where, steering, read_layers=read_layers)
        return self.execution.stream(self.execution.prompts(prompt), ask, directions)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        chat_options: dict[str, Any] | None = None,
        capture_layers: Sequence[int] | None = None,
        capture_where: Where | str = "all",
        steering: SteeringSpec | None = None,
        read_layers: Sequence[int] | None = None,
        directions: Directions | None = None,
        **sampling: Any,
    ) -> TextStream:
        """Answer one conversation piece by piece. Arguments as for :meth:`chat` and :meth:`stream`."""
        ask = Ask(sampling_params, sampling, capture_layers, capture_where, steering, read_layers=read_layers)
        return self.execution.stream(self.execution.conversations(messages, chat_options), ask, directions)

    async def fetch_captures_batch(self, handles: Sequence[CaptureHandle]) -> None:
        """Bring the rows of many handles, of any calls, into this process in one round.

        Raises
        ------
        CaptureClosedError, CaptureError
            If any cannot be given; the others are fetched all the same.
        """
        await self._client.captures.fetch(_handles(handles))

    async def read_captures(
        self,
        handles: Sequence[CaptureHandle],
        directions: Directions | None = None,
        *,
        layers: Sequence[int] | None = None,
    ) -> list[Readings]:
        """Return the norm of each row, and its projection on directions, for many handles in one round.

        The rows stay where they are: in the workers, or here if they were fetched.

        Parameters
        ----------
        handles
            Of any calls.
        directions
            ``{name: vector}`` or ``{name: {layer: vector}}``; a vector has ``[hidden_size]`` entries. Or names in
            :attr:`vectors`: ``["joy", "sea"]``.
        layers
            Captured ones; None is those that the first handle has.

        Raises
        ------
        CaptureError, CaptureClosedError, RequestError, SteeringError
        """
        handles = _handles(handles)
        if not handles:
            return []
        chosen = handles[0].check_layers(layers)
        for handle in handles:
            handle.check_layers(chosen)
        laid = DirectionSet.of(directions_named(directions, self.vectors), chosen, self.hidden_size)
        values = await self._client.captures.reduce(handles, chosen, "read", laid.units)
        return [handle.label(each, laid) for handle, each in zip(handles, values, strict=True)]

    def prepare(
        self,
        prompts: Prompts | Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | None = None,
        *,
        chat: bool = False,
        chat_options: dict[str, Any] | None = None,
        capture_layers: Sequence[int] | None = None,
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
        execution = self.execution
        found = execution.conversations(prompts, chat_options) if chat else execution.prompts(prompts)
        execution.check(found, execution.sampling(sampling_params, sampling), capture_layers, capture_where)
        return found

    # -- the session-wide steering: each change waits until the requests that follow it have ended -------------------

    async def set_layer_vector(self, layer_idx: int, vector: Any, scale: float = 1.0) -> None:
        """Add ``scale · vector`` at a layer from now on, in place of what was added there before."""
        await self._steering.set_operation(layer_idx, AddSpec(vector, scale))

    def set_target_layer(self, layer_idx: int) -> None:
        """Choose the layer of :meth:`set_vector`."""
        self._steering.target_layer = check_layer(layer_idx, self.layer_count)

    async def set_vector(self, vector: Any, scale: float = 1.0) -> None:
        """Like :meth:`set_layer_vector`, at the layer chosen by :meth:`set_target_layer`."""
        if self._steering.target_layer is None:
            raise SteeringError("set_vector: no target layer; call set_target_layer(layer) first")
        await self.set_layer_vector(self._steering.target_layer, vector, scale)

    async def clear_layer_vector(self, layer_idx: int) -> None:
        """Add nothing at a layer any more; its cap and ablation stay."""
        await self._steering.clear_operation(layer_idx, AddSpec)

    async def clear_all_vectors(self) -> None:
        """Remove all session-wide steering: vectors, caps and ablations of every layer."""
        await self._steering.clear()

    async def set_layer_projection_cap(
        self,
        layer_idx: int,
        vector: Any,
        min: float | None = None,  # noqa: A002
        max: float | None = None,  # noqa: A002
    ) -> None:
        """Clamp the component along ``vector`` at a layer to ``[min, max]`` from now on, after what is added there."""
        await self._steering.set_operation(layer_idx, ProjectionCapSpec(vector, min, max))

    async def clear_layer_projection_cap(self, layer_idx: int) -> None:
        """Cap nothing at a layer any more."""
        await self._steering.clear_operation(layer_idx, ProjectionCapSpec)

    async def set_layer_ablation(self, layer_idx: int, vector: Any, scale: float = 0.0) -> None:
        """Multiply the component along ``vector`` at a layer by ``scale`` from now on, after add and cap."""
        await self._steering.set_operation(layer_idx, AblationSpec(vector, scale))

    async def clear_layer_ablation(self, layer_idx: int) -> None:
        """Ablate nothing at a layer any more."""
        await self._steering.clear_operation(layer_idx, AblationSpec)

    async def apply_steering_spec(self, spec: SteeringSpec) -> None:
        """Replace all session-wide steering by ``spec``, at all layers at once."""
        await self._steering.apply(spec)

    async def update_steering_spec(self, update: Callable[[SteeringSpec], SteeringSpec]) -> None:
        """Replace the session-wide steering by ``update`` of what is in force then; nothing can come between.

        Raises
        ------
        SteeringError
            If the new spec cannot be used; the old one stays in force.
        """
        await self._steering.update(update)

    async def push_steering_spec(self, spec: SteeringSpec) -> None:
        """Remember the steering in force on a stack and replace it by ``spec``."""
        await self._steering.push(spec)

    async def pop_steering_spec(self) -> SteeringSpec:
        """Bring back, and return, the steering that the last push replaced."""
        return await self._steering.pop()

    def export_steering_spec(self) -> SteeringSpec:
        """Return a copy of the session-wide steering in force; ``SteeringSpec.none()`` if there is none."""
        return self._steering.spec.apart()

    def steering(self, spec: SteeringSpec) -> AbstractAsyncContextManager[None]:
        """Steer by ``spec`` inside the block; what was in force before comes back, whatever ends the block."""
        return self._steering.block(spec)

    # -- subscriptions -----------------------------------------------------------------------------------------------

    def observe(self, observer: Observer) -> Subscription[Observer]:
        """Tell ``observer`` of every request from now on; it is called on the engine's loop, and must be quick.

        Returns
        -------
        Subscription
            Its ``end()`` stops it.
        """
        return Subscription(self._client.observers, observer)

    def on_steering(self, changed: Callable[[SteeringSpec], None]) -> Subscription[Callable[[SteeringSpec], None]]:
        """Call ``changed`` with the new spec after each change of the session-wide steering.

        It is called on the engine's loop; it must be quick and must not raise.

        Returns
        -------
        Subscription
            Its ``end()`` stops it.
        """
        return Subscription(self._steering.listeners, changed)

    # -- the model's own life ------------------------------------------------------------------------------------

    @property
    def facts(self) -> ModelFacts:
        """What the engine told of its model and of itself."""
        return self._client.facts

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs."""
        return self._client.is_alive

    def memory(self) -> int:
        """Return the resident memory of the engine's processes, in bytes."""
        return self._client.memory()

    async def stats(self) -> dict[str, Any]:
        """Return what the first worker holds for us: requests, captures and their bytes."""
        return await self._loop.run(self._client.stats())

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
        steered = len(self._steering.spec.layers)
        return f"VLLMSteerModel({self.model_name!r}, {self.layer_count} layers, {steered} steered)"


def _handles(handles: Iterable[CaptureHandle]) -> list[CaptureHandle]:
    found = as_list(handles)
    for handle in found:
        if not isinstance(handle, CaptureHandle):
            raise CaptureError(
                f"expected a list of CaptureHandle, got {kind_of(handle, CaptureHandle)} in it; generate and chat "
                f"return (answers, handles) with capture_layers: pass the handles"
            )
    return found
