"""A small `make proof`: attempts compared with the records of their agents and the model server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.proof import ground
from tests.proof.campaign import entries, played
from tests.proof.judge import table
from tests.proof.plans import missing

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
HEALTHY = (
    *("works", "leaks", "cuts-streams", "leaves-generators", "leaves-a-daemon", "has-children", "has-threads"),
    *("by-baggage", "by-http", "elsewhere"),
)
KILLED = (
    *("agent-killed", "killed-at-its-start", "child-killed", "only-child-killed", "grandchild-killed", "pool-worker-killed"),
    *("ended-by-another-signal", "killed-in-a-burst", "terminated", "execs", "exec-killed", "container-killed"),
    *("exceeds-limits", "leaves-its-folder"),
)
UNSEEN = ("collectors-killed", "runners-killed")
"""May be incomplete for what the judge does not see: spans that are stored and not acknowledged; an agent whose seal takes longer than the
grace period of a dead runner's zygote, which then kills it."""
FAULTS = ("proxies-killed", "collectors-killed", "queues-killed", "runners-killed", "service-killed")


def here(names: Iterable[str], attempts: int) -> dict[str, int]:
    """So many attempts of each scenario that can be played here: those of containers need root."""
    return {name: attempts for name in names if not missing(name)}


async def test_exactly_the_attempts_without_loss_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ground, "STRIKES", 2)
    monkeypatch.setattr(ground, "SERVICE_PAUSE_SECONDS", (0.1, 1.0))
    monkeypatch.setattr(ground, "RUNNER_PAUSE_SECONDS", (0.1, 1.0))
    monkeypatch.setattr(ground, "AWAY_SECONDS", 2.0)
    cases = await played(tmp_path / "run", 2, entries(2, here(KILLED, 3) | here(FAULTS, 3)))
    row = table(cases)["all"]
    refused = [case for case in cases if case.refused and case.scenario not in UNSEEN]
    wrong = [line for case in [*(case for case in cases if case.lied), *refused] for line in case.story(2)]
    assert not wrong, "\n".join(wrong)
    assert row.lost and row.complete > 0


async def test_an_attempt_that_lost_nothing_is_complete(tmp_path: Path) -> None:
    counts = here(HEALTHY, 2)
    cases = await played(tmp_path / "run", 1, entries(1, counts))
    row, attempts = table(cases)["all"], sum(counts.values())
    assert (row.attempts, row.whole, row.complete) == (attempts,) * 3, "\n".join(line for case in cases for line in case.story(1))
