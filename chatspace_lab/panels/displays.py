"""The outputs that stand beside a panel's widgets, and stay in the notebook when no kernel draws those."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from chatspace_lab.panels.cells import Cell

REST_S = 0.6
"""The outputs follow when the panel has rested for so long: drawing them takes as long as some tokens."""
UPDATE = "cl_still"
"""Name of the message with which a page is given a panel's newest output."""


class Displays:
    """One HTML output per cell that displays a panel, hidden by the panel's stylesheet where a widget is alive.

    Parameters
    ----------
    mark
        A class in the HTML that no other panel's has, also the display's id.
    draw
        Returns the HTML.
    send
        Sends a message to the panel's pages. After a reload a page no longer knows which output belongs to a display's
        id; it finds the output by ``mark`` then.
    loop
        Of :meth:`changed`.
    guarded
        Calls a function whose errors are shown in the panel.
    """

    def __init__(
        self,
        mark: str,
        draw: Callable[[], str],
        send: Callable[[dict[str, Any]], None],
        loop: asyncio.AbstractEventLoop,
        guarded: Callable[[Callable[[], None]], object],
    ) -> None:
        self._mark, self._draw, self._send, self._loop, self._guarded = mark, draw, send, loop, guarded
        self._cells: set[str] = set()
        self.sent: dict[str, Any] | None = None
        """The newest message to the pages, numbered."""
        self._timer: asyncio.TimerHandle | None = None
        self._published = ""

    def show(self, cell: Cell | None) -> None:
        """Add the output to the cell that runs, unless it has it: called while the panel is displayed there."""
        if cell is not None and cell.execution not in self._cells:
            self._cells.add(cell.execution)
            self._publish(update=False)

    def changed(self) -> None:
        """Update the outputs soon. On the loop."""
        self.hold()
        self._timer = self._loop.call_later(REST_S, self._guarded, self.update)

    def hold(self) -> None:
        """Leave the outputs as they are until the next change: a run goes. On the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def update(self) -> None:
        """Update the outputs now, if they show something else."""
        self.hold()
        if self._cells:
            self._publish(update=True)

    def _publish(self, *, update: bool) -> None:
        from IPython.display import publish_display_data

        html = self._draw()
        if update and html == self._published:
            return
        self._published = html
        data = {"text/plain": "a panel, as last shown", "text/html": html}
        publish_display_data(data, transient={"display_id": self._mark}, update=update)
        if update:
            self.sent = {UPDATE: data, "mark": self._mark, "still": 1 + (self.sent["still"] if self.sent else 0)}
            self._send(self.sent)


def publish_widget(data: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Display a widget, given as the MIME bundle that it has."""
    from IPython.display import publish_display_data

    publish_display_data(data, metadata)
