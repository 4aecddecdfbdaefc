"""Small random models of each architecture against Hugging Face: what is captured, and what each operation does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from chatspace_lab import AblationSpec, AddSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec, VLLMSteerModel
from tests import tiny
from tests.conftest import started
from tests.oracle import Oracle, error

TOLERANCE = 1e-4
GENERATOR = torch.Generator().manual_seed(11)
V, U, W = torch.randn(3, tiny.HIDDEN, generator=GENERATOR)
SPECS: dict[str, SteeringSpec] = {
    "none": SteeringSpec.none(),
    "add": SteeringSpec.at([0, 3], AddSpec(V, 2.0)),
    "cap": SteeringSpec.at(1, ProjectionCapSpec(U, min=-0.5, max=0.25)),
    "ablate": SteeringSpec.at([2, 3], AblationSpec(W, 0.0)),
    "all": SteeringSpec(
        layers={
            layer: LayerSteeringSpec(
                add=AddSpec(V, 0.5 + layer),
                projection_cap=ProjectionCapSpec(U, max=0.5),
                ablation=AblationSpec(W, -1.0),
            )
            for layer in range(tiny.LAYERS)
        }
    ),
}
PROMPTS = [[5] * 7, [9, 300, 17, 41, 8], list(range(100, 141))]


async def check(model: VLLMSteerModel, oracle: Oracle) -> None:
    cases = [(prompt, name) for prompt in PROMPTS for name in SPECS]
    _, handles = await model.generate(
        [prompt for prompt, _ in cases],
        temperature=0.0,
        max_tokens=6,
        ignore_eos=True,
        detokenize=False,
        capture_layers=list(range(tiny.LAYERS)),
        steering=[SPECS[name] for _, name in cases],
    )
    await model.fetch_captures_batch(handles)
    for (prompt, name), handle in zip(cases, handles, strict=True):
        assert handle.token_ids[: len(prompt)] == prompt
        assert len(handle.token_ids) == len(prompt) + 5
        wanted = oracle.residuals(handle.token_ids, SPECS[name])
        for layer in range(tiny.LAYERS):
            difference = error(handle.hidden(layer), wanted[layer])
            assert difference < TOLERANCE, f"{name}, layer {layer}: {difference}"


@pytest.mark.parametrize("name", list(tiny.CONFIGS))
def test_architecture(name: str, tmp_path: Path) -> None:
    folder = tiny.build(name, tmp_path / name)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128}
    with started(folder, **options) as model:
        assert (model.hidden_size, model.layer_count) == (tiny.HIDDEN, tiny.LAYERS)
        asyncio.run(check(model, Oracle(folder)))
