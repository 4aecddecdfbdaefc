"""What ``chatspace-lab verify`` checks: that steering and captures are right on this machine, with this model.

Every check compares numbers; none looks at text. A check that cannot be made says why, and does not count as passed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatspace_lab.errors import ConfigError
from chatspace_lab.models import chosen_model
from chatspace_lab.steering.specs import (
    AblationSpec,
    AddSpec,
    LayerSteeringSpec,
    Operation,
    ProjectionCapSpec,
    SteeringSpec,
)

if TYPE_CHECKING:
    import torch

    from chatspace_lab.engine.model import VLLMSteerModel

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "Rivers carry water from the mountains to the sea, and on their way they",
    "Question: How many days are there in a week? Answer:",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
ANSWER_TOKENS = 16
MODEL_LEN, STEP_TOKENS = 4096, 2048
NEIGHBOURS, PLAIN_RUNS = 8, 4
COST_BATCH, COST_TOKENS, COST_PAIRS = 8, 32, 5


@dataclass(frozen=True)
class Check:
    """One line of the report: ``passed`` None could not be checked."""

    name: str
    passed: bool | None
    text: str

    def __str__(self) -> str:
        verdict = {True: "ok", False: "FAILED", None: "not checked"}[self.passed]
        return f"{self.name:<24}{verdict:<13}{self.text}"


async def verify(arguments: argparse.Namespace) -> int:
    """Check a model, print the report, and return the exit code."""
    name = chosen_model(arguments.model_name)
    print(f"chatspace-lab verify: {name}", flush=True)
    from chatspace_lab import VLLMSteeringConfig, VLLMSteerModel

    started = time.perf_counter()
    config = VLLMSteeringConfig(
        model_name=name,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len or min(MODEL_LEN, _longest(name)),
        max_num_batched_tokens=STEP_TOKENS,
        tensor_parallel_size=arguments.tensor_parallel_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        use_tqdm_on_load=False,
    )
    failed = unknown = 0
    async with VLLMSteerModel(config, enforce_eager=arguments.enforce_eager or None) as model:
        for line in _facts(model):
            print(line)
        print(f"{'engine':<24}{'started':<13}in {time.perf_counter() - started:.0f} s", flush=True)
        checks = [graphs(model, arguments.enforce_eager)]
        print(checks[0], flush=True)
        for check in (steering_acts, neighbours_untouched, matches_hugging_face):
            checks.append(await check(model))
            print(checks[-1], flush=True)
        for line in await cost(model):
            print(line, flush=True)
        failed = sum(check.passed is False for check in checks)
        unknown = sum(check.passed is None for check in checks)
    took = f"in {time.perf_counter() - started:.0f} s"
    if failed:
        print(f"\nFAILED: {failed} of {len(checks)} checks, {took}")
    else:
        rest = f", {unknown} could not be made" if unknown else ""
        print(f"\nok: {len(checks) - unknown} of {len(checks)} checks passed{rest}, {took}")
    return int(failed > 0)


def _longest(name: str) -> int:
    """Return the longest context that a model was trained for, or :data:`MODEL_LEN` if it does not say."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as error:
        raise ConfigError(
            f"model {name} was not found on the Hugging Face hub: check the name and the network, or give a folder"
        ) from error
    return getattr(config.get_text_config(), "max_position_embeddings", None) or MODEL_LEN


def _facts(model: VLLMSteerModel) -> Iterator[str]:
    facts = model._client.facts
    dtype = str(model.dtype).removeprefix("torch.")
    yield f"{'model':<24}{facts.architecture}, {model.layer_count} layers of {model.hidden_size}, {dtype}; {facts.form}"
    yield f"{'vLLM':<24}{facts.vllm_version}, {facts.runner.removeprefix('vllm.v1.worker.')}"


def graphs(model: VLLMSteerModel, asked_eager: bool) -> Check:
    """Say whether the engine replays CUDA graphs; off is a failure only where nobody asked for it."""
    import torch

    if not torch.cuda.is_available():
        return Check("CUDA graphs", True, "none: the model runs on a CPU")
    mode = str(getattr(model._client._engine.vllm_config.compilation_config.cudagraph_mode, "name", "NONE"))
    if mode != "NONE":
        return Check("CUDA graphs", True, f"on ({mode})")
    return Check("CUDA graphs", asked_eager, "off (--enforce-eager)" if asked_eager else "off, though nobody asked")


