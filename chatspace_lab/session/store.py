"""A session on disk: ``session.json`` for what can be read, ``session.safetensors`` for vectors and readings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from chatspace_lab.errors import SessionError
from chatspace_lab.readings import Readings
from chatspace_lab.session.history import History, Run
from chatspace_lab.steering.specs import AblationSpec, AddSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec
from chatspace_lab.steering.where import Where, as_where

FORMAT = 1
JSON, TENSORS = "session.json", "session.safetensors"
MODEL = ("model_name", "hidden_size", "layer_count")
"""What is kept of the model: attributes of it."""

KINDS = {"add": AddSpec, "cap": ProjectionCapSpec, "ablate": AblationSpec}
NAMES = {kind: name for name, kind in KINDS.items()}

Tensors = dict[str, torch.Tensor]


def spec_to_json(spec: SteeringSpec, tensors: Tensors) -> dict[str, Any]:
    """Return a spec as plain data; its vectors go to ``tensors``, each once, named by their contents."""
    layers: dict[str, list[dict[str, Any]]] = {}
    for layer, operation in spec:
        entry: dict[str, Any] = {"kind": NAMES[type(operation)], "vector": _put(operation.vector, tensors)}
        if isinstance(operation, ProjectionCapSpec):
            entry |= {"min": operation.min, "max": operation.max}
        else:
            entry["scale"] = operation.scale
        layers.setdefault(str(layer), []).append(entry)
    return {"layers": layers, "where": asdict(as_where(spec.where))}


def spec_from_json(data: Mapping[str, Any], tensors: Tensors) -> SteeringSpec:
    """Return the spec that :func:`spec_to_json` wrote."""
    if not data["layers"]:
        return SteeringSpec.none()
    layers = {}
    for layer, entries in data["layers"].items():
        operations = []
        for entry in entries:
            values = {name: value for name, value in entry.items() if name not in ("kind", "vector")}
            operations.append(KINDS[entry["kind"]](tensors[entry["vector"]], **values))
        layers[int(layer)] = _layer(operations)
    where = data["where"]
    return SteeringSpec(layers, Where(**{**where, "indices": tuple(where["indices"])}))


def _layer(operations: list[Any]) -> LayerSteeringSpec:
    return SteeringSpec.at(0, *operations).layers[0]


def _put(vector: torch.Tensor, tensors: Tensors) -> str:
    name = f"vector-{hashlib.sha256(vector.numpy().tobytes()).hexdigest()[:16]}"
    tensors.setdefault(name, vector.contiguous())
    return name


def _run_to_json(run: Run, tensors: Tensors) -> dict[str, Any]:
    data = {name: value for name, value in vars(run).items() if name not in ("steering", "readings")}
    data["steering"] = spec_to_json(run.steering, tensors)
    if run.readings is not None:
        name = f"readings-{run.request_id}"
        tensors[name] = torch.from_numpy(np.ascontiguousarray(run.readings.values))
        data["readings"] = {
            "values": name,
            "positions": run.readings.positions.tolist(),
            "token_ids": run.readings.token_ids.tolist(),
            "layers": list(run.readings.layers),
            "directions": list(run.readings.directions),
        }
    return data


def _run_from_json(data: dict[str, Any], tensors: Tensors) -> Run:
    steering = spec_from_json(data.pop("steering"), tensors)
    kept = data.pop("readings", None)
    readings = None
    if kept is not None:
        readings = Readings(
            np.asarray(kept["positions"], dtype=np.int64),
            np.asarray(kept["token_ids"], dtype=np.int64),
            tuple(kept["layers"]),
            tuple(kept["directions"]),
            tensors[kept["values"]].numpy(),
        )
    if data["status"] == "running":  # when it was saved; it never ended here
        data["status"] = "aborted"
    return Run(**data, steering=steering, readings=readings)


def save(folder: str | Path, model: Mapping[str, Any], steering: SteeringSpec, history: History) -> Path:
    """Write a session; a run under way is written as far as it has come, and what JSON does not hold as its ``repr``.

    Raises
    ------
    SessionError
        If the folder cannot be written.
    """
    path = Path(folder).expanduser()
    tensors: Tensors = {}
    data = {
        "format": FORMAT,
        "model": dict(model),
        "steering": spec_to_json(steering, tensors),
        "runs": [_run_to_json(run, tensors) for run in history],
    }
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Written beside and moved: a save that fails, or is interrupted, leaves an older one whole.
        save_file(tensors, str(path / f"{TENSORS}.new"))
        text = json.dumps(data, indent=1, ensure_ascii=False, default=repr)
        (path / f"{JSON}.new").write_text(text, encoding="utf-8")
        for name in (TENSORS, JSON):
            (path / f"{name}.new").replace(path / name)
    except (OSError, SafetensorError) as error:  # the latter on a full disk
        raise SessionError(f"cannot write to {path}: {error}") from error
    return path


def load(folder: str | Path) -> tuple[dict[str, Any], SteeringSpec, list[Run]]:
    """Return the model's description, the steering and the runs that :func:`save` wrote.

    Raises
    ------
    SessionError
        If there is none, or it cannot be read.
    """
    path = Path(folder).expanduser()
    if not (path / JSON).is_file():
        raise SessionError(f"{path} holds no saved session: there is no {JSON}")
    try:
        data = json.loads((path / JSON).read_text(encoding="utf-8"))
        tensors = load_file(str(path / TENSORS))
        if data["format"] != FORMAT:
            raise SessionError(f"{path} was saved in format {data['format']}; this version reads format {FORMAT}")
        model = {name: data["model"][name] for name in MODEL}
        steering = spec_from_json(data["steering"], tensors)
        runs = [_run_from_json(run, tensors) for run in data["runs"]]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SessionError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return model, steering, runs
