"""The steering that is in force for the whole session, and its stack."""

from __future__ import annotations

from collections.abc import Callable

from chatspace_lab.engine.bank import VectorBank
from chatspace_lab.engine.lock import AsyncRWLock
from chatspace_lab.errors import SteeringError
from chatspace_lab.steering.program import Program
from chatspace_lab.steering.specs import SteeringSpec

Compile = Callable[[SteeringSpec], Program | None]


class SessionSteering:
    """A spec, changed under the writer's lock and read under the reader's.

    The workers hold no session-wide steering: each request takes along the program that is in force when it starts.
    So a change is atomic over layers and workers, and there is one mechanism for a session and for a single request.

    Attributes
    ----------
    spec, program
        In force.
    stack
        What pushes have replaced.
    listeners
        Called with the new spec after each change, on the engine's loop: they must be quick, and must not raise.
    """

    def __init__(self, lock: AsyncRWLock, bank: VectorBank, compile_spec: Compile) -> None:
        self._lock, self._bank, self._compile = lock, bank, compile_spec
        self.spec = SteeringSpec.none()
        self.program: Program | None = None
        self.stack: list[tuple[SteeringSpec, object]] = []
        self.listeners: list[Callable[[SteeringSpec], None]] = []

    async def change(self, update: Callable[[SteeringSpec], SteeringSpec]) -> None:
        """Replace the spec by ``update`` of it, once all requests under way have ended.

        Raises
        ------
        SteeringError
            If the new spec cannot be used; the old one stays in force then.
        """
        async with self._lock.write():
            await self._set(update(self.spec))

    async def clear(self) -> None:
        """Remove all steering, once all requests under way have ended. Nothing is checked, so that it always works."""
        async with self._lock.write():
            await self._put(SteeringSpec.none(), None)

    async def push(self, spec: SteeringSpec, mark: object = None) -> None:
        """Remember the spec in force, under a mark for :meth:`leave`, and replace it."""
        async with self._lock.write():
            before = self.spec
            await self._set(spec)
            self.stack.append((before, mark))

    async def pop(self) -> SteeringSpec:
        """Bring back the spec that the last push replaced, and return it.

        Raises
        ------
        SteeringError
            If nothing was pushed.
        """
        async with self._lock.write():
            if not self.stack:
                raise SteeringError("pop_steering_spec: nothing was pushed")
            await self._set(self.stack[-1][0])
            return self.stack.pop()[0]

    def holds(self, mark: object) -> bool:
        """Whether a push with this mark is on the stack."""
        return any(known is mark for _, known in self.stack)

    async def leave(self, mark: object) -> None:
        """Bring back the spec that the push with this mark replaced, and forget what was pushed after it."""
        async with self._lock.write():
            for index, (before, known) in enumerate(self.stack):
                if known is mark:
                    await self._set(before)
                    del self.stack[index:]
                    return

    async def _set(self, spec: SteeringSpec) -> None:
        await self._put(spec, self._compile(spec))

    async def _put(self, spec: SteeringSpec, program: Program | None) -> None:
        if program is not None:
            await self._bank.acquire(program.vectors)
        if self.program is not None:
            self._bank.release(self.program.vectors)
        self.spec, self.program = (
            spec.apart(),
            program,
        )  # what is in force does not change with a vector of the caller's
        for listener in list(self.listeners):
            listener(spec)