async def _rows(
    model: VLLMSteerModel, prompts: Sequence[Any], layers: Sequence[int], steering: Any, tokens: int
) -> list[tuple[list[int], torch.Tensor]]:
    """Return each prompt's token ids and rows [layers, rows, hidden_size], in the model's dtype."""
    import torch

    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    _, handles = await model.generate(prompts, capture_layers=layers, steering=steering, **sampling)
    await model.fetch_captures_batch(handles)
    found = [(list(h.token_ids), torch.stack([h.hidden(layer) for layer in layers])) for h in handles]
    for handle in handles:
        handle.close()
    return found


def _directions(model: VLLMSteerModel, count: int) -> torch.Tensor:
    """Return ``count`` unit vectors, [count, hidden_size] float32."""
    import torch

    drawn = torch.randn(count, model.hidden_size, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.normalize(drawn, dim=-1)


async def steering_acts(model: VLLMSteerModel) -> Check:
    """At every layer, alone: an added vector arrives as it is, a cap caps, an ablation removes, up to rounding."""
    import torch

    name, eps = "steering acts", torch.finfo(model.dtype).eps
    v, u, w = _directions(model, 3)
    layers = range(model.layer_count)
    [(_, plain)] = await _rows(model, [TEXTS[0]], layers, SteeringSpec.none(), 1)
    before = plain.float()
    worst = 0.0
    for layer in layers:
        rows = before[layer]
        length = float(rows.norm(dim=-1).median())
        bound = 0.25 * float((rows @ u).abs().median())
        specs: list[Operation] = [
            AddSpec(v, length),
            ProjectionCapSpec(u, -bound, bound),
            AblationSpec(w, 0.5),
        ]
        [(_, steered)] = await _rows(model, [TEXTS[0]], [layer], SteeringSpec.at(layer, *specs), 1)
        wanted = rows + length * v
        wanted = wanted + ((wanted @ u).clamp(-bound, bound) - wanted @ u)[:, None] * u
        wanted = wanted - 0.5 * (wanted @ w)[:, None] * w
        # Both runs were rounded to the model's dtype; the steered one twice: hidden state, and its sum with the rest.
        allowed = 3 * eps * (rows.norm(dim=-1) + wanted.norm(dim=-1))
        error = (steered[0].float() - wanted).norm(dim=-1)
        worst = max(worst, float((error / length).max()))
        if bool((error > allowed).any()):
            return Check(name, False, f"layer {layer}: a row is {float(error.max()):.3g} away from what was asked for")
        if not float((steered[0].float() - rows).norm(dim=-1).median()) > 0.5 * length:
            return Check(name, False, f"layer {layer}: the steered rows have not moved")
    return Check(
        name, True, f"add, cap and ablate at each of {model.layer_count} layers; worst error {worst:.1e} of a row"
    )


async def neighbours_untouched(model: VLLMSteerModel) -> Check:
    """Compare requests that share a batch with strongly steered ones with plain runs: at the last layer, bit by bit."""
    import torch

    name, last = "neighbours untouched", model.layer_count - 1
    v, u, w = _directions(model, 3)
    strong = SteeringSpec.at(
        range(model.layer_count), AddSpec(v, 50.0), ProjectionCapSpec(u, -0.1, 0.1), AblationSpec(w)
    )
    prompts = [TEXTS[index % len(TEXTS)] for index in range(NEIGHBOURS)]
    none = SteeringSpec.none()
    # Which requests share a step may change a row's last bits: plain runs show what bits there are.
    plain = [await _rows(model, prompts, [last], [none] * NEIGHBOURS, ANSWER_TOKENS) for _ in range(PLAIN_RUNS)]
    mixed = await _rows(model, prompts, [last], [strong if i % 2 else none for i in range(NEIGHBOURS)], ANSWER_TOKENS)
    same, furthest, spread = 0, 0.0, 0.0
    for index in range(0, NEIGHBOURS, 2):
        prompt_rows = [run[index][1][0] for run in plain]
        got = mixed[index][1][0]
        same += any(torch.equal(got, rows) for rows in prompt_rows)
        furthest = max(furthest, min(_apart(got, rows) for rows in prompt_rows))
        spread = max(spread, *(_apart(prompt_rows[0], rows) for rows in prompt_rows[1:]))
    moved = all(not torch.equal(mixed[i][1][0][:1], plain[0][i][1][0][:1]) for i in range(1, NEIGHBOURS, 2))
    if not moved:
        return Check(name, False, "the steered requests themselves were not steered")
    count = NEIGHBOURS // 2
    if same == count:
        return Check(name, True, f"{count} of {count} bit for bit, beside {count} steered at every layer")
    rounding = max(2 * spread, 4 * torch.finfo(model.dtype).eps)
    apart = f"the others {furthest:.2e} of a row away, plain runs among each other {spread:.2e}"
    text = f"{same} of {count} bit for bit; {apart}"
    return Check(name, furthest <= rounding, text)


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the median distance of two runs' prompt rows, relative to a row; answers may differ after a near tie."""
    a, b = one.float(), other.float()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median())


