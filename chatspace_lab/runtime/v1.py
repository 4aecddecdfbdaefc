"""vLLM's V1 model runner (``vllm/v1/worker/gpu_model_runner.py``): its batch, turned into ours.

The only module that names its internals. Everything it reads is listed in :data:`READS`.
"""

from __future__ import annotations

from typing import Any

from chatspace_lab.runtime.core import Arrival, Runtime

MODULE = "vllm.v1.worker.gpu_model_runner"
READS = (
    "execute_model",
    "_prepare_inputs",
    "_dummy_run",
    "input_batch",
    "input_batch.req_ids",
    "input_batch.num_reqs",
    "input_batch.num_computed_tokens_cpu",
    "input_batch.generators",
    "discard_request_mask",
    "sample_tokens",
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
        runtime.begin(batch.req_ids, num_scheduled_tokens, batch.num_computed_tokens_cpu[: batch.num_reqs])
        return result

    def dummy_run_unsteered(*args: Any, **kwargs: Any) -> Any:
        runtime.idle()
        return dummy_run(*args, **kwargs)

    if runner.device.type == "cpu":
        _keep_seeds(runner)
    runner.execute_model = execute_model_steered
    runner._prepare_inputs = prepare_inputs_steered
    runner._dummy_run = dummy_run_unsteered


def _keep_seeds(runner: Any) -> None:
    """Keep a seeded request whose prompt is only partly computed from ending a CPU engine.

    ``_bookkeeping_sync`` takes back the random number drawn for such a request by moving the offset of its generator,
    which a CPU generator does not have: the engine dies. Without its generator the request draws from the common one,
    the draw is thrown away all the same, and its own generator has not moved.
    """
    sample_tokens = runner.sample_tokens

    def sample_tokens_keeping_seeds(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        partial = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        kept = {index: batch.generators.pop(index) for index in partial if index in batch.generators}
        result = sample_tokens(*args, **kwargs)
        batch.generators.update(kept)
        return result

    runner.sample_tokens = sample_tokens_keeping_seeds
