"""The steering that is in force for the whole session: its spec, its stack, and the calls that change it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from chatspace_lab.engine.bank import VectorBank
from chatspace_lab.engine.lock import AsyncRWLock
from chatspace_lab.engine.loop import LoopThread
from chatspace_lab.errors import SteeringError
from chatspace_lab.steering.names import Vectors, spec_named
from chatspace_lab.steering.program import Program, check_layer, compile_spec
from chatspace_lab.steering.specs import Operation, SteeringSpec

T = TypeVar("T")


class SessionSteering:
    """A spec that requests follow, changed under the writer's lock and read under the reader's.

    The workers hold no session-wide steering: each request takes along the program that is in force when it starts.
    So a change is atomic over layers and workers, and there is one mechanism for a session and for a single request.
    Each change waits until the requests that follow the spec in force have ended. Coroutines may be awaited from any
    event loop.

    Parameters
    ----------
    loop, bank
        Of the running engine.
    layer_count, hidden_size
        Of the model.
    max_ops_per_layer
        Operations that a layer may have.

    Attributes
    ----------
    spec, program
        In force.
    stack
        What pushes have replaced.
    lock
        Held by every request that follows the spec.
    listeners
        Called with the new spec after each change, on the engine's loop: they must be quick, and must not raise.
    vectors
        Named vectors and directions; a spec may have a name in place of a vector.
    target_layer
        The layer of ``set_vector``.
    """

    def __init__(
        self, loop: LoopThread, bank: VectorBank, *, layer_count: int, hidden_size: int, max_ops_per_layer: int
    ) -> None:
        self._loop, self._bank = loop, bank
        self._layer_count, self._hidden_size, self._max_ops = layer_count, hidden_size, max_ops_per_layer
        self.lock = AsyncRWLock()
        self.spec = SteeringSpec.none()
        self.program: Program | None = None
        self.stack: list[tuple[SteeringSpec, object]] = []
        self.listeners: list[Callable[[SteeringSpec], None]] = []
        self.vectors: dict[str, Any] = Vectors()
        self.target_layer: int | None = None

    def named(self, spec: Any) -> Any:
        """Return a spec with vectors in place of their names in :attr:`vectors`."""
        return spec_named(spec, self.vectors)

    def compile(self, spec: SteeringSpec) -> Program | None:
        """Return the program of a spec, None if it does nothing.

        Raises
        ------
        SteeringError
            If this model cannot be steered so.
        """
        return compile_spec(
            spec, layer_count=self._layer_count, hidden_size=self._hidden_size, max_ops_per_layer=self._max_ops
        )

    # -- changes, from any event loop --------------------------------------------------------------------------------

    async def update(self, update: Callable[[SteeringSpec], SteeringSpec]) -> None:
        """Replace the spec by ``update`` of what is in force then; nothing can come between.

        Raises
        ------
        SteeringError
            If the new spec cannot be used; the old one stays in force then.
        """
        await self._in_turn(lambda: self._update(lambda spec: self.named(update(spec))))

    async def apply(self, spec: SteeringSpec) -> None:
        """Replace the spec, at all layers at once."""
        spec = self.named(spec)
        self.compile(spec)
        await self._in_turn(lambda: self._update(lambda _: spec))

    async def clear(self) -> None:
        """Remove all steering. Nothing is checked, so that it always works."""
        await self._in_turn(self._clear)

    async def set_operation(self, layer_idx: int, operation: Operation) -> None:
        """Put an operation in force at a layer, in place of the one of its kind."""
        layer = check_layer(layer_idx, self._layer_count)
        alone = self.named(SteeringSpec.at(layer, operation))
        self.compile(alone)

        def with_it(spec: SteeringSpec) -> SteeringSpec:
            before = spec.layers.get(layer)
            [(_, new)] = alone
            return spec.with_layer(layer, before.with_operation(new) if before else alone.layers[layer])

        await self.update(with_it)

    async def clear_operation(self, layer_idx: int, kind: type) -> None:
        """Remove the operation of a kind at a layer."""
        layer = check_layer(layer_idx, self._layer_count)

        def without_it(spec: SteeringSpec) -> SteeringSpec:
            before = spec.layers.get(layer)
            return spec.with_layer(layer, before.without(kind) if before else None)

        await self.update(without_it)

    async def push(self, spec: SteeringSpec) -> None:
        """Remember the spec in force on the stack, and replace it."""
        spec = self.named(spec)
        self.compile(spec)
        await self._in_turn(lambda: self._push(spec, None))

    async def pop(self) -> SteeringSpec:
        """Bring back, and return, the spec that the last push replaced.

        Raises
        ------
        SteeringError
            If nothing was pushed.
        """
        return await self._in_turn(self._pop)

    @asynccontextmanager
    async def block(self, spec: SteeringSpec) -> AsyncIterator[None]:
        """Steer by ``spec`` inside the block; what was in force before comes back, whatever ends the block."""
        spec = self.named(spec)
        self.compile(spec)
        mark = object()
        try:
            await self._in_turn(lambda: self._push(spec, mark))
            yield
        finally:
            if any(known is mark for _, known in self.stack):  # also when the cancellation came just after the push
                try:
                    await asyncio.sleep(0)  # as in _in_turn: tasks that were created in the block
                finally:
                    restored = self._loop.spawn(self._leave(mark))
                    await asyncio.shield(asyncio.wrap_future(restored.finished))

    async def _in_turn(self, action: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a change behind the requests that were made before it."""
        await asyncio.sleep(0)  # tasks that the caller created before this call have not begun yet: they go first
        return await self._loop.run(action())

    # -- changes, on the engine's loop -------------------------------------------------------------------------------

    async def _update(self, update: Callable[[SteeringSpec], SteeringSpec]) -> None:
        async with self.lock.write():
            await self._set(update(self.spec))

    async def _clear(self) -> None:
        async with self.lock.write():
            await self._put(SteeringSpec.none(), None)

    async def _push(self, spec: SteeringSpec, mark: object) -> None:
        async with self.lock.write():
            before = self.spec
            await self._set(spec)
            self.stack.append((before, mark))

    async def _pop(self) -> SteeringSpec:
        async with self.lock.write():
            if not self.stack:
                raise SteeringError("pop_steering_spec: nothing was pushed")
            await self._set(self.stack[-1][0])
            return self.stack.pop()[0]

    async def _leave(self, mark: object) -> None:
        """Bring back the spec that the push with this mark replaced, and forget what was pushed after it."""
        async with self.lock.write():
            for index, (before, known) in enumerate(self.stack):
                if known is mark:
                    await self._set(before)
                    del self.stack[index:]
                    return

    async def _set(self, spec: SteeringSpec) -> None:
        await self._put(spec, self.compile(spec))

    async def _put(self, spec: SteeringSpec, program: Program | None) -> None:
        if program is not None:
            await self._bank.acquire(program.vectors)
        if self.program is not None:
            self._bank.release(self.program.vectors)
        # A copy: what is in force does not change with a vector of the caller's.
        self.spec, self.program = spec.apart(), program
        for listener in list(self.listeners):
            listener(spec)
