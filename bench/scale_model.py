"""What a load costs, from measured costs: sums for a plan, and a simulation of queues on cores for what waits. No I/O.

The simulation has machines whose cores are shared by what runs on them, services that work on so many requests at once (a Python process
on one), and clients that go in a circle: claim, call models, send spans, report. Waits that need no core (a sync of the disk, a model) pass
by themselves. It knows nothing of networks between machines, of caches, or of requests that get cheaper because many wait.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

BUSY: Final = 0.6  # of a core that a plan uses: above it, what waits grows faster than the load
DAY: Final = 86_400.0
EVENTS: Final = 120_000  # of a simulated plan: some seconds of work


@dataclass(frozen=True)
class Costs:
    """What was measured. CPU in seconds of one core, waits in seconds, sizes in bytes; a claim goes with its report."""

    claim_cpu: float
    """Of the queue on SQLite, for one rollout that is claimed and reported alone."""
    claim_batched_cpu: float
    """The same in batches of 100."""
    claim_client_cpu: float
    """Of whoever claims and reports."""
    queue_wait: float
    """Of one call that changes something, beside its CPU: the disk's sync."""
    enqueue_cpu: float
    """For one rollout, enqueued in batches."""
    request_cpu: float
    """Of the collector, for a request, with its part in an insert."""
    span_cpu: float
    """Of the collector and ClickHouse, for a span without token ids."""
    token_cpu: float
    """Of the collector, for a token id."""
    ack_wait: float
    """Of one request, beside its CPU."""
    span_client_cpu: float
    """Of whoever sends spans that are ready, for a request."""
    call_cpu: float
    """Of the proxy, for a model call of 250 tokens that is not streamed, with its span."""
    chunk_cpu: float
    """Of the proxy, for a streamed chunk."""
    call_client_cpu: float
    """Of the bench's client and model server together, for a call that is not streamed."""
    start_cpu: float
    """Of the runner's side, for an attempt of a Python command that is forked from a warm parent: fork, agent, hook, all."""
    function_cpu: float
    """The same of a function that does nothing, in the runner's process."""
    rollout_bytes: float
    """Of the queue's database."""
    span_bytes: float
    """On disk, of a span of 1.5 KB without token ids."""
    token_bytes: float
    """On disk, of a token id."""
    queue_memory: float
    collector_memory: float
    proxy_memory: float
    runner_memory: float
    agent_memory: float
    """That a forked agent has for itself."""


@dataclass(frozen=True)
class Load:
    """What is to be carried: so many rollouts at once, and what one attempt does."""

    at_once: int
    calls: int = 10
    model_seconds: float = 8.0
    """Of one model call."""
    tool_seconds: float = 2.0
    """Between two calls."""
    new_tokens: int = 1000
    """That are new in a call: prompt and reply (of the prompt only what no earlier call had is stored)."""
    spans_a_call: int = 3
    """Of the agent and of the proxy."""
    streamed: int = 0
    """Chunks of a call; 0: not streamed."""
    retried: float = 0.02
    """Of all attempts, how many are repeated."""
    batch: int = 1
    """Rollouts that a claim takes."""

    @property
    def seconds(self) -> float:
        """That an attempt takes, without anything of ours."""
        return self.calls * (self.model_seconds + self.tool_seconds)

    @property
    def attempts_a_second(self) -> float:
        """When each place is taken again at once."""
        return self.at_once / self.seconds

    @property
    def spans(self) -> int:
        """Of an attempt: those of its calls, the attempt's own, a reward, and two seals."""
        return self.calls * self.spans_a_call + 4


class Service(NamedTuple):
    """One line of a plan."""

    name: str
    load: float
    """Cores that it keeps busy."""
    processes: int
    cores: int
    memory: float
    """Bytes, all processes together."""


@dataclass(frozen=True)
class Plan:
    """What to run for a load."""

    load: Load
    attempts: float
    calls: float
    spans: float
    tokens: float
    """Each a second."""
    services: tuple[Service, ...]
    disk_a_day: float
    """Bytes."""


