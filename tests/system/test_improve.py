"""`agl-otel improve`: a product's users get better answers, bad weights are rolled back, and kill -9 loses and repeats nothing.

What users saw, and what of their verdicts was acknowledged, is in the product's own books; what the canary sampled, in its model server's.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

import itertools
import os
import time
from functools import partial

from agl_otel.adapters.gates import ALARMS
from agl_otel.jobs.check import checked_job
from agl_otel.jobs.improve_cycle import STAGES
from agl_otel.jobs.production_weights import LINGER_SECONDS, ServedWeights
from agl_otel.jobs.served import prepare_policy
from agl_otel.service.forkserver import MODULE
from agl_otel.service.processes import stats
from agl_otel.store import Store
from tests.improve_world import World, right_share, rollout_of, world
from tests.system.stack_process import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
BETTER = {"improve.attempts": "256", "algorithm.updates_per_step": "4"}


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(("run", "canary_begun", "verdict"), id="some"),
        pytest.param(("window", "run", "update", "gate", "canary_begun", "canary", "verdict"), id="all", marks=pytest.mark.long),
    ],
)
def test_users_get_better_answers_although_stages_are_killed_and_stacks_restarted(tmp_path: Path, stages: tuple[str, ...]) -> None:
    with world(tmp_path, {**BETTER, "improve.canary": "[0.25, 0.5]", "improve.canary_rated": "12", "improve.max_drop": "0.3"}) as found:
        passed: list[dict[str, Any]] = []
        killed = 0.0
        force: list[str] = []
        for stage in stages:
            marks = [found.run / "cycles" / "0001" / name for name in (f"{stage}/run.json", f"{stage}.json")]
            with found.improve(2, f"{stage}.log", *force) as loop:
                until(lambda marks=marks, loop=loop: any(map(Path.exists, marks)) or loop.process.poll() is not None, stage)
                assert loop.process.poll() is None, loop.output
                if stage == "canary_begun":
                    until(lambda: bool(_passed(found)), "the canary's first step has passed")
                if stage == "canary_begun" and len(stages) == 3:  # what model servers are forked from, and with it all of them
                    os.kill(_fork_server_of(loop.process.pid), signal.SIGKILL)
                    assert loop.wait(60) == 1 and "the process of which they are forks was killed by SIGKILL" in loop.output, loop.output
                else:
                    loop.process.send_signal(signal.SIGKILL)
                    loop.process.wait()
                killed = time.time() if stage == "canary_begun" else killed
                passed = passed or _passed(found)
            force = []
            if stage == "run":  # its update goes on with another agent
                with (found.books / "agent.py").open("a") as agent:
                    agent.write("# a change\n")
                force = ["--force"]
        with found.improve(2) as loop:
            for mark in ("run/run.json", "canary_begun.json"):
                until(lambda mark=mark: (found.run / "cycles" / "0002" / mark).exists() or loop.process.poll() is not None, mark)
                found.restart_stack()
            assert loop.wait(600) == 0, loop.output
        assert [found.facts(cycle, "verdict")["verdict"] for cycle in (1, 2)] == ["promoted"] * 2, loop.output
        steps = found.facts(1, "canary")["steps"]
        assert [(step["share"], step["why"]) for step in steps] == [(0.25, ""), (0.5, "")] and steps[:1] == passed, "no step is repeated"
        assert steps[0]["ended"] <= killed < steps[1]["began"], "a step begins when the canary's model server answers"
        assert all(step["rated"] >= 12 for step in steps)
        asyncio.run(_holds(found))
        first, last = (found.facts(cycle, "verdict")["ended"] for cycle in (1, 2))
        shares = right_share(found.book("seen"), until=first - 60), right_share(found.book("seen"), since=last)
    assert shares[0] < 0.4 and found.facts(2, "gate")["held_out"]["after"] > 0.55, (shares, loop.output)


def _fork_server_of(pid: int) -> int:
    (found,) = [child for child, _, parent, _ in stats() if parent == pid and MODULE in Path(f"/proc/{child}/cmdline").read_text()]
    return found


def _passed(found: World) -> list[dict[str, Any]]:
    """Return the steps that the first cycle's canary has passed, while it is under way."""
    return found.facts(1, "canary_begun").get("passed", [])


