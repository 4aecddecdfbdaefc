"""What a run of the panel is asked with: fixed when it starts, and carried by its answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chatspace_lab.errors import RequestError
from chatspace_lab.panels.rows import Row, as_dicts
from chatspace_lab.steering.specs import SteeringSpec
from chatspace_lab.steering.where import Where

SIDES = ("baseline", "steered")
PLOTS = ("norm", "cosine", "projection", "heatmap")
MAX_LAYERS = 40
"""Layers that a panel reads; of a deeper model every second, third, …, and those that are steered."""


@dataclass(frozen=True)
class Turn:
    """What the user said, and the answer of each side; None while there is none.

    ``made`` says by side, in words, with which values an answer was made; a side is left out if that is not known.
    """

    user: str
    baseline: str | None = None
    steered: str | None = None
    made: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        texts = isinstance(self.user, str) and all(
            isinstance(each, str | None) for each in (self.baseline, self.steered)
        )
        if not texts or not isinstance(self.made, Mapping):
            raise RequestError("a turn has a text for user, texts or None for the answers, and a dict for made")

    def plain(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {"user": self.user, "baseline": self.baseline, "steered": self.steered, "made": dict(self.made)}

    def open(self) -> Turn:
        """Return it without its answers."""
        return Turn(self.user)


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn: with the same seed on both sides, so that what differs is the steering."""

    seed: int = 7
    temperature: float = 0.0
    max_tokens: int = 64

    def edited(self, patch: dict[str, Any]) -> Sampling:
        """Return it with some fields changed.

        Raises
        ------
        RequestError
            Naming the field that does not exist or cannot be used.
        """
        unknown = set(patch) - {"seed", "temperature", "max_tokens"}
        if unknown:
            raise RequestError(f"sampling has no {', '.join(sorted(unknown))}")
        for name, value in patch.items():
            whole = name != "temperature"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise RequestError(f"{name} must be a {'whole ' if whole else ''}number, got {value!r}")
        new = replace(self, **patch)
        if new.max_tokens < 1 or not 0 <= new.temperature <= 5 or new.seed < 0:
            raise RequestError("max_tokens is at least 1, temperature from 0 to 5, and a seed is not negative")
        return new

    def plain(self) -> dict[str, Any]:
        """Return it as keywords of ``chat``."""
        return {"seed": self.seed, "temperature": float(self.temperature), "max_tokens": self.max_tokens}


@dataclass(frozen=True, eq=False)
class Asked:
    """One run.

    Attributes
    ----------
    number
        Counts up with every change; an answer with an old number is dropped.
    rows, spec, where
        The steering: as shown, and as the engine is given it.
    turns
        The conversation; the last turn is answered.
    system
        System message, or None.
    layers
        Read, ascending.
    vectors
        By name, as they were then: read along those that are usable, and steered by those of the rows.
    split_special_tokens
        Whether special tokens that a message spells are sent as ordinary text.
    """

    number: int
    rows: tuple[Row, ...]
    spec: SteeringSpec
    where: Where
    turns: tuple[Turn, ...]
    system: str | None
    sampling: Sampling
    layers: tuple[int, ...]
    vectors: Mapping[str, Any] = field(default_factory=dict)
    split_special_tokens: bool = False

    def messages(self, side: str) -> list[dict[str, str]]:
        """Return the conversation of a side, up to the answer that is asked for."""
        return conversation(self.system, self.turns, side)

    def chat_options(self) -> dict[str, bool]:
        """Return the options of its chat that are not the default's."""
        return {"split_special_tokens": True} if self.split_special_tokens else {}

    def baseline_key(self) -> Any:
        """Return what the baseline depends on: it stays while this does."""
        return (self.messages("baseline"), self.sampling, self.layers, self.split_special_tokens)


def conversation(system: str | None, turns: Sequence[Turn], side: str) -> list[dict[str, str]]:
    """Return the messages of a side, up to the answer of the last turn."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns[:-1]:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": getattr(turn, side) or ""})
    return [*messages, {"role": "user", "content": turns[-1].user}]


def turns_from(plain: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """Return turns that were written as :meth:`Turn.plain` does; all but ``user`` may be left out.

    Raises
    ------
    RequestError
    """
    for each in as_dicts(plain, "turns"):
        if "user" not in each or set(each) - set(Turn.__dataclass_fields__):
            raise RequestError(f"a turn is a dict with user, and any of {', '.join(Turn.__dataclass_fields__)}")
    return tuple(Turn(**each) for each in plain)


def check_view(view: Mapping[str, Any], layer_count: int, names: Collection[Any] | None = None) -> None:
    """Check what is looked at, whole or in part; the direction only where the names that there are, are given.

    Raises
    ------
    RequestError
        Naming what cannot be looked at.
    """
    if not isinstance(view, Mapping):
        raise RequestError(f"a panel's view is a dict, got {view!r}")
    unknown = set(view) - {"layers", "direction", "plot", "pinned"}
    if unknown:
        raise RequestError(f"a panel's view has no {', '.join(sorted(unknown))}")
    if view.get("plot", "norm") not in PLOTS:
        raise RequestError(f"plot is one of {', '.join(PLOTS)}")
    pinned = view.get("pinned")
    if pinned is not None and not (isinstance(pinned, Mapping) and isinstance(pinned.get("position"), int)):
        raise RequestError("view: pinned is None, or a dict with side and position")
    layers = view.get("layers", [0])
    if (
        not isinstance(layers, list | tuple)
        or not layers
        or not all(isinstance(at, int) and 0 <= at < layer_count for at in layers)
    ):
        raise RequestError(f"view: layers are numbers from 0 to {layer_count - 1}, at least one")
    direction = view.get("direction")
    if names is not None and direction is not None and direction not in names:
        raise RequestError(f"view: there is no vector {direction!r}")


def layers_to_read(layer_count: int, needed: Sequence[int]) -> tuple[int, ...]:
    """Return the layers that a panel reads: all, or of a deep model some at equal distances and the needed ones."""
    step = -(-layer_count // MAX_LAYERS)
    return tuple(sorted({*range(0, layer_count, step), layer_count - 1, *needed}))
