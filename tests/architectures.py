"""Every architecture of tests/tiny.py in an engine of its own, beside Hugging Face; a table of what came of it.

``python -m tests.architectures [names …] [--markdown FILE] [--resume FILE]``. The exit code is 1 if an architecture is
neither right, nor refused by name, nor one that plain vLLM cannot run here either.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from chatspace_lab import AblationSpec, AddSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec, VLLMSteerModel
from chatspace_lab.engine.root_cause import OPAQUE, sentence
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
LONG = torch.randint(3, tiny.VOCABULARY, (600,), generator=GENERATOR).tolist()
PROMPTS = [[5] * 7, [9, 300, 17, 41, 8], list(range(100, 141)), LONG]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": tiny.CONTEXT,
    "max_num_batched_tokens": 512,  # the long prompt takes several steps
}
START_OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 27, "enforce_eager": True}


@dataclass
class Errors:
    """The largest error of a row at any layer, prompt or position, for each of :data:`SPECS`.

    ``cached`` is how many tokens of the long prompt came out of the prefix cache when it was asked again; None if the
    engine has none.
    """

    worst: dict[str, float]
    cached: int | None


async def compare(model: VLLMSteerModel, oracle: Oracle) -> Errors:
    """Compare every row of every layer, of prompts and of what was generated, with Hugging Face.

    Prompts and specs share a batch. The long prompt goes beyond a block of the cache, a chunk of prefill and a sliding
    window; asked again, it is read from the prefix cache, and the rows after it are compared.
    """
    assert (model.hidden_size, model.layer_count) == (tiny.HIDDEN, tiny.LAYERS)
    worst = dict.fromkeys(SPECS, 0.0)
    await compare_prompts(model, oracle, PROMPTS, "all", worst)
    cached = await compare_prompts(model, oracle, [LONG], "answer", worst)
    if not model._client._engine.vllm_config.cache_config.enable_prefix_caching:
        return Errors(worst, None)
    return Errors(worst, cached)


async def compare_prompts(
    model: VLLMSteerModel, oracle: Oracle, prompts: list[list[int]], where: str, worst: dict[str, float]
) -> int:
    """Raise each of ``worst`` to what is seen; return the fewest tokens that came from the prefix cache."""
    cases = [(prompt, name) for prompt in prompts for name in SPECS]
    outputs, handles = await model.generate(
        [prompt for prompt, _ in cases],
        temperature=0.0,
        max_tokens=6,
        ignore_eos=True,
        detokenize=False,
        capture_layers=list(range(tiny.LAYERS)),
        capture_where=where,
        steering=[SPECS[name] for _, name in cases],
        raw_output=True,
    )
    await model.fetch_captures_batch(handles)
    for (prompt, name), output, handle in zip(cases, outputs, handles, strict=True):
        sequence = [*prompt, *output.outputs[0].token_ids[:-1]]
        assert len(sequence) == len(prompt) + 5
        first = 0 if where == "all" else len(prompt)
        assert handle.positions == list(range(first, len(sequence)))
        wanted = oracle.residuals(sequence, SPECS[name])[:, first:]
        for layer in range(tiny.LAYERS):
            worst[name] = max(worst[name], error(handle.hidden(layer), wanted[layer]))
    return min(output.num_cached_tokens or 0 for output in outputs)


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
    cached: int | None = None

    def row(self) -> str:
        """Return the row in markdown."""
        numbers = " | ".join("" if value is None else f"{value:.0e}" for value in (self.captures, self.operations))
        verdict = f"{self.verdict}: {self.reason}" if self.reason else self.verdict
        cached = "" if self.captures is None else "off" if self.cached is None else self.cached
        row = f"{self.name} | {self.architecture} | {self.form} | {numbers} | {cached} | {verdict.replace('|', '/')}"
        return f"| {row} |"


def _architecture(folder: str) -> str:
    return json.loads((Path(folder) / "config.json").read_text())["architectures"][0]


def _try(name: str, folder: str) -> Result:
    """Start an engine of this model and compare it."""
    architecture = _architecture(folder)
    options = {**OPTIONS, **{key: value for key, value in START_OPTIONS.items() if key != "enforce_eager"}}
    try:
        from chatspace_lab import VLLMSteeringConfig

        model = VLLMSteerModel(VLLMSteeringConfig(folder, **options), enforce_eager=True)
    except UnsupportedError as refusal:
        return Result(name, architecture, "refused", sentence(refusal).removeprefix(f"{architecture}: "))
    except EngineStartError as failure:
        return Result(name, architecture, "WRONG", sentence(failure))
    try:
        form = model._client.facts.form
        found = asyncio.run(compare(model, Oracle(folder, attention=tiny.ATTENTION.get(name, "eager"))))
    except (LabError, AssertionError) as failure:
        return Result(name, architecture, "WRONG", sentence(failure), form)
    finally:
        model.close()
    captures, operations = found.worst.pop("none"), max(found.worst.values())
    verdict = "right" if max(captures, operations) < TOLERANCE else "WRONG"
    return Result(name, architecture, verdict, "", form, captures, operations, found.cached)


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
        what = sentence(failure) if str(failure) else f"{Path(where.filename).name}, {where.name}: {where.line}"
        return f"{type(failure).__name__}: {what}"
    return ""


def _own_session(log: str) -> None:
    """Give a process of the pool its own output, and its own group to be killed with."""
    os.setsid()
    with open(log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


class Laboratory:
    """A process that tries one model after another, so that Python's imports are paid once; replaced if it dies."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pool: ProcessPoolExecutor | None = None
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 - closed by close()

    def run(self, what: Callable[..., Any], *arguments: Any) -> Any:
        """Return what ``what`` returns, or a sentence about what happened instead."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, _own_session, (self._log.name,))
        try:
            return self._pool.submit(what, *arguments).result(self._timeout_s)
        except TimeoutError:
            self.close()
            return f"not done after {self._timeout_s:.0f} s"
        except BrokenProcessPool:
            self.close()
            lines = Path(self._log.name).read_text(errors="replace").splitlines()
            return f"the process died: {lines[-1] if lines else ''}"
        except Exception as failure:  # noqa: BLE001 - it is what came of it
            return f"{type(failure).__name__}: {sentence(failure)}"

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._pool is not None:
            for pid in list(self._pool._processes or ()):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def examine(name: str, laboratory: Laboratory, timeout_s: float) -> Result:
    """Build one model and return what came of it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny.build(name, Path(scratch) / name)
        found = laboratory.run(_try, name, folder)
        result = Result(name, _architecture(folder), "WRONG", found) if isinstance(found, str) else found
        if result.verdict == "WRONG" and result.captures is None:
            plain = Laboratory(timeout_s)  # what it needs of the environment must reach nobody else
            reason = plain.run(_try_plain, folder)
            plain.close()
            if reason:  # it is not us
                opaque = any(words in reason for words in OPAQUE)  # then ours says more
                result.verdict, result.reason = "not buildable", result.reason if opaque else reason
        return result


def table(results: list[Result]) -> str:
    """Return all of it in markdown, what is right first."""
    order = ["right", "refused", "not buildable", "WRONG"]
    rows = sorted(results, key=lambda result: (order.index(result.verdict), result.architecture.lower()))
    return "\n".join(
        [
            "| model | architecture | a block returns | captures, error | operations, error | cached | verdict |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(result.row() for result in rows),
            "",
        ]
    )


def _read(file: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(tiny.CONFIGS)}; all of them if none")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="where the table is written, too")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="results, a line each: those in it are taken over, new ones added"
    )
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for one engine (default: %(default)s)")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in tiny.CONFIGS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    results = _read(arguments.resume) if arguments.resume is not None else []
    known = {result.name for result in results}
    laboratory = Laboratory(arguments.timeout_s)
    for name in arguments.names or tiny.CONFIGS:
        if name in known:
            continue
        start = time.monotonic()
        results.append(examine(name, laboratory, arguments.timeout_s))
        print(f"{results[-1].row()} {time.monotonic() - start:.0f} s", flush=True)
        if arguments.resume is not None:
            with arguments.resume.open("a") as file:
                file.write(json.dumps(asdict(results[-1])) + "\n")
    laboratory.close()
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