async def _long_rows(
    model: VLLMSteerModel, layers: Sequence[int]
) -> tuple[list[tuple[list[int], int, torch.Tensor]], str]:
    """Run a prompt beyond a block of the KV cache, a step of prefill and a sliding window; again from the prefix cache.

    Returns
    -------
    list of (list of int, int, torch.Tensor), str
        The sequence, the position of the first row, and the rows; and what was done.
    """
    import torch

    config = model._client._engine.vllm_config
    limits = {
        "a block of the KV cache": config.cache_config.block_size,
        "a step of prefill": config.scheduler_config.max_num_batched_tokens,
        "a sliding window": getattr(config.model_config.hf_text_config, "sliding_window", None) or 0,
    }
    length = min(max(limits.values()) + 2 * limits["a block of the KV cache"], model.max_model_len - ANSWER_TOKENS)
    known = torch.tensor(model.tokenizer(" ".join(TEXTS))["input_ids"])
    drawn = torch.randint(len(known), (length,), generator=torch.Generator().manual_seed(1))
    prompt: list[int] = known[drawn].tolist()
    found = []
    for where in ("all", "answer"):
        [output], [handle] = await model.generate(
            [prompt],
            temperature=0.0,
            max_tokens=ANSWER_TOKENS,
            ignore_eos=True,
            capture_layers=layers,
            capture_where=where,
            steering=SteeringSpec.none(),
            raw_output=True,
        )
        await handle.fetch()
        rows = torch.stack([handle.hidden(layer) for layer in layers])
        found.append(([*prompt, *output.outputs[0].token_ids[:-1]], handle.positions[0], rows))
        handle.close()
    passed = ", ".join(name for name, limit in limits.items() if 0 < limit < length)
    missed = [f"{name} ({limit})" for name, limit in limits.items() if limit >= length]
    text = f"one prompt of {length} tokens, beyond {passed or 'no limit'}; {output.num_cached_tokens or 0} of it cached"
    return found, text + (f"; not beyond {', '.join(missed)}: raise --max-model-len" if missed else "")


