"""Regret of `agl-otel improve` over a day of two hours, played in ten minutes: users whose taste changes at noon.

An oracle gives every user the answer that he wants; regret is the number of users that got another one, by the product's own book.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from tests.improve_world import World, world
from tests.system.stack_process import until

LOOP = {"improve.attempts": "256", "improve.held_out": '"off"'}  # held-out tasks are of the first taste
JOBS: Final[dict[str, dict[str, str]]] = {
    "grpo": {**LOOP, "algorithm.updates_per_step": "4"},
    "sft": {
        **LOOP, "algorithm.name": '"sft"', "algorithm.min_reward": "1.0", "algorithm.top_fraction": "1.0", "algorithm.corrections": "true",
        "algorithm.epochs": "1", "algorithm.importance_cap": "", "algorithm.updates_per_step": "",
    },
    "frozen": {"improve.attempts": "100000"},
}  # fmt: skip
"""How the days differ: rewards alone, rewards and corrections, nothing is learnt."""


def played(folder: Path, minutes: float, job: dict[str, str]) -> World:
    """Play a day, and return what is left of it."""
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
    missed = sum(not row["right"] for row in seen)
    return {"users": len(seen), "regret": missed, "share": round(missed / len(seen), 3), "by_quarter": quarters}


def main() -> None:
    """Print one JSON object for each day."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--days", nargs="+", choices=list(JOBS), default=list(JOBS))
    given = parser.parse_args()
    for name in given.days:
        with tempfile.TemporaryDirectory() as place:
            day = played(Path(place), given.minutes, JOBS[name])
            verdicts = Counter(verdict for cycle in range(1, 200) if (verdict := day.facts(cycle, "verdict").get("verdict")))
            print(json.dumps({"bench": "improve", "day": name, **regret(day), "verdicts": dict(verdicts)}), flush=True)


if __name__ == "__main__":
    main()
