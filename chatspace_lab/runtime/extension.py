"""What vLLM loads into its workers (``worker_extension_cls``): installation at load, and the RPCs of the kernel.

Importing this module wraps ``Worker.load_model`` once, in a process that vLLM started for us; a worker that was not
configured with this extension goes through untouched.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.worker import gpu_worker

from chatspace_lab import wire
from chatspace_lab.errors import UnsupportedError
from chatspace_lab.runtime import layers, operator, v1, v2
from chatspace_lab.runtime.compared import doubt
from chatspace_lab.runtime.core import Runtime
from chatspace_lab.runtime.store import CaptureStore
from chatspace_lab.runtime.tables import Tables
from chatspace_lab.runtime.watch import tell_stage, watch_owner

PROBE_TOKENS = 8


def _answers(method: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Turn what an RPC returns or raises into plain data."""

    @functools.wraps(method)
    def answer(*args: Any, **kwargs: Any) -> list[Any]:
        try:
            return wire.ok(method(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - it travels to the kernel, and is raised there
            return wire.failed(error, traceback.format_exc())

    return answer


class SteeringWorkerExtension:
    """RPCs that the kernel calls by name. Every worker answers; all hold the same state."""

    chatspace_lab_runtime: Runtime
    chatspace_lab_facts: dict[str, Any]
    chatspace_lab_failure: Exception | None = None

    @_answers
    def chatspace_lab_describe(self) -> dict[str, Any]:
        """Return what the kernel must know of the model, and this worker's processes; raise why it is refused."""
        if self.chatspace_lab_failure is not None:
            raise self.chatspace_lab_failure
        return {**self.chatspace_lab_facts, "pids": [os.getpid(), os.getppid()]}

    @_answers
    def chatspace_lab_put_vectors(self, rows: Sequence[int], data: bytes) -> None:
        """Write vectors into the bank."""
        self.chatspace_lab_runtime.tables.put_vectors(rows, data)

    @_answers
    def chatspace_lab_fetch(self, wanted: Sequence[tuple[str, int]], shared: bool) -> dict[str, Any] | None:
        """Return captured rows. All workers of a tensor-parallel engine hold the same; the first one sends them."""
        if self.rank:  # type: ignore[attr-defined]  # of vLLM's WorkerBase
            return None
        self.chatspace_lab_runtime.backend.drain()
        return self.chatspace_lab_runtime.store.fetch([(key, stop) for key, stop in wanted], shared=shared)

    @_answers
    def chatspace_lab_reduce(
        self,
        wanted: Sequence[tuple[str, int, int]],
        layers: Sequence[int],
        how: str,
        units: bytes,
        shape: Sequence[int],
    ) -> list[Any] | None:
        """Return numbers read off captured rows; like the rows, from the first worker only."""
        if self.rank:  # type: ignore[attr-defined]  # of vLLM's WorkerBase
            return None
        runtime = self.chatspace_lab_runtime
        runtime.backend.drain()
        directions = np.frombuffer(bytearray(units), dtype=np.float32).reshape(shape)
        return [runtime.store.reduce(key, first, stop, layers, how, directions) for key, first, stop in wanted]

    @_answers
    def chatspace_lab_release(self, keys: Sequence[str]) -> None:
        """Drop captures."""
        self.chatspace_lab_runtime.store.release(keys)

    @_answers
    def chatspace_lab_digest(self) -> str:
        """Name the contents of the bank: the same on all workers, unless an update reached only some."""
        return self.chatspace_lab_runtime.tables.digest()

    @_answers
    def chatspace_lab_stats(self) -> dict[str, Any]:
        """Return what the worker holds for us."""
        return self.chatspace_lab_runtime.stats()


def _adapter(runner: Any, options: wire.EngineOptions) -> ModuleType:
    """Return the module that knows this runner."""
    bases = {base.__module__ for base in type(runner).__mro__}
    for module in (v2, v1):
        if module.MODULE in bases:
            missing = [name for name in module.READS if not _has(runner, name)]
            if missing:
                raise UnsupportedError(
                    f"the model runner of vLLM {vllm.__version__} ({module.MODULE}) lacks {', '.join(missing)}, which "
                    f"chatspace-lab {options['version']} reads"
                )
            return module
    raise UnsupportedError(
        f"vLLM {vllm.__version__} runs the model by {type(runner).__module__}.{type(runner).__name__}, which "
        f"chatspace-lab {options['version']} does not know: it knows {v1.MODULE} and {v2.MODULE}"
    )


def _has(value: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def _probe(worker: Any, model: torch.nn.Module) -> None:
    """Run the model over a few tokens without a KV cache, as vLLM's own profiling run does."""
    runner = worker.model_runner
    ids = torch.arange(PROBE_TOKENS, device=runner.device, dtype=torch.int32)
    positions = torch.arange(PROBE_TOKENS, device=runner.device)
    with (
        torch.inference_mode(),
        set_current_vllm_config(worker.vllm_config),
        set_forward_context(None, worker.vllm_config, num_tokens=PROBE_TOKENS, skip_compiled=True),
    ):
        model(input_ids=ids, positions=positions, intermediate_tensors=None)


def _install(worker: Any) -> None:
    watch_owner()
    runner, config = worker.model_runner, worker.vllm_config
    options: wire.EngineOptions = config.additional_config[wire.EXTRA]
    adapter = _adapter(runner, options)
    model = runner.get_model()
    architecture = type(model).__name__
    text_config = config.model_config.hf_text_config
    count, hidden_size = text_config.num_hidden_layers, config.model_config.get_hidden_size()
    blocks = layers.find_blocks(model, count)
    calls = layers.record_calls(blocks, lambda: _probe(worker, model))
    with (
        torch.inference_mode(),
        set_current_vllm_config(config),
        set_forward_context(None, config, num_tokens=PROBE_TOKENS),
    ):
        form = layers.output_form(blocks, calls, hidden_size, architecture)
    tables = Tables(
        layers=count,
        hidden_size=hidden_size,
        max_requests=runner.max_num_reqs,
        max_ops=options["max_ops_per_layer"],
        max_vectors=options["max_vectors"],
        # A captured graph may be padded beyond the scheduler's budget.
        max_tokens=max(runner.max_num_tokens, config.compilation_config.max_cudagraph_capture_size or 0),
        device=runner.device,
    )
    dtype = config.model_config.dtype
    if runner.device.type == "cpu":
        from chatspace_lab.runtime.backend_cpu import CpuBackend as DeviceBackend
    elif runner.device.type == "cuda":
        from chatspace_lab.runtime.backend_cuda import CudaBackend as DeviceBackend  # type: ignore[assignment]
    else:
        raise UnsupportedError(f"device {runner.device.type} is not supported, only cpu and cuda")
    backend = DeviceBackend(tables, dtype)
    pool = backend.make_pool(options["max_capture_bytes"])
    store = CaptureStore(pool, hidden_size, dtype, backend.fence)
    runtime = Runtime(tables, store, backend, captures=worker.rank == 0)
    layers.install(blocks, form)
    adapter.attach(runner, runtime)
    operator.bind(runtime.backend)
    worker.chatspace_lab_runtime = runtime
    worker.chatspace_lab_facts = {
        "architecture": architecture,
        "layer_count": count,
        "hidden_size": hidden_size,
        "dtype": str(dtype).removeprefix("torch."),
        "runner": adapter.MODULE,
        "block": type(blocks[0]).__name__,
        "form": "single tensor" if form.residual is None else "hidden + residual",
        "doubt": doubt(
            config.model_config.hf_config.architectures[0],
            config.model_config.quantization,
            str(getattr(config.model_config.model_impl, "value", config.model_config.model_impl)),
        ),
    }


def _keep_compiled_code_apart() -> None:
    """Name the CPU's instruction set in the keys of PyTorch's compile cache.

    TorchInductor stores C++ code whose loops step by the width of a vector, and its key does not say which. Read under
    another ``ATEN_CPU_CAPABILITY``, or by another machine that shares the folder, the code is built for wider vectors
    and writes beyond its buffers. vLLM compiles parts of some models, Cohere's norms among them, even in eager mode.
    """
    torch.compiler.config.cache_key_tag += f" {torch.backends.cpu.get_cpu_capability()}"


def _wrap_load_model() -> None:
    load_model = gpu_worker.Worker.load_model
    if getattr(load_model, "chatspace_lab", False):
        return  # this module is imported again when a spawned process re-runs the main script

    @functools.wraps(load_model)
    def load_model_and_install(self: Any, *args: Any, **kwargs: Any) -> Any:
        tell_stage(1)
        ours = self.vllm_config.parallel_config.worker_extension_cls == wire.EXTENSION
        if ours:
            _keep_compiled_code_apart()
        result = load_model(self, *args, **kwargs)
        if ours:
            try:
                _install(self)
            except Exception as error:  # noqa: BLE001 - raised here, vLLM would tell the kernel only that something failed
                self.chatspace_lab_failure = error
            tell_stage(2)
        return result

    load_model_and_install.chatspace_lab = True  # type: ignore[attr-defined]
    gpu_worker.Worker.load_model = load_model_and_install


_wrap_load_model()
