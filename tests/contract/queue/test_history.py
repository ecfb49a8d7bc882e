"""Random histories of calls, time and restarts, compared with a reference model that was written from the rules, not the code."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agl_otel.errors import FencedError
from agl_otel.queue.client import AttemptUpdate, Observation, RolloutUpdate
from agl_otel.types import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig, RolloutMode
from tests.local_queue import LocalQueue
from tests.postgres_server import Postgres

ENDED = {"failed", "succeeded", "cancelled"}
WAITING = {"queuing", "requeuing"}
CONFIGS = st.builds(
    RolloutConfig,
    timeout_seconds=st.sampled_from([None, 20.0]),
    unresponsive_seconds=st.sampled_from([None, 8.0]),
    max_attempts=st.integers(1, 3),
    retry_condition=st.sets(st.sampled_from(["failed", "timeout", "unresponsive"])).map(sorted),
)


@dataclass
class Try:
    """An attempt, as the rules see it."""

    id: str
    token: str
    started: float
    status: str = "preparing"
    ended: float | None = None
    last_span: float | None = None


@dataclass
class Job:
    """A rollout, as the rules see it."""

    id: str
    config: RolloutConfig
    priority: int
    mode: RolloutMode | None = None
    not_before: float | None = None
    status: str = "queuing"
    ended: float | None = None
    tries: list[Try] = field(default_factory=list[Try])


class Model:
    """The rules in the simplest form: a list of jobs and the order in which those that wait were put in line.

    A job whose time has not come is in line, at the place that its time gives it, and passed over.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.line: list[str] = []
        self.delayed: list[str] = []

    def set_status(self, job: Job, status: str, now: float) -> None:
        if status in WAITING and job.status not in WAITING:
            (self.line if job.not_before is None or job.not_before <= now else self.delayed).append(job.id)
        for waiting in (self.line, self.delayed):
            if status not in WAITING and job.id in waiting:
                waiting.remove(job.id)
        job.status = status
        if status in ENDED:
            job.ended = now

    def due(self, now: float) -> None:
        """Those whose time has come go to the end of the line, in the order of their times."""
        for name in sorted(self.delayed, key=lambda name: (self.jobs[name].not_before, [*self.jobs].index(name))):
            if cast("float", self.jobs[name].not_before) <= now:
                self.delayed.remove(name)
                self.line.append(name)

    def next(self, limit: int, now: float) -> list[Job]:
        if len(self.line) < limit:  # a claim that finds enough does not look for those that wait for their time
            self.due(now)
        order = sorted(self.line, key=lambda name: (-self.jobs[name].priority, self.line.index(name)))
        return [self.jobs[name] for name in order[:limit]]

    def statistics(self) -> dict[str, Any]:
        statuses = Counter(job.status for job in self.jobs.values())
        return {"by_status": dict(statuses), "attempts": sum(len(job.tries) for job in self.jobs.values()), "claimable": len(self.line)}

    def forget(self, job: Job) -> None:
        del self.jobs[job.id]
        for waiting in (self.line, self.delayed):
            if job.id in waiting:
                waiting.remove(job.id)

    def set_try(self, job: Job, attempt: Try, status: str, now: float) -> None:
        attempt.status = status
        if status in ("succeeded", "failed"):
            attempt.ended = now
        if attempt is not job.tries[-1]:
            return
        if status in ("failed", "timeout", "unresponsive"):
            again = status in job.config.retry_condition and len(job.tries) < job.config.max_attempts
            self.set_status(job, "requeuing" if again else "failed", now)
        else:
            self.set_status(job, status, now)

    def receive_spans(self, job: Job, attempt: Try, spans: int, now: float) -> None:
        attempt.last_span = now
        if spans and attempt is job.tries[-1] and attempt.status in ("preparing", "unresponsive"):
            attempt.status = "running"
            if job.status in ("preparing", "requeuing"):
                self.set_status(job, "running", now)

    def watch(self, now: float) -> None:
        for job in self.jobs.values():
            if job.status not in ("preparing", "running"):
                continue
            attempt = job.tries[-1]
            last_span = attempt.started if attempt.last_span is None else attempt.last_span
            if job.config.timeout_seconds and now - attempt.started > job.config.timeout_seconds:
                self.set_try(job, attempt, "timeout", now)
            elif job.config.unresponsive_seconds and now - last_span > job.config.unresponsive_seconds:
                self.set_try(job, attempt, "unresponsive", now)


