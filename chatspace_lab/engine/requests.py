"""Turning what a user asked into checked requests: everything that can be wrong is found here, before anything runs."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import torch

from chatspace_lab import wire
from chatspace_lab.capture import CaptureHandle
from chatspace_lab.chat import ChatResponse, RenderedChat, answer, check_text
from chatspace_lab.errors import PromptTooLongError, RequestError, SteeringError, kind_of
from chatspace_lab.special_tokens import special_ids, warn_of_doubled
from chatspace_lab.steering.program import Program, check_layer
from chatspace_lab.steering.specs import HOW_TO_SPECIFY, SteeringSpec
from chatspace_lab.steering.vectors import as_index, as_list
from chatspace_lab.steering.where import Where, as_where, resolve

if TYPE_CHECKING:
    from vllm import RequestOutput as RequestOutput  # for the annotations of what stands above the engine
    from vllm import SamplingParams as SamplingParams

    from chatspace_lab.engine.observer import Progress

Steering: TypeAlias = SteeringSpec | Sequence[SteeringSpec | None] | None
Conversation: TypeAlias = Sequence[Mapping[str, Any]]
Directions: TypeAlias = Mapping[str, Any] | Sequence[str]
OWN_ARGUMENTS = (
    "sampling_params",
    "capture_layers",
    "capture_where",
    "steering",
    "raw_output",
    "chat_options",
    "read_layers",
    "directions",
    "progress",
)

OTHER_NAMES = {
    "do_sample": "temperature=0.0 takes the likeliest token, a higher temperature samples",
    "num_return_sequences": "n is the number of samples of a prompt",
    "eos_token_id": "stop_token_ids is a list of tokens that end an answer",
    "num_beams": "beam search is not supported",
    "stream": "lab.stream(…) and lab.stream_chat(…) give an answer piece by piece",
}
"""What stands here for arguments of Hugging Face's and OpenAI's interfaces."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """The arguments that generate, chat and stream share, as they were given.

    ``make_handle`` takes the arguments of :class:`CaptureHandle`, and returns one.
    """

    sampling_params: Any
    sampling: Mapping[str, Any]
    capture_layers: Sequence[int] | None
    capture_where: Where | str
    steering: Steering
    raw_output: bool = False
    read_layers: Sequence[int] | None = None
    progress: Progress | None = None
    make_handle: Callable[..., CaptureHandle] = CaptureHandle

    @property
    def follows_session(self) -> bool:
        """Whether any of the requests follows the session-wide steering."""
        steering = self.steering
        return steering is None or (isinstance(steering, Sequence) and any(spec is None for spec in steering))


@dataclasses.dataclass
class Prompt:
    """One prompt, tokenised."""

    token_ids: list[int]
    text: str | None = None
    chat: RenderedChat | None = None


PromptLike: TypeAlias = str | Sequence[int] | Mapping[str, Any] | Prompt
Prompts: TypeAlias = PromptLike | Sequence[PromptLike]


@dataclasses.dataclass
class Submission:
    """One request to the engine: one sample of one prompt.

    ``spec`` is its steering, compiled to ``program``: None is no steering; else it acts on ``steer_spans``.
    ``handle`` None is no capture. ``params`` has the request's own seed. ``progress`` counts this request.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    handle: CaptureHandle | None
    prompt_index: int
    sample_index: int
    tokenizer: Any = None
    progress: Progress | None = None
    spec: SteeringSpec = dataclasses.field(default_factory=SteeringSpec.none)
    program: Program | None = None
    steer_spans: list[int] = dataclasses.field(default_factory=list)

    def response(self, text: str, token_ids: Sequence[int], finish_reason: str | None) -> ChatResponse:
        """Return what was generated as a response."""
        return answer(self.tokenizer, self.prompt.chat, text, token_ids, finish_reason)

    def steer(self, spec: SteeringSpec, program: Program | None, max_model_len: int) -> None:
        """Set the steering, with its positions resolved for this prompt."""
        self.spec, self.program = spec, program
        if self.handle is not None:
            self.handle.steering = spec
        if program is not None:
            self.steer_spans = spans_of(as_where(spec.where), self.prompt, self.params, self.tokenizer, max_model_len)

    def engine_prompt(self) -> dict[str, Any]:
        """Return the prompt for vLLM, salted by its steering so that KV caches are never mixed."""
        prompt: dict[str, Any] = {"prompt_token_ids": self.prompt.token_ids}
        if self.prompt.text is not None:
            prompt["prompt"] = self.prompt.text
        if self.program is not None:
            prompt["cache_salt"] = self.program.salt(self.steer_spans)
        return prompt

    def engine_params(self, rows: Sequence[int], *, stream: bool) -> SamplingParams:
        """Return the sampling parameters for vLLM, with what the workers must know."""
        from vllm.sampling_params import RequestOutputKind

        params = copy.copy(self.params)  # vLLM's own front end makes the deep one
        params.n = 1
        params.output_kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        if self.program is None and self.handle is None:
            return params
        payload: wire.RequestPayload = {
            "key": self.request_id,
            "ops": self.program.payload(rows) if self.program else b"",
            "steer_spans": self.steer_spans,
            "capture_layers": list(self.handle.layer_indices) if self.handle else [],
            "capture_spans": self.handle.spans if self.handle else [],
        }
        params.extra_args = {**(params.extra_args or {}), wire.EXTRA: payload}
        if self.handle is not None and self.handle.spans[0] < len(self.prompt.token_ids):
            # A token whose KV comes from the cache is never computed, so there would be nothing to capture.
            params.skip_reading_prefix_cache = True
        return params


