"""The model's methods that change the steering of the whole session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from chatspace_lab.engine.config import VLLMSteeringConfig
from chatspace_lab.engine.loop import LoopThread
from chatspace_lab.engine.state import SessionSteering
from chatspace_lab.errors import SteeringError
from chatspace_lab.steering.names import spec_named
from chatspace_lab.steering.program import Program, check_layer, compile_spec
from chatspace_lab.steering.specs import AblationSpec, AddSpec, Operation, ProjectionCapSpec, SteeringSpec

T = TypeVar("T")


class SessionSteeringMethods:
    """Writers of the lock: each waits until the requests that follow the session's steering have ended."""

    config: VLLMSteeringConfig
    layer_count: int
    hidden_size: int
    _loop: LoopThread
    _session: SessionSteering
    _target_layer: int | None = None
    vectors: dict[str, Any]

    def _named(self, spec: Any) -> Any:
        """Return a spec with vectors in place of their names in :attr:`vectors`."""
        return spec_named(spec, self.vectors)

    def _compile(self, spec: SteeringSpec) -> Program | None:
        return compile_spec(
            spec,
            layer_count=self.layer_count,
            hidden_size=self.hidden_size,
            max_ops_per_layer=self.config.max_ops_per_layer,
        )

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await self._loop.run(coroutine)

    async def set_layer_vector(self, layer_idx: int, vector: Any, scale: float = 1.0) -> None:
        """Add ``scale · vector`` at a layer from now on, in place of what was added there before."""
        await self._set_operation(layer_idx, AddSpec(vector, scale))

    def set_target_layer(self, layer_idx: int) -> None:
        """Choose the layer of :meth:`set_vector`."""
        self._target_layer = check_layer(layer_idx, self.layer_count)

    async def set_vector(self, vector: Any, scale: float = 1.0) -> None:
        """Like :meth:`set_layer_vector`, at the layer chosen by :meth:`set_target_layer`."""
        if self._target_layer is None:
            raise SteeringError("set_vector: no target layer; call set_target_layer(layer) first")
        await self.set_layer_vector(self._target_layer, vector, scale)

    async def clear_layer_vector(self, layer_idx: int) -> None:
        """Add nothing at a layer any more; its cap and ablation stay."""
        await self._clear_operation(layer_idx, AddSpec)

    async def clear_all_vectors(self) -> None:
        """Remove all session-wide steering: vectors, caps and ablations of every layer."""
        await self._in_turn(self._session.clear)

    async def set_layer_projection_cap(
        self,
        layer_idx: int,
        vector: Any,
        min: float | None = None,  # noqa: A002
        max: float | None = None,  # noqa: A002
    ) -> None:
        """Clamp the component along ``vector`` at a layer to ``[min, max]`` from now on, after what is added there."""
        await self._set_operation(layer_idx, ProjectionCapSpec(vector, min, max))

    async def clear_layer_projection_cap(self, layer_idx: int) -> None:
        """Cap nothing at a layer any more."""
        await self._clear_operation(layer_idx, ProjectionCapSpec)

    async def set_layer_ablation(self, layer_idx: int, vector: Any, scale: float = 0.0) -> None:
        """Multiply the component along ``vector`` at a layer by ``scale`` from now on, after add and cap."""
        await self._set_operation(layer_idx, AblationSpec(vector, scale))

    async def clear_layer_ablation(self, layer_idx: int) -> None:
        """Ablate nothing at a layer any more."""
        await self._clear_operation(layer_idx, AblationSpec)

    async def apply_steering_spec(self, spec: SteeringSpec) -> None:
        """Replace all session-wide steering by ``spec``, at all layers at once."""
        spec = self._named(spec)
        self._compile(spec)
        await self._change(lambda _: spec)

    async def update_steering_spec(self, update: Callable[[SteeringSpec], SteeringSpec]) -> None:
        """Replace the session-wide steering by ``update`` of what is in force then; nothing can come between.

        Raises
        ------
        SteeringError
            If the new spec cannot be used; the old one stays in force.
        """
        await self._change(lambda spec: self._named(update(spec)))

    async def push_steering_spec(self, spec: SteeringSpec) -> None:
        """Remember the steering in force on a stack and replace it by ``spec``."""
        spec = self._named(spec)
        self._compile(spec)
        await self._in_turn(lambda: self._session.push(spec))

    async def pop_steering_spec(self) -> SteeringSpec:
        """Bring back, and return, the steering that the last push replaced."""
        return await self._in_turn(self._session.pop)

    def export_steering_spec(self) -> SteeringSpec:
        """Return a copy of the session-wide steering in force; ``SteeringSpec.none()`` if there is none."""
        return self._session.spec.apart()

    @asynccontextmanager
    async def steering(self, spec: SteeringSpec) -> AsyncIterator[None]:
        """Steer by ``spec`` inside the block; what was in force before comes back, whatever ends the block."""
        spec = self._named(spec)
        self._compile(spec)
        mark = object()
        try:
            await self._in_turn(lambda: self._session.push(spec, mark))
            yield
        finally:
            if self._session.holds(mark):  # also when the cancellation came just after the push
                try:
                    await asyncio.sleep(0)  # as in _in_turn: tasks that were created in the block
                finally:
                    restored = self._loop.spawn(self._session.leave(mark))
                    await asyncio.shield(asyncio.wrap_future(restored.finished))

    async def _in_turn(self, action: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a change behind the requests that were made before it."""
        await asyncio.sleep(0)  # tasks that the caller created before this call have not begun yet: they go first
        return await self._run(action())

    async def _change(self, update: Callable[[SteeringSpec], SteeringSpec]) -> None:
        await self._in_turn(lambda: self._session.change(update))

    async def _set_operation(self, layer_idx: int, operation: Operation) -> None:
        layer = check_layer(layer_idx, self.layer_count)
        alone = self._named(SteeringSpec.at(layer, operation))
        self._compile(alone)

        def update(spec: SteeringSpec) -> SteeringSpec:
            before = spec.layers.get(layer)
            [(_, new)] = alone
            return spec.with_layer(layer, before.with_operation(new) if before else alone.layers[layer])

        await self._change(update)

    async def _clear_operation(self, layer_idx: int, kind: type) -> None:
        layer = check_layer(layer_idx, self.layer_count)

        def update(spec: SteeringSpec) -> SteeringSpec:
            before = spec.layers.get(layer)
            return spec.with_layer(layer, before.without(kind) if before else None)

        await self._change(update)
