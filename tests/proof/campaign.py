"""Attempts by the hundred, each drawn from a seed: played, asked about at once and at the end, and held against what really happened."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from agl_otel.types import Attempt, EnqueueRolloutRequest, RolloutConfig, VerdictKind
from tests.proof.ground import Ground, asked, ground
from tests.proof.judge import Case, Loss, Process, Stored, Truth, loss, processes
from tests.proof.plans import SCENARIOS, Fault, Plan, Start

ATTEMPTS: Final = 2000
"""Of a campaign, unless told otherwise: 500 of them by baggage, in one process."""
ROUND: Final = 64
"""Attempts that are in the queue together."""
ROUND_SECONDS: Final = 600.0
AT_ONCE_SECONDS: Final = 1.0
LATER_SECONDS: Final = 20.0
READ_TOGETHER: Final = 100
PROVING_SECONDS: Final = 25.0
"""How long a service takes at most to prove that it has lost nothing, after its answer."""
SQL: Final = """
SELECT RolloutId, AttemptId, SpanId, SpanAttributes['gen_ai.response.id'] AS ReplyId FROM otel_traces
WHERE RolloutId IN {rollouts:Array(String)}
"""
Key = tuple[str, str]
T = TypeVar("T")


@dataclass
class Entry:
    """One rollout of the campaign."""

    scenario: str
    number: int
    start: Start
    plan: Plan
    rollout_id: str = ""

    @property
    def fault(self) -> Fault:
        """What is killed beside it."""
        return SCENARIOS[self.scenario].fault


def entries(seed: int, counts: dict[str, int], index: int | None = None) -> list[Entry]:
    """What is played: {scenario: how many}, or of each only the one with this number."""
    found: list[Entry] = []
    for name, count in counts.items():
        for number in range(count) if index is None else [index]:
            start, plan = SCENARIOS[name].plan(seed, name, number)
            found.append(Entry(name, number, start, plan))
    return found


def shares(attempts: int, names: Sequence[str]) -> dict[str, int]:
    """So many attempts, dealt out by the scenarios' shares."""
    whole = sum(SCENARIOS[name].share for name in names)
    return {name: max(1, round(attempts * SCENARIOS[name].share / whole)) for name in names}


def rounds(played: Sequence[Entry]) -> list[Sequence[Entry]]:
    """Those with the same fault together, scenarios mixed."""
    found: list[Sequence[Entry]] = []
    for fault in dict.fromkeys(entry.fault for entry in played):
        of: dict[str, list[Entry]] = {}
        for entry in played:
            if entry.fault == fault:
                of.setdefault(entry.scenario, []).append(entry)
        spread = [((place + 0.5) / len(some), entry) for some in of.values() for place, entry in enumerate(some)]
        found += together([entry for _, entry in sorted(spread, key=lambda pair: pair[0])], ROUND)
    return found


def together(some: Sequence[T], size: int) -> list[Sequence[T]]:
    """In parts of that size."""
    return [some[start : start + size] for start in range(0, len(some), size)]


