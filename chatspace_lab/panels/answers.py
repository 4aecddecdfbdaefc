"""One side's conversation with its numbers, as it is sent to the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from chatspace_lab.capture import CaptureHandle
from chatspace_lab.chat import MessageBoundary, answer
from chatspace_lab.engine.requests import Prompt
from chatspace_lab.engine.stream import StreamDelta, TextStream
from chatspace_lab.panels.asked import Asked
from chatspace_lab.panels.buffers import pack, tokens_that_fit
from chatspace_lab.panels.pieces import Pieces
from chatspace_lab.readings import Readings, typical_norms
from chatspace_lab.spans import rank
from chatspace_lab.special_tokens import special_ids
from chatspace_lab.steering.directions import at_layer, is_per_layer


class Answer:
    """An answer under way or complete.

    Parameters
    ----------
    asked
        What it belongs to.
    messages, prompt
        The conversation that it answers, and as the engine is given it.
    stream
        Brings it.
    vectors
        Read along it, by name.
    steered_spans
        Positions that are steered, as flat spans.
    tokenizer
        The model's.

    Attributes
    ----------
    text, token_ids, finish
        What the engine has given so far: ahead of ``stream``, which waits for the numbers.
    """

    def __init__(
        self,
        asked: Asked,
        messages: list[dict[str, str]],
        prompt: Prompt,
        stream: TextStream,
        vectors: Mapping[str, Any],
        steered_spans: Sequence[int] = (0, -1),
        *,
        tokenizer: Any = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.asked, self.stream, self.vectors = asked, stream, dict(vectors)
        self._messages, self._steered_spans = messages, steered_spans
        self.text, self.token_ids = "", list[int]()
        self.finish: str | None = None
        self._reread: Readings | None = None
        handle = stream.handle
        if handle is None:
            raise TypeError("a panel's stream captures")
        self.handle: CaptureHandle = handle
        self._prompt, self._chat = list(prompt.token_ids), prompt.chat
        self._locations = prompt.chat.boundaries if prompt.chat else ()

    def take(self, piece: StreamDelta) -> None:
        """Add a piece."""
        self.text += piece.text
        self.token_ids.extend(piece.token_ids)
        self.finish = piece.finish_reason or self.finish

    @property
    def content(self) -> str:
        """The content of this answer as a message of the next turn: see :meth:`ChatResponse.to_message`."""
        response = answer(self._tokenizer, self._chat, self.text, self.token_ids, self.finish)
        return response.to_message()["content"]

    @property
    def readings(self) -> Readings | None:
        """What has been read so far."""
        return self._reread or self.stream.readings

    @property
    def touched(self) -> int:
        """Tokens that were computed under steering so far."""
        return rank(self._steered_spans, self.handle.computed)

    def read_again(self, readings: Readings, vectors: Mapping[str, Any]) -> None:
        """Take readings of other directions, of the same rows."""
        self._reread, self.vectors = readings, dict(vectors)

    def prompt_norms(self) -> dict[int, float]:
        """Return the mean norm per layer over the prompt without attention sinks; empty before it was read."""
        readings = self.readings
        if readings is None:
            return {}
        prompt = readings.positions < self.handle.prompt_len
        means, _ = typical_norms(readings.norm[:, prompt], readings.positions[prompt])
        norms = dict(zip(readings.layers, map(float, means), strict=True))
        return norms if all(norm > 0 for norm in norms.values()) else {}

    def projections(self, name: str, layers: Sequence[int]) -> np.ndarray | None:
        """Return x·u of all tokens, NaN for attention sinks, ``[layers, tokens]``; None where it was not read."""
        readings = self.readings
        if readings is None or name not in readings.directions or not set(layers) <= set(readings.layers):
            return None
        rows = [readings.layers.index(layer) for layer in layers]
        left_out = typical_norms(readings.norm[rows], readings.positions)[1]
        return np.where(left_out, np.nan, readings.projection(name)[rows])

    def payload(self, direction: str | None, pieces: Pieces) -> dict[str, Any]:
        """Return what the page shows. Values cover positions from ``first`` on; the newest token has none yet.

        Of an answer that began before ``first`` the beginning is ``head``, a text.
        """
        ids = [*self._prompt, *self.token_ids]
        readings = self.readings
        count = len(readings) if readings is not None else 0
        characters = sum(len(message["content"]) for message in self._messages)
        first = count - tokens_that_fit(len(self.asked.layers), count, characters)
        written = pieces.of(self.token_ids, special=False)
        bands = self._bands(len(ids))
        shown: dict[str, Any] = {
            "number": self.asked.number,
            "rows": [row.plain() for row in self.asked.rows],
            "messages": self._messages,
            "text": self.text,
            "finish": self.finish,
            "prompt": len(self._prompt),
            "first": first,
            "ids": ids[first:],
            "texts": [*pieces.of(self._prompt), *written][first:],
            "head": "".join(written[: max(first - len(self._prompt), 0)]),
            "bands": bands,
            "special": self._spelt(bands[:-1], first),
            "layers": list(self.asked.layers),
            "direction": direction if readings is not None and direction in readings.directions else None,
            "norm": None,
            "projection": None,
        }
        if readings is not None:
            shown["norm"] = pack(readings.norm[:, first:])
            if shown["direction"] is not None:
                values = readings.projection(shown["direction"])[:, first:]
                shown["projection"] = pack(_only_known(values, self.vectors[shown["direction"]], readings.layers))
        return shown

    def _spelt(self, bands: Sequence[Mapping[str, Any]], first: int) -> list[int]:
        """Return the positions of special tokens that the messages' own texts spell."""
        special = special_ids(self._tokenizer) if self._tokenizer is not None else frozenset()
        places = {at for band in bands for at in range(max(band["start"], first), band["end"])}
        return sorted(at for at in places if self._prompt[at] in special)

    def _bands(self, length: int) -> list[dict[str, Any]]:
        """Return where each message stands, the answer last. Those that cannot be located are left out."""
        bands = [
            {"message": index, "role": each.role, "start": each.start, "end": each.end}
            for index, each in enumerate(self._locations)
            if isinstance(each, MessageBoundary)
        ]
        answer = {"message": len(self._messages), "role": "assistant", "start": len(self._prompt), "end": length}
        return [*bands, answer]


def for_layers(vector: Any, layers: Sequence[int]) -> Any:
    """Return a vector, or one per layer, that can be read at all of ``layers``.

    A direction that is not known at each of them is read there along another layer's; :func:`_only_known` takes those
    values out again.
    """
    if not is_per_layer(vector):
        return vector
    known = sorted(vector if isinstance(vector, Mapping) else vector.layers)
    return {layer: at_layer(vector, layer if layer in known else known[0], "direction") for layer in layers}


def _only_known(values: np.ndarray, vector: Any, layers: Sequence[int]) -> np.ndarray:
    if not is_per_layer(vector):
        return values
    known = set(vector if isinstance(vector, Mapping) else vector.layers)
    out = values.copy()
    out[[index for index, layer in enumerate(layers) if layer not in known]] = np.nan
    return out
