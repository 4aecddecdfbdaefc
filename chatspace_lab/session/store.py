"""A session on disk: ``session.json`` for what can be read, ``session.safetensors`` for vectors and readings."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from chatspace_lab.analysis.direction import Direction
from chatspace_lab.errors import LabError, SessionError
from chatspace_lab.readings import Readings
from chatspace_lab.session.history import History, Run
from chatspace_lab.steering.directions import at_layer, is_per_layer
from chatspace_lab.steering.specs import AblationSpec, AddSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec
from chatspace_lab.steering.vectors import as_vector
from chatspace_lab.steering.where import Where, as_where

FORMAT = 1
JSON, TENSORS = "session.json", "session.safetensors"
FILE = re.compile(
    r".*\.(bin|ckpt|csv|gguf|gz|h5|html|ipynb|jsonl?|md|np[yz]|onnx|parquet|pickle|pkl|png|pth?|py|safetensors|sqlite|svg|"
    r"tar|tgz|txt|ya?ml|zip)",
    re.IGNORECASE,
)
"""A name that nobody gives a folder."""
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


def _vector_to_json(vector: Any, tensors: Tensors) -> dict[str, Any]:
    if not is_per_layer(vector):
        return {"vector": _put(as_vector(vector, "it"), tensors)}
    layers = vector if isinstance(vector, Mapping) else vector.layers
    kept = {str(int(at)): _put(as_vector(at_layer(vector, at, "it"), "it"), tensors) for at in layers}
    return {"layers": kept, **({"direction": vector.facts()} if isinstance(vector, Direction) else {})}


def _vector_from_json(data: Mapping[str, Any], tensors: Tensors) -> Any:
    if "vector" in data:
        return tensors[data["vector"]].clone()
    layers = {int(layer): tensors[name].clone() for layer, name in data["layers"].items()}
    return Direction.from_facts(data["direction"], layers) if "direction" in data else layers


def _vectors_to_json(vectors: Mapping[str, Any], tensors: Tensors, hidden_size: int) -> dict[str, Any]:
    kept = {}
    for name, vector in dict(vectors).items():
        own: Tensors = {}
        if not isinstance(name, str):
            warnings.warn(
                f"lab.vectors[{name!r}] is not saved: names must be text, got {type(name).__name__}", stacklevel=4
            )
            continue
        try:
            kept[name] = _vector_to_json(vector, own)
            json.dumps(kept[name])
            for tensor in own.values():
                if tensor.shape != (hidden_size,):
                    raise ValueError(f"it has {tensor.numel()} entries, and hidden_size is {hidden_size}")
        except (LabError, TypeError, ValueError) as error:
            kept.pop(name, None)
            warnings.warn(f"lab.vectors[{name!r}] is not saved, it is no vector of this model: {error}", stacklevel=4)
        else:
            tensors.update(own)
    return kept


def _check_vectors(tensors: Tensors, hidden_size: int) -> None:
    """Check that every vector is what its name, made from its contents, says.

    Raises
    ------
    ValueError
        If one is not.
    """
    for name, vector in tensors.items():
        if name.startswith("vector-") and (vector.shape != (hidden_size,) or _put(vector, {}) != name):
            raise ValueError(f"{name} has shape {list(vector.shape)} or contents that it was not saved with")


def save(
    folder: str | Path, model: Mapping[str, Any], steering: SteeringSpec, history: History, vectors: Mapping[str, Any]
) -> Path:
    """Write a session; a run under way is written as far as it has come, and what JSON does not hold as its ``repr``.

    Named vectors that are none are left out, with a warning.

    Raises
    ------
    SessionError
        If the folder cannot be written, or its name ends as a file's does.
    """
    path = Path(folder).expanduser()
    if FILE.fullmatch(path.name) and not path.is_dir():
        raise SessionError(
            f"{path.name}: a session is saved as a folder that holds {JSON} and {TENSORS}, not as {path.suffix}; give "
            f"a name without that ending"
        )
    tensors: Tensors = {}
    data = {
        "format": FORMAT,
        "model": dict(model),
        "steering": spec_to_json(steering, tensors),
        "runs": [_run_to_json(run, tensors) for run in history],
        "vectors": _vectors_to_json(vectors, tensors, model["hidden_size"]),
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


def load(folder: str | Path) -> tuple[dict[str, Any], SteeringSpec, list[Run], dict[str, Any]]:
    """Return the model's description, the steering, the runs and the named vectors that :func:`save` wrote.

    Raises
    ------
    SessionError
        If there is none, or it cannot be read.
    """
    path = Path(folder).expanduser()
    if path.name in (JSON, TENSORS):
        path = path.parent
    if not (path / JSON).is_file():
        raise SessionError(f"{path} holds no saved session: there is no {JSON}")
    try:
        data = json.loads((path / JSON).read_text(encoding="utf-8"))
        tensors = load_file(str(path / TENSORS))
        if data["format"] != FORMAT:
            raise SessionError(f"{path} was saved in format {data['format']}; this version reads format {FORMAT}")
        model = {name: data["model"][name] for name in MODEL}
        _check_vectors(tensors, model["hidden_size"])
        steering = spec_from_json(data["steering"], tensors)
        vectors = {name: _vector_from_json(kept, tensors) for name, kept in data.get("vectors", {}).items()}
        runs = [_run_from_json(run, tensors) for run in data["runs"]]
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise SessionError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return model, steering, runs, vectors
