"""``chatspace-lab verify`` on the demo model, and that it notices what is wrong."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chatspace_lab import SteeringSpec, verify


@pytest.mark.engine
@pytest.mark.slow
def test_on_the_demo_model() -> None:
    program = str(Path(sys.executable).parent / "chatspace-lab")
    command = [program, "verify", "--dtype", "float32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert re.search(r"^model +LlamaForCausalLM, 30 layers of 576, float32; hidden \+ residual$", done.stdout, re.M)
    steering = r"^steering acts +ok +add, cap and ablate at each of 30 layers; worst error (\S+) of a row$"
    assert (found := re.search(steering, done.stdout, re.M)), done.stdout
    assert float(found[1]) < 1e-4
    assert re.search(r"^neighbours untouched +ok ", done.stdout, re.M)
    long = r"one prompt of 2304 tokens, beyond a block of the KV cache, a step of prefill; 2176 of it cached$"
    assert re.search(rf"^matches Hugging Face +ok +all 30 layers, \d+ tokens, on cpu; {long}", done.stdout, re.M)
    distances = [float(line.split()[3]) for line in lines if re.match(r"  layer +\d+ ", line)]
    assert len(distances) == 30
    assert max(distances) < 1e-4
    assert len([line for line in lines if re.match(r"cost +x \d\.\d{3} ", line)]) == 2
    assert re.match(r"ok: 4 of 4 checks passed, in \d+ s$", lines[-1])


class Faulty:
    """A model of two layers whose engine does something wrong, chosen by ``fault``."""

    layer_count, hidden_size, dtype = 2, 32, torch.float32

    def __init__(self, fault: str) -> None:
        self.fault, self.calls = fault, 0

    async def rows(self, prompts: Any, layers: Any, steering: Any, tokens: int) -> list[tuple[list[int], torch.Tensor]]:
        self.calls += 1
        specs = steering if isinstance(steering, list) else [steering] * len(prompts)
        found = []
        leak = any(specs) and self.fault == "leaks"
        for index, spec in enumerate(specs):
            rows = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(index))
            if self.fault == "noise":
                rows = rows * (1 + 1e-7 * self.calls)
            for layer, layer_spec in (spec or SteeringSpec.none()).layers.items():
                for operation in layer_spec.steps:
                    rows[layer] += wrong(self.fault, operation, rows[layer])
            found.append(([1] * 5, (rows + 0.1 * leak)[list(layers)]))
        return found


def wrong(fault: str, operation: Any, x: torch.Tensor) -> torch.Tensor:
    from tests.oracle import act

    change = act(x, operation) - x
    if fault == "nothing happens":
        return torch.zeros_like(x)
    if fault == "twice":
        return 2 * change
    if fault == "no caps" and type(operation).__name__ == "ProjectionCapSpec":
        return torch.zeros_like(x)
    return change


@pytest.mark.parametrize(
    ("fault", "acts", "untouched"),
    [
        ("none", True, True),
        ("noise", True, True),
        ("nothing happens", False, False),
        ("twice", False, True),
        ("no caps", False, True),
        ("leaks", False, False),
    ],
)
def test_faults_are_found(fault: str, acts: bool, untouched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_rows", lambda model, *arguments: model.rows(*arguments))
    first = asyncio.run(verify.steering_acts(Faulty(fault)))  # type: ignore[arg-type]
    second = asyncio.run(verify.neighbours_untouched(Faulty(fault)))  # type: ignore[arg-type]
    assert first.passed is acts, first
    assert second.passed is untouched, second
    assert ("FAILED" in str(first)) is not acts


def test_a_model_that_does_not_fit_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from chatspace_lab import hugging_face
    from chatspace_lab.models import demo_model

    assert hugging_face.room(demo_model()) == ("cpu", "")
    monkeypatch.setattr(hugging_face.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1 << 20}))
    device, why = hugging_face.room(demo_model())
    assert device is None
    assert why == "it needs 0.7 GiB in float32, and 0.0 GiB are free"
