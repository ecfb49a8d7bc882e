"""The checks of a release: `check TAG`, whether a tag is the version of this tree; `notes`, what is new, from CHANGELOG.md."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def version() -> str:
    """Return the version in pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def notes(of: str) -> str:
    """Return the section of a version in CHANGELOG.md. Raises SystemExit if there is none."""
    found = re.search(rf"^## {re.escape(of)}\b[^\n]*\n(.*?)(?=^## |\Z)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        sys.exit(f"CHANGELOG.md has no section `## {of}`")
    return found[1].strip() + "\n"


def check(tag: str) -> None:
    """Raise SystemExit if the tag is not `v` and the version, or if the version has no notes."""
    if tag != f"v{version()}":
        sys.exit(f"the tag {tag} is not the version of pyproject.toml: v{version()}")
    notes(version())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["check", tag]:
            check(tag)
        case ["notes"]:
            sys.stdout.write(notes(version()))
        case _:
            sys.exit("python deploy/release.py check TAG | notes")
