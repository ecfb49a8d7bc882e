"""`python -m tests.matrix [NAME …]`: play all frameworks, or some, and write docs/frameworks.md. Exits with 1 where one is not as expected.

The stack lives in a temporary directory; environments stay in build/matrix/. Progress goes to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.matrix.environments import CannotInstallError, environment
from tests.matrix.frameworks import FRAMEWORKS, Framework
from tests.matrix.harnesses import HARNESSES
from tests.matrix.page import keep, recorded
from tests.matrix.play import Ground, ground, played

BY_NAME = {framework.name: framework for framework in (*FRAMEWORKS, *HARNESSES)}


async def main(names: Sequence[str], rollouts: int) -> int:
    """Play; the exit code. SIGTERM ends it as Ctrl+C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="agl-matrix-") as place:
        async with ground(Path(place), rollouts) as on:
            good = [await _one(on, BY_NAME[name]) for name in names or BY_NAME]
    return 0 if all(good) else 1


async def _one(on: Ground, framework: Framework) -> bool:
    print(f"== {framework.title}", flush=True)
    try:
        installed = await asyncio.to_thread(environment, framework)
    except CannotInstallError as error:
        print(f"cannot be installed: {error}")
        keep(framework.name, {"failure": f"cannot be installed: {error}"})
        return False
    results = await played(on, framework, framework.plays, installed)
    for play, found in zip(framework.plays, results, strict=True):
        shown = f"{found.exact}/{found.calls} exact, joined {found.joined}, {found.own_spans} own spans, trajectories {found.trajectories}"
        print(f"{play.mode}: {shown}, {found.verdicts}{''.join(f'{chr(10)}    {problem}' for problem in found.problems)}", flush=True)
    keep(framework.name, recorded(framework, installed.version, list(zip(framework.plays, results, strict=True))))
    return not any(found.problems for found in results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BY_NAME))
    parser.add_argument("--rollouts", type=int, default=2, help="of each mode")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in BY_NAME]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(BY_NAME)}")
    sys.exit(asyncio.run(main(given.names, given.rollouts)))
