"""Capacity plans for 10, 1,000 and 100,000 concurrent rollouts, summed from measured costs.

python -m bench.scale                       # the plan for the three sizes, from the costs in bench/scale.json
python -m bench.scale plan --at-once 5000 --calls 20 --model-seconds 3
python -m bench.scale plan --spans-a-second 2000 --spans-a-request 20    # a fleet that only sends OTLP
python -m bench.scale measure               # a minute: the costs of this machine; --save keeps them in bench/scale.json
python -m bench.scale page                  # writes the tables of docs/scale.md
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, NamedTuple

STORED: Final = Path(__file__).with_name("scale.json")
PAGE: Final = Path(__file__).parents[1] / "docs" / "scale.md"
SIZES: Final = (10, 1_000, 100_000)
BUSY: Final = 0.6  # planned load of a core: above it, queueing delays grow faster than the load
DAY_SECONDS: Final = 86_400.0
RUNNER_PLACES: Final = 256  # concurrent rollouts of one runner
INSERT_CPU: Final = 0.045  # seconds of one core, whatever its rows (collector/write.py); measured with a request a second
INSERTS_A_SECOND: Final = 4  # at most, while nobody waits for one and no batch is full


@dataclass(frozen=True)
class Costs:
    """Measured costs, as COST_ROWS names them. CPU in seconds of one core, sizes in bytes."""

    claim_cpu: float
    claim_batched_cpu: float
    enqueue_cpu: float
    """In batches."""
    request_cpu: float
    """Including its share of an insert."""
    span_cpu: float
    """Without token ids, like `span_bytes`."""
    token_cpu: float
    call_cpu: float
    """Of 250 tokens, not streamed."""
    chunk_cpu: float
    function_cpu: float
    start_cpu: float
    """Forked from a warm parent."""
    rollout_bytes: float
    span_bytes: float
    token_bytes: float
    queue_memory: float
    collector_memory: float
    proxy_memory: float
    runner_memory: float
    agent_memory: float


COST_ROWS: Final = {
    "queue: a rollout claimed and reported": "claim_cpu",
    "queue: the same in batches of 100": "claim_batched_cpu",
    "queue: a rollout enqueued": "enqueue_cpu",
    "collector: a request": "request_cpu",
    "collector and ClickHouse: a span of 1.5 KB": "span_cpu",
    "collector and ClickHouse: a token id": "token_cpu",
    "proxy: a model call, with its span": "call_cpu",
    "proxy: a streamed chunk": "chunk_cpu",
    "runner: an attempt of a function": "function_cpu",
    "runner and agent: an attempt of a warm command, one model call": "start_cpu",
    "on disk: a rollout": "rollout_bytes",
    "on disk: a span": "span_bytes",
    "on disk: a token id": "token_bytes",
    "memory: queue": "queue_memory",
    "memory: collector": "collector_memory",
    "memory: proxy": "proxy_memory",
    "memory: runner with its warm parent": "runner_memory",
    "memory: a forked agent, its own": "agent_memory",
}
"""{row of the table in docs/scale.md: field of Costs}."""


@dataclass(frozen=True)
class Load:
    """The load to plan for: concurrent rollouts, and the work of one attempt."""

    at_once: int
    calls: int = 10
    model_seconds: float = 8.0
    """Duration of a model call."""
    tool_seconds: float = 2.0
    """Time between two calls."""
    new_tokens: int = 1000
    """Stored tokens of a call: its reply, and the part of its prompt that no earlier call had."""
    spans_a_call: int = 3
    """Spans of the agent and of the proxy."""
    streamed: int = 0
    """Chunks of a call; 0: not streamed."""
    retried: float = 0.02
    """Share of attempts that are retries."""
    batch: int = 1
    """Rollouts per claim."""


@dataclass(frozen=True)
class OtlpLoad:
    """The load of a fleet that only sends OTLP."""

    spans_a_second: float
    spans_a_request: float


OPTIONS: Final = {
    "at_once": "concurrent rollouts; may be repeated, for a column each",
    "calls": "model calls of an attempt",
    "model_seconds": "duration of a model call",
    "tool_seconds": "time between two calls",
    "new_tokens": "stored tokens of a call: its reply, and the part of its prompt that no earlier call had",
    "spans_a_call": "spans of the agent and of the proxy for each call; an attempt has four more",
    "streamed": "chunks of a call; 0: not streamed",
    "retried": "share of attempts that are retries",
    "batch": "rollouts per claim",
    "spans_a_second": "plan the collector for a plain OTLP load instead: spans of 1.5 KB without token ids",
    "spans_a_request": "spans in one request of that load",
}
"""{option of `plan`: its help}."""


class Service(NamedTuple):
    """One service of a plan. `load` is in busy cores; `memory` is the total of all processes in bytes."""

    name: str
    load: float
    processes: int
    cores: int
    memory: float


class Plan(NamedTuple):
    """The plan for a load: rates per second, services, bytes on disk per day."""

    load: Load
    attempts: float
    calls: float
    spans: float
    tokens: float
    services: tuple[Service, ...]
    disk_a_day: float


def stored() -> Costs:
    """Load the costs from bench/scale.json."""
    return Costs(**json.loads(STORED.read_text())["costs"])


def plan(costs: Costs, load: Load) -> Plan:
    """Sum the costs of a load. A Python process uses at most one core, so a service that needs more has several processes.

    The number of concurrent rollouts is constant. An attempt has the spans of its calls, its root span, a reward and two seals; they are
    sent in one request per call, and two per attempt.
    """
    attempts = load.at_once / (load.calls * (load.model_seconds + load.tool_seconds))
    calls, spans = attempts * load.calls, attempts * (load.calls * load.spans_a_call + 4)
    tokens, first_attempts = calls * load.new_tokens, attempts * (1 - load.retried)
    collector = attempts * (load.calls + 2) * costs.request_cpu + spans * costs.span_cpu + tokens * costs.token_cpu
    runners = attempts * costs.start_cpu
    memory = math.ceil(load.at_once / RUNNER_PLACES) * costs.runner_memory + load.at_once * costs.agent_memory
    services = (
        _service("queue", attempts * claim_cost(costs, load.batch) + first_attempts * costs.enqueue_cpu, costs.queue_memory),
        _service("collector", collector, costs.collector_memory),
        _service("proxy", calls * (costs.call_cpu + load.streamed * costs.chunk_cpu), costs.proxy_memory),
        Service("runners, agents", runners, math.ceil(load.at_once / RUNNER_PLACES), _cores(runners), memory),
    )
    disk = spans * costs.span_bytes + tokens * costs.token_bytes + first_attempts * costs.rollout_bytes
    return Plan(load, attempts, calls, spans, tokens, services, disk * DAY_SECONDS)


def plan_otlp(costs: Costs, load: OtlpLoad) -> Service:
    """Return the collectors for a plain OTLP load.

    Every insert costs INSERT_CPU. Requests that come faster than INSERTS_A_SECOND share them; a lone sender of small requests does not.
    """
    requests = load.spans_a_second / load.spans_a_request
    inserts = min(requests, INSERTS_A_SECOND) * INSERT_CPU
    return _service("collector", requests * costs.request_cpu + load.spans_a_second * costs.span_cpu + inserts, costs.collector_memory)


def otlp_table(costs: Costs, load: OtlpLoad) -> str:
    """Format the plan for a plain OTLP load as a Markdown table."""
    made = plan_otlp(costs, load)
    rows = [
        ["requests a second", number(load.spans_a_second / load.spans_a_request)],
        ["collector: processes", f"{made.processes:,}"],
        ["collector: cores (busy)", f"{made.cores:,} ({number(made.load)})"],
        ["collector: memory", size(made.memory)],
        ["disk a day", size(load.spans_a_second * costs.span_bytes * DAY_SECONDS)],
    ]
    return _table(["", f"{number(load.spans_a_second)} spans a second"], rows)


def claim_cost(costs: Costs, batch: int) -> float:
    """Return the queue's CPU seconds per rollout, from a cost per call and per rollout that fit the two measured batch sizes."""
    call = (costs.claim_cpu - costs.claim_batched_cpu) * 100 / 99
    return call / batch + costs.claim_cpu - call


