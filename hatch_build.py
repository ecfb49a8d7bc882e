"""Builds what is not Python: the dashboard into sdist and wheel, where npm is at hand, and the collector's compiled core into the wheel.

Without npm a package is built whose pages say how to build them; without cargo, or with AGL_BUILD_CORE=off, one whose collector does its
work in Python. As a script: build the compiled core in this checkout.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

CORE = Path("collector/_native.abi3.so")
PYTHON = "cp311"  # the oldest whose stable interface the core needs


def build_core(root: Path) -> None:
    """Compile collector/native. Raises OSError, CalledProcessError."""
    target = Path(os.environ.setdefault("CARGO_TARGET_DIR", str(root / "build/native")))
    command = ["cargo", "build", "--quiet", "--release", "--locked", "--manifest-path", str(root / "collector/native/Cargo.toml")]
    subprocess.run(command, check=True, env={**os.environ, "PYO3_BUILD_EXTENSION_MODULE": "1"})
    new = root / CORE.with_suffix(".new")
    shutil.copy(target / "release/lib_native.so", new)
    new.replace(root / CORE)  # a running collector keeps the file that it has loaded


if __name__ == "__main__":
    if shutil.which("cargo") is None:
        sys.exit(
            "the compiled core was not built, because there is no cargo on the PATH: install Rust (https://rustup.rs) and try again; "
            "without the core the collector does the same in Python"
        )
    if subprocess.run(["cargo", "--version"], capture_output=True, check=False).returncode:  # rustup's, without a toolchain
        sys.exit("the compiled core was not built, because cargo does not run (try `rustup default stable`, and `cargo --version`)")
    try:
        build_core(Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"the compiled core was not built: {error}")
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # pyright: ignore[reportMissingImports]  # of the build only

    class Build(BuildHookInterface[Any]):
        """Called by hatchling; an editable install builds nothing."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Called before anything is collected."""
            if version == "editable":
                return
            self._dashboard()
            if self.target_name == "wheel":
                self._core(build_data)

        def _dashboard(self) -> None:
            """`npm ci` and the build, unless the pages are there (from `make web`, or in an sdist)."""
            sources = Path(self.root) / "agl_otel/web/dashboard"
            if (sources.parent / "static/index.html").exists() or not sources.exists():
                return
            npm = shutil.which("npm")
            if npm is None:
                self.app.display_warning(
                    "npm is missing: this package is built without the dashboard (make web, with Node.js 20.19 or later)"
                )
                return
            for command in ([npm, "ci", "--no-audit", "--no-fund"], [npm, "run", "build"]):
                subprocess.run(command, cwd=sources, check=True)

        def _core(self, build_data: dict[str, Any]) -> None:
            if os.environ.get("AGL_BUILD_CORE") == "off":
                if (Path(self.root) / CORE).exists():
                    self.app.abort(f"AGL_BUILD_CORE=off builds a wheel for every platform, but {CORE} is there: build it from the sdist")
                return
            if shutil.which("cargo") is not None:
                try:
                    build_core(Path(self.root))
                except (OSError, subprocess.CalledProcessError) as error:
                    self.app.abort(
                        f"the compiled core cannot be built: {error} Mend cargo (its message is above), or set AGL_BUILD_CORE=off: the "
                        "collector then does the same in Python, more slowly"
                    )
            elif not (Path(self.root) / CORE).exists():
                self.app.display_warning("cargo is missing: the collector of this package does without the compiled core")
                return
            libc, release = platform.libc_ver()
            system = f"manylinux_{release.replace('.', '_')}" if libc == "glibc" else "linux"
            build_data["pure_python"] = False
            build_data["tag"] = f"{PYTHON}-abi3-{system}_{platform.machine()}"
