"""The operator on a CPU: operations in order, token by token, in float32."""

from __future__ import annotations

import numba
import numpy as np

from chatspace_lab.wire import ADD, CAP, LARGEST

_LARGEST = np.float32(LARGEST)


# Reassociation lets LLVM vectorise the dot products; NaN and infinity keep their meaning.
@numba.njit(fastmath={"reassoc", "contract"}, nogil=True, cache=False)
def steer(  # type: ignore[no-untyped-def]
    hidden, residual, has_residual, program_of_row, programs, coefficients, bank, layer
) -> None:
    """Apply each row's program at ``layer`` to ``hidden`` in place.

    Parameters
    ----------
    hidden
        [rows, hidden_size] float32; changed so that ``hidden + residual`` is the steered residual stream.
    residual
        [rows, hidden_size] float32; not read unless ``has_residual``.
    program_of_row
        [rows] int32 slots.
    programs, coefficients, bank
        The buffers of :class:`chatspace_lab.runtime.tables.Tables` (``coefficients`` is ``programs`` seen as float32).
    layer
        Index of the decoder block.
    """
    size = hidden.shape[1]
    x = np.empty(size, dtype=np.float32)
    for row in range(hidden.shape[0]):
        program = program_of_row[row]
        count = programs[program, layer, 0, 0]
        if count == 0:
            continue
        for j in range(size):
            x[j] = hidden[row, j]
        if has_residual:
            for j in range(size):
                x[j] += residual[row, j]
        for k in range(1, count + 1):
            kind = programs[program, layer, k, 0]
            v = bank[programs[program, layer, k, 1]]
            a = coefficients[program, layer, k, 2]
            change = a
            if kind != ADD:
                projection = np.float32(0.0)
                for j in range(size):
                    projection += x[j] * v[j]
                if kind == CAP:
                    b = coefficients[program, layer, k, 3]
                    change = min(max(projection, a), b) - projection
                else:
                    change = (a - np.float32(1.0)) * projection
                change = min(max(change, -_LARGEST), _LARGEST)
            for j in range(size):
                x[j] += change * v[j]
                hidden[row, j] += change * v[j]