def nth_seed(seed: int, turn: int) -> int:
    """Return the seed of the sample of this number among those that are drawn with ``seed``."""
    return seed + turn if seed + turn < 1 << 64 else seed + turn - (1 << 64)  # torch takes no larger one


def seeds_of(prompts: Sequence[Prompt], seed: int | None) -> list[dict[str, Any]]:
    """Return for each prompt the seed as a keyword; a prompt that is repeated has the ones that follow."""
    if seed is None:
        return [{} for _ in prompts]
    before: Counter[tuple[int, ...]] = Counter()
    seeds: list[dict[str, Any]] = []
    for prompt in prompts:
        key = tuple(prompt.token_ids)
        seeds.append({"seed": nth_seed(seed, before[key])})
        before[key] += 1
    return seeds


def seed_apart(submissions: Sequence[Submission]) -> None:
    """Give equal requests of one call consecutive seeds, so that each is a sample of its own.

    Equal are those of the same token ids and steering: the ``n`` samples of a prompt, and a prompt that is repeated.
    Others keep the seed that was given: prompts that differ, and one prompt under different steering, are drawn with
    common random numbers.
    """
    seen: dict[tuple[tuple[int, ...], str], int] = {}
    for each in submissions:
        if each.params.seed is None:
            continue
        salt = "" if each.program is None else each.program.salt(each.steer_spans)
        key = tuple(each.prompt.token_ids), salt
        turn = seen.get(key, 0)
        seen[key] = turn + 1
        if turn:
            each.params = copy.copy(each.params)
            each.params.seed = nth_seed(each.params.seed, turn)


def spans_of(where: Where, prompt: Prompt, params: SamplingParams, tokenizer: Any, max_model_len: int) -> list[int]:
    """Return the positions that ``where`` chooses of a request, as flat spans."""
    longest = max_model_len if params.max_tokens is None else len(prompt.token_ids) + params.max_tokens
    return resolve(
        where,
        prompt.token_ids,
        limit=min(longest, max_model_len),
        special_ids=special_ids(tokenizer) if tokenizer is not None and not where.special_tokens else (),
        messages=prompt.chat.boundaries if prompt.chat else None,
    )


