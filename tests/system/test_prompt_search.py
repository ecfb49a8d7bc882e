"""A search for prompts as users run it: killed and restarted, and as a job file."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agl_otel.algorithms.prompts.journal import JOURNAL
from agl_otel.service.framed import read
from agl_otel.service.processes import die_with_parent
from agl_otel.settings import free_port
from agl_otel.store import Store
from agl_otel.store.embedded import EmbeddedStack
from tests.system.stack_process import ENVIRONMENT, Command, naming, run, until

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "apo"
BEST = re.compile(r"^best prompt \(1\.00\): \w* ?flip$", re.MULTILINE)


def started(folder: Path, log: Path, port: int = 0) -> subprocess.Popen[bytes]:
    folders = ["--run-dir", str(folder / "run"), "--data-dir", str(folder / "data")]
    arguments = ["optimise.py", "flip", *folders, "--port", str(port), "--lost-after", "15"]
    with log.open("wb") as out:
        return subprocess.Popen(
            die_with_parent([sys.executable, "-u", *arguments]),
            cwd=EXAMPLE, stdout=out, stderr=subprocess.STDOUT, env=ENVIRONMENT, start_new_session=True,
        )  # fmt: skip


def ended(process: subprocess.Popen[bytes], log: Path) -> str:
    try:
        code = process.wait(900)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    output = log.read_text(errors="replace")
    assert code == 0, output[-4000:]
    return output


def paid(folder: Path) -> int:
    """Count the rollouts in the store of a run that has ended."""

    async def count() -> int:
        store = Store(source=EmbeddedStack(folder / "data", services=("queue",)))
        try:
            return int((await (await store.open()).queue.statistics())["total_rollouts"])
        finally:
            await store.close()

    return asyncio.run(count())


def test_a_killed_run_continues_and_repeats_no_paid_rollout(tmp_path: Path) -> None:
    whole = ended(started(tmp_path / "whole", tmp_path / "whole.log"), tmp_path / "whole.log")
    assert BEST.search(whole), whole
    results = [line for line in whole.splitlines() if line.startswith(("{'round'", "best prompt"))]

    killed = tmp_path / "killed"
    journal = killed / "run" / JOURNAL
    port = free_port()
    process = started(killed, tmp_path / "first.log", port)
    try:
        until(lambda: process.poll() is not None or len(read(journal)) >= 7, "some steps are done")
        assert process.poll() is None, (tmp_path / "first.log").read_text()
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
    until(lambda: naming(killed) == [], "the killed run's services have ended")
    again = ended(started(killed, tmp_path / "second.log", port), tmp_path / "second.log")
    assert [line for line in again.splitlines() if line.startswith(("{'round'", "best prompt"))] == results
    assert (
        paid(killed) == paid(tmp_path / "whole") == json.loads((killed / "run" / "metrics.jsonl").read_text().splitlines()[-1])["rollouts"]
    )


def test_the_job_file_of_the_example_runs_and_names_its_run(tmp_path: Path) -> None:
    server = subprocess.Popen([sys.executable, "-u", "server.py"], cwd=EXAMPLE, stdout=subprocess.PIPE, env=ENVIRONMENT)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().decode().strip()
        job = tmp_path / "job.toml"
        job.write_text((EXAMPLE / "job.toml").read_text().replace("http://127.0.0.1:8099/v1", url).replace('"next"', '"back"'))
        for name in ("agent", "tasks", "words"):
            (tmp_path / f"{name}.py").write_text((EXAMPLE / f"{name}.py").read_text())
        arguments = ["train", str(job), "--data-dir", str(tmp_path / "data"), "--run-dir", str(tmp_path / "run"), "--json"]
        done = run(*arguments, cwd=tmp_path, env={"OPENAI_API_KEY": "none"})
        assert done.returncode == 0, done.stderr[-4000:]
        result = json.loads(done.stdout)
        assert result["best_score"] == 1.0 and result["best"]["prompt_template"].endswith("back"), result
        with Command(*arguments, log=tmp_path / "again.log", cwd=tmp_path, env={"OPENAI_API_KEY": "none"}) as again:
            assert again.wait(900) == 0, again.output[-4000:]
        assert json.loads(again.output.splitlines()[-1]) == result, "all of it was in the run's journal"
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
