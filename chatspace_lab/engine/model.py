"""The model: an engine that can be steered and read, for use with ``await`` from any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from chatspace_lab.capture import CaptureHandle
from chatspace_lab.chat import Completion, answer
from chatspace_lab.engine.client import EngineClient, ModelFacts, Observer
from chatspace_lab.engine.config import VLLMSteeringConfig
from chatspace_lab.engine.fixed import Fixed
from chatspace_lab.engine.requests import Ask, Steering, prompts_from
from chatspace_lab.engine.serving import RequestMethods
from chatspace_lab.engine.state import SessionSteering
from chatspace_lab.engine.steering_methods import SessionSteeringMethods
from chatspace_lab.engine.stream import TextStream
from chatspace_lab.errors import CaptureError, SteeringError, kind_of
from chatspace_lab.readings import Readings
from chatspace_lab.steering.directions import DirectionSet
from chatspace_lab.steering.names import Vectors, directions_named
from chatspace_lab.steering.program import check_layer
from chatspace_lab.steering.specs import SteeringSpec
from chatspace_lab.steering.vectors import as_list
from chatspace_lab.steering.where import Where


class VLLMSteerModel(RequestMethods, SessionSteeringMethods, Fixed):
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

    Raises
    ------
    ConfigError, UnsupportedError, EngineStartError
        If the model cannot be started. Nothing is left running then.
    """

    _open = frozenset({"vectors"})

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
        self.config = (VLLMSteeringConfig(cfg) if isinstance(cfg, str) else cfg).fixed()
        layers = list(bootstrap_layers)
        self._client = EngineClient.start(self.config, enforce_eager, progress)
        facts = self._client.facts
        self.model_name = self.config.model_name
        self.hidden_size, self.layer_count, self.dtype = facts.hidden_size, facts.layer_count, facts.dtype
        self.max_model_len, self.tokenizer = facts.max_model_len, facts.tokenizer
        self.vectors: dict[str, Any] = Vectors()
        self._loop, self._lock = self._client.loop, self._client.lock
        self._session = SessionSteering(self._lock, self._client.bank, self._compile)
        try:
            for layer in layers:
                check_layer(layer, self.layer_count)
        except SteeringError as error:
            self.close()
            raise SteeringError(f"bootstrap_layers: {error}") from None
        self._fix()

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
        return await self._run(
            self._complete(
                lambda: prompts_from(prompts, self.tokenizer, self._client.facts.vocab_size),
                lambda _, output: Completion(output.text, output.finish_reason),
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
        sampling_params, capture_layers, capture_where, steering, raw_output
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
        return await self._run(
            self._complete(
                lambda: self._chat_prompts(messages, chat_options),
                lambda submission, output: answer(
                    self.tokenizer, submission.prompt.chat, output.text, output.token_ids, output.finish_reason
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
        read_layers: Sequence[int] | None = None,
        directions: Mapping[str, Any] | Sequence[str] | None = None,
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
        return self._stream(prompts_from(prompt, self.tokenizer, self._client.facts.vocab_size), ask, directions)

    def stream_chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        *,
        chat_options: dict[str, Any] | None = None,
        capture_layers: Sequence[int] | None = None,
        capture_where: Where | str = "all",
        steering: SteeringSpec | None = None,
        read_layers: Sequence[int] | None = None,
        directions: Mapping[str, Any] | Sequence[str] | None = None,
        **sampling: Any,
    ) -> TextStream:
        """Answer one conversation piece by piece. Arguments as for :meth:`chat` and :meth:`stream`."""
        ask = Ask(sampling_params, sampling, capture_layers, capture_where, steering, read_layers=read_layers)
        return self._stream(self._chat_prompts(messages, chat_options), ask, directions)

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
        directions: Mapping[str, Any] | Sequence[str] | None = None,
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

    def observe(self, observer: Observer) -> None:
        """Tell ``observer`` of every request from now on; it is called on the engine's loop, and must be quick."""
        self._client.observers.append(observer)

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
        return await self._run(self._client.stats())

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


def _handles(handles: Iterable[CaptureHandle]) -> list[CaptureHandle]:
    found = as_list(handles)
    for handle in found:
        if not isinstance(handle, CaptureHandle):
            raise CaptureError(
                f"expected a list of CaptureHandle, got {kind_of(handle, CaptureHandle)} in it; generate and chat "
                f"return (answers, handles) with capture_layers: pass the handles"
            )
    return found
