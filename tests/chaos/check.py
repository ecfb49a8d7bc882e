"""What was acked against what is readable: counts of every way in which the two can differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_otel.traces.reader import TraceReader
from tests.chaos.load import ACK

Ids = NDArray[np.uint64]
ACK_TYPE = np.dtype([("sender", ">u2"), ("request", ">u4"), ("spans", ">u2")])
ROWS = """
SELECT reinterpretAsUInt64(reverse(unhex(SpanId))) AS id, cityHash64(RolloutId) AS rollout, SequenceId AS number,
  concat(RolloutId, '|', AttemptId) != SpanName AS wrong
FROM otel_traces WHERE startsWith(TraceId, '00000000000c4a05')
"""


@dataclass
class Tally:
    """All in spans."""

    acked: int = 0
    readable: int = 0
    """Of the acked ones."""
    lost: int = 0
    """Acked, not readable."""
    doubled: int = 0
    """Rows beyond one for each span."""
    wrong_id: int = 0
    """Under a rollout or attempt that is not theirs, or under none."""
    disordered: int = 0
    """Numbers that do not increase in the order of sending, or that a rollout has twice."""

    @property
    def violations(self) -> int:
        """Of what is promised."""
        return self.lost + self.doubled + self.wrong_id + self.disordered

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def acked_ids(path: Path) -> Ids:
    """The span ids of all acks in a file (a half-written last one does not count)."""
    data = path.read_bytes() if path.exists() else b""
    acks = np.frombuffer(data[: len(data) // ACK.size * ACK.size], dtype=ACK_TYPE)
    if not len(acks):
        return np.zeros(0, np.uint64)
    first = acks["sender"].astype(np.uint64) << np.uint64(48) | acks["request"].astype(np.uint64) << np.uint64(16)
    counts = acks["spans"].astype(np.int64)
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(first, counts) + places.astype(np.uint64)


def compare(acked: Ids, rows: Any) -> Tally:
    """`rows` is an Arrow table of ROWS."""
    ids, rollout, number, wrong = (rows.column(name).to_numpy() for name in ("id", "rollout", "number", "wrong"))
    order = np.lexsort((number, ids))
    ids, rollout, number, wrong = ids[order], rollout[order], number[order], wrong[order]
    once = np.ones(len(ids), bool)
    once[1:] = ids[1:] != ids[:-1]  # of a span stored twice the lowest number counts
    ids, rollout, number, doubled = ids[once], rollout[once], number[once], int((~once).sum())
    there = np.isin(acked, ids, assume_unique=True)
    return Tally(len(acked), int(there.sum()), int((~there).sum()), doubled, int(wrong.sum()), _disordered(ids, rollout, number))


def _disordered(ids: Ids, rollout: Ids, number: Ids) -> int:
    """A sender sends one request at a time: within a rollout its spans' numbers follow the order of its span ids."""
    sender = ids >> np.uint64(48)
    order = np.lexsort((ids, sender, rollout))
    same = (rollout[order][1:] == rollout[order][:-1]) & (sender[order][1:] == sender[order][:-1])
    backwards = int((same & (number[order][1:] <= number[order][:-1])).sum())
    pairs = np.lexsort((number, rollout))
    twice = (rollout[pairs][1:] == rollout[pairs][:-1]) & (number[pairs][1:] == number[pairs][:-1])
    return backwards + int(twice.sum()) + int((number == 0).sum())


async def check(reader: TraceReader, acks: Iterable[Path]) -> Tally:
    """Wait until all is visible, then compare."""
    await reader.barrier()
    return compare(np.concatenate([np.zeros(0, np.uint64), *map(acked_ids, acks)]), await reader.arrow(ROWS))
