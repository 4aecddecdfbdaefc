"""Every architecture of tests/tiny.py in an engine of its own, beside Hugging Face; a table of what came of it.

``python -m tests.architectures [names …] [--markdown FILE]``. The exit code is 1 if an architecture is neither right,
nor refused by name, nor one that plain vLLM cannot run here either.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from chatspace_lab import AblationSpec, AddSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec, VLLMSteerModel
from chatspace_lab.errors import EngineStartError, LabError, UnsupportedError
from tests import tiny
from tests.oracle import Oracle, error

TOLERANCE = 1e-4
GENERATOR = torch.Generator().manual_seed(11)
V, U, W = torch.randn(3, tiny.HIDDEN, generator=GENERATOR)
SPECS: dict[str, SteeringSpec] = {
    "none": SteeringSpec.none(),
    "add": SteeringSpec.at([0, 3], AddSpec(V, 2.0)),
    "cap": SteeringSpec.at(1, ProjectionCapSpec(U, min=-0.5, max=0.25)),
    "ablate": SteeringSpec.at([2, 3], AblationSpec(W, 0.0)),
    "all": SteeringSpec(
        layers={
            layer: LayerSteeringSpec(
                add=AddSpec(V, 0.5 + layer),
                projection_cap=ProjectionCapSpec(U, max=0.5),
                ablation=AblationSpec(W, -1.0),
            )
            for layer in range(tiny.LAYERS)
        }
    ),
}
PROMPTS = [[5] * 7, [9, 300, 17, 41, 8], list(range(100, 141))]
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128}
START_OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 27, "enforce_eager": True}


async def compare(model: VLLMSteerModel, oracle: Oracle) -> dict[str, float]:
    """Return, for each of :data:`SPECS`, the largest error of a row at any layer, prompt or position.

    Prompts and specs share a batch. Every row of every layer is compared, of the prompt and of what was generated.
    """
    assert (model.hidden_size, model.layer_count) == (tiny.HIDDEN, tiny.LAYERS)
    cases = [(prompt, name) for prompt in PROMPTS for name in SPECS]
    _, handles = await model.generate(
        [prompt for prompt, _ in cases],
        temperature=0.0,
        max_tokens=6,
        ignore_eos=True,
        detokenize=False,
        capture_layers=list(range(tiny.LAYERS)),
        steering=[SPECS[name] for _, name in cases],
    )
    await model.fetch_captures_batch(handles)
    worst = dict.fromkeys(SPECS, 0.0)
    for (prompt, name), handle in zip(cases, handles, strict=True):
        assert handle.token_ids[: len(prompt)] == prompt
        assert len(handle.token_ids) == len(prompt) + 5
        wanted = oracle.residuals(handle.token_ids, SPECS[name])
        for layer in range(tiny.LAYERS):
            worst[name] = max(worst[name], error(handle.hidden(layer), wanted[layer]))
    return worst


@dataclass
class Result:
    """A row of the table. ``verdict`` is "right", "refused", "not buildable" or "WRONG"."""

    name: str
    architecture: str
    verdict: str
    reason: str = ""
    form: str = ""
    captures: float | None = None
    operations: float | None = None

    def row(self) -> str:
        """Return the row in markdown."""
        numbers = " | ".join("" if value is None else f"{value:.0e}" for value in (self.captures, self.operations))
        verdict = f"{self.verdict}: {self.reason}" if self.reason else self.verdict
        return f"| {self.name} | {self.architecture} | {self.form} | {numbers} | {verdict.replace('|', '/')} |"


def _architecture(folder: str) -> str:
    return json.loads((Path(folder) / "config.json").read_text())["architectures"][0]


def _one_line(reason: BaseException | str) -> str:
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    if "validation error" in lines[0]:  # pydantic's; what it is follows
        del lines[0]
    wanted = lines[0].partition(" [type=")[0]
    return wanted if len(wanted) <= 200 else f"{wanted[:197]}..."


def _try(name: str, folder: str) -> Result:
    """Start an engine of this model and compare it. Runs in a process of its own."""
    architecture = _architecture(folder)
    options = {**OPTIONS, **{key: value for key, value in START_OPTIONS.items() if key != "enforce_eager"}}
    try:
        from chatspace_lab import VLLMSteeringConfig

        model = VLLMSteerModel(VLLMSteeringConfig(folder, **options), enforce_eager=True)
    except UnsupportedError as refusal:
        return Result(name, architecture, "refused", _one_line(refusal).removeprefix(f"{architecture}: "))
    except EngineStartError as failure:
        return Result(name, architecture, "WRONG", _one_line(failure))
    try:
        form = model._client.facts.form
        worst = asyncio.run(compare(model, Oracle(folder, attention=tiny.ATTENTION.get(name, "eager"))))
    except LabError as failure:
        return Result(name, architecture, "WRONG", _one_line(failure), form)
    finally:
        model.close()
    captures, operations = worst.pop("none"), max(worst.values())
    verdict = "right" if max(captures, operations) < TOLERANCE else "WRONG"
    return Result(name, architecture, verdict, "", form, captures, operations)


def _try_plain(folder: str) -> str:
    """Return why plain vLLM does not run this model here, or nothing if it does. Runs in a process of its own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the error is then raised here
    from vllm import LLM, SamplingParams

    try:
        engine = LLM(folder, **OPTIONS, **START_OPTIONS)
        engine.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
    except Exception as failure:  # noqa: BLE001 - whatever it is, it is the answer
        where = traceback.extract_tb(failure.__traceback__)[-1]
        what = _one_line(failure) if str(failure) else f"{Path(where.filename).name}, {where.name}: {where.line}"
        return f"{type(failure).__name__}: {what}"
    return ""


