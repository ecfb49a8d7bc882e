"""What the web service shows of refusals, on a real stack."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agl_otel.store import LightningStore
from agl_otel.telemetry.exposition import text_of
from agl_otel.web.alarms import REFRESH_SECONDS, SETTLE_SECONDS, Alarms
from tests.contract.store.test_export import fill


class Clock:
    def __init__(self) -> None:
        self.now = 4e9  # long after every rollout has ended

    def __call__(self) -> float:
        return self.now


def sample(page: str, name: str) -> float:
    lines = [line for line in page.splitlines() if line.startswith((name + " ", name + "{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def test_ended_rollouts_are_judged_once_and_figures_of_trainers_shown(store: LightningStore) -> None:
    clock = Clock()
    alarms = Alarms(store, clock=clock)
    before = text_of(await alarms.families())
    good = await fill(store, 1.0)
    silent = await store.start_rollout({"task": 'say "no"'})
    await store.update_attempt(silent.rollout_id, silent.attempt.attempt_id, status="failed")
    await store.record_figures({"logprob_drift": 0.25, "lost": float("nan")}, algorithm="grpo")
    assert sample(text_of(await alarms.families()), "agl_attempts_total") == sample(before, "agl_attempts_total")  # not asked again so soon

    def grown(page: str) -> Callable[[str], float]:
        return lambda name: sample(page, name) - sample(before, name)

    clock.now += REFRESH_SECONDS
    for _ in range(2):  # counted once, however often it is read
        page = text_of(await alarms.families())
        more = grown(page)
        assert (more("agl_attempts_total"), more('agl_attempts_total{mode="",outcome="taken"}')) == (2, 1)
        assert more('agl_attempts_refused_by_task_total{reason="not_succeeded",task="say \\"no\\""}') == 1
        assert more('agl_attempts_by_reward_total{outcome="taken",reward="1 and more"}') == 1
        assert (more("agl_trajectories_total"), more('agl_calls_total{outcome="taken"}')) == (1, 1)
        assert sample(page, 'agl_training_logprob_drift{algorithm="grpo"}') == 0.25
        assert "agl_training_lost" not in page
        assert good.rollout_id not in page
        clock.now += REFRESH_SECONDS


async def test_a_recently_ended_rollout_is_judged_at_the_next_read(store: LightningStore) -> None:
    begun = await fill(store, 1.0)
    (ended,) = await store.queue.query_rollouts(rollout_id_in=[begun.rollout_id])
    assert ended.end_time is not None
    clock = Clock()
    clock.now = ended.end_time + SETTLE_SECONDS - 1
    alarms = Alarms(store, clock=clock)
    first = sample(text_of(await alarms.families()), "agl_trajectories_total")
    clock.now += REFRESH_SECONDS
    assert sample(text_of(await alarms.families()), "agl_trajectories_total") > first


@pytest.mark.full
async def test_the_last_figures_are_kept_while_the_stack_is_down() -> None:
    away = LightningStore("127.0.0.1:1")
    alarms = Alarms(away)
    page = text_of(await alarms.families())  # the page of the other services must not fail with it
    assert "agl_alarms_age_seconds NaN" in page
    await away.close()
