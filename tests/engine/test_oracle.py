"""The demo model against Hugging Face in float32: every layer, every operation, prompt and generated tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from chatspace_lab import AblationSpec, AddSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec, VLLMSteerModel
from tests.conftest import started
from tests.oracle import Oracle, error

TOLERANCE = 1e-4
HIDDEN = 576
V, U, W = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(2))
SMALL, MIDDLE = 0.05 * V, 2.0 * V
ADD, CAP, ABLATE = AddSpec(MIDDLE, 1.5), ProjectionCapSpec(7 * U, min=-3.0, max=2.0), AblationSpec(0.01 * W, 0.25)
EVERYWHERE = range(30)
SPECS: dict[str, SteeringSpec] = {
    "none": SteeringSpec.none(),
    "add": SteeringSpec.at(10, ADD),
    "add, first layer": SteeringSpec.at(0, AddSpec(SMALL)),
    "add, last layer": SteeringSpec.at(29, ADD),
    "cap": SteeringSpec.at(10, CAP),
    "cap below": SteeringSpec.at(10, ProjectionCapSpec(U, max=-1.0)),
    "cap above": SteeringSpec.at(10, ProjectionCapSpec(U, min=4.0)),
    "cap to a point": SteeringSpec.at(10, ProjectionCapSpec(U, min=1.0, max=1.0)),
    "ablate": SteeringSpec.at(10, ABLATE),
    "remove": SteeringSpec.at(10, AblationSpec(W)),
    "reflect": SteeringSpec.at(10, AblationSpec(W, -1.0)),
    "double": SteeringSpec.at(10, AblationSpec(W, 2.0)),
    "three on one layer": SteeringSpec(
        layers={12: LayerSteeringSpec(add=ADD, projection_cap=CAP, ablation=ABLATE)},
    ),
    "along one direction": SteeringSpec(
        layers={
            12: LayerSteeringSpec(
                add=AddSpec(U, 3.0), projection_cap=ProjectionCapSpec(U, max=5.0), ablation=AblationSpec(U, -2.0)
            )
        },
    ),
    "odd order": SteeringSpec(
        layers={12: LayerSteeringSpec(operations=[ABLATE, CAP, ADD, CAP, AddSpec(U, -4.0), ABLATE, AddSpec(W, 0.5)])},
    ),
    "all layers": SteeringSpec.at(
        list(EVERYWHERE), AddSpec(SMALL), ProjectionCapSpec(U, -20, 20), AblationSpec(W, 0.9)
    ),
}
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = ["Rivers carry water from the mountains to the sea, and", CHAT]


async def captured(model: VLLMSteerModel, names: list[str], max_tokens: int) -> list[tuple[str, str, Any]]:
    """Run every prompt under every spec in one batch, and fetch every layer."""
    cases = [(name, prompt) for name in names for prompt in PROMPTS]
    texts, handles = await model.generate(
        [prompt for _, prompt in cases],
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        capture_layers=list(EVERYWHERE),
        steering=[SPECS[name] for name, _ in cases],
    )
    await model.fetch_captures_batch(handles)
    return [(name, text, handle) for (name, _), text, handle in zip(cases, texts, handles, strict=True)]


def test_every_layer_and_operation(model: VLLMSteerModel, hf: Oracle) -> None:
    """All in one batch, each with its own spec: prompt rows and generated rows, at all 30 layers."""
    for name, _, handle in asyncio.run(captured(model, list(SPECS), 24)):
        assert len(handle.token_ids) == handle.prompt_len + 23
        wanted = hf.residuals(handle.token_ids, SPECS[name])
        got = torch.stack([handle.hidden(layer) for layer in EVERYWHERE])
        for layer in EVERYWHERE:
            difference = error(got[layer], wanted[layer])
            assert difference < TOLERANCE, f"{name}, layer {layer}: {difference}"


@pytest.mark.parametrize("name", ["none", "add", "three on one layer", "all layers"])
def test_greedy_text(name: str, model: VLLMSteerModel, hf: Oracle) -> None:
    async def main() -> Any:
        (output,) = await model.generate(
            CHAT, temperature=0.0, max_tokens=8, steering=SPECS[name], raw_output=True, ignore_eos=True
        )
        return list(output.outputs[0].token_ids)

    assert asyncio.run(main()) == hf.greedy(model.tokenizer(CHAT)["input_ids"], 8, SPECS[name])


def test_session_and_request_are_the_same(model: VLLMSteerModel) -> None:
    """Every way to steer, on every way to ask."""
    spec = SPECS["three on one layer"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}

    async def ask(**steering: Any) -> list[Any]:
        texts, handles = await model.generate([CHAT, CHAT], **options, capture_layers=[12], **steering)
        answers, more = await model.chat(messages, **options, capture_layers=[12], **steering)
        await model.fetch_captures_batch([*handles, *more])
        streamed = []
        for stream in (
            model.stream(CHAT, **options, **steering),
            model.stream_chat(messages, **options, **steering),
        ):
            async for _ in stream:
                pass
            streamed.append(stream.text)
        assert texts[0] == texts[1] == streamed[0]
        assert answers[0] == streamed[1]
        return [*texts, *answers, *streamed, *(handle.hidden(12) for handle in (*handles, *more))]

    async def main() -> None:
        plain = await ask()
        requested = await ask(steering=spec)
        listed, _ = await model.generate([CHAT, CHAT], **options, steering=[spec, None], capture_layers=[12])
        await model.apply_steering_spec(spec)
        applied = await ask()
        off = await ask(steering=SteeringSpec.none())
        await model.clear_all_vectors()
        await model.set_layer_vector(12, ADD.vector, ADD.scale)
        await model.set_layer_projection_cap(12, CAP.vector, CAP.min, CAP.max)
        await model.set_layer_ablation(12, ABLATE.vector, ABLATE.scale)
        assert model.export_steering_spec() == spec
        piecewise = await ask()
        async with model.steering(SPECS["add"]):
            pass
        restored = await ask()
        for found in (applied, piecewise, restored):
            same(found, requested)
        same(off, plain)
        assert requested[0] != plain[0]
        assert listed == [requested[0], plain[0]]

    def same(found: list[Any], wanted: list[Any]) -> None:
        for one, other in zip(found, wanted, strict=True):
            if isinstance(one, torch.Tensor):
                assert error(one, other) < TOLERANCE
            else:
                assert one == other

    asyncio.run(main())


def test_prefix_caching_never_mixes_steerings(model: VLLMSteerModel, hf: Oracle) -> None:
    """One long shared prompt, steered, plain, steered otherwise, plain: each as if it were alone."""
    prompt = "The mountains are high and the rivers are long. " * 20 + "The sea is"
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
    names = ["add", "none", "three on one layer", "none", "add"]

    async def main() -> None:
        ids = model.tokenizer(prompt)["input_ids"]
        for name in names:
            (output,) = await model.generate(prompt, **options, steering=SPECS[name], raw_output=True)
            assert list(output.outputs[0].token_ids) == hf.greedy(ids, 6, SPECS[name])
        assert output.num_cached_tokens > 100  # the last run took its prefix from the first, steered alike
        for name in names[:2]:
            _, (handle,) = await model.generate(prompt, **options, steering=SPECS[name], capture_layers=[10, 29])
            await handle.fetch()
            assert len(handle.token_ids) == len(ids) + 5
            wanted = hf.residuals(handle.token_ids, SPECS[name])
            assert error(handle.hidden(10), wanted[10]) < TOLERANCE
            assert error(handle.hidden(29), wanted[29]) < TOLERANCE

    asyncio.run(main())


def test_the_orthogonal_part_does_not_move(model: VLLMSteerModel) -> None:
    u = U / U.norm()

    async def rows(spec: SteeringSpec) -> torch.Tensor:
        _, (handle,) = await model.generate(CHAT, max_tokens=1, capture_layers=[10], steering=spec)
        await handle.fetch()
        return handle.hidden(10)

    async def main() -> None:
        plain = await rows(SteeringSpec.none())
        for name in ("cap", "cap below", "cap above", "cap to a point"):
            cap = SPECS[name].layers[10].projection_cap
            moved = await rows(SPECS[name]) - plain
            along = moved @ u
            assert (moved - along[:, None] * u).norm(dim=-1).max() < 1e-4 * plain.norm(dim=-1).max()
            assert torch.allclose((plain @ u).clamp(cap.min, cap.max), plain @ u + along, atol=2e-3)

    asyncio.run(main())


@pytest.mark.engine
def test_bfloat16(demo_model_path: str, hf: Oracle) -> None:
    """A row's cosine with float32 is above 0.999, unless bfloat16 arithmetic itself does not hold the row that near.

    Of this model's rows about one in a hundred is such, at tokens that attention sinks into: there Hugging Face's own
    bfloat16 misses 0.999 too. On the average over all rows, ours must be as near to float32 as that.
    """
    rounded = Oracle(demo_model_path, torch.bfloat16)
    ours, theirs = [], []
    with started(demo_model_path, dtype="bfloat16", max_model_len=512) as model:
        assert model.dtype == torch.bfloat16
        for name, _, handle in asyncio.run(captured(model, ["none", "add", "three on one layer", "all layers"], 24)):
            wanted = hf.residuals(handle.token_ids, SPECS[name])
            got = torch.stack([handle.hidden(layer) for layer in EVERYWHERE])
            assert got.dtype == torch.bfloat16
            assert torch.isfinite(got).all()
            ours.append(1 - torch.cosine_similarity(got.float(), wanted, dim=-1).flatten())
            reference = rounded.residuals(handle.token_ids, SPECS[name]).float()
            theirs.append(1 - torch.cosine_similarity(reference, wanted, dim=-1).flatten())
    missing, reference = torch.cat(ours), torch.cat(theirs)
    assert missing.mean() < 1.1 * reference.mean()
    assert missing.quantile(0.98) < 1e-3
    assert missing.max() < 2 * reference.max()  # single rows differ from machine to machine


@pytest.mark.engine
@pytest.mark.slow
def test_compiled(demo_model_path: str, model: VLLMSteerModel, hf: Oracle) -> None:
    """vLLM's compiled mode: the same captures, and the same text, steered and not."""
    names = ["none", "add", "three on one layer", "odd order", "all layers"]
    eager = asyncio.run(captured(model, names, 16))
    with started(demo_model_path, enforce_eager=False, max_model_len=512) as compiled:
        results = asyncio.run(captured(compiled, names, 16))
    for (name, text, handle), (_, eager_text, _) in zip(results, eager, strict=True):
        assert text == eager_text, name
        wanted = hf.residuals(handle.token_ids, SPECS[name])
        for layer in EVERYWHERE:
            difference = error(handle.hidden(layer), wanted[layer])
            assert difference < TOLERANCE, f"{name}, layer {layer}: {difference}"
