"""Every error that chatspace-lab raises on purpose.

::

    LabError
    ├── ConfigError (TypeError, ValueError)   a configuration that cannot work
    ├── SteeringError (ValueError)            a vector, a spec or a layer that cannot be used
    ├── RequestError (ValueError)             an argument of generate, chat or stream that cannot be used
    │   └── PromptTooLongError                the prompt, or the prompt and its answer, do not fit the model
    ├── CaptureError (RuntimeError)           captured activations cannot be given
    │   ├── CaptureNotFetchedError            they were not fetched yet
    │   ├── CaptureClosedError                the handle was closed
    │   └── CaptureLimitError                 unfetched captures hold all the memory they may
    ├── MessageLocationError (LookupError)    a message cannot be found in the rendered prompt
    ├── AnalysisError (ValueError)            a frame, direction or figure cannot be made from what was given
    ├── ExportError (RuntimeError)            a figure cannot be written; says what is missing
    ├── SessionError (RuntimeError)           a lab that runs already, or a saved one that cannot be used
    ├── UnsupportedError (RuntimeError)       this vLLM, model or engine option is not supported; says which and why
    ├── DemoModelError (RuntimeError)         the packaged demo model cannot be made; says what to install
    ├── EngineStartError (RuntimeError)       the engine did not start
    ├── EngineDeadError (RuntimeError)        the engine or one of its workers is gone
    ├── ReadOnlyError (AttributeError)        what a running engine does not read again cannot be set; says what to use
    └── WorkerError (RuntimeError)            a worker failed; carries the worker's own traceback

A model that was never compared with Hugging Face is used with an :class:`UncomparedWarning`, and an engine that runs
otherwise than was asked for, or than is usual, with an :class:`EngineWarning`; near copies among the samples of a
direction bring a :class:`NearCopiesWarning`, and a test of it on texts that it was made from a
:class:`TrainingTextsWarning`; a text whose special tokens the tokenizer doubles brings a :class:`SpecialTokenWarning`,
and an option that a chat template does not read an :class:`UnreadOptionWarning`.

An error from a worker is raised here as one of these, with the worker's traceback as its cause.
"""

from __future__ import annotations


def kind_of(value: object, *expected: type) -> str:
    """Return the name of a value's class, for the message that it is none of ``expected``.

    A class that was loaded twice is two classes of one name: the text then says so, and what to do.
    """
    kind = type(value)
    if all((kind.__module__, kind.__qualname__) != (each.__module__, each.__qualname__) for each in expected):
        return kind.__name__
    return (
        f"{kind.__name__} of another load of {kind.__module__}: it was reloaded (importlib.reload, %autoreload), and "
        f"the engine goes on with the classes from before; restart the kernel, and leave chatspace_lab out of reloading"
    )


class LabError(Exception):
    """Base of all errors of chatspace-lab."""


class ConfigError(LabError, TypeError, ValueError):
    """A configuration that cannot work: an unknown option, or options that contradict each other."""


class SteeringError(LabError, ValueError):
    """A vector, a steering spec or a layer that cannot be used."""


class RequestError(LabError, ValueError):
    """An argument of generate, chat or stream that cannot be used."""


class PromptTooLongError(RequestError):
    """The prompt, or the prompt together with the answer asked for, does not fit the model's context."""


class CaptureError(LabError, RuntimeError):
    """Captured activations cannot be given."""


class CaptureNotFetchedError(CaptureError):
    """The activations are still in the engine: call ``fetch_captures_batch`` first."""


class CaptureClosedError(CaptureError):
    """The handle was closed, and its activations with it."""


class CaptureLimitError(CaptureError):
    """Captures that nobody fetched hold as much memory as they may."""


class MessageLocationError(LabError, LookupError):
    """A message cannot be located in the prompt that the engine was given."""


class AnalysisError(LabError, ValueError):
    """A frame, a direction or a figure cannot be made from what was given."""


class ExportError(LabError, RuntimeError):
    """A figure cannot be written to a file: a package or a browser is missing, or the kind of file is not known."""


class SessionError(LabError, RuntimeError):
    """Another lab runs already, or a saved session cannot be written or read."""


class UnsupportedError(LabError, RuntimeError):
    """A version of vLLM, a model or an engine option that is not supported; says which and why."""


class DemoModelError(LabError, RuntimeError):
    """The packaged demo model cannot be made: a package is missing, or its folder is incomplete."""


class EngineStartError(LabError, RuntimeError):
    """The engine did not start; the cause says why."""


class EngineDeadError(LabError, RuntimeError):
    """The engine, or one of its workers, is gone. Close the model and make a new one."""


class ReadOnlyError(LabError, AttributeError):
    """An attribute that a running engine does not read again; setting it would have no effect. Says what to use."""


class WorkerError(LabError, RuntimeError):
    """A worker failed. Its own traceback is the cause of this error."""


class WorkerTracebackError(Exception):
    """The text of a traceback in another process, shown as the cause of an error raised here."""

    def __str__(self) -> str:
        """Return the worker's traceback, set off from the local one."""
        return f"\n--- in the worker ---\n{self.args[0].rstrip()}\n---------------------"


class HighDoseWarning(UserWarning):
    """A vector is added at a dose from which on most answers fall apart."""


class UncomparedWarning(UserWarning):
    """The model is of a kind that was never compared with Hugging Face; says which, and how to compare it."""


class NearCopiesWarning(UserWarning):
    """Pairs of samples are near copies of each other, and are tested as one group."""


class TrainingTextsWarning(UserWarning):
    """A direction is tested on texts that it was made from."""


class EngineWarning(UserWarning):
    """The engine runs otherwise than was asked for, or than vLLM's default; says what differs, and why if known."""


class SpecialTokenWarning(UserWarning):
    """A text begins or ends with a special token that the tokenizer adds too, so that the model sees it twice."""


class UnreadOptionWarning(UserWarning):
    """The chat template does not read an option that was given for it, which therefore has no effect."""
