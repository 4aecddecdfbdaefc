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
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping

import numpy as np
import torch

from chatspace_lab import wire


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
        self._slot_of: OrderedDict[Hashable, int] = OrderedDict()
        self._free = list(range(slots, 0, -1))

    def place(self, wanted: Mapping[Hashable, Callable[[np.ndarray], None]]) -> dict[Hashable, int]:
        """Make every wanted row resident and return their slots.

        ``wanted`` maps a row's name to the function that writes it.
        """
        for name in wanted:
            if name in self._slot_of:
                self._slot_of.move_to_end(name)
        new = [name for name in wanted if name not in self._slot_of]
        if new and self._copied is not None:
            self._copied.synchronize()  # the mirror must not change under a copy that still runs
        for name in new:
            slot = self._free.pop() if self._free else self._evict(wanted)
            self._slot_of[name] = slot
            wanted[name](self.host[slot])
            if self._copied is not None:
                self.values[slot].copy_(self._mirror[slot], non_blocking=True)
        if new and self._copied is not None:
            self._copied.record()
        return {name: self._slot_of[name] for name in wanted}

    def _evict(self, wanted: Mapping[Hashable, object]) -> int:
        oldest = next(name for name in self._slot_of if name not in wanted)
        return self._slot_of.pop(oldest)


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
        # A request's step may cross from one segment of its capture into the next.
        self.captures = SlotTable(2 * max_requests, (layers,), torch.int64, device)
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
        wanted: dict[Hashable, Callable[[np.ndarray], None]] = {
            program: lambda row, program=program: _write_program(row, program)  # type: ignore[misc]
            for program in programs
            if program
        }
        return {b"": 0, **self.programs.place(wanted)}  # type: ignore[dict-item]


def _write_program(row: np.ndarray, program: bytes) -> None:
    """Fill ``row`` [layers, 1 + max_ops, 4] int32 from operations that are grouped by layer and in order."""
    ops = np.frombuffer(program, dtype=wire.OP)
    layers = row.shape[0]
    starts = np.searchsorted(ops["layer"], np.arange(layers))
    row[:, 0, 0] = np.bincount(ops["layer"], minlength=layers)
    entry = 1 + np.arange(len(ops)) - starts[ops["layer"]]
    row[ops["layer"], entry] = np.stack(
        [ops["kind"], ops["row"], ops["a"].view(np.int32), ops["b"].view(np.int32)], axis=-1
    )
