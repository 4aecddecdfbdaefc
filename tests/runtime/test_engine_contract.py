"""Every attribute of vLLM that the adapters read is listed, is read, and exists in the vLLM that is installed."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from chatspace_lab.errors import UnsupportedError
from chatspace_lab.runtime import v1, v2

LISTED: dict[str, dict[str, set[str]]] = {
    "runtime/v1.py": {
        "runner": {
            "execute_model",
            "_prepare_inputs",
            "_dummy_run",
            "input_batch",
            "device",
            "sample_tokens",
            "discard_request_mask",
        },
        "batch": {"req_ids", "num_reqs", "num_computed_tokens_cpu", "generators"},
        "scheduler_output": {"finished_req_ids", "scheduled_new_reqs"},
        "new": {"req_id", "sampling_params", "prompt_token_ids"},
        "params": {"extra_args", "max_tokens"},
    },
    "runtime/v2.py": {
        "runner": {"execute_model", "prepare_inputs"},
        "batch": set(v2.BATCH_READS),
        "scheduler_output": {"finished_req_ids", "scheduled_new_reqs"},
    },
    "runtime/extension.py": {
        "runner": {"device", "get_model", "max_num_reqs", "max_num_tokens"},
        "worker": {"model_runner", "vllm_config", "rank", "chatspace_lab_runtime", "chatspace_lab_facts"},
        "config": {"additional_config", "model_config", "compilation_config"},
    },
    "engine/client.py": {
        "self._engine": {"generate", "collective_rpc", "shutdown", "errored"},
        "engine": {"shutdown", "model_config", "get_tokenizer"},
    },
}
"""Per module of ours, and per name that holds an object of vLLM's there: the attributes that are read or replaced."""

PACKAGE = Path(inspect.getfile(v1)).parents[1]


def attributes(module: str, name: str) -> set[str]:
    """Return the attributes of ``name`` that a module's text mentions."""
    tree = ast.parse((PACKAGE / module).read_text())
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in LISTED for name in LISTED[module]])
def test_what_is_read_is_listed(module: str, name: str) -> None:
    assert attributes(module, name) == LISTED[module][name]


@pytest.mark.parametrize("adapter", [v1, v2])
def test_what_is_read_of_a_runner_is_checked_at_the_start(adapter: Any) -> None:
    read = LISTED[f"runtime/{adapter.__name__.rpartition('.')[2]}.py"]
    needed = read["runner"] | LISTED["runtime/extension.py"]["runner"]
    if adapter is v1:
        needed |= {f"input_batch.{each}" for each in read["batch"]}
    assert needed <= set(adapter.READS)


def assigned(*classes: type) -> set[str]:
    """Return what instances of these classes have: methods, fields, and what their methods assign."""
    found: set[str] = set()
    for each in classes:
        for base in each.__mro__[:-1]:
            found |= set(vars(base)) | set(getattr(base, "__annotations__", {}))
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
    return found


def test_what_is_read_exists_in_this_vllm() -> None:
    from vllm import SamplingParams
    from vllm.config import CompilationConfig, ModelConfig, ParallelConfig, VllmConfig
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu.input_batch import InputBatch as BatchOfV2
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    assert {name for name in v1.READS if "." not in name} <= assigned(GPUModelRunner)
    assert LISTED["runtime/v1.py"]["batch"] <= assigned(InputBatch)
    assert set(v2.READS) <= assigned(RunnerV2)
    assert set(v2.BATCH_READS) <= {field.name for field in dataclasses.fields(BatchOfV2)}
    assert LISTED["runtime/v1.py"]["scheduler_output"] <= assigned(SchedulerOutput)
    assert LISTED["runtime/v1.py"]["new"] <= assigned(NewRequestData)
    assert LISTED["runtime/v1.py"]["params"] <= set(SamplingParams.__struct_fields__)
    assert {"model_runner", "vllm_config", "rank", "load_model"} <= assigned(Worker)
    assert LISTED["runtime/extension.py"]["config"] <= assigned(VllmConfig)
    assert {
        "hf_config",
        "hf_text_config",
        "architecture",
        "quantization",
        "max_model_len",
        "get_hidden_size",
    } <= assigned(ModelConfig)
    assert "max_cudagraph_capture_size" in assigned(CompilationConfig)
    assert "worker_extension_cls" in assigned(ParallelConfig)
    engine = LISTED["engine/client.py"]["self._engine"] | LISTED["engine/client.py"]["engine"]
    assert engine | {"from_engine_args"} <= assigned(AsyncLLM)
    assert {"skip_tokenizer_init", "get_vocab_size", "max_model_len"} <= assigned(ModelConfig)


class Unknown:
    """A model runner that nobody knows."""


def test_an_unknown_runner_is_refused_and_both_versions_named() -> None:
    import vllm

    from chatspace_lab.runtime.extension import _adapter

    options: Any = {"version": "7.8.9"}
    with pytest.raises(UnsupportedError) as refused:
        _adapter(Unknown(), options)
    for words in (f"vLLM {vllm.__version__} ", "chatspace-lab 7.8.9", "Unknown", v1.MODULE, v2.MODULE):
        assert words in str(refused.value)


def test_a_runner_that_lacks_what_is_read_is_refused_and_it_is_named() -> None:
    import vllm

    from chatspace_lab.runtime.extension import _adapter

    options: Any = {"version": "7.8.9"}
    known = types.new_class("Runner", (), {}, lambda body: body.update(__module__=v1.MODULE))
    runner: Any = known()
    for name in v1.READS:
        if name not in ("discard_request_mask", "input_batch") and "." not in name:
            setattr(runner, name, None)
    runner.input_batch = types.SimpleNamespace(req_ids=[], num_reqs=0, generators={})
    with pytest.raises(
        UnsupportedError, match=r"lacks input_batch.num_computed_tokens_cpu, discard_request_mask"
    ) as refused:
        _adapter(runner, options)
    assert f"vLLM {vllm.__version__} " in str(refused.value)
    assert "chatspace-lab 7.8.9" in str(refused.value)
