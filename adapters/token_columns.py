"""Columns of a trajectory's tokens beside ids and log-probs: the weights that sampled each, and the experts that it was routed to. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agl_otel.spans.tolerant import MALFORMED, json_of
from agl_otel.types.columns import CallColumns, CallTexts, Ragged
from agl_otel.types.experts import decode, encode


class Piece(NamedTuple):
    """The reply of one call in a response, which may be cut off behind it."""

    row: int
    """Of CallColumns."""
    start: int
    """Its place in the response."""
    length: int
    """As sampled, uncut."""


def pieces(calls: CallColumns, rows: Sequence[int], mask: NDArray[Any]) -> Iterator[Piece]:
    """Yield the replies in a response whose mask is 1 for what the model wrote, and which has the replies of these rows in their order."""
    written = np.flatnonzero(mask)
    taken = 0
    for row in rows:
        if taken >= len(written):
            return
        length = int(calls.response.offsets[row + 1] - calls.response.offsets[row])
        yield Piece(row, int(written[taken]), length)
        taken += length


def spread(calls: CallColumns, rows: Ragged, values: NDArray[Any]) -> Ragged:
    """Return the value of its call for each token that the model wrote: a row for each trajectory.

    `rows`: TrajectoryBatch.rows of trajectories that no length limit has cut; `values`: one for each entry of `rows.values`.
    """
    row: Any = rows.values
    lengths = calls.response.lengths[row]
    offsets = np.concatenate([[0], np.cumsum(lengths)])[rows.offsets]
    return Ragged(np.repeat(values, lengths), offsets)


def of_each_token(calls: CallColumns, rows: Sequence[int], values: Sequence[float], mask: list[int]) -> list[float]:
    """Return the value of its call for each token of a response, 0 where the model did not write it."""
    found = [0.0] * len(mask)
    for value, piece in zip(values, pieces(calls, rows, np.array(mask)), strict=False):  # a cut response may lack the last
        end = min(piece.start + piece.length, len(mask))
        found[piece.start : end] = [value] * (end - piece.start)
    return found


def token_versions(calls: CallColumns, texts: CallTexts, rows: Sequence[int], mask: NDArray[Any]) -> list[str] | None:
    """Return which weights sampled each token of a response, empty where the model did not write it; None if it is the call's for all."""
    if not any(texts.versions[row] for row in rows):
        return None
    found = [""] * len(mask)
    for row, start, length in pieces(calls, rows, mask):
        spans = _spans(texts.versions[row]) or [(calls.model_version[row], 0, length)]
        for version, first, end in spans:
            begin, last = start + max(0, first), min(start + min(end, length), len(found))
            found[begin:last] = [version] * (last - begin)
    return found


def routed_experts(calls: CallColumns, texts: CallTexts, rows: Sequence[int], prompt: int, mask: NDArray[Any]) -> str | None:
    """Return the experts of a trajectory's tokens as a span has them: a row for each token of prompt and response but the last.

    Those of a token are of the first call that read it, as in the engine's cache. None if those of a call are not known, or begin after
    what the calls before have.

    Args:
        rows: the calls of the trajectory, in order.
        prompt: number of tokens of its prompt.
        mask: of its response.
    """
    if not all(texts.experts[row] for row in rows):
        return None
    total, held, kept = prompt + len(mask) - 1, -1, list[NDArray[Any]]()
    for row, start, length in pieces(calls, rows, mask):
        experts = decode(texts.experts[row])
        end = prompt + start + length - 1
        if experts is None or not experts.size or len(experts) > end:
            return None
        begin = end - len(experts)
        if kept and (begin > held or experts.shape[1:] != kept[0].shape[1:]):
            return None
        total -= begin if not kept else 0
        kept.append(experts[max(0, held - begin) :])
        held = end
    return encode(np.concatenate(kept)[:total]) if kept and total > 0 else None


def _spans(text: str) -> list[tuple[str, int, int]]:
    try:
        return [(str(version), int(start), int(end)) for version, start, end in json_of(text)] if text else []
    except MALFORMED:
        return []
