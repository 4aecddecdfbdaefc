"""vLLM's V2 model runner (``vllm/v1/worker/gpu/model_runner.py``): its batch, turned into ours.

The only module that names its internals. Everything it reads is listed in :data:`READS`.
"""

from __future__ import annotations

from typing import Any

from chatspace_lab.runtime.core import Runtime
from chatspace_lab.runtime.v1 import arrival

MODULE = "vllm.v1.worker.gpu.model_runner"
READS = (
    "execute_model",
    "prepare_inputs",
    "max_num_tokens",
    "max_num_reqs",
    "model_config",
    "device",
    "get_model",
)
BATCH_READS = ("req_ids", "num_reqs", "num_scheduled_tokens", "num_computed_tokens_np")


def attach(runner: Any, runtime: Runtime) -> None:
    """Wrap this runner's own methods; its class is left as it is."""
    execute_model, prepare_inputs = runner.execute_model, runner.prepare_inputs

    def execute_model_steered(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # execute_model(scheduler_output, intermediate_tensors, dummy_run, ...) also serves warm-up and profiling.
        if kwargs.get("dummy_run", args[1] if len(args) > 1 else False):
            runtime.idle()
            return execute_model(scheduler_output, *args, **kwargs)
        runtime.admit(scheduler_output.finished_req_ids, [arrival(new) for new in scheduler_output.scheduled_new_reqs])
        return execute_model(scheduler_output, *args, **kwargs)

    def prepare_inputs_steered(*args: Any, **kwargs: Any) -> Any:
        batch = prepare_inputs(*args, **kwargs)
        count = batch.num_reqs
        runtime.begin(batch.req_ids, batch.num_scheduled_tokens[:count], batch.num_computed_tokens_np[:count])
        return batch

    runner.execute_model = execute_model_steered
    runner.prepare_inputs = prepare_inputs_steered