def plan(costs: Costs, load: Load) -> Plan:
    """The sums. A Python process keeps one core busy, so that a service that needs more has more processes; agents run beside them."""
    attempts, calls = load.attempts_a_second, load.attempts_a_second * load.calls
    spans, tokens = attempts * load.spans, calls * load.new_tokens
    claim = claim_cost(costs, load.batch)
    queue = attempts * (claim + costs.enqueue_cpu * (1 - load.retried))
    collector = attempts * collector_cost(costs, load)
    proxy = calls * call_cost(costs, load)
    runners = attempts * costs.start_cpu
    services = (
        _service("queue", queue, costs.queue_memory),
        _service("collector", collector, costs.collector_memory),
        _service("proxy", proxy, costs.proxy_memory),
        Service("runners, agents", runners, *_runners(costs, load, runners)),
    )
    disk = spans * costs.span_bytes + tokens * costs.token_bytes + attempts * (1 - load.retried) * costs.rollout_bytes
    return Plan(load, attempts, calls, spans, tokens, services, disk * DAY)


def claim_cost(costs: Costs, batch: int) -> float:
    """CPU of the queue for a rollout: of the two measured points, what a call and what a rollout in it costs."""
    call = (costs.claim_cpu - costs.claim_batched_cpu) * 100 / 99
    return call / batch + costs.claim_cpu - call


def call_cost(costs: Costs, load: Load) -> float:
    """CPU of the proxy for a model call."""
    return costs.call_cpu + load.streamed * costs.chunk_cpu


def collector_cost(costs: Costs, load: Load) -> float:
    """CPU of the collector for an attempt; spans come in a request for each model call, and two for the attempt."""
    return (load.calls + 2) * costs.request_cpu + load.spans * costs.span_cpu + load.calls * load.new_tokens * costs.token_cpu


def _service(name: str, busy: float, memory: float) -> Service:
    processes = max(1, math.ceil(busy / BUSY))
    return Service(name, busy, processes, processes, processes * memory)


def _runners(costs: Costs, load: Load, busy: float) -> tuple[int, int, float]:
    cores = max(1, math.ceil(busy / BUSY))
    runners = max(1, math.ceil(load.at_once / 256))
    return runners, max(cores, 1), runners * costs.runner_memory + load.at_once * costs.agent_memory


# --- the simulation


class Use(NamedTuple):
    """A step: so many seconds of a core, in a service."""

    service: str
    seconds: float


class Hand(NamedTuple):
    """A step that takes no time: so many seconds of a core are left to a service, which does all that was left to it in one piece.

    So spans are inserted after their acknowledgement, where there is time for it in the long run.
    """

    service: str
    seconds: float


class Wait(NamedTuple):
    """A step: time passes."""

    seconds: float


class Mark(NamedTuple):
    """A step: what was counted here, or ("NAME" and a second mark "NAME") how long it took from one to the next."""

    name: str


Step = Use | Hand | Wait | Mark
Circle = Callable[[random.Random], Iterator[Step]]
"""The steps of one round of a client."""


@dataclass
class Machine:
    """Cores, and the work on them: each piece gets an equal part, at most a whole core."""

    cores: float
    others: float = 0.0
    """Pieces of somebody else's work that take their part all the time."""
    done: float = 0.0  # what each piece has got since the beginning, in seconds of a core
    at: float = 0.0
    running: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])  # (done when it ends, order, client)

    @property
    def pace(self) -> float:
        """Seconds of a core that a piece gets in a second."""
        return min(1.0, self.cores / (len(self.running) + self.others)) if self.running else 0.0

    def advance(self, now: float) -> None:
        """To the time `now`."""
        self.done += (now - self.at) * self.pace
        self.at = now

    def ends(self) -> float:
        """When the next piece is done."""
        return self.at + max(0.0, self.running[0][0] - self.done) / self.pace if self.running else math.inf


@dataclass
class Place:
    """A service: on which machine, how many requests it works on at once."""

    machine: Machine
    workers: int
    busy: int = 0
    used: float = 0.0
    handed: float = 0.0
    waiting: deque[tuple[int, float]] = field(default_factory=deque[tuple[int, float]])


