"""Commands import what they use: each package that a command loads is time that its user waits."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from agl_otel.cli import COMMANDS, cli
from tests.local_queue import LocalQueue

PACKAGES = """
import sys
from agl_otel.cli import main
sys.stdout = open("/dev/null", "w")
try:
    main(sys.argv[1:])
except SystemExit:
    pass
found = {name.partition(".")[0] for name in sys.modules if not name.startswith("_")}
print(*sorted(found - set(sys.stdlib_module_names) - set(sys.builtin_module_names)), file=sys.stderr)
"""
OF_THE_ENVIRONMENT = {"distutils-precedence", "sitecustomize", "usercustomize", "coverage"}
OF_THE_QUEUE = {
    *("agl_otel", "agl_otel_hook", "click", "rich", "google", "opentelemetry"),
    *("grpc", "cython_runtime"),
    *("pydantic", "pydantic_core", "pydantic_settings", "annotated_types", "dotenv", "typing_extensions", "typing_inspection"),
}


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_click_alone(option: str) -> None:
    done = subprocess.run([sys.executable, "-c", PACKAGES, option], capture_output=True, text=True, timeout=120, check=True)
    assert set(done.stderr.split()) - OF_THE_ENVIRONMENT <= {"agl_otel", "agl_otel_hook", "click"}


async def test_commands_on_the_queue_import_nothing_that_reads_spans(tmp_path: Path) -> None:
    async with LocalQueue(f"sqlite:///{tmp_path}/queue.db") as queue:
        command = [sys.executable, "-c", PACKAGES, "rollouts", "ls", "--store", queue.client.address]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120, check=True)
    assert set(done.stderr.split()) - OF_THE_ENVIRONMENT <= OF_THE_QUEUE


def test_each_summary_fits_a_narrow_terminal() -> None:
    assert cli.params and max(len(summary) for _, summary in COMMANDS.values()) <= 80 - len("  ") - len("collector") - len("  ")
