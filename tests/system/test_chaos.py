"""The scenarios of `make chaos` that need neither gigabytes nor minutes, in their small version. `make chaos` plays all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.scenarios import SCENARIOS, play

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
SMALL = ("killed-at-points", "killed-on-a-server", "vanished-part", "queue-away", "disk-full", "slow-clients")


@pytest.mark.parametrize("name", SMALL)
async def test_every_acked_span_is_readable_once(name: str, tmp_path: Path) -> None:
    assert name in SCENARIOS
    result = await play(name, tmp_path, seed=1, full=False)
    if result.skipped:
        pytest.skip(result.skipped)
    assert not result.problems, "\n".join(result.problems)
    assert result.tally.acked > 0
    assert not result.tally.violations, result.tally
