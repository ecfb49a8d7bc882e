"""Two distributions from one tree: agl-otel, and agl-otel-hook for agents' environments."""

from __future__ import annotations

import tomllib
from importlib.metadata import distribution, entry_points
from pathlib import Path
from typing import Any

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
