"""Decide which spans that were stored without ids can be identified by now, and are therefore to be copied. Pure.

Rule 2 of identify.py, applied again with more data: by the attempt whose span opened the trace (or that adopted it), else by
the parent. Identification at receipt (identify.py) and late identification agree, except that at receipt the trace's second opener may
not have arrived yet. An identification is final: a copy is never moved to another rollout.

conformance/late/*.json holds stored spans and the expected copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from agl_otel.collector.identify import MAX_SEQUENCE
from agl_otel.collector.memory import Ids


class Pending(NamedTuple):
    """A span that is stored only without ids: a row of sql/late_spans.sql."""

    trace_id: str
    span_id: str
    parent_id: str
    received_ms: int
    batch_id: int
    batch_pos: int
    sequences: Sequence[str]
    """Texts of the sequence attributes of the span and of its resource; an absent one is empty."""
    invalid: bool
    """Its ids were refused, and it was stored without them (by the Go collector)."""
    opener: Ids = ("", "")
    """Ids of the one attempt that opened its trace."""
    parent: Ids = ("", "")
    """Ids of its parent, if that is stored with ids."""

    @classmethod
    def of(cls, row: Sequence[Any]) -> Pending:
        """Convert a row, whose columns are in the order of the query."""
        trace_id, span_id, parent_id, received_ms, batch_id, batch_pos, sequences, invalid, *ids = row
        opener, parent = (ids[0], ids[1]), (ids[2], ids[3])
        place = (int(received_ms), int(batch_id), int(batch_pos))  # 64-bit integers may come as texts
        return cls(trace_id, span_id, parent_id, *place, sequences, bool(invalid), opener, parent)

    @property
    def sequence(self) -> int | None:
        """The explicit sequence number, if any."""
        return next((number for text in self.sequences if (number := _number(text)) is not None), None)


class Copy(NamedTuple):
    """A span to be stored again, with ids."""

    span: Pending
    rollout_id: str
    attempt_id: str


def identified(pending: Sequence[Pending]) -> list[Copy]:
    """Identify these spans; return the copies in order of arrival. Spans that cannot be identified are left out."""
    here = {(span.trace_id, span.span_id): span for span in pending}
    known: dict[tuple[str, str], Ids] = {}
    copies = [Copy(span, *ids) for span in pending if not span.invalid and (ids := _ids(span, here, known))[0]]
    return sorted(copies, key=lambda copy: (copy.span.received_ms, copy.span.batch_id, copy.span.batch_pos))


def _ids(span: Pending, here: Mapping[tuple[str, str], Pending], known: dict[tuple[str, str], Ids]) -> Ids:
    trail: list[tuple[str, str]] = []
    ids: Ids = ("", "")
    step: Pending | None = span
    while step is not None:
        key = (step.trace_id, step.span_id)
        if key in known:
            ids = known[key]
            break
        known[key] = ("", "")  # result for a cycle of parents
        trail.append(key)
        if step.invalid:  # children of a refused span inherit nothing from it
            break
        if step.opener[0] or step.parent[0]:
            ids = step.opener if step.opener[0] else step.parent
            break
        step = here.get((step.trace_id, step.parent_id))
    known |= dict.fromkeys(trail, ids)
    return ids


def number_requests(copies: Iterable[Copy]) -> list[tuple[str, int, int]]:
    """Build the request to the queue for these copies: (rollout id, how many numbers, the highest explicit number or 0)."""
    counts: dict[str, tuple[int, int]] = {}
    for copy in copies:
        count, highest = counts.get(copy.rollout_id, (0, 0))
        explicit = copy.span.sequence
        counts[copy.rollout_id] = (count + (explicit is None), max(highest, explicit or 0))
    return [(rollout_id, count, highest) for rollout_id, (count, highest) in counts.items()]


def numbered(copies: Iterable[Copy], first: Mapping[str, int]) -> list[int]:
    """Return the sequence number of each copy, in order; `first` holds each rollout's first new number."""
    following = dict(first)
    numbers: list[int] = []
    for copy in copies:
        explicit = copy.span.sequence
        if explicit is None:
            explicit = following[copy.rollout_id]
            following[copy.rollout_id] += 1
        numbers.append(explicit)
    return numbers


def _number(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) <= 16):
        return None
    return number if (number := int(text)) < MAX_SEQUENCE else None
