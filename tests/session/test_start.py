"""What is shown while an engine starts, and a model that cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chatspace_lab.session.start import StartDisplay


def test_a_log_file_gets_a_line_per_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with StartDisplay("a model") as display:
        for stage in ("loading", "loading", "loading", "ready", "ready"):
            display.show(stage)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rsplit(" · ", 1)[0] for line in lines] == [
        "chatspace-lab · a model · loading",
        "chatspace-lab · a model · ready",
    ]
    assert all(line.endswith(" s") for line in lines)


def test_it_says_how_long_it_will_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CHATSPACE_LAB_CACHE", str(tmp_path))
    for name in ("SmolLM2-135M-Instruct", "a model", "a model"):
        with StartDisplay(name) as display:
            display._begun -= 41
            display.show("loading")
            display.show("ready")
    with StartDisplay("a model") as display:
        display._begun -= 50
        display.show("loading")
    lines = capsys.readouterr().err.splitlines()
    assert lines[::2] == [
        "chatspace-lab · SmolLM2-135M-Instruct · loading · 41 s of 20 to 60 s",
        "chatspace-lab · a model · loading · 41 s",
        "chatspace-lab · a model · loading · 41 s of about 41 s",
        "chatspace-lab · a model · loading · 50 s; the last time 41 s",
    ]
    assert lines[-2] == "chatspace-lab · a model · ready · 41 s"
    (tmp_path / "starts.json").write_text("[")
    with StartDisplay("a model") as display:
        display.show("loading")


@pytest.mark.parametrize(
    ("error", "words"), [(KeyboardInterrupt, "interrupted while loading"), (OSError, "failed while loading")]
)
def test_the_last_line_says_how_it_ended(
    capsys: pytest.CaptureFixture[str], error: type[BaseException], words: str
) -> None:
    with pytest.raises(error), StartDisplay("a model") as display:
        display.show("loading")
        raise error
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_model_that_cannot_be_downloaded_is_said_at_once() -> None:
    code = """
from chatspace_lab.errors import ConfigError, EngineStartError
from chatspace_lab.session.start import find_model
shown = []
for name in ("somebody/some-model", "no*name", "./no-folder"):
    try:
        find_model(name, shown.append)
    except (ConfigError, EngineStartError) as error:
        print(type(error).__name__, error)
print(shown)
"""
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}  # a port that nobody serves
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("EngineStartError cannot download somebody/some-model from the Hugging Face hub")
    assert lines[1].startswith("EngineStartError 'no*name' is neither a folder nor a model's name")
    assert lines[2] == "ConfigError model ./no-folder: there is no such folder"
    assert lines[3] == "['downloading the model']"


def test_a_reload_of_the_module_forgets_no_lab() -> None:
    code = (
        "import importlib, chatspace_lab.session.lab as m; m._running.append(1); importlib.reload(m); print(m._running)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1]"
