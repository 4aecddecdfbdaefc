"""The GPU's operator without a GPU: Triton's interpreter runs it on the host. Timing and graphs need tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys

CHECK = """
import numpy as np
import torch

from chatspace_lab import wire
from chatspace_lab.runtime import kernel_triton
from chatspace_lab.runtime.tables import Tables

HIDDEN, LAYERS, LAYER = 72, 3, 1
kernel_triton._starts_early = lambda device: False  # an instruction of the GPU's own
torch.manual_seed(0)
tables = Tables(
    layers=LAYERS, hidden_size=HIDDEN, max_requests=8, max_ops=6, max_vectors=16, max_tokens=16,
    device=torch.device("cpu"),
)
vectors = torch.nn.functional.normalize(torch.randn(16, HIDDEN), dim=-1)
tables.put_vectors(range(16), vectors.numpy().tobytes())
programs = [
    [(1, wire.ADD, 3, 2.0, 0.0), (1, wire.CAP, 4, -0.1, 0.1), (1, wire.ABLATE, 5, 0.3, 0.0), (1, wire.CAP, 6, 0.2, 0.4),
     (1, wire.ADD, 7, 1.0, 0.0)],
    [(1, wire.ABLATE, 2, 0.0, 0.0)],
    [(2, wire.ADD, 1, 1.0, 0.0)],  # at another layer
]
packed = [np.array(program, dtype=wire.OP).tobytes() for program in programs]
slots = tables.place_programs(packed)
stored = torch.full((LAYERS, 4, HIDDEN), 7.0)
tables.captures.values[1, LAYER] = stored[LAYER].data_ptr()
tables.program_of_token[:4] = torch.tensor([slots[packed[0]], 0, slots[packed[1]], slots[packed[2]]])
tables.capture_of_token[:5] = torch.tensor([1, 1, 0, 0, 1])
tables.capture_row_of_token[:5] = torch.tensor([2, 0, 0, 0, 3])


def redone(x, program):
    x = x.double()
    for layer, kind, row, a, b in program:
        v = vectors[row].double()
        if layer != LAYER:
            continue
        if kind == wire.ADD:
            x = x + a * v
        elif kind == wire.CAP:
            x = x + ((x @ v).clamp(a, b) - x @ v) * v
        else:
            x = x + (a - 1) * (x @ v) * v
    return x


for with_residual in (True, False):
    stored.fill_(7.0)
    hidden, residual = torch.randn(6, HIDDEN), torch.randn(6, HIDDEN)
    rest = residual if with_residual else torch.zeros_like(residual)
    before = hidden.clone()
    kernel_triton.intervene(
        hidden, residual if with_residual else None, torch.tensor([LAYER], dtype=torch.int32),
        program_of_token=tables.program_of_token, programs=tables.programs.values, bank=tables.bank,
        capture_of_token=tables.capture_of_token, capture_row_of_token=tables.capture_row_of_token,
        captures=tables.captures.values,
    )
    x = before + rest
    for token, program in ((0, programs[0]), (2, programs[1])):
        assert (hidden[token] + rest[token] - redone(x[token], program)).abs().max() < 2e-6
    for token in (1, 3, 4, 5):
        assert torch.equal(hidden[token], before[token])
    assert (stored[LAYER, 2] - redone(x[0], programs[0])).abs().max() < 2e-6
    assert torch.equal(stored[LAYER, 0], x[1])
    assert torch.equal(stored[LAYER, 3], x[4])
    assert (stored[LAYER, 1] == 7.0).all()
    assert (stored[0] == 7.0).all()

for dtype in (torch.float32, torch.float16):  # multiplied by 3e38 again and again, it does not overflow
    huge = [
        np.array([(1, wire.ABLATE, 2, a, 0.0), (1, wire.ADD, 3, a / 1e9, 0.0)], dtype=wire.OP) for a in (3e38, -3e38)
    ]
    slots = tables.place_programs([each.tobytes() for each in huge])
    tables.capture_of_token.zero_()
    tables.program_of_token[:2] = torch.tensor([slots[each.tobytes()] for each in huge])
    hidden, residual = torch.randn(2, HIDDEN).to(dtype), torch.randn(2, HIDDEN).to(dtype)
    for _ in range(20):
        kernel_triton.intervene(
            hidden, residual, torch.tensor([LAYER], dtype=torch.int32),
            program_of_token=tables.program_of_token, programs=tables.programs.values, bank=tables.bank,
            capture_of_token=tables.capture_of_token, capture_row_of_token=tables.capture_row_of_token,
            captures=tables.captures.values,
        )
        assert torch.isfinite(hidden + residual).all()
    assert (hidden + residual).abs().max() > (5e4 if dtype == torch.float16 else 1e28)
print("as by hand")
"""


def test_operations_and_captures() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout == "as by hand\n", done.stderr
