"""Two distributions from one tree: agl-otel, and agl-otel-hook for agents' environments."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution, entry_points
from pathlib import Path
from typing import Any

from agl_otel.runner.injection import install_line

ROOT = Path(__file__).parents[2]


def project(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def test_the_package_needs_the_hook_of_its_own_version() -> None:
    ours, hook = project("."), project("hook")
    assert ours["version"] == hook["version"]
    assert f"agl-otel-hook=={hook['version']}" in ours["dependencies"]


def test_the_hook_is_loaded_once_and_from_its_own_distribution() -> None:
    for group in ("opentelemetry_pre_instrument", "opentelemetry_post_instrument"):
        assert [point.dist.name for point in entry_points(group=group, name="agl_otel") if point.dist] == ["agl-otel-hook"]
    assert not [point for point in distribution("agl-otel").entry_points if point.group.startswith("opentelemetry")]


def test_nothing_installs_from_an_index_what_is_on_none() -> None:
    """`agl-otel[train]` adds an extra where agl-otel is installed; install.md and messages name it so."""
    folders = ("agl_otel", "adapters", "algorithms", "collector", "hook", "docs", "examples", "skills", "deploy")
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(file for folder in folders for file in (ROOT / folder).rglob("*.*"))]
    texts = {file: file.read_text() for file in files if file.suffix in (".md", ".py", ".ipynb", ".txt", ".yaml", ".yml")}
    found = [
        f"{file.relative_to(ROOT)}: {line}"
        for file, text in texts.items()
        for line in re.findall(r"^.*\binstall(?: -\S+)* ['\"`]?(?:agl-otel(?!\[| again)|\{HOOK).*$", text, flags=re.MULTILINE)
    ]
    assert not found, "name install_line() of runner/injection.py, or CHECKOUT/hook"


def test_the_line_that_installs_the_hook_is_where_this_one_came_from() -> None:
    assert install_line() == f"pip install {ROOT / 'hook'}"
