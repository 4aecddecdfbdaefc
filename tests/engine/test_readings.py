"""Norms, projections and pooled rows that the worker computes, against the rows themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from chatspace_lab import AddSpec, CaptureHandle, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec, Where
from chatspace_lab.engine.live import LiveReader
from chatspace_lab.engine.model import VLLMSteerModel
from chatspace_lab.engine.stream import StreamDelta
from chatspace_lab.errors import CaptureClosedError, CaptureError, RequestError, SteeringError, WorkerError
from chatspace_lab.readings import cosines, mean_without, pool_rows, read_rows, sinks
from chatspace_lab.steering.directions import DirectionSet
from tests.conftest import held, wait_until

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name a river in France."},
]


def direction(seed: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def wanted(rows: torch.Tensor, directions: list[torch.Tensor]) -> np.ndarray:
    x = rows.double()
    columns = [x.norm(dim=-1)] + [x @ (d.double() / d.double().norm()) for d in directions]
    return torch.stack(columns, dim=-1).numpy()


def test_readings_in_the_worker_equal_those_of_fetched_rows(model: VLLMSteerModel) -> None:
    a, b = direction(1, model.hidden_size), direction(2, model.hidden_size)
    per_layer = {3: a, 17: b, 29: -b}

    async def main() -> None:
        _, handles = await model.generate(
            ["The river", "A long story about boats and the sea"],
            temperature=0.0,
            max_tokens=12,
            ignore_eos=True,
            capture_layers=[3, 17, 29],
            steering=[SteeringSpec.none(), SteeringSpec.at(5, AddSpec(a, 3.0))],
        )
        away = await model.read_captures(handles, {"a": 7 * a, "b": per_layer}, layers=[29, 3])
        assert not any(handle.is_fetched for handle in handles)
        means = [await handle.pool("mean") for handle in handles]
        lasts = [await handle.pool("last", layers=[17]) for handle in handles]
        await model.fetch_captures_batch(handles)
        here = await model.read_captures(handles, {"a": a, "b": per_layer}, layers=[29, 3])
        for handle, far, near, mean, last in zip(handles, away, here, means, lasts, strict=True):
            assert far.positions.tolist() == handle.positions == list(range(handle.prompt_len + 11))
            assert far.token_ids.tolist() == handle.token_ids
            for at, (layer, second) in enumerate([(29, -b), (3, a)]):
                want = wanted(handle.hidden(layer), [a, second])
                np.testing.assert_allclose(far.values[at], want, rtol=1e-5, atol=1e-3)
            np.testing.assert_allclose(far.values, near.values, rtol=1e-5, atol=1e-3)
            for at, layer in enumerate([3, 17, 29]):
                torch.testing.assert_close(mean[at], handle.hidden(layer).mean(dim=0), rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(last[0], handle.hidden(17)[-1])
            handle.close()

    asyncio.run(main())


@pytest.mark.parametrize("scale", [1e-20, 1e20, 3e29])
def test_numbers_whose_squares_are_beyond_float32_are_right(model: VLLMSteerModel, scale: float) -> None:
    u = direction(1, model.hidden_size).double()
    unit, last = (u / u.norm()).float(), model.layer_count - 1
    # Nothing but what is added is left in the stream at the last layer: its norm is known.
    spec = SteeringSpec({last: LayerSteeringSpec(operations=[ProjectionCapSpec(unit, 0.0, 0.0), AddSpec(unit, scale)])})

    async def main() -> None:
        _, [handle] = await model.generate("The river", max_tokens=1, steering=spec, capture_layers=[last])
        async with handle:
            [away] = await model.read_captures([handle], {"d": 7 * unit})
            mean = await handle.pool("mean")
            await handle.fetch()
            [here] = await model.read_captures([handle], {"d": 7 * unit})
            rows = handle.hidden(last).double()
        for found in (away, here):
            np.testing.assert_allclose(found.norm[0], rows.norm(dim=-1), rtol=1e-5)
            np.testing.assert_allclose(found.cosine("d")[0], (rows @ unit.double()) / rows.norm(dim=-1), atol=1e-5)
            if scale > 1:
                np.testing.assert_allclose(found.norm[0], scale, rtol=1e-3)
                np.testing.assert_allclose(found.cosine("d")[0], 1.0, rtol=1e-3)
        assert torch.isfinite(mean).all()
        torch.testing.assert_close(mean[0].double(), rows.mean(dim=0), rtol=1e-5, atol=1e-4 * max(scale, 1.0))

    asyncio.run(main())


def test_a_number_beyond_float32_makes_a_cosine_unknown_and_no_zero() -> None:
    rows = torch.stack([torch.full((8,), 3e38), torch.full((8,), 3e-30), torch.zeros(8), torch.full((8,), torch.inf)])
    unit = np.zeros((1, 1, 8), dtype=np.float32)
    unit[..., 0] = 1.0
    values = read_rows(rows[None], unit)[0]
    assert values[0].tolist() == [np.inf, pytest.approx(3e38)]
    assert values[1].tolist() == pytest.approx([3e-30 * 8**0.5, 3e-30], rel=1e-5)
    cosine = cosines(values[:, 1], values[:, 0])
    assert np.isnan(cosine[[0, 2, 3]]).all()
    assert cosine[1] == pytest.approx(8**-0.5)
    assert pool_rows(rows[None, :1].repeat(1, 3, 1), "mean").tolist() == [[pytest.approx(3e38)] * 8]


def test_a_mean_that_leaves_out_sinks_hides_nothing_that_is_not_finite() -> None:
    norms = np.array([[5.0, 4.0, 900.0, 6.0, 5.0], [5.0, np.inf, 900.0, 6.0, 5.0], [5.0, np.nan, 900.0, 6.0, 5.0]])
    assert sinks(norms).tolist() == [[at == 2 and row < 2 for at in range(5)] for row in range(3)]
    assert not sinks(np.array([[20000.0, 20100.0]])).any()  # of nothing else there is nothing to leave out
    assert mean_without(norms, sinks(norms)).tolist() == [5.0, np.inf, pytest.approx(np.nan, nan_ok=True)]


@pytest.mark.parametrize("where", ["all", "answer", Where.messages(1)])
def test_a_stream_brings_each_row_once_as_it_is_computed(model: VLLMSteerModel, where: Any) -> None:
    u = direction(3, model.hidden_size)
    ask: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "capture_where": where}

    async def main() -> None:
        stream = model.stream_chat(MESSAGES, read_layers=[4, 20], directions={"u": u}, **ask)
        arrived = []
        async for delta in stream:
            assert delta.readings is not None
            arrived.append(len(delta.readings))
        assert stream.handle is None
        found = stream.readings
        assert found is not None
        _, [handle] = await model.chat(MESSAGES, capture_layers=[4, 20], **ask)
        async with handle:
            await handle.fetch()
            assert found.positions.tolist() == handle.positions
            assert found.token_ids.tolist() == handle.token_ids
            for at, layer in enumerate([4, 20]):
                np.testing.assert_allclose(found.values[at], wanted(handle.hidden(layer), [u]), rtol=1e-4, atol=1e-2)
        if where == "answer":
            assert arrived[0] == 0
            assert sum(arrived) == 23
        if where == "all":
            assert arrived[0] >= handle.prompt_len
            assert len(arrived) > 4  # they came while it ran
        assert sum(arrived) == len(found)

    asyncio.run(main())
    wait_until(lambda: held(model)["buffers"] == 0)


def test_a_stream_that_is_left_keeps_what_it_read_and_frees_the_rest(model: VLLMSteerModel) -> None:
    async def main() -> None:
        async with model.stream(
            "Once", max_tokens=400, ignore_eos=True, read_layers=[7], capture_layers=[7, 9]
        ) as stream:
            async for _ in stream:
                if len(stream.token_ids) >= 5:
                    break
        found, handle = stream.readings, stream.handle
        assert found is not None
        assert handle is not None
        assert found.layers == (7,)
        assert len(found) <= len(handle.positions)
        again = await handle.read()  # another layer, without another forward pass
        assert again.layers == (7, 9)
        np.testing.assert_allclose(again.values[0, : len(found)], found.values[0], rtol=1e-5)
        handle.close()
        with pytest.raises(CaptureClosedError):
            await handle.read()

    asyncio.run(main())
    wait_until(lambda: held(model)["buffers"] == 0)


def test_a_stream_without_readings_has_none_before_it_has_ended(model: VLLMSteerModel) -> None:
    """Nobody has said yet how far it is: an error, and not readings of no rows."""

    async def main() -> None:
        stream = model.stream("Once", max_tokens=20, ignore_eos=True, temperature=0.0, capture_layers=[7])
        await anext(stream)
        assert stream.handle is not None
        for read in (stream.handle.read, stream.handle.pool, lambda: model.read_captures([stream.handle])):
            with pytest.raises(CaptureError, match="has not ended yet: await it, then read"):
                await read()
        async for _ in stream:
            pass
        assert len(await stream.handle.read()) == stream.handle.prompt_len + 19
        stream.handle.close()

    asyncio.run(main())


def test_a_request_that_fails_says_why_and_not_that_its_rows_are_gone(model: VLLMSteerModel) -> None:
    handle = CaptureHandle(
        model._client.captures, request_id="x", layers=[3], spans=[0, -1], hidden_size=2, prompt_token_ids=[1, 2]
    )
    reader = LiveReader(
        model._client.captures, handle, DirectionSet.of(None, [3], 2), note=lambda readings: pytest.fail("no rows")
    )

    async def request() -> None:
        reader.received(StreamDelta("a", (5,)))
        handle.lose()
        raise WorkerError("the engine failed")

    with pytest.raises(WorkerError, match="the engine failed"):
        model._loop.call(reader.run(request(), put=lambda delta: None))


def test_what_cannot_be_read_is_an_error_before_anything_runs(model: VLLMSteerModel) -> None:
    u = direction(4, model.hidden_size)
    with pytest.raises(RequestError, match=r"read_layers: layer 30 .*"):
        model.stream("a", read_layers=[30])
    with pytest.raises(RequestError, match=r"directions: say at which layers to read them: read_layers="):
        model.stream("a", directions={"u": u})
    with pytest.raises(RequestError, match=r"read_layers: \[3\] are not among capture_layers"):
        model.stream("a", read_layers=[3], capture_layers=[4])
    with pytest.raises(SteeringError, match=r"directions\['u'\] has 5 entries, this model's hidden_size is 576"):
        model.stream("a", read_layers=[3], directions={"u": u[:5]})
    with pytest.raises(SteeringError, match=r"directions\['u'\]: the vector is zero"):
        model.stream("a", read_layers=[3], directions={"u": 0 * u})
    with pytest.raises(RequestError, match="directions must be a dict of name to vector"):
        model.stream("a", read_layers=[3], directions=u)
    assert held(model)["buffers"] == 0