def sampling_from(sampling_params: Any, keywords: Mapping[str, Any], *, own: Sequence[str]) -> SamplingParams:
    """Return the sampling parameters that a call asks for.

    Raises
    ------
    RequestError
        If both forms are used, or a keyword is unknown; suggests the nearest known one.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError  # a ValueError in some versions

    if sampling_params is not None:
        if keywords:
            raise RequestError(f"give sampling_params or sampling keywords ({', '.join(keywords)}), not both")
        if not isinstance(sampling_params, SamplingParams):
            raise RequestError(f"sampling_params: expected vllm.SamplingParams, got {type(sampling_params).__name__}")
        return _readable(sampling_params)
    known = [name for name in inspect.signature(SamplingParams).parameters if not name.startswith("_")]
    for name in keywords:
        if name not in known:
            meant = OTHER_NAMES.get(name)
            if meant is not None:
                raise RequestError(f"unknown argument {name}; {meant}")
            close = difflib.get_close_matches(name, [*own, *known], n=1)
            raise RequestError(f"unknown argument {name}" + (f"; did you mean {close[0]}?" if close else ""))
    try:
        params = SamplingParams(**{name: _python(value) for name, value in keywords.items()})
    except (TypeError, ValueError, AssertionError, VLLMValidationError) as error:
        raise RequestError(f"sampling: {error}") from error
    return _readable(params)


def _python(value: Any) -> Any:
    """Return a number of numpy or torch as Python's own, and any collection of things as a list."""
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple | set | frozenset) else value


def _readable(params: SamplingParams) -> SamplingParams:
    """Return these parameters as the engine will read them, a copy; ``SamplingParams`` itself does not check types.

    One request that it cannot read ends the thread by which it reads all of them (``process_input_sockets`` in
    ``vllm/v1/engine/core.py``), and nobody would ever be answered again. Tensors among ``extra_args`` pass there, and
    end it when it hands them to its workers.
    """
    if params.extra_args and wire.EXTRA in params.extra_args:
        raise RequestError(f"sampling: extra_args has {wire.EXTRA!r}, which is ours: leave it out, and say steering=")
    from vllm.exceptions import VLLMValidationError  # a ValueError in some versions

    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=type(params))
    except (TypeError, ValueError, OverflowError, VLLMValidationError) as error:
        raise RequestError(f"sampling: the engine cannot read it: {error}") from error


def prompts_from(prompts: Any, tokenizer: Any, vocab_size: int) -> list[Prompt]:
    """Return a prompt, or a list of them, tokenised.

    A prompt is a string, a list of token ids, a dict with ``prompt_token_ids``, or one that was tokenised before.

    Raises
    ------
    RequestError
        Naming the prompt that cannot be used.
    """
    single = isinstance(prompts, str | Mapping | Prompt) or (
        isinstance(prompts, Sequence) and bool(prompts) and all(isinstance(item, int | np.integer) for item in prompts)
    )
    if not single and not isinstance(prompts, Sequence):
        several = "; write list(prompts)" if np.iterable(prompts) else ""
        raise RequestError(f"expected a prompt or a list of prompts, got {type(prompts).__name__}{several}")
    items = [prompts] if single else list(prompts)
    if not items:
        raise RequestError("the list of prompts is empty")
    return [_prompt(item, index, tokenizer, vocab_size) for index, item in enumerate(items)]


