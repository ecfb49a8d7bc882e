"""The hook in Python processes where it is not installed, by their environment alone: real interpreters, and no runner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agl_otel.runner.injection import FOLDER, injection
from tests.environments import AbsentError, other_python

WATCHES = "import sys; print(any('agl_otel_inject' in type(finder).__module__ for finder in sys.meta_path))"


def python(*arguments: str, cwd: Path, program: str = sys.executable, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the folder of the hook at the head of PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AGL_", "OTEL_", "PYTHON"))}
    asked = {"PYTHONPATH": FOLDER, **environment}
    return subprocess.run([program, *arguments], env={**kept, **asked}, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)


def behind(folder: Path, text: str) -> str:
    """A PYTHONPATH with a sitecustomize behind that of the hook."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return os.pathsep.join([FOLDER, str(folder)])


def test_the_sitecustomize_behind_it_runs_and_paths_keep_their_order(tmp_path: Path) -> None:
    path = behind(tmp_path / "own", "import sys\nsys.path.append('added')\nprint('own')\n")
    code = "import os, sys, sitecustomize as own; print(own.__file__, sys.path[1:3], sys.path[-1], os.environ['PYTHONPATH'])"
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=path)
    own = str(tmp_path / "own")
    assert (done.stdout.splitlines(), done.stderr) == (["own", f"{own}/sitecustomize.py {[FOLDER, own]} added {path}"], "")


@pytest.mark.parametrize("text", ["import no_such_module\n", "raise RuntimeError('broken')\n", "raise ImportError(name='sitecustomize')\n"])
def test_an_error_of_the_one_behind_is_reported_as_without_the_hook(tmp_path: Path, text: str) -> None:
    path = behind(tmp_path / "own", text)
    alone = python("-c", "print(1)", cwd=tmp_path, PYTHONPATH=str(tmp_path / "own"))
    both = python("-c", "print(1)", cwd=tmp_path, PYTHONPATH=path)
    assert (both.stdout, both.stderr) == (alone.stdout, alone.stderr)


def test_it_waits_in_a_process_of_any_kind(tmp_path: Path) -> None:
    assert python("-c", WATCHES, cwd=tmp_path).stdout == "True\n"
    shell = 'python=$1; shift; $python "$@"'
    assert python("-c", shell, "sh", sys.executable, "-c", WATCHES, cwd=tmp_path, program="/bin/sh").stdout == "True\n"


@pytest.mark.parametrize("switch", ["-I", "-E", "-S"])
def test_switches_of_python_are_honoured(tmp_path: Path, switch: str) -> None:
    assert python(switch, "-c", WATCHES, cwd=tmp_path).stdout == "False\n"


def test_it_is_switched_off_by_the_environment(tmp_path: Path) -> None:
    done = python("-c", WATCHES, cwd=tmp_path, AGL_HOOK="off")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_programs_of_a_pattern_and_what_they_start_run_without_it(tmp_path: Path) -> None:
    program = tmp_path / "pytest-like"
    program.write_text(f"import subprocess, sys\n{WATCHES}\nsubprocess.run([sys.executable, '-c', {WATCHES!r}])\n")
    assert python(str(program), cwd=tmp_path, AGL_HOOK_SKIP="tox,pytest*").stdout == "False\n" * 2
    assert python(str(program), cwd=tmp_path, AGL_HOOK_SKIP="tox").stdout == "True\n" * 2


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.9"])
def test_an_unsupported_python_runs_as_if_it_were_not_there(tmp_path: Path, version: str) -> None:
    try:
        program = other_python(version)
    except AbsentError as absent:
        pytest.skip(str(absent))
    path = behind(tmp_path / "own", "import sys\nsys.stdout.write('own\\n')\n")
    done = python("-B", "-c", "import sys; sys.stdout.write('works')", cwd=tmp_path, program=program, PYTHONPATH=path)
    assert (done.stdout, done.stderr) == ("own\nworks", "")
    done = python("-B", "-c", "import sys; sys.stdout.write('works')", cwd=tmp_path, program=program)
    assert (done.stdout, done.stderr) == ("works", "")


