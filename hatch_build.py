"""Builds the dashboard into sdist and wheel, where npm is at hand. Without it a package is built whose pages say how to build them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # pyright: ignore[reportMissingImports]  # of the build only


class Dashboard(BuildHookInterface[Any]):
    """`npm ci` and the build, unless the pages are there (from `make web`, or in an sdist)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before anything is collected; an editable install builds nothing."""
        sources = Path(self.root) / "agl_otel/web/dashboard"
        if version == "editable" or (sources.parent / "static/index.html").exists() or not sources.exists():
            return
        npm = shutil.which("npm")
        if npm is None:
            self.app.display_warning("npm is missing: this package is built without the dashboard (make web, with Node.js 20.19 or later)")
            return
        for command in ([npm, "ci", "--no-audit", "--no-fund"], [npm, "run", "build"]):
            subprocess.run(command, cwd=sources, check=True)
