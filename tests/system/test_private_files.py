"""Files of a stack, a rollout and a training run are readable only by their owner, even if the user's umask gives others access."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres_server import NoPostgresError, running
from tests.system.stack_process import Command, run, small_demo, until
from tests.system.test_up import FREE_PORTS

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
OPEN = ("sh", "-c", 'umask 0 && exec "$@"', "sh")
"""Put before a command: sets an umask of 0."""
AGENT = """
import pathlib, sys
import agl_otel as agl
pathlib.Path(sys.argv[1]).write_text("the agent's own")
agl.emit_reward(1.0)
"""


def exposure_problem(folder: Path) -> list[str]:
    """Return the files in and below a folder that others may read, write or run."""
    found: list[str] = []
    for path in [folder, *folder.rglob("*")]:
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & 0o077:
            found.append(f"{stat.filemode(mode)} {path.relative_to(folder)}")
    return found


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


@pytest.fixture
def environment(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The environment of a stack whose queue is in the database of the test's parameter."""
    if request.param == "sqlite":
        yield {}
        return
    try:
        for postgres in running():
            yield {"AGL_QUEUE_URL": postgres.url()}
    except NoPostgresError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("environment", ["sqlite", "postgres"], indirect=True)
def test_files_of_a_stack_and_a_rollout_are_private(tmp_path: Path, environment: dict[str, str]) -> None:
    data, script, made = tmp_path / "data", tmp_path / "agent.py", tmp_path / "made.txt"
    script.write_text(AGENT)
    starts = ("up", "--data-dir", str(data), *FREE_PORTS)
    with Command(*starts, log=tmp_path / "up.log", cwd=tmp_path, env=environment, within=OPEN) as command:
        until(lambda: (data / "stack.json").exists() or command.process.poll() is not None, "the stack runs")
        assert command.process.poll() is None, command.output
        assert "may read" not in command.output
        arguments = ("run", "--data-dir", str(data), "--", sys.executable, str(script), str(made))
        with Command(*arguments, log=tmp_path / "run.log", cwd=tmp_path, env=environment, within=OPEN) as ran:
            assert ran.wait(300) == 0 and "primary = 1.0" in ran.output, ran.output
        assert {"stack.json", "stack.lock", "VERSION", "collector.log"} <= names(data)
        queues = {"queue.db", "queue.db-wal", "queue.db-shm"}
        assert names(data) & queues == (set() if environment else queues)
        assert any(path.suffix == ".bin" for path in (data / "traces").rglob("*")), "there are parts of ClickHouse's"
        assert exposure_problem(data) == []
    assert exposure_problem(data) == []
    assert stat.S_IMODE(made.stat().st_mode) == 0o666, "an agent's own files are as its user has them"


def test_files_of_a_training_run_are_private(tmp_path: Path, tiny_policy: Path) -> None:
    pytest.importorskip("torch", reason="needs the [train] extra")
    data = tmp_path / "data"
    small_demo(tmp_path)
    data.mkdir(mode=0o700)
    (data / "run").mkdir(mode=0o700)
    shutil.copytree(tiny_policy, data / "run" / "policy")
    before = set(data.rglob("*"))
    arguments = ("demo", "--json", "--max-steps", "1", "--data-dir", str(data))
    with Command(*arguments, log=tmp_path / "demo.log", cwd=tmp_path, within=OPEN) as command:
        assert command.wait(900) == 0, command.output[-4000:]
    made = [path for path in data.rglob("*") if path not in before]
    assert {"metrics.jsonl", "run.json", "plots.png"} <= {path.name for path in made}
    assert [str(path) for path in made if path.lstat().st_mode & 0o077 and not path.is_symlink()] == []


@pytest.mark.parametrize("mode", [0o755, 0o710])
def test_a_data_directory_open_to_others_is_reported_with_the_remedy(tmp_path: Path, mode: int) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(mode)
    with Command("up", "--data-dir", str(data), *FREE_PORTS, log=tmp_path / "up.log", cwd=tmp_path) as command:
        until(lambda: (data / "stack.json").exists() or command.process.poll() is not None, "the stack runs")
        assert f"may read {data} (mode {mode:o}): chmod -R go-rwx {data}" in command.output
        report = run("doctor", "--data-dir", str(data), "--", sys.executable, "-c", "", cwd=tmp_path)
        assert f"chmod -R go-rwx {data}" in " ".join(report.stdout.split()), report.stdout + report.stderr


def test_the_run_folder_of_a_script_is_private(tmp_path: Path) -> None:
    """The script's process keeps its own umask."""
    code = "from pathlib import Path; from agl_otel.algorithms.run_folder import RunFolder; import sys\n"
    code += "made = RunFolder(Path(sys.argv[1]), algorithm='a', options={}); made.metric({'step': 1}); made.close()\n"
    code += "open(sys.argv[1] + '-own', 'w').close()"
    subprocess.run([*OPEN, sys.executable, "-c", code, str(tmp_path / "run")], check=True)
    assert exposure_problem(tmp_path / "run") == [] and names(tmp_path / "run") >= {"run.json", "metrics.jsonl", "lock"}
    assert stat.S_IMODE((tmp_path / "run-own").stat().st_mode) == 0o666
