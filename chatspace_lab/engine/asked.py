"""What was asked of the engine, and what it runs with: vLLM, or a plugin of vLLM's, may change one into the other."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import torch

from chatspace_lab.engine.config import VLLMSteeringConfig, check_vllm_version, cpu_has_vnni, engine_arguments
from chatspace_lab.errors import UnsupportedError
from chatspace_lab.runtime.deviations import Circumstances, refuse_deviation

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

PLUGINS = "vllm.general_plugins"
ALIASES = {"kv_cache_dtype": "cache_dtype"}
"""Engine arguments whose name is another in vLLM's configuration."""
OURS = ("model", "worker_extension_cls", "additional_config", "disable_log_stats", "gpu_memory_utilization")
"""Engine arguments that are not compared: nobody asks for them, or another one decides."""

_MAMBA_ON_CPU = (
    "vLLM's Mamba layers end the engine on a CPU if a prompt is longer than a block of the prefix cache "
    "(mamba_chunk_scan_combined_varlen returns no intermediate states there)"
)


@dataclass(frozen=True)
class Prepared:
    """An engine that can be started.

    Attributes
    ----------
    asked
        Arguments of vLLM's engine, as they were asked for.
    vllm_config
        What vLLM makes of them.
    dtype_reason
        Why ``dtype`` is not vLLM's own choice, or nothing.
    notes
        Warnings: what differs from vLLM's defaults.
    """

    asked: dict[str, Any]
    vllm_config: VllmConfig
    dtype_reason: str
    notes: list[str]


def prepare(config: VLLMSteeringConfig, enforce_eager: bool | None) -> Prepared:
    """Check all that can be known of an engine before one of its processes runs.

    Raises
    ------
    UnsupportedError
        If the model or an option is refused by name.
    Exception
        Whatever vLLM raises about the model's folder, its architecture or the options.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    check_vllm_version()
    config.check()
    asked = config.engine_kwargs(enforce_eager)
    # vLLM remembers that it could not look at an architecture, and then says so without a reason.
    registry._try_inspect_model_cls.cache_clear()
    arguments = engine_arguments(asked)
    dtype_reason = "" if arguments.dtype == config.dtype else "this CPU has no bfloat16 instructions"
    notes = _without_prefix_cache(arguments)
    made = arguments.create_engine_config()
    model = made.model_config
    refuse_deviation(
        model.architecture, Circumstances(model.hf_text_config, model.max_model_len, current_platform.device_type)
    )
    if current_platform.is_cpu() and not cpu_has_vnni() and _multiplies_int8(model.hf_config):
        raise UnsupportedError(
            "8-bit weights and activations (compressed-tensors): this CPU has no VNNI instructions, and without them "
            "oneDNN's sums of 8-bit products overflow; use a CPU that has them, or a model without 8-bit activations"
        )
    return Prepared(asked, made, dtype_reason, notes)


def _multiplies_int8(config: Any) -> bool:
    """Whether a checkpoint's layers multiply 8-bit integers by 8-bit integers."""
    described = getattr(config, "quantization_config", None)
    groups = described.get("config_groups", {}).values() if isinstance(described, Mapping) else ()
    inputs = [group.get("input_activations") or {} for group in groups if isinstance(group, Mapping)]
    return any(each.get("type") == "int" and each.get("num_bits") == 8 for each in inputs)


def _without_prefix_cache(arguments: AsyncEngineArgs) -> list[str]:
    """Switch prefix caching off where it would end the engine, and return what to say of it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or arguments.enable_prefix_caching is False:
        return []
    model = arguments.create_model_config()
    if not model.has_inner_state:
        return []
    if arguments.enable_prefix_caching:
        raise UnsupportedError(
            f"enable_prefix_caching=True is not supported for {model.architecture}: {_MAMBA_ON_CPU}; leave it out"
        )
    arguments.enable_prefix_caching = False
    if not model.is_hybrid:  # vLLM's own default
        return []
    note = (
        f"prefix caching is off for {model.architecture}: {_MAMBA_ON_CPU}. Prompts that begin alike are computed anew"
    )
    return [f"{note}. enable_prefix_caching=False silences this warning"]


def changes(asked: dict[str, Any], made: VllmConfig) -> list[str]:
    """Return a warning about the options that are not what was asked for, or none."""
    found = []
    for name, value in asked.items():
        if name in OURS or value in (None, "auto") or not isinstance(value, bool | int | float | str | torch.dtype):
            continue
        runs = {_plain(each) for each in _values(made, ALIASES.get(name, name))}
        if runs and _plain(value) not in runs:
            found.append(f"{name} is {' or '.join(map(repr, runs))} (asked for: {_plain(value)!r})")
    if not found:
        return []
    return [f"the engine does not run as asked: {'; '.join(found)}. {_whose_doing()}"]


def _values(made: VllmConfig, name: str) -> Iterator[Any]:
    """Yield the values of an option in the parts of vLLM's configuration that have one of this name."""
    parts = ("model", "cache", "scheduler", "parallel", "load", "attention")
    for part in (getattr(made, f"{part}_config", None) for part in parts):
        if name in getattr(part, "__dataclass_fields__", ()):
            value = getattr(part, name, None)  # some fields are only arguments
            if isinstance(value, bool | int | float | str | torch.dtype | enum.Enum):
                yield value


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        value = value.name
    if isinstance(value, str | torch.dtype):
        return str(value).removeprefix("torch.").lower()
    return value


def _whose_doing() -> str:
    """Return who changed the configuration, as far as can be seen, and how to switch it off."""
    others = other_plugins()
    if not others:
        return "vLLM changed it; its log says why (VLLM_LOGGING_LEVEL=INFO)"
    guilty = [each for each in others if each.value.split(":")[0].split(".")[0] in _patched_by()] or others
    names = " or ".join(
        f"{each.name!r} of the package {each.dist.name if each.dist else each.module}" for each in guilty
    )
    kept = ",".join(each.name for each in others if each not in guilty)
    return (
        f"The vLLM plugin {names} did it, or vLLM itself. To switch the plugin off, set the environment variable "
        f"VLLM_PLUGINS={kept!r} before Python starts (vLLM loads every installed plugin otherwise), or uninstall it"
    )


def other_plugins() -> list[EntryPoint]:
    """Return the plugins of other packages that vLLM loads into its processes."""
    allowed = os.environ.get("VLLM_PLUGINS")
    found = [each for each in entry_points(group=PLUGINS) if not each.value.startswith("vllm.")]
    return [each for each in found if allowed is None or each.name in allowed.split(",")]


def _patched_by() -> set[str]:
    """Return the packages whose functions stand where vLLM's make and check its configuration."""
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    functions = [
        getattr(owner, name, None)
        for owner in (AsyncEngineArgs, VllmConfig, ModelConfig)
        for name in ("create_engine_config", "create_model_config", "__init__", "__post_init__")
    ]
    modules = [getattr(function, "__globals__", {}).get("__name__", "") for function in functions]
    return {module.split(".")[0] for module in modules} - {"vllm"}
