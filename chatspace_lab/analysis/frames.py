"""Tidy frames with a row per request, layer and token; and their means per layer.

Columns of a token frame
------------------------
request, prompt_index, sample_index
    Which run.
layer
    Layer i is the output of decoder block i.
row, position
    Row of the capture; absolute position of the token.
token_id, token
    The token, and its text on its own (missing without a tokenizer).
role
    ``system``, ``user``, ``assistant``, … for the tokens of a message's own content; ``template`` for what the chat
    template put between them; ``answer`` for generated tokens; ``prompt`` where the request was no chat; ``unlocated``
    for tokens of a chat that may be the template's or those of a message that cannot be located.
message
    Index of the message, missing outside one.
special
    Whether the model reads the token as structure and not as text (``<|im_end|>``, ``<think>``); missing without a
    tokenizer. In the tokens of a message, its own text spells it.
generated
    Whether the model wrote this token.
norm
    L2 norm of the activation x, in units of the residual stream.
projection_NAME, cosine_NAME
    For each direction with unit vector u: x·u in the same units, and x·u / |x|. Missing cosine where x is zero, or a
    number is beyond float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from chatspace_lab.analysis.inputs import as_handles, need
from chatspace_lab.analysis.rows import chosen_layers
from chatspace_lab.analysis.tokens import token_texts
from chatspace_lab.capture import CaptureHandle
from chatspace_lab.chat import MessageBoundary
from chatspace_lab.errors import AnalysisError, MessageLocationError
from chatspace_lab.readings import Readings, cosines, read_rows, sinks
from chatspace_lab.special_tokens import special_ids
from chatspace_lab.steering.directions import DirectionSet

Locations = Sequence[MessageBoundary | MessageLocationError] | None


def directions_of(frame: pd.DataFrame) -> list[str]:
    """Return the names of the directions that a frame has columns for."""
    return [name.removeprefix("projection_") for name in map(str, frame.columns) if name.startswith("projection_")]


def readings_frame(
    readings: Readings,
    *,
    prompt_len: int,
    tokenizer: Any = None,
    locations: Locations = None,
    request: str = "",
    prompt_index: int = 0,
    sample_index: int = 0,
) -> pd.DataFrame:
    """Return the token frame of norms and projections that are already reduced.

    Parameters
    ----------
    readings
        Norms and projections; ``values`` is ``[layers, tokens, 1 + directions]`` float32.
    prompt_len
        Tokens of the prompt: positions from there on are generated.
    tokenizer
        A Hugging Face tokenizer, for the text of the tokens.
    locations
        Per message of the chat its boundary, or the error that says why it cannot be located
        (``handle.message_locations``); None if the request was no chat.
    request, prompt_index, sample_index
        Name the run.

    Returns
    -------
    pandas.DataFrame
        A row per layer and token; the columns are described at the top of this module.

    Raises
    ------
    AnalysisError
        If the parts of ``readings`` do not fit together.
    """
    values = np.asarray(readings.values, dtype=np.float32)
    layers, tokens = len(readings.layers), len(readings.positions)
    shape = (layers, tokens, 1 + len(readings.directions))
    if values.shape != shape or len(readings.token_ids) != tokens:
        raise AnalysisError(
            f"readings do not fit together: values {list(values.shape)} and {len(readings.token_ids)} token ids, for "
            f"{layers} layers, {tokens} positions and {len(readings.directions)} directions"
        )
    positions = np.asarray(readings.positions, dtype=np.int64)
    role, message = _roles(positions, prompt_len, locations)
    token_ids = np.asarray(readings.token_ids, dtype=np.int64)
    texts = token_texts(token_ids, tokenizer) if tokenizer is not None else [None] * tokens
    known = special_ids(tokenizer) if tokenizer is not None else frozenset()
    special = [int(token) in known if tokenizer is not None else pd.NA for token in token_ids]
    frame = pd.DataFrame(
        {
            "request": pd.Series([request] * (layers * tokens), dtype="str"),
            "prompt_index": prompt_index,
            "sample_index": sample_index,
            "layer": np.repeat(np.asarray(readings.layers, dtype=np.int64), tokens),
            "row": np.tile(np.arange(tokens), layers),
            "position": np.tile(positions, layers),
            "token_id": np.tile(token_ids, layers),
            "token": pd.Series(list(texts) * layers, dtype="str"),
            "role": pd.Series(role * layers, dtype="str"),
            "message": pd.array(message * layers, dtype="Int64"),
            "special": pd.array(special * layers, dtype="boolean"),
            "generated": np.tile(positions >= prompt_len, layers),
            "norm": values[..., 0].reshape(-1),
        }
    )
    for index, name in enumerate(readings.directions):
        projection = values[..., 1 + index]
        frame[f"projection_{name}"] = projection.reshape(-1)
        frame[f"cosine_{name}"] = cosines(projection, values[..., 0]).reshape(-1)
    return frame


def token_frame(
    handles: CaptureHandle | Sequence[CaptureHandle],
    tokenizer: Any = None,
    directions: Mapping[str, Any] | None = None,
    layers: Sequence[int] | int | None = None,
) -> pd.DataFrame:
    """Return the token frame of fetched captures.

    Parameters
    ----------
    handles
        One fetched handle, or several.
    tokenizer
        A Hugging Face tokenizer, for the text of the tokens.
    directions
        ``{name: vector}``, where a vector is ``[hidden_size]`` (used at every layer), ``{layer: vector}`` or a
        :class:`Direction`. Its length does not matter.
    layers
        Which of the captured layers; all with None.

    Returns
    -------
    pandas.DataFrame
        A row per request, layer and token; the columns are described at the top of this module.

    Raises
    ------
    AnalysisError
        If a layer was not captured.
    CaptureNotFetchedError, CaptureClosedError
        If the rows are not in this process.
    RequestError, SteeringError
        If a direction cannot be used.
    """
    frames = [
        readings_frame(
            handle_readings(handle, directions, layers),
            prompt_len=handle.prompt_len,
            tokenizer=tokenizer,
            locations=handle.message_locations,
            request=handle.request_id,
            prompt_index=handle.prompt_index,
            sample_index=handle.sample_index,
        )
        for handle in as_handles(handles, "token_frame")
    ]
    return pd.concat(frames, ignore_index=True)


def handle_readings(
    handle: CaptureHandle, directions: Mapping[str, Any] | None, layers: Sequence[int] | int | None
) -> Readings:
    """Return norms and projections of a fetched handle's rows. Activations become float32 before anything is summed."""
    chosen = chosen_layers(handle, layers)
    hidden = [handle.hidden(layer) for layer in chosen]
    laid_out = DirectionSet.of(directions, chosen, hidden[0].shape[-1])
    units = np.broadcast_to(laid_out.units, (len(chosen), *laid_out.units.shape[1:])).copy()
    values = [read_rows(rows[None], units[index : index + 1])[0] for index, rows in enumerate(hidden)]
    return Readings(
        np.asarray(handle.positions, dtype=np.int64),
        np.asarray(handle.token_ids, dtype=np.int64),
        chosen,
        laid_out.names,
        np.stack(values),
    )


