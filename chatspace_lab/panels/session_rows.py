"""The rows of a panel and the steering of its session, kept the same in both directions. Runs on the engine's loop."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chatspace_lab.errors import RequestError
from chatspace_lab.panels.doses import at_dose, at_layers, doses_of
from chatspace_lab.panels.rows import Row, free_id, rows_of, spec_of
from chatspace_lab.panels.vectors import frozen, layers_with, same, snapshot, usable, variables
from chatspace_lab.steering.names import did_you_mean
from chatspace_lab.steering.program import check_layer
from chatspace_lab.steering.specs import SteeringSpec
from chatspace_lab.steering.vectors import as_list, as_number
from chatspace_lab.steering.where import Where, as_where

if TYPE_CHECKING:
    from chatspace_lab.session.lab import LabSession


class SessionRows:
    """Rows that write to the session's steering, and follow it when a cell changes it.

    Parameters
    ----------
    lab
        The session.
    changed
        Called after each change: with True if it was made here, by hand, with False if it came from the session.
    spawn
        Starts a coroutine whose errors are shown.
    guarded
        Calls a function whose errors are shown.
    norms
        Returns the residual's norm per layer, for doses.

    Attributes
    ----------
    rows, where
        As shown. Replaced, never edited.
    """

    def __init__(
        self,
        lab: LabSession,
        changed: Callable[[bool], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        guarded: Callable[..., object],
        norms: Callable[[], Mapping[int, float]],
    ) -> None:
        self._lab, self._changed, self._spawn, self._guarded = lab, changed, spawn, guarded
        self._norms = norms
        self._suggested: Row | None = None
        self._last_doses: dict[str, float] = {}  # of rows whose last layer was taken away, for the next one
        self.rows: tuple[Row, ...] = ()
        self.where = Where()
        self._taken: dict[str, Any] = {}  # the rows' vectors as the steering has them
        self._wanted: SteeringSpec | None = None
        self._sent: SteeringSpec | None = None
        self._applying: asyncio.Task[None] | None = None
        heard = weakref.WeakMethod(self._heard)  # the session does not keep its panels alive

        def listener(spec: SteeringSpec) -> None:
            call = heard()
            if call is not None:
                call(spec)

        self._subscription = lab.aio.on_steering(listener)

    def close(self) -> None:
        """Follow the session no more."""
        self._subscription.end()

    def spec(self) -> SteeringSpec:
        """Return the steering that the rows stand for; with other vectors under their names, the session has it too."""
        if not self._up_to_date():
            self._put(self.check(self.rows, self.where))
        return spec_of(self.rows, self._lab.vectors, self.where)

    def offered(self) -> list[dict[str, Any]]:
        """Return the vectors that a row may have: the session's, and the notebook's variables that are vectors."""
        mine = usable(self._lab.vectors, self._lab.hidden_size)
        own = [{"name": name, "layers": layers_with(vector), "from": "session"} for name, vector in mine.items()]
        others = [
            {"name": name, "layers": layers_with(vector), "from": "variable"}
            for name, vector in variables(self._lab.hidden_size).items()
            if name not in self._lab.vectors
        ]
        return [*own, *others]

    def suggest(self) -> None:
        """Show a row that does nothing yet for the session's newest vector; the steering stays as it is.

        A row that is added while it is untouched takes its place.
        """
        names = list(usable(self._lab.vectors, self._lab.hidden_size))
        if names and not self.rows:
            self._suggested = Row(free_id(()), names[-1], "add", tuple(self._default_layers(names[-1])))
            self.rows = (self._suggested,)
            self._take()
            self._changed(False)

    # -- by hand -----------------------------------------------------------------------------------------------------

    def add(self, name: str, operation: str, vector: Any = None, fields: Mapping[str, Any] | None = None) -> Row:
        """Append a row; without a vector, ``name`` is one of the session's vectors, or else a variable of the notebook.

        Raises
        ------
        RequestError, SteeringError
        """
        vectors, given = self._lab.vectors, dict(fields or {})
        if vector is None:
            vector = vectors[name] if name in vectors else variables(self._lab.hidden_size).get(name)
        if vector is None:
            near = did_you_mean(name, {*vectors, *variables(self._lab.hidden_size)})
            raise RequestError(f"there is no vector {name!r} in lab.vectors and the notebook's variables{near}")
        vectors[name] = snapshot(vector, self._lab.hidden_size, name)
        layers = given.pop("layers", None)
        if operation == "ablate":
            given = {"scale": 1.0, **given}
        chosen = self._default_layers(name) if layers is None else as_list(layers)
        others = [each for each in self.rows if each is not self._suggested]
        row = Row(free_id(others), name, operation, tuple(chosen), **given)
        self.replace([*others, row])
        return row

    def edit(self, name: str, patch: Mapping[str, Any]) -> None:
        """Change some fields of a row. An addition keeps its dose at other layers; ``"dose"`` sets it at each layer.

        Raises
        ------
        RequestError, SteeringError
        """
        at = self._index(name)
        self.replace([*self.rows[:at], self._edited(self.rows[at], patch), *self.rows[at + 1 :]])

    def _edited(self, before: Row, patch: Mapping[str, Any]) -> Row:
        vectors, norms = self._lab.vectors, self._norms()
        fields = {name: value for name, value in patch.items() if name != "dose"}
        row = before.edited(fields)
        if "dose" in patch:
            if row.vector not in vectors:
                raise RequestError(
                    f"there is no vector {row.vector!r} in lab.vectors any more: put it back, or remove its row"
                )
            return at_dose(row, as_number(patch["dose"], f"row {row.vector!r}: dose"), vectors, norms)
        if row.operation != "add" or "scale" in patch or row.layers == before.layers:
            return row
        if before.layers and not row.layers:
            doses = doses_of(before, vectors, norms)
            if doses:
                self._last_doses[row.id] = sum(doses.values()) / len(doses)
        if not before.layers and row.id in self._last_doses:
            return at_dose(row, self._last_doses.pop(row.id), vectors, norms)
        return at_layers(row, before, vectors, norms)

    def remove(self, name: str) -> None:
        """Take a row away."""
        at = self._index(name)
        self.replace([*self.rows[:at], *self.rows[at + 1 :]])

    def replace(self, rows: Sequence[Row] | None = None, where: Where | str | None = None) -> None:
        """Put other rows, or another choice of positions; if they cannot be used, nothing changes.

        Raises
        ------
        RequestError, SteeringError
        """
        new = self.rows if rows is None else tuple(rows)
        chosen = self.where if where is None else as_where(where)
        spec = self.check(new, chosen)
        self.rows, self.where = new, chosen
        self._put(spec)
        self._changed(True)

    def check(self, rows: Sequence[Row], where: Where | str) -> SteeringSpec:
        """Return the steering that rows would be; vectors that only the notebook has are taken over.

        Raises
        ------
        RequestError, SteeringError
        """
        missing = {row.vector for row in rows} - set(self._lab.vectors)
        offered = variables(self._lab.hidden_size) if missing else {}
        for name in missing & set(offered):
            self._lab.vectors[name] = snapshot(offered[name], self._lab.hidden_size, name)
        for row in rows:
            for layer in row.layers:
                check_layer(layer, self._lab.layer_count)
        return spec_of(rows, self._lab.vectors, where)

    def _up_to_date(self) -> bool:
        """Whether the steering has the vectors that the rows' names now stand for."""
        now = self._lab.vectors
        return all(name in now and same(taken, now[name]) for name, taken in self._taken.items())

    def _take(self) -> None:
        """Note the vectors of the rows."""
        used = {row.vector for row in self.rows}
        mine = {name: vector for name, vector in dict(self._lab.vectors).items() if name in used}
        self._taken = frozen(mine, self._lab.hidden_size)

    def _index(self, name: str) -> int:
        for at, row in enumerate(self.rows):
            if row.id == name:
                return at
        raise RequestError(f"there is no row {name!r} any more")

    def _default_layers(self, name: str) -> list[int]:
        vector, middle = self._lab.vectors[name], self._lab.layer_count // 2
        known = layers_with(vector)
        if known is None:
            return [middle]
        if getattr(vector, "auc", None):
            return [vector.steering_layers().layer]
        return [min(known, key=lambda layer: abs(layer - middle))]

    # -- the session's steering --------------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Wait until the session's steering is what the rows say."""
        if self._applying is not None:
            await asyncio.wait([self._applying])

    def _put(self, spec: SteeringSpec) -> None:
        self._take()
        self._wanted = spec
        if self._applying is None or self._applying.done():
            self._applying = self._spawn(self._apply())

    async def _apply(self) -> None:
        """Set the session's steering, newest wish only, as soon as it may be changed."""

        def update(current: SteeringSpec) -> SteeringSpec:
            if self._wanted is None:  # a cell has set it meanwhile
                return current
            self._sent = self._wanted
            return self._wanted

        while self._wanted is not None:
            await self._lab.model.update_steering_spec(update)
            if self._sent is self._wanted:
                self._wanted = None

    def _heard(self, spec: SteeringSpec) -> None:
        if spec is not self._sent:
            self._wanted = None
            self._guarded(self.follow, spec)

    def follow(self, spec: SteeringSpec) -> None:
        """Take over the session's steering as a cell has set it."""
        rows, new = rows_of(spec, self.rows, self._lab.vectors)
        self._lab.vectors.update(new)
        where = as_where(spec.where) if spec else self.where
        changed = (tuple(rows), where) != (self.rows, self.where) or not self._up_to_date()
        self.rows, self.where = tuple(rows), where
        self._take()
        if changed:
            self._changed(False)
