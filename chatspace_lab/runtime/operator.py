"""The one operator, ``chatspace_lab::intervene``, at the end of every decoder layer.

It takes only the layer's own tensors and its index. The buffers are reached through :func:`bind`, not through the
signature: a mutable argument may be cloned by functionalisation, and then a captured graph would read a stale copy.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Interventions(Protocol):
    """What the operator asks of the worker's runtime."""

    def apply(self, hidden: torch.Tensor, residual: torch.Tensor | None, layer: int) -> torch.Tensor:
        """Return ``hidden`` changed by this step's programs; store this step's captures of the layer."""
        ...


_bound: Interventions | None = None


def bind(interventions: Interventions | None) -> None:
    """Set what the operator of this process works on."""
    global _bound  # one engine's worker per process
    _bound = interventions


def _intervene(hidden: torch.Tensor, residual: torch.Tensor | None, layer: int) -> torch.Tensor:
    if _bound is None:
        return hidden.clone()
    return _bound.apply(hidden, residual, layer)


def _intervene_fake(hidden: torch.Tensor, residual: torch.Tensor | None, layer: int) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


# torch.library.Library, not custom_op: a third of its cost per call, and it is called once per layer and step.
_library = torch.library.Library("chatspace_lab", "FRAGMENT")
_library.define("intervene(Tensor hidden, Tensor? residual, int layer) -> Tensor")
for _key in ("CPU", "CUDA"):
    _library.impl("intervene", _intervene, dispatch_key=_key)
torch.library.register_fake("chatspace_lab::intervene", _intervene_fake, lib=_library)

intervene = torch.ops.chatspace_lab.intervene.default
