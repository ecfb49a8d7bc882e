"""Regret of `agl-otel improve` over a day of two hours, played in ten minutes: users whose taste changes at noon.

An oracle gives every user the answer that he wants; regret is the number of users that got another one, by the product's own book. The
other product is served by the weights that the loop begins with, which never change.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.improve_world import World, world
from tests.system.stack_process import until

JOB = {"improve.attempts": "256", "algorithm.updates_per_step": "4", "improve.held_out": '"off"'}  # held-out tasks are of the first taste


def played(folder: Path, minutes: float, *, learns: bool) -> World:
    """Play a day, and return what is left of it."""
    job = JOB if learns else {**JOB, "improve.attempts": "100000"}
    with world(folder, job, f"drifting:{minutes * 30}", rate=8.0) as found, found.improve(1000) as loop:
        until(lambda: any(row["answer"] is not None for row in found.book("seen")), "users get answers")
        end = time.monotonic() + minutes * 60
        until(lambda: time.monotonic() > end or loop.process.poll() is not None, "the end of the day", minutes * 60 + 60)
        assert loop.process.poll() is None, loop.output
    return found


def regret(found: World) -> dict[str, Any]:
    """Return the users, and how many of them got another answer than the oracle's."""
    seen = [row for row in found.book("seen") if row["answer"] is not None]
    quarters: list[float] = []
    first, last = seen[0]["time"], seen[-1]["time"]
    for quarter in range(4):
        low, high = (first + (last - first) * part / 4 for part in (quarter, quarter + 1))
        rows = [row["right"] for row in seen if low <= row["time"] < high]
        quarters.append(round(1 - sum(rows) / len(rows), 3))
    return {"users": len(seen), "regret": sum(not row["right"] for row in seen), "by_quarter": quarters}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        days = {name: played(Path(place) / name, given.minutes, learns=name == "improve") for name in ("improve", "frozen")}
        verdicts = [days["improve"].facts(cycle, "verdict").get("verdict") for cycle in range(1, 100)]
        found = {name: regret(day) for name, day in days.items()}
    learnt, frozen = (found[name]["regret"] / found[name]["users"] for name in ("improve", "frozen"))
    print(json.dumps({"bench": "improve", **found, "verdicts": [each for each in verdicts if each], "ratio": round(learnt / frozen, 3)}))


if __name__ == "__main__":
    main()
