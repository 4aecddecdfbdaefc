"""Finding decoder blocks and proving what they return: right, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from chatspace_lab.errors import UnsupportedError
from chatspace_lab.runtime import layers, operator
from chatspace_lab.runtime.layers import OutputForm

HIDDEN, TOKENS = 8, 5


class Block(nn.Module):
    """A block on the whole stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> Any:
        return hidden + self.mlp(self.norm(hidden))


class Wrapped(Block):
    def forward(self, hidden: torch.Tensor) -> Any:
        return "cache", super().forward(hidden)


class Fused(nn.Module):
    """A norm that adds, as vLLM's do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden + residual
        return self.norm(total), total


class Pair(nn.Module):
    """A block that hands on what it adds and what it adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Fused(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> Any:
        normed, residual = self.norm(hidden, residual)
        return self.mlp(normed), residual


class Swapped(Pair):
    """Another order of the two."""

    def forward(self, residual: torch.Tensor, hidden: torch.Tensor) -> Any:
        hidden, residual = super().forward(hidden, residual)
        return residual, hidden


class NoSum(Pair):
    """Two tensors of which only one is looked at."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> Any:
        return self.mlp(self.norm.norm(hidden)), hidden + residual


class Whole(Pair):
    """Two tensors, the first of which is the whole stream already; the second is not looked at."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        residual = hidden
        return residual + self.mlp(self.norm.norm(hidden)), residual


class WholeSecond(Whole):
    def forward(self, residual: torch.Tensor | None, hidden: torch.Tensor) -> Any:
        hidden, residual = super().forward(hidden, residual)
        return residual, hidden


class HandedOn(Whole):
    """The second tensor is not computed with, and comes out again."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return super().forward(hidden, residual)[0], residual


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module], count: int = 3, *, between: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([kind() for _ in range(count)])
        self.between = between

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        pair = isinstance(self.blocks[0], Pair)
        state: tuple[Any, ...] = (hidden, torch.zeros_like(hidden)) if pair else (hidden,)
        for block in self.blocks:
            output = block(*state)
            if isinstance(output, tuple):
                state = tuple(part for part in output if isinstance(part, torch.Tensor))
            else:
                state = (output,)
            if self.between is not None:
                state = tuple(part * self.between for part in state)
        return sum(state)  # type: ignore[return-value]


def form_of(model: Model, shape: tuple[int, ...] = (TOKENS, HIDDEN)) -> OutputForm:
    with torch.inference_mode():
        calls = layers.record_calls(model.blocks, lambda: model(torch.randn(shape)))
        return layers.output_form(model.blocks, calls, HIDDEN, "SomeModel")


@pytest.fixture
def unbound() -> Iterator[None]:
    before = operator._bound
    yield
    operator.bind(before)


class Adder:
    """Plays the runtime: adds the layer's number, and keeps what it saw."""

    def __init__(self) -> None:
        self.seen: dict[int, torch.Tensor] = {}

    def apply(self, hidden: torch.Tensor, residual: torch.Tensor | None, layer: torch.Tensor) -> None:
        assert hidden.ndim == 2
        self.seen[int(layer)] = hidden.clone() if residual is None else hidden + residual
        hidden += 1.0 + layer


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (Block, (None, None)),
        (Wrapped, (1, None)),
        (Pair, (0, 1)),
        (Whole, (0, None)),
        (WholeSecond, (1, None)),
    ],
)
def test_forms_that_are_known(kind: type[nn.Module], form: tuple[int | None, int | None]) -> None:
    assert form_of(Model(kind)) == OutputForm(*form)


def test_a_batch_of_one_as_in_hugging_face() -> None:
    assert form_of(Model(Block), (1, TOKENS, HIDDEN)) == OutputForm(None, None)


def test_a_pair_in_another_order_is_a_sum_all_the_same() -> None:
    assert form_of(Model(Swapped)) == OutputForm(0, 1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Model(Block, between=0.5), "SomeModel: what decoder block 0 returns does not go unchanged into block 1"),
        (Model(NoSum), "SomeModel: .*whose sum is not what the next block works on"),
        (Model(HandedOn), "SomeModel: .*whose sum is not what the next block works on"),
        (Model(Block, 1), "SomeModel"),
    ],
)
def test_forms_that_are_refused(model: Model, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        form_of(model)


def test_blocks_that_do_not_run_are_refused() -> None:
    model = Model(Block)
    with pytest.raises(UnsupportedError, match="only 2 of 3"):
        layers.record_calls(model.blocks, lambda: [block(torch.randn(TOKENS, HIDDEN)) for block in model.blocks[:2]])


@pytest.mark.parametrize("shape", [(TOKENS, HIDDEN), (1, TOKENS, HIDDEN)])
@pytest.mark.parametrize("kind", [Block, Wrapped, Pair, Swapped, Whole, WholeSecond])
def test_the_operator_acts_once_behind_each_block(kind: type[nn.Module], shape: tuple[int, ...], unbound: None) -> None:
    if len(shape) == 3 and kind is not Block:
        return
    plain, model, adder = Model(kind), Model(kind), Adder()
    inputs = torch.randn(shape)
    form = form_of(model, shape)
    layers.install(model.blocks, form)
    operator.bind(adder)
    with torch.inference_mode():
        steered = model(inputs)
        for layer, block in enumerate(plain.blocks):  # the same by hand: add to the stream behind each block
            block.register_forward_hook(lambda module, args, output, layer=layer: added(output, form, 1.0 + layer))
        assert torch.allclose(steered, plain(inputs), atol=1e-5)
    assert sorted(adder.seen) == [0, 1, 2]
    assert all(seen.shape == (TOKENS, HIDDEN) for seen in adder.seen.values())


def added(output: Any, form: OutputForm, value: float) -> Any:
    if form.hidden is None:
        return output + value
    return tuple(part + value if index == form.hidden else part for index, part in enumerate(output))


def test_installing_twice_is_an_error(unbound: None) -> None:
    model, other = Model(Block), Model(Block)
    layers.install(model.blocks, OutputForm(None, None))
    with pytest.raises(UnsupportedError, match="installed already"):
        layers.install(model.blocks, OutputForm(None, None))
    assert type(other.blocks[0]) is Block  # other models of the class are left alone
    assert isinstance(model.blocks[0], Block)
    assert type(model.blocks[0]).__name__ == "Block"


def test_finding_blocks() -> None:
    class Parts(nn.Module):
        def __init__(self, **parts: nn.Module) -> None:
            super().__init__()
            for name, part in parts.items():
                self.add_module(name, part)

    def blocks(count: int = 3) -> nn.ModuleList:
        return nn.ModuleList([Block() for _ in range(count)])

    decoder = blocks()
    assert layers.find_blocks(Parts(decoder=decoder, heads=nn.ModuleList([nn.Linear(2, 2)] * 3)), 3) is decoder
    assert layers.find_blocks(Parts(vision_tower=blocks(), language=decoder), 3) is decoder
    assert layers.find_blocks(Parts(layers=decoder, part=Parts(layers=decoder[:3])), 3) is decoder
    experts = blocks()
    for block in experts:
        block.experts = nn.ModuleList([Block() for _ in range(3)])
    assert layers.find_blocks(Parts(model=experts), 3) is experts
    with pytest.raises(UnsupportedError, match="Parts: no list of 3 decoder blocks"):
        layers.find_blocks(Parts(decoder=blocks(4)), 3)
    with pytest.raises(UnsupportedError, match=r"Parts: 2 lists could be its 3 decoder blocks \(one, two\)"):
        layers.find_blocks(Parts(one=blocks(), two=blocks()), 3)
