"""Commands on a Mac, with a stack on another machine: nothing of them needs what only Linux has (tests/mac.py takes it from them)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from agl_otel.settings import Settings
from agl_otel.stack.supervisor import Stack
from tests.command import ROOT
from tests.system.stack_process import ENVIRONMENT

pytestmark = pytest.mark.full
AGENT = """
from tests.mac import leave_linux

leave_linux()
from opentelemetry import trace

with trace.get_tracer("agent").start_as_current_span("a span of the agent"):
    pass
"""
IMPORTS = """
from tests.mac import leave_linux
leave_linux()
import importlib, pkgutil
import agl_otel_hook
NAMES = "cli", "store", "queue", "traces", "runner", "adapters", "compat"
for package in (agl_otel_hook, *(importlib.import_module(f"agl_otel.{name}") for name in NAMES)):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.rpartition(".")[2].startswith("__") and module.name != "agl_otel_hook.inject":
            importlib.import_module(module.name)
"""


def mac(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.mac", *arguments]
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_no_module_of_hook_client_or_commands_needs_linux_at_its_import() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


async def test_commands_work_with_a_stack_on_another_machine(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    async with Stack(Settings.private(data_dir=tmp_path / "there")) as stack:
        store = ("--store", stack.address)
        agent = (*store, "--", sys.executable, "agent.py")
        for arguments, shown in (
            (("rollouts", "enqueue", '{"question": "how many?"}', *store), ""),
            (("runner", "--max-rollouts", "1", *agent), "claimed 1, succeeded 1"),
            (("rollouts", "ls", *store), "complete"),
            (("workers", "ls", *store), "idle"),
            (("resources", "ls", *store), "0 of 0"),
            (("queue", "stats", *store), "rollouts succeeded"),
            (("collector", "status", *store), "received"),
            (("run", *agent), "a span of the agent"),
        ):
            done = await asyncio.to_thread(mac, tmp_path, *arguments)
            assert done.returncode == 0 and shown in done.stdout, (arguments, done.stdout, done.stderr)
        done = await asyncio.to_thread(mac, tmp_path, "doctor", *agent)
        assert done.returncode == 3 and "✗ the model server can be reached: there is none" in done.stdout, done.stdout + done.stderr
