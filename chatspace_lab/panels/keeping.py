"""A panel on disk: the session as ``lab.save`` writes it, and beside it the panel's state with its vectors."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from chatspace_lab.errors import SessionError
from chatspace_lab.panels.vectors import layers_with
from chatspace_lab.steering.directions import at_layer
from chatspace_lab.steering.vectors import as_vector

STATE, VECTORS = "panel.json", "panel.safetensors"


def new_folder() -> Path:
    """Return a folder for a panel that is saved now, in the working directory."""
    return Path.cwd() / time.strftime("chatspace-lab-%Y%m%d-%H%M%S")


def write(folder: Path, state: Mapping[str, Any], vectors: Mapping[str, Any]) -> None:
    """Write a panel's state and the vectors that it names.

    Parameters
    ----------
    folder
        Exists.
    state
        As ``panel.state`` has it.
    vectors
        By name, ``[hidden_size]`` or one per layer; those that are no part of the state are left out.

    Raises
    ------
    SessionError
        If the folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    used = {row["vector"] for row in state["rows"]} | {state["view"]["direction"]}
    tensors: dict[str, torch.Tensor] = {}
    named: dict[str, dict[str, str]] = {}
    for at, name in enumerate(sorted(name for name in vectors if name in used)):
        layers = layers_with(vectors[name])
        named[name] = {}
        for layer in ["all"] if layers is None else layers:
            found = vectors[name] if layers is None else at_layer(vectors[name], int(layer), name)
            key = f"{at}.{layer}"
            named[name][str(layer)] = key
            tensors[key] = as_vector(found, name).contiguous().clone()
    try:
        save_file(tensors, str(folder / f"{VECTORS}.new"))
        (folder / f"{STATE}.new").write_text(json.dumps({"state": state, "vectors": named}, indent=1))
        for name in (VECTORS, STATE):
            (folder / f"{name}.new").replace(folder / name)
    except (OSError, SafetensorError) as error:
        raise SessionError(f"cannot write to {folder}: {error}") from error


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state and the vectors that :func:`write` wrote.

    Raises
    ------
    SessionError
        If there is none, or it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not (folder / STATE).is_file():
        raise SessionError(f"{folder} holds no saved panel: there is no {STATE}")
    try:
        data = json.loads((folder / STATE).read_text())
        tensors = load_file(str(folder / VECTORS))
        vectors = {
            name: tensors[keys["all"]] if "all" in keys else {int(layer): tensors[key] for layer, key in keys.items()}
            for name, keys in data["vectors"].items()
        }
        state = dict(data["state"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SessionError(f"{folder} is damaged: {type(error).__name__}: {error}") from error
    return state, vectors
