"""What decides whether the hook is brought into an interpreter. Pure."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from agl_otel.runner.injection import FOLDER, PYTHONS, injection, program_in
from agl_otel_hook import conventions
from agl_otel_hook.inject.agl_otel_inject import BROUGHT, FITTING, OLDEST_SDK, Version, program_of, skips, to_bring, version_of

OFFERED: dict[str, Version | None] = {
    "opentelemetry-api": (1, 45),
    "opentelemetry-instrumentation": (0, 66),
    "opentelemetry-sdk": (1, 45),
    "wrapt": (1, 17),
}
NOTHING: dict[str, Version | None] = dict.fromkeys(FITTING)


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("python agent.py pytest", "agent.py"),
        ("python /venv/bin/pytest -x", "pytest"),
        ("python -m pytest tests", "pytest"),
        ("python -um pytest", "pytest"),
        ("python -W error -X dev -mcoverage run", "coverage"),
        ("python -Werror --check-hash-based-pycs always tool", "tool"),
        ("python -c pass pytest", ""),
        ("python - pytest", ""),
        ("python", ""),
    ],
)
def test_the_program_of_a_command_line_is_known(line: str, program: str) -> None:
    assert program_of(line.split()) == program


def test_programs_are_skipped_by_name_or_prefix() -> None:
    assert [skips(name, "pytest*, py.test") for name in ("pytest", "pytest-3", "py.test", "py", "")] == [True, True, True, False, False]
    assert not skips("agent.py", "")
    assert all(
        skips(name, conventions.HOOK_SKIP)
        for name in ("pytest", "pytest-3.12", "py.test", "coverage", "coverage3", "tox", "nox", "unittest")
    )
    assert not any(
        skips(name, conventions.HOOK_SKIP) for name in ("toxicity.py", "pytest_agent.py", "tox.py", "coverage_report.py", "nox2")
    )


def test_what_an_interpreter_lacks_is_brought_where_it_fits() -> None:
    sdk = {**NOTHING, "opentelemetry-api": (1, 38), "opentelemetry-sdk": (1, 38)}
    assert to_bring({**OFFERED}, {}, all_of_it=False) == set()
    assert to_bring(sdk, OFFERED, all_of_it=False) == {"opentelemetry-instrumentation", "wrapt"}
    assert to_bring(sdk, {}, all_of_it=True) is None, "nothing is offered"
    assert to_bring({**sdk, "opentelemetry-sdk": (1, OLDEST_SDK[1] - 1)}, OFFERED, all_of_it=False) is None
    assert to_bring({**OFFERED, "opentelemetry-sdk": (1, 27)}, OFFERED, all_of_it=True) is None
    assert to_bring({**OFFERED, "wrapt": (3, 0)}, OFFERED, all_of_it=True) is None


def test_nothing_is_brought_beside_packages_that_are_too_old_for_it() -> None:
    assert to_bring({**NOTHING, "typing_extensions": (4, 4)}, OFFERED, all_of_it=True) is None
    assert to_bring({**NOTHING, "typing_extensions": (4, 5), "zipp": None}, OFFERED, all_of_it=True) == {*FITTING}
    assert to_bring({**OFFERED, "typing_extensions": (4, 4)}, OFFERED, all_of_it=True) == set()


def test_all_of_opentelemetry_is_brought_only_if_asked_for_and_not_below_a_newer_api() -> None:
    assert to_bring(NOTHING, OFFERED, all_of_it=False) is None
    assert to_bring(NOTHING, OFFERED, all_of_it=True) == {*FITTING}
    assert to_bring({**NOTHING, "opentelemetry-api": (1, 30)}, OFFERED, all_of_it=True) == {*FITTING} - {"opentelemetry-api"}
    assert to_bring({**NOTHING, "opentelemetry-api": (1, 46)}, OFFERED, all_of_it=True) is None


def test_the_bounds_are_those_of_the_distribution() -> None:
    hook = Path(FOLDER).parents[1]
    bounds = {
        name: (version_of(low), version_of(f"{high}.0"))
        for text in tomllib.loads((hook / "pyproject.toml").read_text())["project"]["dependencies"]
        for name, low, high in [re.fullmatch(r"([\w-]+)>=([\d.b]+),<(\d+)", text).groups()]  # pyright: ignore[reportOptionalMemberAccess]
    }
    assert bounds == FITTING
    needs = [need for name in FITTING for need in metadata.requires(name) or ()]
    for name, low in re.findall(r"(importlib.metadata|packaging|typing.extensions|wrapt|zipp)\b[^;]*>=\s*([\d.]+)", "\n".join(needs)):
        assert version_of(low) <= BROUGHT[name.replace("-", "_")], f"{name}: OpenTelemetry needs {low}"
    assert f"{PYTHONS[0]} <= sys.version_info[:2] <= {PYTHONS[1]}" in Path(FOLDER, "sitecustomize.py").read_text()


def test_the_environment_of_a_command_begins_its_path_with_the_hook() -> None:
    plain = injection({}, ["python", "agent.py"], inject=False)
    assert (plain["PYTHONPATH"], plain["AGL_HOOK_SKIP"], "AGL_HOOK" in plain) == (FOLDER, conventions.HOOK_SKIP, False)
    assert injection({"PYTHONPATH": f"a::{FOLDER}"}, ["python"], inject=True)["PYTHONPATH"] == f"{FOLDER}:a:"
    assert injection({}, ["python"], inject=True)["AGL_HOOK"] == injection({"AGL_HOOK": "inject"}, [], inject=False)["AGL_HOOK"] == "inject"
    assert injection({"AGL_HOOK": "off"}, ["python"], inject=True) == {"AGL_HOOK": "off"}


@pytest.mark.parametrize("command", [["/venv/bin/pytest", "evals"], ["python", "-m", "pytest"], ["sh", "-c", "pytest evals"]])
def test_the_agents_own_command_is_not_skipped(command: list[str]) -> None:
    assert injection({"AGL_HOOK_SKIP": "tox,pytest*"}, command, inject=False)["AGL_HOOK_SKIP"] == "tox"


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("python agent.py --runner pytest", "agent.py"),
        ("python3.12 -u -m pytest evals", "pytest"),
        ("./pytest evals", "pytest"),
        ("uv run pytest evals", "pytest"),
        ("uv --offline run --with rich --no-sync python -m pytest", "pytest"),
        ("uv run -m pytest", "pytest"),
        ("poetry run agent --with pytest", "agent"),
        ("bash -lc 'MODE=1 exec poetry run pytest'", "pytest"),
        ("env MODE=1 tox", "tox"),
        ("sh -c", ""),
        ('sh -c "it\'s"', ""),
        ("sh run.sh pytest", "sh"),
        ("node agent.js pytest", "node"),
        ("python -c pass pytest", ""),
    ],
)
def test_the_program_of_a_command_is_what_its_launchers_start(line: str, program: str) -> None:
    assert program_in(shlex.split(line)) == program


def test_a_word_of_the_agents_command_is_no_program() -> None:
    asked = injection({}, ["python", "agent.py", "--runner", "pytest"], inject=False)
    assert asked["AGL_HOOK_SKIP"] == conventions.HOOK_SKIP
