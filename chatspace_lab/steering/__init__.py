"""Steering specs, and how they are compiled into what the workers run."""

from chatspace_lab.steering.specs import (
    AblationSpec,
    AddSpec,
    LayerSteeringSpec,
    Operation,
    ProjectionCapSpec,
    SteeringSpec,
)
from chatspace_lab.steering.where import Where

__all__ = [
    "AblationSpec",
    "AddSpec",
    "LayerSteeringSpec",
    "Operation",
    "ProjectionCapSpec",
    "SteeringSpec",
    "Where",
]
