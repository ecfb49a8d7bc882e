"""A run that is resumed with another grader, agent or algorithm than it was begun with: noticed, told, refused, and forced."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agl_otel.algorithms.checked_files import file_digest
from agl_otel.algorithms.run_folder import RUN
from agl_otel.store.embedded import EmbeddedStack
from tests.system.stack_process import ENVIRONMENT

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
FILES = {
    "agent.py": "import words\ndef answer(task):\n    return words.reply(task)\n",
    "words.py": "def reply(task):\n    return task * 2\n",
    "grade.py": "def grade(task, answer):\n    return 0.25\ndef other(task, answer):\n    return 1.0\n",
    "algorithm.py": "import adapter\nfrom agl_otel import Baseline\ndef made(run_dir):\n    return Baseline(run_dir=run_dir, n_epochs=1)\n",
    "adapter.py": "def adapt(spans):\n    return []\n",
    "tasks.jsonl": "1\n2\n",
    "job.toml": """
[agent]
function = "agent.py:answer"
grader = "grade.py:grade"
[data]
train = "tasks.jsonl"
val = "tasks.jsonl"
[resources]
prompt = "answer {question}"
[algorithm]
name = "NAME"
""",
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    stack = EmbeddedStack(tmp_path_factory.mktemp("data"))
    yield stack.address()
    stack.stop()


@dataclass
class Run:
    """A job and its run."""

    folder: Path
    address: str

    def edit(self, name: str, old: str, new: str) -> str:
        """Change a file of the job; return its SHA-256 before."""
        path, before = self.folder / name, file_digest(self.folder / name)
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        return before

    def train(self, *more: str, code: int = 0) -> str:
        """Run the job in a process of its own, as users do; return what it writes to standard error."""
        arguments = ["train", "job.toml", "--store", self.address, "--run-dir", "run", "--json", *more]
        done = subprocess.run(
            [sys.executable, "-m", "agl_otel", *arguments],
            cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == code and "Unclosed" not in done.stderr, done.stderr
        return done.stderr

    def shown(self, *where: str) -> dict[str, Any]:
        """Return what `agl-otel runs show` says of the run."""
        command = [sys.executable, "-m", "agl_otel", "runs", "show", "run", "--json", *where]
        done = subprocess.run(command, cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=120)
        return json.loads(done.stdout)

    @property
    def told(self) -> dict[str, Any]:
        return json.loads((self.folder / "run" / RUN).read_text())


@pytest.fixture
def run(tmp_path: Path, address: str) -> Run:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return Run(tmp_path, address)


@pytest.mark.parametrize(
    ("algorithm", "role", "file"),
    [
        ("baseline", "agent", "words.py"),
        ('random_search"\nchoices = ["answer {question}"]\n# "', "grader", "grade.py"),
        ("algorithm.py:made", "algorithm", "adapter.py"),
    ],
)
def test_other_code_is_refused_unless_it_is_forced(run: Run, algorithm: str, role: str, file: str) -> None:
    run.edit("job.toml", "NAME", algorithm)
    run.train()
    begun = run.told
    run.train()
    assert run.told == begun, "the same code goes on, and is not worth a word"

    before = run.edit(file, "def ", "# better\ndef ")
    after = file_digest(run.folder / file)
    change = f"{role} {file}: {before[:12]} was, {after[:12]} is"
    said = run.train(code=2)
    assert change in said and "--force" in said
    assert run.told == begun, "the refused start changes nothing"

    assert f"goes on with other code ({change})" in run.train("--force")
    steps = len((run.folder / "run" / "metrics.jsonl").read_text().splitlines())
    assert steps > 0
    assert run.told["forced"] == [{"step": steps, "changed": {f"{role} {file}": [before, after]}}]
    assert run.shown("--store", run.address)["other_code"] == {str(steps): f"{role} {file}"}
    run.train()
    assert run.told["sources"][f"{role} {file}"] == after
    assert len(run.told["forced"]) == 1, "what was forced once is the run's code"


def test_another_grader_of_the_same_file_is_noticed_too(run: Run) -> None:
    """With an algorithm that knows nothing of the run's folder."""
    run.edit("algorithm.py", "made(run_dir)", "made()")
    run.edit("algorithm.py", "run_dir=run_dir, ", "")
    run.edit("job.toml", "NAME", "algorithm.py:made")
    run.train()
    run.edit("job.toml", "grade.py:grade", "grade.py:other")
    said = run.train(code=2)
    assert "grader: grade.py:grade was, grade.py:other is" in said
    run.train("--force")
    run.train()
