"""Facts about model calls that need a walk from span to span."""

from __future__ import annotations

import pytest

from agl_otel.traces.tokens import SpanKey, _nearest  # pyright: ignore[reportPrivateUsage] - its steps are counted
from tests.compared import COMPARED, Text


@pytest.mark.parametrize("end", [0, 1], ids=["circle", "chain"])
def test_the_agents_above_a_chain_of_spans_are_found_in_linear_time(end: int) -> None:
    keys: list[SpanKey] = [("ro-1", "at-1", Text(f"span {number}")) for number in range(3000)]
    parents = dict(zip(keys, [*keys[1:], keys[0]], strict=True))
    known = {keys[-1]: "agent"} if end else {}
    COMPARED.clear()
    assert {_nearest(key, parents, known) for key in keys} == ({"agent"} if end else {""})
    assert COMPARED.total() < 20 * len(keys)
