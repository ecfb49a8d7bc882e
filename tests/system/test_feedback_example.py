"""examples/feedback learns from what users say after the fact, and nothing from users who rate at random."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

from agl_otel.settings import free_ports
from tests.system.stack_process import ENVIRONMENT, Command, run, until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "feedback"


def scores(folder: Path, *how: str, steps: int) -> tuple[float, float]:
    """Train the example beside its users; return the scores on held-out tasks before and after."""
    place = folder / "feedback"
    shutil.copytree(EXAMPLE, place, ignore=shutil.ignore_patterns("__pycache__", "answered.jsonl"))
    job = place / "job.toml"
    job.write_text(job.read_text().replace("max_steps = 24", f"max_steps = {steps}"))
    queue, web = free_ports(2)
    ports = {**{f"AGL_{name}_PORT": "0" for name in ("OTLP_GRPC", "OTLP_HTTP", "CLICKHOUSE", "PROXY")}, "AGL_WEB_PORT": str(web)}
    stack = Command("up", "--data-dir", str(folder / "data"), log=folder / "up.log", cwd=place, env={**ports, "AGL_QUEUE_PORT": str(queue)})
    users = subprocess.Popen([sys.executable, "users.py", *how], cwd=place, env={**ENVIRONMENT, **ports})
    try:
        with stack:
            until(lambda: f":{web}" in stack.output, "the stack is up")
            done = run("train", "job.toml", "--store", f"127.0.0.1:{queue}", "--run-dir", str(folder / "run"), cwd=place)
            assert users.poll() is None
    finally:
        users.kill()
        users.wait()
    found = [re.search(rf"score {when}: ([0-9.]+) on 64 tasks", done.stdout) for when in ("before", "after")]
    assert None not in found, done.stderr
    before, after = (float(each[1]) for each in found if each is not None)
    return before, after


def test_the_example_learns_from_what_users_say_later(tmp_path: Path) -> None:
    before, after = scores(tmp_path, steps=24)
    assert before < 0.45 and after > 0.65


@pytest.mark.long
def test_the_example_learns_nothing_from_users_who_do_not_look(tmp_path: Path) -> None:
    before, after = scores(tmp_path, "--at-random", steps=6)
    assert before < 0.45 and after < 0.55