async def _holds(found: World) -> None:
    """Hold the store against the product's books: every acknowledged verdict once, every attempt in one window, each promotion once."""
    rated = {rollout_of(row["talk"]): row["value"] for row in found.book("rated")}
    windows = [found.facts(cycle, "window")["rollout_ids"] for cycle in (1, 2)]
    assert not set(windows[0]) & set(windows[1]), "an attempt is learnt from once"
    async with await Store.connect(found.store) as store:
        counts = await store.reader.query(
            "SELECT if(TraceId = '', RolloutId, TraceId) AS Talk, uniqExact(LogAttributes['agentlightning.feedback.id']) AS n "
            "FROM otel_logs WHERE LogAttributes['agentlightning.feedback.source'] = 'users' GROUP BY Talk"
        )
        assert len(counts) >= len(rated) and {row["n"] for row in counts} == {1}, "each acknowledged verdict is stored, and once"
        for window in windows:
            traces = await store.traces(window, deadline_seconds=0)
            given = {key[0]: rewards[-1].value for key, rewards in traces.rewards.items()}
            assert given == {name: rated[name] for name in window}
        steps = {step.step: step for step in await store.training_steps(found.facts(1, "window")["selection"].partition("@")[0])}
        assert list(steps) == [1, 2] and [len(steps[each].attempts) for each in (1, 2)] == [len(window) for window in windows]
        recorded = await store.training_stages(steps[1].run_id)
        assert not any("waits" in stage.metrics for stage in recorded), "each has ended"
        stages = {(stage.step, stage.name) for stage in recorded}
        assert stages == {(cycle, name) for cycle in (1, 2) for name in (*STAGES, "canary 1", "canary 2")}, "each is a span"
        promoted: list[str] = []
        version = 0
        while (update := await store.queue.get_resources("production", version=(version := version + 1))) is not None:
            promoted.append(update.resources["promoted"].model_dump()["endpoint"])
        changes = sum(one != other for one, other in itertools.pairwise(promoted))
        assert changes == 2 and str(len(promoted)) == steps[2].version_after, "the weights that answer users changed twice"


@pytest.mark.long
def test_users_who_do_not_look_teach_nothing(tmp_path: Path) -> None:
    with world(tmp_path, BETTER, "--at-random") as found, found.improve(2) as loop:
        assert loop.wait(600) == 0, loop.output
        gates = [found.facts(cycle, "gate") for cycle in (1, 2)]
    assert all(gate["held_out"]["after"] < 0.5 for gate in gates if "held_out" in gate), loop.output


def test_bad_weights_are_rolled_back_within_a_bounded_number_of_requests(tmp_path: Path) -> None:
    blind = {"improve.held_out": '"off"', "improve.backtest": '"off"', "improve.max_drift": '"off"'}
    bad = {**blind, "algorithm.learning_rate": "0.1", "improve.attempts": "64", "improve.canary_most": "100", "improve.canary_rated": "64"}
    bad |= {"improve.canary": "0.5"}
    with world(tmp_path, bad) as found, found.improve(2) as loop:
        until(lambda: bool(found.facts(1, "verdict")) or loop.process.poll() is not None, "a verdict")
        gate, canary, verdict = (found.facts(1, stage) for stage in ("gate", "canary", "verdict"))
        assert gate["why"] == [] and gate["held_out"]["after"] < 0.1, "no gate stands before the canary, and its weights are bad"
        assert verdict["verdict"] == "rolled_back" and verdict["why"] != ["canary_unrated"], loop.output  # it waits for their rewards
        until(lambda: len(_after(found, verdict["ended"] + 2)) > 100, "users ask on")
        assert all(row["answer"] is not None for row in _after(found, verdict["ended"] + 2))
        sampled = len((found.run / "slots" / "b" / "model_server.jsonl").read_text().splitlines())
        assert 0 < sampled <= 100, f"canary_most, however late it is noticed: {canary}"


def test_no_user_is_lost_when_weights_are_promoted_or_withdrawn(tmp_path: Path) -> None:
    with world(tmp_path, {}, rate=20.0) as found:
        since, to = asyncio.run(_change_weights(found))
        seen = [row for row in found.book("seen") if since <= row["time"] <= to]
    assert len(seen) > 100 and _are_answered(seen)


def _are_answered(seen: list[dict[str, Any]]) -> bool:
    return bool(seen) and all(row["answer"] is not None for row in seen)