def sinks_of(tokens: pd.DataFrame) -> np.ndarray:
    """Return which rows of a token frame are attention sinks, or stand at position 0, ``[rows]`` bool.

    Per request and layer, among all tokens of the frame but the one at position 0; the rule is that of
    :mod:`chatspace_lab.readings`.
    """
    found = (tokens["position"] == 0).to_numpy(copy=True)
    groups = tokens[~found].groupby(["request", "layer"], sort=False)["norm"]
    found[~found] = groups.transform(lambda norm: sinks(norm.to_numpy())).to_numpy(dtype=bool)
    return found


def attention_sinks(source: CaptureHandle | pd.DataFrame, tokenizer: Any = None) -> pd.DataFrame:
    """Return the tokens that means and doses leave out: the rows of a token frame that are attention sinks.

    Parameters
    ----------
    source
        A token frame, or a fetched handle.
    tokenizer
        For a handle: a Hugging Face tokenizer, for the text of the tokens.

    Returns
    -------
    pandas.DataFrame
        Those rows, with a column ``times``: the norm relative to the mean norm of the tokens that are kept, of the same
        request and layer (missing where none is).
    """
    tokens = token_frame(source, tokenizer) if isinstance(source, CaptureHandle) else source
    marked = sinks_of(tokens)
    kept = tokens[~marked].astype({"norm": "float64"}).groupby(["request", "layer"])["norm"].mean().rename("kept")
    found = tokens[marked].join(kept, on=["request", "layer"])
    return found.assign(times=found["norm"] / found["kept"]).drop(columns="kept")


def layer_frame(
    tokens: pd.DataFrame, by: Sequence[str] = ("request",), *, first_token: bool = False, generated: bool | None = None
) -> pd.DataFrame:
    """Return the profile over layers: means over the tokens of a token frame.

    Parameters
    ----------
    tokens
        A token frame.
    by
        Columns to keep apart, besides the layer: ``("request",)``, ``("role",)``, ``("request", "role")``, …
    first_token
        Whether attention sinks count: the token at position 0, and what else :func:`attention_sinks` lists. Their
        activations are many times longer than all others, and would be all that a mean shows.
    generated
        True for generated tokens only, False for the prompt only, None for both.

    Returns
    -------
    pandas.DataFrame
        The columns ``by``, then ``layer``, ``tokens`` (how many), ``norm`` and ``norm_std`` (mean and standard
        deviation over tokens), and the mean ``projection_NAME`` and ``cosine_NAME`` of each direction.

    Raises
    ------
    AnalysisError
        If no token is left.
    """
    need(tokens, [*by, "request", "layer", "position", "generated", "norm"], "layer_frame")
    chosen = tokens if first_token else tokens[~sinks_of(tokens)]
    if generated is not None:
        chosen = chosen[chosen["generated"] == generated]
    if chosen.empty:
        raise AnalysisError("no token is left to average: the frame has none of those asked for")
    names = directions_of(tokens)
    columns = [column for name in names for column in (f"projection_{name}", f"cosine_{name}")]
    means = {column: (column, "mean") for column in columns}
    chosen = chosen.astype(dict.fromkeys(["norm", *columns], "float64"))  # squares of large float32 would overflow
    grouped = chosen.groupby([*by, "layer"], sort=False, dropna=False)
    return grouped.agg(
        tokens=("norm", "size"), norm=("norm", "mean"), norm_std=("norm", lambda norm: norm.std(ddof=0)), **means
    ).reset_index()


def _roles(positions: np.ndarray, prompt_len: int, locations: Locations) -> tuple[list[str], list[Any]]:
    """Return the role of each position, and the message it belongs to or ``pandas.NA``."""
    if locations is None:
        outside = "prompt"
    elif any(isinstance(location, MessageLocationError) for location in locations):
        outside = "unlocated"
    else:
        outside = "template"
    role = ["answer" if position >= prompt_len else outside for position in positions]
    message: list[Any] = [pd.NA] * len(positions)
    for index, location in enumerate(locations or ()):
        if isinstance(location, MessageBoundary):
            for row in np.flatnonzero((positions >= location.start) & (positions < location.end)):
                role[row], message[row] = location.role, index
    return role, message
