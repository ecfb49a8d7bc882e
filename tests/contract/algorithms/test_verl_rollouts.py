"""What verl's sessions get from a real stack: rollouts that are enqueued together, read as samples, and not run twice."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import asdict

from agl_otel.algorithms.verl.rollouts import RolloutRequest, RolloutResult, Rollouts
from agl_otel.algorithms.verl.samples import Counts, Rules
from agl_otel.algorithms.verl.spec import Spec
from agl_otel.store import LightningStore
from agl_otel.types import LLM, RolloutMode
from tests.contract.store.test_export import call_of, reward_of


def spec_of(run_id: str, **given: object) -> Spec:
    told = {"store": "", "run_id": run_id, "start": 1, "rules": asdict(Rules()), "rollout_config": {}, **given}
    return Spec.of(told)


async def begin(store: LightningStore) -> str:
    """A new run with resources for its rollouts; its id."""
    run_id = f"verl-{uuid.uuid4().hex[:8]}"
    for mode in ("train", "val"):
        await store.publish({"main_llm": LLM(endpoint="http://127.0.0.1:1/v1", model="policy")}, resources_id=f"{run_id}-{mode}")
    return run_id


async def act(store: LightningStore, count: int, *, rewards: Sequence[float | None] = (1.0,)) -> list[str]:
    """Be the runner and the agent of so many rollouts: one call each, and a reward; the rollouts' ids."""
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


async def test_sessions_get_the_samples_of_their_rollouts_and_what_was_refused_is_told_first(store: LightningStore) -> None:
    await store.open()
    told: list[tuple[RolloutMode, Counts]] = []
    run_id = await begin(store)
    rollouts = Rollouts(store, spec_of(run_id, seed=3), lambda mode, counts: told.append((mode, counts)))
    asked = asyncio.gather(*(rollouts.run(wanted(session)) for session in range(3)))
    await act(store, 3, rewards=(0.25, None, 1.0))
    reads: list[RolloutResult] = await asked
    assert sorted(sample.reward for read in reads for sample in read.samples) == [0.25, 1.0]
    assert sum(not read.samples for read in reads) == 1
    assert {mode for mode, _ in told} == {"train"}
    total = Counts()
    for _, counts in told:
        total.add(counts)
    assert (total.rollouts, total.sampled, total.refused) == (3, 2, {"no_reward": 1})
    kept = await store.query_rollouts(rollout_id_in=[f"ro-{run_id}-train-000001-000007-{n:03d}" for n in range(3)])
    assert {rollout.resources_id for rollout in kept} == {f"{run_id}-train"}
    assert len({(rollout.metadata or {})["sampling_seed"] for rollout in kept}) == 3


async def test_a_step_that_is_done_again_reads_what_succeeded_and_runs_the_rest_under_another_id(store: LightningStore) -> None:
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


async def test_what_has_not_finished_in_time_is_cancelled_left_out_and_counted(store: LightningStore) -> None:
    await store.open()
    told: list[Counts] = []
    run_id = await begin(store)
    rollouts = Rollouts(store, spec_of(run_id, step_seconds=0.1), lambda _, counts: told.append(counts))
    read = await rollouts.run(wanted(0, mode="val"))
    assert read.samples == []
    assert told == [Counts(rollouts=1, refused=told[0].refused)]
    assert told[0].refused == {"not_finished": 1}
    rollout = await store.get_rollout_by_id(read.rollout_id)
    assert rollout is not None
    assert rollout.status == "cancelled"


async def test_a_session_that_goes_away_while_it_is_given_up_fails_no_other(store: LightningStore) -> None:
    await store.open()

    async def leave(_mode: RolloutMode, _counts: Counts) -> None:
        asked[0].cancel()
        await asyncio.sleep(0)

    rollouts = Rollouts(store, spec_of(await begin(store), step_seconds=0.1), leave)
    asked = [asyncio.create_task(rollouts.run(wanted(session))) for session in range(3)]
    first, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert [isinstance(read, RolloutResult) and read.samples == [] for read in others] == [True, True]


async def test_a_rollout_that_is_deleted_while_it_runs_gives_no_sample_and_is_counted(store: LightningStore) -> None:
    await store.open()
    told: list[Counts] = []
    run_id = await begin(store)
    rollouts = Rollouts(store, spec_of(run_id), lambda _, counts: told.append(counts))
    asked = asyncio.gather(*(rollouts.run(wanted(session)) for session in range(2)))
    (finished,) = await act(store, 1)
    (gone,) = {f"ro-{run_id}-{wanted(session).name}" for session in range(2)} - {finished}
    await store.queue.delete([gone])
    reads = {read.rollout_id: read for read in await asked}
    assert (len(reads[finished].samples), reads[gone].samples) == (1, [])
    total = Counts()
    for counts in told:
        total.add(counts)
    assert (total.rollouts, total.sampled, total.refused) == (2, 1, {"not_finished": 1})