def _prompt(item: Any, index: int, tokenizer: Any, vocab_size: int) -> Prompt:
    if isinstance(item, Prompt):
        return item
    if isinstance(item, str):
        if tokenizer is None:
            raise RequestError(
                f"prompt {index} is text, but this model was started without a tokenizer: give token ids"
            )
        try:
            ids, text = list(tokenizer(check_text(item))["input_ids"]), item
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}") from error.__cause__
        warn_of_doubled(tokenizer, item, ids, f"prompt {index}")
    else:
        text = None
        if isinstance(item, Mapping):
            if set(item) - {"prompt_token_ids", "prompt"} or "prompt_token_ids" not in item:
                raise RequestError(f"prompt {index}: a dict needs prompt_token_ids, got {sorted(item)}")
            item, text = item["prompt_token_ids"], item.get("prompt")
        if not isinstance(item, Sequence) or isinstance(item, str | bytes | bytearray):
            raise RequestError(f"prompt {index}: expected text or token ids, got {type(item).__name__}")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt {index}: its text is no text, but {type(text).__name__}")
        try:
            ids = list(item) if set(map(type, item)) == {int} else [as_index(token, "a token id") for token in item]
        except SteeringError as error:
            raise RequestError(f"prompt {index}: expected text or token ids: {error}") from None
        bad = [token for token in ids if not 0 <= token < vocab_size]
        if bad:
            raise RequestError(f"prompt {index}: token id {bad[0]} is not in the vocabulary of {vocab_size}")
    if not ids:
        raise RequestError(f"prompt {index} is empty: it has no tokens")
    return Prompt(ids, text)


def check_length(prompt: Prompt, index: int, max_tokens: int | None, max_model_len: int) -> None:
    """Check that a prompt and its answer fit.

    Raises
    ------
    PromptTooLongError
        With the numbers, and what to change. Nothing is ever cut.
    """
    length = len(prompt.token_ids)
    if length >= max_model_len:
        raise PromptTooLongError(
            f"prompt {index} has {length} tokens and max_model_len is {max_model_len}: "
            f"shorten it, or start the model with a larger max_model_len"
        )
    if max_tokens is not None and length + max_tokens > max_model_len:
        raise PromptTooLongError(
            f"prompt {index} has {length} tokens; with max_tokens={max_tokens} it passes max_model_len "
            f"{max_model_len}: ask for at most {max_model_len - length}, or start the model with a larger max_model_len"
        )


def check_capture_layers(layers: Any, layer_count: int, name: str = "capture_layers") -> list[int]:
    """Return the layers to capture, sorted, each once. ``name`` is that of the argument.

    Raises
    ------
    RequestError
        If one does not exist, or there is none.
    """
    try:
        chosen = sorted({check_layer(layer, layer_count) for layer in as_list(layers)})
    except SteeringError as error:
        every = f"; all of them are range({layer_count})" if isinstance(layers, str) else ""
        raise RequestError(f"{name}: {error}{every}") from None
    if not chosen:
        raise RequestError(f"{name} is empty: name at least one layer, or leave it out")
    return chosen


def steering_per_prompt(steering: Steering, count: int) -> list[SteeringSpec | None]:
    """Return one entry per prompt; None is the session-wide steering.

    Raises
    ------
    RequestError
        If a list has another length than there are prompts.
    """
    if steering is None or isinstance(steering, SteeringSpec):
        return [steering] * count
    if isinstance(steering, Sequence) and not isinstance(steering, str):
        if len(steering) != count:
            raise RequestError(f"steering: {len(steering)} specs for {count} prompts; give one each, or a single one")
        for index, spec in enumerate(steering):
            if spec is not None and not isinstance(spec, SteeringSpec):
                raise RequestError(
                    f"steering[{index}]: expected SteeringSpec or None, got {kind_of(spec, SteeringSpec)}"
                )
        return list(steering)
    raise RequestError(
        f"steering: expected a SteeringSpec, a list of them, or None, got {kind_of(steering, SteeringSpec)}; "
        f"{HOW_TO_SPECIFY}"
    )


def sampling_of(params: Any) -> dict[str, Any]:
    """Return the fields of ``vllm.SamplingParams`` that differ from its defaults, as plain data."""
    from vllm import SamplingParams

    plain = SamplingParams()
    fields = [name for name in params.__struct_fields__ if not name.startswith("_")]
    own = ("output_kind", "extra_args", "skip_reading_prefix_cache")
    found = {name: getattr(params, name) for name in fields if name not in own}
    return {name: _plain(value) for name, value in found.items() if value != getattr(plain, name)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    return repr(value)
