"""The curve of a run: a rollout without a reward counts as 0, as in a job's score; not one that no algorithm asked for."""

from __future__ import annotations

import pyarrow as pa
import pytest

from agl_otel.traces.figures import curve_of
from agl_otel.types import RunMembers
from agl_otel.types.scores import Score

REWARDS = [1.0, 0.0, None, 1.0, None]
STATUSES = ["succeeded", "succeeded", "succeeded", "failed", "running"]


@pytest.mark.parametrize(
    ("mode", "rewarded", "mean"), [("val", 2, 1 / 4), ("train", 2, 1 / 4), ("test", 2, 1 / 4), ("production", 3, 2 / 3), ("", 3, 2 / 3)]
)
def test_the_mean_reward_is_over_all_that_were_asked_for_and_ended(mode: str, rewarded: int, mean: float) -> None:
    """Of 5: one right, one wrong, one without a reward, one that failed after it was right, one that runs."""
    ids = [f"ro-{place}" for place in range(5)]
    counts = {name: [1] * 5 for name in ("Spans", "Errors", "PromptTokens", "ResponseTokens")}
    table = pa.table({"RolloutId": ids, "Reward": pa.array(REWARDS, pa.float64()), **counts})
    curve = curve_of(RunMembers(ids, [3, 3, 3, 3, 3], STATUSES, [mode] * 5), table, frozenset({"succeeded", "failed"}))
    points = [point for point in curve.points if point.ended or point.rewarded]
    assert sum(point.ended for point in points) == 4
    assert sum(point.rewarded for point in points) == rewarded
    score = Score.joined(point.score for point in points)
    assert score.mean == pytest.approx(mean)
    assert (score.asked, score.missing) == ((4, 2) if mean == 1 / 4 else (3, 0))
