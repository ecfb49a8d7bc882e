from __future__ import annotations

from pathlib import Path

import pytest

from agl_otel.errors import UsageError
from agl_otel.service.loading import load_function


@pytest.fixture
def agent_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))  # restores sys.path after the test
    (tmp_path / "helper_of_loading_test.py").write_text("VALUE = 7\n")
    path = tmp_path / "agent_of_loading_test.py"
    path.write_text(
        "import helper_of_loading_test\n"
        "calls = []\n"
        "def agent(task):\n    calls.append(task)\n    return helper_of_loading_test.VALUE\n"
        "def grade(task, answer):\n    return float(len(calls))\n"
        "class Box:\n    @staticmethod\n    def inner(task):\n        return task\n"
        "NUMBER = 3\n"
    )
    return path


def test_a_function_of_a_file_is_loaded_with_the_files_imports(agent_file: Path) -> None:
    assert load_function(f"{agent_file}:agent")("t") == 7


def test_two_functions_of_one_file_share_its_globals(agent_file: Path) -> None:
    load_function(f"{agent_file}:agent")("t")
    assert load_function(f"{agent_file}:grade")("t", "a") >= 1.0


def test_dotted_names_and_modules_work(agent_file: Path) -> None:
    assert load_function(f"{agent_file}:Box.inner")(1) == 1
    assert load_function("json:dumps")([1]) == "[1]"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("agent.py", "does not name a function"),
        (":agent", "does not name a function"),
        ("no/such/file.py:agent", "there is no file .*no/such/file.py"),
        ("no_such_module_here:agent", "module no_such_module_here could not be loaded: ModuleNotFoundError"),
        ("{file}:missing", "has no 'missing'; its functions are: agent, grade"),
        ("{file}:NUMBER", "is a int, not a function"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_reported(agent_file: Path, reference: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_function(reference.replace("{file}", str(agent_file)))


def test_a_file_that_raises_is_named_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "broken_of_loading_test.py"
    path.write_text("1 / 0\n")
    with pytest.raises(UsageError, match=r"broken_of_loading_test\.py could not be loaded: ZeroDivisionError"):
        load_function(f"{path}:agent")
