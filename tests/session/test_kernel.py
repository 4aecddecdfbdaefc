"""The lab in real Jupyter kernels: queued cells, callbacks, the stop button, and what is left when a kernel dies."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.conftest import shared_memory, wait_until
from tests.session.kernels import Kernel, Reply, kernel

pytestmark = pytest.mark.engine

LAB = """
from chatspace_lab import LabSession, AddSpec, SteeringSpec
import torch
options = dict(max_model_len=1024, dtype="float32", kv_cache_memory_bytes=1 << 27)
lab = LabSession(**options)
greedy = dict(temperature=0.0, max_tokens=8)
question = [{"role": "user", "content": "What is the capital of France?"}]
lab
"""
LONG = 'lab.generate("One two three", temperature=0.0, max_tokens=900, ignore_eos=True)'


@pytest.fixture(scope="module")
def env() -> dict[str, str]:
    return {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="module", params=[7, pytest.param(6, marks=pytest.mark.slow)])
def running(request: pytest.FixtureRequest, env: dict[str, str]) -> Iterator[tuple[Kernel, Any]]:
    """A kernel with a lab, and what the cell that made it gave."""
    with kernel(env, version=request.param) as started:
        yield started, started.run(LAB)


def value(kernel: Kernel, expression: str) -> Any:
    """Return the value of an expression in the kernel."""
    return ast.literal_eval(kernel.run(f"print(repr(({expression})))").text)


def family(pid: int) -> set[psutil.Process]:
    return set(psutil.Process(pid).children(recursive=True))


def all_gone(processes: set[psutil.Process], shared: set[str]) -> bool:
    alive = [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    return not alive and not any(map(os.path.exists, shared))


# -- one kernel, many cells ------------------------------------------------------------------------------------------


def test_the_start_shows_its_stages_and_the_lab_a_card(running: tuple[Kernel, Any]) -> None:
    _, reply = running
    pages = [output["data"].get("text/html", "") for output in reply.outputs if "data" in output]
    for stage in ("loading the model", "compiling and warming up", "ready"):
        assert any(stage in page for page in pages), (stage, pages)
    assert "SmolLM2-135M-Instruct" in pages[-1]
    assert "30 layers × 576" in pages[-1]
    assert [output for output in reply.outputs if "data" not in output] == []  # nothing that vLLM or torch printed


def test_queued_cells_answer_in_order(running: tuple[Kernel, Any]) -> None:
    kernel, _ = running
    names = [kernel.send(f"print({at}, lab.chat(question, **greedy)[0])") for at in range(5)]
    assert [kernel.wait(name).text for name in names] == [f"{at} The capital of France is Paris.\n" for at in range(5)]


def test_a_model_made_in_one_cell_answers_in_others_and_in_two_event_loops(running: tuple[Kernel, Any]) -> None:
    kernel, _ = running
    assert kernel.run("str((await lab.aio.chat(question, **greedy))[0])").text == "'The capital of France is Paris.'"
    kernel.run(
        """
import asyncio, threading
def in_its_own_loop():
    found.append(asyncio.run(lab.aio.chat(question, **greedy))[0])
found = []
for _ in range(2):
    thread = threading.Thread(target=in_its_own_loop); thread.start(); thread.join()
"""
    )
    assert value(kernel, "[str(each) for each in found]") == ["The capital of France is Paris."] * 2


def test_callbacks_threads_and_coroutines_may_block(running: tuple[Kernel, Any]) -> None:
    kernel, _ = running
    kernel.run(
        """
