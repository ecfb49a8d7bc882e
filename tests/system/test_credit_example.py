"""examples/credit learns its five steps from the rewards of each, and nothing from permuted ones."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

from tests.system.stack_process import Command

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "credit"
PORTS = {f"AGL_{name}_PORT": "0" for name in ("QUEUE", "OTLP_GRPC", "OTLP_HTTP", "CLICKHOUSE", "PROXY", "WEB")}


def scores(folder: Path, changes: dict[str, str]) -> tuple[float, float]:
    """Train the example with some lines of its job replaced; return the scores on held-out tasks before and after."""
    shutil.copytree(EXAMPLE, folder / "credit", ignore=shutil.ignore_patterns("__pycache__"))
    job = folder / "credit" / "job.toml"
    text = job.read_text()
    for line, other in changes.items():
        assert line in text
        text = text.replace(line, other)
    job.write_text(text)
    arguments = ("train", str(job), "--run-dir", str(folder / "run"), "--data-dir", str(folder / "data"))
    with Command(*arguments, log=folder / "train.log", cwd=folder, env=PORTS) as command:
        command.process.wait(800)
        found = [re.search(rf"score {when}: ([0-9.]+) on 32 tasks", command.output) for when in ("before", "after")]
    before, after = (float(each[1]) for each in found if each is not None)
    return before, after


def test_the_example_learns_from_the_rewards_of_its_steps(tmp_path: Path) -> None:
    before, after = scores(tmp_path, {})
    assert before < 0.5 and after > 0.8


@pytest.mark.long
def test_the_example_learns_nothing_from_permuted_rewards(tmp_path: Path) -> None:
    before, after = scores(tmp_path, {'credit = "to_go"': 'shuffle_rewards = true\ncredit = "to_go"', "max_steps = 30": "max_steps = 10"})
    assert before < 0.5 and after < 0.6
