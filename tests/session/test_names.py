"""Vectors by name: wherever the lab takes a vector, its name in ``lab.vectors`` will do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.lib.pretty import pretty

from chatspace_lab import AblationSpec, AddSpec, LabSession, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec
from chatspace_lab.analysis import Direction
from chatspace_lab.errors import RequestError, SteeringError

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
ONE = {**GREEDY, "max_tokens": 2}


@pytest.fixture
def named(lab: LabSession) -> Iterator[LabSession]:
    """A lab with ``joy``, another vector at each layer, and ``sea``, the same at all."""
    random = torch.Generator().manual_seed(3)
    lab.vectors["joy"] = Direction(
        "joy", {layer: torch.randn(lab.hidden_size, generator=random) for layer in range(lab.layer_count)}
    )
    lab.vectors["sea"] = torch.randn(lab.hidden_size, generator=random)
    yield lab
    lab.vectors.clear()


def test_there_is_one_set_of_names(named: LabSession) -> None:
    assert named.vectors is named.aio.vectors is named.model.vectors
    before = dict(named.vectors)
    named.vectors = {}
    assert named.aio.vectors == named.model.vectors == {}
    named.vectors = before


def test_they_are_shown_in_a_line_each(named: LabSession) -> None:
    named.vectors["far"] = {3: torch.ones(named.hidden_size), 4: torch.ones(named.hidden_size)}
    shown = f"""{{'joy': Direction('joy', given, layers 0 to {named.layer_count - 1}),
 'sea': Tensor [{named.hidden_size}],
 'far': dict, a vector for each of 2 layers}}"""
    assert repr(named.vectors) == pretty(named.vectors) == shown
    named.vectors = {}
    assert repr(named.vectors) == "{}"


def test_session_steering_by_name(named: LabSession) -> None:
    joy, sea = named.vectors["joy"], named.vectors["sea"]
    add = SteeringSpec({at: LayerSteeringSpec(add=AddSpec(joy.at(at), 3.0)) for at in (4, 5)})
    cap, ablation = ProjectionCapSpec(joy.at(5), max=1.0), AblationSpec(sea, 0.5)
    alone: dict[int, Any] = {
        7: LayerSteeringSpec(operations=[AddSpec(sea), AddSpec("joy")]),
        8: LayerSteeringSpec(add=AddSpec("joy", 2.0)),
    }
    wanted = SteeringSpec(
        {
            7: LayerSteeringSpec(operations=[AddSpec(sea), AddSpec(joy.at(7))]),
            8: LayerSteeringSpec(add=AddSpec(joy.at(8), 2.0)),
        }
    )
    doings: list[tuple[Callable[[], Any], SteeringSpec]] = [
        (lambda: named.steer([4, 5], "joy", 3.0), add),
        (lambda: named.cap(5, "joy", max=1.0), SteeringSpec.at(5, cap)),
        (lambda: named.ablate(6, "sea", 0.5), SteeringSpec.at(6, ablation)),
        (lambda: named.set_layer_vector(4, "sea", 2.0), SteeringSpec.at(4, AddSpec(sea, 2.0))),
        (lambda: named.set_layer_projection_cap(5, "joy", None, 1.0), SteeringSpec.at(5, cap)),
        (lambda: named.set_layer_ablation(6, "sea", 0.5), SteeringSpec.at(6, ablation)),
        (lambda: named.apply_steering_spec(SteeringSpec(alone)), wanted),
        (lambda: named.push_steering_spec(SteeringSpec(alone)), wanted),
        (lambda: named.update_steering_spec(lambda _: SteeringSpec(alone)), wanted),
    ]
    for do, spec in doings:
        do()
        assert named.export_steering_spec() == spec
        named.clear()
    named.pop_steering_spec()
    with named.steering(SteeringSpec(alone)):
        assert named.export_steering_spec() == wanted
    assert not named.export_steering_spec()


def test_a_name_that_stands_for_another_vector_since(named: LabSession) -> None:
    """What is in force, and what a run had, is never told by the name of another vector."""
    named.steer(4, "sea", 2.0)
    named.generate("The river", **ONE)
    named.vectors["sea"] = -named.vectors["sea"]
    shown = repr(named.steer(6, "sea", 2.0))
    assert "add sea (replaced) @ 4: " in shown
    assert "add sea @ 6: " in shown
    assert "·sea (replaced) (" in named.history.frame()["steering"].iloc[-1]
    named.vectors["sea"].mul_(2.0)  # edited in place
    assert "add sea (replaced) @ 4, 6: " in repr(named.in_force())
    del named.vectors["sea"]
    other = Direction("sea", {5: torch.ones(named.hidden_size)})
    assert "add sea @ 5: " in repr(named.steer(5, other, 2.0))
    assert "add sea (replaced) @ 4, 6: " in repr(named.in_force())


def test_names_that_are_no_text_are_not_saved(named: LabSession, tmp_path: Path) -> None:
    named.vectors.update({"1": named.vectors["sea"], 1: -named.vectors["sea"]})  # type: ignore[dict-item]
    with pytest.warns(UserWarning, match=r"lab.vectors\[1\] is not saved: names must be text, got int"):
        named.save(tmp_path / "session")
    sea = named.vectors["sea"]
    named.vectors.clear()
    named.load(tmp_path / "session")
    assert torch.equal(named.vectors["1"], sea)


def test_requests_by_name(named: LabSession) -> None:
    joy, sea = named.vectors["joy"], named.vectors["sea"]
    by_name, by_vector = (
        SteeringSpec({at: LayerSteeringSpec(add=AddSpec(each, 60.0)) for at, each in vectors.items()})
        for vectors in ({4: "joy", 5: "sea"}, {4: joy.at(4), 5: sea})
    )
    first, second, plain = named.generate(["The river"] * 3, steering=[by_name, by_vector, None], **GREEDY)
    assert first == second != plain
    assert named.history[0].steering == by_vector  # what a run is kept with holds vectors, not names
    with named.stream("The river", steering=by_name, read_layers=[4], directions=["joy", "sea"], **ONE) as stream:
        for _ in stream:
            pass
        assert stream.readings is not None
        assert stream.readings.directions == ("joy", "sea")
    frames = [
        named.capture(["The river"], [4, 5], "projection", directions=directions, steering=by_name)
        for directions in ("joy", ["joy"], {"joy": "joy"}, {"joy": joy})
    ]
    assert all(frame["projection_joy"].equals(frames[-1]["projection_joy"]) for frame in frames)
    _, handles = named.generate("The river", capture_layers=[4], **ONE)
    assert "projection_sea" in named.frame(handles, ["sea"])
    [readings] = named.read_captures(handles, ["sea"])
    assert readings.directions == ("sea",)
    grids = [
        named.sweep("The river", [4], vector, [8.0], perplexity=False, **ONE).drop(columns="text")
        for vector in ("joy", joy)
    ]
    assert grids[0].equals(grids[1])


def test_an_unknown_name(named: LabSession) -> None:
    spec = SteeringSpec.at(4, AddSpec("yoj"), AddSpec("Joy"))
    doings: list[Callable[[], Any]] = [
        lambda: named.steer(4, "Joy", 3.0),
        lambda: named.cap(4, "jyo", max=1.0),
        lambda: named.ablate(4, "joi"),
        lambda: named.sweep("The river", [4], "joyy", [1.0]),
        lambda: named.set_layer_vector(4, "joyous"),
        lambda: named.generate("The river", steering=SteeringSpec.at(4, AblationSpec("joe")), **ONE),
        lambda: named.capture(["The river"], [4], "projection", directions=["jo"]),
        lambda: named.capture(["The river"], [4], "projection", directions={"x": "jo"}),
        lambda: named.stream("The river", read_layers=[4], directions=["yoy"], **ONE),
        lambda: named.apply_steering_spec(SteeringSpec.at(4, AddSpec("Joy"))),
    ]
    for do in doings:
        with pytest.raises(RequestError, match=r"no vector is named '\w+' in lab.vectors; did you mean 'joy'\?"):
            do()
    assert not named.export_steering_spec()
    with pytest.raises(RequestError, match="only 'joy', 'sea'"):
        named.steer(4, "mountain", 3.0)
    with pytest.raises(RequestError, match="no vector is named 'yoj'"):
        named.generate("The river", steering=spec, **ONE)
    named.vectors["part"] = {3: torch.ones(named.hidden_size)}
    with pytest.raises(RequestError, match=r"'part' has no vector for layer 4, only for \[3\]"):
        named.apply_steering_spec(SteeringSpec.at([3, 4], AddSpec("part")))
    named.vectors["bad"] = torch.ones(3)
    with pytest.raises(SteeringError, match="3 entries"):
        named.steer(4, "bad", 3.0)
    named.vectors.clear()
    with pytest.raises(RequestError, match="which is empty"):
        named.steer(4, "joy", 3.0)
