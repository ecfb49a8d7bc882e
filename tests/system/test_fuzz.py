"""A few rounds of `make fuzz` at every port, always the same; `make fuzz` plays other rounds, for any time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.__main__ import NAMES, fuzz, stack
from tests.fuzz.targets import Target

pytestmark = pytest.mark.full
ROUNDS = 6
Running = tuple[dict[str, Target], dict[str, int], Path]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("fuzz")
    with stack(folder) as (targets, pids):
        yield {target.name: target for target in targets}, pids, folder


@pytest.mark.parametrize("name", NAMES)
def test_a_port_survives_fuzzing(name: str, running: Running) -> None:
    targets, pids, folder = running
    found = fuzz(targets[name], pids, folder, seed=11, rounds=ROUNDS)
    assert not found.problems, "\n".join(found.problems)
    assert found.sent >= ROUNDS
