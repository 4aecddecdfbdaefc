"""The one operator, ``chatspace_lab::intervene``, at the end of every decoder layer.

It changes ``hidden`` in place, so that tokens which nobody steers cost no copy; compilers know that from its signature.
The layer's index is a tensor, not a number: a number would make every layer's graph another one to compile. The buffers
are reached through :func:`bind`, not through the signature: a mutable argument may be cloned by functionalisation, and
then a captured graph would read a stale copy.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Interventions(Protocol):
    """What the operator asks of the worker's runtime."""

    def apply(self, hidden: torch.Tensor, residual: torch.Tensor | None, layer: torch.Tensor) -> None:
        """Change ``hidden`` by this step's programs; store this step's captures of the layer."""
        ...


_bound: Interventions | None = None


def bind(interventions: Interventions | None) -> None:
    """Set what the operator of this process works on."""
    global _bound  # one engine's worker per process
    _bound = interventions


def _intervene(hidden: torch.Tensor, residual: torch.Tensor | None, layer: torch.Tensor) -> None:
    if _bound is not None:
        _bound.apply(hidden, residual, layer)


def _intervene_fake(hidden: torch.Tensor, residual: torch.Tensor | None, layer: torch.Tensor) -> None:
    pass


# torch.library.Library, not custom_op: a third of its cost per call, and it is called once per layer and step.
_library = torch.library.Library("chatspace_lab", "FRAGMENT")
_library.define("intervene(Tensor(a!) hidden, Tensor? residual, Tensor layer) -> ()")
for _key in ("CPU", "CUDA"):
    _library.impl("intervene", _intervene, dispatch_key=_key)
torch.library.register_fake("chatspace_lab::intervene", _intervene_fake, lib=_library)

intervene = torch.ops.chatspace_lab.intervene.default
