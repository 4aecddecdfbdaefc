"""A real JupyterLab for tests: its server, one notebook, the kernel behind it, and a page in Debian's chromium."""

from __future__ import annotations

import ast
import json
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jupyter_client.blocking import BlockingKernelClient

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
COMMS = "@jupyterlab/apputils-extension/kernels-settings.jupyterlab-settings"
"""Whether the messages of widgets go beside cells (ipykernel 7), or queue up behind them (ipykernel 6)."""
SETTINGS = {
    "@jupyter-widgets/jupyterlab-manager/plugin.jupyterlab-settings": {"saveState": True},
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
}


def notebook(cells: Sequence[str], kernel: str = "python3") -> dict[str, Any]:
    """Return a notebook with these code cells."""
    return {
        "cells": [
            {
                "cell_type": "code",
                "id": f"c{at}",
                "metadata": {},
                "source": text,
                "outputs": [],
                "execution_count": None,
            }
            for at, text in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"name": kernel, "display_name": "Python 3", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


class Server:
    """A JupyterLab server on a free port, with a token and settings of its own.

    Without ``kernels`` it knows of none, as a machine on which a notebook is only read.
    """

    def __init__(self, folder: Path, *, kernels: bool = True, options: Sequence[str] = ()) -> None:
        self.folder, self.token = folder, secrets.token_hex(16)
        self.root, self._runtime = folder / "notebooks", folder / "runtime"
        self.root.mkdir(parents=True)
        self._runtime.mkdir()
        for name, content in SETTINGS.items():
            self.set(name, content)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        env = {
            **os.environ,
            "JUPYTER_RUNTIME_DIR": str(self._runtime),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        options = [
            *options,
            f"--ServerApp.port={self.port}",
            "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={self.token}",
        ]
        options += [f"--ServerApp.root_dir={self.root}", "--ServerApp.allow_root=True", "--no-browser"]
        options += ["--LabApp.expose_app_in_browser=True"]  # so that tests can run its commands
        if not kernels:
            options += ["--KernelSpecManager.ensure_native_kernel=False"]
            options += ["--KernelSpecManager.allowed_kernelspecs=none"]
        self._log = (folder / "jupyter.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options], env=env, stdout=self._log, stderr=self._log, cwd=self.root
        )
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + 90
        while True:
            try:
                self.api("status")
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.folder / "jupyter.log").read_text()[-3000:]) from None
                time.sleep(0.1)

    def api(self, path: str) -> Any:
        """Return what the server's REST interface answers."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/{path}", headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def url(self, name: str) -> str:
        """Return the address of a notebook."""
        return f"http://127.0.0.1:{self.port}/lab/tree/{name}?token={self.token}&reset"

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Put a notebook there."""
        (self.root / name).write_text(json.dumps(content))

    def set(self, name: str, content: dict[str, Any]) -> None:
        """Write settings of the user, which pages read when they are loaded."""
        path = self.folder / "settings" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))

    def kernel(self, name: str) -> Kernel:
        """Connect to the kernel of an open notebook."""
        deadline = time.monotonic() + 60
        while True:
            found = [each["kernel"]["id"] for each in self.api("sessions") if each["path"] == name and each["kernel"]]
            file = self._runtime / f"kernel-{found[0]}.json" if found else None
            if file is not None and file.exists():
                return Kernel(file)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} has no kernel")
            time.sleep(0.1)

    def close(self) -> None:
        """Stop the server and its kernels."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class Kernel:
    """A second client of a notebook's kernel: it looks at what the page has done."""

    def __init__(self, file: Path) -> None:
        self._client = BlockingKernelClient(connection_file=str(file))
        self._client.load_connection_file()
        self._client.hb_channel.time_to_dead = 30.0  # 1 s by default: a busy machine is no dead kernel
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def start(self, code: str) -> str:
        """Let a cell begin, and return what :meth:`finish` takes."""
        name = str(self._client.execute(code))
        while True:
            message = self._client.get_iopub_msg(timeout=60)
            if message["msg_type"] == "execute_input" and message["parent_header"].get("msg_id") == name:
                return name

    def run(self, code: str, timeout_s: float = 120) -> str:
        """Run a cell that must not fail, and return what it printed."""
        return self.finish(self._client.execute(code), timeout_s, code)

    def finish(self, name: str, timeout_s: float = 120, code: str = "") -> str:
        """Wait until a cell that must not fail has ended, and return what it printed."""
        printed, deadline = [], time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != name:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                printed.append(content["text"])
            elif kind == "error":
                raise AssertionError("\n".join(content["traceback"])[-3000:])
            elif kind == "status" and content["execution_state"] == "idle":
                return "".join(printed)
        raise TimeoutError(f"a cell did not end within {timeout_s} s: {code[:200]}")

    def value(self, expression: str) -> Any:
        """Return the value of an expression."""
        return ast.literal_eval(self.run(f"print(repr({expression}))"))

    def close(self) -> None:
        """Leave the kernel to itself."""
        self._client.stop_channels()
