"""verl's sessions on a real stack: rollouts are enqueued in one batch, read as samples, and not run twice."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from agl_otel.algorithms.grpo.options import Advantages
from agl_otel.algorithms.verl.samples import Counts, Rules
from agl_otel.algorithms.verl.sessions import RolloutRequest, RolloutResult, Rollouts
from agl_otel.algorithms.verl.spec import Spec
from agl_otel.errors import AgentError
from agl_otel.store import LightningStore
from agl_otel.types import LLM, RolloutMode
from tests.contract.store.test_export import call_of, reward_of


def spec_of(run_id: str, **given: object) -> Spec:
    section = {"store": "", "run_id": run_id, "start": 1, "rules": asdict(Rules()), "rollout_config": {}, **given}
    return Spec.of(section)


async def begin(store: LightningStore) -> str:
    """Publish the resources of a new run; return its id."""
    run_id = f"verl-{uuid.uuid4().hex[:8]}"
    for mode in ("train", "val"):
        await store.publish({"main_llm": LLM(endpoint="http://127.0.0.1:1/v1", model="policy")}, resources_id=f"{run_id}-{mode}")
    return run_id


async def act(store: LightningStore, count: int, *, rewards: Sequence[float | None] = (1.0,)) -> list[str]:
    """Act as runner and agent of `count` rollouts, with a call and a reward each; return their ids."""
    done: list[str] = []
    while len(done) < count:
        for claimed in await store.queue.claim(count - len(done), wait_seconds=5):
            key = (claimed.rollout_id, claimed.attempt.attempt_id)
            value = rewards[len(done) % len(rewards)]
            await store.add_many_spans([call_of(*key, 1), *([reward_of(*key, 2, value)] if value is not None else [])])
            await store.update_attempt(*key, status="succeeded")
            done.append(claimed.rollout_id)
    return done


def wanted(session: int, *, step: int = 1, mode: RolloutMode = "train") -> RolloutRequest:
    return RolloutRequest(task={"ask": "hello"}, mode=mode, step=step, index=7, session=session)


async def test_sessions_get_their_samples_after_the_counts_are_reported(store: LightningStore) -> None:
    await store.open()
    reported: list[tuple[RolloutMode, Counts]] = []
    run_id = await begin(store)
    rollouts = Rollouts(store, spec_of(run_id, seed=3), lambda mode, counts: reported.append((mode, counts)))
    asked = asyncio.gather(*(rollouts.run(wanted(session)) for session in range(3)))
    await act(store, 3, rewards=(0.25, None, 1.0))
    reads: list[RolloutResult] = await asked
    assert sorted(sample.reward for read in reads for sample in read.samples) == [0.25, 1.0]
    assert sum(not read.samples for read in reads) == 1
    assert {mode for mode, _ in reported} == {"train"}
    total = Counts()
    for _, counts in reported:
        total.add(counts)
    assert (total.rollouts, total.sampled, total.refused) == (3, 2, {"no_reward": 1})
    stored = await store.query_rollouts(rollout_id_in=[f"ro-{run_id}-train-000001-000007-{n:03d}" for n in range(3)])
    assert {rollout.resources_id for rollout in stored} == {f"{run_id}-train"}
    assert len({(rollout.metadata or {})["sampling_seed"] for rollout in stored}) == 3
    assert [(run.run_id, run.rollouts) for run in await store.queue.query_runs(run_id)] == [(run_id, 3)], "as `agl-otel runs show` finds it"
    assert total.rewards == {"1-7": [0.25, 1.0]} or total.rewards == {"1-7": [1.0, 0.25]}
    assert total.score == (1.25, 3, 1)


async def test_a_repeated_step_reruns_only_rollouts_that_had_not_succeeded(store: LightningStore) -> None:
    await store.open()
    run_id = await begin(store)
    first = Rollouts(store, spec_of(run_id))
    asked = [asyncio.create_task(first.run(wanted(session))) for session in range(2)]
    (finished,) = await act(store, 1)
    done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result().rollout_id for task in done] == [finished]
    for task in asked:  # as if killed
        task.cancel()

    again = Rollouts(store, spec_of(run_id, start=2))
    both = asyncio.gather(*(again.run(wanted(session)) for session in range(2)))
    (left,) = {f"ro-{run_id}-{wanted(session).name}" for session in range(2)} - {finished}
    (stale,) = await store.wait([left])
    (other,) = await act(store, 1)
    reads = await both
    assert other == f"{left}-2"
    assert {read.rollout_id for read in reads} == {finished, other}
    assert all(read.samples for read in reads)
    assert stale.status == "cancelled"


async def test_unfinished_rollouts_are_cancelled_left_out_and_counted(store: LightningStore) -> None:
    await store.open()
    reported: list[Counts] = []
    run_id = await begin(store)
    rollouts = Rollouts(store, spec_of(run_id, step_seconds=0.1), lambda _, counts: reported.append(counts))
    read = await rollouts.run(wanted(0, mode="val"))
    assert read.samples == []
    assert reported == [Counts(rollouts=1, without_reward=1, refused=reported[0].refused, rewards={"1-7": []})]
    assert reported[0].refused == {"not_finished": 1}
    rollout = await store.get_rollout_by_id(read.rollout_id)
    assert rollout is not None
    assert rollout.status == "cancelled"


async def test_a_cancelled_session_does_not_fail_the_others(store: LightningStore) -> None:
    await store.open()

    async def leave(_mode: RolloutMode, _counts: Counts) -> None:
        asked[0].cancel()
        await asyncio.sleep(0)

    rollouts = Rollouts(store, spec_of(await begin(store), step_seconds=0.1), leave)
    asked = [asyncio.create_task(rollouts.run(wanted(session))) for session in range(3)]
    first, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert [isinstance(read, RolloutResult) and read.samples == [] for read in others] == [True, True]


async def test_a_deleted_rollout_has_no_sample_and_is_counted(store: LightningStore) -> None:
    await store.open()
    reported: list[Counts] = []
    run_id = await begin(store)
    rollouts = Rollouts(store, spec_of(run_id), lambda _, counts: reported.append(counts))
    asked = asyncio.gather(*(rollouts.run(wanted(session)) for session in range(2)))
    (finished,) = await act(store, 1)
    (gone,) = {f"ro-{run_id}-{wanted(session).name}" for session in range(2)} - {finished}
    await store.queue.delete([gone])
    reads = {read.rollout_id: read for read in await asked}
    assert (len(reads[finished].samples), reads[gone].samples) == (1, [])
    total = Counts()
    for counts in reported:
        total.add(counts)
    assert (total.rollouts, total.sampled, total.refused) == (2, 1, {"not_finished": 1})


async def test_a_rollout_waits_for_a_reward_of_a_trusted_source_and_is_read_once(store: LightningStore) -> None:
    await store.open()
    reported: list[Counts] = []
    run_id = await begin(store)
    spec = spec_of(run_id, reward_sources=["ann"], reward_wait_seconds=3600.0)
    rollouts = Rollouts(store, spec, lambda _, counts: reported.append(counts))
    asked = [asyncio.create_task(rollouts.run(wanted(session))) for session in range(2)]
    ids = await act(store, 2, rewards=(0.75, 1.0))
    found: list[float] = []
    for rollout_id, value in zip(ids, (0.25, 0.5), strict=True):
        await store.add_reward(value, rollout_id=rollout_id, source="ann")
        done, left = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().rollout_id for task in done] == [rollout_id], "the other one has no reward of ann's yet"
        found += [sample.reward for task in done for sample in task.result().samples]
        asked = list(left)
    assert found == [0.25, 0.5]
    assert [(counts.rollouts, counts.refused, counts.score.total) for counts in reported] == [(1, {}, 0.25), (1, {}, 0.5)]


async def test_a_rollout_whose_reward_does_not_come_in_time_is_refused_and_a_validation_waits_for_none(store: LightningStore) -> None:
    await store.open()
    reported: list[tuple[RolloutMode, Counts]] = []
    run_id = await begin(store)
    modes: list[tuple[float, RolloutMode]] = [(1e-3, "train"), (3600.0, "val")]
    for seconds, mode in modes:
        spec = spec_of(run_id, reward_sources=["ann"], reward_wait_seconds=seconds)
        rollouts = Rollouts(store, spec, lambda mode, counts: reported.append((mode, counts)))
        asked = asyncio.create_task(rollouts.run(wanted(0, mode=mode)))
        await act(store, 1)
        assert bool((await asked).samples) == (mode == "val"), "whose rewards are everybody's"
    assert [(mode, counts.refused) for mode, counts in reported] == [("train", {"no_reward": 1}), ("val", {})]


async def test_with_credit_by_calls_a_group_is_read_as_a_whole_and_compared(store: LightningStore) -> None:
    await store.open()
    reported: list[Counts] = []
    spec = spec_of(await begin(store), rules=asdict(Rules(advantages=Advantages(credit="to_go"))))
    rollouts = Rollouts(store, spec, lambda _, counts: reported.append(counts))
    asked = asyncio.gather(*(rollouts.run(wanted(session)) for session in range(3)))
    await act(store, 1, rewards=(0.0,))
    await act(store, 2, rewards=(1.0, None))
    found = {sample.reward: sample.advantages for read in await asked for sample in read.samples}
    assert {reward: sorted(set(own or ())) for reward, own in found.items()} == {
        0.0: [pytest.approx(-(0.5**0.5), abs=1e-5)],
        1.0: [pytest.approx(0.5**0.5, abs=1e-5)],
    }
    assert [(counts.rollouts, counts.refused, counts.credited) for counts in reported] == [(3, {"no_reward": 1}, 2)]


async def test_a_failing_function_of_credit_is_reported_and_fails_its_sessions(store: LightningStore, tmp_path: Path) -> None:
    await store.open()
    (tmp_path / "mine.py").write_text("def rule(attempt):\n    return [float('nan')] * len(attempt.calls)\n")
    reported: list[Counts] = []
    rules = Rules(advantages=Advantages(credit=f"{tmp_path}/mine.py:rule"))
    rollouts = Rollouts(store, spec_of(await begin(store), rules=asdict(rules)), lambda _, counts: reported.append(counts))
    asked = asyncio.gather(*(rollouts.run(wanted(session)) for session in range(2)), return_exceptions=True)
    await act(store, 2)
    first, second = await asked
    assert isinstance(first, AgentError) and first is second
    assert [list(counts.errors) for counts in reported] == [[str(first)]]
    assert "rule returned [nan]" in str(first)
