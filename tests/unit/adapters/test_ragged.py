from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.adapters.ragged import concatenate, count_per_row, take
from agl_otel.types.columns import Ragged

ROWS = st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6)


def listed(rows: Ragged) -> list[list[int]]:
    return [rows[place].tolist() for place in range(len(rows))]


@given(ROWS, st.data())
def test_take_and_concatenate_are_list_operations(rows: list[list[int]], data: st.DataObject) -> None:
    ragged = Ragged.from_rows(rows, np.int32)
    index: list[int] = data.draw(st.lists(st.sampled_from(range(len(rows))), max_size=8)) if rows else []
    start = data.draw(st.integers(0, len(rows)))
    for places in (index, list(range(start, len(rows)))):
        assert listed(take(ragged, np.array(places, np.int64))) == [rows[place] for place in places]
    assert listed(concatenate(ragged, ragged)) == rows + rows
    assert count_per_row(ragged.values == 3, ragged.offsets).tolist() == [row.count(3) for row in rows]
