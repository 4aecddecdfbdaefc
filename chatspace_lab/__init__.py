"""Steer language models and read their activations while they talk.

Importing this package starts nothing, patches nothing, and loads neither vLLM nor plotly: names are resolved when they
are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatspace_lab import lazy

__version__ = "0.1.0"

if TYPE_CHECKING:
    from chatspace_lab.analysis.direction import Direction
    from chatspace_lab.capture import CaptureHandle
    from chatspace_lab.chat import ChatResponse, MessageBoundary
    from chatspace_lab.engine.config import VLLMSteeringConfig
    from chatspace_lab.engine.model import VLLMSteerModel
    from chatspace_lab.engine.observer import Progress
    from chatspace_lab.engine.stream import StreamDelta, TextStream
    from chatspace_lab.errors import LabError
    from chatspace_lab.session.lab import LabSession
    from chatspace_lab.steering.specs import (
        AblationSpec,
        AddSpec,
        LayerSteeringSpec,
        ProjectionCapSpec,
        SteeringSpec,
    )
    from chatspace_lab.steering.where import Where

_HOME = {
    "AblationSpec": "steering.specs",
    "AddSpec": "steering.specs",
    "CaptureHandle": "capture",
    "ChatResponse": "chat",
    "Direction": "analysis.direction",
    "LabError": "errors",
    "LabSession": "session",
    "LayerSteeringSpec": "steering.specs",
    "MessageBoundary": "chat",
    "Progress": "engine.observer",
    "ProjectionCapSpec": "steering.specs",
    "SteeringSpec": "steering.specs",
    "StreamDelta": "engine.stream",
    "TextStream": "engine.stream",
    "VLLMSteerModel": "engine.model",
    "VLLMSteeringConfig": "engine.config",
    "Where": "steering.where",
}

__all__ = [
    "AblationSpec",
    "AddSpec",
    "CaptureHandle",
    "ChatResponse",
    "Direction",
    "LabError",
    "LabSession",
    "LayerSteeringSpec",
    "MessageBoundary",
    "Progress",
    "ProjectionCapSpec",
    "SteeringSpec",
    "StreamDelta",
    "TextStream",
    "VLLMSteerModel",
    "VLLMSteeringConfig",
    "Where",
]

__getattr__, __dir__ = lazy.names(__name__, _HOME, lazy.LAB_EXTRA)