@dataclass
class Campaign:
    """Plays rounds on a ground, and keeps what was said at once."""

    on: Ground
    say: Callable[[str], object] = print
    at_once: dict[Key, tuple[VerdictKind, Loss]] = field(default_factory=dict[Key, tuple[VerdictKind, Loss]])

    async def play(self, some: Sequence[Entry]) -> None:
        """One round, to the end of its rollouts."""
        fault = some[0].fault
        starts: list[Start] = [entry.start for entry in some]
        for start in dict.fromkeys(starts):
            await self.on.runner(start)
        async with self.on.faults(fault):
            for entry, rollout in zip(some, await asked(lambda: self.on.store.enqueue([_request(entry) for entry in some])), strict=True):
                entry.rollout_id = rollout.rollout_id
            waiting = {entry.rollout_id for entry in some}
            deadline = time.monotonic() + ROUND_SECONDS
            while waiting:
                for start in dict.fromkeys(starts):  # plans kill what plays them, too
                    await self.on.runner(start)
                ended = await self._ended(waiting)
                await self._ask_at_once(ended)
                waiting -= {*ended}
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{len(waiting)} of {len(some)} rollouts do not end: {sorted(waiting)[:5]}")
                await asyncio.sleep(0.3)

    async def _ended(self, waiting: Collection[str]) -> list[str]:
        rollouts = await asked(lambda: self.on.store.queue.query_rollouts(rollout_id_in=sorted(waiting)))
        return [rollout.rollout_id for rollout in rollouts if rollout.status in ("succeeded", "failed", "cancelled")]

    async def _ask_at_once(self, ended: Sequence[str]) -> None:
        if not ended:
            return
        attempts = await self._attempts(ended)
        truths = self._truths(attempts)
        traces = await asked(lambda: self.on.store.traces(ended, deadline_seconds=AT_ONCE_SECONDS))
        stored = await self._stored(ended)
        for attempt in attempts:
            key = (attempt.rollout_id, attempt.attempt_id)
            if key in traces.verdicts:
                self.at_once[key] = (traces.verdicts[key].kind, loss(truths[key], stored.get(key, set())))

    async def judge(self, played: Iterable[Entry]) -> list[Case]:
        """What came of them all, by now."""
        cases: list[Case] = []
        for some in together([entry for entry in played if entry.rollout_id], READ_TOGETHER):
            by_id = {entry.rollout_id: entry for entry in some}
            attempts = await self._attempts(list(by_id))
            truths = self._truths(attempts)
            traces = await asked(lambda by_id=by_id: self.on.store.traces(list(by_id), deadline_seconds=LATER_SECONDS))
            stored = await self._stored(list(by_id))
            for attempt in attempts:
                key, entry = (attempt.rollout_id, attempt.attempt_id), by_id[attempt.rollout_id]
                verdict = traces.verdicts[key]
                lost = loss(truths[key], stored.get(key, set()))
                if entry.start in ("elsewhere", "http", "lone-http") and any(self._cut_off(process) for process in truths[key].processes):
                    lost.unclear.append("a process was killed where no disk is shared: nobody can know that it lost nothing")
                kind, before = self.at_once.get(key, (verdict.kind, lost))
                cases.append(
                    Case(
                        entry.scenario, entry.number, *key, entry.start, entry.plan, attempt.status, attempt.error or "",
                        (kind, verdict.kind), verdict.reasons, (before, lost),
                    )
                )  # fmt: skip
        return cases

    async def _attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        return list(await asked(lambda: self.on.store.queue.query_attempts(rollout_ids)))

    def _cut_off(self, process: Process) -> bool:
        """Whether it was killed, by whichever attempt, before it could prove that it had lost nothing."""
        ended = process.lines[-1][1] if process.closes else None
        kills = [kill.at for kill in self.on.kills if kill.pid == process.pid]
        for path in self.on.notes.glob(f"*/{process.pid}-*[0-9]"):
            kills += [json.loads(line)[1] for line in path.read_text().splitlines() if line.startswith('["killing"')]
        return any(at >= process.born and (ended is None or at < ended + PROVING_SECONDS * 1e9) for at in kills)

    def _truths(self, attempts: Iterable[Attempt]) -> dict[Key, Truth]:
        found: dict[Key, Truth] = {}
        for attempt in attempts:
            over = round(attempt.end_time * 1e9) if attempt.end_time else None
            wrote = processes(self.on.notes / attempt.attempt_id, self.on.kills)
            sampled = [reply for reply in self.on.model.sampled if reply.attempt_id == attempt.attempt_id]
            found[attempt.rollout_id, attempt.attempt_id] = Truth(wrote, sampled, over)
        return found

    async def _stored(self, rollout_ids: Sequence[str]) -> dict[Key, set[Stored]]:
        rows = await asked(lambda: self.on.store.reader.query(SQL, params={"rollouts": list(rollout_ids)}))
        found: dict[Key, set[Stored]] = {}
        for row in rows:
            found.setdefault((row["RolloutId"], row["AttemptId"]), set()).add(Stored(row["SpanId"], row["ReplyId"]))
        return found


def _request(entry: Entry) -> EnqueueRolloutRequest:
    dies, tries = entry.fault in ("runners", "everything"), SCENARIOS[entry.scenario].tries
    config = RolloutConfig(
        timeout_seconds=SCENARIOS[entry.scenario].timeout_seconds,
        unresponsive_seconds=15.0 if dies else None,
        max_attempts=tries if dies else 1,
        retry_condition=["unresponsive"] if dies and tries > 1 else [],
    )
    task = {"plan": entry.plan, "baggage": entry.scenario == "by-baggage"}
    return EnqueueRolloutRequest(input=task, config=config, labels={"start": entry.start})


async def played(
    directory: Path, seed: int, everything: Sequence[Entry], say: Callable[[str], object] = print, *, python: str = sys.executable
) -> list[Case]:
    """Play everything on a ground of its own, agents on an interpreter; the cases."""
    async with ground(directory, seed, python) as on:
        campaign = Campaign(on, say)
        began = time.monotonic()
        try:
            for some in rounds(everything):
                await campaign.play(some)
                names = ", ".join(dict.fromkeys(entry.scenario for entry in some))
                say(f"{time.monotonic() - began:6.0f} s: {len(some)} rollouts of {names}; services killed so far: {on.services_killed}")
        finally:
            await on.stop_runners()
            cases = await campaign.judge(everything)
        return cases