def _child(mode: str, name: str, folder: str, answer: str) -> None:
    """Write what came of one model to the file ``answer``."""
    found = asdict(_try(name, folder)) if mode == "ours" else {"reason": _try_plain(folder)}
    Path(answer).write_text(json.dumps(found))


def _run_child(mode: str, name: str, folder: str, timeout_s: float) -> dict[str, Any] | str:
    """Run :func:`_child` where a crash or a hang cannot end us, and return its answer, or what happened instead."""
    answer, log = Path(folder).with_name(f"{mode}.json"), Path(folder).with_name(f"{mode}.log")
    code = f"from tests.architectures import _child; _child({mode!r}, {name!r}, {folder!r}, {str(answer)!r})"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"not done after {timeout_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if answer.exists():
        return json.loads(answer.read_text())
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit code {process.returncode}: {lines[-1] if lines else ''}"


def examine(name: str, timeout_s: float) -> Result:
    """Build one model and return what came of it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny.build(name, Path(scratch) / name)
        found = _run_child("ours", name, folder, timeout_s)
        result = Result(name, _architecture(folder), "WRONG", found) if isinstance(found, str) else Result(**found)
        if result.verdict == "WRONG" and result.captures is None:
            plain = _run_child("plain", name, folder, timeout_s)
            reason = plain if isinstance(plain, str) else plain["reason"]
            if reason:  # it is not us
                result.verdict, result.reason = "not buildable", reason
        return result


def table(results: list[Result]) -> str:
    """Return all of it in markdown, what is right first."""
    order = ["right", "refused", "not buildable", "WRONG"]
    rows = sorted(results, key=lambda result: (order.index(result.verdict), result.architecture.lower()))
    return "\n".join(
        [
            "| model | architecture | what a decoder block returns | captures, error | operations, error | verdict |",
            "| --- | --- | --- | --- | --- | --- |",
            *(result.row() for result in rows),
            "",
        ]
    )


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(tiny.CONFIGS)}; all of them if none")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="where the table is written, too")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for one engine (default: %(default)s)")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in tiny.CONFIGS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    results = []
    for name in arguments.names or tiny.CONFIGS:
        start = time.monotonic()
        results.append(examine(name, arguments.timeout_s))
        print(f"{results[-1].row()} {time.monotonic() - start:.0f} s", flush=True)
    print(f"\n{table(results)}")
    if arguments.markdown is not None:
        arguments.markdown.write_text(table(results))
    counts = {result.verdict: 0 for result in results}
    for result in results:
        counts[result.verdict] += 1
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int("WRONG" in counts)


if __name__ == "__main__":
    sys.exit(main())