class Histories(RuleBasedStateMachine):
    """Applies the same steps to a real queue and to the model, and compares them."""

    def new_url(self) -> str:
        return f"sqlite:///{Path(self.folder.name) / 'queue.db'}"

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)  # syncs cost nothing there
        self.runner = asyncio.Runner()
        self.queue = LocalQueue(self.new_url())
        self.model = Model()

    @initialize(configs=st.lists(CONFIGS, min_size=2, max_size=3), claimed=st.integers(1, 2))
    def begin(self, configs: list[RolloutConfig], claimed: int) -> None:
        self.runner.run(self.queue.start())
        self.enqueue(configs, 0, None, 0.0)
        self.claim(claimed)

    def teardown(self) -> None:
        self.runner.run(self.queue.stop())
        self.runner.close()
        self.folder.cleanup()

    @property
    def time(self) -> float:
        return self.queue.clock.now

    def has_tries(self) -> bool:
        return any(job.tries for job in self.model.jobs.values())

    def has_jobs(self) -> bool:
        return bool(self.model.jobs)

    def some_job(self, data: st.DataObject) -> Job:
        return data.draw(st.sampled_from([*self.model.jobs.values()]))

    def some_try(self, data: st.DataObject) -> tuple[Job, Try]:
        job = data.draw(st.sampled_from([job for job in self.model.jobs.values() if job.tries]))
        return job, data.draw(st.sampled_from(job.tries))

    @rule(
        configs=st.lists(CONFIGS, min_size=1, max_size=3),
        priority=st.integers(0, 1),
        mode=st.sampled_from([None, "train", "val"]),
        delay=st.sampled_from([0.0, 0.0, 4.0]),
    )
    def enqueue(self, configs: list[RolloutConfig], priority: int, mode: RolloutMode | None, delay: float) -> None:
        not_before = self.time + delay if delay else None
        requests = [
            EnqueueRolloutRequest(input=i, config=config, priority=priority, mode=mode, not_before=not_before)
            for i, config in enumerate(configs)
        ]
        for rollout, config in zip(self.runner.run(self.queue.client.enqueue(requests)), configs, strict=True):
            self.model.jobs[rollout.rollout_id] = Job(rollout.rollout_id, config, priority, mode, not_before)
            (self.model.delayed if delay else self.model.line).append(rollout.rollout_id)

    def began(self, job: Job, claim: AttemptedRollout) -> None:
        self.replaced(job)
        job.tries.append(Try(claim.attempt.attempt_id, cast("str", claim.token), self.time))
        self.model.set_status(job, "preparing", self.time)

    def replaced(self, job: Job) -> None:
        """End the open attempt of `job`, which another one replaces."""
        if job.tries and job.tries[-1].status in ("preparing", "running"):
            job.tries[-1].status, job.tries[-1].ended = "failed", self.time

    @rule(limit=st.integers(1, 3))
    def claim(self, limit: int) -> None:
        expected = self.model.next(limit, self.time)
        claims = self.runner.run(self.queue.client.claim(limit))
        assert [claim.rollout_id for claim in claims] == [job.id for job in expected]
        for job, claim in zip(expected, claims, strict=True):
            self.began(job, claim)

    @precondition(lambda self: bool(cast("Histories", self).model.line))
    @rule()
    def claim_and_give_back(self) -> None:
        [job] = self.model.next(1, self.time)
        claims = self.runner.run(self.queue.client.claim(1))
        assert self.runner.run(self.queue.client.release(claims)) == 1
        self.replaced(job)  # giving back does not revive it
        job.status = "requeuing" if job.tries else "queuing"

    @precondition(lambda self: cast("Histories", self).has_jobs())
    @rule(data=st.data())
    def attempt_by_hand(self, data: st.DataObject) -> None:
        self.start(self.some_job(data))

    def start(self, job: Job) -> None:
        [claim] = self.runner.run(self.queue.client.start_attempt([job.id]))
        self.began(job, claim)

    @precondition(lambda self: cast("Histories", self).has_tries())
    @rule(data=st.data(), status=st.sampled_from(["running", "failed", "succeeded", "timeout", "unresponsive"]), fenced=st.booleans())
    def report(self, data: st.DataObject, status: Any, fenced: bool) -> None:
        job, attempt = self.some_try(data)
        update = AttemptUpdate(rollout_id=job.id, attempt_id=attempt.id, status=status, token=attempt.token if fenced else None)
        void = fenced and (attempt is not job.tries[-1] or job.status == "cancelled")
        try:
            self.runner.run(self.queue.client.update_attempts([update]))
            assert not void
            self.model.set_try(job, attempt, status, self.time)
        except FencedError:
            assert void

    @precondition(lambda self: cast("Histories", self).has_tries())
    @rule(data=st.data(), spans=st.integers(0, 2))
    def observe(self, data: st.DataObject, spans: int) -> None:
        self.receive_spans(*self.some_try(data), spans)

    def receive_spans(self, job: Job, attempt: Try, spans: int) -> None:
        self.runner.run(self.queue.client.observe([Observation(job.id, attempt.id, spans, self.time)]))
        self.model.receive_spans(job, attempt, spans, self.time)

    @precondition(lambda self: cast("Histories", self).has_tries())
    @rule(data=st.data(), end=st.sampled_from(["failed", "timeout", "unresponsive"]), by_hand=st.booleans(), replaced=st.booleans())
    def span_of_an_ended_attempt(self, data: st.DataObject, end: Any, by_hand: bool, replaced: bool) -> None:
        """An attempt ends, its rollout perhaps waits again, another attempt of it perhaps begins, and a span of the first arrives late."""
        job = data.draw(st.sampled_from([job for job in self.model.jobs.values() if job.tries]))
        attempt = job.tries[-1]
        if by_hand:
            for status in ("cancelled", "requeuing"):
                self.set(job, status)
        else:
            self.runner.run(self.queue.client.update_attempts([AttemptUpdate(rollout_id=job.id, attempt_id=attempt.id, status=end)]))
            self.model.set_try(job, attempt, end, self.time)
        if replaced:
            self.start(job)
        self.receive_spans(job, attempt, 1)

    @precondition(lambda self: cast("Histories", self).has_jobs())
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        job = self.some_job(data)
        assert self.runner.run(self.queue.client.delete([job.id, "ro-none"])) == 1
        self.model.forget(job)

    @precondition(lambda self: cast("Histories", self).has_jobs())
    @rule(data=st.data(), status=st.sampled_from(["cancelled", "queuing", "requeuing", "failed"]))
    def change(self, data: st.DataObject, status: Any) -> None:
        self.set(self.some_job(data), status)

    def set(self, job: Job, status: Any) -> None:
        self.runner.run(self.queue.client.update_rollouts([RolloutUpdate(rollout_id=job.id, status=status)]))
        self.model.set_status(job, status, self.time)

    @rule(seconds=st.sampled_from([1.0, 5.0, 9.0, 21.0]))
    def time_passes(self, seconds: float) -> None:
        self.runner.run(self.queue.sweep(after=seconds))
        self.model.watch(self.time)
        self.model.due(self.time)

    @rule()
    def restart(self) -> None:
        self.runner.run(self.queue.restart())

    @rule()
    def crash(self) -> None:
        """Continue with the current files on disk, as after kill -9: everything answered must be there."""
        after = Path(tempfile.mkdtemp(dir=self.folder.name))
        database = Path(self.queue.url.removeprefix("sqlite:///"))
        for file in database.parent.glob("queue.db*"):
            shutil.copy(file, after)
        self.runner.run(self.queue.stop())
        self.queue.url = f"sqlite:///{after / 'queue.db'}"
        self.runner.run(self.queue.start())

    @invariant()
    def unfinished_rollouts_are_queued_or_have_an_open_attempt(self) -> None:
        """Else nothing moves it any more: it is not claimed, and its attempt has ended. Asked of the queue, not of the model."""
        for rollout in self.runner.run(self.queue.client.query_rollouts()):
            if rollout.status in ("preparing", "running"):
                attempt = cast("AttemptedRollout", rollout).attempt
                assert attempt.status in ("preparing", "running"), (rollout.status, attempt.status)

    @invariant()
    def the_queue_equals_the_model(self) -> None:
        ids = [*self.model.jobs]
        statistics = self.runner.run(self.queue.client.statistics())
        counted = {"by_status": "rollouts_by_status", "attempts": "total_attempts", "claimable": "claimable"}
        assert {name: statistics[key] for name, key in counted.items()} == self.model.statistics()
        trained = self.runner.run(self.queue.client.query_rollouts(mode_in=["train"], status_in=["queuing", "failed"], limit=1))
        assert trained.total == sum(job.mode == "train" and job.status in ("queuing", "failed") for job in self.model.jobs.values())
        rollouts = {r.rollout_id: r for r in self.runner.run(self.queue.client.query_rollouts())}
        attempts = {a.attempt_id: a for a in self.runner.run(self.queue.client.query_attempts(ids))}
        assert {name: (r.status, r.end_time) for name, r in rollouts.items()} == {
            name: (job.status, job.ended) for name, job in self.model.jobs.items()
        }
        assert {name: (a.rollout_id, a.sequence_id, a.status, a.end_time, a.last_heartbeat_time) for name, a in attempts.items()} == {
            attempt.id: (job.id, number, attempt.status, attempt.ended, attempt.last_span)
            for job in self.model.jobs.values()
            for number, attempt in enumerate(job.tries, 1)
        }


Histories.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestHistories = Histories.TestCase


class PostgresHistories(Histories):
    """The same on PostgreSQL."""

    server: ClassVar[Postgres]

    def new_url(self) -> str:
        return self.server.new_schema()

    @rule()
    def crash(self) -> None:
        """The server ends every connection, as it does where one of its processes was killed; the service goes on by itself."""
        others = "pid <> pg_backend_pid() AND backend_type = 'client backend'"
        self.server.sql(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {others}")


@pytest.fixture(scope="module")
def history_server(postgres: Postgres) -> None:
    PostgresHistories.server = postgres


@pytest.mark.full
@pytest.mark.usefixtures("history_server")
class TestPostgresHistories(PostgresHistories.TestCase):
    settings = settings(max_examples=10, stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
