"""The checker of the fault tests sees every kind of broken promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.chaos.check import Tally, acked_ids, compare
from tests.chaos.load import ACK, span_id

Row = tuple[int, int, int, bool]  # (place, rollout, number, wrong)
GOOD: list[Row] = [(0, 7, 1, False), (1, 7, 2, False), (2, 8, 1, False)]


def tally(rows: list[Row]) -> Tally:
    acked = np.array([span_id(1, 5, place) for place in range(3)], np.uint64)
    columns = zip(*[(span_id(1, 5, place), rollout, number, int(wrong)) for place, rollout, number, wrong in rows], strict=True)
    types = (pa.uint64(), pa.uint64(), pa.uint64(), pa.uint8())
    names = ("id", "rollout", "number", "wrong")
    return compare(acked, pa.table({name: pa.array(column, kind) for name, column, kind in zip(names, columns, types, strict=True)}))


def test_what_is_there_once_in_order_is_good() -> None:
    assert tally(GOOD) == Tally(acked=3, readable=3)


@pytest.mark.parametrize(
    ("rows", "broken"),
    [
        (GOOD[:2], Tally(3, 2, lost=1)),
        ([*GOOD, (2, 8, 9, False)], Tally(3, 3, doubled=1)),
        ([*GOOD[:2], (2, 8, 1, True)], Tally(3, 3, wrong_id=1)),
        ([(0, 7, 2, False), (1, 7, 1, False), GOOD[2]], Tally(3, 3, disordered=1)),
        ([(0, 7, 0, False), *GOOD[1:]], Tally(3, 3, disordered=1)),
    ],
)
def test_each_broken_promise_is_counted(rows: list[Row], broken: Tally) -> None:
    assert tally(rows) == broken
    assert broken.violations == 1


def test_acks_are_read_up_to_a_torn_last_one(tmp_path: Path) -> None:
    file = tmp_path / "acks"
    file.write_bytes(ACK.pack(1, 5, 2) + ACK.pack(2, 70_000, 1) + b"to")
    assert acked_ids(file).tolist() == [span_id(1, 5, 0), span_id(1, 5, 1), span_id(2, 70_000, 0)]
