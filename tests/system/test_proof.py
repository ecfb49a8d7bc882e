"""A small `make proof`: attempts compared with the records of their agents and the model server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proof.campaign import entries, played
from tests.proof.judge import table

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
HEALTHY = ("works", "leaks", "cuts-streams", "leaves-generators", "has-children", "has-threads", "by-baggage", "by-http")
KILLED = (
    *("agent-killed", "killed-at-its-start", "child-killed", "only-child-killed", "grandchild-killed", "pool-worker-killed"),
    *("ended-by-another-signal", "killed-in-a-burst", "terminated", "execs", "exec-killed"),
    *("exceeds-limits", "leaves-its-folder"),
)


async def test_exactly_the_attempts_without_loss_are_complete(tmp_path: Path) -> None:
    cases = await played(tmp_path / "run", 2, entries(2, dict.fromkeys(KILLED, 3)))
    row = table(cases)["all"]
    wrong = [line for case in cases if case.lied or case.refused for line in case.story(2)]
    assert not wrong, "\n".join(wrong)
    assert row.lost and row.complete == row.whole > 0


async def test_an_attempt_that_lost_nothing_is_complete(tmp_path: Path) -> None:
    cases = await played(tmp_path / "run", 1, entries(1, dict.fromkeys(HEALTHY, 2)))
    row = table(cases)["all"]
    assert (row.attempts, row.whole, row.complete) == (16, 16, 16), "\n".join(line for case in cases for line in case.story(1))
