"""vLLM's V1 model runner (``vllm/v1/worker/gpu_model_runner.py``): its batch, turned into ours.

The only module that names its internals. Everything it reads is listed in :data:`READS`.
"""

from __future__ import annotations

from typing import Any

from chatspace_lab.runtime.core import Arrival, Runtime
from chatspace_lab.runtime.routing import BatchRow

MODULE = "vllm.v1.worker.gpu_model_runner"
READS = (
    "execute_model",
    "_prepare_inputs",
    "_dummy_run",
    "input_batch",
    "input_batch.req_ids",
    "input_batch.num_reqs",
    "input_batch.num_computed_tokens_cpu",
    "max_num_tokens",
    "max_num_reqs",
    "model_config",
    "device",
    "get_model",
)


def arrival(new: Any) -> Arrival:
    """Read a ``NewRequestData`` of vLLM's scheduler; both runners are given these."""
    params = new.sampling_params
    prompt_len = len(new.prompt_token_ids or ())
    return Arrival(new.req_id, params and params.extra_args, prompt_len, params and params.max_tokens)


def attach(runner: Any, runtime: Runtime) -> None:
    """Wrap this runner's own methods; its class is left as it is."""
    execute_model, prepare_inputs, dummy_run = runner.execute_model, runner._prepare_inputs, runner._dummy_run

    def execute_model_steered(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        runtime.admit(scheduler_output.finished_req_ids, [arrival(new) for new in scheduler_output.scheduled_new_reqs])
        return execute_model(scheduler_output, *args, **kwargs)

    def prepare_inputs_steered(scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        result = prepare_inputs(scheduler_output, num_scheduled_tokens, *args, **kwargs)
        # Only now is the batch in its final order (_update_states and _may_reorder_batch move requests about).
        batch = runner.input_batch
        first = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        counts = num_scheduled_tokens.tolist()
        runtime.begin([BatchRow(*row) for row in zip(batch.req_ids, counts, first, strict=True)])
        return result

    def dummy_run_unsteered(*args: Any, **kwargs: Any) -> Any:
        runtime.idle()
        return dummy_run(*args, **kwargs)

    runner.execute_model = execute_model_steered
    runner._prepare_inputs = prepare_inputs_steered
    runner._dummy_run = dummy_run_unsteered
