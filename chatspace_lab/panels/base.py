"""What all panels share: their files, their messages, and the thread that their traits are set on."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anywidget
import traitlets
from ipywidgets.widgets import widget as ipywidgets_widget  # type: ignore[import-untyped]

from chatspace_lab.errors import EngineDeadError, LabError, RequestError
from chatspace_lab.panels import cells
from chatspace_lab.panels.displays import Displays, publish_widget
from chatspace_lab.panels.stills import UNDER_WAY

if TYPE_CHECKING:
    from chatspace_lab.session.lab import LabSession

STATIC = Path(__file__).parent / "static"
"""Where the front end is, built from widgets/ when the package is."""

CLOSED = "this panel was closed; make a new one"
DIED = "The engine has stopped: close the lab (lab.close()), make it again, then run this cell to go on."
UNSEEN = 8
"""With more panels than these that no cell shows, those that nothing refers to are collected."""
IN_FLIGHT_S = 0.25
"""An update that was sent less than this ago may still be on its way to a page."""
BEATS_S = (0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
"""Pauses between reminders to pages that have not confirmed the newest state."""

_log = logging.getLogger(__name__)


def static(name: str) -> str:
    """Return the text of a built file of the front end. As a path, anywidget would keep each widget alive.

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
    return path.read_text(encoding="utf-8")


