"""One line that changes: in a notebook, in a terminal and in a log."""

from __future__ import annotations

import html
import sys
import time
from typing import Any

NOTEBOOK_S = 0.25
"""Seconds between two changes of a line that is drawn in place."""


class Line:
    """Shows a text that is replaced by the next one.

    A notebook keeps the last text, also when it is saved. A terminal overwrites it. Any other output (a log, a pipe)
    gets a line every ``log_s`` seconds, and one for each text that is marked as ``new``.

    Attributes
    ----------
    shown
        The text that was shown last.
    """

    def __init__(self, log_s: float) -> None:
        self._log_s = log_s
        self._handle: Any = None
        self.shown = ""
        self._at = time.monotonic()

    def show(self, text: str, *, new: bool = False) -> None:
        """Show ``text``. Cheap to call again and again.

        Parameters
        ----------
        text
            One line.
        new
            Show it at once, rather than when the text before it has stood for a while.
        """
        notebook = in_notebook()
        in_place = notebook or sys.stderr.isatty()
        now = time.monotonic()
        if text == self.shown or not (new or now - self._at >= (NOTEBOOK_S if in_place else self._log_s)):
            return
        self.shown, self._at = text, now
        if notebook:
            self._display(text)
        elif in_place:
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self, text: str, *, keep: bool) -> None:
        """Show a last text, if any was shown before. A terminal forgets it unless it is to be kept."""
        if not self.shown:
            return
        self.show(text, new=True)
        if not in_notebook() and sys.stderr.isatty():
            print("" if keep else "\r\x1b[2K", end="\n" if keep else "", file=sys.stderr, flush=True)

    def _display(self, text: str) -> None:
        from IPython.display import display

        page = f'<span style="font-family: monospace; opacity: 0.8">{html.escape(text)}</span>'
        bundle = {"text/plain": text, "text/html": page}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def in_notebook() -> bool:
    """Whether output goes to a Jupyter front end."""
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return hasattr(get_ipython(), "kernel")
