"""The set-up script: what it says about a machine that will not do, and that a second run is quick."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SETUP = REPOSITORY / ".ci" / "setup"


def check(path: Path, commands: dict[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``setup --check`` with some commands replaced by shell lines."""
    for name, line in commands.items():
        file = path / name
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "CHATSPACE_LAB_EXTRA")}
    return subprocess.run(
        [SETUP, "--check"],
        env={**inherited, "PATH": f"{path}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


PAGES = "case $1 in _PHYS_PAGES) echo {pages};; PAGE_SIZE) echo 4096;; esac"
DISK = 'printf "Filesystem 1024-blocks Used Available Capacity Mounted\\n/dev/x 9 9 {kb} 9%% /\\n"'
NO_GPU = {"nvidia-smi": "exit 9"}
OLD_PYTHONS = dict.fromkeys(("python3.11", "python3.12", "python3.13", "python3"), "exit 1")


def test_this_machine_will_do(tmp_path: Path) -> None:
    done = check(tmp_path, NO_GPU)
    assert done.returncode == 0
    assert done.stderr.startswith("setup: this machine will do: Python 3.1")
    assert done.stderr.endswith("extra cpu\n")


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        ({"uname": "[ $1 = -s ] && echo Darwin || echo arm64"}, "and this is Darwin arm64"),
        ({"uname": "[ $1 = -s ] && echo Linux || echo riscv64"}, "and this is Linux riscv64"),
        (OLD_PYTHONS, "Python 3.11, 3.12 or 3.13 is needed and not on PATH"),
        ({"getconf": PAGES.format(pages=1_000_000)}, "6 GB of memory are needed and this machine has 4 GB."),
        ({"df": DISK.format(kb=3_000_000)}, "and there are 3 GB: free some"),
    ],
)
def test_a_machine_that_will_not_do(tmp_path: Path, commands: dict[str, str], said: str) -> None:
    done = check(tmp_path, {**NO_GPU, **commands})
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_named_python_that_will_not_do(tmp_path: Path) -> None:
    done = check(tmp_path, {**NO_GPU, "ancient": "exit 1"}, PYTHON="ancient")
    assert done.returncode == 1
    assert done.stderr == "setup: PYTHON=ancient is not a Python 3.11, 3.12 or 3.13.\n"


def test_a_python_without_venv(tmp_path: Path) -> None:
    done = check(tmp_path, {**NO_GPU, "bare": 'case "$2" in *ensurepip*) exit 1;; esac'}, PYTHON="bare")
    assert done.returncode == 1
    assert done.stderr.startswith("setup: bare has no venv module: install it")


def test_a_gpu_is_seen(tmp_path: Path) -> None:
    gpu = {"nvidia-smi": 'echo "GPU 0: NVIDIA H200"', "df": DISK.format(kb=90_000_000)}
    assert check(tmp_path, gpu).stderr.endswith("extra gpu\n")
    assert check(tmp_path, gpu, CHATSPACE_LAB_EXTRA="cpu").stderr.endswith("extra cpu\n")
    assert "is cpu or gpu, not 'tpu'" in check(tmp_path, gpu, CHATSPACE_LAB_EXTRA="tpu").stderr
    assert "20 GB of free disk" in check(tmp_path, {"df": DISK.format(kb=15_000_000)}).stderr


def test_long_steps_say_that_they_still_run(tmp_path: Path) -> None:
    """Also in a log, and without a word of their own; the step's own output and status pass through."""
    functions = [
        part for part in re.split(r"\n(?=\w+\(\) )", SETUP.read_text()) if part.startswith(("say()", "busy()"))
    ]
    code = "\n".join(["set -euo pipefail", *functions, "busy 'unpacking' bash -c 'sleep 3.5; echo here; exit 7'"])
    env = {**os.environ, "HEARTBEAT_S": "1"}
    done = subprocess.run(["bash", "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "here\n")
    told = done.stderr.splitlines()
    assert len(told) >= 2
    assert all(re.fullmatch(r"setup:   still unpacking: \d s", line) for line in told), told
