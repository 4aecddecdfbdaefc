"""Real Jupyter kernels for tests: cells are sent as a front end sends them, and the stop button is one."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

OLD_KERNEL = Path(__file__).parents[2] / ".venv" / "ipykernel6"
"""ipykernel 6, where `.ci/setup` puts it."""

PRELUDE = """
import os
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["TQDM_DISABLE"] = "0"
"""


@dataclass
class Reply:
    """What a cell gave."""

    outputs: list[dict[str, Any]] = field(default_factory=list)
    status: str = ""
    error: str = ""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """What it printed, and its value as plain text."""
        parts = []
        for output in self.outputs:
            if "text" in output:
                parts.append(output["text"])
            elif "data" in output:
                parts.append(output["data"].get("text/plain", ""))
        return "".join(parts)


class Kernel:
    """A kernel and its front end."""

    def __init__(self, env: dict[str, str]) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=env)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    @property
    def pid(self) -> int:
        """Of the kernel's process."""
        pid = self.manager.provisioner.pid
        assert pid is not None
        return int(pid)

    def send(self, code: str) -> str:
        """Queue a cell and return its name."""
        return str(self.client.execute(code))

    def begin(self, code: str) -> str:
        """Send a cell and wait until it runs; its first output is lost."""
        name = self.send(f"print('it runs')\n{code}")
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") == name and message["msg_type"] == "stream":
                return name

    def wait(self, name: str, timeout_s: float = 400) -> Reply:
        """Wait until a cell has ended. Cells must be waited for in the order in which they were sent."""
        begun = time.monotonic()
        reply = Reply()
        while True:
            left = timeout_s - (time.monotonic() - begun)
            if left <= 0:
                raise TimeoutError(f"a cell did not end within {timeout_s} s: {reply.text[-2000:]}")
            try:
                message = self.client.get_iopub_msg(timeout=min(left, 1))
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != name:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind in ("stream", "execute_result", "display_data", "update_display_data"):
                reply.outputs.append(content)
            elif kind == "error":
                reply.error = f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                break
        while True:
            answer = self.client.get_shell_msg(timeout=30)
            if answer["parent_header"].get("msg_id") == name:
                break
        reply.status = answer["content"]["status"]
        reply.seconds = time.monotonic() - begun
        return reply

    def run(self, code: str, timeout_s: float = 400) -> Reply:
        """Run a cell that must not fail."""
        reply = self.wait(self.send(code), timeout_s)
        assert reply.status == "ok", f"{reply.error}\n{reply.text[-3000:]}"
        return reply

    def stop(self) -> None:
        """Press the stop button."""
        self.manager.interrupt_kernel()

    def close(self) -> None:
        """End it as Jupyter does."""
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=False)


@contextmanager
def kernel(env: dict[str, str], version: int = 7) -> Iterator[Kernel]:
    """Start a kernel of ipykernel 6 or 7."""
    env = dict(env)
    if version == 6:
        if not (OLD_KERNEL / "ipykernel").is_dir():
            raise RuntimeError("ipykernel 6 is not there; make setup puts it into .venv/ipykernel6")
        env["PYTHONPATH"] = str(OLD_KERNEL)
    started = Kernel(env)
    try:
        found = started.run(PRELUDE + "import ipykernel; print(ipykernel.__version__)").text
        assert found.startswith(f"{version}."), found
        yield started
    finally:
        started.close()