async def matches_hugging_face(model: VLLMSteerModel) -> Check:
    """Every layer of prompt and answer against Hugging Face in float32, and in the model's dtype for comparison."""
    import torch

    from chatspace_lab.hugging_face import load, residuals, room

    name, layers = "matches Hugging Face", range(model.layer_count)
    device, why = room(model.model_name)
    if device is None:
        return Check(name, None, why)
    found = [(ids, 0, rows) for ids, rows in await _rows(model, TEXTS, layers, SteeringSpec.none(), ANSWER_TOKENS)]
    more, long = await _long_rows(model, layers)
    found += more
    try:
        theirs = load(model.model_name, device)
    except (ValueError, OSError, ImportError, KeyError) as error:
        return Check(name, None, f"transformers cannot load it: {' '.join(str(error).split())[:120]}")
    wanted = [residuals(theirs, ids, model.layer_count)[:, first:] for ids, first, _ in found]
    rounded = wanted
    if model.dtype != torch.float32:
        theirs = theirs.to(model.dtype)
        rounded = [residuals(theirs, ids, model.layer_count)[:, first:] for ids, first, _ in found]
    del theirs
    # Kernels add up in another order; and on a GPU vLLM's attention multiplies float32 with the ten bits of TF32.
    unavoidable = 4e-3 if model.dtype == torch.float32 and torch.cuda.is_available() else 1e-4
    missed = []
    dtype = str(model.dtype).removeprefix("torch.")
    beside = "" if rounded is wanted else f"; beside it that of Hugging Face's own {dtype}"
    print(f"  distance to Hugging Face's float32 on {device}, relative to a row, median and largest{beside}")
    for layer in layers:
        ours = _distances([rows[layer] for *_, rows in found], [each[layer] for each in wanted])
        own = _distances([each[layer] for each in rounded], [each[layer] for each in wanted])
        beside = "" if rounded is wanted else f"      {own[0]:.2e}  {own[1]:.2e}"
        print(f"  layer {layer:3}   {ours[0]:.2e}  {ours[1]:.2e}{beside}", flush=True)
        if ours[0] > unavoidable + 2 * own[0] or ours[1] > max(5e-3, 5 * unavoidable) + 3 * own[1]:
            missed.append(layer)
    if missed:
        return Check(name, False, f"layers {missed} are further away than rounding explains")
    count = sum(rows.shape[1] for *_, rows in found)
    return Check(name, True, f"all {model.layer_count} layers, {count} tokens, on {device}; {long}")


def _distances(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> tuple[float, float]:
    import torch

    a, b = torch.cat([rows.float().cpu() for rows in ours]), torch.cat([rows.float().cpu() for rows in theirs])
    relative = (a - b).norm(dim=-1) / b.norm(dim=-1)
    return float(relative.median()), float(relative.max())


async def cost(model: VLLMSteerModel) -> list[str]:
    """Time a step plain, steered and captured, in turns in this engine; what plain vLLM takes ``bench`` measures."""
    import statistics

    layers = range(model.layer_count)
    pool = _directions(model, 64)
    prompts = [[10 + 7 * index + at for at in range(16)] for index in range(COST_BATCH)]
    specs = [
        SteeringSpec(
            {
                layer: LayerSteeringSpec(
                    add=AddSpec(pool[(index + layer) % 64], 0.1),
                    projection_cap=ProjectionCapSpec(pool[(index + layer + 21) % 64], -50.0, 50.0),
                    ablation=AblationSpec(pool[(index + layer + 42) % 64], 0.9),
                )
                for layer in layers
            }
        )
        for index in range(COST_BATCH)
    ]

    async def run(steering: Any, captured: Sequence[int] | None) -> float:
        started = time.perf_counter()
        sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": COST_TOKENS, "ignore_eos": True}
        answer = await model.generate(prompts, capture_layers=captured, steering=steering, **sampling)
        if captured is not None:
            await model.fetch_captures_batch(answer[1])
            for handle in answer[1]:
                handle.close()
        return (time.perf_counter() - started) * 1e3 / COST_TOKENS

    none = SteeringSpec.none()
    cases: list[tuple[str, Any, Sequence[int] | None]] = [
        ("add + cap + ablate at every layer, all different", specs, None),
        ("every layer captured and fetched", none, layers),
    ]
    await run(none, None)
    lines = []
    for title, steering, captured in cases:
        await run(steering, captured)
        pairs = [(await run(none, None), await run(steering, captured)) for _ in range(COST_PAIRS)]
        plain, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        lines.append(
            f"{'cost':<24}{f'x {ratio:.3f}':<13}{title}, batch {COST_BATCH}: {plain:.2f} -> {ours:.2f} ms per step"
        )
    lines.append(f"{'':<37}against this engine unsteered; chatspace-lab bench measures it beside plain vLLM")
    return lines
