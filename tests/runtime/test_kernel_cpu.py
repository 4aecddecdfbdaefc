"""The CPU's operator against plain torch: any programs on any rows, with and without a residual."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from chatspace_lab import AblationSpec, AddSpec, ProjectionCapSpec, SteeringSpec
from chatspace_lab.runtime.backend_cpu import CpuBackend
from chatspace_lab.runtime.routing import StepPlan
from chatspace_lab.runtime.tables import Tables
from chatspace_lab.steering.program import compile_spec
from tests.oracle import act, error

HIDDEN, LAYERS, OPS = 33, 3, 4


def random_spec(chance: random.Random) -> SteeringSpec:
    def vector() -> torch.Tensor:
        return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(chance.randrange(10**6)))

    def operation() -> AddSpec | ProjectionCapSpec | AblationSpec:
        kind = chance.randrange(3)
        if kind == 0:
            return AddSpec(vector(), chance.uniform(-3, 3))
        if kind == 1:
            low = chance.choice([None, chance.uniform(-1, 0)])
            return ProjectionCapSpec(
                vector(), low, chance.uniform(0, 1) if low is None or chance.random() < 0.5 else None
            )
        return AblationSpec(vector(), chance.choice([0.0, -1.0, 0.3, 2.0]))

    spec = SteeringSpec.none()
    for layer in chance.sample(range(LAYERS), chance.randrange(1, LAYERS + 1)):
        spec = spec.with_layer(
            layer, SteeringSpec.at(0, *[operation() for _ in range(chance.randrange(1, OPS + 1))]).layers[0]
        )
    return spec


def apply(backend: CpuBackend, hidden: torch.Tensor, residual: torch.Tensor | None, layer: int) -> None:
    backend.apply(hidden, residual, torch.tensor([layer], dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(25))
def test_against_plain_torch(seed: int, dtype: torch.dtype) -> None:
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    specs = [random_spec(chance) for _ in range(3)]
    tables = Tables(
        layers=LAYERS,
        hidden_size=HIDDEN,
        max_requests=4,
        max_ops=OPS,
        max_vectors=64,
        max_tokens=64,
        device=torch.device("cpu"),
    )
    payloads, used = [], 0
    for spec in specs:
        program = compile_spec(spec, layer_count=LAYERS, hidden_size=HIDDEN, max_ops_per_layer=OPS)
        assert program is not None
        rows = list(range(used, used + len(program.vectors)))
        tables.put_vectors(rows, torch.stack(list(program.vectors.values())).numpy().tobytes())
        used += len(rows)
        payloads.append(program.payload(rows))
    tokens = chance.randrange(1, 40)
    choice = [1] * tokens if chance.random() < 0.3 else [chance.randrange(4) for _ in range(tokens)]
    backend = CpuBackend(tables, dtype)
    slots = tables.place_programs([b"", *payloads])
    step = StepPlan(tokens=tokens, programs=np.array(choice, dtype=np.int32), distinct=[b"", *payloads])
    backend.begin(step, [slots[program] for program in step.distinct], [])
    padding = 3  # rows of a padded batch, which are nobody's
    for layer in range(LAYERS):
        for with_residual in (False, True):
            hidden = torch.randn(tokens + padding, HIDDEN, generator=generator).to(dtype)
            residual = torch.randn(tokens + padding, HIDDEN, generator=generator).to(dtype) * 3
            out = hidden.clone()
            apply(backend, out, residual if with_residual else None, layer)
            offset = residual.float() if with_residual else torch.zeros_like(residual, dtype=torch.float32)
            for row in range(tokens + padding):
                spec = specs[choice[row] - 1] if row < tokens and choice[row] else SteeringSpec.none()
                if layer not in spec.layers:
                    assert torch.equal(out[row], hidden[row])
                    continue
                x = (hidden[row].float() + offset[row])[None]
                for operation in spec.layers[layer].steps:
                    x = act(x, operation)
                tolerance = 1e-5 if dtype == torch.float32 else 1e-2
                assert error((out[row].float() + offset[row])[None], x) < tolerance
    backend.idle()
    hidden = torch.randn(5, HIDDEN)
    out = hidden.clone()
    apply(backend, out, None, 0)
    assert torch.equal(out, hidden)


def one_token(spec: SteeringSpec, dtype: torch.dtype) -> CpuBackend:
    """Return the backend of a model of one layer in a step of one token, steered by ``spec``."""
    program = compile_spec(spec, layer_count=1, hidden_size=HIDDEN, max_ops_per_layer=OPS)
    assert program is not None
    tables = Tables(
        layers=1,
        hidden_size=HIDDEN,
        max_requests=1,
        max_ops=OPS,
        max_vectors=4,
        max_tokens=4,
        device=torch.device("cpu"),
    )
    rows = range(len(program.vectors))
    tables.put_vectors(rows, torch.stack(list(program.vectors.values())).numpy().tobytes())
    payload = program.payload(rows)
    backend = CpuBackend(tables, dtype)
    slots = tables.place_programs([b"", payload])
    backend.begin(StepPlan(1, np.ones(1, dtype=np.int32), [b"", payload]), [0, slots[payload]], [])
    return backend


@pytest.mark.parametrize("outlier", [3e4, 1e30])
def test_an_outlier_stays_finite(outlier: float) -> None:
    """One huge entry, as in real models: the reduction must not overflow, nor drown the rest."""
    spec = SteeringSpec.at(0, ProjectionCapSpec(torch.ones(HIDDEN), max=1.0), AblationSpec(torch.eye(HIDDEN)[1]))
    backend = one_token(spec, torch.float32)
    hidden = torch.randn(1, HIDDEN)
    hidden[0, 7] = outlier
    wanted = hidden.clone()
    for operation in spec.layers[0].steps:
        wanted = act(wanted, operation)
    apply(backend, hidden, None, 0)
    assert error(hidden, wanted) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_stream_never_overflows(dtype: torch.dtype, with_residual: bool) -> None:
    """However often it is multiplied, as by an ablation at every layer: it would spoil other requests' caches."""
    u = torch.ones(HIDDEN)
    ops = [AblationSpec(u, 3e38), AddSpec(u, 9e29), AblationSpec(u, -3e38), ProjectionCapSpec(u, min=3e38)]
    spec = SteeringSpec.at(0, *ops)
    backend = one_token(spec, dtype)
    hidden, residual = torch.randn(1, HIDDEN).to(dtype), (100 * torch.randn(1, HIDDEN)).to(dtype)
    for _ in range(60):
        apply(backend, hidden, residual if with_residual else None, 0)
        stream = hidden + residual if with_residual else hidden
        assert torch.isfinite(stream).all()
    if dtype == torch.float16:
        assert float(stream.abs().max()) == pytest.approx(6e4, rel=1e-2)