import asyncio, threading
import ipywidgets
answers = {}
def ask(name): answers[name] = str(lab.chat(question, **greedy)[0])
slider = ipywidgets.IntSlider()
slider.observe(lambda change: ask("trait"), "value")
button = ipywidgets.Button()
button.on_click(lambda _: ask("click"))
slider.value = 3
button.click()
async def coroutine(): ask("coroutine")
await coroutine()
await asyncio.create_task(coroutine())
def later(): ask("loop callback")
asyncio.get_running_loop().call_soon(later)
thread = threading.Thread(target=ask, args=("thread",)); thread.start(); thread.join()
button
"""
    )
    # The front end's own message: a click on the button that is shown.
    click = kernel.client.session.msg(
        "comm_msg",
        {"comm_id": value(kernel, "button.comm.comm_id"), "data": {"method": "custom", "content": {"event": "click"}}},
    )
    kernel.run("answers.pop('click')")
    kernel.client.shell_channel.send(click)
    wait_until(lambda: value(kernel, "'click' in answers"), timeout_s=30)
    assert value(kernel, "answers") == dict.fromkeys(
        ["trait", "click", "coroutine", "loop callback", "thread"], "The capital of France is Paris."
    )


def test_a_bar_is_shown_for_long_work(running: tuple[Kernel, Any]) -> None:
    kernel, _ = running
    reply = kernel.run('_ = lab.generate(["One two three"] * 40, temperature=0.0, max_tokens=60, ignore_eos=True)')
    shown = reply.text + "".join(str(output) for output in reply.outputs)
    assert "generate" in shown, shown
    assert "40 of 40 requests" in reply.outputs[-1]["data"]["text/html"]  # what a saved notebook keeps


def answered(kernel: Kernel) -> float:
    """Ask, check the answer, and return the seconds that it took."""
    begun = time.monotonic()
    assert kernel.run("print(lab.chat(question, **greedy)[0])").text == "The capital of France is Paris.\n"
    return time.monotonic() - begun


def stopped(kernel: Kernel, code: str, after_s: float) -> Reply:
    """Press the stop button during a cell, and check that a second later the engine is ready and answers right."""
    usual = answered(kernel)
    name = kernel.begin(code)
    time.sleep(after_s)
    kernel.stop()
    pressed = time.monotonic()
    reply = kernel.wait(name, timeout_s=30)
    answered(kernel)
    assert reply.status == "error"
    assert time.monotonic() - pressed < 1.0 + 2 * usual
    return reply


@pytest.mark.parametrize("seconds", [0.1, 0.5, 2.0])
def test_the_stop_button_leaves_the_engine_ready(running: tuple[Kernel, Any], seconds: float) -> None:
    kernel, _ = running
    start = value(kernel, f"{LONG.replace('900', '3')}[0]")
    before = value(kernel, "os.getpid(), [each.pid for each in lab.model._client._processes]")
    reply = stopped(kernel, "lab.partial = None\n" + LONG, seconds)
    assert reply.error.startswith("KeyboardInterrupt")
    assert value(kernel, "os.getpid(), [each.pid for each in lab.model._client._processes]") == before
    if seconds >= 0.5:
        [partial] = value(kernel, "lab.partial")
        assert partial.startswith(start)
        assert "lab.partial" in reply.text
        assert value(kernel, "lab.history[-2].status, lab.history[-2].text") == ("aborted", partial)


@pytest.mark.parametrize(
    "code",
    [
        LONG.replace("lab.generate", "await lab.aio.generate"),
        f"import asyncio\nawait asyncio.sleep(0)\n{LONG}",
        f"import asyncio\nasync def ask(): {LONG}\nawait asyncio.create_task(ask())",
    ],
    ids=["awaited", "blocking", "blocking in a task"],
)
def test_the_stop_button_stops_an_awaited_cell_too(running: tuple[Kernel, Any], code: str) -> None:
    kernel, _ = running
    reply = stopped(kernel, f"lab.partial = None\n{code}", 1.0)
    assert reply.error.startswith("CancelledError")
    assert value(kernel, "lab.history[-2].status") == "aborted"
    if "await lab" not in code:
        assert value(kernel, "lab.partial == [lab.history[-2].text]")


def test_the_cell_that_made_it_runs_again(running: tuple[Kernel, Any]) -> None:
    kernel, _ = running
    before = value(kernel, "id(lab)")
    assert kernel.run(LAB).seconds < 5
    assert value(kernel, "id(lab)") == before
    reply = kernel.wait(kernel.send("LabSession()"))
    assert reply.error.startswith("SessionError: a lab runs already in this kernel")


# -- several engines, and how they end -----------------------------------------------------------------------------


def test_two_sessions_in_one_kernel_and_a_second_kernel_beside(env: dict[str, str]) -> None:
    """Two labs in one kernel answer at once and are steered apart. The kernel is killed: its neighbour goes on."""
    with kernel(env) as neighbour, kernel(env) as doomed:
        neighbour.run(LAB)
        doomed.run(LAB)
        doomed.run('other = LabSession(max_model_len=512, dtype="float32", kv_cache_memory_bytes=1 << 26, beside=True)')
        doomed.run("other.steer(9, torch.ones(576), 30.0)")
        doomed.run(
            """
