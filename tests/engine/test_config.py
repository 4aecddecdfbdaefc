"""Configurations: everything of vLLM's passes through, and what cannot work is an error that names it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chatspace_lab import VLLMSteeringConfig, VLLMSteerModel, wire
from chatspace_lab.engine.client import EngineClient
from chatspace_lab.engine.config import check_vllm_version
from chatspace_lab.errors import ConfigError, LabError, UnsupportedError
from tests import quantised


def test_the_contracts_arguments() -> None:
    config = VLLMSteeringConfig(
        model_name="some/model", tensor_parallel_size=1, gpu_memory_utilization=0.9, max_model_len=2048
    )
    assert (config.model_name, config.max_model_len, config.dtype) == ("some/model", 2048, "auto")
    assert config.engine_args == {}


def test_options_of_vllm_pass_through() -> None:
    config = VLLMSteeringConfig("m", max_num_seqs=7, num_gpu_blocks_override=5, enable_prefix_caching=False)
    arguments = config.engine_kwargs(True)
    assert (arguments["max_num_seqs"], arguments["num_gpu_blocks_override"]) == (7, 5)
    assert arguments["enable_prefix_caching"] is False
    assert (arguments["model"], arguments["enforce_eager"]) == ("m", True)
    assert arguments["worker_extension_cls"] == wire.EXTENSION


@pytest.mark.parametrize(("asked", "given"), [(None, True), (True, True), (False, False)])
def test_enforce_eager_is_honoured(asked: bool | None, given: bool) -> None:
    assert VLLMSteeringConfig("m").engine_kwargs(asked)["enforce_eager"] is given


AUTO = """
import sys
from chatspace_lab.engine.config import cpu_has_bfloat16, engine_arguments
print(cpu_has_bfloat16(), *(engine_arguments({"model": folder}).dtype for folder in sys.argv[1:]))
"""


def test_auto_is_float32_on_a_cpu_without_bfloat16(demo_model_path: str, tmp_path: Path) -> None:
    """PyTorch's limit on instruction sets stands for such a CPU. Quantised checkpoints keep vLLM's choice."""
    folder, _ = quantised.build("awq", tmp_path)
    command = [sys.executable, "-c", AUTO, demo_model_path, folder]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-3:] == ["False", "float32", "auto"]


def test_additional_config_is_kept_beside_ours() -> None:
    arguments = VLLMSteeringConfig("m", additional_config={"mine": 1}, max_vectors=9).engine_kwargs(None)
    assert arguments["additional_config"]["mine"] == 1
    assert arguments["additional_config"][wire.EXTRA]["max_vectors"] == 9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_length": 5}, "max_model_length is no option.*did you mean max_model_len"),
        ({"tensor_paralel_size": 2}, "did you mean tensor_parallel_size"),
        ({"model": "x"}, "say model_name"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: expected a positive whole number"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size"),
        ({"max_vectors": True}, "max_vectors"),
        ({"max_ops_per_layer": 1.5}, "max_ops_per_layer"),
        ({"max_capture_bytes": -1}, "max_capture_bytes"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": "2k"}, "max_model_len"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization: expected a fraction"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization"),
        ({"capture_transport": "carrier pigeon"}, "'shared' or 'bytes'"),
    ],
)
def test_what_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        VLLMSteeringConfig("m", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram"}},
        {"worker_extension_cls": "mine.Extension"},
        {"worker_cls": "mine.Worker"},
        {"runner": "pooling"},
        {"enable_dbo": True},
        {"enable_prompt_embeds": True},
        {"enable_lora": True},
        {"data_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
    ],
)
def test_what_is_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UnsupportedError, match=f"{name}|pipeline parallel"):
        VLLMSteeringConfig("m", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": None},
        {"worker_cls": "auto"},
        {"runner": "auto"},
        {"runner": "generate"},
        {"enable_dbo": False},
        {"data_parallel_size": 1},
        {"pipeline_parallel_size": 1},
    ],
)
def test_what_is_off_is_fine(options: dict[str, Any]) -> None:
    assert VLLMSteeringConfig("m", **options).engine_args == options


def test_a_setting_that_nothing_reads_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="override_generation_config: temperature would have no effect"):
        VLLMSteeringConfig("m", override_generation_config={"temperature": 0.0, "eos_token_id": 2})
    VLLMSteeringConfig("m", override_generation_config={"eos_token_id": 2})


def test_the_cache_is_as_large_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VLLMSteeringConfig("m").engine_kwargs(None)["kv_cache_memory_bytes"] > 0
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert "kv_cache_memory_bytes" not in VLLMSteeringConfig("m").engine_kwargs(None)


def test_positions_and_copies() -> None:
    config = VLLMSteeringConfig("m", 2, 0.5, 100, "float32", max_num_seqs=3)
    assert (config.tensor_parallel_size, config.gpu_memory_utilization, config.max_model_len) == (2, 0.5, 100)
    assert dataclasses.replace(config, max_model_len=50).max_model_len == 50
    assert dataclasses.replace(config, max_model_len=50).engine_args == {"max_num_seqs": 3}
    with pytest.raises(ConfigError, match="tensor_parallel_size twice"):
        VLLMSteeringConfig("m", 2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="positional"):
        VLLMSteeringConfig("m", *range(20))


def test_edited_afterwards() -> None:
    config = VLLMSteeringConfig("m")
    config.max_model_len = 64
    assert config.engine_kwargs(None)["max_model_len"] == 64
    with pytest.raises(ConfigError, match=r"no attribute max_num_seqs.*engine_args\['max_num_seqs'\]"):
        config.max_num_seqs = 8  # type: ignore[attr-defined]
    config.max_vectors = 0
    with pytest.raises(ConfigError, match="max_vectors"):
        EngineClient.check(config, None)


def test_a_first_argument_that_is_no_configuration() -> None:
    with pytest.raises((TypeError, LabError), match="VLLMSteeringConfig"):
        VLLMSteerModel({"model_name": "m"})  # type: ignore[arg-type]


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    assert check_vllm_version() == vllm.__version__
    for version in ("0.25.1", "0.33.0", "1.0", "0.6.0+cpu"):
        monkeypatch.setattr(vllm, "__version__", version)
        with pytest.raises(UnsupportedError, match=rf"vLLM {re.escape(version)} .*chatspace-lab \d.*>=0\.26,<0\.33"):
            check_vllm_version()
    for version in ("0.26.0", "0.32.5+cpu"):
        monkeypatch.setattr(vllm, "__version__", version)
        assert check_vllm_version() == version
    monkeypatch.setattr(vllm, "__version__", "dev")
    with pytest.raises(UnsupportedError, match="cannot read"):
        check_vllm_version()
