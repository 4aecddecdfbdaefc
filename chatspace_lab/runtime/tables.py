"""The persistent buffers that the operator reads. Rewriting their contents is all that steering is.

======================  ======================================  ================================================
buffer                  shape, dtype                            meaning
======================  ======================================  ================================================
bank                    [max_vectors, hidden_size] float32      distinct vectors; the kernel process places them
programs                [slots, layers, 1 + max_ops, 4] int32   entry 0: how many operations; then each one's
                                                                kind, bank row, and the bits of a and b (float32)
captures                [slots, layers] int64                   address of a capture segment's first row, or 0
program_of_token        [max_tokens] int32                      slot of each token's program; 0 leaves it alone
capture_of_token        [max_tokens] int32                      slot of each token's segment; 0 captures nothing
capture_row_of_token    [max_tokens] int32                      the token's row within its segment
======================  ======================================  ================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from chatspace_lab import wire
from chatspace_lab.runtime.store import FIRST_ANSWER_ROWS


class SlotTable:
    """A table whose rows are filled when a step needs them, and kept until another needs the place.

    So a step never needs more slots than it has users, and dragging a slider uses up nothing. Slot 0 is all zero.

    Parameters
    ----------
    slots
        Distinct rows that one step may need, at most.
    shape, dtype
        Of one row.
    device
        Where the operator reads it.
    """

    def __init__(self, slots: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(slots + 1, *shape, dtype=dtype, device=device)
        on_gpu = device.type == "cuda"
        self._mirror = torch.zeros(slots + 1, *shape, dtype=dtype, pin_memory=True) if on_gpu else self.values
        self.host = self._mirror.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None
        self._slot_of: dict[Hashable, int] = {}
        self._name_of: list[Hashable] = [None] * (slots + 1)
        self._used = np.zeros(slots + 1, dtype=np.int64)  # the step that used each slot last
        self._step = 0
        self._free = list(range(slots, 0, -1))

    def place(self, names: Sequence[Hashable], write: Callable[[list[int], list[Any]], None]) -> list[int]:
        """Make every one of these rows resident and return their slots.

        Parameters
        ----------
        names
            Of the rows that this step needs, each once.
        write
            Fills ``host`` at the given slots with the rows of the given names.
        """
        self._step += 1
        slots = [self._slot_of.get(name, 0) for name in names]
        self._used[slots] = self._step
        if 0 in slots:
            if self._copied is not None:
                self._copied.synchronize()  # the mirror must not change under a copy that still runs
            new = [at for at, slot in enumerate(slots) if not slot]
            for at in new:
                slots[at] = self._take(names[at])
            fresh = [slots[at] for at in new]
            write(fresh, [names[at] for at in new])
            if self._copied is not None:
                between = slice(min(fresh), max(fresh) + 1)  # one copy: the mirror holds what each slot should
                self.values[between].copy_(self._mirror[between], non_blocking=True)
                self._copied.record()
        return slots

    def _take(self, name: Hashable) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            slot = 1 + int(np.argmin(self._used[1:]))  # a step never needs all slots and one more
            del self._slot_of[self._name_of[slot]]
        self._slot_of[name], self._name_of[slot], self._used[slot] = slot, name, self._step
        return slot


class Tables:
    """All buffers of a worker, on the model's device.

    Parameters
    ----------
    layers, hidden_size
        Of the model.
    max_requests
        Requests that one step may hold, at most: the scheduler's ``max_num_seqs``.
    max_ops, max_vectors, max_tokens
        Sizes of the buffers.
    device
        Where the operator runs.
    """

    def __init__(
        self,
        *,
        layers: int,
        hidden_size: int,
        max_requests: int,
        max_ops: int,
        max_vectors: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self.device, self.layers, self.hidden_size, self.max_tokens = device, layers, hidden_size, max_tokens
        self.bank = torch.zeros(max_vectors, hidden_size, dtype=torch.float32, device=device)
        self.programs = SlotTable(max_requests, (layers, 1 + max_ops, 4), torch.int32, device)
        # A request's step may begin in one segment of its capture and end in another. One that was thrown out and is
        # computed again covers those between too, each of which has twice FIRST_ANSWER_ROWS or more.
        between = max_tokens // (2 * FIRST_ANSWER_ROWS)
        self.captures = SlotTable(2 * max_requests + between, (layers,), torch.int64, device)
        self.program_of_token = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.capture_of_token = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.capture_row_of_token = torch.zeros(max_tokens, dtype=torch.int32, device=device)

    def put_vectors(self, rows: Iterable[int], data: bytes) -> None:
        """Write vectors (float32 bytes, one after the other) into rows of the bank."""
        index = torch.tensor(list(rows), dtype=torch.long, device=self.device)
        values = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(len(index), self.hidden_size)
        self.bank[index] = values.to(self.device)

    def digest(self) -> str:
        """Name the contents of the bank."""
        return hashlib.blake2b(self.bank.cpu().numpy().tobytes(), digest_size=16).hexdigest()

    def place_programs(self, programs: Iterable[bytes]) -> dict[bytes, int]:
        """Return the slots of a step's programs (arrays of :data:`chatspace_lab.wire.OP` as bytes); ``b""`` is 0."""
        names = [program for program in programs if program]
        slots = self.programs.place(names, self._write_programs)
        return {b"": 0, **dict(zip(names, slots, strict=True))}

    def _write_programs(self, slots: list[int], programs: list[bytes]) -> None:
        """Fill slots from operations that are grouped by layer and in order."""
        ops = np.frombuffer(b"".join(programs), dtype=wire.OP)
        owner = np.repeat(np.arange(len(slots)), [len(program) // wire.OP.itemsize for program in programs])
        group = owner * self.layers + ops["layer"]
        index = np.arange(len(ops))
        first = np.where(np.diff(group, prepend=-1) != 0, index, 0)
        entry = 1 + index - np.maximum.accumulate(first)
        host = self.programs.host
        counts = np.bincount(group, minlength=len(slots) * self.layers)
        host[slots, :, 0, 0] = counts.reshape(len(slots), self.layers)
        host[np.asarray(slots)[owner], ops["layer"], entry] = np.stack(
            [ops["kind"], ops["row"], ops["a"].view(np.int32), ops["b"].view(np.int32)], axis=-1
        )
