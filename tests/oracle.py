"""What everything numeric is compared with: Hugging Face in float32, the operations redone by hooks in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from chatspace_lab import AblationSpec, AddSpec, SteeringSpec


def act(x: torch.Tensor, operation: Any) -> torch.Tensor:
    """Do one operation on rows ``x`` [n, hidden_size]."""
    if isinstance(operation, AddSpec):
        return x + operation.scale * operation.vector
    u = operation.vector / operation.vector.norm()
    p = x @ u
    if isinstance(operation, AblationSpec):
        return x + ((operation.scale - 1) * p)[:, None] * u
    return x + (p.clamp(operation.min, operation.max) - p)[:, None] * u


class Oracle:
    """A model in Hugging Face's own code. Layer i is what a forward hook on decoder block i sees."""

    def __init__(self, folder: str, dtype: torch.dtype = torch.float32, attention: str = "eager") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        self.model.eval()
        count = self.model.config.get_text_config().num_hidden_layers
        (self.blocks,) = [
            module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count and "experts" not in name
        ]

    @torch.no_grad()
    def run(
        self, token_ids: Sequence[int], spec: SteeringSpec | None = None, positions: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return residuals [layers, tokens, hidden_size] and logits [tokens, vocabulary]."""
        residuals = []
        layers = {} if spec is None else {layer: steps.steps for layer, steps in spec.layers.items()}

        def hook(layer: int) -> Any:
            def after(module: nn.Module, args: Any, output: Any) -> Any:
                x = (output[0] if isinstance(output, tuple) else output).clone()
                for operation in layers.get(layer, ()):
                    x[0, positions] = act(x[0, positions].float(), operation).to(x.dtype)
                residuals.append(x[0])
                return (x, *output[1:]) if isinstance(output, tuple) else x

            return after

        handles = [block.register_forward_hook(hook(layer)) for layer, block in enumerate(self.blocks)]
        try:
            logits = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return torch.stack(residuals), logits

    def residuals(
        self, token_ids: Sequence[int], spec: SteeringSpec | None = None, positions: slice = slice(None)
    ) -> torch.Tensor:
        """Return [layers, tokens, hidden_size]."""
        return self.run(token_ids, spec, positions)[0]

    def greedy(self, token_ids: Sequence[int], count: int, spec: SteeringSpec | None = None) -> list[int]:
        """Return the ``count`` most likely tokens after each other."""
        sequence = list(token_ids)
        for _ in range(count):
            sequence.append(int(self.run(sequence, spec)[1][-1].argmax()))
        return sequence[len(token_ids) :]


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest distance of a row, relative to the norm of the row that is wanted."""
    assert got.shape == wanted.shape, f"shapes {list(got.shape)} and {list(wanted.shape)}"
    assert torch.isfinite(got).all()
    return float(((got.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
