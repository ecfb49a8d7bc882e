"""What agents are to do: a plan for each attempt, drawn from (seed, scenario, number), and how its runner starts it.

A plan is a list of steps of agent.py. Moments of kills are of two kinds: between two steps of the plan, by the process itself, and at any
instant within some time, by the campaign.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Plan = list[list[Any]]
Start = Literal["anew", "warm", "function", "lone-function", "http", "lone-http", "configured", "container", "elsewhere"]
"""The lone ones take one attempt at a time: one that kills what plays it kills no other."""
Fault = Literal["", "starts", "proxy", "collector", "queue", "runners", "service", "everything"]
"""What is killed beside what plans ask for: agents as they start, services, runners."""
KILL: Final = int(signal.SIGKILL)
OTHERS: Final = tuple(map(int, (signal.SIGSEGV, signal.SIGABRT, signal.SIGHUP, signal.SIGINT, signal.SIGALRM, signal.SIGQUIT)))
"""Signals that end a process unless it does something about them."""
TERMINATE: Final = int(signal.SIGTERM)
IDLE_SECONDS: Final = 1.0
"""After which a process is sealed that does nothing."""
ASK_TO_KILL: Final = "kill-proxy"
"""In what an agent says to the model: whoever answers kills the proxy as soon as it has."""


@dataclass(frozen=True)
class Scenario:
    """One kind of attempt."""

    draw: Callable[[random.Random], Plan]
    starts: tuple[Start, ...] = ("anew", "warm")
    """One of them is drawn, too."""
    fault: Fault = ""
    share: int = 1
    """How many of its attempts there are for one of another's."""
    timeout_seconds: float = 60.0
    """Of each attempt."""
    tries: int = 2
    """Attempts of a rollout whose runner dies."""
    healthy: bool = False
    """Whether nothing is killed in it."""

    def plan(self, seed: int, name: str, number: int) -> tuple[Start, Plan]:
        """The attempt of this number: the same for the same seed."""
        chance = random.Random(f"{seed}/{name}/{number}")
        return chance.choice(self.starts), self.draw(chance)


# --- parts


def work(chance: random.Random, *, calls: int = 2) -> Plan:
    """What an agent does when nobody disturbs it."""
    steps: Plan = []
    for _ in range(chance.randint(1, 3)):
        inner: Plan = [chance.choice((["sleep", chance.uniform(0, 0.05)], ["spans", chance.randint(1, 4)]))]
        if chance.random() < 0.6 and calls:
            inner.insert(0, a_call(chance))
            calls -= 1
        steps.append(["span", inner])
    return steps


def a_call(chance: random.Random) -> list[Any]:
    """A model call, mostly by the cheapest client."""
    return ["call", chance.choices(("plain", "stream", "cut", "client"), (6, 2, 1, 1))[0]]


def at_any_instant(chance: random.Random, within_seconds: float = 0.6, number: int = KILL) -> list[Any]:
    """Somebody else kills this process while it goes on."""
    return ["killed_within", chance.uniform(0, within_seconds), number]


def killed(chance: random.Random, number: int = KILL) -> Plan:
    """Work that is cut off by a signal: between two steps, in a span or not, or at any instant."""
    steps = work(chance)
    match chance.randrange(5):
        case 0:  # inside the first span
            return [["span", [["kill", number]]]]
        case 1:  # as soon as the first span has ended, long before it is exported
            return [["spans", 1], ["kill", number]]
        case 2:  # inside a later one, what came before is exported
            return [*steps, ["flush"], ["span", [*work(chance, calls=1), ["kill", number]]]]
        case 3:  # between two
            return [*steps, *([["flush"]] if chance.random() < 0.5 else []), ["kill", number]]
        case _:
            return [at_any_instant(chance, number=number), *steps, *work(chance), ["sleep", 0.7]]


