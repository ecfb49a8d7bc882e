"""Whose spans are these after all? Pure: spans that were stored without ids, and what is known by now → which are to be copied.

Rule 2 of contracts.md §2, asked again when more has arrived: by the attempt whose span opened the trace (or that adopted it), else by
the parent. What identifies at receipt (identify.py) and what identifies late agree, except that at receipt a trace may not yet have
been opened twice. A verdict once given stays: a copy is never moved to another rollout.

conformance/late/*.json holds stored spans and the copies that are expected of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from agl_otel.collector.identify import MAX_SEQUENCE
from agl_otel.collector.memory import Ids


class Pending(NamedTuple):
    """A span that is stored without ids only: a row of sql/late_spans.sql."""

    trace_id: str
    span_id: str
    parent_id: str
    received_ms: int
    batch_id: int
    batch_pos: int
    sequences: Sequence[str]
    """The texts of its sequence attributes, of the span and of its resource; empty where there is none."""
    invalid: bool
    """Its ids were refused; it is kept without (the Go collector does so)."""
    opener: Ids = ("", "")
    """The one attempt that opened its trace."""
    parent: Ids = ("", "")
    """The ids of its parent, where that is stored with ids."""

    @classmethod
    def of(cls, row: Sequence[Any]) -> Pending:
        """A row in the order of the query's columns."""
        trace_id, span_id, parent_id, received_ms, batch_id, batch_pos, sequences, invalid, *ids = row
        opener, parent = (ids[0], ids[1]), (ids[2], ids[3])
        place = (int(received_ms), int(batch_id), int(batch_pos))  # 64-bit integers may come as texts
        return cls(trace_id, span_id, parent_id, *place, sequences, bool(invalid), opener, parent)

    @property
    def sequence(self) -> int | None:
        """The explicit sequence number, where there is one."""
        return next((number for text in self.sequences if (number := _number(text)) is not None), None)


class Copy(NamedTuple):
    """A span that is to be stored again, with ids."""

    span: Pending
    rollout_id: str
    attempt_id: str


def belongs(pending: Sequence[Pending]) -> list[Copy]:
    """Which of these spans belong to whom, in the order in which they arrived; those that nothing identifies are left out."""
    here = {(span.trace_id, span.span_id): span for span in pending}
    told: dict[tuple[str, str], Ids] = {}
    copies = [Copy(span, *ids) for span in pending if not span.invalid and (ids := _ids(span, here, told))[0]]
    return sorted(copies, key=lambda copy: (copy.span.received_ms, copy.span.batch_id, copy.span.batch_pos))


def _ids(span: Pending, here: Mapping[tuple[str, str], Pending], told: dict[tuple[str, str], Ids]) -> Ids:
    trail: list[tuple[str, str]] = []
    ids: Ids = ("", "")
    step: Pending | None = span
    while step is not None:
        key = (step.trace_id, step.span_id)
        if key in told:
            ids = told[key]
            break
        told[key] = ("", "")  # what spans that name each other as parents come to
        trail.append(key)
        if step.invalid:  # children of a refused span inherit nothing from it
            break
        if step.opener[0] or step.parent[0]:
            ids = step.opener if step.opener[0] else step.parent
            break
        step = here.get((step.trace_id, step.parent_id))
    told |= dict.fromkeys(trail, ids)
    return ids


def numbers_wanted(copies: Iterable[Copy]) -> list[tuple[str, int, int]]:
    """What to ask of the queue for these copies: (rollout id, how many numbers, the highest explicit number or 0)."""
    wanted: dict[str, tuple[int, int]] = {}
    for copy in copies:
        count, highest = wanted.get(copy.rollout_id, (0, 0))
        explicit = copy.span.sequence
        wanted[copy.rollout_id] = (count + (explicit is None), max(highest, explicit or 0))
    return [(rollout_id, count, highest) for rollout_id, (count, highest) in wanted.items()]


def numbered(copies: Iterable[Copy], first: Mapping[str, int]) -> list[int]:
    """The sequence number of each copy, in order; `first` says where each rollout's new numbers begin."""
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