def without_packages(folder: Path) -> str:
    """Python in an environment of its own, which has no packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    return str(folder / "bin" / "python")


def installed(venv: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Put a package into an environment."""
    (packages,) = (venv / "lib").glob("python*/site-packages")
    for place, text in {
        **files,
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    }.items():
        (packages / place).parent.mkdir(parents=True, exist_ok=True)
        (packages / place).write_text(text)


BRINGING = {**injection({}, [], inject=True)}


@pytest.mark.parametrize("name", ["opentelemetry", "wrapt", "packaging", "typing_extensions"])
@pytest.mark.parametrize("own", [True, False])
def test_a_file_of_the_agents_own_is_not_run_unless_it_imports_it(tmp_path: Path, name: str, own: bool) -> None:
    program = sys.executable if own else without_packages(tmp_path / "venv")
    (tmp_path / f"{name}.py").write_text(f"print('local {name}')\n")
    (tmp_path / "httpx.py").write_text("")
    (tmp_path / "agent.py").write_text(f"import httpx\nprint('runs')\nimport {name}\nprint({name}.__file__)\n")
    done = python("agent.py", cwd=tmp_path, program=program, **BRINGING)
    assert (done.stdout.splitlines(), done.stderr) == (["runs", f"local {name}", str(tmp_path / f"{name}.py")], "")


@pytest.mark.parametrize("name", ["queue", "csv", "secrets"])
def test_a_file_in_place_of_the_standard_librarys_is_not_run_unless_the_agent_imports_it(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text(f"print('local {name}')\n")
    (tmp_path / "httpx.py").write_text("")
    (tmp_path / "agent.py").write_text(f"import httpx\nprint('runs')\nimport {name}\nprint({name}.__file__)\n")
    done = python("agent.py", cwd=tmp_path, **BRINGING)
    assert (done.stdout.splitlines(), done.stderr) == (["runs", f"local {name}", str(tmp_path / f"{name}.py")], "")


def test_files_that_are_no_modules_are_in_nobodys_place(tmp_path: Path) -> None:
    for name in ("queue.db", "csv", "email"):
        (tmp_path / name).mkdir() if name == "email" else (tmp_path / name).write_text("")
    (tmp_path / "httpx.py").write_text("")
    done = python("-c", "import httpx, sys; print('opentelemetry' in sys.modules)", cwd=tmp_path, **BRINGING)
    assert (done.stdout, done.stderr) == ("True\n", "")


OLD = {
    "an old typing_extensions": ("typing_extensions", "3.7.4", {"typing_extensions.py": "TypedDict = dict\n"}),
    "an API that lacks what is brought with it": ("opentelemetry-api", "1.28.0", {"opentelemetry/own.py": ""}),
    "a package of ours that cannot be imported": ("wrapt", "1.17.0", {"wrapt.py": "raise ImportError('broken')\n"}),
}


@pytest.mark.parametrize("has", OLD)
def test_an_environment_that_does_not_fit_keeps_what_it_has(tmp_path: Path, has: str) -> None:
    program = without_packages(tmp_path / "venv")
    installed(tmp_path / "venv", *OLD[has])
    installed(tmp_path / "venv", "opentelemetry-api", "1.28.0", {"opentelemetry/trace/__init__.py": "ITS = 'own'\n"})
    (tmp_path / "httpx.py").write_text("")
    code = """
import sys, httpx
from opentelemetry import trace
print(getattr(trace, 'ITS', 'ours'), [type(finder).__name__ for finder in sys.meta_path if 'agl_otel_inject' in type(finder).__module__])
"""
    done = python("-c", code, cwd=tmp_path, program=program, **BRINGING)
    fits = has == "an API that lacks what is brought with it"
    assert (done.stdout, done.stderr) == ("ours ['_OpenTelemetry', '_First', '_Rest']\n" if fits else "own ['_First']\n", "")
