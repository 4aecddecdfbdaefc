"""The lab and its async side: the same methods, written out and typed; who follows a call, and who is told of what."""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
from typing import Any

import pytest
import torch

from chatspace_lab import LabSession, SteeringSpec, VLLMSteerModel
from chatspace_lab.engine.observer import Progress
from chatspace_lab.session import AsyncLab

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture
def v(lab: LabSession) -> torch.Tensor:
    return torch.randn(lab.hidden_size, generator=torch.Generator().manual_seed(5))


OF_THE_ENGINE = {"aclose", "execution", "facts", "memory", "observe", "on_steering", "prepare", "write"}
"""Public names of the async side that a lab does not have: they are about the engine itself, or have another name."""


def names_of(source: type) -> set[str]:
    return {name for name in dir(source) if not name.startswith("_")}


def test_both_sides_have_the_same_names_parameters_and_docs() -> None:
    missing = names_of(AsyncLab) - names_of(LabSession)
    assert missing <= OF_THE_ENGINE, missing - OF_THE_ENGINE
    shared = [name for name in names_of(AsyncLab) & names_of(LabSession) if callable(getattr(AsyncLab, name))]
    assert len(shared) > 30
    for name in shared:
        if name == "close":  # a lab closes its panels too
            continue
        ours, theirs = getattr(LabSession, name), getattr(AsyncLab, name)
        assert list(inspect.signature(ours).parameters.values()) == list(
            inspect.signature(theirs).parameters.values()
        ), name
        assert not inspect.iscoroutinefunction(ours), name
        if name != "steering":
            assert inspect.getdoc(theirs) in inspect.getdoc(ours), name
        if inspect.iscoroutinefunction(theirs) and name not in ("generate", "chat"):  # whose handles differ
            assert inspect.signature(ours).return_annotation == inspect.signature(theirs).return_annotation, name


def test_public_methods_are_written_out() -> None:
    """A type checker sees what is in the class body, and knows what it returns."""
    for source in (VLLMSteerModel, AsyncLab, LabSession):
        assert "__getattr__" not in vars(source)
        tree = ast.parse(textwrap.dedent(inspect.getsource(source)))
        written = {
            each.name: each for each in tree.body[0].body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert {name for name, value in vars(source).items() if inspect.isfunction(value)} <= set(written)
        for name, each in written.items():
            if not name.startswith("_") and name not in ("generate", "chat", "tokenizer", "panel", "sweep_panel"):
                assert each.returns is not None, name
                assert ast.unparse(each.returns) != "Any", f"{source.__name__}.{name}"


def test_handles_of_a_lab_block_and_those_of_its_async_side_are_awaited(lab: LabSession, v: torch.Tensor) -> None:
    [text], [handle] = lab.generate("The river flows", capture_layers=[4, 9], **GREEDY)
    with handle:
        readings = handle.read({"v": v}, layers=[9])
        pooled, (typical, norms) = handle.pool("last", layers=[4]), handle.pool_typical(layers=[9])
        rows = handle.fetch().hidden(9)
        torch.testing.assert_close(torch.from_numpy(readings.norm[0]), rows.norm(dim=-1))
        torch.testing.assert_close(pooled[0], handle.hidden(4)[-1])
        torch.testing.assert_close(torch.from_numpy(norms[0]), rows.norm(dim=-1))
        assert typical.shape == (1, lab.hidden_size)
    with lab.stream("The river flows", capture_layers=[9], **GREEDY) as stream:
        assert "".join(delta.text for delta in stream) == text
    assert stream.handle is not None
    torch.testing.assert_close(stream.handle.fetch().hidden(9), rows)
    stream.handle.close()

    async def awaited() -> torch.Tensor:
        _, [other] = await lab.aio.generate("The river flows", capture_layers=[9], **GREEDY)
        async with other:
            return (await other.fetch()).hidden(9)

    torch.testing.assert_close(asyncio.run(awaited()), rows)


def test_progress_is_told_of_the_requests_of_its_call_alone(lab: LabSession) -> None:
    follow, other = Progress(), Progress()
    lab.generate(["The river", "A day"], progress=follow, **GREEDY)
    lab.generate("A hill", progress=other, **GREEDY)
    assert (follow.total, follow.done, follow.tokens) == (2, 2, sum(len(run.token_ids) for run in lab.history[-3:-1]))
    assert follow.partial == [run.text for run in lab.history.runs[-3:-1]]
    assert (other.total, other.done) == (1, 1)
    sweep = Progress()
    frame = lab.sweep("The river", [4], torch.ones(lab.hidden_size), [0.0, 1.0], max_tokens=4, progress=sweep)
    assert sweep.done == sweep.total == 5  # a measurement, and of each cell a run and its perplexity
    assert len(sweep.partial) == len(frame) == 2


def test_subscriptions_end(lab: LabSession, v: torch.Tensor) -> None:
    changes: list[SteeringSpec] = []
    with lab.aio.on_steering(changes.append):
        lab.steer(4, v, 2.0)
    lab.clear()
    assert [list(spec.layers) for spec in changes] == [[4]]
    heard = Progress()
    subscription = lab.aio.observe(heard)
    lab.generate("The river", **GREEDY)
    subscription.end()
    subscription.end()
    lab.generate("The river", **GREEDY)
    assert heard.done == 1
