"""The lab in a notebook: one running engine per kernel, and a blocking twin of everything that can be awaited."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from chatspace_lab.chat import ChatResponse, Completion
from chatspace_lab.engine.client import EngineClient
from chatspace_lab.engine.config import VLLMSteeringConfig
from chatspace_lab.engine.fixed import Fixed
from chatspace_lab.engine.model import VLLMSteerModel
from chatspace_lab.engine.observer import Progress
from chatspace_lab.engine.requests import Ask, Conversation, Directions, PromptLike, Prompts, Steering
from chatspace_lab.errors import (
    AnalysisError,
    CaptureError,
    ConfigError,
    EngineDeadError,
    MessageLocationError,
    RequestError,
    SessionError,
    SteeringError,
    kind_of,
)
from chatspace_lab.models import DEMO_NAME
from chatspace_lab.quiet import quieten
from chatspace_lab.session.aio import AsyncLab
from chatspace_lab.session.bar import INTERRUPTS, Bar, say
from chatspace_lab.session.card import card
from chatspace_lab.session.handle import LabCaptureHandle
from chatspace_lab.session.history import History, describe
from chatspace_lab.session.in_force import SteeringInForce
from chatspace_lab.session.start import StartDisplay, files_of, find_model, fits_beside
from chatspace_lab.session.stream import LabStream
from chatspace_lab.steering.names import directions_named
from chatspace_lab.steering.program import check_layer
from chatspace_lab.steering.specs import SteeringSpec
from chatspace_lab.steering.vectors import as_list

if TYPE_CHECKING:
    import pandas as pd

    from chatspace_lab.analysis.direction import Direction
    from chatspace_lab.capture import CaptureHandle
    from chatspace_lab.engine.requests import RequestOutput, SamplingParams
    from chatspace_lab.readings import Readings
    from chatspace_lab.session.pooled import PooledActivations
    from chatspace_lab.steering.where import Where

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def blocking(twin: Callable[..., Any]) -> Callable[[F], F]:
    """Give a method the documentation of the async side's method of the same name."""
    name = twin.__name__
    way = ""
    if inspect.iscoroutinefunction(twin):
        way = f"\n\nThis blocks; ``await lab.aio.{name}(…)`` is the same in async code."
    elif name.startswith("stream"):
        way = f"\n\nThis is for a plain ``for`` loop; ``lab.aio.{name}(…)`` is for ``async for``."

    def add(method: F) -> F:
        method.__doc__ = f"{inspect.getdoc(twin)}{way}"
        return method

    return add


MISUSE = (AnalysisError, CaptureError, MessageLocationError, RequestError, SteeringError)
"""Errors about what the caller gave."""

_running: list[LabSession] = globals().get("_running", [])  # a reload of this module keeps them
_making = threading.RLock()


