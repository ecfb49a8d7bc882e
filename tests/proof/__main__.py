"""`make proof`: hold verdicts against what agents and the model server wrote themselves, with kills at random moments. See docs/chaos.md.

Exit code 1 where an attempt that lost something is `complete`, or where fewer than 99 % of those that lost nothing are.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.matrix.frameworks import BY_NAME
from tests.proof.campaign import ATTEMPTS, entries, played, shares
from tests.proof.frameworks import HERE, verdicts
from tests.proof.judge import Case, Row, table
from tests.proof.plans import SCENARIOS, missing

COLUMNS = ("scenario", "attempts", "lost", "and complete", "whole", "and complete", "%", "abandoned", "unclear", "idle")
WHOLE_SHARE = 0.99
ROLLOUTS_OF_A_MODE = 1
GLOBAL_LOCK = "agents run on an interpreter that has a global lock (--python takes another)"


def line(name: str, row: Row) -> str:
    """One row of the table."""
    numbers = (row.attempts, row.lost, row.lies, row.whole, row.complete, f"{100 * row.share:.1f}", row.abandoned, row.unclear, row.idle)
    return name.ljust(24) + " ".join(str(number).rjust(len(title)) for number, title in zip(numbers, COLUMNS[1:], strict=True))


def report(cases: Sequence[Case], seed: int) -> int:
    """Print what came of it; the exit code."""
    print(COLUMNS[0].ljust(24) + " ".join(COLUMNS[1:]))
    rows = table(cases)
    for name, row in rows.items():
        print(line(name, row))
    for title, some in (
        ("lost something, and complete", [c for c in cases if c.lied]),
        ("lost nothing, and not complete", [c for c in cases if c.refused]),
    ):
        print(f"\n{title}: {len(some)}")
        for case in some:
            print("\n".join(case.story(seed)))
    return 1 if rows["all"].lies or rows["all"].share < WHOLE_SHARE else 0


def of_frameworks(directory: Path, names: Sequence[str]) -> int:
    """Play these, and print their verdicts; the exit code."""
    if not names:
        return 0
    found, skipped = asyncio.run(verdicts(directory, [*BY_NAME] if "all" in names else names, ROLLOUTS_OF_A_MODE))
    print()
    for name, why in skipped.items():
        print(f"skipped: {name}: {why.strip().splitlines()[-1]}")
    for name, kinds in found.items():
        print(f"framework {name}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}")
    every = sum(found.values(), Counter[str]())
    return 1 if every["complete"] < WHOLE_SHARE * every.total() else 0


def is_free_threaded(python: str) -> bool:
    """Whether an interpreter runs threads at once."""
    code = "import sys; print(getattr(sys, '_is_gil_enabled', lambda: True)())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make proof", description=__doc__)
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, help=f"of all scenarios together (default: {ATTEMPTS})")
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="only this one; may be repeated")
    parser.add_argument("--index", type=int, help="only the attempt of this number, of each scenario")
    parser.add_argument(
        "--frameworks", nargs="*", default=[HERE], choices=["all", *BY_NAME], help=f"also agents of these (default: {HERE})"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of every choice that is made")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of agents, whose environment has agl-otel in it")
    parser.add_argument("--keep", action="store_true", help="keep logs and data of a good run too")
    parser.add_argument("--directory", type=Path, help="where logs and data go (default: the system's place for temporary files)")
    given = parser.parse_args()
    skipped = {name: why for name in given.scenario or SCENARIOS if (why := missing(name))}
    for name, why in {**skipped, **({} if is_free_threaded(given.python) else {"free-threaded": GLOBAL_LOCK})}.items():
        print(f"skipped: {name}: {why}")
    names = [name for name in given.scenario or SCENARIOS if name not in skipped]
    everything = entries(given.seed, shares(given.attempts, names), given.index)
    place = Path(tempfile.mkdtemp(prefix="agl-proof-", dir=given.directory))
    print(f"seed {given.seed} (--seed), {len(everything)} rollouts, {place}", flush=True)
    cases = asyncio.run(played(place / "run", given.seed, everything, lambda text: print(text, flush=True), python=given.python))
    code = max(report(cases, given.seed), of_frameworks(place / "frameworks", given.frameworks))
    if code or given.keep:
        print(f"logs, data and notes are in {place}")
    else:
        shutil.rmtree(place, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
