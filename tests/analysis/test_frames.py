"""Frames against numbers worked out by hand: hidden size 2, so norms and cosines are those of a 3-4-5 triangle."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from chatspace_lab import MessageBoundary, SteeringSpec, VLLMSteerModel
from chatspace_lab.analysis import (
    Direction,
    cosine_frame,
    directions_of,
    layer_frame,
    mean_activation,
    message_cosines,
    message_frame,
    message_means,
    message_summary,
    readings_frame,
    token_frame,
    token_rows,
)
from chatspace_lab.errors import (
    AnalysisError,
    CaptureClosedError,
    MessageLocationError,
    RequestError,
    SteeringError,
)
from chatspace_lab.readings import Readings
from tests.analysis.handles import handle
from tests.oracle import Oracle

PROMPT, ANSWER = [10, 11, 12, 13, 14], [20, 21, 22]
#              template   system     user       user       template    answer     answer
ROWS = [[[30.0, 40.0], [3.0, 4.0], [6.0, 8.0], [0.0, 2.0], [-3.0, 4.0], [0.0, 5.0], [12.0, 5.0]]]
BOUNDARIES = (MessageBoundary("system", "s", 1, 2), MessageBoundary("user", "u", 2, 4))
ALONG = {"x": [2.0, 0.0]}  # its length does not matter
LOST = MessageLocationError("message 1 (user) cannot be located: the template leaves it out")


def chat(**options: Any) -> Any:
    return handle(options.pop("rows", ROWS), prompt=PROMPT, answer=ANSWER, **{"boundaries": BOUNDARIES, **options})


def test_a_row_per_token() -> None:
    frame = token_frame(chat(prompt_index=4, sample_index=1), directions=ALONG)
    assert list(frame.columns) == [
        *("request", "prompt_index", "sample_index", "layer", "row", "position", "token_id", "token", "role"),
        *("message", "special", "generated", "norm", "projection_x", "cosine_x"),
    ]
    assert directions_of(frame) == ["x"]
    assert frame["token_id"].tolist() == [10, 11, 12, 13, 14, 20, 21]  # the last token is never computed
    assert frame["role"].tolist() == ["template", "system", "user", "user", "template", "answer", "answer"]
    assert frame["message"].tolist() == [pd.NA, 0, 1, 1, pd.NA, pd.NA, pd.NA]
    assert frame["special"].isna().all()  # that is a tokenizer's to say
    assert frame["generated"].tolist() == [False] * 5 + [True] * 2
    assert frame["norm"].tolist() == [50, 5, 10, 2, 5, 5, 13]
    assert frame["projection_x"].tolist() == [30, 3, 6, 0, -3, 0, 12]
    assert frame["cosine_x"].tolist() == pytest.approx([0.6, 0.6, 0.6, 0, -0.6, 0, 12 / 13])
    assert frame["token"].isna().all()
    assert frame[["request", "prompt_index", "sample_index", "layer"]].drop_duplicates().values.tolist() == [
        ["r", 4, 1, 3]
    ]


def test_frames_are_written_as_parquet(tmp_path: Path) -> None:
    tokens = token_frame(chat(), directions=ALONG)
    frames = {"tokens": tokens, "messages": message_frame(chat(), ALONG), "cosines": message_cosines(chat())}
    frames |= {"layers": layer_frame(tokens), "summary": message_summary(tokens)}
    for name, frame in frames.items():
        frame.to_parquet(tmp_path / name)
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / name), frame)


def test_layers_and_requests() -> None:
    both = [*ROWS, [[2 * a, 2 * b] for a, b in ROWS[0]]]
    first, second = (chat(rows=both, layers=(3, 7), request=name) for name in ("a", "b"))
    frame = token_frame([first, second], directions={"d": {3: [1.0, 0.0], 7: [0.0, 1.0]}})
    assert len(frame) == 2 * 2 * 7
    assert frame.groupby(["request", "layer"])["norm"].sum().to_dict() == {
        ("a", 3): 90,
        ("a", 7): 180,
        ("b", 3): 90,
        ("b", 7): 180,
    }
    assert frame[(frame.layer == 7) & (frame.request == "b")]["projection_d"].tolist() == [80, 8, 16, 4, 8, 10, 10]
    for chosen in (7, [7], np.int64(7), np.array([7, 7])):
        assert token_frame(first, layers=chosen)["layer"].tolist() == [7] * 7
    alike = token_frame(iter([first]), directions={"d": Direction("d", {3: [2.0, 0.0], 7: [0.0, 2.0]})})
    assert alike["projection_d"].tolist() == frame[frame.request == "a"]["projection_d"].tolist()
    with pytest.raises(RequestError, match="no vector for layer 7"):
        token_frame(first, directions={"d": Direction("d", {3: [2.0, 0.0]})})
    with pytest.raises(AnalysisError, match=r"layers \[4\] were not captured, only \[3, 7\]"):
        token_frame(first, layers=[3, 4])
    with pytest.raises(RequestError, match="no vector for layer 7"):
        token_frame(first, directions={"d": {3: [1.0, 0.0]}})
    with pytest.raises(SteeringError, match="has 3 entries"):
        token_frame(first, directions={"d": [1.0, 0.0, 0.0]})
    with pytest.raises(SteeringError, match="zero"):
        token_frame(first, directions={"d": [0.0, 0.0]})
    with pytest.raises(AnalysisError, match="nothing to analyse"):
        token_frame([])
    first.close()
    with pytest.raises(CaptureClosedError):
        token_frame(first)


def test_sums_are_not_in_bfloat16() -> None:
    """256 + 256 ones squared: in bfloat16 the sum would stop at 256."""
    rows = torch.ones(1, 3, 512)
    made = handle(rows, prompt=[1, 2], answer=[3, 4], dtype=torch.bfloat16)
    frame = token_frame(made, directions={"ones": torch.ones(512)})
    assert frame["norm"].tolist() == pytest.approx([math.sqrt(512)] * 3, rel=1e-6)
    assert frame["projection_ones"].tolist() == pytest.approx([math.sqrt(512)] * 3, rel=1e-6)
    assert mean_activation(made, 3, "all").tolist() == [1.0] * 512


def test_what_cannot_be_located_is_said() -> None:
    frame = token_frame(chat(boundaries=(BOUNDARIES[0], LOST)))
    assert frame["role"].tolist() == ["unlocated", "system", *["unlocated"] * 3, "answer", "answer"]
    assert token_frame(chat(boundaries=None))["role"].tolist() == ["prompt"] * 5 + ["answer"] * 2
    messages = message_frame(chat(boundaries=(BOUNDARIES[0], LOST)))
    assert messages["label"].tolist() == ["0 system", "1 unlocated", "answer"]
    assert messages["problem"].tolist() == ["", str(LOST), ""]
    assert messages["tokens"].tolist() == [1, 0, 2]
    assert np.isnan(messages["norm"][1])


def test_a_zero_activation_has_no_cosine() -> None:
    made = handle([[[0.0, 0.0], [1.0, 0.0]]], prompt=[1, 2], answer=[3])
    frame = token_frame(made, directions=ALONG)
    assert frame["projection_x"].tolist() == [0, 1]
    assert frame["cosine_x"].isna().tolist() == [True, False]


def test_readings_give_the_same_frame() -> None:
    values = np.array([[[50, 30], [5, 3], [10, 6], [2, 0], [5, -3], [5, 0], [13, 12]]], dtype=np.float32)
    readings = Readings(np.arange(7), np.array([*PROMPT, 20, 21]), (3,), ("x",), values)
    frame = readings_frame(readings, prompt_len=5, locations=BOUNDARIES, request="r")
    pd.testing.assert_frame_equal(frame, token_frame(chat(), directions=ALONG))
    with pytest.raises(AnalysisError, match="do not fit together"):
        readings_frame(Readings(np.arange(6), readings.token_ids, (3,), ("x",), values), prompt_len=5)
    with pytest.raises(AnalysisError, match="do not fit together"):
        readings_frame(Readings(np.arange(7), readings.token_ids, (3,), (), values), prompt_len=5)


def test_messages() -> None:
    frame = message_frame(chat(), ALONG)
    assert frame["label"].tolist() == ["0 system", "1 user", "answer"]
    assert frame["message"].tolist() == [0, 1, pd.NA]
    assert frame["tokens"].tolist() == [1, 2, 2]
    assert frame["norm"].tolist() == [5, 6, 9]
    # user: mean of (6, 8) and (0, 2) is (3, 5); answer: mean of (0, 5) and (12, 5) is (6, 5)
    assert frame["norm_of_mean"].tolist() == pytest.approx([5, math.sqrt(34), math.sqrt(61)])
    assert frame["projection_x"].tolist() == [3, 3, 6]
    assert frame["cosine_x"].tolist() == pytest.approx([0.6, 3 / math.sqrt(34), 6 / math.sqrt(61)])
    summary = message_summary(token_frame(chat(), directions=ALONG))
    for column in ("label", "tokens", "norm", "projection_x"):
        assert summary[column].tolist() == frame[column].tolist()
    assert summary["cosine_x"].tolist() == pytest.approx([0.6, 0.3, 6 / 13])
    assert "norm_of_mean" not in summary


def test_messages_that_were_not_captured_whole_have_no_numbers() -> None:
    rows = [[ROWS[0][at] for at in (1, 3, 5, 6)]]
    frame = message_frame(chat(rows=rows, spans=(1, 2, 3, 4, 5, -1)))
    assert frame["tokens"].tolist() == [1, 0, 2]
    assert frame["problem"].tolist() == ["", "1 of the 2 tokens of message 1 were captured", ""]
    empty = message_frame(chat(boundaries=(BOUNDARIES[0], MessageBoundary("user", "", 2, 2))))
    assert empty["problem"].tolist() == ["", "message 1 (user) has no tokens", ""]
    with pytest.raises(AnalysisError, match="neither messages nor captured rows of an answer"):
        message_frame(handle([ROWS[0][:5]], prompt=PROMPT, answer=[20]))


def test_cosines_between_messages() -> None:
    frame = message_cosines(chat())
    square = frame.pivot(index="first", columns="second", values="cosine")
    assert list(square.index) == ["0 system", "1 user", "answer"]
    # (3, 4), (3, 5), (6, 5)
    assert square.loc["0 system", "1 user"] == pytest.approx(29 / (5 * math.sqrt(34)))
    assert square.loc["answer", "0 system"] == pytest.approx(38 / (5 * math.sqrt(61)))
    assert np.diag(square) == pytest.approx([1, 1, 1])
    assert square.to_numpy() == pytest.approx(square.to_numpy().T)
    lost = message_cosines(chat(boundaries=(BOUNDARIES[0], LOST)))
    assert lost["cosine"].isna().sum() == 5
    assert set(lost[lost["cosine"].isna()]["problem"]) == {str(LOST)}
    means = message_means(chat(), 3)
    assert {label: mean.tolist() for label, mean in means.items()} == {
        "0 system": [3, 4],
        "1 user": [3, 5],
        "answer": [6, 5],
    }
    pd.testing.assert_series_equal(cosine_frame(means)["cosine"], frame["cosine"])
    for bad in ({"a": [1.0], "b": [1.0, 2.0]}, {"a": [[1.0, 2.0]], "b": [[1.0, 2.0]]}):
        with pytest.raises(AnalysisError, match="different shapes"):
            cosine_frame(bad)
    halves = {label: torch.from_numpy(mean).bfloat16() for label, mean in means.items()}
    pd.testing.assert_series_equal(cosine_frame(halves)["cosine"], frame["cosine"])


def test_which_rows() -> None:
    made = chat()
    chosen = {tokens: token_rows(made, tokens).tolist() for tokens in ("last", "prompt", "answer", "all", 0, -1)}
    assert chosen == {
        "last": [4],
        "prompt": [1, 2, 3, 4],
        "answer": [5, 6],
        "all": [0, 1, 2, 3, 4, 5, 6],
        0: [1],
        -1: [2, 3],
    }
    rows = made.hidden(3)[1:5]
    assert rows.norm(dim=-1).tolist() == [5, 10, 2, 5]  # 10 is more than three times the lower quartile: a sink
    assert mean_activation(made, 3, "prompt").tolist() == pytest.approx(rows[[0, 2, 3]].mean(dim=0).tolist())
    with pytest.raises(AnalysisError, match=r"the answer .* was captured"):
        token_rows(handle([ROWS[0][:5]], prompt=PROMPT, answer=[20]), "answer")
    with pytest.raises(AnalysisError, match="expected a message's index or one of last, prompt, answer, all"):
        token_rows(made, "first")
    with pytest.raises(MessageLocationError, match="leaves it out"):
        token_rows(chat(boundaries=(BOUNDARIES[0], LOST)), 1)


def test_profile_over_layers() -> None:
    frame = token_frame(chat(), directions=ALONG)
    profile = layer_frame(frame)
    assert list(profile.columns) == [
        *("request", "layer", "tokens", "norm", "norm_std", "projection_x", "cosine_x"),
    ]
    assert profile["tokens"].tolist() == [6]
    assert profile["norm"].tolist() == pytest.approx([40 / 6])
    assert profile["norm_std"].tolist() == pytest.approx([np.std([5, 10, 2, 5, 5, 13])])
    assert layer_frame(frame, first_token=True)["norm"].tolist() == pytest.approx([90 / 7])
    assert layer_frame(frame, generated=True)["norm"].tolist() == [9]
    assert layer_frame(frame, generated=False)["norm"].tolist() == [5.5]
    roles = layer_frame(frame, ("role",)).set_index("role")
    assert roles["projection_x"].to_dict() == {"system": 3, "user": 3, "template": -3, "answer": 6}
    with pytest.raises(AnalysisError, match="no token is left"):
        layer_frame(frame[frame["position"] == 0])


def test_a_real_capture(model: VLLMSteerModel, hf: Oracle) -> None:
    """Norms and projections of a chat with the demo model, against Hugging Face in float32."""
    messages = [{"role": "user", "content": "Name a river."}]
    _, (made,) = asyncio.run(model.chat(messages, temperature=0.0, max_tokens=6, capture_layers=[0, 10, 29]))
    asyncio.run(made.fetch())
    direction = torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(3))
    frame = token_frame(made, model.tokenizer, {"d": direction})
    wanted = hf.residuals(made.token_ids, SteeringSpec.none())
    unit = direction / direction.norm()
    for layer in (0, 10, 29):
        rows = frame[frame["layer"] == layer]
        assert rows["norm"].to_numpy() == pytest.approx(wanted[layer].norm(dim=-1).numpy(), rel=1e-4)
        assert rows["projection_d"].to_numpy() == pytest.approx((wanted[layer] @ unit).numpy(), rel=1e-3, abs=1e-3)
    rows = frame[frame["layer"] == 0]
    assert "".join(rows["token"]) == model.tokenizer.decode(made.token_ids)
    assert "".join(rows[rows["role"] == "user"]["token"]) == "Name a river."
    assert rows["generated"].sum() == 5
    (layer_10,) = (part for layer, part in message_frame(made, layers=[10]).groupby("layer"))
    assert layer_10["label"].tolist()[-2:] == ["0 user", "answer"]
    user = wanted[10][torch.from_numpy(token_rows(made, 0))]
    assert layer_10["norm_of_mean"].tolist()[-2] == pytest.approx(float(user.mean(dim=0).norm()), rel=1e-4)


def test_a_message_with_a_sink_is_compared_by_its_other_tokens() -> None:
    plain = [[9.0, 9.0], [3.0, 4.0], [4.0, 3.0], [4.0, 3.0], [5.0, 0.0], [4.0, 3.0], [3.0, 4.0]]
    outlier = [*plain[:3], [-2000.0, 100.0], *plain[4:]]
    one, other = (chat(rows=[rows]) for rows in (plain, outlier))
    assert message_means(other, 3)["1 user"].tolist() == [4.0, 3.0]
    pd.testing.assert_series_equal(message_cosines(one)["cosine"], message_cosines(other)["cosine"])
    assert message_frame(other).set_index("label").loc["1 user", ["tokens", "left_out", "norm"]].tolist() == [2, 1, 5.0]


def test_cosines_of_vectors_whose_squares_overflow() -> None:
    vectors = {"a": np.array([1e200, 1e200]), "b": np.array([1e-200, 1e-200]), "c": np.array([np.inf, 1.0])}
    found = cosine_frame(vectors).pivot(index="first", columns="second", values="cosine")
    assert found.loc["a", ["a", "b"]].tolist() == pytest.approx([1.0, 1.0])
    assert found["c"].isna().all()