class LabSession(Fixed):
    """An engine that lives in this kernel, with blocking methods.

    Every coroutine of :class:`VLLMSteerModel` and :class:`AsyncLab` has a twin here with the same name and arguments;
    :attr:`aio` is the async side. Calls work in a cell, a callback, a coroutine and a thread. The stop button (Ctrl-C)
    aborts the request within a second; what had come by then is in :attr:`partial`, and the engine is ready again.

    Making a lab a second time with the same arguments, as a cell that is run again does, returns the running one.

    Parameters
    ----------
    model
        A folder or a name on the Hugging Face hub; a configuration; a running model, which becomes this lab's; or None
        for the packaged demo model.
    bootstrap_layers, enforce_eager
        As for :class:`VLLMSteerModel`.
    replace
        Start this one in place of those that run, which are closed once it runs. Where memory, or a GPU, does not hold
        both, they are closed just before the start, after the model was looked up and the options were checked.
    beside
        Start this one beside others; a kernel may hold several, if the machine can.
    options
        Of :class:`VLLMSteeringConfig`.

    Attributes
    ----------
    aio : AsyncLab
        The async side.
    history : History
        Every request, as a list; ``lab.history.frame()`` is a table.
    partial
        What the last interrupted call had: texts, answers, or the finished part of a sweep or a capture.
    norms : dict of int to float
        Mean residual norm per layer on the prompt that was measured last (:attr:`measured_on`), attention sinks left
        out (:attr:`left_out`).
    vectors : dict of str to vector
        Named vectors and directions. Wherever a vector is taken, its name in here will do: ``lab.steer(16, "joy")``.
        Panels offer these, and put here what is made in them.

    Raises
    ------
    SessionError
        If a lab runs with other arguments; says with which, and how to replace it.
    ConfigError, UnsupportedError, EngineStartError
        If the engine cannot be started. Nothing of it is left running then; a lab that it was to replace goes on,
        unless it had to make room (the error has a note that says so).
    """

    _open = frozenset({"partial"})

    aio: AsyncLab
    partial: Any
    _closed: bool

    def __new__(
        cls,
        model: VLLMSteerModel | VLLMSteeringConfig | str | None = None,
        *,
        bootstrap_layers: Iterable[int] = (),
        enforce_eager: bool | None = None,
        replace: bool = False,
        beside: bool = False,
        **options: Any,
    ) -> LabSession:
        """Return the running lab with these arguments, or start one."""
        arguments = {"bootstrap_layers": list(bootstrap_layers), "enforce_eager": enforce_eager, **options}
        # A configuration can be edited, and a folder be written again, after the engine has started.
        key = {"model": _as_given(model), "files": files_of(model), **copy.deepcopy(arguments)}
        with _making:
            for lab in _running:
                if lab._key == key and not replace:
                    if lab.is_alive:
                        return lab
                    lab.close()  # its engine died
            others = list(_running)
            if others and not replace and not beside:
                same = {**others[0]._key, "files": None} == {**key, "files": None}
                changed = "; the model's folder was written to since" if same else ""
                raise SessionError(
                    f"a lab runs already in this kernel: {others[0]!r}, made by {others[0]._made_by}{changed}. "
                    f"Use that one, close it (lab.close()), replace it (LabSession(…, replace=True)), or start this "
                    f"one beside it (beside=True)"
                )
            lab = super().__new__(cls)
            lab._start(key, model, list(bootstrap_layers), enforce_eager, options, others if replace else [])
            _running.append(lab)
            return lab

    def _start(
        self,
        key: dict[str, Any],
        model: Any,
        bootstrap_layers: list[int],
        eager: bool | None,
        options: dict[str, Any],
        replaced: list[LabSession],
    ) -> None:
        if isinstance(model, VLLMSteerModel):
            if options or bootstrap_layers or eager is not None:
                raise SessionError("LabSession: a running model takes no further arguments")
            started = model
        else:
            if not isinstance(model, VLLMSteeringConfig | str | os.PathLike | None):
                wanted = kind_of(model, VLLMSteeringConfig, VLLMSteerModel)
                raise ConfigError(f"LabSession: expected a model's name or folder, or a configuration, got {wanted}")
            quieten()
            name = model.model_name if isinstance(model, VLLMSteeringConfig) else model
            with StartDisplay(DEMO_NAME if name is None else str(name)) as display:
                found = find_model(None if name is None else os.fspath(name), display.show)
                if isinstance(model, VLLMSteeringConfig):
                    if options:
                        raise SessionError("LabSession: give a configuration or its options, not both")
                    config = model
                else:
                    config = VLLMSteeringConfig(found, **{"use_tqdm_on_load": False, **options})
                if replaced:
                    display.show("looking up the model")
                    prepared = EngineClient.check(config, eager)
                    for layer in bootstrap_layers:
                        check_layer(layer, prepared.vllm_config.model_config.hf_text_config.num_hidden_layers)
                    if not fits_beside(prepared):
                        display.show("closing the lab that runs: there is no memory for both")
                        for lab in replaced:
                            lab.close()
                try:
                    started = VLLMSteerModel(
                        config, bootstrap_layers=bootstrap_layers, enforce_eager=eager, progress=display.show
                    )
                except BaseException as error:
                    if any(lab._closed for lab in replaced):
                        error.add_note(
                            "the lab that ran before is closed: there was no memory for both engines at once"
                        )
                    raise
        for lab in replaced:
            lab._give_up(started)
        self._key = key
        self._name = DEMO_NAME if model is None else started.model_name
        self._model = started
        self._loop = started._loop
        self._closed = False
        self._panels: weakref.WeakSet[Any] = weakref.WeakSet()  # told of the end; each adds itself
        self.aio = AsyncLab(started)
        self.partial = None
        self._fix()

    # -- facts -------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> VLLMSteerModel:
        """The engine."""
        return self._model

    @property
    def history(self) -> History:
        """Every request since the lab was made."""
        return self.aio.history

    @property
    def norms(self) -> dict[int, float]:
        """Mean residual norm per layer on the prompt that was measured last; empty before."""
        return self.aio.norms

    @property
    def left_out(self) -> pd.DataFrame:
        """The tokens that those norms leave out as attention sinks, a row per layer and token."""
        return self.aio.left_out

    @property
    def measured_on(self) -> str | None:
        """The prompt that was measured last."""
        return self.aio.measured_on

    @property
    def vectors(self) -> dict[str, Any]:
        """Named vectors and directions; the async side and the engine have the same."""
        return self.aio.vectors

    @vectors.setter
    def vectors(self, vectors: Mapping[str, Any]) -> None:
        self.aio.vectors = vectors

    @property
    def model_name(self) -> str:
        """Name or folder, as the engine was given it."""
        return self._model.model_name

    @property
    def layer_count(self) -> int:
        """Number of decoder blocks."""
        return self._model.layer_count

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self._model.hidden_size

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer, together."""
        return self._model.max_model_len

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        return self._model.tokenizer

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs."""
        return not self._closed and self._model.is_alive

    @property
    def _made_by(self) -> str:
        model = self._key["model"]
        given = [] if model is None else [repr(model.model_name if hasattr(model, "model_name") else model)]
        given += [
            f"{name}={value!r}"
            for name, value in self._key.items()
            if name not in ("model", "files") and value not in (None, [])
        ]
        return f"LabSession({', '.join(given)})"

    # -- waiting for the engine --------------------------------------------------------------------------------------

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop and wait."""
        return self._loop.call(coroutine)

    def _call(
        self,
        title: str,
        progress: Progress | None,
        start: Callable[[Progress], Coroutine[Any, Any, T]],
        *,
        default_length: bool = False,
    ) -> T:
        """Run a coroutine on the engine's loop and wait, with a bar if it takes long.

        Interrupted, what it had by then is in :attr:`partial`. ``default_length`` means that the caller gave
        no ``max_tokens``: a note then counts the answers that vLLM's default cut off.
        """
        follow = Progress() if progress is None else progress
        try:
            with Bar(title, follow) as bar:
                result = self._loop.call(start(follow), tick=bar.tick)
        except INTERRUPTS:
            found = follow.partial
            if found is not None:
                self.partial = found
                print("interrupted: what had come by then is in lab.partial", file=sys.stderr)
            raise
        except MISUSE as error:
            raise error.with_traceback(None)  # noqa: B904 - it says what to do; the way to it is ours
        else:
            if default_length and follow.cut_off:
                follow.notes.append(
                    f"{follow.cut_off} of {follow.total} answers ended at vLLM's default of max_tokens=16; "
                    f"max_tokens=200 allows longer ones"
                )
            return result
        finally:
            if progress is None:
                for note in follow.notes:
                    say(note)

    def _ask(
        self,
        sampling_params: SamplingParams | None,
        sampling: dict[str, Any],
        capture_layers: Sequence[int] | None,
        capture_where: Where | str,
        steering: Steering,
        **more: Any,
    ) -> Ask:
        """Return the arguments of a request; its captures have methods that block."""
        make_handle = functools.partial(LabCaptureHandle, self._wait)
        return Ask(sampling_params, sampling, capture_layers, capture_where, steering, make_handle=make_handle, **more)

    # -- generating --------------------------------------------------------------------------------------------------

    @overload
    def generate(
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
    def generate(
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
    ) -> tuple[list[Completion], list[LabCaptureHandle]]: ...

    @overload
    def generate(
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
    def generate(
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
    ) -> tuple[list[RequestOutput], list[LabCaptureHandle]]: ...

    @blocking(AsyncLab.generate)
    def generate(
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
        """Complete one prompt or several."""

        def start(follow: Progress) -> Coroutine[Any, Any, Any]:
            common = sampling_params, sampling, capture_layers, capture_where, steering
            ask = self._ask(*common, raw_output=raw_output, progress=follow)
            return self.aio.execution.generate(prompts, ask)

        default_length = sampling_params is None and "max_tokens" not in sampling
        return self._call("generate", progress, start, default_length=default_length)

    @overload
    def chat(
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
    def chat(
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
    ) -> tuple[list[ChatResponse], list[LabCaptureHandle]]: ...

    @overload
    def chat(
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
    def chat(
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
    ) -> tuple[list[RequestOutput], list[LabCaptureHandle]]: ...

    @blocking(AsyncLab.chat)
    def chat(
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
        """Answer one conversation or several."""

        def start(follow: Progress) -> Coroutine[Any, Any, Any]:
            common = sampling_params, sampling, capture_layers, capture_where, steering
            ask = self._ask(*common, raw_output=raw_output, progress=follow)
            return self.aio.execution.chat(messages, chat_options, ask)

        default_length = sampling_params is None and "max_tokens" not in sampling
        return self._call("chat", progress, start, default_length=default_length)

    @blocking(AsyncLab.ask)
    def ask(
        self, text: str, *, system: str | None = None, progress: Progress | None = None, **options: Any
    ) -> ChatResponse:
        """Answer one user message."""
        return self._call(
            "ask",
            progress,
            lambda follow: self.aio.ask(text, system=system, progress=follow, **options),
            default_length=not {"max_tokens", "sampling_params"} & set(options),
        )

    @blocking(AsyncLab.stream)
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
    ) -> LabStream:
        """Complete one prompt piece by piece, in a plain ``for`` loop."""
        execution = self.aio.execution
        ask = self._ask(sampling_params, sampling, capture_layers, capture_where, steering, read_layers=read_layers)
        return LabStream(self, execution.stream(execution.prompts(prompt), ask, directions))

    @blocking(AsyncLab.stream_chat)
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
    ) -> LabStream:
        """Answer one conversation piece by piece, in a plain ``for`` loop."""
        execution = self.aio.execution
        ask = self._ask(sampling_params, sampling, capture_layers, capture_where, steering, read_layers=read_layers)
        return LabStream(self, execution.stream(execution.conversations(messages, chat_options), ask, directions))

    # -- captures ----------------------------------------------------------------------------------------------------

    @overload
    def capture(
        self,
        prompts: Sequence[Any],
        layers: int | Sequence[int],
        reduce: Literal["last", "mean"] = "last",
        *,
        directions: Directions | None = None,
        where: Where | str = "prompt",
        steering: SteeringSpec | Literal["session"] | None = None,
        attention_sinks: bool = False,
        chat_options: dict[str, Any] | None = None,
        max_tokens: int = 1,
        temperature: float = 0.0,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> PooledActivations: ...

    @overload
    def capture(
        self,
        prompts: Sequence[Any],
        layers: int | Sequence[int],
        reduce: Literal["norm", "projection"],
        *,
        directions: Directions | None = None,
        where: Where | str = "prompt",
        steering: SteeringSpec | Literal["session"] | None = None,
        attention_sinks: bool = False,
        chat_options: dict[str, Any] | None = None,
        max_tokens: int = 1,
        temperature: float = 0.0,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> pd.DataFrame: ...

    @overload
    def capture(
        self,
        prompts: Sequence[Any],
        layers: int | Sequence[int],
        reduce: str,
        *,
        directions: Directions | None = None,
        where: Where | str = "prompt",
        steering: SteeringSpec | Literal["session"] | None = None,
        attention_sinks: bool = False,
        chat_options: dict[str, Any] | None = None,
        max_tokens: int = 1,
        temperature: float = 0.0,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> PooledActivations | pd.DataFrame: ...

    @blocking(AsyncLab.capture)
    def capture(
        self,
        prompts: Sequence[Any],
        layers: int | Sequence[int],
        reduce: str = "last",
        *,
        directions: Directions | None = None,
        where: Where | str = "prompt",
        steering: SteeringSpec | Literal["session"] | None = None,
        attention_sinks: bool = False,
        chat_options: dict[str, Any] | None = None,
        max_tokens: int = 1,
        temperature: float = 0.0,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> PooledActivations | pd.DataFrame:
        """Run many prompts and keep of each only a reduction of its activations."""
        return self._call(
            "capture",
            progress,
            lambda follow: self.aio.capture(
                prompts,
                layers,
                reduce,
                directions=directions,
                where=where,
                steering=steering,
                attention_sinks=attention_sinks,
                chat_options=chat_options,
                max_tokens=max_tokens,
                temperature=temperature,
                progress=follow,
                **sampling,
            ),
        )

    @blocking(AsyncLab.fetch_captures_batch)
    def fetch_captures_batch(self, handles: Sequence[CaptureHandle]) -> None:
        """Bring the rows of many handles into this process in one round."""
        self._wait(self.aio.fetch_captures_batch(handles))

    @blocking(AsyncLab.read_captures)
    def read_captures(
        self,
        handles: Sequence[CaptureHandle],
        directions: Directions | None = None,
        *,
        layers: Sequence[int] | None = None,
    ) -> list[Readings]:
        """Return the norm of each row, and its projection on directions."""
        return self._wait(self.aio.read_captures(handles, directions, layers=layers))

    @blocking(AsyncLab.measure)
    def measure(
        self,
        prompt: Any = None,
        *,
        chat_options: dict[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> pd.DataFrame:
        """Measure the residual stream's norm on a prompt."""
        return self._call(
            "measure", progress, lambda follow: self.aio.measure(prompt, chat_options=chat_options, progress=follow)
        )

    @blocking(AsyncLab.direction)
    def direction(
        self,
        positive: Sequence[Any],
        negative: Sequence[Any],
        *,
        name: str,
        layers: int | Sequence[int] | None = None,
        method: str = "difference of means",
        groups: Iterable[Hashable] | None = None,
        reduce: str | None = None,
        where: Where | str | None = None,
        steering: SteeringSpec | Literal["session"] | None = None,
        chat_options: dict[str, Any] | None = None,
        folds: int = 5,
        shuffles: int = 20,
        splits: int = 10,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Direction:
        """Build the direction from ``negative`` to ``positive`` texts, test it, and keep it in :attr:`vectors`."""
        return self._call(
            "direction",
            progress,
            lambda follow: self.aio.direction(
                positive,
                negative,
                name=name,
                layers=layers,
                method=method,
                groups=groups,
                reduce=reduce,
                where=where,
                steering=steering,
                chat_options=chat_options,
                folds=folds,
                shuffles=shuffles,
                splits=splits,
                seed=seed,
                progress=follow,
            ),
        )

    @blocking(AsyncLab.sweep)
    def sweep(
        self,
        prompt: Any,
        layers: int | Sequence[int],
        vector: Any,
        scales: Iterable[float | str] | None = None,
        *,
        doses: Iterable[float] | None = None,
        operation: str = "add",
        bound: str = "max",
        read_layer: int | None = None,
        perplexity: bool = True,
        score: Callable[[str], float] | None = None,
        chat_options: dict[str, Any] | None = None,
        max_tokens: int = 48,
        temperature: float = 0.0,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> pd.DataFrame:
        """Run every layer with every scale as one batch."""
        return self._call(
            "sweep",
            progress,
            lambda follow: self.aio.sweep(
                prompt,
                layers,
                vector,
                scales,
                doses=doses,
                operation=operation,
                bound=bound,
                read_layer=read_layer,
                perplexity=perplexity,
                score=score,
                chat_options=chat_options,
                max_tokens=max_tokens,
                temperature=temperature,
                progress=follow,
                **sampling,
            ),
        )

    # -- session-wide steering ---------------------------------------------------------------------------------------

    @blocking(AsyncLab.steer)
    def steer(
        self,
        layers: int | Sequence[int],
        vector: Any,
        scale: float | None = None,
        *,
        dose: float | None = None,
        progress: Progress | None = None,
    ) -> SteeringInForce:
        """Add a vector at one or several layers from now on."""
        return self._call(
            "steer", progress, lambda follow: self.aio.steer(layers, vector, scale, dose=dose, progress=follow)
        )

    @blocking(AsyncLab.cap)
    def cap(
        self,
        layers: int | Sequence[int],
        vector: Any,
        min: float | str | None = None,  # noqa: A002
        max: float | str | None = None,  # noqa: A002
        *,
        min_dose: float | None = None,
        max_dose: float | None = None,
        progress: Progress | None = None,
    ) -> SteeringInForce:
        """Clamp the component along a vector to ``[min, max]`` at one or several layers from now on."""
        return self._call(
            "cap",
            progress,
            lambda follow: self.aio.cap(
                layers, vector, min, max, min_dose=min_dose, max_dose=max_dose, progress=follow
            ),
        )

    @blocking(AsyncLab.ablate)
    def ablate(self, layers: int | Sequence[int], vector: Any, scale: float = 0.0) -> SteeringInForce:
        """Multiply the component along a vector by ``scale`` at one or several layers from now on."""
        return self._wait(self.aio.ablate(layers, vector, scale))

    @blocking(AsyncLab.clear)
    def clear(self, layers: int | Sequence[int] | None = None) -> SteeringInForce:
        """Remove all session-wide steering at some layers, at all with None."""
        return self._wait(self.aio.clear(layers))

    @blocking(AsyncLab.in_force)
    def in_force(self) -> SteeringInForce:
        """Return all session-wide steering."""
        return self.aio.in_force()

    @contextlib.contextmanager
    def steering(self, spec: SteeringSpec) -> Iterator[None]:
        """Steer by ``spec`` inside the block; what was in force before comes back, whatever ends the block."""
        block = self.aio.steering(spec)
        self._wait(block.__aenter__())
        try:
            yield
        finally:
            self._wait(block.__aexit__(None, None, None))

    @blocking(AsyncLab.set_layer_vector)
    def set_layer_vector(self, layer_idx: int, vector: Any, scale: float = 1.0) -> None:
        """Add ``scale · vector`` at a layer from now on."""
        self._wait(self.aio.set_layer_vector(layer_idx, vector, scale))

    @blocking(AsyncLab.set_target_layer)
    def set_target_layer(self, layer_idx: int) -> None:
        """Choose the layer of :meth:`set_vector`."""
        self.aio.set_target_layer(layer_idx)

    @blocking(AsyncLab.set_vector)
    def set_vector(self, vector: Any, scale: float = 1.0) -> None:
        """Add ``scale · vector`` at the layer chosen by :meth:`set_target_layer`."""
        self._wait(self.aio.set_vector(vector, scale))

    @blocking(AsyncLab.clear_layer_vector)
    def clear_layer_vector(self, layer_idx: int) -> None:
        """Add nothing at a layer any more."""
        self._wait(self.aio.clear_layer_vector(layer_idx))

    @blocking(AsyncLab.clear_all_vectors)
    def clear_all_vectors(self) -> None:
        """Remove all session-wide steering."""
        self._wait(self.aio.clear_all_vectors())

    @blocking(AsyncLab.set_layer_projection_cap)
    def set_layer_projection_cap(
        self,
        layer_idx: int,
        vector: Any,
        min: float | None = None,  # noqa: A002
        max: float | None = None,  # noqa: A002
    ) -> None:
        """Clamp the component along ``vector`` at a layer to ``[min, max]`` from now on."""
        self._wait(self.aio.set_layer_projection_cap(layer_idx, vector, min, max))

    @blocking(AsyncLab.clear_layer_projection_cap)
    def clear_layer_projection_cap(self, layer_idx: int) -> None:
        """Cap nothing at a layer any more."""
        self._wait(self.aio.clear_layer_projection_cap(layer_idx))

    @blocking(AsyncLab.set_layer_ablation)
    def set_layer_ablation(self, layer_idx: int, vector: Any, scale: float = 0.0) -> None:
        """Multiply the component along ``vector`` at a layer by ``scale`` from now on."""
        self._wait(self.aio.set_layer_ablation(layer_idx, vector, scale))

    @blocking(AsyncLab.clear_layer_ablation)
    def clear_layer_ablation(self, layer_idx: int) -> None:
        """Ablate nothing at a layer any more."""
        self._wait(self.aio.clear_layer_ablation(layer_idx))

    @blocking(AsyncLab.apply_steering_spec)
    def apply_steering_spec(self, spec: SteeringSpec) -> None:
        """Replace all session-wide steering by ``spec``."""
        self._wait(self.aio.apply_steering_spec(spec))

    @blocking(AsyncLab.update_steering_spec)
    def update_steering_spec(self, update: Callable[[SteeringSpec], SteeringSpec]) -> None:
        """Replace the session-wide steering by ``update`` of what is in force then."""
        self._wait(self.aio.update_steering_spec(update))

    @blocking(AsyncLab.push_steering_spec)
    def push_steering_spec(self, spec: SteeringSpec) -> None:
        """Remember the steering in force on a stack and replace it by ``spec``."""
        self._wait(self.aio.push_steering_spec(spec))

    @blocking(AsyncLab.pop_steering_spec)
    def pop_steering_spec(self) -> SteeringSpec:
        """Bring back, and return, the steering that the last push replaced."""
        return self._wait(self.aio.pop_steering_spec())

    @blocking(AsyncLab.export_steering_spec)
    def export_steering_spec(self) -> SteeringSpec:
        """Return the session-wide steering in force."""
        return self.aio.export_steering_spec()

    # -- tables and files --------------------------------------------------------------------------------------------

    def frame(
        self,
        handles: CaptureHandle | Sequence[CaptureHandle],
        directions: Mapping[str, Any] | Sequence[str] | None = None,
        layers: Sequence[int] | int | None = None,
    ) -> pd.DataFrame:
        """Return the token frame of captures (``analysis.token_frame``), fetched first if need be.

        ``directions`` are ``{name: vector}``, or names in :attr:`vectors`.
        """
        from chatspace_lab.analysis.frames import token_frame

        several = as_list(handles)
        if any(getattr(handle, "state", None) != "fetched" for handle in several):
            self.fetch_captures_batch(several)
        return token_frame(several, self.tokenizer, directions_named(directions, self.vectors), layers)

    @blocking(AsyncLab.save)
    def save(self, folder: str | Path) -> Path:
        """Write history, session-wide steering and named vectors to a folder."""
        return self.aio.write(folder)  # not on the engine's loop: a lab that is closed can be saved too

    @blocking(AsyncLab.load)
    def load(self, folder: str | Path, *, progress: Progress | None = None) -> None:
        """Bring back a saved session."""
        self._call("load", progress, lambda follow: self.aio.load(folder, progress=follow))

    @blocking(AsyncLab.stats)
    def stats(self) -> dict[str, Any]:
        """Return what the first worker holds for this session."""
        return self._wait(self.aio.stats())

    # -- panels ------------------------------------------------------------------------------------------------------

    def panel(self, prompt: str | None = None, **options: Any) -> Any:
        """Return a steering panel, to be a cell's last line. Arguments as for :class:`panels.SteeringPanel`."""
        return _panels().SteeringPanel(self, prompt, **options)

    def sweep_panel(self, prompt: str | None = None, **options: Any) -> Any:
        """Return a panel that runs a grid of layers and scales. Arguments as for :class:`panels.SweepPanel`."""
        return _panels().SweepPanel(self, prompt, **options)

    # -- life --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the engine and free all it held. Again is fine."""
        self._give_up(None)

    def _give_up(self, kept: VLLMSteerModel | None) -> None:
        """Close this lab, and its engine unless that is ``kept``."""
        with _making:
            if self in _running:
                _running.remove(self)
        self._closed = True
        if self._model is not kept:
            self._model.close()
            for panel in list(self._panels):
                panel.end("The lab was closed: make a lab again, then run this cell to go on.")

    def __enter__(self) -> LabSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"LabSession({self._name!r}, closed)"
        if not self.is_alive:
            return f"LabSession({self._name!r}, its engine has died)"
        described = describe(self.export_steering_spec(), names=self.aio.names.known())
        return f"LabSession({self._name!r}, {self.layer_count} layers, steering: {described})"

    def _repr_html_(self) -> str:
        stats = None
        if self.is_alive:
            with contextlib.suppress(EngineDeadError):
                stats = self.stats()
        return card(self, self._name, stats)

    @classmethod
    def running(cls) -> list[LabSession]:
        """Return the labs of this kernel."""
        return list(_running)


def _panels() -> Any:
    """Return the panels, which stand above the session and need Jupyter's widgets."""
    try:
        return importlib.import_module("chatspace_lab.panels")
    except ModuleNotFoundError as error:
        if error.name not in ("anywidget", "ipywidgets", "traitlets"):
            raise
        needed = f"a panel needs {error.name}: pip install 'chatspace-lab[lab]'"
        raise ModuleNotFoundError(needed, name=error.name) from error


def _as_given(model: Any) -> Any:
    return copy.deepcopy(model) if isinstance(model, VLLMSteeringConfig) else model
