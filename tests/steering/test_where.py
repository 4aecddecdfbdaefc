from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from chatspace_lab import AddSpec, SteeringSpec, Where
from chatspace_lab.chat import MessageBoundary
from chatspace_lab.errors import MessageLocationError, RequestError
from chatspace_lab.spans import FOREVER, below, overlaps, rank
from chatspace_lab.steering.where import as_where, resolve

PROMPT = [1, 5, 6, 2, 1, 7, 8, 9, 2]  # 1 and 2 are special
MESSAGES = [MessageBoundary("user", "a", 1, 3), MessageBoundary("user", "b", 5, 8)]


def spans(where: Where | str, **options: object) -> list[int]:
    return resolve(as_where(where), PROMPT, limit=20, special_ids={1, 2}, messages=MESSAGES, **options)  # type: ignore[arg-type]


def test_each_choice() -> None:
    assert spans("all") == [0, -1]
    assert spans("prompt") == [0, 9]
    assert spans("answer") == [9, -1]
    assert spans(Where.span(3, 14)) == [3, 14]
    assert spans(Where.messages(1)) == [5, 8]
    assert spans(Where.messages(-1, 0)) == [1, 3, 5, 8]
    assert spans(Where.messages(1, 0, 1, -2)) == [1, 3, 5, 8]  # each message once, however it is named


@pytest.mark.parametrize(
    "where", [Where.span(np.int64(3), np.int32(14)), Where.span(3, 10**30), Where.messages(*np.arange(2))]
)
def test_indices_are_whole_numbers_of_any_kind(where: Where) -> None:
    found = spans(where)
    assert found in ([3, 14], [3, FOREVER], [1, 3, 5, 8])
    assert all(type(edge) is int for edge in found)


@pytest.mark.parametrize("make", [Where.messages, lambda index: Where.span(0, index)])
@pytest.mark.parametrize("index", [1.0, True, "1", None, [1]])
def test_indices_that_are_no_whole_numbers(make: Callable[[Any], Where], index: Any) -> None:
    with pytest.raises(RequestError, match="each index must be a whole number"):
        make(index)


def test_special_tokens_of_the_prompt_are_left_out() -> None:
    assert spans(Where().without_special_tokens()) == [1, 3, 5, 8, 9, -1]
    assert spans(Where("prompt").without_special_tokens()) == [1, 3, 5, 8]
    assert spans(Where("answer").without_special_tokens()) == [9, -1]
    assert spans(Where.span(2, 6).without_special_tokens()) == [2, 3, 5, 6]


def test_the_first_token_is_left_out() -> None:
    assert spans(Where().without_first_token()) == [1, -1]
    assert spans(Where("prompt").without_first_token()) == [1, 9]
    assert spans(Where("answer").without_first_token()) == [9, -1]
    assert spans(Where.span(0, 3).without_first_token()) == [1, 3]
    assert spans(Where("prompt").without_first_token().without_special_tokens()) == [1, 3, 5, 8]
    with pytest.raises(RequestError, match="selects no token"):
        spans(Where.span(0, 1).without_first_token())


def test_adjacent_spans_are_joined() -> None:
    messages = [MessageBoundary("user", "a", 1, 3), MessageBoundary("user", "b", 3, 8)]
    assert resolve(Where.messages(1, 0), PROMPT, limit=20, messages=messages) == [1, 8]


def test_what_selects_nothing_or_does_not_exist_is_an_error() -> None:
    with pytest.raises(RequestError, match="'middle'"):
        Where("middle")
    with pytest.raises(RequestError, match="at least one message"):
        Where.messages()
    with pytest.raises(RequestError, match="0 <= start < end"):
        Where.span(5, 5)
    with pytest.raises(RequestError, match="starts at 30"):
        spans(Where.span(30, 40))
    with pytest.raises(RequestError, match="message 2 does not exist"):
        spans(Where.messages(2))
    with pytest.raises(RequestError, match="no token"):
        spans(Where.span(0, 1).without_special_tokens())
    with pytest.raises(RequestError, match="plain prompt has no messages"):
        resolve(Where.messages(0), PROMPT, limit=20)
    lost = MessageLocationError("message 0 (user) cannot be located: it is left out")
    with pytest.raises(MessageLocationError, match="left out"):
        resolve(Where.messages(0), PROMPT, limit=20, messages=[lost])
    with pytest.raises(RequestError, match="got int"):
        SteeringSpec.at(1, AddSpec([1.0]), where=3)  # type: ignore[arg-type]


def test_a_spec_keeps_its_where() -> None:
    spec = SteeringSpec.at(1, AddSpec([1.0]), where="answer")
    assert spec.where == Where("answer")
    assert spec.with_layer(2, spec.layers[1]).where == Where("answer")
    assert SteeringSpec.none().where == Where()


def test_arithmetic_of_spans() -> None:
    assert overlaps([2, 5, 8, -1], 3, 7) == [(3, 5), (8, 10)]
    assert below([2, 5, 8, -1], 10) == [2, 3, 4, 8, 9]
    assert [rank([2, 5, 8, -1], at) for at in (0, 2, 4, 7, 8, 11)] == [0, 0, 2, 3, 3, 6]
