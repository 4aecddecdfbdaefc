"""What ``chatspace-lab demo`` and ``chatspace-lab smoke`` show."""

from __future__ import annotations

import argparse
import contextlib
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from chatspace_lab.analysis.examples import OFFICE, SEA
from chatspace_lab.models import DEMO_NAME, chosen_model, demo_model

if TYPE_CHECKING:
    import torch

    from chatspace_lab.capture import CaptureHandle
    from chatspace_lab.engine.model import VLLMSteerModel

STEERED_LAYER, SCALE = 16, 1.0
"""Found by trying: weaker or earlier is hardly seen, twice as strong repeats itself."""

SHOWN_LAYERS = (5, 15, 25)


class _Steps:
    """Says what is being done and how long it took."""

    def __init__(self, count: int) -> None:
        self._count, self._number = count, 0

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        self._number += 1
        print(f"[{self._number}/{self._count}] {what} … ", end="", flush=True)
        start = time.perf_counter()
        yield
        print(f"{time.perf_counter() - start:.1f} s", flush=True)


async def demo(arguments: argparse.Namespace) -> int:
    """Answer one prompt plain and steered, and show the mean norms of its messages."""
    steps = _Steps(4)
    print(f"chatspace-lab demo: {DEMO_NAME}")
    folder = demo_model()
    with steps.step("loading vLLM"):
        from chatspace_lab import AddSpec, SteeringSpec, VLLMSteeringConfig, VLLMSteerModel

        cfg = VLLMSteeringConfig(
            model_name=folder, max_model_len=1024, gpu_memory_utilization=0.5, use_tqdm_on_load=False
        )
    with steps.step("starting the engine"):
        model = VLLMSteerModel(cfg)
    async with model:
        with steps.step(f"a vector from {len(SEA)} sentences about the sea and {len(OFFICE)} about an office"):
            vector = await contrast(model, SEA, OFFICE, STEERED_LAYER)
        conversation = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": arguments.prompt},
        ]
        steering = SteeringSpec.at(STEERED_LAYER, AddSpec(vector, scale=SCALE))
        with steps.step("two answers in one batch, plain and steered"):
            answers, handles = await model.chat(
                [conversation, conversation],
                temperature=0.0,
                max_tokens=arguments.max_tokens,
                steering=[SteeringSpec.none(), steering],
                capture_layers=SHOWN_LAYERS,
            )
            await model.fetch_captures_batch(handles)
        titles = ("plain", f"steered (layer {STEERED_LAYER} + {SCALE:g} · sea)")
        print(f"\nprompt\n{_indented(arguments.prompt)}")
        for title, answer in zip(titles, answers, strict=True):
            print(f"\n{title}\n{_indented(answer)}")
        print("\nmean norm of the activations of each message")
        for title, handle in zip(titles, handles, strict=True):
            print(f"\n{title}\n{_norms(handle, SHOWN_LAYERS)}")
            handle.close()
    return 0


async def contrast(model: VLLMSteerModel, positive: Sequence[str], negative: Sequence[str], layer: int) -> torch.Tensor:
    """Return the difference of the mean activations of two sets of texts at a layer.

    Returns
    -------
    torch.Tensor
        ``[hidden_size]``, float32. The first token of each text is left out, and every other attention sink
        (:mod:`chatspace_lab.readings`): their activations are many times longer than any other.
    """
    import torch

    from chatspace_lab import SteeringSpec
    from chatspace_lab.readings import ordinary

    texts, plain = [*positive, *negative], SteeringSpec.none()
    _, handles = await model.generate(texts, temperature=0.0, max_tokens=1, steering=plain, capture_layers=[layer])
    await model.fetch_captures_batch(handles)
    rows = [ordinary(handle.hidden(layer)[1:].float()) for handle in handles]
    for handle in handles:
        handle.close()
    split = len(positive)
    return torch.cat(rows[:split]).mean(dim=0) - torch.cat(rows[split:]).mean(dim=0)


def _norms(handle: CaptureHandle, layers: Sequence[int]) -> str:
    """Return a table: a line per message and one for the answer, a column per layer; attention sinks left out."""
    from chatspace_lab.readings import ordinary

    lines = [f"  {'message':<10}{'tokens':>7}" + "".join(f"{f'layer {layer}':>11}" for layer in layers)]

    def line(name: str, rows: list[torch.Tensor]) -> None:
        means = [ordinary(row).double().norm(dim=-1).mean().item() for row in rows if len(row)]
        norms = "".join(f"{mean:11.1f}" for mean in means) or "          –" * len(rows)
        lines.append(f"  {name:<10}{len(rows[0]):>7}{norms}")

    for index, boundary in enumerate(handle.message_boundaries):
        line(boundary.role, [handle.get_message_activations(index, layer) for layer in layers])
    line("answer", [handle.hidden(layer)[handle.prompt_len :] for layer in layers])
    return "\n".join(lines)


def _indented(text: str) -> str:
    lines = text.strip().splitlines() or ["(nothing)"]
    return "\n".join(textwrap.fill(line, 100, initial_indent="  ", subsequent_indent="  ") for line in lines)


async def smoke(arguments: argparse.Namespace) -> int:
    """Set a random vector at a layer and check that the activations there move by exactly that vector."""
    name = chosen_model(arguments.model_name)
    print(f"chatspace-lab smoke: {name}", flush=True)
    import torch

    from chatspace_lab import VLLMSteeringConfig, VLLMSteerModel
    from chatspace_lab.steering.program import check_layer

    cfg = VLLMSteeringConfig(model_name=name, dtype=arguments.dtype, use_tqdm_on_load=False)
    async with VLLMSteerModel(cfg) as model:
        layer = check_layer(arguments.layer, model.layer_count)
        hidden = []
        direction = torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(arguments.seed))
        vector = direction / direction.norm() * arguments.scale
        for title in ("plain", "steered"):
            if title == "steered":
                await model.set_layer_vector(layer, vector)
            texts, handles = await model.generate(
                arguments.prompt, temperature=0.0, max_tokens=arguments.max_tokens, capture_layers=[layer]
            )
            await model.fetch_captures_batch(handles)
            hidden.append(handles[0].hidden(layer)[: handles[0].prompt_len].float())
            handles[0].close()
            print(f"\n{title}\n{_indented(texts[0])}", flush=True)
        await model.clear_all_vectors()
    verdict, arrived = _compare(hidden[0], hidden[1], vector, torch.finfo(model.dtype).eps)
    print(f"\n{verdict}")
    return 0 if arrived else 1


def _compare(plain: torch.Tensor, steered: torch.Tensor, vector: torch.Tensor, eps: float) -> tuple[str, bool]:
    """Say whether ``steered`` is ``plain + vector``, up to rounding.

    Parameters
    ----------
    plain, steered
        ``[tokens, hidden_size]`` float32, rounded to a dtype with relative precision ``eps`` before.
    vector
        ``[hidden_size]`` float32.
    """
    error = (steered - plain - vector).abs()
    wrong = int((error > 2 * eps * (plain.abs() + steered.abs() + vector.abs())).any(dim=1).sum())
    shape = f"{len(plain)} prompt tokens"
    if wrong:
        return f"FAILED: at {wrong} of {shape} the captured difference is not the vector", False
    relative = (error.norm(dim=1) / vector.norm()).median().item()
    if not relative < 0.05:
        lost = f"FAILED: the vector is lost in rounding (median error {relative:.1%} of its length)"
        return f"{lost}: take a larger --scale, or --dtype float32", False
    return f"ok: at all {shape} the captured difference is the vector (median error {relative:.2%} of its length)", True
