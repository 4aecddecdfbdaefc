"""The engine's processes: gone when the model is closed, when its start failed, and when its owner was killed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from chatspace_lab import AddSpec, SteeringSpec, VLLMSteeringConfig, VLLMSteerModel
from chatspace_lab.bench import PlainEngine
from chatspace_lab.errors import EngineDeadError, EngineStartError, SteeringError, UnsupportedError
from tests import tiny
from tests.conftest import children, shared_memory, started, unfinished, wait_until
from tests.oracle import Oracle, error

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 256, "kv_cache_memory_bytes": 1 << 27}
PROMPT = [5, 9, 300, 17]
LONG: dict[str, Any] = {"temperature": 0.0, "max_tokens": 250, "ignore_eos": True, "detokenize": False}
SHORT: dict[str, Any] = {**LONG, "max_tokens": 6}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.build("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    before, threads = children(), set(threading.enumerate())
    yield
    wait_until(lambda: children() <= before, what="the engine's processes end")
    assert not [each for each in set(threading.enumerate()) - threads if each.name.startswith("chatspace-lab")]


OWNER = """
import asyncio, psutil, sys, threading
from chatspace_lab import VLLMSteerModel, VLLMSteeringConfig
from tests.conftest import children, shared_memory

if __name__ == "__main__":
    model = VLLMSteerModel(VLLMSteeringConfig({folder!r}, dtype="float32", **{options!r}))
    threading.Thread(
        target=lambda: asyncio.run(model.generate([{prompt!r}] * 4, capture_layers=[0, 1, 2, 3], **{long!r})),
        daemon=True,
    ).start()
    while not model._client._engine.output_processor.get_num_unfinished_requests():
        pass
    mine = children()
    print("READY", [each.pid for each in mine], sorted(shared_memory(mine)), flush=True)
    sys.stdin.read()
"""


def test_an_owner_killed_leaves_nothing(llama: str, tmp_path: Path) -> None:
    """Killed with -9 in the middle of a generation: no process and no shared memory is left after 20 seconds."""
    script = tmp_path / "owner.py"
    script.write_text(textwrap.dedent(OWNER.format(folder=llama, options=OPTIONS, prompt=PROMPT, long=LONG)))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    owner = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner.stdin, owner.stdout:
        line = next((line for line in owner.stdout if line.startswith("READY")), "")
        assert line, "the owner did not start"
        pids, shared = eval(line.removeprefix("READY").strip().replace("] [", "], ["))
        assert len(pids) >= 2
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 20, f"processes {pids} end")
    wait_until(lambda: not any(map(os.path.exists, shared)), 20, f"{shared} is freed")


PLAIN = """
import asyncio
from chatspace_lab import VLLMSteerModel, VLLMSteeringConfig
from vllm import SamplingParams  # sets up vLLM's logging
model = VLLMSteerModel(VLLMSteeringConfig({folder!r}, dtype="float32", **{options!r}))
params = SamplingParams(temperature=0.0, max_tokens=6, detokenize=False)
(output,) = asyncio.run(model.generate([{prompt!r}], params, raw_output=True))
print(len(output.outputs[0].token_ids))
"""


def test_a_plain_script_is_quiet_and_ends_an_engine_that_it_left_open(llama: str, no_leftovers: None) -> None:
    code = PLAIN.format(folder=llama, options=OPTIONS, prompt=PROMPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_LOGGING")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "6\n", "")


def test_a_script_that_starts_an_engine_when_imported_is_told_so(llama: str, tmp_path: Path) -> None:
    """The engine's processes import it again and end; the last line that is printed says what to write."""
    script = tmp_path / "unguarded.py"
    script.write_text(f"from chatspace_lab import LabSession\nLabSession({llama!r}, **{OPTIONS!r})\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "EngineStartError: the engine did not start: " in last
    assert "In a script, what starts an engine must stand under `if __name__ == '__main__':`" in last


def test_closing(llama: str, no_leftovers: None) -> None:
    with started(llama, **OPTIONS) as model:
        _, (fetched, unfetched) = asyncio.run(model.generate([PROMPT] * 2, **SHORT, capture_layers=[0, 1, 2, 3]))
        asyncio.run(fetched.fetch())
        before = fetched.hidden(3).clone()
        outcome: list[BaseException] = []

        def ask() -> None:
            try:
                asyncio.run(model.generate([PROMPT] * 20, **LONG))
            except BaseException as failure:  # noqa: BLE001 - which kind it is is the question
                outcome.append(failure)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: unfinished(model) > 0)
        model.close()
        thread.join(30)
        assert [type(each) for each in outcome] == [EngineDeadError]
        model.close()
        asyncio.run(model.aclose())
        for late in (
            lambda: model.generate(PROMPT, **SHORT),
            lambda: model.set_layer_vector(0, torch.ones(tiny.HIDDEN)),
            unfetched.fetch,
        ):
            with pytest.raises(EngineDeadError, match="closed"):
                asyncio.run(late())
        unfetched.close()
        assert torch.equal(fetched.hidden(3), before)  # what is here stays here