import threading
texts = {}
threads = [
    threading.Thread(target=lambda l=l, n=n: texts.__setitem__(n, str(l.chat(question, **greedy)[0])))
    for n, l in (("lab", lab), ("other", other))
]
[t.start() for t in threads]; [t.join() for t in threads]
"""
        )
        texts = value(doomed, "texts")
        assert texts["lab"] == "The capital of France is Paris."
        assert texts["other"] != texts["lab"]
        assert value(doomed, "[repr(each) for each in LabSession.running()]")[1].endswith(
            "30.0·v (|v| 24) @ 9)".replace("30.0", "30")
        )
        processes = family(doomed.pid)
        shared = shared_memory(processes)
        assert len(processes) >= 2
        os.kill(doomed.pid, signal.SIGKILL)
        wait_until(lambda: all_gone(processes, shared), timeout_s=20, what="what the killed kernel had is gone")
        assert neighbour.run("print(lab.chat(question, **greedy)[0])").text == "The capital of France is Paris.\n"
        # Closing one frees it, and the name is free again.
        left = engines(neighbour.pid)
        held = shared_memory(left)
        neighbour.run(
            "_, handles = lab.chat(question, capture_layers=[4], **greedy); lab.fetch_captures_batch(handles)"
        )
        neighbour.run("lab.close()")
        wait_until(lambda: all_gone(left, held), timeout_s=20, what="what the closed lab had is gone")
        reply = neighbour.wait(neighbour.send("lab.chat(question)"))
        assert reply.error.startswith("EngineDeadError: this model was closed")
        assert (
            value(neighbour, "len(list(lab.save(__import__('tempfile').mkdtemp()).iterdir()))") == 2
        )  # so can its history be kept
        rows = "len(lab.frame(handles)), len(handles[0].hidden(4))"  # what was fetched stays
        assert len(set(value(neighbour, rows))) == 1


def test_a_restarted_kernel_and_a_failed_start_leave_nothing(env: dict[str, str]) -> None:
    with kernel(env) as started:
        reply = started.wait(started.send('from chatspace_lab import LabSession; LabSession("/no/such/folder")'))
        assert reply.error.startswith("ConfigError: ")
        reply = started.wait(started.send("from chatspace_lab import LabSession; LabSession(max_model_len=10**9)"))
        assert reply.error.startswith("EngineStartError: "), reply.error
        assert "max_model_len" in reply.error
        wait_until(lambda: not engines(started.pid), timeout_s=20, what="the failed start's processes end")
        assert started.run("print(LabSession.running())").text == "[]\n"
        name = started.send(LAB)  # the same kernel can start one; the first press of the stop button ends it
        wait_until(lambda: bool(engines(started.pid)), timeout_s=60, what="the engine's processes start")
        started.stop()
        reply = started.wait(name, timeout_s=30)
        assert reply.error.startswith("KeyboardInterrupt")
        wait_until(lambda: not engines(started.pid), timeout_s=20, what="the interrupted start's processes end")
        started.run(LAB)
        processes = engines(started.pid)
        shared = shared_memory(processes)
        assert processes
        started.manager.restart_kernel(now=False)
        started.client.wait_for_ready(timeout=120)
        wait_until(lambda: all_gone(processes, shared), timeout_s=20, what="what the restarted kernel had is gone")
        assert started.run("print('lab' in globals())").text == "False\n"


def engines(pid: int) -> set[psutil.Process]:
    """Return the processes that engines started below a kernel."""
    found = set()
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "resource_tracker" not in " ".join(process.cmdline()):  # Python's own, one a process, for good
                found.add(process)
    return found