def _service(name: str, busy: float, memory: float) -> Service:
    return Service(name, busy, _cores(busy), _cores(busy), _cores(busy) * memory)


def _cores(busy: float) -> int:
    return max(1, math.ceil(busy / BUSY))


def size(value: float) -> str:
    """Format bytes."""
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def number(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def plan_table(made: Sequence[Plan]) -> str:
    """Format plans as a Markdown table, one column per size."""
    cells: dict[str, Callable[[Plan], str]] = {
        "attempts a second": lambda each: number(each.attempts),
        "model calls a second": lambda each: number(each.calls),
        "spans a second": lambda each: number(each.spans),
        "new tokens a second": lambda each: number(each.tokens),
    }
    rows = [[name, *map(cell, made)] for name, cell in cells.items()]
    for services in zip(*(each.services for each in made), strict=True):
        name = services[0].name
        rows.append([f"{name}: processes", *(f"{each.processes:,}" for each in services)])
        rows.append([f"{name}: cores (busy)", *(f"{each.cores:,} ({number(each.load)})" for each in services)])
        rows.append([f"{name}: memory", *(size(each.memory) for each in services)])
    rows.append(["disk a day", *(size(each.disk_a_day) for each in made)])
    return _table(["", *(f"{each.load.at_once:,} at once" for each in made)], rows)


def cost_table(costs: Costs) -> str:
    """Format the measured costs as a Markdown table."""
    rows: list[list[str]] = []
    for what, name in COST_ROWS.items():
        value = getattr(costs, name)
        rows.append([what, f"{number(value * 1e6)} µs of CPU" if name.endswith("_cpu") else size(value)])
    return _table(["what", "cost"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def filled(page: str) -> str:
    """Return docs/scale.md's text with its tables regenerated."""
    costs = stored()
    for name, table in {"plan": plan_table([plan(costs, Load(size)) for size in SIZES]), "costs": cost_table(costs)}.items():
        place = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page, count = re.subn(place, lambda found, text=table: f"{found[1]}\n{text}\n{found[2]}", page, flags=re.DOTALL)
        assert count == 1, f"docs/scale.md has {count} places for {name}"
    return page


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="plan", choices=["plan", "measure", "page"])
    parser.add_argument("--save", action="store_true", help="with measure: write bench/scale.json")
    parser.add_argument("--at-once", type=int, action="append", help=f"{OPTIONS['at_once']} (10, 1000 and 100000)")
    assumed = {each.name: each.default for each in fields(Load) if each.name != "at_once"}
    for name, default in assumed.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"{OPTIONS[name]} (%(default)s)")
    parser.add_argument("--spans-a-second", type=float, help=OPTIONS["spans_a_second"])
    parser.add_argument("--spans-a-request", type=float, default=20.0, help=f"{OPTIONS['spans_a_request']} (%(default)s)")
    options = parser.parse_args()
    if options.task == "measure":
        from bench.scale_costs import measure  # slow to import

        text = json.dumps(asyncio.run(measure()), indent=1) + "\n"
        (STORED.write_text(text) if options.save else print(text))
    elif options.task == "page":
        PAGE.write_text(filled(PAGE.read_text()))
    elif options.spans_a_second is not None:
        print(otlp_table(stored(), OtlpLoad(options.spans_a_second, options.spans_a_request)))
    else:
        chosen = {name: getattr(options, name) for name in assumed}
        print(plan_table([plan(stored(), Load(at_once, **chosen)) for at_once in options.at_once or SIZES]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
