"""`agl-otel rollouts show` on a real stack."""

from __future__ import annotations

import json

import pytest

from agl_otel.cli import main
from agl_otel.queue.client import RolloutUpdate
from agl_otel.store import LightningStore
from agl_otel.types import AttemptedRollout, RolloutConfig
from tests.contract.store.test_export import call_of

CONFIGS = {
    "timeout": RolloutConfig(timeout_seconds=0.01),
    "unresponsive": RolloutConfig(unresponsive_seconds=0.01),
    "cancelled": RolloutConfig(),
}


@pytest.fixture(params=CONFIGS)
async def over(request: pytest.FixtureRequest, store: LightningStore) -> AttemptedRollout:
    """A rollout that is over, and that no runner has ended."""
    begun = await store.start_rollout({"question": 1}, config=CONFIGS[request.param])
    await store.add_many_spans([call_of(begun.rollout_id, begun.attempt.attempt_id, 1)])
    if request.param == "cancelled":
        await store.queue.update_rollouts([RolloutUpdate(rollout_id=begun.rollout_id, status="cancelled")])
    await store.wait([begun.rollout_id])
    return begun


def test_the_verdict_of_an_attempt_that_has_no_end_is_shown(
    store: LightningStore, over: AttemptedRollout, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of one that was killed with its runner."""
    with pytest.raises(SystemExit):
        main(["rollouts", "show", over.rollout_id, "--json", "--store", store._source.address()])  # pyright: ignore[reportPrivateUsage]
    shown = json.loads(capsys.readouterr().out)
    assert [attempt["end_time"] for attempt in shown["attempts"]] == [None]
    assert {name: verdict["kind"] for name, verdict in shown["verdicts"].items()} == {over.attempt.attempt_id: "unproven"}