@dataclass
class Outcome:
    """What a simulation found, per second of its time, after its first tenth."""

    rates: dict[str, float]
    """{mark: how often}."""
    waits: dict[str, list[float]]
    """{mark: how long it took from the one to the next of the same client}, in order of size."""
    busy: dict[str, float]
    """{service: cores that it used}."""

    def wait(self, name: str, share: float) -> float:
        """The value that so large a share does not exceed."""
        values = self.waits.get(name) or [0.0]
        return values[min(len(values) - 1, int(len(values) * share))]


def simulate(places: Mapping[str, Place], clients: Sequence[tuple[Circle, float]], seconds: float, seed: int = 1) -> Outcome:
    """Let clients go in circles for `seconds`; each is (its circle, how many seconds of waits it has behind it already).

    The same seed gives the same outcome.
    """
    chance = random.Random(seed)
    order = itertools.count()
    now, since = 0.0, seconds / 10
    timers: list[tuple[float, int, int]] = []
    circles = [_endless(circle, behind, chance) for circle, behind in clients]
    using: dict[int, Place] = {}
    counts: dict[str, int] = {}
    waits: dict[str, list[float]] = {}
    open_marks: dict[tuple[int, str], float] = {}
    machines = {id(place.machine): place.machine for place in places.values()}

    def begin(place: Place, client: int, work: float) -> None:
        place.busy += 1
        if now >= since:
            place.used += work
        using[client] = place
        heapq.heappush(place.machine.running, (place.machine.done + work, next(order), client))

    def piece(service: str) -> None:
        place = places[service]
        if place.handed and not place.busy:
            work, place.handed = place.handed, 0.0
            begin(place, -1 - list(places).index(service), work)

    def mark(client: int, name: str) -> None:
        begun = open_marks.pop((client, name), None)
        if begun is None:
            open_marks[client, name] = now
            return
        if now >= since:
            counts[name] = counts.get(name, 0) + 1
        if begun >= since:
            waits.setdefault(name, []).append(now - begun)

    def go(client: int) -> None:
        for step in circles[client]:
            match step:
                case Mark(name):
                    mark(client, name)
                case Wait(length):
                    heapq.heappush(timers, (now + length, next(order), client))
                    return
                case Hand(service, work):
                    places[service].handed += work
                    piece(service)
                case Use(service, work):
                    place = places[service]
                    if place.busy < place.workers:
                        begin(place, client, work)
                    else:
                        place.waiting.append((client, work))
                    return

    for client in range(len(circles)):
        go(client)
    while True:
        ending = min(machines.values(), key=Machine.ends)
        at = ending.ends()
        by_timer = bool(timers) and timers[0][0] <= at
        at = timers[0][0] if by_timer else at
        if at >= seconds:
            break
        now = at
        for machine in machines.values():
            machine.advance(now)
        if by_timer:
            _, _, client = heapq.heappop(timers)
        else:
            _, _, client = heapq.heappop(ending.running)
            place = using.pop(client)
            place.busy -= 1
            if client < 0:
                piece(list(places)[-1 - client])
                continue
            if place.waiting:
                begin(place, *place.waiting.popleft())
        go(client)
    length = seconds - since
    return Outcome(
        {name: count / length for name, count in counts.items()},
        {name: sorted(values) for name, values in waits.items()},
        {name: place.used / length for name, place in places.items()},
    )


def _endless(circle: Circle, behind: float, chance: random.Random) -> Iterator[Step]:
    while True:
        for step in circle(chance):
            if behind > 0:  # was done before the simulation began
                if isinstance(step, Wait):
                    behind -= step.seconds
                    if behind < 0:
                        yield Wait(-behind)
                continue
            yield step


