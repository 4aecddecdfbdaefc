"""Relative dose both ways, and the measures of a text."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch

from chatspace_lab import AblationSpec, AddSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec
from chatspace_lab.analysis import (
    Direction,
    attention_sinks,
    dose_frame,
    dose_of_scale,
    layer_frame,
    level_of,
    perplexity,
    repetition,
    residual_norms,
    scale_for_dose,
    steering_frame,
    token_frame,
)
from chatspace_lab.errors import AnalysisError, SteeringError
from tests.analysis.handles import handle

#        left out      prompt        prompt        answer
ROWS = [[[90.0, 0.0], [3.0, 4.0], [0.0, 15.0], [70.0, 0.0]], [[9.0, 0.0], [0.0, 20.0], [0.0, 20.0], [1.0, 0.0]]]
VECTOR = torch.tensor([0.0, -2.0])


def run(**options: object) -> object:
    return handle(ROWS, prompt=[1, 2, 3], answer=[4, 5], layers=(2, 6), **options)


def test_the_first_token_and_the_answer_do_not_count() -> None:
    assert residual_norms(run()) == {2: 10.0, 6: 20.0}
    assert residual_norms(token_frame(run())) == {2: 10.0, 6: 20.0}
    assert residual_norms({2: 10, 6: 20.0}) == {2: 10.0, 6: 20.0}
    with pytest.raises(AnalysisError, match="several requests"):
        residual_norms(token_frame([run(), run(request="other")]))
    with pytest.raises(AnalysisError, match="no prompt token but the first"):
        residual_norms(handle([[[1.0], [1.0]]], prompt=[1], answer=[2, 3]))
    with pytest.raises(AnalysisError, match=r"layer 3: the residual norm is 0\.0"):
        residual_norms({3: 0.0})


def test_attention_sinks_count_nowhere_and_can_be_asked_for() -> None:
    rows = [[90.0, 0.0], [2000.0, 0.0], [3.0, 4.0], [0.0, 4.0], [6.0, 0.0], [0.0, 5.0], [70.0, 0.0]]
    made = handle([rows], prompt=[1, 1, 2, 3, 4, 5, 6], answer=[7], layers=(2,))
    assert residual_norms(made) == {2: 5.0}
    found = attention_sinks(made)
    assert found["position"].tolist() == [0, 1, 6]
    assert found["times"].tolist() == [18.0, 400.0, 14.0]
    assert layer_frame(token_frame(made))[["tokens", "norm"]].to_numpy().tolist() == [[4, 5.0]]
    assert layer_frame(token_frame(made), first_token=True)["tokens"].tolist() == [7]


def test_both_ways() -> None:
    made = run()
    assert dose_of_scale(2.5, VECTOR, 2, made) == 0.5
    assert dose_of_scale(-2.5, VECTOR, 6, made) == -0.25
    assert scale_for_dose(0.5, VECTOR, 2, made) == 2.5
    assert scale_for_dose(-0.25, {6: VECTOR}, 6, made) == -2.5
    direction = Direction("d", {2: VECTOR, 6: 9 * VECTOR})  # of unit length, whatever was given
    assert scale_for_dose(0.5, direction, 6, made) == pytest.approx(10.0)
    assert dose_of_scale(10.0, direction, 6, made) == pytest.approx(0.5)
    with pytest.raises(AnalysisError, match=r"layer 3 is not known, only of layers \[2, 6\]"):
        scale_for_dose(0.5, VECTOR, 3, made)
    with pytest.raises(AnalysisError, match="not given for layer 2"):
        scale_for_dose(0.5, {6: VECTOR}, 2, made)
    with pytest.raises(AnalysisError, match="the vector is zero"):
        scale_for_dose(0.5, 0 * VECTOR, 2, made)
    with pytest.raises(SteeringError, match="dose"):
        scale_for_dose(math.nan, VECTOR, 2, made)


def test_beside_every_scale() -> None:
    frame = dose_frame((scale for scale in (-5.0, 0.0, 8.0)), VECTOR, run())
    assert frame["layer"].tolist() == [2, 2, 2, 6, 6, 6]
    assert frame["scale"].tolist() == [-5, 0, 8] * 2
    assert frame["vector_norm"].tolist() == [2.0] * 6
    assert frame["residual_norm"].tolist() == [10.0] * 3 + [20.0] * 3
    assert frame["dose"].tolist() == [-1.0, 0.0, 1.6, -0.5, 0.0, 0.8]
    assert frame["level"].tolist() == ["high", "", "extreme", "", "", "high"]
    assert dose_frame([1.0], VECTOR, run(), layers=6)["layer"].tolist() == [6]
    assert residual_norms(frame) == {2: 10.0, 6: 20.0}
    with pytest.raises(AnalysisError, match="different residual norms for one layer"):
        residual_norms(pd.concat([frame, frame.assign(residual_norm=1.0)]))


def test_beside_every_operation_of_a_spec() -> None:
    spec = SteeringSpec(
        {
            2: LayerSteeringSpec(add=AddSpec(VECTOR, 3.0), projection_cap=ProjectionCapSpec(VECTOR, max=4.0)),
            6: LayerSteeringSpec(operations=[AblationSpec(VECTOR, 0.5), AddSpec(2 * VECTOR, -4.0)]),
        }
    )
    frame = steering_frame(spec, run())
    assert frame["operation"].tolist() == ["add", "cap", "ablate", "add"]
    assert frame["dose"].fillna(99).tolist() == [0.6, 99, 99, -0.8]
    assert frame["scale"].fillna(99).tolist() == [3.0, 99, 0.5, -4.0]
    assert frame["max"].fillna(99).tolist() == [99, 4.0, 99, 99]
    assert frame["level"].tolist() == ["", "", "", "high"]
    assert steering_frame(SteeringSpec.none(), run()).empty


@pytest.mark.parametrize(
    ("dose", "level"), [(0.69, ""), (0.7, "high"), (-0.7, "high"), (1.5, "extreme"), (-2, "extreme")]
)
def test_levels(dose: float, level: str) -> None:
    assert level_of(dose) == level


def test_repetition() -> None:
    assert repetition([1, 2, 3, 4, 5]) == 0.0
    assert repetition([7] * 12) == 0.9  # ten 3-grams, one of them new
    assert repetition([1, 2, 3, 1, 2, 3, 1]) == pytest.approx(0.4)  # 123 231 312, then 123 231
    assert repetition([1, 1, 2, 1], n=1) == 0.5
    assert math.isnan(repetition([1, 2]))
    with pytest.raises(AnalysisError, match="at least 1"):
        repetition([1], n=0)


def test_perplexity() -> None:
    assert perplexity([math.log(1 / 4)] * 3) == pytest.approx(4.0)
    assert perplexity([math.log(1 / 2), math.log(1 / 8)]) == pytest.approx(4.0)
    assert perplexity([0.0]) == 1.0
    assert perplexity([-math.inf, 0.0]) == math.inf
    assert perplexity([-1e5]) == math.inf
    assert math.isnan(perplexity([]))
    for bad in (0.5, math.nan, None):
        with pytest.raises(AnalysisError, match="logprob 1 is"):
            perplexity([-1.0, bad])
