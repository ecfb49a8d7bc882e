"""kill -9 of runners and of agents under load, with real processes: four runners of 16 places each; the agent is a shell script.

CHAOS_ROLLOUTS=100000 (`make chaos-queue`) runs it at full size. The agent writes to a journal when it begins and when it has done its work;
the journal and the final state of the queue are the history that is checked (queue_history.py).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agl_otel.queue.client import QueueClient
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import Stack
from agl_otel.types import Attempt, RolloutConfig
from tests.system.queue_history import complaints
from tests.system.queue_process import Child
from tests.system.stack_process import naming, until
from tests.system.test_queue_faults import all_of, ended, enqueue_all

pytestmark = [pytest.mark.full]
ROLLOUTS = int(os.environ.get("CHAOS_ROLLOUTS", "200"))
RUNNERS = 4
PLACES = 16  # per runner
WAITED_FOR = 10_000  # rollouts per call
CONFIG = RolloutConfig(max_attempts=5, retry_condition=["failed", "unresponsive", "timeout"], unresponsive_seconds=10.0)
AGENT = """
echo "begin $$ $AGL_ROLLOUT_ID $AGL_ATTEMPT_ID" >> "$1"
[ $(($$ % 3)) -ne 0 ] || sleep 0.5
[ $(($$ % 10)) -ne 1 ] || exit 1
echo "end $$ $AGL_ROLLOUT_ID $AGL_ATTEMPT_ID" >> "$1"
"""


@dataclass
class Journal:
    """The agents' journal: one line at the begin and one at the end of their work, each in a single append."""

    path: Path
    _read: int = 0
    _open: dict[int, None] = field(default_factory=dict[int, None])

    def lines(self) -> list[list[str]]:
        """Return (begin or end, process, rollout, attempt), in order."""
        return [line.split(" ") for line in self.path.read_text().splitlines()]

    def at_work(self) -> list[int]:
        """Return the processes with a begin and no end; some of them have failed or were killed."""
        with self.path.open() as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._read += len(whole.encode())
        for line in whole.splitlines():
            kind, pid, *_ = line.split(" ")
            if kind == "begin":
                self._open[int(pid)] = None
            else:
                self._open.pop(int(pid), None)
        self._open = {pid: None for pid in self._open if str(self.path) in _command_line(pid)}
        return [*self._open]


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def whose(agent: int, runners: Sequence[Child]) -> Child | None:
    """Return the runner from which an agent's process descends; None if it has ended."""
    by_pid = {runner.pid: runner for runner in runners}
    while agent and agent not in by_pid:
        agent = _parent(agent)
    return by_pid.get(agent)


async def disturb(runners: Sequence[Child], journal: Journal, chance: random.Random, finished: asyncio.Event) -> Counter[str]:
    """Kill agents with kill -9, and now and then a runner, which is restarted, until `finished`; return how many of each."""
    killed: Counter[str] = Counter()
    while not finished.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(finished.wait(), chance.uniform(0.2, 0.6))
        working = journal.at_work()
        if not working or finished.is_set():
            continue
        agent = chance.choice(working)
        if killed["agents"] >= 8 * killed["runners"]:  # the first is a runner with an agent at work
            if (runner := whose(agent, runners)) is not None:
                await runner.end(signal.SIGKILL)
                await runner.start()
                killed["runners"] += 1
        else:
            with suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
                killed["agents"] += 1
    return killed


def unproven(attempts: Sequence[Attempt], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the attempts recorded as succeeded for which not exactly one agent did its work."""
    did = Counter(attempt for kind, _, _, attempt in lines if kind == "end")
    return [
        f"{a.attempt_id}: succeeded, and {did[a.attempt_id]} agents ended"
        for a in attempts
        if a.status == "succeeded" and did[a.attempt_id] != 1
    ]


def test_the_checker_finds_a_success_without_an_agent_or_with_two() -> None:
    succeeded = [Attempt(rollout_id="ro-1", attempt_id=f"at-{n}", sequence_id=n + 1, start_time=0.0, status="succeeded") for n in range(3)]
    lines = [["end", "7", "ro-1", "at-1"], ["end", "7", "ro-1", "at-2"], ["end", "8", "ro-1", "at-2"]]
    assert [text.partition(":")[0] for text in unproven(succeeded, lines)] == ["at-0", "at-2"]


@pytest.mark.timeout(4 * 3600 if ROLLOUTS > 10_000 else 1200)
async def test_kill_9_of_runners_and_agents_under_load_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    script, journal = tmp_path / "agent.sh", Journal(tmp_path / "journal")
    script.write_text(AGENT)
    journal.path.touch()
    ports = dict.fromkeys(("queue_port", "otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port", "web_port"), 0)
    settings = Settings.load(data_dir=tmp_path / "stack", **ports)
    agent = ["--no-instrument", "--concurrency", str(PLACES), "--", "/bin/sh", str(script), str(journal.path)]
    told: dict[str, str] = {}
    async with Stack(settings, only=("queue", "collector")) as stack:
        address = stack.address
        environment = {"AGL_STORE": address, "AGL_LOG_LEVEL": "ERROR"}
        runners = [
            Child([sys.executable, "-m", "agl_otel.runner", *agent], tmp_path / f"runner-{number}.log", environment)
            for number in range(RUNNERS)
        ]
        async with QueueClient(address, timeout_seconds=60, retry_seconds=300) as client, ended(*runners):
            finished = asyncio.Event()
            disturbing = asyncio.create_task(disturb(runners, journal, random.Random(3), finished))
            try:
                ids = await enqueue_all(client, ROLLOUTS, CONFIG)
                for start in range(0, len(ids), WAITED_FOR):
                    async for some in client.wait(ids[start : start + WAITED_FOR]):
                        told |= {rollout.rollout_id: rollout.status for rollout in some}
            finally:
                finished.set()
            killed = await disturbing
            for runner in runners:
                code = await runner.end(signal.SIGTERM)
                assert code in (0, -signal.SIGTERM), runner.log.read_text()[-2000:]  # SIGTERM: it was restarted a moment ago
            rollouts, attempts = await all_of(client, ids)
            statistics = await client.statistics()
    await asyncio.to_thread(until, lambda: naming(script) == [], "no agent is left")
    lines = journal.lines()
    begun: list[dict[str, Any]] = [
        {"event": "claim", "worker": f"process {pid}", "rollout": r, "attempt": a} for k, pid, r, a in lines if k == "begin"
    ]
    assert complaints(ids, begun, rollouts, attempts, told) == []
    assert unproven(attempts, lines) == []
    assert len(ids) == len(set(ids)) == len(told) == ROLLOUTS
    assert (statistics["total_attempts"], statistics["claimable"]) == (len(attempts), 0)
    assert killed["agents"] and killed["runners"], killed
    assert {"succeeded", "failed", "unresponsive"} <= {attempt.status for attempt in attempts}, (
        "no fault was seen: the history proves nothing"
    )
