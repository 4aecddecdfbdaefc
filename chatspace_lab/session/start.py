"""What is shown while an engine starts: one line that changes, in a notebook and in a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from chatspace_lab import wire
from chatspace_lab.engine.asked import Prepared
from chatspace_lab.errors import EngineStartError
from chatspace_lab.models import DEMO_NAME, cache_dir
from chatspace_lab.session.line import Line

DOWNLOAD = "downloading the model"
DEMO = "making the demo model (once)"
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
"""What is fetched of a model on the Hugging Face hub."""
WEIGHTS = ["*.safetensors", "*.bin", "*.gguf"]
ENGINE_BYTES = 3 << 30
"""Memory that an engine on a CPU takes beside weights and KV cache: its processes, and room to load."""

READY = wire.STAGES[-1]
TIMES = "starts.json"
"""File in the cache folder with the seconds that starts took."""


class StartDisplay:
    """Shows a stage, the seconds since the start, and how long it took the last time; the last line stays."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = time.monotonic()
        self._stage = ""
        self._line = Line(log_s=30.0)
        self._known = _times().get(name)

    def __enter__(self) -> StartDisplay:
        return self

    def show(self, stage: str) -> None:
        """Say what is being done. Cheap to call again and again."""
        new, self._stage = stage != self._stage, stage
        seconds = time.monotonic() - self._begun
        usual = "" if stage == READY else self._usual(seconds)
        self._line.show(f"chatspace-lab · {self._name} · {stage} · {seconds:.0f} s{usual}", new=new)

    def _usual(self, seconds: float) -> str:
        if self._known:
            longer = round(seconds) > round(self._known)
            return f"{'; the last time' if longer else ' of about'} {self._known:.0f} s"
        return " of 20 to 60 s" if self._name == DEMO_NAME and round(seconds) <= 60 else ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and self._stage:
            self.show(f"{'interrupted' if issubclass(kind, KeyboardInterrupt) else 'failed'} while {self._stage}")
        elif self._stage == READY:
            _keep_time(self._name, time.monotonic() - self._begun)
        self._line.end(self._line.shown, keep=True)


def _times() -> dict[str, float]:
    """Return how many seconds each model took to start on this machine, the last time."""
    try:
        return dict(json.loads((cache_dir() / TIMES).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _keep_time(name: str, seconds: float) -> None:
    text = json.dumps({**_times(), name: round(seconds, 1)})
    with contextlib.suppress(OSError):  # it is no more than a hint
        cache_dir().mkdir(parents=True, exist_ok=True)
        (cache_dir() / TIMES).write_text(text, encoding="utf-8")


def find_model(name: str | None, show: Any) -> str:
    """Return a folder or name that the engine can load: None is the demo model; a hub model is downloaded first.

    Raises
    ------
    ConfigError
        If the name looks like a folder that is not there.
    EngineStartError
        If it cannot be downloaded.
    """
    from chatspace_lab.models import chosen_model, demo_is_made

    if name is None and not demo_is_made():
        show(DEMO)
    found = chosen_model(name)
    if not Path(found).is_dir():
        _download(found, show)
    return found


def _download(name: str, show: Any) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        snapshot_download(name, allow_patterns=PATTERNS, local_files_only=True)
    except LocalEntryNotFoundError:
        show(DOWNLOAD)
        try:
            snapshot_download(name, allow_patterns=PATTERNS)  # shows bars of its own
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise EngineStartError(
                f"cannot download {name} from the Hugging Face hub ({type(error).__name__}): give a model's folder, or "
                f"check the name and the network"
            ) from error
    except HFValidationError as error:
        raise EngineStartError(f"{name!r} is neither a folder nor a model's name on the Hugging Face hub") from error


def files_of(model: Any) -> dict[str, tuple[int, int]]:
    """Return size and time of each file that an engine reads from a model's folder; nothing for a model of the hub."""
    name = getattr(model, "model_name", model)
    if not isinstance(name, str | os.PathLike) or not (folder := Path(name).expanduser()).is_dir():
        return {}
    found = [file for pattern in (*PATTERNS, *WEIGHTS) for file in sorted(folder.glob(pattern))]
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in found}


def fits_beside(prepared: Prepared) -> bool:
    """Return whether there is memory for this engine beside those that run.

    On a CPU that is seen from the size of the weights' files and of the KV cache. On a GPU the answer is no: an engine
    takes most of its memory.
    """
    config = prepared.vllm_config
    if config.device_config.device_type != "cpu":
        return False
    folder = Path(config.model_config.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(str(folder), allow_patterns=PATTERNS, local_files_only=True))
    weights = sum(file.stat().st_size for pattern in WEIGHTS for file in folder.glob(pattern))
    needed = (
        2 * weights + (config.cache_config.kv_cache_memory_bytes or 0) + ENGINE_BYTES
    )  # bfloat16 may become float32
    return psutil.virtual_memory().available > needed
