"""Array operations on ragged rows without Python loops over rows or tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agl_otel.types.columns import Ragged


def take(rows: Ragged, index: NDArray[np.int64]) -> Ragged:
    """Return the rows at `index`, in that order; a row may be repeated. Contiguous rows are a view, not a copy."""
    if len(index) and index[-1] - index[0] + 1 == len(index) and bool((np.diff(index) == 1).all()):
        offsets = rows.offsets[index[0] : index[-1] + 2]
        return Ragged(rows.values[offsets[0] : offsets[-1]], offsets - offsets[0])
    return pieces(rows, rows.offsets[:-1][index], rows.lengths[index])


def pieces(rows: Ragged, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Ragged:
    """Return rows of these lengths that begin at these positions of `rows.values`."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    source = np.repeat(starts - offsets[:-1], lengths)
    source += np.arange(offsets[-1])
    return Ragged(rows.values.take(source), offsets)


def concatenate(first: Ragged, second: Ragged) -> Ragged:
    """Return the rows of `first`, then those of `second`, in the dtype of `first`."""
    if not len(second):
        return first
    values = np.concatenate([first.values, second.values.astype(first.values.dtype, copy=False)])
    return Ragged(values, np.concatenate([first.offsets, second.offsets[1:] + first.offsets[-1]]))


def count_per_row(flags: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the set `flags` of each row; rows may be empty."""
    if not flags.any():
        return np.zeros(len(offsets) - 1, dtype=np.int64)
    running = np.zeros(len(flags) + 1, dtype=np.int64)
    np.cumsum(flags, out=running[1:])
    return running[offsets[1:]] - running[offsets[:-1]]