def attempt(costs: Costs, load: Load) -> Circle:
    """The circle of a place for one rollout: claimed, its calls and spans, reported; a failed attempt is claimed again."""
    claim = claim_cost(costs, load.batch) / 2
    spans = load.spans_a_call * costs.span_cpu + load.new_tokens * costs.token_cpu

    def steps(chance: random.Random) -> Iterator[Step]:
        yield Mark("claims")
        yield from (Use("queue", claim), Wait(costs.queue_wait))
        yield Mark("claims")
        yield Use("runners, agents", costs.start_cpu)
        for _ in range(load.calls):
            yield Mark("calls")
            yield from (Use("proxy", call_cost(costs, load)), Wait(load.model_seconds * chance.uniform(0.5, 1.5)))
            yield Mark("calls")
            yield Mark("acks")
            yield from (Use("collector", costs.request_cpu), Wait(costs.ack_wait))
            yield from (Mark("acks"), Hand("inserts", spans))
            yield Wait(load.tool_seconds * chance.uniform(0.5, 1.5))
        yield from (Use("collector", 2 * costs.request_cpu), Wait(costs.ack_wait), Hand("inserts", 4 * costs.span_cpu))
        yield from (Use("queue", claim), Wait(costs.queue_wait))
        name = "retries" if chance.random() < load.retried else "rollouts"
        yield from (Mark(name), Mark(name))

    return steps


def try_plan(costs: Costs, planned: Plan, seed: int = 1) -> Outcome:
    """Simulate the processes of a plan, each with a core of its own, from a moment when every place is somewhere in its rollout."""
    load = planned.load
    places = {each.name: Place(Machine(each.cores), each.cores) for each in planned.services}
    places["inserts"] = Place(places["collector"].machine, 1)
    a_round = 6 + 5 * load.calls
    seconds = max(4.0, min(3 * load.seconds, EVENTS * load.seconds / (a_round * load.at_once)))
    chance = random.Random(seed)
    # in their second rounds: those that are in their first would end too seldom at the beginning, where none is late
    clients = [(attempt(costs, load), chance.uniform(load.seconds, 2 * load.seconds)) for _ in range(load.at_once)]
    return simulate(places, clients, seconds, seed)


# --- what was measured on one machine, simulated


def measured_shape(costs: Costs, shape: Mapping[str, Any], cores: float) -> float:
    """What the simulation says of a measured point: rounds a second of its clients, all on one machine, and what else ran there."""
    machine = Machine(cores, others=float(shape.get("others", 0.0)))
    # ClickHouse works beside the collector's loop; all clients are one process, the model server is another
    workers = {"queue": 1, "collector": 1, "inserts": 1, "proxy": 1, "client": int(shape.get("client_cores", 1))}
    places = {name: Place(machine, count) for name, count in workers.items()}
    steps = SHAPES[str(shape["shape"])](costs, shape)

    def circle(_: random.Random) -> Iterator[Step]:
        yield Mark("rounds")
        yield from steps
        yield Mark("rounds")

    return simulate(places, [(circle, 0.0)] * int(shape["clients"]), 20.0).rates["rounds"]


def _claims(costs: Costs, shape: Mapping[str, Any]) -> list[Step]:
    batch = int(shape["batch"])
    half = claim_cost(costs, batch) * batch / 2
    once: list[Step] = [Use("client", costs.claim_client_cpu / 2), Use("queue", half), Wait(costs.queue_wait)]
    return once * 2


def _spans(costs: Costs, shape: Mapping[str, Any]) -> list[Step]:
    work = int(shape["spans"]) * costs.span_cpu + int(shape.get("tokens", 0)) * costs.token_cpu
    once = [Use("client", costs.span_client_cpu), Use("collector", costs.request_cpu), Wait(costs.ack_wait)]
    return [*once, Use("inserts", work)]  # measured until all was stored: nobody sends faster than that for long


def _rollouts(costs: Costs, shape: Mapping[str, Any]) -> list[Step]:
    claim = _claims(costs, {"batch": 1})
    return [*claim[:3], *_spans(costs, shape), *claim[3:]]


def _calls(costs: Costs, _: Mapping[str, Any]) -> list[Step]:
    return [Use("client", costs.call_client_cpu), Use("proxy", costs.call_cpu)]


SHAPES: Final[Mapping[str, Callable[[Costs, Mapping[str, Any]], list[Step]]]] = {
    "claims": _claims,
    "spans": _spans,
    "rollouts": _rollouts,
    "calls": _calls,
}
"""{shape of a measured point: its steps}."""
