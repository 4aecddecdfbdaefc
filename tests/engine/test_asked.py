"""An engine that is not what was asked for, options and models that are checked beforehand, and labs that are replaced.

What needs a process of its own (a plugin is loaded once, a class that was reloaded stays so) runs in one script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from chatspace_lab import VLLMSteeringConfig
from chatspace_lab.engine.asked import changes
from chatspace_lab.engine.client import EngineClient
from chatspace_lab.errors import EngineStartError, UnsupportedError
from tests import tiny

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128}

PLUGIN = """
from vllm.engine.arg_utils import EngineArgs

create = EngineArgs.create_engine_config

def create_eager(self, *args, **kwargs):
    self.enforce_eager = True
    return create(self, *args, **kwargs)

def register():
    EngineArgs.create_engine_config = create_eager
"""

SCRIPT = """
import importlib, json, sys, warnings
import torch
from pathlib import Path
from chatspace_lab import LabSession, SteeringSpec, VLLMSteeringConfig
from chatspace_lab.errors import LabError
from chatspace_lab.steering import specs

def raised(call):
    try:
        call()
    except LabError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"

def main(folder, broken):
    found = {}
    options = dict(dtype="float32", max_model_len=64, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 26)
    config = VLLMSteeringConfig(folder, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lab = LabSession(config, enforce_eager=False)
    found["warnings"] = [str(each.message) for each in caught if each.category.__name__ == "EngineWarning"]
    found["again"] = LabSession(config, enforce_eager=False) is lab
    found["broken"] = raised(lambda: LabSession(broken, enforce_eager=True, replace=True, **options))
    found["alive"] = lab.is_alive and LabSession.running() == [lab]
    config.max_model_len = 32
    found["edited"] = raised(lambda: LabSession(config, enforce_eager=False))
    config.max_model_len = 64
    Path(folder, "config.json").touch()
    found["touched"] = raised(lambda: LabSession(config, enforce_eager=False))

    v = torch.ones(lab.hidden_size)
    lab.steer(1, v, 2.0)
    old = SteeringSpec.at(1, specs.AddSpec(v))
    importlib.reload(specs)
    new = specs.SteeringSpec.at(1, specs.AddSpec(v))
    mixed = SteeringSpec.at(1, specs.AddSpec(v))
    ask = lambda spec: lab.generate([5, 6], max_tokens=1, detokenize=False, steering=spec)
    found["new"], found["mixed"] = raised(lambda: ask(new)), raised(lambda: ask(mixed))
    found["list"] = raised(lambda: ask([new]))
    found["inner"] = raised(lambda: specs.SteeringSpec({1: old.layers[1]}))
    found["apply"] = raised(lambda: lab.apply_steering_spec(new))
    lab.clear()
    found["cleared"] = not lab.export_steering_spec()

    second = LabSession(folder, enforce_eager=True, replace=True, **options)
    found["replaced"] = [lab.is_alive, second.is_alive, LabSession.running() == [second]]
    second.close()
    print(json.dumps(found))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.build("llama", tmp_path_factory.mktemp("models") / "llama")


def config_alone(folder: Path, kind: str, architecture: str) -> str:
    """Write a model's configuration, without weights."""
    config = getattr(transformers, kind)()
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def found(llama: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the script where another package's plugin forces eager mode."""
    home = tmp_path_factory.mktemp("packages")
    (home / "someones_plugin.py").write_text(PLUGIN)
    dist = home / "someones_lens-1.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-lens\nVersion: 1.0\n")
    (dist / "entry_points.txt").write_text("[vllm.general_plugins]\nlens = someones_plugin:register\n")
    broken = tmp_path_factory.mktemp("broken")
    (broken / "config.json").write_bytes((Path(llama) / "config.json").read_bytes())
    script = home / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(home), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, script, llama, broken],
        env={name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"} | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_a_plugin_that_forces_eager_mode_is_named(found: dict[str, Any]) -> None:
    (warning,) = found["warnings"]
    assert "enforce_eager is True (asked for: False)" in warning
    assert "'lens' of the package someones-lens" in warning
    assert "VLLM_PLUGINS=''" in warning


def test_a_lab_stays_when_its_successor_does_not_start(found: dict[str, Any]) -> None:
    assert found["broken"].startswith("EngineStartError: the engine did not start: ")
    assert found["alive"]
    assert found["replaced"] == [False, True, True]


def test_a_lab_is_the_same_only_with_the_same_configuration_and_files(found: dict[str, Any]) -> None:
    assert found["again"]
    assert found["edited"].startswith("SessionError: a lab runs already")
    assert "written to" not in found["edited"]
    assert "the model's folder was written to since" in found["touched"]


def test_a_class_that_was_reloaded(found: dict[str, Any]) -> None:
    for name in ("new", "list", "mixed", "inner", "apply"):
        assert "of another load of chatspace_lab.steering.specs: it was reloaded" in found[name], (name, found[name])
        assert "restart the kernel" in found[name]
    assert found["cleared"]


def test_what_vllm_changes_is_told(llama: str) -> None:
    config = VLLMSteeringConfig(llama, **OPTIONS, max_num_seqs=8, enable_prefix_caching=True, kv_cache_dtype="auto")
    prepared = EngineClient.check(config, True)
    assert changes(prepared.asked, prepared.vllm_config) == []
    prepared.vllm_config.model_config.max_model_len = 64
    prepared.vllm_config.cache_config.enable_prefix_caching = False
    (said,) = changes(prepared.asked, prepared.vllm_config)
    assert "max_model_len is 64 (asked for: 128)" in said
    assert "enable_prefix_caching is False (asked for: True)" in said
    assert "max_num_seqs" not in said


def test_hybrid_models_have_no_prefix_cache_on_a_cpu(tmp_path: Path) -> None:
    folder = tiny.build("falcon-h1", tmp_path)
    prepared = EngineClient.check(VLLMSteeringConfig(folder, **OPTIONS), True)
    assert not prepared.vllm_config.cache_config.enable_prefix_caching
    (note,) = prepared.notes
    assert "prefix caching is off for FalconH1ForCausalLM" in note
    assert EngineClient.check(VLLMSteeringConfig(folder, **OPTIONS, enable_prefix_caching=False), True).notes == []
    with pytest.raises(UnsupportedError, match="enable_prefix_caching=True is not supported for FalconH1ForCausalLM"):
        EngineClient.check(VLLMSteeringConfig(folder, **OPTIONS, enable_prefix_caching=True), True)


def test_a_package_that_a_model_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks at the architecture in another process, and remembers only that it failed."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "torchvision.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torchvision'\", name='torchvision')"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hidden), str(Path(__file__).parents[2])]))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    folder = config_alone(tmp_path / "model", "Gemma3Config", "Gemma3ForConditionalGeneration")
    for _ in range(2):
        with pytest.raises(EngineStartError, match=r"No module named 'torchvision'.*pip install torchvision"):
            EngineClient.check(VLLMSteeringConfig(folder, **OPTIONS), True)
