"""The persistent buffers that the operator reads. Rewriting their contents is all that steering is.

==================  ==================================  =====================================================
buffer              shape, dtype                        meaning
==================  ==================================  =====================================================
bank                [max_vectors, hidden_size] float32  distinct vectors; the kernel process places them
ops                 [programs, layers, max_ops, 4]      kind, bank row, and the bits of a and b (float32)
                    int32
counts              [programs, layers] int32            how many operations are used
program_of_token    [max_tokens] int32                  the program of each token of this step; 0 leaves it alone
==================  ==================================  =====================================================
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import torch

from chatspace_lab import wire


class Tables:
    """Buffers on the model's device, with a host mirror of the program table.

    Programs are placed in slots when a step needs them and stay until their slot is needed for another one, so a step
    never needs more slots than it has requests, and dragging a slider uses up nothing.

    Parameters
    ----------
    layers, hidden_size
        Of the model.
    max_programs
        Programs that one step may hold, at most: the scheduler's ``max_num_seqs``.
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
        max_programs: int,
        max_ops: int,
        max_vectors: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self.layers, self.hidden_size, self.max_ops = layers, hidden_size, max_ops
        slots = max_programs + 1  # slot 0 is the program that does nothing
        pin = device.type == "cuda"
        self.bank = torch.zeros(max_vectors, hidden_size, dtype=torch.float32, device=device)
        self.ops = torch.zeros(slots, layers, max_ops, 4, dtype=torch.int32, device=device)
        self.counts = torch.zeros(slots, layers, dtype=torch.int32, device=device)
        self.program_of_token = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._host_ops = torch.zeros(slots, layers, max_ops, 4, dtype=torch.int32, pin_memory=pin)
        self._host_counts = torch.zeros(slots, layers, dtype=torch.int32, pin_memory=pin)
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(slots - 1, 0, -1))

    def put_vectors(self, rows: Iterable[int], data: bytes) -> None:
        """Write vectors (float32 bytes, one after the other) into rows of the bank."""
        index = torch.tensor(list(rows), dtype=torch.long, device=self.device)
        values = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(len(index), self.hidden_size)
        self.bank[index] = values.to(self.device)

    def place(self, programs: Iterable[bytes]) -> dict[bytes, int]:
        """Make every one of this step's programs resident and return their slots.

        ``programs`` are operation arrays as bytes (:data:`chatspace_lab.wire.OP`); ``b""`` is slot 0.
        """
        wanted = dict.fromkeys(programs)
        wanted.pop(b"", None)
        placed = {b"": 0}
        for program in wanted:
            if program in self._slot_of:
                self._slot_of.move_to_end(program)
        for program in wanted:
            slot = self._slot_of.get(program)
            if slot is None:
                slot = self._free.pop() if self._free else self._evict(wanted)
                self._slot_of[program] = slot
                self._write(slot, program)
            placed[program] = slot
        return placed

    def _evict(self, wanted: dict[bytes, None]) -> int:
        oldest = next(program for program in self._slot_of if program not in wanted)
        return self._slot_of.pop(oldest)

    def _write(self, slot: int, program: bytes) -> None:
        ops = np.frombuffer(program, dtype=wire.OP)
        # Position of each operation among those of its layer: the array is grouped by layer and in order.
        starts = np.searchsorted(ops["layer"], np.arange(self.layers))
        counts = np.bincount(ops["layer"], minlength=self.layers).astype(np.int32)
        index = np.arange(len(ops)) - starts[ops["layer"]]
        entries = self._host_ops[slot].numpy()
        entries[ops["layer"], index] = np.stack(
            [ops["kind"], ops["row"], ops["a"].view(np.int32), ops["b"].view(np.int32)], axis=-1
        )
        self._host_counts[slot].numpy()[:] = counts
        # Not asynchronous: a slot's mirror is rewritten only rarely, and must not change under a running copy.
        self.ops[slot].copy_(self._host_ops[slot])
        self.counts[slot].copy_(self._host_counts[slot])

    def steers(self, slots: Iterable[int]) -> np.ndarray:
        """Return [layers] bool: whether any of these programs acts there."""
        return self._host_counts.numpy()[list(slots)].any(axis=0)
