"""`make wheel`: what is in the two wheels, and whether they work where nothing but them is installed: a stack, a rollout, its trace.

Run in an environment with both: `python -I tests/try_wheel.py CHECKOUT` (-I: nothing is imported from the checkout).
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOMS = ("adapters", "algorithms", "collector")  # beside the package in a checkout, links within it
CARRIED_ROOMS = (*ROOMS, "examples/first_light")  # the demo
CARRIED = {".py", ".pyi", ".sql", ".proto", ".typed"}
NOT_CARRIED = ("collector/otelcol/", "collector/conformance/", "collector/native/", "web/dashboard/")

AGENT = """
from opentelemetry import trace

with trace.get_tracer("agent").start_as_current_span("a span of the agent"):
    pass
"""


def main(checkout: Path) -> str:
    """Check everything; what was checked. Raises AssertionError."""
    package = importlib.import_module("agl_otel")
    installed = Path(str(package.__file__)).parent
    assert "site-packages" in installed.parts, f"this is no installed package: {installed}"
    here = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.suffix in CARRIED}
    there: set[str] = set()
    for root, prefix in ((checkout / "agl_otel", ""), *((checkout / room, f"{room}/") for room in CARRIED_ROOMS)):
        there |= {prefix + str(path.relative_to(root)) for path in root.rglob("*") if path.suffix in CARRIED}
    there = {name for name in there if not name.startswith(NOT_CARRIED)}
    assert here == there, f"only in the wheel: {sorted(here - there)}; only in the checkout: {sorted(there - here)}"
    assert (installed / "deploy" / "otelcol" / "all-in-one.yaml").exists(), "the OpenTelemetry Collector's configuration is missing"
    assert (installed / "web" / "static" / "index.html").exists(), "the dashboard is missing: make web"
    assert not list(installed.rglob("*.go")), "Go sources are in the wheel"
    assert not list(installed.rglob("*.rs")), "Rust sources are in the wheel"
    core = importlib.import_module("agl_otel.collector.core").core().name
    tags = metadata.distribution("agl-otel").read_text("WHEEL") or ""
    assert core == ("python" if "none-any" in tags else "compiled"), f"the collector's core is {core}"
    hook = Path(str(importlib.import_module("agl_otel_hook").__file__)).parent
    parts = {str(path.relative_to(hook)) for path in hook.rglob("*") if path.suffix in CARRIED}
    source = checkout / "hook" / "agl_otel_hook"
    assert parts == {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in CARRIED}, parts
    for group in ("opentelemetry_pre_instrument", "opentelemetry_post_instrument"):
        assert [point.dist.name for point in metadata.entry_points(group=group, name="agl_otel") if point.dist] == ["agl-otel-hook"]
    line = importlib.import_module("agl_otel.runner.injection").install_line()
    assert line.startswith("pip install ") and ".whl" in line, f"{line} does not name the wheel of the hook"
    rooms = [f"agl_otel.{module.name}" for module in pkgutil.iter_modules(package.__path__) if module.ispkg]
    for name in [*rooms, "agl_otel.collector.service", "agl_otel.stack", "agl_otel.algorithms.grpo"]:
        importlib.import_module(name)
    program = Path(sys.executable).with_name("agl-otel")
    shown = subprocess.run([program, "--help"], capture_output=True, text=True, check=True, timeout=120)
    assert "Commands:" in shown.stdout, shown.stdout
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "agent.py").write_text(AGENT)
        command = [program, "run", "--data-dir", "data", "--", sys.executable, "agent.py"]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)
    assert run.returncode == 0 and "a span of the agent" in run.stdout, run.stdout + run.stderr
    held = f"the wheels hold {len(here)} and {len(parts)} files"
    return f"{held}; {len(rooms)} rooms, `agl-otel --help` and a rollout work; the collector's core is {core}"


if __name__ == "__main__":
    print(main(Path(sys.argv[1]).resolve()))
