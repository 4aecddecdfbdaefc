"""What ``chatspace-lab bench --transport`` measures: how captured rows reach this process.

One engine, and the same rows twice in turns: through shared memory, and as messages. Rows that come through shared
memory are mapped, and their pages arrive when they are first touched; so what is timed, and compared, ends when every
byte of the tensors has been read once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chatspace_lab.engine.config import VLLMSteeringConfig
    from chatspace_lab.engine.model import VLLMSteerModel

TRANSPORT_TARGET = 5.0
"""Least median ratio of bytes per second, shared memory over messages."""


async def fetch_once(model: VLLMSteerModel, rows: int, *, shared: bool, token: int) -> tuple[int, float, float]:
    """Capture ``rows`` rows of every layer and fetch them.

    Returns
    -------
    tuple
        Bytes; seconds until the tensors were there; seconds until all of them had been read.
    """
    import torch

    prompt = [token] * rows
    _, [handle] = await model.generate(
        [prompt], max_tokens=1, temperature=0.0, detokenize=False, capture_layers=range(model.layer_count)
    )
    before, model._client.captures.shared = model._client.captures.shared, shared
    try:
        start = time.perf_counter()
        await handle.fetch()
        arrived = time.perf_counter() - start
    finally:
        model._client.captures.shared = before
    tensors = [handle.hidden(layer) for layer in handle.layer_indices]
    total = sum(int(tensor.view(torch.int16).max()) for tensor in tensors)
    done = time.perf_counter() - start
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    handle.close()
    if not total:
        raise RuntimeError("the captured rows are all zero")
    return nbytes, arrived, done


async def transports(model: VLLMSteerModel, nbytes: int, pairs: int) -> dict[str, list[tuple[int, float, float]]]:
    """Take turns, and return what :func:`fetch_once` said, per transport."""
    rows = nbytes // (model.layer_count * model.hidden_size * model.dtype.itemsize)
    found: dict[str, list[tuple[int, float, float]]] = {"shared": [], "bytes": []}
    for number in range(pairs + 1):
        for name, results in found.items():
            result = await fetch_once(model, rows, shared=name == "shared", token=100 + number)
            if number:  # the first of each is to warm up
                results.append(result)
    return found


def transport_config(name: str, dtype: str, nbytes: int) -> VLLMSteeringConfig:
    """Return the configuration of an engine whose model can take so long a prompt."""
    from chatspace_lab import VLLMSteeringConfig

    return VLLMSteeringConfig(name, dtype=dtype, use_tqdm_on_load=False, max_capture_bytes=8 * nbytes)


async def bench_transport(name: str, arguments: argparse.Namespace) -> int:
    """Measure, print the report, and return the exit code."""
    from chatspace_lab import VLLMSteerModel

    nbytes = arguments.mib << 20
    async with VLLMSteerModel(transport_config(name, arguments.dtype, nbytes)) as model:
        found = await transports(model, nbytes, arguments.pairs)
    print(f"\n{'MiB/s, median':<28}{'until there':>14}{'until all read':>16}")
    speed: dict[str, float] = {}
    for transport, results in found.items():
        mib = results[0][0] / (1 << 20)
        arrived, read = (mib / statistics.median(result[at] for result in results) for at in (1, 2))
        speed[transport] = read
        title = "through shared memory" if transport == "shared" else "as messages"
        print(f"{title:<28}{arrived:>14.0f}{read:>16.0f}")
    ratio = speed["shared"] / speed["bytes"]
    missed = ratio < TRANSPORT_TARGET
    verdict = "missed" if missed else "met"
    print(
        f"{mib:.1f} MiB, all read: {ratio:.1f} times as fast through shared memory; target {TRANSPORT_TARGET} {verdict}"
    )
    return int(arguments.check and missed)