CHILDREN: Final = ("fork", "python", "process-fork", "process-spawn", "process-forkserver")
LIMITS: Final[Sequence[Mapping[str, str]]] = (
    {},
    {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "128"},
    {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "1"},
    {"OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "16"},
    {"OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": "3"},
)
LEAVES: Final = "leaves-its-folder"
POOLS: Final = tuple(f"{kind}-{how}" for kind in ("pool", "executor") for how in ("fork", "spawn", "forkserver"))


def with_child(chance: random.Random, how: str, steps: Plan) -> Plan:
    """An agent that works, has a child that plays `steps`, and works on."""
    before = work(chance, calls=1) if chance.random() < 0.6 else []
    child = ["child", how, steps, chance.random() < 0.7]
    inside = chance.random() < 0.5
    return [*before, *([["span", [child]]] if inside else [child]), *(work(chance, calls=1) if chance.random() < 0.6 else [])]


# --- scenarios


def agent_killed(chance: random.Random) -> Plan:
    return killed(chance)


def child_killed(chance: random.Random) -> Plan:
    return with_child(chance, chance.choice(CHILDREN), killed(chance))


def only_child_killed(chance: random.Random) -> Plan:
    """A wrapper that makes no spans itself: all there is to see is the child's."""
    return [["child", chance.choice(("python", "fork")), killed(chance)]]


def grandchild_killed(chance: random.Random) -> Plan:
    inner = ["child", chance.choice(("fork", "python")), killed(chance)]
    return with_child(chance, chance.choice(("fork", "python", "process-spawn")), [*work(chance, calls=1), inner])


def family_killed(chance: random.Random) -> Plan:
    """The parent is killed while its child works, or both are."""
    child = work(chance) if chance.random() < 0.5 else killed(chance)
    return [at_any_instant(chance, 1.0), *with_child(chance, chance.choice(("fork", "python")), [*child, ["sleep", 0.5]]), ["sleep", 0.5]]


def pool_worker_killed(chance: random.Random) -> Plan:
    steps = work(chance, calls=1)
    return with_child(chance, chance.choice(POOLS), [at_any_instant(chance, 0.3), *steps, ["sleep", 0.1]])


def terminated(chance: random.Random) -> Plan:
    return killed(chance, TERMINATE)


def terminated_then_killed(chance: random.Random) -> Plan:
    first = chance.uniform(0, 0.3)
    kills = [["killed_within", first, TERMINATE], ["killed_within", first + chance.uniform(0, 0.2), KILL]]
    return [*kills, *work(chance), *work(chance), ["sleep", 0.6]]


def ended_by_another_signal(chance: random.Random) -> Plan:
    plan = killed(chance, chance.choice(OTHERS))
    return plan if chance.random() < 0.6 else with_child(chance, chance.choice(CHILDREN), plan)


def killed_in_a_burst(chance: random.Random) -> Plan:
    return [at_any_instant(chance, 0.4), *([["span", [["spans", 4000]]]] if chance.random() < 0.5 else [["spans", 4000]])]


def runs_out_of_time(chance: random.Random) -> Plan:
    """Its runner ends it; sometimes it does not heed SIGTERM."""
    deaf: Plan = [["ignore", TERMINATE]] if chance.random() < 0.3 else []
    rest: Plan = [["sleep", 30]]
    works_on = [*work(chance), *(rest if chance.random() < 0.5 else [["span", [*work(chance, calls=1), *rest]]])]
    return [*deaf, *works_on] if chance.random() < 0.6 else with_child(chance, chance.choice(CHILDREN), [*deaf, *works_on])


def forks_in_c(chance: random.Random) -> Plan:
    """A fork that nobody in Python hears of, killed or not."""
    return with_child(chance, "c-fork", killed(chance) if chance.random() < 0.6 else work(chance))


def closes_its_files(chance: random.Random) -> Plan:
    """As daemons do: also the exporter's connection."""
    rest = killed(chance) if chance.random() < 0.5 else work(chance)
    return [*work(chance, calls=1), ["close_files"], *rest]


def exceeds_limits(chance: random.Random) -> Plan:
    """More attributes than a span may have, in the agent or in a child with smaller limits of its own, killed or not."""
    end: Plan = chance.choice(([["kill", KILL]], [["flush"], ["kill", KILL]], []))
    limits = chance.choice(LIMITS)
    steps = [*work(chance, calls=1), ["wide", chance.choice((200, 5000))], *end]
    return [["limited", limits, steps], *work(chance, calls=1)] if limits else steps


def leaves_its_folder(chance: random.Random) -> Plan:
    """A fork that is killed where its ledger's folder is missing, or another."""
    steps = [["leave", chance.choice(("chroot", "mount"))], ["spans", chance.randint(1, 3)], ["kill", KILL]]
    return with_child(chance, chance.choice(("fork", "process-fork")), steps if chance.random() < 0.7 else [["child", "fork", steps]])


def stopped(chance: random.Random) -> Plan:
    """SIGSTOP, and SIGCONT a while later: nothing is lost."""
    first = chance.uniform(0, 0.3)
    stops = [["killed_within", first, int(signal.SIGSTOP)], ["killed_within", first + chance.uniform(0.05, 3.0), int(signal.SIGCONT)]]
    return [*stops, *work(chance), ["sleep", 0.4], *work(chance)]


def ends_itself(chance: random.Random) -> Plan:
    """os._exit, an exception, sys.exit, in the agent, in a span, or in a child."""
    end: list[Any] = chance.choice((["exit_now", 0], ["exit_now", 3], ["fail"]))
    steps = [*work(chance), end] if chance.random() < 0.5 else [["span", [*work(chance, calls=1), end]]]
    return steps if chance.random() < 0.6 else with_child(chance, chance.choice(CHILDREN), steps)


def execs(chance: random.Random) -> Plan:
    """os.exec*, with spans that have just ended."""
    becomes = ["exec", chance.choice(("python", "true", "missing")), work(chance, calls=1)]
    steps = [*work(chance), becomes]
    return steps if chance.random() < 0.7 else with_child(chance, "fork", steps)


def exec_killed(chance: random.Random) -> Plan:
    return [*work(chance, calls=1), ["exec", "python", killed(chance)]]


def killed_at_its_start(chance: random.Random) -> Plan:
    """Somebody watches for the process and kills it, most likely before it has come to its first step."""
    return [*work(chance), ["sleep", 0.5]]


def talks_while_proxies_die(chance: random.Random) -> Plan:
    steps: Plan = []
    for _ in range(chance.randint(2, 6)):
        call = ["call", chance.choice(("plain", "stream", "client")), ASK_TO_KILL if chance.random() < 0.06 else ""]
        steps.append(["span", [call]] if chance.random() < 0.6 else call)
        steps.append(["sleep", chance.uniform(0, 0.2)])
    return steps


def works_for_a_while(chance: random.Random) -> Plan:
    """Long enough that something happens to somebody."""
    return [step for _ in range(chance.randint(2, 4)) for step in [*work(chance), ["sleep", chance.uniform(0, 0.8)]]]


def anything(chance: random.Random) -> Plan:
    draw = chance.choice(
        (agent_killed, child_killed, grandchild_killed, terminated, ends_itself, works_for_a_while, talks_while_proxies_die)
    )
    return draw(chance)


def in_a_container(chance: random.Random) -> Plan:
    draw = chance.choice((agent_killed, child_killed, works, has_children, ends_itself))
    return draw(chance)


def killed_elsewhere(chance: random.Random) -> Plan:
    """It has said who it is, and is then killed: where no disk is shared, nothing is promised of one that dies before."""
    rest = killed(chance, chance.choice((KILL, KILL, TERMINATE)))
    return [*work(chance), ["flush"], ["sleep", chance.choice((0.3, 1.6))], *rest]


def configured(chance: random.Random) -> Plan:
    """An agent whose SDK is set up by a file of its own (OTEL_CONFIG_FILE)."""
    return work(chance)


# --- nothing is killed


def works(chance: random.Random) -> Plan:
    return work(chance)


def leaks(chance: random.Random) -> Plan:
    """Spans that nobody ever ends, in a process that ends as it should."""
    steps = [*work(chance, calls=1), ["leak"], *work(chance, calls=1)]
    return steps if chance.random() < 0.6 else with_child(chance, chance.choice(CHILDREN), steps)


def cuts_streams(chance: random.Random) -> Plan:
    return [["span", [["call", "cut"]]], *work(chance, calls=1), ["call", "cut"]]


def leaves_generators(chance: random.Random) -> Plan:
    return [*work(chance, calls=1), ["generator"], *work(chance, calls=1)]


def leaves_children(chance: random.Random) -> Plan:
    """They still work when the agent has ended."""
    works_on = [step for _ in range(3) for step in [*work(chance, calls=1), ["sleep", chance.uniform(0, 0.5)]]]
    return [
        *work(chance, calls=1),
        ["orphan", works_on],
        *([["orphan", works_on]] if chance.random() < 0.3 else []),
        *work(chance, calls=1),
    ]


def leaves_a_daemon(chance: random.Random) -> Plan:
    """It still runs when the agent has ended; sometimes within a span."""
    rest: Plan = [["sleep", 60]]
    works_on = [*work(chance, calls=1), *(rest if chance.random() < 0.5 else [["span", rest]])]
    return [*work(chance), ["daemon", works_on], ["sleep", chance.uniform(0, 0.4)], *work(chance, calls=1)]


def has_children(chance: random.Random) -> Plan:
    return with_child(chance, chance.choice((*CHILDREN, "unhooked")), work(chance))


def has_pools(chance: random.Random) -> Plan:
    return with_child(chance, chance.choice(POOLS), work(chance, calls=1))


def has_threads(chance: random.Random) -> Plan:
    return [["span", [["thread", work(chance)], ["thread", work(chance)]]], *work(chance, calls=1)]


def bursts(chance: random.Random) -> Plan:
    return [["spans", chance.randint(500, 3000)], *work(chance, calls=1)]


def is_a_function(chance: random.Random) -> Plan:
    return [["sleep", chance.uniform(0, 0.3)], ["span", [["call", "client"]]], *work(chance, calls=0)]


def idles_and_is_killed(chance: random.Random) -> Plan:
    """What it has done is sealed when it is killed: in its next span, or before it."""
    before = [
        ["span", [["call", chance.choice(("plain", "client"))]]],
        *work(chance, calls=0),
        ["sleep", IDLE_SECONDS * chance.uniform(1.2, 2.5)],
    ]
    match chance.randrange(4):
        case 0:
            return [*before, ["kill", KILL]]
        case 1:
            return [*before, ["spans", 1], ["kill", KILL]]
        case 2:
            return [*before, ["span", [["call", "plain"], ["kill", KILL]]]]
        case _:
            return [*before, ["span", [["kill", KILL]]]]


def a_service_is_killed(chance: random.Random) -> Plan:
    """In its first span, after a call that tells the proxy nothing of it; after an idle second; and around its answer."""
    match chance.randrange(6):
        case 0:
            return [["span", [["call", "plain"], ["sleep", chance.uniform(0, IDLE_SECONDS)], ["kill", KILL]]]]
        case 1:
            return idles_and_is_killed(chance)
        case 2:  # between its answer and the end of its span
            return [*work(chance), ["span", [["call", "client"], ["answer"], ["sleep", chance.uniform(0, 0.3)], ["kill", KILL]]]]
        case 3:
            return [["spans", 2], ["sleep", 2 * IDLE_SECONDS], ["span", [["answer"], ["kill", KILL]]]]
        case 4:  # when it has answered, with all spans ended and not sent
            return [["spans", 1], ["sleep", 2 * IDLE_SECONDS], ["spans", 2], ["answer"], ["kill", KILL]]
        case _:  # when it has answered, and all is sealed
            return [*work(chance), ["answer"], ["sleep", IDLE_SECONDS * chance.uniform(0.5, 3)], ["kill", KILL]]


def serves(chance: random.Random) -> Plan:
    """A service that answers from within its span, or long after it, and lives on."""
    if chance.random() < 0.5:
        return [["span", [*work(chance, calls=1), ["answer"], ["sleep", chance.uniform(0, 0.2)]]]]
    return [*work(chance, calls=1), ["sleep", IDLE_SECONDS * chance.uniform(0, 2)], ["answer"]]


def missing(name: str) -> str:
    """Why a scenario cannot be played here; empty where it can."""
    if name == LEAVES or {"container", "elsewhere"} & {*SCENARIOS[name].starts}:
        tried = shutil.which("unshare") and subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
        return "" if tried and not tried.returncode else "mount namespaces need root, and unshare of util-linux"
    return ""


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "agent-killed": Scenario(agent_killed, share=3),
    "killed-at-its-start": Scenario(killed_at_its_start, ("anew",), fault="starts"),
    "child-killed": Scenario(child_killed, share=3),
    "only-child-killed": Scenario(only_child_killed),
    "grandchild-killed": Scenario(grandchild_killed, share=2),
    "family-killed": Scenario(family_killed),
    "pool-worker-killed": Scenario(pool_worker_killed),
    "terminated": Scenario(terminated),
    "terminated-then-killed": Scenario(terminated_then_killed),
    "ended-by-another-signal": Scenario(ended_by_another_signal, share=2),
    "killed-in-a-burst": Scenario(killed_in_a_burst),
    "runs-out-of-time": Scenario(runs_out_of_time, timeout_seconds=4.0),
    "forks-in-c": Scenario(forks_in_c),
    "closes-its-files": Scenario(closes_its_files),
    "exceeds-limits": Scenario(exceeds_limits),
    LEAVES: Scenario(leaves_its_folder),
    "stopped": Scenario(stopped),
    "ends-itself": Scenario(ends_itself),
    "execs": Scenario(execs),
    "exec-killed": Scenario(exec_killed),
    "container-killed": Scenario(in_a_container, ("container",), share=2),
    "killed-elsewhere": Scenario(killed_elsewhere, ("elsewhere",)),
    "proxies-killed": Scenario(talks_while_proxies_die, fault="proxy", share=3),
    "collectors-killed": Scenario(works_for_a_while, fault="collector"),
    "queues-killed": Scenario(works_for_a_while, fault="queue"),
    "runners-killed": Scenario(anything, fault="runners", share=2),
    "functions-killed": Scenario(is_a_function, ("function",), fault="runners"),
    "functions-killed-idle": Scenario(idles_and_is_killed, ("lone-function",), fault="runners", tries=1),
    "service-killed": Scenario(works_for_a_while, ("http",), fault="service"),
    "service-kills-itself": Scenario(a_service_is_killed, ("lone-http",), share=2),
    "everything-killed": Scenario(anything, fault="everything", share=2),
    "works": Scenario(works, healthy=True),
    "leaks": Scenario(leaks, healthy=True),
    "cuts-streams": Scenario(cuts_streams, healthy=True),
    "leaves-generators": Scenario(leaves_generators, healthy=True),
    "leaves-a-daemon": Scenario(leaves_a_daemon, healthy=True),
    "leaves-children": Scenario(leaves_children, healthy=True),
    "configured": Scenario(configured, ("configured",), healthy=True),
    "elsewhere": Scenario(works, ("elsewhere",), healthy=True),
    "elsewhere-with-children": Scenario(has_children, ("elsewhere",), healthy=True),
    "has-children": Scenario(has_children, healthy=True, share=2),
    "has-pools": Scenario(has_pools, healthy=True),
    "has-threads": Scenario(has_threads, healthy=True),
    "bursts": Scenario(bursts, healthy=True),
    "by-baggage": Scenario(is_a_function, ("function",), share=20, healthy=True),
    "by-http": Scenario(is_a_function, ("http",), share=2, healthy=True),
    "serves": Scenario(serves, ("http",), healthy=True),
}
