"""The files that count as a job's code, and what a run's folder does with their digests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_otel.algorithms.checked_files import digest_of, file_digest, with_checksum
from agl_otel.algorithms.run_folder import RUN, SOURCES, RunFolder, Sources, other_code
from agl_otel.errors import UsageError
from agl_otel.jobs.job import AgentSpec, DataSpec, Job
from agl_otel.jobs.sources import sources_of

FILES = {
    "agent.py": "import json, helper\nfrom pkg import inner\ndef late():\n    import later\n",
    "helper.py": "import nosuch\nraise SystemExit('never run')\n",
    "later.py": "",
    "pkg/__init__.py": "",
    "pkg/inner.py": "from . import beside\n",
    "pkg/beside.py": "",
    "unused.py": "",
    "broken.py": "def\n",
    "agent.sh": "exec python agent.py\n",
    "data.txt": "1\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def job(folder: Path, algorithm: str = "baseline", **agent: Any) -> Job:
    made = Job(agent=AgentSpec(**agent), data=DataSpec(train="tasks.jsonl"), algorithm={"name": algorithm})
    made._folder = folder  # pyright: ignore[reportPrivateUsage]  # as Job.load does
    return made


WITH_IMPORTS = ["agent.py", "helper.py", "later.py", "pkg/__init__.py", "pkg/beside.py", "pkg/inner.py"]


@pytest.mark.parametrize(
    ("agent", "files"),
    [
        ({"function": "agent.py:answer"}, WITH_IMPORTS),
        ({"function": "agent:answer"}, WITH_IMPORTS),
        ({"function": "pkg.inner:answer"}, ["pkg/__init__.py", "pkg/beside.py", "pkg/inner.py"]),
        ({"function": "broken.py:answer"}, ["broken.py"]),
        ({"function": "nosuch.py:answer"}, []),
        ({"function": "nosuch.module:answer"}, []),
        ({"command": [sys.executable, "agent.py", "{question}"]}, WITH_IMPORTS),
        ({"command": ["python", "-m", "pkg.inner"]}, ["pkg/__init__.py", "pkg/beside.py", "pkg/inner.py"]),
        ({"command": ["./agent.sh", "--data", "data.txt", "pkg"]}, ["agent.sh", "data.txt"]),
    ],
)
def test_the_code_of_an_agent_is_its_file_and_what_it_imports_from_its_folder(folder: Path, agent: Any, files: list[str]) -> None:
    found = sources_of(job(folder, **agent))
    reference = found.pop("agent")
    assert reference == (agent.get("function") or digest_of(agent["command"]))
    assert found == {f"agent {name}": file_digest(folder / name) for name in files}


def test_graders_and_algorithms_count_wherever_they_lie(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "mine.py"
    elsewhere.write_text("import agent\n")
    found = sources_of(job(folder, f"{elsewhere}:Mine", function="later.py:answer", grader="unused.py:grade"))
    assert {name: found[name] for name in ("agent", "grader")} == {"agent": "later.py:answer", "grader": "unused.py:grade"}
    assert {name for name in found if name.startswith("grader ")} == {"grader unused.py"}
    assert {name for name in found if name.startswith("algorithm ")} == {
        f"algorithm {elsewhere}", *(f"algorithm {name}" for name in WITH_IMPORTS),
    }  # fmt: skip


@pytest.fixture
def sources() -> Iterator[Any]:
    """Set the code that runs."""
    yield lambda force=False, **digests: SOURCES.set(Sources(digests, force))
    SOURCES.set(None)


def opened(folder: Path, **options: Any) -> dict[str, Any]:
    RunFolder(folder, algorithm="mine", options=options).close()
    return json.loads((folder / RUN).read_text())


def lines_of(folder: Path, *rows: Any) -> None:
    """Write metrics.jsonl with a half line at the end."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(with_checksum(row)) + "\n" for row in rows) + "{half")


def test_a_forced_run_records_what_was_other_and_since_which_step(tmp_path: Path, sources: Any) -> None:
    sources(grader="a.py:f")
    begun = opened(tmp_path, agent={"grader": "a.py:f"}, rate=1)
    assert begun["sources"] == {"grader": "a.py:f"}
    lines_of(tmp_path, {}, {})
    sources(grader="a.py:g")
    with pytest.raises(UsageError, match=r"grader: a\.py:f was, a\.py:g is.*with --force it goes on"):
        Sources({"grader": "a.py:g"}).check(tmp_path)
    with pytest.raises(UsageError, match=r"begun with other code, .*grader: a\.py:f was, a\.py:g is"):
        opened(tmp_path, agent={"grader": "a.py:g"}, rate=1)
    sources(force=True, grader="a.py:g")
    with pytest.raises(UsageError, match="begun with another rate"):
        opened(tmp_path, agent={"grader": "a.py:g"}, rate=2)
    forced = opened(tmp_path, agent={"grader": "a.py:g"}, rate=1)
    assert forced["forced"] == [{"step": 2, "changed": {"grader": ["a.py:f", "a.py:g"]}}]
    assert (forced["options"]["agent"], forced["run_id"]) == ({"grader": "a.py:g"}, begun["run_id"])
    sources(grader="a.py:g")
    assert opened(tmp_path, agent={"grader": "a.py:g"}, rate=1) == forced
    sources(force=True)
    assert opened(tmp_path, agent={"grader": None}, rate=1)["forced"][1] == {"step": 2, "changed": {"grader": ["a.py:g", None]}}


def test_a_validation_before_the_first_step_is_no_step_that_was_done(tmp_path: Path, sources: Any) -> None:
    """Of verl, whose lines say their steps."""
    sources(grader="a.py:f")
    opened(tmp_path)
    lines_of(tmp_path, {"step": 0, "val_reward": 0.5}, {"step": 1})
    sources(force=True, grader="a.py:g")
    assert [each["step"] for each in opened(tmp_path)["forced"]] == [1]


def test_the_code_of_a_step_is_named_where_the_run_was_begun_with_other() -> None:
    forced = [
        {"step": 2, "changed": {"grader a.py": ["1", "2"]}},
        {"step": 3, "changed": {"agent b.py": ["1", None], "grader a.py": ["2", "3"]}},
    ]
    assert [other_code(forced, step) for step in (1, 2, 3, 4)] == ["", "", "grader a.py", "grader a.py, agent b.py, grader a.py"]
    assert other_code([], 1) == ""


def test_a_run_of_an_earlier_release_takes_the_code_that_resumes_it(tmp_path: Path, sources: Any) -> None:
    assert "sources" not in opened(tmp_path)
    sources(grader="a.py:f")
    Sources({"grader": "a.py:f"}).check(tmp_path)
    assert opened(tmp_path)["sources"] == {"grader": "a.py:f"}
