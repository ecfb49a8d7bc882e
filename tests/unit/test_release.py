"""What a release is made of: one version everywhere, notes for it, and workflows without mistakes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import agl_otel

ROOT = Path(__file__).parents[2]
ACTIONLINT = "github.com/rhysd/actionlint/cmd/actionlint@v1.7.12"


def release(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "deploy/release.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_version_is_the_same_everywhere() -> None:
    assert release("check", f"v{agl_otel.__version__}").returncode == 0
    for file, line in (
        ("CITATION.cff", f"version: {agl_otel.__version__}\n"),
        ("deploy/helm/agl-otel/Chart.yaml", f'appVersion: "{agl_otel.__version__}"\n'),
        ("uv.lock", f'name = "agl-otel"\nversion = "{agl_otel.__version__}"\n'),
    ):
        assert line in (ROOT / file).read_text(), file


def test_a_tag_of_another_version_is_refused() -> None:
    refused = release("check", "v9.9.9")
    assert refused.returncode != 0 and "v9.9.9" in refused.stderr and agl_otel.__version__ in refused.stderr


def test_the_notes_are_those_of_the_version() -> None:
    notes = release("notes")
    assert notes.returncode == 0 and "### Added" in notes.stdout and "\n## " not in notes.stdout


@pytest.mark.skipif(shutil.which("go") is None, reason="actionlint is built with Go")
def test_the_workflows_are_valid() -> None:
    files = sorted(map(str, (ROOT / ".github" / "workflows").glob("*.yml")))
    done = subprocess.run(["go", "run", ACTIONLINT, *files], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert files and done.returncode == 0, done.stdout + done.stderr
