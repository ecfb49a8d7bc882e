"""GEPA as a job file: it finds the prompt, finds none if the editor is useless, and ends the same after a kill -9."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agl_otel.algorithms.prompts.journal import JOURNAL
from agl_otel.cli import main
from agl_otel.service.framed import read
from agl_otel.store import Store
from agl_otel.store.embedded import EmbeddedStack
from tests.contract.algorithms.conftest import EXAMPLE, Models, models
from tests.system.stack_process import Command, naming, until

__all__ = ["models"]  # the fixture
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
GEPA = """
[algorithm]
name = "gepa"
reflection_model = "editor"
minibatch_size = 3
max_iterations = 6
max_merges = 2
max_rollouts = 100
seed = 0
metrics = []
"""
KEY = {"OPENAI_API_KEY": "none"}


@dataclass(frozen=True)
class Place:
    folder: Path
    address: str
    models: Models

    def arguments(self, run: str, job: str = "job.toml") -> list[str]:
        return ["train", str(self.folder / job), "--store", self.address, "--run-dir", str(self.folder / run), "--json"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, models: Models) -> Iterator[Place]:
    """A stack, and a folder with the example's job for GEPA."""
    folder = tmp_path_factory.mktemp("gepa")
    for name in ("agent", "tasks", "words"):
        shutil.copy(EXAMPLE / f"{name}.py", folder)
    job = (EXAMPLE / "job.toml").read_text().partition("[algorithm]")[0].replace("http://127.0.0.1:8099/v1", models.url)
    (folder / "job.toml").write_text(job.replace("concurrency = 8", "concurrency = 2\nunresponsive_seconds = 15") + GEPA)
    store = Store(source=EmbeddedStack(services=("queue", "collector")))

    async def address() -> str:
        return str((await store.open()).description.queue)

    yield Place(folder, asyncio.run(address()), models)
    asyncio.run(store.close())


def trained(place: Place, run: str, capsys: pytest.CaptureFixture[str], job: str = "job.toml") -> dict[str, Any]:
    """Run the job in this process; return its output."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setenv("OPENAI_API_KEY", "none")
        main(place.arguments(run, job))
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured.err[-4000:]
    return json.loads(captured.out)


def paid(place: Place) -> int:
    async def count() -> int:
        async with await Store.connect(place.address) as store:
            return (await store.statistics()).get("total_rollouts", 0)

    return asyncio.run(count())


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_killed_search_ends_like_an_uninterrupted_one_and_repeats_no_rollout(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.models.as_editor("reads")
    whole = trained(place, "whole", capsys)
    assert whole["best_score"] == 1.0 and whole["best"]["prompt_template"].endswith("next"), whole
    cost = paid(place)
    assert cost == whole["rollouts"]
    calls = place.models.server.calls
    steps = len(read(place.folder / "whole" / JOURNAL))

    kill_after = random.Random().randrange(1, steps - 1)
    killed = place.folder / "killed"
    with Command(*place.arguments("killed"), log=place.folder / "killed.log", cwd=place.folder, env=KEY) as first:
        journal = killed / JOURNAL
        until(lambda: len(read(journal)) >= kill_after or first.process.poll() is not None, "some steps are paid for")
        first.process.send_signal(signal.SIGKILL)
        assert first.process.wait() == -signal.SIGKILL, first.output
    until(lambda: naming(killed) == [], "the killed run's processes have ended")
    words = f"killed after {kill_after} of {steps} records of its journal"
    again = trained(place, "killed", capsys)
    assert again["result"] == {**whole["result"], "path": str(killed / "best.json")}, words
    assert {**again, "folder": "", "result": ""} == {**whole, "folder": "", "result": ""}, words
    assert lines(killed / "metrics.jsonl") == lines(place.folder / "whole" / "metrics.jsonl"), words
    assert paid(place) == 2 * cost, words
    assert place.models.server.calls <= 2 * calls + 1, f"{words}: but for the call that the kill may have cut off"


def test_a_useless_editor_finds_no_better_prompt(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.models.as_editor("babbles")
    (place.folder / "control.toml").write_text((place.folder / "job.toml").read_text().replace("max_iterations = 6", "max_iterations = 2"))
    found = trained(place, "control", capsys, "control.toml")
    assert found["editor_calls"] > 0 and found["best_score"] <= 0.4, found
