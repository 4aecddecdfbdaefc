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
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from chatspace_lab.chat import ChatResponse, Completion, message_of
from chatspace_lab.engine.client import EngineClient
from chatspace_lab.engine.config import VLLMSteeringConfig
from chatspace_lab.engine.fixed import Fixed
from chatspace_lab.engine.model import VLLMSteerModel
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
from chatspace_lab.session.card import card
from chatspace_lab.session.history import History, Run, describe
from chatspace_lab.session.in_force import SteeringInForce
from chatspace_lab.session.job import CURRENT, INTERRUPTS, Bar, Job, say
from chatspace_lab.session.start import StartDisplay, files_of, find_model, fits_beside
from chatspace_lab.session.stream import LabStream
from chatspace_lab.steering.names import directions_named
from chatspace_lab.steering.program import check_layer
from chatspace_lab.steering.specs import SteeringSpec
from chatspace_lab.steering.vectors import as_list

if TYPE_CHECKING:
    import pandas as pd

    from chatspace_lab.capture import CaptureHandle

T = TypeVar("T")

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

    # -- blocking ----------------------------------------------------------------------------------------------------

    def _call(self, title: str, make: Callable[[], Coroutine[Any, Any, T]], default_length: bool = False) -> T:
        """Run a coroutine on the engine's loop and wait, with a bar if it takes long.

        ``default_length`` tells that the caller gave no ``max_tokens``: answers that it cuts off are then told of.
        """
        job = Job(title)
        mark = CURRENT.set(job)  # inherited by the tasks of this call
        try:
            with Bar(job) as bar:
                result = self._loop.call(make(), tick=bar.tick)
        except INTERRUPTS:
            self._keep(job)
            raise
        except MISUSE as error:
            raise error.with_traceback(None)  # noqa: B904 - it says what to do; the way to it is ours
        else:
            cut = sum(run.finish_reason == "length" for run in job.runs) if default_length else 0
            if cut:
                job.notes.append(
                    f"{cut} of {len(job.runs)} answers ended at vLLM's default of max_tokens=16; max_tokens=200 allows "
                    f"longer ones"
                )
            return result
        finally:
            CURRENT.reset(mark)
            for note in job.notes:
                say(note)

    def _keep(self, job: Job) -> None:
        if job.partial is not None:
            self.partial = job.partial()
        elif job.runs:
            self.partial = [_answer(run, self.tokenizer) for run in job.runs]
        else:
            return
        print("interrupted: what had come by then is in lab.partial", file=sys.stderr)

    @contextlib.contextmanager
    def steering(self, spec: SteeringSpec) -> Iterator[None]:
        """Steer by ``spec`` inside the block; what was in force before comes back, whatever ends the block."""
        block = self._model.steering(spec)
        self._loop.call(block.__aenter__())
        try:
            yield
        finally:
            self._loop.call(block.__aexit__(None, None, None))

    def export_steering_spec(self) -> SteeringSpec:
        """Return the session-wide steering in force."""
        return self._model.export_steering_spec()

    def in_force(self) -> SteeringInForce:
        """Return the session-wide steering; its repr tells vectors by name, layers, scales and doses."""
        return self.aio.in_force()

    def set_target_layer(self, layer_idx: int) -> None:
        """Choose the layer of :meth:`set_vector`."""
        self._model.set_target_layer(layer_idx)

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
            self._call("fetch", lambda: self._model.fetch_captures_batch(several))
        return token_frame(several, self.tokenizer, directions_named(directions, self.vectors), layers)

    def save(self, folder: str | Path) -> Path:
        """Write history, session-wide steering and named vectors to a folder, as JSON and safetensors.

        A lab that is closed can still be saved. Returns the folder.

        Raises
        ------
        SessionError
            If the folder cannot be written, or has the name of a file.
        """
        return self.aio._save(folder)

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
                stats = self._loop.call(self._model.stats())
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


def _answer(run: Run, tokenizer: Any) -> str:
    if run.messages is None:
        return Completion(run.text, run.finish_reason)
    prompt = "" if run.prefill else run.prompt or ""
    message = message_of(tokenizer, prompt, run.prefill, run.text, run.token_ids)
    return ChatResponse(run.text, run.prefill, run.finish_reason, message)


ANSWERS = ("ask", "chat", "generate")
"""Methods whose answers have at most 16 tokens unless ``max_tokens`` is given."""


def _twin(name: str, function: Any) -> Any:
    @functools.wraps(function)
    def method(self: LabSession, *args: Any, **kwargs: Any) -> Any:
        default_length = name in ANSWERS and len(args) < 2 and not {"max_tokens", "sampling_params"} & set(kwargs)
        return self._call(name, lambda: getattr(self.aio, name)(*args, **kwargs), default_length)

    method.__qualname__ = f"LabSession.{name}"
    method.__doc__ = (
        f"{inspect.getdoc(function)}\n\nThis blocks; ``await lab.aio.{name}(…)`` is the same in async code."
    )
    return method


def _stream_twin(name: str, function: Any) -> Any:
    @functools.wraps(function)
    def method(self: LabSession, *args: Any, **kwargs: Any) -> LabStream:
        return LabStream(self, getattr(self._model, name)(*args, **kwargs))

    method.__qualname__ = f"LabSession.{name}"
    way = f"This is for a plain ``for`` loop; ``lab.aio.{name}(…)`` is for ``async for``."
    method.__doc__ = f"{inspect.getdoc(function)}\n\n{way}"
    return method


def _add_twins() -> None:
    for name in ("stream", "stream_chat"):
        setattr(LabSession, name, _stream_twin(name, getattr(VLLMSteerModel, name)))
    for source in (VLLMSteerModel, AsyncLab):
        for name, function in inspect.getmembers(source, inspect.iscoroutinefunction):
            if not name.startswith("_") and name not in ("aclose", "save"):  # close() is its twin; save needs no engine
                setattr(LabSession, name, _twin(name, function))


_add_twins()
