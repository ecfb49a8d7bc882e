"""The common case of merge.py by array operations: attempts in which each call continues the one before.

If every call after the first refers in prefix form to the one before, its prompt starts with everything before by construction, and no
comparison is needed: the trajectory is the concatenation of the stored calls. An attempt of a single call with a full prompt is the
shortest chain. A test compares this with merge.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.ragged import concatenate, take
from agl_otel.types.columns import CallColumns, Ragged


def chains(calls: CallColumns, attempt: NDArray[np.int64], fit: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return masks of the rows that begin a chain and of all rows in chains; `attempt` is each row's index, -1 if not taken."""
    taken = np.flatnonzero(attempt >= 0)
    if not len(taken):
        return np.zeros(len(calls), np.bool_), np.zeros(len(calls), np.bool_)
    own = attempt[taken]
    begins = np.ones(len(taken), np.bool_)
    begins[1:] = own[1:] != own[:-1]
    call, choice, base, base_choice = (column[taken] for column in (calls.call, calls.choice, calls.prefix_call, calls.prefix_choice))
    continues = np.zeros(len(taken), np.bool_)
    continues[1:] = (base[1:] == call[:-1]) & (base_choice[1:] == choice[:-1]) & (call[1:] > call[:-1])
    for texts in (calls.process, calls.agent, calls.model_version):
        column = np.array(texts, dtype=np.str_)[taken]
        continues[1:] &= column[1:] == column[:-1]
    good = fit[taken] & np.where(begins, base == 0, continues)
    places = np.cumsum(begins) - 1
    whole = np.bincount(places, weights=~good)[places] == 0
    first, chained = np.zeros(len(calls), np.bool_), np.zeros(len(calls), np.bool_)
    first[taken[begins & whole]] = True
    chained[taken[whole]] = True
    return first, chained


def lay_out_chains(calls: CallColumns, begins: NDArray[np.bool_], rows: NDArray[np.int64]) -> tuple[Ragged, Ragged, Ragged, Ragged]:
    """Return (prompts, responses, masks, log-probs) of the chains in `rows`, as merge.lay_out does."""
    first = begins[rows]
    prompt = _typed(take(calls.prompt, rows[first]), np.int32)
    response = _typed(take(calls.response, rows), np.int32)
    logprobs = _typed(take(calls.logprobs, rows), np.float32)
    if bool(first.all()):
        return prompt, response, Ragged(np.ones(len(response.values), np.int8), response.offsets), logprobs
    between = take(calls.prompt, rows[~first])
    pieces = np.zeros((len(rows), 2), np.int64)  # tokens before a reply (the last, empty row for a first call), the reply
    pieces[:, 1] = np.arange(len(rows))
    pieces[~first, 0] = np.arange(len(rows), len(rows) + len(between))
    pieces[first, 0] = len(rows) + len(between)
    source = concatenate(concatenate(response, between), Ragged.from_rows([[]], np.int32))
    laid = take(source, pieces.reshape(-1))
    mask = np.repeat(np.tile(np.array([0, 1], np.int8), len(rows)), laid.lengths)
    captured = np.zeros(len(mask), np.float32)
    captured[mask == 1] = logprobs.values
    ends = np.append(np.flatnonzero(first)[1:] * 2, 2 * len(rows))
    offsets = np.concatenate([np.zeros(1, np.int64), laid.offsets[ends]])
    return prompt, Ragged(laid.values, offsets), Ragged(mask, offsets), Ragged(captured, offsets)


def _typed(rows: Ragged, dtype: type[np.generic]) -> Ragged:
    return Ragged(rows.values.astype(dtype, copy=False), rows.offsets)
