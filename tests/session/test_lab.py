"""The lab in one process: its twins, verbs, sweeps, reductions, history and what it keeps when interrupted."""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from vllm import SamplingParams

from chatspace_lab import (
    AddSpec,
    ChatResponse,
    LabSession,
    SteeringSpec,
    VLLMSteeringConfig,
    Where,
)
from chatspace_lab.analysis import Direction, sweep_cells
from chatspace_lab.errors import (
    CaptureError,
    ConfigError,
    HighDoseWarning,
    LabError,
    PromptTooLongError,
    ReadOnlyError,
    RequestError,
    SessionError,
    SteeringError,
    UnreadOptionWarning,
)
from chatspace_lab.session.collect import AT_ONCE
from chatspace_lab.session.measure import PLAIN_TEXTS
from tests import tiny
from tests.conftest import wait_until
from tests.oracle import Oracle

CHAT = [{"role": "user", "content": "Name a river in France."}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture
def v(lab: LabSession) -> torch.Tensor:
    return torch.randn(lab.hidden_size, generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def stop_button() -> Iterator[None]:
    """A process that was started in the background ignores the signal of the stop button; Jupyter's kernels do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(lab: LabSession, call: Callable[[], Any], after: Callable[[], bool]) -> float:
    """Press the stop button during ``call`` once ``after`` holds; return the seconds until it is left."""
    pressed: list[float] = []

    def press() -> None:
        wait_until(after, timeout_s=60)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    left = time.monotonic() - pressed[0]
    thread.join()
    return left


# -- twins ---------------------------------------------------------------------------------------------------------


def test_twins_answer_as_the_coroutines_do(lab: LabSession, v: torch.Tensor) -> None:
    async def awaited() -> list[Any]:
        aio = lab.aio
        found = [await aio.generate(["The river", "A day"], **GREEDY), await aio.chat(CHAT, **GREEDY)]
        await aio.set_layer_vector(9, v, 4.0)
        found.append(await aio.generate("The river", **GREEDY))
        found.append(await aio.pop_steering_spec() if await aio.push_steering_spec(SteeringSpec.none()) else None)
        await aio.pop_steering_spec()
        found.append(aio.export_steering_spec())
        async with aio.steering(SteeringSpec.at(3, AddSpec(v, 2.0))):
            found.append(await aio.generate("The river", **GREEDY))
        await aio.clear_all_vectors()
        _, handles = await aio.chat(CHAT, capture_layers=[4], **GREEDY)
        await aio.fetch_captures_batch(handles)
        found.append(handles[0].hidden(4))
        found.append([delta async for delta in aio.stream("The river", **GREEDY)][-1].finish_reason)
        found.append(await aio.ask("Name a river in France.", **GREEDY))
        return found

    def blocking() -> list[Any]:
        found = [lab.generate(["The river", "A day"], **GREEDY), lab.chat(CHAT, **GREEDY)]
        lab.set_layer_vector(9, v, 4.0)
        found.append(lab.generate("The river", **GREEDY))
        found.append(lab.pop_steering_spec() if lab.push_steering_spec(SteeringSpec.none()) else None)
        lab.pop_steering_spec()
        found.append(lab.export_steering_spec())
        with lab.steering(SteeringSpec.at(3, AddSpec(v, 2.0))):
            found.append(lab.generate("The river", **GREEDY))
        lab.clear_all_vectors()
        _, handles = lab.chat(CHAT, capture_layers=[4], **GREEDY)
        lab.fetch_captures_batch(handles)
        found.append(handles[0].hidden(4))
        found.append(list(lab.stream("The river", **GREEDY))[-1].finish_reason)
        found.append(lab.ask("Name a river in France.", **GREEDY))
        return found

    theirs, ours = asyncio.run(awaited()), blocking()
    for a, b in zip(theirs, ours, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
        else:
            assert a == b
    assert ours[0][0] != ours[2][0] != ours[5][0]  # and the steering did something
    assert ours[1][0] == ours[8]


def test_a_block_restores_what_was_in_force_after_an_exception(lab: LabSession, v: torch.Tensor) -> None:
    lab.steer(2, v)
    with pytest.raises(ZeroDivisionError), lab.steering(SteeringSpec.at(3, AddSpec(v))):
        assert list(lab.export_steering_spec().layers) == [3]
        raise ZeroDivisionError
    assert list(lab.export_steering_spec().layers) == [2]


def test_calls_work_in_threads_and_inside_coroutines(lab: LabSession) -> None:
    want = lab.generate("The river", **GREEDY)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(lab.generate("The river", **GREEDY))) for _ in range(3)]
    for thread in threads:
        thread.start()

    async def inside() -> Any:
        return lab.generate("The river", **GREEDY)

    found.append(asyncio.run(inside()))
    for thread in threads:
        thread.join()
    assert found == [want] * 4


# -- one lab per kernel ----------------------------------------------------------------------------------------------


def test_the_same_arguments_give_the_running_lab_and_others_say_so(lab: LabSession, demo_model_path: str) -> None:
    again = LabSession(demo_model_path, dtype="float32", max_model_len=1024, kv_cache_memory_bytes=1 << 28)
    assert again is lab
    with pytest.raises(
        SessionError, match=r"runs already.*max_model_len=1024.*lab\.close\(\).*replace=True.*beside=True"
    ):
        LabSession(demo_model_path, max_model_len=512)
    assert LabSession.running() == [lab]
    assert lab.generate("One", **GREEDY)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("./no-folder", {}, "there is no such folder"),
        (None, {"max_model_length": 64}, "did you mean max_model_len"),
        (None, {"max_model_len": 10**6}, "max_model_len"),
        (None, {"bootstrap_layers": [99]}, "layer 99 does not exist"),
        ("bloom", {}, "BloomForCausalLM: vLLM computes its GELU exactly"),
        (3, {}, "expected a model's name or folder"),
    ],
)
def test_a_lab_goes_on_when_its_successor_cannot_be_started(
    lab: LabSession, tmp_path: Path, model: Any, options: dict[str, Any], words: str
) -> None:
    if model == "bloom":
        model = tiny.build("bloom", tmp_path)
    with pytest.raises(LabError, match=words):
        LabSession(model, replace=True, **options)
    assert LabSession.running() == [lab]
    assert lab.is_alive


def test_the_card_shows_model_steering_and_dose_and_the_repr_too(lab: LabSession, v: torch.Tensor) -> None:
    assert "steering</td><td" in lab._repr_html_().replace("\n", "")
    assert ">none<" in lab._repr_html_()
    lab.measure("The river <b>runs</b>")
    lab.steer([6, 7, 8], v, dose=0.5)
    lab.cap(12, v, max=3.0)
    shown = lab._repr_html_()
    assert "LlamaForCausalLM, 30 layers × 576" in shown
    assert "dose 0.50 @ 6" in shown
    assert "cap [−∞, 3] @ 12" in shown
    assert "&lt;b&gt;runs&lt;/b&gt;" in shown
    assert "1 done" in shown
    assert shown.startswith('<div class="mathjax_ignore')  # dollars in a prompt are no formula
    assert "cap [−∞, 3] @ 12" in repr(lab)


# -- short forms -----------------------------------------------------------------------------------------------------


def test_short_forms_change_the_session_wide_steering(lab: LabSession, v: torch.Tensor) -> None:
    lab.steer([3, 4], v, 2.0)
    lab.cap(4, -v, -1.0, 1.0)
    lab.ablate([4, 9], {4: v, 9: 2 * v}, 0.5)
    spec = lab.export_steering_spec()
    assert [(layer, type(op).__name__) for layer, op in spec] == [
        (3, "AddSpec"),
        (4, "AddSpec"),
        (4, "ProjectionCapSpec"),
        (4, "AblationSpec"),
        (9, "AblationSpec"),
    ]
    assert spec.layers[3].add.scale == 2.0
    torch.testing.assert_close(spec.layers[4].projection_cap.vector, -v / v.norm())
    lab.steer(3, v, 5.0)  # a cell that is run again replaces, it does not add up
    assert lab.export_steering_spec().layers[3].add.scale == 5.0
    lab.clear(4)
    assert list(lab.export_steering_spec().layers) == [3, 9]
    lab.clear()
    assert not lab.export_steering_spec()


def test_a_dose_is_a_fraction_of_the_measured_norm(lab: LabSession, v: torch.Tensor, hf: Oracle) -> None:
    frame = lab.measure("The river runs to the sea")
    ids = lab.tokenizer("The river runs to the sea")["input_ids"]
    norms = typical(hf.residuals(ids))
    np.testing.assert_allclose(frame["norm"], norms, rtol=1e-4)
    assert frame["layer"].tolist() == list(range(30))
    lab.steer([5, 20], v, dose=-0.5)
    for layer in (5, 20):
        scale = lab.export_steering_spec().layers[layer].add.scale
        assert scale * v.norm().item() / norms[layer] == pytest.approx(-0.5, rel=1e-4)


def typical(rows: torch.Tensor) -> np.ndarray:
    """Return the mean norm per layer of rows [layers, tokens, hidden_size], by the rule of attention sinks."""
    norms = rows[:, 1:].double().norm(dim=-1).numpy()
    quartile = np.sort(norms, axis=1)[:, (norms.shape[1] - 1) // 4]
    return np.array([row[row <= 3 * least].mean() for row, least in zip(norms, quartile, strict=True)])


@pytest.mark.parametrize("text", ["The river flows to the sea.", "The river\nflows to the sea.", "One, two. The end"])
def test_the_scale_of_a_dose_is_that_of_ordinary_tokens_wherever_the_attention_sinks_stand(
    lab: LabSession, v: torch.Tensor, hf: Oracle, text: str
) -> None:
    scales = []
    for bos in range(4):
        prompt = "<|im_start|>" * bos + text
        frame = lab.measure(prompt)
        rows = hf.residuals(lab.tokenizer(prompt)["input_ids"])
        np.testing.assert_allclose(frame["norm"], typical(rows), rtol=1e-3)
        usual = rows[:, bos + 1 :].norm(dim=-1).median(dim=-1).values
        np.testing.assert_allclose(frame["norm"][1:], usual.numpy()[1:], rtol=0.25)  # nothing stands out at layer 0
        lab.steer([3, 15], v, dose=0.4)
        scales.append([lab.export_steering_spec().layers[at].add.scale for at in (3, 15)])
        at_15 = lab.left_out[lab.left_out["layer"] == 15]
        assert at_15["position"].tolist() == list(range(max(bos, 1)))
        assert (at_15["norm"] > 1e4).all()
        assert at_15["token"].tolist()[:bos] == ["<|im_start|>"] * bos
        assert frame["left_out"][15] == len(at_15)
    np.testing.assert_allclose(scales, np.broadcast_to(scales[0], (4, 2)), rtol=0.15)


def test_a_prompt_of_attention_sinks_is_no_measure_of_a_dose(lab: LabSession, hf: Oracle) -> None:
    usual = lab.measure()["norm"].to_numpy()
    [river] = lab.tokenizer(["The river flows"])["input_ids"]
    begins = [1] * 20 + river[:2]  # <|im_start|>
    assert (hf.residuals(begins)[15].norm(dim=-1) > 1e4).sum() == 20
    frame = lab.measure(begins)
    np.testing.assert_allclose(frame["norm"][3:24], usual[3:24], rtol=0.35)  # 2 tokens and 200
    assert frame["left_out"][15] == 20
    assert (hf.residuals(lab.tokenizer("The The The The")["input_ids"])[15].norm(dim=-1) > 1e4).all()
    before = dict(lab.norms)
    for prompt in ("The The The The", [1] * 8, [1]):
        with pytest.raises(RequestError, match="got only attention sinks"):
            lab.measure(prompt)
    assert lab.norms == before
    grid = lab.sweep([1] * 8, [15], torch.ones(lab.hidden_size), doses=[0.1], perplexity=False, **GREEDY)
    assert grid["scale"][0] * 24 == pytest.approx(0.1 * usual[15], rel=0.01)  # 24 is the vector's length


def test_a_mean_over_a_prompt_leaves_out_attention_sinks_and_says_which(lab: LabSession, hf: Oracle) -> None:
    texts = ["The river flows to a sea.", "<|im_start|><|im_start|>The river flows to a sea."]
    found = lab.capture(texts, [3, 15], "mean")
    everything = lab.capture(texts, [3, 15], "mean", attention_sinks=True)
    for at, text in enumerate(texts):
        rows = hf.residuals(lab.tokenizer(text)["input_ids"])
        places = found.left_out[(found.left_out["prompt_index"] == at) & (found.left_out["layer"] == 15)]
        assert places["position"].tolist() == list(range(1 + at))
        want = rows[15, 1 + at :].mean(dim=0)
        np.testing.assert_allclose(found.layer(15)[at], want.numpy(), rtol=1e-3, atol=1e-2)
        np.testing.assert_allclose(everything.layer(15)[at], rows[15].mean(dim=0).numpy(), rtol=1e-3, atol=0.1)
    for layer in (3, 15):
        one, other = found.layer(layer)
        assert one @ other > 0.97 * np.linalg.norm(one) * np.linalg.norm(other)


def test_a_dose_in_a_new_session_is_measured_on_a_stock_text_and_says_so(
    lab: LabSession, v: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.aio.measured_on = None
    lab.vectors["joy"] = v
    shown = repr(lab.steer([15, 16], "joy", dose=0.4))
    assert "stock text" in lab.measured_on
    assert lab.measured_on in capsys.readouterr().out
    assert "add joy @ 15–16: dose 0.40 at each layer, 0.80 in all (scale " in shown
    assert shown.endswith(f"doses are relative to the mean residual norm on {lab.measured_on}")
    norms, spec = dict(lab.norms), lab.export_steering_spec()
    assert spec.layers[15].add.scale * v.norm().item() == pytest.approx(0.4 * norms[15], rel=1e-5)
    asked = len(lab.history)
    shown = repr(lab.cap(20, "joy", min_dose=-0.1, max_dose=0.2))
    assert len(lab.history) == asked  # it is known already
    cap = lab.export_steering_spec().layers[20].projection_cap
    assert (cap.min, cap.max) == pytest.approx((-0.1 * norms[20], 0.2 * norms[20]))
    assert f"cap joy to [{cap.min:.4g}, {cap.max:.4g}] @ 20" in shown
    plain = lab.measure("<|im_start|>Boats on the lake")  # another prompt gives about the same
    np.testing.assert_allclose(plain["norm"][14:], [norms[at] for at in range(14, 30)], rtol=0.25)
    del lab.vectors["joy"]


def test_a_call_that_steers_returns_all_that_is_in_force_by_name(lab: LabSession, v: torch.Tensor) -> None:
    lab.vectors["joy"] = v
    lab.steer([14, 15, 16], "joy", 2.0)
    shown = repr(lab.steer(16, v, 5.0))  # the vector, not its name
    assert shown == "steering in force:\n  add joy @ 14–16: scale 2 to 5"
    sea = Direction("sea", {at: -v + at for at in range(30)})
    lab.ablate([3, 4], sea)
    lab.cap(5, v + 1, max=1.5)
    assert repr(lab.in_force()).splitlines()[1:] == [
        "  ablate sea to 0 @ 3–4",
        "  cap a vector without a name to [−∞, 1.5] @ 5",
        "  add joy @ 14–16: scale 2 to 5",
    ]
    assert "5·joy" in repr(lab)
    assert "ablate sea to 0" in lab._repr_html_()
    lab.generate("a", max_tokens=1)
    assert "ablate sea to 0 @ 3–4; cap [" in lab.history.frame()["steering"].iloc[-1]
    assert repr(lab.clear()) == "no steering in force"
    del lab.vectors["joy"]


def test_a_bound_is_a_quantile_of_projections_on_plain_text(
    lab: LabSession, v: torch.Tensor, hf: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.cap([9, 16], v, min="p10", max="p90")
    assert "quantiles are those of x·u on a stock text" in capsys.readouterr().out
    u = (v / v.norm()).double()
    for layer in (9, 16):
        rows = [hf.residuals(lab.tokenizer(text)["input_ids"])[layer, 1:].double() for text in PLAIN_TEXTS]
        kept = [each[each.norm(dim=-1) <= 3 * each.norm(dim=-1).quantile(0.25, interpolation="lower")] for each in rows]
        seen = (torch.cat(kept) @ u).numpy()
        cap = lab.export_steering_spec().layers[layer].projection_cap
        assert (cap.min, cap.max) == pytest.approx(tuple(np.quantile(seen, [0.1, 0.9])), rel=1e-3, abs=1e-2)


def test_a_dose_from_which_on_answers_fall_apart_warns(lab: LabSession, v: torch.Tensor) -> None:
    lab.steer(16, v, dose=1.4)
    lab.steer([14, 15, 16], v, dose=-0.4)
    with pytest.warns(HighDoseWarning, match=r"dose 1\.6 at layer 16 is extreme: from 1\.5 on"):
        lab.steer(16, v, dose=1.6)
    with pytest.warns(HighDoseWarning, match=r"dose 2 in all, over 4 layers, is extreme"):
        lab.steer([3, 4, 5, 6], v, dose=0.5)
    with pytest.warns(HighDoseWarning, match=r"dose 3 at layer 9"):  # also of a raw scale, once norms are known
        lab.steer(9, v, 3 * lab.norms[9] / v.norm().item())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda lab, v: lab.steer(30, v), SteeringError, "layer 30 does not exist"),
        (lambda lab, v: lab.steer([], v), RequestError, "steer: layers is empty"),
        (lambda lab, v: lab.steer(3, v[:7]), SteeringError, "vector has 7 entries, this model's hidden_size"),
        (lambda lab, v: lab.steer(3, v, 1.0, dose=1.0), RequestError, "scale or dose, not both"),
        (lambda lab, v: lab.steer(3, {4: v}), RequestError, r"steer: vector has no vector for layer 3, only for \[4\]"),
        (lambda lab, v: lab.cap(3, v), SteeringError, "give min, max or both"),
        (lambda lab, v: lab.sweep("a", 3, v, []), RequestError, "scales is empty"),
        (lambda lab, v: lab.sweep("a", 3, v, [math.nan]), SteeringError, "sweep: one of scales"),
        (lambda lab, v: lab.sweep("a", 3, v), RequestError, "give scales or doses"),
        (lambda lab, v: lab.sweep("a", 3, v, [1], doses=[1]), RequestError, "give scales or doses"),
        (lambda lab, v: lab.sweep("a", 3, 0 * v, doses=[1]), SteeringError, "the vector for layer 3 is zero"),
        (lambda lab, v: lab.sweep("a", 3, 0 * v, [0, 1]), SteeringError, "the vector for layer 3 is zero"),
        (lambda lab, v: lab.sweep("a", 3, v, [1], read_layer=[3, 4]), SteeringError, r"whole number, got \[3, 4\]"),
        (lambda lab, v: lab.sweep("a", 3, v, doses=[1], operation="ablate"), RequestError, "only additions and caps"),
        (lambda lab, v: lab.sweep("a", 3, v, [1], operation="swap"), RequestError, "is one of add, ablate, cap"),
        (lambda lab, v: lab.sweep("a", 3, v, ["p101"], operation="cap"), RequestError, "quantile .* got 'p101'"),
        (lambda lab, v: lab.sweep("a", 3, v, ["p90"]), SteeringError, "one of scales: expected a number, got str"),
        (lambda lab, v: lab.cap(3, v, "90"), RequestError, "cap: min must be a number, or a quantile"),
        (lambda lab, v: lab.cap(3, v, 1.0, min_dose=0.1), RequestError, "give min or min_dose, not both"),
        (lambda lab, v: lab.cap(3, v[:7], "p90"), SteeringError, "vector has 7 entries"),
        (lambda lab, v: lab.cap(3, 0 * v, "p90"), SteeringError, "the vector is zero"),
        (lambda lab, v: lab.steer(3, 0 * v, dose=0.1), SteeringError, "the vector for layer 3 is zero"),
        (lambda lab, v: lab.steer(3, v, dose="a"), SteeringError, "steer: dose: expected a number"),
        (lambda lab, v: lab.sweep("a", 3, v, [1], max_token=3), RequestError, "did you mean max_tokens"),
        (lambda lab, v: lab.sweep("a", 3, v, [1], max_tokens=5000), PromptTooLongError, "max_model_len"),
        (lambda lab, v: lab.capture("a", 3), RequestError, r"prompts must be a list .*, got str; .* write \[prompt\]"),
        (lambda lab, v: lab.steer("joy", 3), SteeringError, "whole number, got 'joy'; .* before the vector"),
        (lambda lab, v: lab.chat(CHAT, capture_layers="all"), RequestError, r"got 'all'; all of them are range\(30\)"),
        (lambda lab, v: lab.generate("a", do_sample=False), RequestError, "do_sample; temperature=0.0 takes"),
        (lambda lab, v: lab.generate(np.array(["a"])), RequestError, r"got ndarray; write list\(prompts\)"),
        (lambda lab, v: lab.ask("a", steering={3: v}), RequestError, r"got dict; write SteeringSpec\.at\("),
        (lambda lab, v: lab.apply_steering_spec(v), SteeringError, r"got Tensor; write SteeringSpec\.at\("),
        (lambda lab, v: AddSpec(Direction("joy", {3: v})), SteeringError, r"got Direction; .* \.raw\(layer\)"),
        (lambda lab, v: SteeringSpec({3: AddSpec(v)}), SteeringError, r"got AddSpec; write SteeringSpec\.at"),
        (lambda lab, v: SteeringSpec.at(3, v), SteeringError, r"got Tensor; write AddSpec\(vector, scale\)"),
        (lambda lab, v: lab.frame((["a"], [])), CaptureError, r"got list in it; .* pass the handles"),
        (lambda lab, v: lab.capture([], 3), RequestError, "there are no prompts"),
        (lambda lab, v: lab.capture(["a", CHAT], 3), RequestError, "the prompts are mixed"),
        (lambda lab, v: lab.capture([CHAT, [*CHAT, "b"]], 3), RequestError, "conversation 1: message 1 must be a dict"),
        (lambda lab, v: lab.capture([{"prompt": "a"}], 3), RequestError, "prompt 0: a dict needs prompt_token_ids"),
        (lambda lab, v: lab.capture(["a", None], 3), RequestError, "prompt 1: expected text or token ids"),
        (lambda lab, v: lab.capture(["a"], 3, directions=v), RequestError, "be a dict of name to vector.* got Tensor"),
        (lambda lab, v: lab.capture(["a"], 3, directions=Direction("d", {3: v})), RequestError, "write {.d.: dir"),
        (lambda lab, v: lab.capture(["a"], 3, "max"), RequestError, "reduce is one of mean, last, norm, projection"),
        (lambda lab, v: lab.capture(["a"], 3, "projection"), RequestError, "needs directions"),
        (lambda lab, v: lab.capture(["a"], 3, directions={"v": v}), RequestError, "directions go with"),
        (lambda lab, v: lab.capture(["a", ""], 3), RequestError, "prompt 1 is empty"),
        (lambda lab, v: lab.capture(["a"], 3, n=2), RequestError, "n=2 is not supported"),
        (lambda lab, v: lab.ask("a", capture_layers=[3]), RequestError, "capture_layers is an argument of chat"),
        (lambda lab, v: lab.load("nowhere"), SessionError, "holds no saved session"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_before_anything_runs(
    lab: LabSession, v: torch.Tensor, call: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call(lab, v)
    assert len(lab.history) == 0
    assert not lab.export_steering_spec()


def test_an_error_in_the_arguments_points_at_the_call(lab: LabSession) -> None:
    for call in (lambda: lab.ask("a", max_token=3), lambda: lab.steer(30, torch.ones(lab.hidden_size))):
        with pytest.raises(LabError) as found:
            call()
        assert len(found.traceback) <= 5  # this test, the lambda and the lab's own two; not the engine's thirty


def test_an_answer_that_ends_by_vllms_default_length_says_so(
    lab: LabSession, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "ended at vLLM's default of max_tokens=16"
    answers = lab.generate(["One, two, three, four,", "A, B, C, D,"], temperature=0.0, ignore_eos=True)
    assert [answer.finish_reason for answer in answers] == ["length", "length"]
    assert f"2 of 2 answers {told}" in capsys.readouterr().out
    assert lab.ask("Count to 99.", temperature=0.0, ignore_eos=True).finish_reason == "length"
    assert f"1 of 1 answers {told}" in capsys.readouterr().out
    lab.chat(CHAT, temperature=0.0, ignore_eos=True, max_tokens=16)
    lab.generate("One, two,", SamplingParams(temperature=0.0, ignore_eos=True))
    stopped = lab.generate("One, two, three, four,", temperature=0.0, stop=[","])
    assert [answer.finish_reason for answer in stopped] == ["stop"]
    assert told not in capsys.readouterr().out
    assert all("Without ``max_tokens``" in (each.__doc__ or "") for each in (lab.ask, lab.chat, lab.generate))


# -- sweep -----------------------------------------------------------------------------------------------------------


def test_a_sweep_equals_single_runs_and_its_numbers_the_oracle(lab: LabSession, v: torch.Tensor, hf: Oracle) -> None:
    layers, scales = [4, 12], [-3.0, 0.0, 3.0]
    frame = lab.sweep(CHAT, layers, v, scales, max_tokens=16)
    assert list(zip(frame["layer"], frame["scale"], strict=True)) == [(at, scale) for at in layers for scale in scales]
    for _, row in frame.iterrows():
        spec = SteeringSpec.at(row["layer"], AddSpec(v, row["scale"]))
        [output], [handle] = lab.chat(
            CHAT, steering=spec, capture_layers=[row["layer"]], raw_output=True, temperature=0.0, max_tokens=16
        )
        lab.fetch_captures_batch([handle])
        answer = list(output.outputs[0].token_ids)
        assert row["text"] == output.outputs[0].text
        assert row["tokens"] == len(answer)
        rows = handle.hidden(row["layer"])[handle.prompt_len :]
        norms = rows.norm(dim=-1)
        usual = rows[norms <= 3 * norms.quantile(0.25, interpolation="lower")]
        assert row["projection"] == pytest.approx((usual @ (v / v.norm())).mean().item(), rel=1e-3, abs=1e-2)
        ids = list(output.prompt_token_ids)
        logits = hf.run([*ids, *answer])[1].log_softmax(dim=-1)
        scored = [logits[len(ids) - 1 + at, token].item() for at, token in enumerate(answer)]
        assert row["perplexity"] == pytest.approx(math.exp(-np.mean(scored)), rel=1e-3)
        norm = typical(hf.residuals(ids))[row["layer"]]
        assert row["dose"] == pytest.approx(row["scale"] * v.norm().item() / norm, rel=1e-4)
        assert row["relative"] == pytest.approx(row["projection"] / norm, rel=1e-4)
        handle.close()
    assert frame["text"].nunique() >= 4
    assert frame[frame["scale"] == 0]["text"].nunique() == 1
    assert [run.status for run in lab.history] == ["done"] * len(lab.history)


def test_layers_and_scales_are_one_or_several_of_any_kind(lab: LabSession, v: torch.Tensor) -> None:
    options = {"max_tokens": 1, "perplexity": False}
    frame = lab.sweep(["The river"], np.array([4, 4, 20]), v, range(2), **options)
    assert list(zip(frame["layer"], frame["scale"], strict=True)) == [(4, 0), (4, 1), (20, 0), (20, 1)]
    assert lab.aio.measured_on == "The river"
    frame = lab.sweep("The river", np.array(4), v, torch.tensor(-2), **options)
    assert list(zip(frame["layer"], frame["scale"], strict=True)) == [(4, -2)]
    lab.steer(torch.tensor([3, 4]), v)
    assert list(lab.export_steering_spec().layers) == [3, 4]


def test_a_sweep_of_doses_scales_each_layer_by_its_own_norm(lab: LabSession, v: torch.Tensor) -> None:
    frame = lab.sweep(CHAT, [4, 20], {4: v, 20: 3 * v}, doses=[-0.5, 0.5], max_tokens=2, perplexity=False)
    np.testing.assert_allclose(frame["dose"], [-0.5, 0.5, -0.5, 0.5], rtol=1e-5)
    lengths = [v.norm().item(), v.norm().item(), 3 * v.norm().item(), 3 * v.norm().item()]
    norms = [lab.norms[layer] for layer in frame["layer"]]
    np.testing.assert_allclose(frame["scale"] * lengths, frame["dose"] * norms, rtol=1e-5)


def test_a_sweep_of_several_prompts_with_a_score_of_the_users_own(lab: LabSession, v: torch.Tensor) -> None:
    prompts = ["The river", "A long day in the sun"]
    options: dict[str, Any] = {"max_tokens": 6, "perplexity": False}
    frame = lab.sweep(prompts, [4, 20], v, doses=[0.0, 0.3], score=lambda text: text.count(" "), **options)
    assert frame["prompt_index"].tolist() == [0, 1] * 4
    assert frame["score"].tolist() == [text.count(" ") for text in frame["text"]]
    norms = {at: np.mean([lab.measure(text)["norm"][at] for text in prompts]) for at in (4, 20)}
    for _, row in frame.iterrows():
        spec = SteeringSpec.at(row["layer"], AddSpec(v, row["scale"]))
        alone = lab.generate(prompts[row["prompt_index"]], steering=spec, temperature=0.0, max_tokens=6)
        assert [row["text"]] == alone
        assert row["scale"] * v.norm().item() == pytest.approx(row["dose"] * norms[row["layer"]], rel=1e-3)
    cells = sweep_cells(frame)
    assert cells[["layer", "dose", "prompts"]].round(6).to_numpy().tolist() == [
        [at, dose, 2] for at in (4, 20) for dose in (0.0, 0.3)
    ]
    first = frame[:2]
    assert cells["relative"][0] == pytest.approx(first["relative"].mean())
    assert cells["relative_std"][0] == pytest.approx(first["relative"].std())
    assert {"score", "score_std", "repetition_std", "projection_std"} <= set(cells)
    with pytest.raises(RequestError, match=r"sweep: score failed for the answer .*ZeroDivisionError"):
        lab.sweep("The river", 4, v, [1.0], score=lambda text: 1 / 0, **options)


def test_a_sweep_of_caps(lab: LabSession, v: torch.Tensor) -> None:
    options: dict[str, Any] = {"operation": "cap", "max_tokens": 8, "perplexity": False}
    frame = lab.sweep(CHAT, [4, 20], v, doses=[-0.5, 0.0], **options)
    np.testing.assert_allclose(frame["scale"], frame["dose"] * [lab.norms[at] for at in frame["layer"]], rtol=1e-5)
    assert (frame["projection"] <= frame["scale"] + 1e-2).all()
    quantiles = lab.sweep(CHAT, 16, v, ["p95", 300.0], bound="min", **options)
    assert quantiles["scale"][1] == 300.0
    assert (quantiles["projection"] >= quantiles["scale"] - 1e-2).all()
    lab.cap(16, v, min="p95")
    assert lab.export_steering_spec().layers[16].projection_cap.min == pytest.approx(quantiles["scale"][0])


def test_an_interrupted_sweep_keeps_what_is_finished(lab: LabSession, v: torch.Tensor) -> None:
    def some_are_scored() -> bool:
        return sum(run.status == "done" and run.sampling.get("prompt_logprobs") == 0 for run in lab.history) >= 2

    # The stronger requests end at once: they are asked for one token only by their stop token.
    left = interrupted(
        lab, lambda: lab.sweep("One two three", range(4), v, [0.0, 40.0], max_tokens=300), some_are_scored
    )
    assert left < 1.0
    assert isinstance(lab.partial, pd.DataFrame)
    assert lab.partial.attrs["planned"] == 8
    assert 2 <= len(lab.partial) <= 8
    assert lab.partial["perplexity"].notna().all()
    assert lab.generate("One", **GREEDY)  # ready again
    before = lab.partial
    lab.history.clear()
    interrupted(lab, lambda: lab.sweep("One two three", range(4), v, [1], max_tokens=300), lambda: len(lab.history) > 0)
    assert list(lab.partial) == list(before)  # also while the norms are still measured
    assert lab.partial.attrs["planned"] == 4


# -- reductions ------------------------------------------------------------------------------------------------------


PROMPTS = ["The river", "A long day in the sun and by the sea", "One two three four"]


@pytest.mark.parametrize("where", ["prompt", "answer", Where.span(1, 3)])
@pytest.mark.parametrize("how", ["last", "mean"])
def test_pooled_captures_equal_pooled_rows(lab: LabSession, how: str, where: Any) -> None:
    found = lab.capture(PROMPTS, [3, 17], how, where=where, max_tokens=6, ignore_eos=True)
    assert found.values.shape == (3, 2, 576)
    assert found.values.dtype == np.float32
    texts, handles = lab.generate(PROMPTS, capture_layers=[3, 17], temperature=0.0, max_tokens=6, ignore_eos=True)
    lab.fetch_captures_batch(handles)
    for index, handle in enumerate(handles):
        chosen = {"prompt": slice(0, handle.prompt_len), "answer": slice(handle.prompt_len, None)}
        rows = chosen[where] if isinstance(where, str) else slice(1, min(3, len(handle.positions)))
        for layer in (3, 17):
            x = handle.hidden(layer)[rows]
            usual = x[x.norm(dim=-1) <= 3 * x.norm(dim=-1).quantile(0.25, interpolation="lower")]
            want = x[-1] if how == "last" else usual.mean(dim=0)
            np.testing.assert_allclose(found.layer(layer)[index], want.numpy(), rtol=1e-3, atol=1e-2)
        assert found.rows.loc[index, "rows"] == len(x)
        handle.close()
    assert found.rows["asked"].tolist() == PROMPTS
    assert found.rows["text"].tolist() == texts
    with pytest.raises(RequestError, match=r"layer 4 was not captured, only \[3, 17\]"):
        found.layer(4)


def test_an_answer_without_rows_is_marked_and_stops_nobody(lab: LabSession) -> None:
    found = lab.capture(PROMPTS, [3], "mean", where="answer", max_tokens=1)
    assert np.isnan(found.values).all()
    assert found.rows["rows"].tolist() == [0, 0, 0]
    frame = lab.capture(PROMPTS, [3], "norm", where="answer", max_tokens=1)
    assert len(frame) == 0
    lab.history.clear()
    prompts = ["word " * 900] * 40
    interrupted(lab, lambda: lab.capture(prompts, [3], "norm"), lambda: len(lab.history) > 0)
    assert list(lab.partial) == list(frame)  # also while nothing has come


def test_norms_and_projections_are_a_tidy_frame(lab: LabSession, v: torch.Tensor) -> None:
    chats = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] for text in PROMPTS]
    frame = lab.capture(chats, [8], "projection", directions={"v": v}, where=Where.messages(1))
    assert frame["role"].unique().tolist() == ["user"]
    assert frame["message"].unique().tolist() == [1]
    assert [text for _, text in frame.groupby("prompt_index")["token"].agg("".join).items()] == PROMPTS
    _, handles = lab.chat(chats, capture_layers=[8], temperature=0.0, max_tokens=1)
    lab.fetch_captures_batch(handles)
    want = torch.cat([handle.get_message_activations(1, 8) for handle in handles])
    np.testing.assert_allclose(frame["norm"], want.norm(dim=-1).numpy(), rtol=1e-4)
    np.testing.assert_allclose(frame["projection_v"], (want @ (v / v.norm())).numpy(), rtol=1e-3, atol=1e-2)
    norms = lab.capture(PROMPTS, [8], "norm")
    assert "projection_v" not in norms
    assert lab.history[-1].readings is not None
    for handle in handles:
        handle.close()


def test_a_thousand_prompts_hold_no_more_memory_than_a_few(lab: LabSession) -> None:
    """Of each prompt only 2 rows are kept; meanwhile never more is held than the requests under way need."""
    prompts = [f"The number {index} is" for index in range(1000)]
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, lab.model._client.captures.held_bytes)
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        found = lab.capture(prompts, [3, 17], "last")
    finally:
        done.set()
        thread.join()
    assert len(found) == 1000
    assert found.rows["asked"].tolist() == prompts
    length = max(found.rows["prompt_tokens"])
    # 256 at once, 2 layers, float32; and as many again that were read, and whose release is on its way
    assert 0 < most <= 2 * 256 * length * 2 * 576 * 4
    assert np.linalg.norm(found.layer(3)[0] - found.layer(3)[999]) > 0
    again = lab.capture([prompts[0], prompts[999]], [3, 17], "last")
    np.testing.assert_allclose(found.values[[0, 999]], again.values, rtol=1e-3, atol=1e-2)


def test_an_interrupted_capture_keeps_what_is_finished(lab: LabSession) -> None:
    prompts = [f"Write about the number {index}." for index in range(600)]
    # A prompt after the first AT_ONCE begins when one before it has been reduced.
    done = lambda: sum(run.status == "done" for run in lab.history) > AT_ONCE + 20  # noqa: E731
    assert interrupted(lab, lambda: lab.capture(prompts, [3], "mean", where="answer", max_tokens=20), done) < 1.0
    assert 20 <= len(lab.partial) < 600
    kept = lab.partial.rows
    assert kept["asked"].tolist() == [prompts[at] for at in kept["prompt_index"]]
    first = int(kept["prompt_index"][0])
    alone = lab.capture([prompts[first]], [3], "mean", where="answer", max_tokens=20)
    np.testing.assert_allclose(lab.partial.values[0], alone.values[0], rtol=1e-3, atol=1e-2)


# -- interrupts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.1, 0.5, 2.0])
def test_the_stop_button_keeps_the_partial_text(lab: LabSession, seconds: float) -> None:
    begun = time.monotonic()
    late = lambda: time.monotonic() - begun > seconds  # noqa: E731
    ask: dict[str, Any] = {"temperature": 0.0, "max_tokens": 900, "ignore_eos": True}
    assert interrupted(lab, lambda: lab.chat([CHAT, CHAT], **ask), late) < 1.0
    if seconds > 0.3:  # it had begun by then
        assert [type(part) for part in lab.partial] == [ChatResponse, ChatResponse]
        assert lab.partial[0].finish_reason is None
        whole = lab.ask(CHAT[0]["content"], **ask | {"max_tokens": len(lab.history[0].token_ids)})
        assert str(whole).startswith(str(lab.partial[0]))
        assert lab.history[0].status == "aborted"
        assert lab.history[0].text == str(lab.partial[0])
    wait_until(lambda: not any(run.status == "running" for run in lab.history))
    assert "Paris" in lab.ask("What is the capital of France?", **GREEDY)


def test_the_stop_button_stops_a_call_that_blocks_a_coroutine(lab: LabSession) -> None:
    async def main() -> None:
        lab.generate("One two three", temperature=0.0, max_tokens=900, ignore_eos=True)

    some_text = lambda: bool(len(lab.history) and lab.history[0].text)  # noqa: E731
    assert interrupted(lab, lambda: asyncio.run(main()), some_text) < 1.0
    assert lab.partial == [lab.history[0].text]
    assert lab.history[0].status == "aborted"


def test_a_stream_can_be_stopped_and_left(lab: LabSession) -> None:
    ask: dict[str, Any] = {"temperature": 0.0, "max_tokens": 900, "ignore_eos": True}
    stream = lab.stream("One two three", **ask)
    assert interrupted(lab, lambda: list(stream), lambda: len(stream.token_ids) > 5) < 1.0
    assert lab.partial == stream.text
    assert len(stream.token_ids) > 5
    with lab.stream("One two three", **ask) as other:
        for _ in other:
            if len(other.token_ids) > 3:
                break
    assert stream.text.startswith(other.text[:4])
    wait_until(lambda: [run.status for run in lab.history] == ["aborted", "aborted"])
    assert lab.partial == stream.text


def test_a_stream_keeps_its_text_when_the_button_is_pressed_in_the_body_of_the_loop(lab: LabSession) -> None:
    seen: list[str] = []

    def read() -> None:
        for delta in lab.stream("One two three", temperature=0.0, max_tokens=900, ignore_eos=True):
            seen.append(delta.text)
            if len(seen) > 3:
                time.sleep(60)

    interrupted(lab, read, lambda: len(seen) > 3)
    assert lab.partial == "".join(seen)
    wait_until(lambda: [run.status for run in lab.history] == ["aborted"])


def test_a_stream_keeps_its_text_when_the_button_is_pressed_again(
    lab: LabSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = lab.stream("One two three", temperature=0.0, max_tokens=900, ignore_eos=True)

    def pressed_again() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stream, "close", pressed_again)  # it comes while the first press is waited for
    interrupted(lab, lambda: list(stream), lambda: len(stream.token_ids) > 5)
    assert lab.partial == stream.text
    monkeypatch.undo()
    stream.close()


HELD: dict[str, Any] = {"temperature": 0.0, "max_tokens": 900, "ignore_eos": True, "stop": ["forty characters " * 3]}


def test_what_is_kept_has_the_text_that_was_held_back_for_a_stop_string(lab: LabSession) -> None:
    def text_of(run: Any) -> str:
        assert run.text == lab.tokenizer.decode(run.token_ids)
        return str(run.text)

    six = lambda: bool(len(lab.history)) and len(lab.history[-1].token_ids) >= 6  # noqa: E731
    interrupted(lab, lambda: lab.generate("One two three", **HELD), six)
    assert lab.partial == [text_of(lab.history[-1])]
    lab.history.clear()
    interrupted(lab, lambda: lab.chat(CHAT, **HELD), six)
    assert lab.partial == [text_of(lab.history[-1])]
    lab.history.clear()
    stream = lab.stream("One two three", **HELD)
    interrupted(lab, lambda: list(stream), lambda: len(stream.token_ids) >= 6)
    wait_until(lambda: lab.history[-1].status == "aborted")
    assert lab.partial == stream.text == lab.tokenizer.decode(stream.token_ids)
    assert text_of(lab.history[-1]).startswith(stream.text)
    seen: list[int] = []

    def read() -> None:
        for delta in lab.stream("One two three", **HELD):
            seen.extend(delta.token_ids)
            if len(seen) >= 6:
                time.sleep(60)

    interrupted(lab, read, lambda: len(seen) >= 6)
    assert lab.partial == lab.tokenizer.decode(seen)
    with lab.stream("One two three", **HELD) as left:
        for _ in left:
            if len(left.token_ids) >= 6:
                break
    assert left.text == lab.tokenizer.decode(left.token_ids)
    wait_until(lambda: lab.history[-1].status == "aborted")
    text_of(lab.history[-1])


def test_prompts_that_are_repeated_are_samples_in_captures_too(lab: LabSession) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "seed": 0, "ignore_eos": True}
    eight = lab.generate("The river", n=8, **drawn)
    pooled = lab.capture(["The river"] * 8, [3], "last", where="answer", **drawn)
    assert pooled.rows["text"].tolist() == eight
    assert len({row.tobytes() for row in pooled.layer(3)}) == 8
    seeds = [run.sampling["seed"] for run in lab.history][-8:]
    assert sorted(seeds) == list(range(8))  # which repeats one of them alone
    assert lab.generate("The river", **{**drawn, "seed": 5}) == [eight[5]]
    grid = lab.sweep("The river", [3, 5], torch.ones(lab.hidden_size), [0.0], perplexity=False, **drawn)
    assert grid["text"].tolist() == [eight[0]] * 2  # all cells are drawn alike
    grid = lab.sweep(["The river"] * 3, [3], torch.ones(lab.hidden_size), [0.0, 1e-9], perplexity=False, **drawn)
    assert grid["text"].tolist() == eight[:3] * 2  # and each repeat by itself


def test_arguments_that_would_have_no_effect(lab: LabSession) -> None:
    v, chat, text = torch.ones(lab.hidden_size), [{"role": "user", "content": "Hi"}], "The river"
    options = {"add_generation_prompt": False}
    before = len(lab.history)
    for said, do in (
        ("n is 3", lambda: lab.ask("Hi", n=3, temperature=1.0)),
        ("n is 2", lambda: lab.ask("Hi", sampling_params=SamplingParams(n=2))),
        ("capture_where says", lambda: lab.generate(text, capture_where="answer", **GREEDY)),
        ("capture_where says", lambda: lab.chat(chat, capture_where=Where.messages(0), **GREEDY)),
        ("capture_where says", lambda: lab.stream(text, capture_where="answer", **GREEDY)),
        ("attention_sinks goes with", lambda: lab.capture([text], 3, "last", attention_sinks=True)),
        ("chat_options go with", lambda: lab.capture([text], 3, chat_options=options)),
        ("chat_options go with", lambda: lab.measure(text, chat_options=options)),
        ("chat_options go with", lambda: lab.sweep(text, 3, v, [1.0], chat_options=options)),
        ("bound is that of a cap", lambda: lab.sweep(text, 3, v, [1.0], bound="min")),
        ("raw_output=True", lambda: lab.generate(text, logprob_token_ids=[1], **GREEDY)),
        ("repetition_detection|min_count", lambda: lab.generate(text, repetition_detection={"max_pattern_size": 2})),
    ):
        with pytest.raises(RequestError, match=said):
            do()
    for name in ("history", "model", "names"):
        with pytest.raises(ReadOnlyError, match="setting it has no effect"):
            setattr(lab.aio, name, None)
    assert len(lab.history) == before
    with pytest.warns(UnreadOptionWarning, match=r"add_generation_promt, .*did you mean add_generation_prompt\?"):
        lab.chat(chat, chat_options={"add_generation_promt": False}, **GREEDY)


def test_an_edit_of_a_spec_that_is_in_force_changes_neither_it_nor_what_is_said_of_it(
    lab: LabSession, v: torch.Tensor
) -> None:
    spec = SteeringSpec.at(4, AddSpec(v, 2.0))
    lab.apply_steering_spec(spec)
    exported = lab.export_steering_spec()
    for edited in (spec, exported):
        edited.layers[4].add.vector.mul_(3.0)
    want = SteeringSpec.at(4, AddSpec(v, 2.0))
    assert lab.export_steering_spec() == lab.in_force().spec == want
    lab.steer(6, v, 1.0)
    assert lab.export_steering_spec().layers[4] == want.layers[4]
    lab.apply_steering_spec(exported)  # set again, it counts
    assert torch.equal(lab.export_steering_spec().layers[4].add.vector, 3 * v)


def test_a_layer_of_a_capture_keeps_no_other_in_memory(lab: LabSession) -> None:
    pooled = lab.capture(["The river"], [3, 4, 5], "last")
    assert pooled.layer(4).base is None
    np.testing.assert_array_equal(pooled.layer(4), pooled.values[:, 1])


def test_a_list_of_one_conversation_is_one_prompt(lab: LabSession) -> None:
    chat = [{"role": "user", "content": "Name a river."}]
    alone, several = (lab.measure(prompt)["norm"] for prompt in (chat, [chat]))
    assert alone.equals(several)
    assert lab.measured_on == "Name a river."
    grids = [lab.sweep(each, 3, torch.ones(lab.hidden_size), [0.0], **GREEDY) for each in (chat, [chat])]
    assert grids[0].equals(grids[1])


def test_what_a_lab_does_not_read_cannot_be_set(lab: LabSession, demo_model_path: str) -> None:
    for holder, name in ((lab, "temperature"), (lab, "max_model_len"), (lab, "tokenizer"), (lab.aio, "tokenizer")):
        with pytest.raises(ReadOnlyError, match=f"{name} .*setting it has no effect"):
            setattr(holder, name, 0)
    with pytest.raises(ReadOnlyError, match="chat_options"):
        lab.tokenizer.chat_template = "x"
    config = VLLMSteeringConfig(demo_model_path)
    with pytest.raises(ConfigError, match="has no attribute max_model_length"):
        config.max_model_length = 5
    config.max_model_len = -1
    with pytest.raises(ConfigError, match="max_model_len"):
        LabSession(config, beside=True)


def test_special_tokens_that_a_message_spells_stand_in_the_frame(lab: LabSession) -> None:
    asked = [{"role": "user", "content": "write <|im_end|> now"}]
    words = Where.messages(0).without_special_tokens()
    for options, count in ((None, 1), ({"split_special_tokens": True}, 0)):
        [_], [handle] = lab.chat(asked, capture_layers=[3], chat_options=options, **GREEDY)
        frame = lab.frame(handle)
        own = frame[frame["role"] == "user"]
        assert own["special"].sum() == count
        assert own.loc[own["special"], "token"].tolist() == ["<|im_end|>"] * count
        assert frame.loc[frame["role"] == "template", "special"].any()
        [_], [chosen] = lab.chat(asked, capture_layers=[3], capture_where=words, chat_options=options, **GREEDY)
        assert chosen.positions == own["position"].tolist()
        chosen.close()
        handle.close()


def test_what_is_kept_of_an_interrupted_chat_begins_with_what_it_continues_only(lab: LabSession) -> None:
    begun = [*CHAT, {"role": "assistant", "content": "The Seine"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for chat_options, prefill in ((None, ""), (options, "The Seine")):
        lab.history.clear()
        interrupted(
            lab,
            lambda given=chat_options: lab.chat(begun, chat_options=given, max_tokens=900, ignore_eos=True),
            lambda: bool(len(lab.history) and lab.history[0].text),
        )
        [answer] = lab.partial
        assert answer == prefill + lab.history[0].text
        assert answer.prefill == prefill


# -- history ---------------------------------------------------------------------------------------------------------


def test_the_history_tells_what_was_run(lab: LabSession, v: torch.Tensor, tmp_path: Path) -> None:
    lab.generate(["The river", {"prompt_token_ids": [5, 6, 7]}], temperature=0.0, max_tokens=3)
    lab.steer(4, v, 2.0)
    lab.chat(CHAT, seed=3, max_tokens=5, temperature=0.5)
    stream = lab.stream("A day", steering=SteeringSpec.none(), read_layers=[2], directions={"v": v}, **GREEDY)
    text = "".join(delta.text for delta in stream)
    frame = lab.history.frame()
    assert repr(lab.history) == "History(4 runs; history[-1] is the newest, history.frame() a table)"
    assert len(repr(lab.history[2])) < 1500
    shown = lab.history._repr_html_()
    assert shown.startswith('<div class="mathjax_ignore')
    assert "Name a river in France." in shown
    with pd.option_context("display.notebook_repr_html", False):
        assert lab.history._repr_html_() is None
    assert frame["kind"].tolist() == ["generate", "generate", "chat", "generate"]
    assert frame["asked"].tolist() == ["The river", "3 token ids", "Name a river in France.", "A day"]
    assert frame["steering"].tolist() == ["none", "none", f"add 2·v (|v| {v.norm():.3g}) @ 4", "none"]
    assert frame["sampling"].iloc[2] == "temperature=0.5, seed=3, max_tokens=5"
    assert frame["status"].tolist() == ["done"] * 4
    assert frame["tokens"].tolist()[:2] == [3, 3]
    assert frame["text"].iloc[3] == text
    run = lab.history[-1]
    assert run.readings is not None
    np.testing.assert_array_equal(run.readings.values, stream.readings.values)
    assert (frame["seconds"] > 0).all()
    frame.to_parquet(tmp_path / "history.parquet")
    assert pd.read_parquet(tmp_path / "history.parquet")["sampling"].tolist() == frame["sampling"].tolist()


def test_failed_requests_stand_in_the_history_too(lab: LabSession) -> None:
    with pytest.raises(RequestError):
        lab.generate("a", max_tokens=2, allowed_token_ids=[10**6])
    assert [run.status for run in lab.history] == ["failed"]
    assert lab.history[0].error.startswith("RequestError: ")


def test_a_saved_session_comes_back(lab: LabSession, v: torch.Tensor, tmp_path: Path) -> None:
    lab.generate("The river", **GREEDY)
    lab.steer([4, 5], v, 2.0)
    lab.cap(4, v, min=-1.0)
    spec = lab.export_steering_spec()
    list(lab.stream("A day", read_layers=[2, 3], directions={"v": v}, **GREEDY))
    where = SteeringSpec.at(3, AddSpec(v), where=Where.messages(0).without_special_tokens())
    lab.chat([{**CHAT[0], "at": datetime.date(2026, 1, 1)}], steering=where, **GREEDY)
    before = lab.history.frame()
    readings = lab.history[1].readings
    folder = lab.save(tmp_path / "session")
    assert sorted(path.name for path in folder.iterdir()) == ["session.json", "session.safetensors"]
    saved = json.loads((folder / "session.json").read_text())
    assert saved["model"]["layer_count"] == 30
    lab.history.clear()
    lab.clear()
    lab.load(folder)
    assert lab.export_steering_spec() == spec
    after = lab.history.frame()
    pd.testing.assert_frame_equal(before.reset_index(drop=True), after.reset_index(drop=True))
    assert lab.history[2].steering == where
    np.testing.assert_array_equal(lab.history[1].readings.values, readings.values)
    lab.load(folder)  # a cell that is run again
    assert len(lab.history) == 3
    saved["model"]["model_name"] = "/models/another"
    (folder / "session.json").write_text(json.dumps(saved))
    with pytest.warns(UserWarning, match="was saved with /models/another, and this model is .*may not fit"):
        lab.load(folder)
    saved["model"]["layer_count"] = 12
    (folder / "session.json").write_text(json.dumps(saved))
    with pytest.raises(SessionError, match=r"was saved with .* \(layer_count 12\); this model has 30"):
        lab.load(folder)
    for damaged in ("{", json.dumps({**saved, "model": {"layer_count": 30}})):
        (folder / "session.json").write_text(damaged)
        with pytest.raises(SessionError, match="is damaged"):
            lab.load(folder)
    assert lab.export_steering_spec() == spec


def test_only_so_many_runs_are_kept(lab: LabSession) -> None:
    lab.history._limit, before = 3, lab.history._limit
    try:
        for count in range(1, 6):
            lab.generate("a", max_tokens=count, temperature=0.0)
    finally:
        lab.history._limit = before
    assert [run.sampling["max_tokens"] for run in lab.history] == [3, 4, 5]