async def _change_weights(found: World) -> tuple[float, float]:
    """Promote a canary, and withdraw the next; return from when until when each user has to be answered."""
    job, _ = checked_job(found.books / "job.toml")
    async with await Store.connect(found.store) as store:
        policy = await prepare_policy(job, found.folder)
        production = ServedWeights(job, store, found.run / "slots", sampling={}, options={}, resources_id="production", owner="improve-1")
        try:
            await production.begin(policy, 0)
            await production.publish()
            await asyncio.to_thread(until, lambda: _are_answered(found.book("seen")[-20:]), "users are answered")
            since = time.time()
            for number, change in enumerate((partial(production.promote, policy), production.withdraw)):
                await production.start_canary(policy)
                await production.publish(f"canary-{number}", 0.5)
                await asyncio.sleep(4)
                await change()
                await asyncio.sleep(LINGER_SECONDS + 2)
            return since, time.time()
        finally:
            await production.close()


@pytest.mark.long
def test_an_update_that_fails_loses_neither_users_nor_their_rewards(tmp_path: Path) -> None:
    with world(tmp_path, {"improve.attempts": "64"}) as found:
        agent, broken = found.books / "agent.py", found.books / "broken"
        broken.touch()
        text = agent.read_text().replace("    reply =", f"    assert not Path({str(broken)!r}).exists(), 'the grader is away'\n    reply =")
        agent.write_text(text.replace("import functools\n", "import functools\nfrom pathlib import Path\n"))
        with found.improve(2) as loop:
            until(lambda: bool(found.facts(1, "verdict")) or loop.process.poll() is not None, "a verdict")
            assert (found.facts(1, "verdict")["verdict"], found.facts(1, "gate")["why"]) == ("refused", ["update_failed"]), loop.output
            assert "the grader is away" in found.facts(1, "update")["error"]
            broken.unlink()
            until(lambda: bool(found.facts(2, "update")) or loop.process.poll() is not None, "another update")
            first, second = (set(found.facts(cycle, "window")["rollout_ids"]) for cycle in (1, 2))
            assert first < second and "error" not in found.facts(2, "update"), loop.output
            assert all(row["answer"] is not None for row in _after(found, found.facts(1, "window")["ended"]))


def _after(found: World, time: float) -> list[dict[str, Any]]:
    return [row for row in found.book("seen") if row["time"] > time]


WATCHED = {
    "improve.attempts": "256", "improve.trusted_sources": '["reviewers"]', "improve.trusted_rated": "64", "improve.held_out": '"off"',
    "improve.backtest": '"off"', "improve.max_drift": '"off"', "algorithm.updates_per_step": "1",
}  # fmt: skip
"""Nothing but trusted rewards stands before a canary; a step is small enough for them to say something of it."""


@pytest.mark.long
def test_trusted_rewards_let_pass_what_they_agree_with(tmp_path: Path) -> None:
    with world(tmp_path, WATCHED, "reviewed") as found, found.improve(6) as loop:
        until(lambda: _promotions(found) >= 2 or loop.process.poll() is not None, "two promotions", 900)
        assert _promotions(found) >= 2 and not any(_alarms(found)), loop.output


def _promotions(found: World) -> int:
    return sum(found.facts(cycle, "verdict").get("verdict") == "promoted" for cycle in range(1, 7))


@pytest.mark.long
def test_an_exploited_reward_raises_its_alarm_before_the_true_score_falls(tmp_path: Path) -> None:
    with world(tmp_path, {**WATCHED, **BETTER}, "flattered") as found, found.improve(8) as loop:
        until(lambda: _alarm(found) is not None or loop.process.poll() is not None, "an alarm", 900)
        cycle = _alarm(found)
        assert cycle is not None, loop.output
        seen, end = found.book("seen"), found.facts(cycle, "gate")["ended"]
        begun = right_share(seen, until=found.facts(1, "window")["ended"])
        assert right_share(seen, since=found.facts(cycle, "window")["began"], until=end) > begun - 0.1, "the true score has not fallen"


def _alarm(found: World) -> int | None:
    """Return the first cycle with an alarm."""
    return next((cycle for cycle, raised in enumerate(_alarms(found), 1) if raised), None)


def _alarms(found: World) -> list[bool]:
    return [bool(ALARMS & set(found.facts(cycle, "gate").get("why", ()))) for cycle in range(1, 9)]
