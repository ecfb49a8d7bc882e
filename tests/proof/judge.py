"""What was lost of an attempt, by what its processes and the model server wrote, and whether its verdict says so. Pure but for `processes`.

Lost is what is not stored of: a span that ended, a span that was open when its process was cut off, a call whose reply was sampled; and
every span of a process that should have an SDK and has none.
Not lost: a span that its process left open and that then closed itself (`abandoned`: a leak, a SIGTERM, os._exit, an exec), and what
began when the attempt was over (late). Where these files cannot tell what happened (`unclear`: a kill between two lines), and where a
process could keep no ledger, which is incomplete whatever was sent in time, either verdict is right.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl_otel.types import VerdictKind
from tests.proof.plans import KILL, TERMINATE


@dataclass(frozen=True)
class Kill:
    """A signal that the campaign sent."""

    pid: int
    at: int
    """Unix nanoseconds."""
    number: int


@dataclass
class Process:
    """What one process wrote: of a program, that is; after an exec it is another one."""

    pid: int
    born: int
    lines: list[list[Any]]
    signals: bytes = b""
    """Those that arrived, in order."""
    kills: list[Kill] = field(default_factory=list[Kill])

    def of(self, kind: str) -> list[list[Any]]:
        """The lines of one kind: when, and what there was to say."""
        return [line[1:] for line in self.lines if line[0] == kind]

    @property
    def drawn(self) -> set[str]:
        """The ids of its spans, seals too."""
        return {line[1] for kind in ("begun", "drew") for line in self.of(kind) if line[1]}

    @property
    def unhooked(self) -> bool:
        """Whether it was started so that no hook can be loaded (python -E)."""
        return any(line[3] for line in self.of("born"))

    @property
    def was_killed(self) -> bool:
        """By a SIGKILL that we know of."""
        return any(kill.number == KILL for kill in self.kills) or any(number == KILL for _, number in self.of("killing"))

    @property
    def closes(self) -> bool:
        """Whether it was on its way to an end that can be seen coming."""
        last = next((line[0] for line in reversed(self.lines) if line[0] != "drew"), "")
        told = TERMINATE in self.signals or any(number == TERMINATE for _, number in self.of("killing"))
        return last == "closing" or (told and not self.of("ignoring"))


@dataclass(frozen=True)
class Sampled:
    """A reply of the model server."""

    attempt_id: str
    number: str
    """The agent's own, of the call."""
    reply_id: str
    span_id: str
    """Of the caller, which is the proxy."""
    at: int


@dataclass(frozen=True)
class Stored:
    """A span of an attempt that is stored."""

    span_id: str
    reply_id: str = ""


@dataclass
class Truth:
    """What is known of an attempt from outside."""

    processes: Sequence[Process] = ()
    sampled: Sequence[Sampled] = ()
    over: int | None = None
    """When its agent had ended, for all that its runner could know (Unix nanoseconds); None: nobody said so."""


@dataclass
class Loss:
    """What is missing of an attempt."""

    spans: list[str] = field(default_factory=list[str])
    """Each with its story."""
    calls: list[str] = field(default_factory=list[str])
    abandoned: int = 0
    unclear: list[str] = field(default_factory=list[str])
    did: int = 0
    """How many spans and calls there were."""

    @property
    def any(self) -> bool:
        """Whether something was lost for certain."""
        return bool(self.spans or self.calls)

    @property
    def nothing(self) -> bool:
        """Whether there is nothing that could be stored."""
        return self.did == self.abandoned


def loss(truth: Truth, stored: Collection[Stored]) -> Loss:
    """What of an attempt is not stored."""
    found = Loss()
    ids = {span.span_id for span in stored}
    replies = {span.reply_id for span in stored}
    for process in truth.processes:
        _of_process(found, process, ids, truth.over)
        for _, number, reply_id in process.of("called"):
            if reply_id not in replies:
                found.calls.append(f"process {process.pid} got reply {reply_id} to its call {number}, which is not stored")
    begun = Counter(span_id for process in truth.processes for span_id in process.drawn)
    found.unclear += [f"{count} processes have a span {span_id}, for a fork drew the same" for span_id, count in begun.items() if count > 1]
    told = {reply_id for process in truth.processes for _, _, reply_id in process.of("called")}
    for reply in truth.sampled:
        found.did += 1
        late = truth.over is not None and reply.at > truth.over
        if reply.span_id not in ids and reply.reply_id not in told and not late:
            found.calls.append(f"the model answered call {reply.number} with {reply.reply_id} (span {reply.span_id}), which is not stored")
    return found


