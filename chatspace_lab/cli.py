"""The command ``chatspace-lab``: demo, smoke, models, verify and bench.

Exit codes: 0 well done, 1 a check failed, 2 it could not be run as asked.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from chatspace_lab import __version__
from chatspace_lab.errors import LabError
from chatspace_lab.quiet import quieten


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chatspace-lab",
        description="Steer a language model on vLLM and read its activations. Without --model-name a packaged model of "
        "135 million weights is used.",
    )
    parser.add_argument("--version", action="version", version=f"chatspace-lab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="one prompt, plain and steered, and what its activations look like")
    demo.add_argument("--prompt", default="Tell me about your weekend.", help="what to ask (default: %(default)s)")
    demo.add_argument("--max-tokens", type=_positive, default=64, help="length of an answer (default: %(default)s)")

    smoke = commands.add_parser("smoke", help="check that a random vector arrives where it should")
    smoke.add_argument("--model-name", help="a folder, or a name on the Hugging Face hub")
    smoke.add_argument("--layer", type=int, default=2, help="layer to steer, counted from 0 (default: %(default)s)")
    smoke.add_argument("--scale", type=_length, default=5000.0, help="length of the vector (default: %(default)s)")
    smoke.add_argument("--max-tokens", type=_positive, default=32, help="length of an answer (default: %(default)s)")
    smoke.add_argument("--prompt", default="Question: What is the capital of France? Answer:", help="what to complete")
    smoke.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    smoke.add_argument("--seed", type=int, default=0, help="of the random vector (default: %(default)s)")

    commands.add_parser("models", help="list the architectures that were compared with Hugging Face; run nothing")

    verify = commands.add_parser("verify", help="a report in a minute or two: is all of it right on this machine?")
    verify.add_argument(
        "--model", "--model-name", dest="model_name", help="a folder, or a name on the Hugging Face hub"
    )
    verify.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    verify.add_argument(
        "--max-model-len", type=_positive, help="in tokens (default: 4096, or less if the model takes less)"
    )
    verify.add_argument("--tensor-parallel-size", type=_positive, default=1, help="GPUs (default: %(default)s)")
    verify.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.5,
        help="fraction of the GPU for the engine; Hugging Face's model goes beside it (default: %(default)s)",
    )
    verify.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")

    bench = commands.add_parser("bench", help="throughput beside plain vLLM, in the same run")
    bench.add_argument("--model-name", help="a folder, or a name on the Hugging Face hub")
    bench.add_argument("--batch", type=_positive, default=16, help="requests at a time (default: %(default)s)")
    bench.add_argument("--tokens", type=_positive, default=64, help="tokens of each answer (default: %(default)s)")
    bench.add_argument("--pairs", type=_positive, default=11, help="measurements of each kind (default: %(default)s)")
    bench.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    bench.add_argument(
        "--gpu", action="store_true", help="time per step with CUDA graphs on random weights, batch 1, 32 and 256"
    )
    bench.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-8b"], help="with --gpu (default: both)")
    bench.add_argument(
        "--batches", nargs="+", type=_positive, default=[1, 32, 256], help="with --gpu (default: 1 32 256)"
    )
    bench.add_argument("--tensor-parallel-size", type=_positive, default=1, help="GPUs, with --gpu (default: 1)")
    bench.add_argument(
        "--transport", action="store_true", help="bytes per second of captures, by shared memory and not"
    )
    bench.add_argument("--mib", type=_positive, default=64, help="of captures, with --transport (default: %(default)s)")
    bench.add_argument("--sweep", action="store_true", help="a sweep as one batch against its runs one by one")
    bench.add_argument(
        "--measured", action="store_true", help="print the figures measured before this release; run nothing"
    )
    bench.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    return parser


def _models() -> str:
    from chatspace_lab.runtime.compared import ABOUT, compared

    rows = [
        ("architecture", "model", "captures", "operations", "verdict"),
        *((row.architecture, row.model, row.captures, row.operations, row.verdict) for row in compared()),
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    lines = ("  ".join([*map(str.ljust, row[:4], widths), row[4]]) for row in rows)
    counts = Counter(row.verdict.partition(":")[0] for row in compared())
    total = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{ABOUT}\n\n" + "\n".join(lines) + f"\n\n{total}"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text}")
    return number


def _length(text: str) -> float:
    number = float(text)
    if not 0 < abs(number) < math.inf:
        raise argparse.ArgumentTypeError(f"expected the length of a vector that is not zero, got {text}")
    return number


def _command(name: str) -> Callable[[argparse.Namespace], Awaitable[int]]:
    if name == "demo":
        from chatspace_lab.demo import demo

        return demo
    if name == "smoke":
        from chatspace_lab.demo import smoke

        return smoke
    if name == "verify":
        from chatspace_lab.verify import verify

        return verify
    from chatspace_lab.bench import bench

    return bench


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Parameters
    ----------
    argv
        Arguments; None is those of the process.
    """
    arguments = _parser().parse_args(argv)
    if arguments.command == "models":
        print(_models())
        return 0
    if arguments.command == "bench" and arguments.measured:
        print(Path(__file__).with_name("measured.md").read_text(encoding="utf-8"), end="")
        return 0
    quieten()
    # asyncio's own handler cancels the command at its next await, and an engine's start has none for half a minute.
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        return asyncio.run(_run(arguments))
    except LabError as error:
        print(f"chatspace-lab: {_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("chatspace-lab: interrupted", file=sys.stderr)
        return 130
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


async def _run(arguments: argparse.Namespace) -> int:
    return await _command(arguments.command)(arguments)


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split())
