"""What all panels share: their files, their messages, and the thread that their traits are set on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anywidget
import traitlets

from chatspace_lab.errors import EngineDeadError, LabError, RequestError
from chatspace_lab.panels.displays import Displays, publish_widget
from chatspace_lab.panels.stills import UNDER_WAY

if TYPE_CHECKING:
    from chatspace_lab.session.lab import LabSession

STATIC = Path(__file__).parent / "static"
"""Where the front end is, built from widgets/ when the package is."""

CLOSED = "this panel was closed; make a new one"

_log = logging.getLogger(__name__)


def static(name: str) -> Path:
    """Return a built file of the front end.

    Raises
    ------
    RequestError
        If it was not built: only in a clone that was not installed.
    """
    path = STATIC / name
    if not path.is_file():
        raise RequestError(
            f"the panel's front end {name} is not built: run `python widgets/build.py` in the repository"
        )
    return path


class Panel(anywidget.AnyWidget):
    """A widget that belongs to a lab.

    Displayed, it leaves an output beside its widget that shows the same without a kernel; see :mod:`displays`.

    Messages of the page are taken to the engine's loop, and its traits are set there alone: a callback never blocks the
    kernel, and nothing needs a lock. Whatever goes wrong is shown in the panel.

    Attributes
    ----------
    error : str
        What went wrong last; empty if nothing did.
    """

    error = traitlets.Unicode("").tag(sync=True)
    facts = traitlets.Dict().tag(sync=True)
    run = traitlets.Dict().tag(sync=True)
    _kept: ClassVar[tuple[str, ...]] = ()
    """Traits that the output without a kernel is drawn from."""
    _drawn: ClassVar[staticmethod[[str, Mapping[str, Any]], str]]
    """Draws that output: HTML with the class that it is given, from these traits."""
    _open = False

    def __init__(self, lab: LabSession, **traits: Any) -> None:
        unknown = set(traits) - set(self.trait_names())
        if unknown:
            raise RequestError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        self._lab = lab
        self._thread = lab.model._loop
        facts = lab.model.facts
        described = {
            "model": Path(lab._name).name,
            "dtype": str(facts.dtype).removeprefix("torch."),
            "layers": lab.layer_count,
            "hidden": lab.hidden_size,
        }
        super().__init__(facts=described, **traits)
        self._handlers: dict[str, Callable[[dict[str, Any]], Any]] = {}
        mark = f"cl-of-{self.model_id}"
        self._displays = Displays(
            mark, lambda: self._drawn(mark, self._shown()), self.send, self._thread.loop, self._guarded
        )
        self.on_msg(self._received)
        self.observe(self._touched, list(self._kept))
        self._open = True

    def close(self) -> None:
        """Take the panel off the page, stop what it runs, and let go of its captures."""
        if self._open:  # else it was closed, or never made
            if self._lab.is_alive:
                self._now(self._let_go)
            self._open = False
        super().close()

    def _let_go(self) -> None:
        """Stop what runs, and free what is held. On the engine's loop."""

    def _shown(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("facts", *self._kept)}

    def _ipython_display_(self) -> None:
        if not self._open:
            raise RequestError(CLOSED)
        publish_widget(*self._repr_mimebundle_())
        self._displays.show()

    def _touched(self, _: Any) -> None:
        """Let the outputs follow, but not while a run goes: they show what it comes to."""
        self._soon(self._displays.hold if self.run["status"] in UNDER_WAY else self._displays.changed)

    def _received(self, _: Any, content: Any, __: Any) -> None:
        self._soon(self._handle, content)

    def _soon(self, call: Callable[..., None], *args: Any) -> None:
        """Call something on the engine's loop."""
        try:
            self._thread.loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # that loop is closed, and with it the model
            self.error = "this model was closed; make a new lab and a new panel"

    def _now(self, call: Callable[[], Any]) -> Any:
        """Call something on the engine's loop and wait for it."""
        if not self._open:
            raise RequestError(CLOSED)
        if self._thread.is_current:
            return call()

        async def wrapped() -> Any:
            return call()

        return self._thread.call(wrapped())

    def _handle(self, content: Any) -> None:
        """Do what a message asks for, and tell the view that sent it."""
        self._guarded(self._dispatch, content)
        if isinstance(content, dict) and "n" in content:
            self.send({"ack": content["n"], "view": content.get("view")})

    def _dispatch(self, content: Any) -> None:
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind not in self._handlers:
            raise RequestError(f"this panel knows no message {kind!r}")
        self.error = ""
        self._handlers[kind](content)

    def _guarded(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, the user must see it
            self._show_error(error)

    def _show_error(self, error: BaseException) -> None:
        if not isinstance(error, LabError):
            _log.exception("a panel's callback failed", exc_info=error)
        self.error = sentence(error)


def sentence(error: BaseException) -> str:
    """Return an error as a user reads it."""
    if isinstance(error, EngineDeadError | LabError):
        return str(error)
    return f"{type(error).__name__}: {error}"