def _of_process(found: Loss, process: Process, ids: Collection[str], over: int | None) -> None:
    unseen = sum(not span_id for _, span_id in process.of("begun"))
    if unseen and not process.unhooked:
        found.did += unseen
        found.spans.append(f"process {process.pid} began {unseen} spans, and has no SDK that would make them")
    begun = {span_id: at for at, span_id in reversed(process.of("begun")) if span_id}
    ended = {span_id: at for at, span_id in process.of("ended")}
    ending = {span_id for _, span_id in process.of("ending")}
    found.did += len(begun)
    for span_id, at in begun.items():
        if span_id in ids or (over is not None and at > over):
            continue
        what = f"process {process.pid} began span {span_id}"
        if span_id in ended:
            found.spans.append(f"{what} and ended it; it is not stored")
        elif not process.closes:
            found.spans.append(f"{what}{' and was ending it' if span_id in ending else ''} when it was cut off; it is not stored")
        elif process.was_killed:
            found.unclear.append(f"{what}, left it open, and was killed when it was about to close")
        elif span_id in ending:
            found.unclear.append(f"{what} and was ending it when it closed")
        else:
            found.abandoned += 1
    if process.of("leaving"):
        found.unclear.append(f"process {process.pid} left the folder of its ledger, and was refused for that alone")
    if len(process.of("beginning")) > len(process.of("begun")):
        found.unclear.append(f"process {process.pid} was cut off between two lines")


def is_lie(kind: VerdictKind, lost: Loss) -> bool:
    """Something is missing, and the attempt is said to be fit for training."""
    return kind == "complete" and lost.any


def is_refusal(kind: VerdictKind, lost: Loss) -> bool:
    """Something was done, nothing is missing, and the attempt is said to be unfit."""
    return kind != "complete" and not lost.any and not lost.unclear and not lost.nothing


def processes(folder: Path, kills: Iterable[Kill]) -> list[Process]:
    """Those that have written into an attempt's folder, with what was sent to them."""
    found = [_read(path) for path in sorted(folder.glob("*")) if path.suffix != ".signals"] if folder.is_dir() else []
    by_pid: dict[int, list[Process]] = {}
    for process in found:
        by_pid.setdefault(process.pid, []).append(process)
    for kill in kills:
        candidates = [process for process in by_pid.get(kill.pid, []) if process.born <= kill.at]
        if candidates:
            max(candidates, key=lambda process: process.born).kills.append(kill)
    return found


def _read(path: Path) -> Process:
    pid, born = path.name.split("-")
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    signals = path.with_name(f"{path.name}.signals")
    return Process(
        int(pid), int(born), [json.loads(line) for line in whole.splitlines()], signals.read_bytes() if signals.exists() else b""
    )


@dataclass
class Case:
    """One attempt, and what is said of it."""

    scenario: str
    number: int
    rollout_id: str
    attempt_id: str
    start: str
    plan: Sequence[Any]
    status: str = ""
    error: str = ""
    kinds: tuple[VerdictKind, VerdictKind] = ("empty", "empty")
    """At once, and later."""
    reasons: Sequence[str] = ()
    """Of the later verdict."""
    losses: tuple[Loss, Loss] = field(default_factory=lambda: (Loss(), Loss()))

    @property
    def lied(self) -> bool:
        """At once or later."""
        return any(map(is_lie, self.kinds, self.losses))

    @property
    def refused(self) -> bool:
        """At last."""
        return is_refusal(self.kinds[1], self.losses[1])

    def story(self, seed: int) -> list[str]:
        """Everything about it, in lines."""
        lost = self.losses[1]
        at_once = "" if self.kinds[0] == self.kinds[1] else f" (at once: {self.kinds[0]})"
        return [
            f"{self.scenario} --index {self.number} --seed {seed}: {self.attempt_id} of {self.rollout_id}, started {self.start}, "
            f"{self.status}, {self.kinds[1]}{at_once}",
            *(f"    lost: {text}" for text in [*lost.spans[:4], *lost.calls[:4]]),
            *(f"    lost at once: {text}" for text in [*self.losses[0].spans[:2], *self.losses[0].calls[:2]] if not lost.any),
            *(f"    says: {text}" for text in self.reasons[:6]),
            *([f"    error: {self.error.strip().splitlines()[-1]}"] if self.error.strip() else []),
            f"    plan: {json.dumps(self.plan)}",
        ]


@dataclass
class Row:
    """Attempts of one scenario, counted."""

    attempts: int = 0
    lost: int = 0
    lies: int = 0
    """Lost something and complete."""
    whole: int = 0
    """Did something, lost nothing."""
    complete: int = 0
    """Of the whole ones."""
    unclear: int = 0
    abandoned: int = 0
    """Complete, with spans that their processes left open when they closed."""
    idle: int = 0
    """Did nothing that could be stored."""

    def add(self, case: Case) -> None:
        """Count one."""
        kind, lost = case.kinds[1], case.losses[1]
        self.attempts += 1
        self.lies += case.lied
        if lost.any:
            self.lost += 1
        elif lost.nothing:
            self.idle += 1
        elif lost.unclear:
            self.unclear += 1
        else:
            self.whole += 1
            self.complete += kind == "complete"
            self.abandoned += kind == "complete" and lost.abandoned > 0

    @property
    def share(self) -> float:
        """Of the whole ones, those that are complete."""
        return self.complete / self.whole if self.whole else 1.0


def table(cases: Iterable[Case]) -> Mapping[str, Row]:
    """A row for each scenario, and one of all of them."""
    rows: dict[str, Row] = {}
    every = Row()
    for case in cases:
        rows.setdefault(case.scenario, Row()).add(case)
        every.add(case)
    return {**rows, "all": every}
