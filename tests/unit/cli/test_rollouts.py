"""What `agl-otel rollouts ls` shows of a rollout."""

from __future__ import annotations

import pytest

from agl_otel.cli.rollouts import _row  # pyright: ignore[reportPrivateUsage]
from agl_otel.types import Attempt, AttemptedRollout, Rollout


@pytest.mark.parametrize(
    ("attempt_end", "rollout_end", "took"),
    [(162.5, 163.0, "2.50 s"), (None, 163.0, "3.00 s"), (None, None, None)],
    ids=["ended", "lost: it ends with its rollout", "running"],
)
def test_how_long_an_attempt_took_leaves_its_wait_in_the_queue_out(
    attempt_end: float | None, rollout_end: float | None, took: str | None
) -> None:
    attempt = Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=160.0, end_time=attempt_end)
    item = AttemptedRollout(rollout_id="r", input="how many?", start_time=100.0, end_time=rollout_end, attempt=attempt)
    assert _row(item, None)[-1] == took
    assert _row(Rollout(rollout_id="r", input="how many?", start_time=100.0), None)[-1] is None