def test_a_worker_that_dies(llama: str, no_leftovers: None) -> None:
    others = children()
    with started(llama, **OPTIONS) as model:
        (worker,) = [child for child in children() - others if "Worker" in " ".join(child.cmdline())]

        async def main() -> None:
            _, [handle] = await model.generate(PROMPT, **SHORT, capture_layers=[0])
            generating = model.generate([PROMPT] * 20, **LONG, capture_layers=[0])
            waiting = [asyncio.create_task(generating)]
            await asyncio.to_thread(wait_until, lambda: unfinished(model) > 0)
            worker.suspend()  # what is asked now gets no answer any more
            never_seen = SteeringSpec.at(0, AddSpec(torch.ones(model.hidden_size)))
            late = (model.generate(PROMPT, **SHORT, steering=never_seen), model.stats(), handle.read(), handle.fetch())
            waiting += [asyncio.create_task(each) for each in late]
            await asyncio.sleep(0.3)
            worker.kill()
            async with asyncio.timeout(60):
                outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            for outcome in outcomes:
                assert isinstance(outcome, EngineDeadError), outcome
                assert "close the model" in str(outcome)
            handle.close()
            with pytest.raises(EngineDeadError):
                async with asyncio.timeout(60):
                    await model.generate(PROMPT, **SHORT)

        asyncio.run(main())


def test_two_models_in_one_process(llama: str, tmp_path: Path, no_leftovers: None) -> None:
    """Each has its own steering, and closing one, even if that is interrupted, leaves the other alone."""
    other = tiny.build("gpt2", tmp_path / "gpt2", seed=1)
    spec = SteeringSpec.at(1, AddSpec(torch.ones(tiny.HIDDEN)))

    async def check(model: VLLMSteerModel, folder: str, steering: SteeringSpec) -> None:
        _, (handle,) = await model.generate(PROMPT, **SHORT, capture_layers=[0, 1, 2, 3])
        await handle.fetch()
        wanted = Oracle(folder).residuals(handle.token_ids, steering)
        for layer in range(tiny.LAYERS):
            assert error(handle.hidden(layer), wanted[layer]) < 1e-4

    with started(llama, **OPTIONS) as one:
        asyncio.run(one.apply_steering_spec(spec))
        with started(other, **OPTIONS) as two:
            asyncio.run(check(one, llama, spec))
            asyncio.run(check(two, other, SteeringSpec.none()))
            # No second close() would do anything: what is left of the engine ends all the same.
            before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
            interrupt = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
            interrupt.start()
            with pytest.raises(KeyboardInterrupt):
                two.close()
            signal.signal(signal.SIGINT, before)
        asyncio.run(check(one, llama, spec))


def test_a_plain_engine_beside_ours_is_untouched(llama: str, no_leftovers: None) -> None:
    """vLLM's own engine, started from this process too, has none of our methods, and answers."""
    with started(llama, **OPTIONS) as ours:
        plain = PlainEngine(VLLMSteeringConfig(llama, dtype="float32", **OPTIONS), enforce_eager=True, detokenize=False)
        try:
            with pytest.raises(Exception, match="chatspace_lab_describe"):
                plain._loop.call(plain._engine.collective_rpc("chatspace_lab_describe"))
            assert asyncio.run(plain.run([PROMPT] * 2, 6)) == 12
        finally:
            plain.close()
        assert asyncio.run(ours.generate(PROMPT, **SHORT, raw_output=True))[0].finished


def test_a_folder_that_is_not_there(no_leftovers: None) -> None:
    with pytest.raises(EngineStartError, match="nowhere"):
        VLLMSteerModel(VLLMSteeringConfig("./nowhere/at/all"))


def test_weights_that_do_not_fit(tmp_path: Path, no_leftovers: None) -> None:
    folder = tiny.build("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"] = torch.zeros(7, 3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    before = set(shared_memory(children()))
    with pytest.raises(EngineStartError, match=r"not start: RuntimeError: .*dimension size") as caught:
        VLLMSteerModel(VLLMSteeringConfig(folder, dtype="float32", **OPTIONS))
    assert "load_weights" in str(caught.value.__cause__)  # the worker's own traceback
    assert "root cause" not in str(caught.value)
    assert set(shared_memory(children())) == before
    assert not [handler for handler in logging.getLogger("vllm").handlers if handler.name == "chatspace_lab"]
    assert "VLLM_LOGGING_CONFIG_PATH" not in os.environ


def test_a_model_that_is_refused_is_refused_by_name(tmp_path: Path, no_leftovers: None) -> None:
    """With a single block, nothing can be proven about what blocks return."""
    folder = tiny.build("llama", tmp_path, num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM") as caught:
        VLLMSteerModel(VLLMSteeringConfig(folder, dtype="float32", **OPTIONS))
    assert "in the worker" in str(caught.value.__cause__)


def test_bootstrap_layers_that_do_not_exist(llama: str, no_leftovers: None) -> None:
    config = VLLMSteeringConfig(llama, dtype="float32", **OPTIONS)
    with pytest.raises(SteeringError, match="bootstrap_layers: layer 4 does not exist"):
        VLLMSteerModel(config, bootstrap_layers=(0, 4))