class Panel(anywidget.AnyWidget):
    """A widget that belongs to a lab.

    Displayed, it leaves an output beside its widget that shows the same without a kernel; see :mod:`displays`.

    Messages of the page are taken to the engine's loop, and its traits are set there alone: a callback never blocks the
    kernel, and nothing needs a lock. Whatever goes wrong is shown in the panel.

    A panel that its cell has replaced by another output, or that nothing refers to, is let go of: it follows the
    session no more, and leaves the page. One that is used again after that comes back as it was.

    A server may drop messages to the page. So each update says how often each trait has been sent; while anything
    changes, the page says what it has, and is sent what it lacks.

    Attributes
    ----------
    error : str
        What went wrong last; empty if nothing did.
    ended : str
        Why nothing can be asked any more, for example that the lab was closed; empty before.
    """

    error = traitlets.Unicode("").tag(sync=True)
    ended = traitlets.Unicode("").tag(sync=True)
    facts = traitlets.Dict().tag(sync=True)
    run = traitlets.Dict().tag(sync=True)
    _kept: ClassVar[tuple[str, ...]] = ()
    """Traits that the output without a kernel is drawn from."""
    _drawn: ClassVar[staticmethod[[str, Mapping[str, Any]], str]]
    """Draws that output: HTML with the class that it is given, from these traits."""
    _beat: asyncio.TimerHandle | None = None
    _own_layout: Any = None
    _open = False
    _resting = False

    def __init__(self, lab: LabSession, **traits: Any) -> None:
        unknown = set(traits) - set(self.trait_names())
        if unknown:
            raise RequestError(
                f"{type(self).__name__} has no argument {', '.join(sorted(unknown))}; its arguments are in "
                f"help(chatspace_lab.panels.{type(self).__name__})"
            )
        self._lab = lab
        self._thread = lab.aio.execution.loop
        facts = lab.model.facts
        described = {
            "model": Path(lab._name).name,
            "dtype": str(facts.dtype).removeprefix("torch."),
            "layers": lab.layer_count,
            "hidden": lab.hidden_size,
        }
        self._versions: dict[str, int] = {}
        self._sent_at: dict[str, float] = {}
        self._level = True  # whether a page has confirmed the newest state
        self._paged = False
        self._armed_at = 0.0
        if sum(not cells.is_shown(panel) for panel in list(lab._panels)) > UNSEEN:
            gc.collect()
        super().__init__(facts=described, **traits)
        self._own_layout = None if "layout" in traits else self.layout
        self._handlers: dict[str, Callable[[dict[str, Any]], Any]] = {}
        mark = f"cl-of-{self.model_id}"
        self._displays = Displays(
            mark, lambda: self._drawn(mark, self._shown()), self.send, self._thread.loop, self._guarded
        )
        self.on_msg(self._received)
        self.observe(self._touched, list(self._kept))
        self._open = True
        lab._panels.add(self)
        cells.made(self)

    # -- its life ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take the panel off the page, stop what it runs, and let go of its captures."""
        self.let_go()
        self._resting = False

    def let_go(self) -> None:
        """Close the panel until it is used or displayed again."""
        if self._open:  # else it was closed, or never made
            if self._lab.is_alive:
                self._now(self._let_go)
            self._open, self._resting = False, True
            self._lab._panels.discard(self)
            cells.forget(self)
        self._leave_page()

    def __del__(self) -> None:
        """Let go of what a panel holds that nothing refers to any more: on the engine's loop, as all that it does."""
        if self._open:
            self._open = False
            try:
                self._thread.loop.call_soon_threadsafe(self._freed)
            except RuntimeError:  # that loop is closed, and with it the model
                self._leave_page()
        else:
            super().__del__()

    def _freed(self) -> None:
        self._guarded(self._let_go)
        self._leave_page()

    def _leave_page(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        if self.comm is not None and self._own_layout is not None:
            self._own_layout.close()
        super().close()

    def _come_back(self) -> None:
        """Open a panel that was let go of, as it was."""
        self._resting = False
        self.__dict__.pop("_repr_mimebundle_", None)  # Widget.close has put None there
        if self._own_layout is not None:
            self._own_layout.open()
        self.open()
        self._open = True
        self._lab._panels.add(self)
        self._now(self._begin)

    def end(self, why: str) -> None:
        """Show that nothing can be asked any more; the page keeps the last state."""
        self.ended = why

    def _begin(self) -> None:
        """Follow the session. On the engine's loop."""

    def _let_go(self) -> None:
        """Stop what runs, and free what is held. On the engine's loop."""

    @traitlets.observe("comm")
    def _comm_changed(self, change: Any) -> None:
        """Take messages of a new comm, without being kept alive by it or by the table of all widgets."""
        super()._comm_changed(change)
        if self.comm is not None:
            handle = weakref.WeakMethod(self._handle_msg)

            def received(message: Any) -> None:
                call = handle()
                if call is not None:
                    call(message)

            self.comm.on_msg(received)
            ipywidgets_widget._instances[self.comm.comm_id] = weakref.proxy(self)

    def _shown(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("facts", *self._kept)}

    def _ipython_display_(self) -> None:
        self._opened()
        self._paged = True
        publish_widget(*self._repr_mimebundle_())
        self._displays.show(cells.shown(self))

    def _opened(self) -> None:
        """Bring back a panel that was let go of.

        Raises
        ------
        RequestError
            If it was closed.
        """
        if self._resting and self._lab.is_alive:
            self._come_back()
        if not self._open:
            raise RequestError(CLOSED)

    def _touched(self, _: Any) -> None:
        """Let the outputs follow, but not while a run goes: they show what it comes to."""
        self._soon(self._displays.hold if self.run["status"] in UNDER_WAY else self._displays.changed)

    def _received(self, _: Any, content: Any, __: Any) -> None:
        self._paged = True
        if not self._soon(self._handle, content) and isinstance(content, dict) and "n" in content:
            self.end(self.ended or DIED)
            self._answer(content, failed=content.get("kind") != "level", level=not self._send_again(content))

    def _soon(self, call: Callable[..., object], *args: Any) -> bool:
        """Call something on the engine's loop; False if that is closed, and with it the model."""
        try:
            self._thread.loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            return False
        return True

    def _now(self, call: Callable[[], Any]) -> Any:
        """Call something on the engine's loop and wait for it."""
        self._opened()
        if self.ended:
            raise RequestError(self.ended)
        if self._thread.is_current:
            return call()

        async def wrapped() -> Any:
            return call()

        return self._thread.call(wrapped())

    def _handle(self, content: Any) -> None:
        """Do what a message asks for, and tell the view that sent it."""
        if isinstance(content, dict) and content.get("kind") == "level":
            self._answer(content, level=not self._send_again(content))
            return
        done = self._guarded(self._dispatch, content)
        if isinstance(content, dict) and "n" in content:
            self._answer(content, failed=not done)

    def _answer(self, content: dict[str, Any], **facts: bool) -> None:
        self.send({"ack": content["n"], "view": content.get("view"), **facts})

    # -- what the page has -------------------------------------------------------------------------------------------

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Return the traits' values as a page is sent them, and how often each has been sent."""
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        return {**state, "versions": {name: self._versions[name] for name in state if name in self._versions}}

    @property
    def versions(self) -> dict[str, int]:
        """How often each trait has been sent to the page."""
        return dict(self._versions)

    def send_state(self, key: Any = None) -> None:
        """Send traits to the page."""
        names = self.keys if key is None else [key] if isinstance(key, str) else list(key)
        now = time.monotonic()
        for name in names:
            self._versions[name] = self._versions.get(name, 0) + 1
            self._sent_at[name] = now
        super().send_state(key)
        if self._paged and (self._level or now - self._armed_at > BEATS_S[0]):
            self._level, self._armed_at = False, now
            self._soon(self._remind, 0)

    def _send_again(self, content: dict[str, Any]) -> bool:
        """Send the traits that a page lacks, and return whether it lacks any. What has just been sent may come yet."""
        seen, now = content.get("versions") or {}, time.monotonic()
        missing = [name for name, version in self._versions.items() if seen.get(name) != version]
        lost = [name for name in missing if now - self._sent_at[name] > IN_FLIGHT_S]
        if lost:
            super().send_state(lost)
        sent = self._displays.sent
        if sent is not None and content.get("still", 0) < sent["still"] and not missing:
            self.send(sent)
            return True
        self._level = self._level or not missing
        return bool(missing)

    def _remind(self, at: int) -> None:
        """Ask the pages what they have, until one has confirmed the newest state. On the loop."""
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        if at > 0 and not self._level:
            self.send({"beat": True})
        if at < len(BEATS_S) and not self._level and self.comm is not None:
            mine = weakref.ref(self)

            def again() -> None:
                panel = mine()
                if panel is not None:
                    panel._remind(at + 1)

            self._beat = self._thread.loop.call_later(BEATS_S[at], again)

    def _dispatch(self, content: Any) -> None:
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind not in self._handlers:
            raise RequestError(f"this panel knows no message {kind!r}")
        self.error = ""
        self._handlers[kind](content)

    def _guarded(self, call: Callable[..., None], *args: Any) -> bool:
        """Call something whose error is shown in the panel, and return whether there was none."""
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, the user must see it
            self._show_error(error)
            return False
        return True

    def _show_error(self, error: BaseException) -> None:
        if isinstance(error, EngineDeadError):
            self.end(self.ended or DIED)
        if not isinstance(error, LabError):
            _log.exception("a panel's callback failed", exc_info=error)
        self.error = sentence(error)


def sentence(error: BaseException) -> str:
    """Return an error as a user reads it."""
    if isinstance(error, EngineDeadError | LabError):
        return str(error)
    return f"{type(error).__name__}: {error}"
