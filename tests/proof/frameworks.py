"""The verdicts of agents that are written with frameworks (tests/matrix), of which nobody is killed: all of them must be complete."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.matrix import play as matrix
from tests.matrix.environments import CannotInstallError, Environment, environment
from tests.matrix.frameworks import BY_NAME, Framework

HERE = "openai"
"""The one that the tests' own environment has."""


async def verdicts(directory: Path, names: Sequence[str], rollouts: int) -> tuple[dict[str, Counter[str]], dict[str, str]]:
    """{framework: its verdicts, of so many rollouts in each mode}, and {framework: why it cannot be played}."""
    found: dict[str, Counter[str]] = {}
    skipped: dict[str, str] = {}
    async with matrix.ground(directory, rollouts) as on:
        for name in names:
            try:
                installed = await asyncio.to_thread(_installed, BY_NAME[name])
            except CannotInstallError as error:
                skipped[name] = str(error)
                continue
            results = await matrix.played(on, BY_NAME[name], BY_NAME[name].plays, installed)
            found[name] = sum((Counter(result.verdicts) for result in results), Counter[str]())
    return found, skipped


def _installed(framework: Framework) -> Environment:
    if framework.name == HERE:
        return Environment((sys.executable, str(framework.folder / framework.program)), "")
    return environment(framework)
