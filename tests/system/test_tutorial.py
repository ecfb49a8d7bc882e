"""The tutorial of Agent Lightning 0.3 with only the import changed: three processes, and one call."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agl_otel.service.processes import die_with_parent
from tests.system.stack_process import ENVIRONMENT, Command, alive, naming, until

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial"
BEST = "best prompt (1.00): Be friendly and short, and give an example. {question}"


@contextmanager
def script(name: str, *arguments: str, log: Path, **env: str) -> Generator[subprocess.Popen[bytes]]:
    """Run a script of the tutorial as `python script.py`; interrupt it at the end of the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            die_with_parent([sys.executable, "-u", str(TUTORIAL / name), *arguments]),
            stdout=out, stderr=subprocess.STDOUT, env={**ENVIRONMENT, "TMPDIR": str(log.parent), **env}, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    process.send_signal(number)
                    try:
                        process.wait(30)
                    except subprocess.TimeoutExpired:
                        continue
            process.wait()


def finished(process: subprocess.Popen[bytes], log: Path, seconds: float = 900.0) -> str:
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    output = log.read_text(errors="replace")
    assert code == 0, f"exit code {code}: {output[-4000:]}"
    return output


def test_store_runner_and_algorithm_as_three_processes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Command("store", "--port", "0", "--data-dir", str(data), "--json", log=tmp_path / "store.log", cwd=tmp_path) as store:
        until(lambda: '"url"' in store.output, "the store is up")
        found = re.search(r'"url": "(http://[^"]+)"', store.output)
        assert found, store.output
        env = {"TUTORIAL_STORE": found[1]}
        with script("runner.py", log=tmp_path / "runner.log", **env) as runner:
            with script("algorithm.py", log=tmp_path / "algorithm.log", **env) as algorithm:
                output = finished(algorithm, tmp_path / "algorithm.log")
            assert BEST in output and output.count("succeeded, 1 finished") == 3
            assert "Final reward: 1.0" in (tmp_path / "runner.log").read_text()
            assert runner.poll() is None, "a runner waits for more"
    until(lambda: naming(data) == [], "nothing is left")


def test_the_job_file_runs_the_same_function(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    data = ("--data-dir", str(tmp_path / "data"), "--run-dir", str(tmp_path / "run"))
    with Command("train", str(TUTORIAL / "job.toml"), *data, log=log, cwd=tmp_path) as job:
        assert job.wait(900) == 0, job.output
    assert BEST in job.output and job.output.count("succeeded, 1 finished") == 3, job.output
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["algorithm"] == "best_prompt" and told["run_id"].startswith("best_prompt-")


@pytest.mark.parametrize("strategy", ["cs", "shm"])
def test_the_tutorial_runs_in_one_call_of_fit(tmp_path: Path, strategy: str) -> None:
    log = tmp_path / "fit.log"
    with script("fit.py", strategy, log=log) as process:
        output = finished(process, log)
    assert BEST in output and output.count("succeeded, 1 finished") == 3
    assert output.count("Final reward") == 3 or "Completed in" in output
    deadline = time.monotonic() + 300
    while (left := alive(naming(tmp_path))) and time.monotonic() < deadline:
        os.sched_yield()
        signal.sigtimedwait([], 0.2)
    assert left == [], "runners and services end with the script"
