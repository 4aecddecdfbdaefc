"""Compiling a steering spec into what the workers run, and into the salt that keeps KV caches apart."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chatspace_lab import wire
from chatspace_lab.errors import SteeringError, kind_of
from chatspace_lab.steering.specs import (
    HOW_TO_SPECIFY,
    AblationSpec,
    AddSpec,
    Operation,
    ProjectionCapSpec,
    SteeringSpec,
)
from chatspace_lab.steering.vectors import as_index, content_key


@dataclass(frozen=True)
class Program:
    """A checked spec, ready to be sent: the vectors by content, and the operations that name them by index.

    Attributes
    ----------
    vectors
        Content key to ``[hidden_size]`` float32 CPU vector, each once.
    ops
        Array of :data:`chatspace_lab.wire.OP`; ``row`` is an index into ``vectors`` until :meth:`payload` places it.
    """

    vectors: dict[bytes, torch.Tensor]
    ops: np.ndarray

    def payload(self, rows: Sequence[int]) -> bytes:
        """Return the operations as bytes, with the bank row of each vector in place of its index."""
        key = tuple(rows)
        if key not in self._payload:  # the same as last time, unless a vector had to make room
            placed = self.ops.copy()
            placed["row"] = np.asarray(key, dtype=np.int32)[placed["row"]]
            self._payload.clear()
            self._payload[key] = placed.tobytes()
        return self._payload[key]

    @functools.cached_property
    def _payload(self) -> dict[tuple[int, ...], bytes]:
        return {}

    def salt(self, spans: Sequence[int]) -> str:
        """Name the program by content, and by the positions it acts on: equal salts may share a KV cache."""
        digest = self._digest.copy()
        digest.update(np.asarray(spans, dtype=np.int64).tobytes())
        return f"chatspace-lab:{digest.hexdigest()}"

    @functools.cached_property
    def _digest(self) -> hashlib.blake2b:
        digest = hashlib.blake2b(digest_size=16)
        for key in self.vectors:
            digest.update(key)
        digest.update(self.ops.tobytes())
        return digest


def _encode(operation: Operation) -> tuple[int, float, float]:
    if isinstance(operation, AddSpec):
        return wire.ADD, operation.scale, 0.0
    if isinstance(operation, ProjectionCapSpec):
        low = -np.inf if operation.min is None else operation.min
        high = np.inf if operation.max is None else operation.max
        return wire.CAP, low, high
    if isinstance(operation, AblationSpec):
        return wire.ABLATE, operation.scale, 0.0
    raise SteeringError(f"expected an operation, got {kind_of(operation, AddSpec, ProjectionCapSpec, AblationSpec)}")


def check_layer(layer: object, layer_count: int) -> int:
    """Return ``layer`` as an index into the model's decoder blocks.

    Raises
    ------
    SteeringError
        If it is no whole number in ``[0, layer_count)``.
    """
    index = as_index(layer, "a layer")
    if not 0 <= index < layer_count:
        raise SteeringError(f"layer {index} does not exist: this model has layers 0 to {layer_count - 1}")
    return index


def compile_spec(spec: SteeringSpec, *, layer_count: int, hidden_size: int, max_ops_per_layer: int) -> Program | None:
    """Check ``spec`` against a model and compile it.

    Returns
    -------
    Program or None
        None for the spec that does nothing.

    Raises
    ------
    SteeringError
        Naming the layer, if it does not exist, a vector has another length than ``hidden_size``, or a layer has more
        than ``max_ops_per_layer`` operations.
    """
    if not isinstance(spec, SteeringSpec):
        raise SteeringError(f"expected a SteeringSpec, got {kind_of(spec, SteeringSpec)}; {HOW_TO_SPECIFY}")
    if not spec:
        return None
    if spec.names:
        raise SteeringError(
            f"the spec names a vector, {spec.names[0]!r}; names are looked up by a lab or a model alone"
        )
    # A slider or a sweep sends the same spec again and again. Torch counts the edits of a tensor, so that even a spec
    # whose own copy of a vector was edited in place is compiled anew.
    limits = (layer_count, hidden_size, max_ops_per_layer)
    cached: tuple[tuple[int, int, int], list[torch.Tensor], list[int], Program] | None
    cached = spec.__dict__.get("_compiled")
    if cached is None or cached[0] != limits or cached[2] != _edits(cached[1]):
        vectors = [operation.vector for _, operation in spec]
        program = _compile(spec, layer_count, hidden_size, max_ops_per_layer)
        if any(vector.is_inference() for vector in vectors):  # torch does not count the edits of these
            return program
        cached = (limits, vectors, _edits(vectors), program)
        object.__setattr__(spec, "_compiled", cached)
    return cached[3]


def _edits(vectors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each was edited in place."""
    return list(map(operator.attrgetter("_version"), vectors))


def _compile(spec: SteeringSpec, layer_count: int, hidden_size: int, max_ops_per_layer: int) -> Program:
    vectors: dict[bytes, torch.Tensor] = {}
    indices: dict[bytes, int] = {}
    ops: list[tuple[int, int, int, float, float]] = []
    for layer, layer_spec in spec.layers.items():
        check_layer(layer, layer_count)
        if len(layer_spec.steps) > max_ops_per_layer:
            raise SteeringError(
                f"layer {layer}: {len(layer_spec.steps)} operations, at most {max_ops_per_layer} fit; "
                f"raise max_ops_per_layer in the configuration"
            )
        for operation in layer_spec.steps:
            vector = operation.vector
            if vector.numel() != hidden_size:
                raise SteeringError(
                    f"layer {layer}: {type(operation).__name__}.vector has {vector.numel()} entries, "
                    f"this model's hidden size is {hidden_size}"
                )
            key = content_key(vector)
            vectors.setdefault(key, vector)
            kind, a, b = _encode(operation)
            ops.append((layer, kind, indices.setdefault(key, len(indices)), a, b))
    return Program(vectors, np.array(ops, dtype=wire.OP))
