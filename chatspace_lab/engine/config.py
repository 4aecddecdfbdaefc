"""The configuration of a model, and what becomes of it on a CPU or a GPU."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import os
import platform
import re
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from chatspace_lab import wire
from chatspace_lab.errors import ConfigError, ReadOnlyError, UnsupportedError
from chatspace_lab.quiet import quieten

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

GIB = 1 << 30
CPU_KV_CACHE_BYTES = 2 * GIB
"""KV cache on a CPU, at most, unless ``kv_cache_memory_bytes`` says otherwise."""

TRIED_VLLM = ((0, 26), (0, 33))
"""vLLM versions that were tried: from the first, below the second."""

# Options of vLLM that would make positions or activations mean something else; each is refused by name.
REFUSED: dict[str, str] = {
    "speculative_config": "draft tokens are computed and rejected, so a captured row may belong to no token",
    "worker_extension_cls": "it is how chatspace-lab loads its own part into the workers",
    "worker_cls": "chatspace-lab extends vLLM's own workers",
    "runner": "only text generation is supported",
    "enable_dbo": "micro-batches would split a step behind the router's back",
    "data_parallel_size": "one session talks to one engine; start several models instead",
    "prefill_context_parallel_size": "a prompt would be split over workers",
    "enable_lora": "requests cannot say which adapter they take; merge the adapter into the weights (peft: "
    "merge_and_unload) and load the result",
    "enable_prompt_embeds": "a prompt without token ids cannot be located or salted",
}


@dataclasses.dataclass
class VLLMSteeringConfig:
    """How to start the engine.

    Any other argument of vLLM's engine (``AsyncEngineArgs``) can be given as a keyword and passes through; a misspelt
    one is an error.

    Attributes
    ----------
    model_name
        A folder, or a name on the Hugging Face hub.
    tensor_parallel_size
        Workers that share each layer.
    gpu_memory_utilization
        Fraction of a GPU's memory the engine may use. On a CPU, the fraction of the free memory that the KV cache may
        take, up to 2 GiB; ``kv_cache_memory_bytes``, or vLLM's ``VLLM_CPU_KVCACHE_SPACE``, sets it exactly.
    max_model_len
        Longest prompt and answer together, in tokens; None is what the model was trained for.
    dtype
        ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``. ``"auto"`` is vLLM's choice, but float32 on a CPU
        without bfloat16 instructions.
    max_vectors
        Distinct vectors that requests under way and the session may use together; each takes ``4 · hidden_size``
        bytes on every worker.
    max_ops_per_layer
        Operations that one request may have at one layer.
    max_capture_bytes
        Host memory, in bytes, that captures which nobody fetched may take.
    capture_transport
        ``"shared"``: captured rows reach this process through shared memory, without a copy; needs workers on this
        host. ``"bytes"``: as messages.
    engine_args
        Further arguments of vLLM's engine, as given.
    """

    model_name: str
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    dtype: str = "auto"
    max_vectors: int = 4096
    max_ops_per_layer: int = 8
    max_capture_bytes: int = 4 * GIB
    capture_transport: str = "shared"
    engine_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    _running: ClassVar[bool] = False

    def __init__(self, model_name: str, *args: Any, engine_args: dict[str, Any] | None = None, **kwargs: Any) -> None:
        own = [field for field in dataclasses.fields(self) if field.name not in ("model_name", "engine_args")]
        if len(args) > len(own):
            raise ConfigError(f"VLLMSteeringConfig takes at most {len(own) + 1} positional arguments")
        given = dict(zip((field.name for field in own), args, strict=False))
        twice = given.keys() & kwargs.keys()
        if twice:
            raise ConfigError(f"VLLMSteeringConfig got {', '.join(sorted(twice))} twice")
        given.update(kwargs)
        self.model_name = str(model_name)
        for field in own:
            setattr(self, field.name, given.pop(field.name, field.default))
        self.engine_args = {**(engine_args or {}), **given}
        self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an option of an engine that is still to be started; what vLLM's engine takes stands in ``engine_args``.

        Raises
        ------
        ReadOnlyError
            If this is the configuration of a running engine.
        ConfigError
            If there is no such option.
        """
        if self._running:
            raise ReadOnlyError(
                f"VLLMSteeringConfig.{name} is fixed while the engine runs: change a copy (copy.deepcopy) and start "
                f"another engine with it"
            )
        if name not in {field.name for field in dataclasses.fields(self)}:
            raise ConfigError(
                f"VLLMSteeringConfig has no attribute {name}, so setting it would have no effect; give options of "
                f"vLLM's engine when the configuration is made, or set engine_args[{name!r}]"
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> VLLMSteeringConfig:
        """Return a copy that can be changed, also of a running engine's configuration."""
        found = object.__new__(VLLMSteeringConfig)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            setattr(found, field.name, copy.deepcopy(dict(value), memo) if field.name == "engine_args" else value)
        return found

    def __copy__(self) -> VLLMSteeringConfig:
        return copy.deepcopy(self)

    def fixed(self) -> VLLMSteeringConfig:
        """Return a copy that cannot be changed."""
        found = copy.deepcopy(self)
        object.__setattr__(found, "engine_args", types.MappingProxyType(found.engine_args))
        object.__setattr__(found, "_running", True)
        return found

    def check(self) -> None:
        """Check all values. The engine's start does so again: a configuration can be edited.

        Raises
        ------
        ConfigError, UnsupportedError
            Naming the option.
        """
        known = _engine_arg_names()
        own = {field.name for field in dataclasses.fields(self)} - {"engine_args"}
        for name in self.engine_args:
            if name not in known:
                close = difflib.get_close_matches(name, [*known, *own], n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ConfigError(f"VLLMSteeringConfig: {name} is no option of ours or of vLLM's engine{hint}")
            if name == "model":
                raise ConfigError("VLLMSteeringConfig: say model_name, not model")
            if name in REFUSED and not _is_off(self.engine_args[name]):
                raise UnsupportedError(f"vLLM's option {name} is not supported here: {REFUSED[name]}")
        defaults = sorted(set(self.engine_args.get("override_generation_config") or ()) - {"eos_token_id"})
        if defaults:
            raise UnsupportedError(
                f"override_generation_config: {', '.join(defaults)} would have no effect; give sampling parameters "
                f"with each call"
            )
        if self.engine_args.get("pipeline_parallel_size", 1) != 1:
            raise UnsupportedError("pipeline parallelism is not supported: each stage would hold a part of the layers")
        for name in ("tensor_parallel_size", "max_vectors", "max_ops_per_layer", "max_capture_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"VLLMSteeringConfig.{name}: expected a positive whole number, got {value!r}")
        if self.max_model_len is not None and (not isinstance(self.max_model_len, int) or self.max_model_len < 1):
            raise ConfigError(
                f"VLLMSteeringConfig.max_model_len: expected a positive number, got {self.max_model_len!r}"
            )
        if not isinstance(self.gpu_memory_utilization, int | float) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"VLLMSteeringConfig.gpu_memory_utilization: expected a fraction, got {self.gpu_memory_utilization!r}"
            )
        if self.capture_transport not in ("shared", "bytes"):
            raise ConfigError(
                f"VLLMSteeringConfig.capture_transport: 'shared' or 'bytes', got {self.capture_transport!r}"
            )

    def engine_kwargs(self, enforce_eager: bool | None) -> dict[str, Any]:
        """Return the arguments for vLLM's ``AsyncEngineArgs``.

        ``enforce_eager`` None is True on a CPU, for its quick start, and False on a GPU, for its CUDA graphs.
        """
        import torch
        from vllm.platforms import current_platform

        from chatspace_lab import __version__

        on_cpu = current_platform.is_cpu()
        kwargs = dict(self.engine_args)
        if enforce_eager is not None:
            kwargs["enforce_eager"] = enforce_eager
        kwargs.setdefault("enforce_eager", on_cpu)
        if on_cpu and "kv_cache_memory_bytes" not in kwargs and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            import psutil

            free = int(psutil.virtual_memory().available * self.gpu_memory_utilization)
            kwargs["kv_cache_memory_bytes"] = min(CPU_KV_CACHE_BYTES, free)
        options: wire.EngineOptions = {
            "version": __version__,
            "max_vectors": self.max_vectors,
            "max_ops_per_layer": self.max_ops_per_layer,
            "max_capture_bytes": self.max_capture_bytes,
            "cpu_capability": os.environ.get("ATEN_CPU_CAPABILITY") or torch.backends.cpu.get_cpu_capability(),
        }
        additional = {**(kwargs.pop("additional_config", None) or {}), wire.EXTRA: wire.Apart(options)}
        return {
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **kwargs,
            "model": self.model_name,
            "tensor_parallel_size": self.tensor_parallel_size,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_len,
            "dtype": self.dtype,
            "additional_config": additional,
            "worker_extension_cls": wire.EXTENSION,
        }


def engine_arguments(options: dict[str, Any]) -> AsyncEngineArgs:
    """Return vLLM's arguments; ``dtype="auto"`` becomes float32 on a CPU without bfloat16 instructions.

    vLLM chooses bfloat16 on every CPU. Without such instructions it is several times slower than float32. Quantised
    checkpoints keep vLLM's choice, because most of their kernels compute in bfloat16 only.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    arguments = AsyncEngineArgs(**options)
    auto = arguments.dtype == "auto" and current_platform.is_cpu() and not cpu_has_bfloat16()
    if auto and arguments.create_model_config().quantization is None:
        arguments.dtype = "float32"
    return arguments


def cpu_has_bfloat16() -> bool:
    """Return whether this machine's CPU multiplies bfloat16 numbers by instructions of its own.

    PyTorch's limit on instruction sets, the environment variable ``ATEN_CPU_CAPABILITY``, counts too.
    """
    import torch

    if platform.machine() in ("x86_64", "AMD64"):
        return "AVX512" in torch.backends.cpu.get_cpu_capability() and torch.cpu._is_avx512_bf16_supported()
    features = re.search(r"^Features\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return features is not None and "bf16" in features[1].split()


def cpu_has_vnni() -> bool:
    """Return whether oneDNN multiplies 8-bit integers here without overflow.

    Without VNNI instructions it adds their products in 16 bits, where they saturate. oneDNN's own limit on instruction
    sets, the environment variable ``ONEDNN_MAX_CPU_ISA``, counts too. Other CPUs than x86 have no such step.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    if limit in ("SSE41", "AVX", "AVX2", "AVX512_CORE"):
        return False
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return flags is not None and bool({"avx_vnni", "avx512_vnni"} & set(flags[1].split()))


def _is_off(value: Any) -> bool:
    """Whether a refused option is given the value that it has anyway (True equals 1, and is none of these)."""
    return value is None or value is False or (value is not True and value in (1, "auto", "generate"))


def _engine_arg_names() -> set[str]:
    quieten()  # vLLM sets up its logging when it is imported
    from vllm.engine.arg_utils import AsyncEngineArgs

    return {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def check_vllm_version() -> str:
    """Return vLLM's version.

    Raises
    ------
    UnsupportedError
        If it is outside the range that was tried; both are named.
    """
    import vllm

    from chatspace_lab import __version__

    version: str = vllm.__version__
    try:
        parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError as error:
        raise UnsupportedError(f"cannot read vLLM's version {version!r}") from error
    low, high = TRIED_VLLM
    if not low <= parts < high:
        wanted = f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
        raise UnsupportedError(
            f"vLLM {version} was never tried with chatspace-lab {__version__}, which needs vLLM {wanted}"
        )
    return version
