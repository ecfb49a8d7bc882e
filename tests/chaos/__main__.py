"""`make chaos`: play the scenarios with real processes, one line for each, and exit 1 where a promise was broken. See docs/chaos.md."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos.check import Tally
from tests.chaos.scenarios import SCENARIOS, Result, play

COLUMNS = ("scenario", "kills", "acked", "readable", "lost", "doubled", "wrong id", "disorder", "MiB", "seconds", "")
WIDTHS = (26, 6, 9, 9, 6, 8, 9, 9, 6, 8, 0)


def line(*values: object) -> str:
    """One row of the table."""
    first, *others = (str(value) for value in values)
    return first.ljust(WIDTHS[0]) + " ".join(value.rjust(width) for value, width in zip(others, WIDTHS[1:], strict=True))


def row(name: str, kills: int, tally: Tally, peak: int, seconds: float, verdict: str) -> str:
    """One scenario, or all of them."""
    counts = (tally.acked, tally.readable, tally.lost, tally.doubled, tally.wrong_id, tally.disordered)
    return line(name, kills, *counts, peak >> 20, round(seconds), verdict)


async def main(arguments: argparse.Namespace) -> int:
    """Play what was asked for; the exit code."""
    names = arguments.scenario or list(SCENARIOS)
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)  # and what was started is ended
    place = Path(tempfile.mkdtemp(prefix="agl-chaos-", dir=arguments.directory))
    print(f"seed {arguments.seed} (--seed), {'small' if arguments.quick else 'full'} run", flush=True)
    print(line(*COLUMNS), flush=True)
    results: list[Result] = []
    for name in names:
        found = await play(name, place / name, seed=arguments.seed, full=not arguments.quick, share=arguments.share)
        results.append(found)
        verdict = f"skipped: {found.skipped}" if found.skipped else "ok" if found.good else "BROKEN"
        print(row(name, found.kills, found.tally, found.peak_bytes, found.seconds, verdict), flush=True)
        for problem in found.problems:
            print(f"    {problem}", flush=True)
        if found.good and not arguments.keep:
            shutil.rmtree(place / name, ignore_errors=True)
    peak = max(found.peak_bytes for found in results)
    bad = [found.name for found in results if not found.good]
    total = sum((found.tally for found in results), Tally())
    print(row("all", sum(found.kills for found in results), total, peak, sum(r.seconds for r in results), "ok" if not bad else "BROKEN"))
    if bad:
        print(f"broken: {', '.join(bad)}; logs and data are in {place}. Again: make chaos ARGS='--seed {arguments.seed} {' '.join(bad)}'")
    elif not arguments.keep:
        shutil.rmtree(place, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("scenario", nargs="*", choices=[[], *SCENARIOS], metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of every choice that is made")
    parser.add_argument("--quick", action="store_true", help="a small version of each scenario, as in `make test-all`")
    parser.add_argument("--share", type=float, default=1.0, help="of the kills, rounds and requests of a full run, as 0.2 (default: 1)")
    parser.add_argument("--keep", action="store_true", help="keep logs and data of good scenarios too")
    parser.add_argument("--directory", type=Path, help="where logs and data go (default: the system's place for temporary files)")
    sys.exit(asyncio.run(main(parser.parse_args())))
