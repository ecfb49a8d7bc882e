"""What to run for 10, 1,000 and 100,000 rollouts at once: measured costs, sums, and a simulation that is held to measured points.

python -m bench.scale                       # the plan for the three sizes, from the costs in bench/scale.json
python -m bench.scale plan --at-once 5000 --calls 20 --model-seconds 3
python -m bench.scale measure               # a minute: costs and points of this machine; --save keeps them in bench/scale.json
python -m bench.scale points                # the simulation against the stored points
python -m bench.scale page                  # writes the tables of docs/scale.md

Costs are taken at few clients, points at other numbers of clients and spans: what the simulation says of a point was not measured there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.harness import report_against_bar
from bench.scale_costs import measure
from bench.scale_model import Costs, Load, Outcome, Plan, measured_shape, plan, try_plan

STORED: Final = Path(__file__).with_name("scale.json")
PAGE: Final = Path(__file__).parents[1] / "docs" / "scale.md"
SIZES: Final = (10, 1_000, 100_000)
AGREES: Final = (-0.5, 0.3)  # how much less and how much more than a measured point the simulation may say, as a share of it


def stored() -> tuple[Costs, list[dict[str, Any]], dict[str, Any]]:
    """(costs, points, conditions) of bench/scale.json."""
    content = json.loads(STORED.read_text())
    return Costs(**content["costs"]), content["points"], content["conditions"]


def check_points(costs: Costs, points: Sequence[dict[str, Any]], cores: float) -> list[tuple[dict[str, Any], float]]:
    """(point, what the simulation says of it)."""
    return [(point, measured_shape(costs, point, cores)) for point in points]


def size(value: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:,.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def number(value: float) -> str:
    """Three figures."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def plan_table(made: Sequence[tuple[Plan, Outcome]]) -> str:
    """What to run, one column a size."""
    head = ["", *(f"{each.load.at_once:,} at once" for each, _ in made)]
    rows: list[list[str]] = []
    for name, value in (
        ("attempts a second", lambda each: number(each.attempts)),
        ("model calls a second", lambda each: number(each.calls)),
        ("spans a second", lambda each: number(each.spans)),
        ("new tokens a second", lambda each: number(each.tokens)),
    ):
        rows.append([name, *(value(each) for each, _ in made)])
    for place, name in enumerate(("queue", "collector", "proxy", "runners, agents")):
        services = [each.services[place] for each, _ in made]
        rows.append([f"{name}: processes", *(f"{each.processes:,}" for each in services)])
        rows.append([f"{name}: cores (busy)", *(f"{each.cores:,} ({number(each.load)})" for each in services)])
        rows.append([f"{name}: memory", *(size(each.memory) for each in services)])
    rows.append(["disk a day", *(size(each.disk_a_day) for each, _ in made)])
    for name, mark in (("claim", "claims"), ("ack of spans", "acks")):
        waits = [[found.wait(mark, share) * 1e3 for share in (0.5, 0.99)] for _, found in made]
        rows.append([f"simulated: {name}, p50 / p99 ms", *(f"{half:.0f} / {most:.0f}" for half, most in waits)])
    ended = [(found.rates.get("rollouts", 0.0), found.rates.get("retries", 0.0)) for _, found in made]
    rows.append(["simulated: attempts a second (of them failed)", *(f"{number(done + again)} ({number(again)})" for done, again in ended)])
    return _table(head, rows)


def cost_table(costs: Costs) -> str:
    """The measured costs."""
    us = {
        "queue: a rollout claimed and reported": costs.claim_cpu,
        "queue: the same in batches of 100": costs.claim_batched_cpu,
        "queue: a rollout enqueued": costs.enqueue_cpu,
        "collector: a request": costs.request_cpu,
        "collector and ClickHouse: a span of 1.5 KB": costs.span_cpu,
        "collector and ClickHouse: a token id": costs.token_cpu,
        "proxy: a model call, with its span": costs.call_cpu,
        "proxy: a streamed chunk": costs.chunk_cpu,
        "runner: an attempt of a function": costs.function_cpu,
        "runner and agent: an attempt of a warm command, one model call": costs.start_cpu,
    }
    rows = [[name, f"{number(value * 1e6)} µs of CPU"] for name, value in us.items()]
    rows += [["on disk: a rollout", size(costs.rollout_bytes)], ["on disk: a span", size(costs.span_bytes)]]
    rows += [["on disk: a token id", f"{costs.token_bytes:.2g} B"]]
    memory = {
        "queue": costs.queue_memory,
        "collector": costs.collector_memory,
        "proxy": costs.proxy_memory,
        "runner with its warm parent": costs.runner_memory,
        "a forked agent, its own": costs.agent_memory,
    }
    rows += [[f"memory: {name}", size(value)] for name, value in memory.items()]
    return _table(["what", "cost"], rows)


def point_table(checked: Sequence[tuple[dict[str, Any], float]]) -> str:
    """The simulation against what was measured."""
    rows = [
        [f"{point['clients']} clients: {point['unit']}", number(point["measured"]), number(said), f"{said / point['measured'] - 1:+.0%}"]
        for point, said in checked
    ]
    return _table(["point", "measured", "simulated", "off by"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def tables(sizes: Sequence[int] = SIZES) -> dict[str, str]:
    """{name of a place in docs/scale.md: its table}."""
    costs, points, conditions = stored()
    made = [(planned := plan(costs, Load(size)), try_plan(costs, planned)) for size in sizes]
    return {"plan": plan_table(made), "costs": cost_table(costs), "points": point_table(check_points(costs, points, conditions["cores"]))}


def filled(page: str) -> str:
    """The page with its tables written anew."""
    for name, table in tables().items():
        place = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page, count = re.subn(place, lambda found, text=table: f"{found[1]}\n{text}\n{found[2]}", page, flags=re.DOTALL)
        assert count == 1, f"docs/scale.md has {count} places for {name}"
    return page


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="plan", choices=["plan", "measure", "points", "page"])
    parser.add_argument("--save", action="store_true", help="with measure: into bench/scale.json")
    parser.add_argument("--at-once", type=int, action="append", help="rollouts; may be repeated")
    for name, default in Load(0).__dict__.items():
        if name != "at_once":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = parser.parse_args()
    if options.task == "measure":
        found = asyncio.run(measure())
        text = json.dumps(found, indent=1) + "\n"
        (STORED.write_text(text) if options.save else print(text))
        costs = Costs(**found["costs"])
        for point, said in check_points(costs, found["points"], found["conditions"]["cores"]):
            metric = f"simulation, {point['clients']} clients: {point['unit']}"
            more = {"simulated": round(said, 1), "measured": point["measured"]}
            off = said / point["measured"] - 1
            report_against_bar("scale", metric, off, "share off", AGREES[off > 0], **more)
        return 0
    costs, points, conditions = stored()
    if options.task == "points":
        print(point_table(check_points(costs, points, conditions["cores"])))
    elif options.task == "page":
        PAGE.write_text(filled(PAGE.read_text()))
    else:
        chosen = {name: value for name, value in vars(options).items() if name in Load(0).__dict__ and name != "at_once"}
        plans = [plan(costs, Load(at_once, **chosen)) for at_once in options.at_once or SIZES]
        print(plan_table([(each, try_plan(costs, each)) for each in plans]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
