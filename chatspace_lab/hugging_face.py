"""A model in Hugging Face's own code, as the yardstick of ``chatspace-lab verify``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import torch

from chatspace_lab.runtime.layers import find_blocks

SPARE = 1.3
"""Memory needed, as a multiple of the weights in float32."""


def room(name: str) -> tuple[str | None, str]:
    """Return the device on which the model fits in float32, or None and the reason."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(name)
    try:
        with torch.device("meta"):
            count = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    except (ValueError, ImportError) as error:
        return None, f"transformers does not know it: {' '.join(str(error).split())[:120]}"
    if getattr(config, "quantization_config", None) is not None:
        return None, "its weights are quantised: Hugging Face would compute something else"
    needed = int(4 * count * SPARE)
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > needed:
        return "cuda", ""
    free = psutil.virtual_memory().available
    if free > needed:
        return "cpu", ""
    return None, f"it needs {needed / 2**30:.1f} GiB in float32, and {free / 2**30:.1f} GiB are free"


def load(name: str, device: str) -> torch.nn.Module:
    """Return the model in float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    return model.eval()


@torch.no_grad()
def residuals(model: Any, token_ids: Sequence[int], layer_count: int) -> torch.Tensor:
    """Return what the decoder blocks give out, [layers, tokens, hidden_size] on the CPU, in the model's dtype."""
    rows: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        rows.append((x[0] if x.ndim == 3 else x).cpu())

    handles = [block.register_forward_hook(keep) for block in find_blocks(model, layer_count)]
    try:
        model(torch.tensor([list(token_ids)], device=next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(rows)
