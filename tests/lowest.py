"""The lowest version that pyproject.toml allows of each package that agl-otel needs, one a line: what `make test-lowest` installs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest() -> dict[str, str]:
    """{package, with its marker: version}."""
    found = [
        re.fullmatch(r"([\w.-]+)>=([\w.]+)(?:,<[\w.]+)?(; .*)?", line)
        for line in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    ]
    return {f"{of[1]}{of[3] or ''}": of[2] for of in found if of is not None}


if __name__ == "__main__":
    for package, version in lowest().items():
        name, _, marker = package.partition(";")
        print(f"{name}=={version}{marker and f' ;{marker}'}")
