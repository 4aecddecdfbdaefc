"""The commands: what they print, what they check, and how they fail."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from chatspace_lab import __version__, bench, cli, demo
from chatspace_lab.chat import MessageBoundary
from chatspace_lab.errors import ConfigError, EngineStartError
from tests.analysis.handles import handle

COMMAND = [sys.executable, "-c", "import sys; from chatspace_lab.cli import main; sys.exit(main())"]


def run(*arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)


def test_version() -> None:
    assert run("--version").stdout == f"chatspace-lab {__version__}\n"


def test_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, chatspace_lab.cli; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_tables_are_printed_without_an_engine() -> None:
    models = run("models")
    assert models.returncode == 0, models.stderr
    assert re.search(r"^LlamaForCausalLM +llama +\de-0\d +\de-0\d +right$", models.stdout, re.MULTILINE)
    assert re.search(r"^\d+ right, \d+ refused, \d+ not buildable$", models.stdout.splitlines()[-1])
    measured = run("bench", "--measured").stdout
    for word in ("chatspace-lab bench --pairs", "chatspace-lab bench --gpu", "chatspace-lab bench --sweep"):
        assert word in measured


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: command"),
        (["dance"], "invalid choice"),
        (["smoke", "--layer", "two"], "--layer: invalid int value"),
        (["smoke", "--max-tokens", "0"], "expected a positive whole number, got 0"),
        (["bench", "--pairs", "-1"], "expected a positive whole number, got -1"),
        (["smoke", "--dtype", "int8"], "invalid choice"),
        (["smoke", "--scale", "0"], "expected the length of a vector that is not zero, got 0"),
        (["smoke", "--scale", "nan"], "expected the length of a vector that is not zero, got nan"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none", "a/b/c"])
def test_a_folder_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        demo.chosen_model(name)


def test_a_model_that_is_not_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = run("verify", "--model", "nobody/nothing")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("chatspace-lab: model nobody/nothing was not found on the Hugging")
    assert "Traceback" not in done.stderr


def test_names_that_may_be_on_the_hub_pass(tmp_path: Path) -> None:
    assert demo.chosen_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert demo.chosen_model(str(tmp_path)) == str(tmp_path)


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def fails(arguments: object) -> int:
        raise EngineStartError("the engine\n  did not start")

    monkeypatch.setattr(demo, "smoke", fails)
    assert cli.main(["smoke"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "chatspace-lab: the engine did not start\n"


def test_a_message_without_rows_has_no_norm() -> None:
    boundaries = (MessageBoundary("user", "", 1, 1),)
    made = handle([[[3.0, 4.0], [3.0, 4.0]]], prompt=[1, 2], answer=[3], layers=(5,), boundaries=boundaries)
    lines = demo._norms(made, (5,)).splitlines()
    assert [line.split() for line in lines[1:]] == [["user", "0", "–"], ["answer", "0", "–"]]
    assert len({len(line) for line in lines}) == 1


def test_an_interrupt_ends_what_does_not_await(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[float] = []

    async def starts(arguments: object) -> int:
        begun.append(time.monotonic())
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(30)  # noqa: ASYNC251 - as the start of an engine does
        return 0

    monkeypatch.setattr(demo, "smoke", starts)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(["smoke"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun[0] < 10
    assert capsys.readouterr().err == "chatspace-lab: interrupted\n"


def test_smoke_on_a_missing_folder() -> None:
    done = run("smoke", "--model-name", "/no/such/folder")
    assert done.returncode == 2
    assert done.stderr == "chatspace-lab: model /no/such/folder: there is no such folder\n"


@pytest.mark.engine
def test_smoke_on_a_missing_layer() -> None:
    done = run("smoke", "--layer", "30")
    assert done.returncode == 2
    assert "chatspace-lab: layer 30 does not exist: this model has layers 0 to 29\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.engine
def test_smoke() -> None:
    done = run("smoke", "--layer", "2", "--scale", "5000.0", "--max-tokens", "16")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^plain\n  .*Paris", done.stdout, re.MULTILINE)
    assert "\nsteered\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("ok: at all 11 prompt tokens the captured difference is the vector")
    assert "Traceback" not in done.stderr


def test_the_difference_is_checked() -> None:
    plain = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    vector = torch.ones(64)
    eps = torch.finfo(torch.float32).eps
    assert demo._compare(plain, plain + vector, vector, eps)[1]

    missed_one = plain + vector
    missed_one[3] = plain[3]
    verdict, arrived = demo._compare(plain, missed_one, vector, eps)
    assert not arrived
    assert "at 1 of 5 prompt tokens" in verdict

    twice = demo._compare(plain, plain + 2 * vector, vector, eps)
    assert "FAILED: at 5 of 5" in twice[0]

    small = vector * 1e-6
    rounded = (plain * 100).bfloat16()
    lost, arrived = demo._compare(
        rounded.float(), (rounded.float() + small).bfloat16().float(), small, torch.finfo(torch.bfloat16).eps
    )
    assert not arrived
    assert "take a larger --scale" in lost


@pytest.mark.engine
def test_demo() -> None:
    done = run("demo")
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^(prompt|plain|steered .*|mean norm .*)\n", done.stdout, flags=re.MULTILINE)
    plain, steered = parts[4], parts[6]
    sea = {"sea", "ship", "ocean", "waves", "sailing", "sailor"}
    assert sea & set(re.findall("[a-z]+", steered.lower()))
    assert not sea & set(re.findall("[a-z]+", plain.lower()))
    assert len(re.findall(r"^\[\d/4\] .* \d+\.\d s$", done.stdout, re.MULTILINE)) == 4
    assert len(re.findall("layer 5   layer 15   layer 25$", done.stdout, re.MULTILINE)) == 2
    for role in ("system", "user", "answer"):
        assert len(re.findall(rf"^  {role} +\d+( +\d+\.\d){{3}}$", done.stdout, re.MULTILINE)) == 2
    assert "Traceback" not in done.stderr
    assert "FutureWarning" not in done.stderr


def test_bench_ratios_and_targets() -> None:
    async def nothing(prompts: list[list[int]], tokens: int) -> int:
        return 0

    met = bench.Measured(bench.Case("nothing steered", 0.98, nothing), [0.97, 0.99, 1.0], [10.0])
    assert met.median == 0.99
    assert not met.missed
    assert met.line().split()[-5:] == ["10", "0.990", "0.980-0.995", "0.98", "met"]
    missed = bench.Measured(bench.Case("nothing steered", 0.98, nothing), [0.97, 0.9, 1.0], [10.0])
    assert missed.missed
    assert missed.line().endswith("missed")
    untold = bench.Measured(bench.Case("nothing steered", None, nothing), [0.1], [10.0])
    assert not untold.missed
    assert untold.line().endswith("0.100-0.100")


def test_bench_takes_turns_and_compares_neighbours() -> None:
    log: list[str] = []
    seen: list[list[int]] = []

    class Plain:
        async def run(self, prompts: list[list[int]], tokens: int) -> int:
            return await work("plain", prompts, tokens)

    async def work(name: str, prompts: list[list[int]], tokens: int) -> int:
        log.append(name)
        seen.extend(prompts)
        await asyncio.sleep(0.02 if name == "plain" else 0.04)
        return len(prompts) * tokens

    def case(name: str) -> bench.Case:
        return bench.Case(name, None, lambda prompts, tokens: work(name, prompts, tokens))

    arguments = argparse.Namespace(batch=2, tokens=3, pairs=2)
    measured, speeds = asyncio.run(bench._measure(Plain(), [case("a"), case("b")], arguments, vocabulary=100_000))  # type: ignore[arg-type]
    warm = ["plain", "a", "b"]
    assert log == [*warm, "plain", *["a", "plain", "b", "plain"] * 2]
    assert len({tuple(prompt) for prompt in seen}) == len(seen)  # no prefix is ever served from the cache
    assert len(speeds) == 5
    for result in measured:
        assert len(result.ratios) == 2
        assert 0.35 < statistics.median(result.ratios) < 0.65  # half as fast


def test_bench_refuses_an_answer_that_is_too_short() -> None:
    class Plain:
        async def run(self, prompts: list[list[int]], tokens: int) -> int:
            return 1

    arguments = argparse.Namespace(batch=2, tokens=3, pairs=1)
    with pytest.raises(RuntimeError, match="1 tokens were generated, 6 asked for"):
        asyncio.run(bench._measure(Plain(), [], arguments, vocabulary=100))  # type: ignore[arg-type]


@pytest.mark.engine
@pytest.mark.slow
def test_bench_runs() -> None:
    done = run("bench", "--batch", "2", "--tokens", "4", "--pairs", "1")
    assert done.returncode == 0, done.stderr
    for name in ("command", "date", "machine", "versions", "load"):
        assert re.search(rf"^{name} +\S", done.stdout, re.MULTILINE)
    for name in ("nothing steered", r"add \+ cap \+ ablate at all 30 layers", "layer 15 captured and fetched"):
        assert re.search(
            rf"^{name} +\d+ +\d\.\d{{3}} +\d\.\d{{3}}-\d\.\d{{3}} +0\.\d\d  (met|missed)$", done.stdout, re.M
        )
    assert "Traceback" not in done.stderr
