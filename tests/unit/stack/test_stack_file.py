from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agl_otel.service.processes import began
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import LOCK_FILE, STACK_FILE, Stack, read_stack_file, running_address

OWN: dict[str, Any] = {"pid": os.getpid(), "began": began(os.getpid()), "address": "127.0.0.1:1"}


def test_the_file_of_a_killed_stack_does_not_count_as_running(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ended = {"pid": gone.pid, "began": 1, "address": ""}
    (tmp_path / STACK_FILE).write_text(json.dumps({"queue": OWN, "proxy": ended}))
    assert read_stack_file(tmp_path) == {"queue": OWN, "proxy": ended}
    (tmp_path / STACK_FILE).write_text(json.dumps({"queue": ended}))
    assert read_stack_file(tmp_path) == {}
    assert read_stack_file(tmp_path / "nowhere") == {}


@pytest.mark.skipif(sys.platform != "linux", reason="when a process began is read from /proc")
def test_another_process_with_the_id_of_a_killed_one_does_not_count_as_running(tmp_path: Path) -> None:
    (tmp_path / STACK_FILE).write_text(json.dumps({"queue": {**OWN, "began": OWN["began"] - 1}}))
    assert read_stack_file(tmp_path) == {}


def test_services_that_outlive_their_killed_supervisor_are_no_stack_to_join(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    settings = Settings.private(data_dir=tmp_path)
    (tmp_path / STACK_FILE).write_text(json.dumps({"queue": OWN}))
    (tmp_path / LOCK_FILE).write_text(str(os.getpid()))
    assert running_address(settings) == "127.0.0.1:1"
    (tmp_path / LOCK_FILE).write_text(str(gone.pid))
    assert running_address(settings) == ""
    (tmp_path / LOCK_FILE).write_text("")  # written on a full disk
    assert running_address(settings) == "127.0.0.1:1"


async def test_a_start_that_is_interrupted_leaves_the_file_of_the_services_that_it_waits_for(tmp_path: Path) -> None:
    (tmp_path / STACK_FILE).write_text(json.dumps({"queue": OWN}))
    stack = Stack(Settings.private(data_dir=tmp_path), only=("queue",))
    starting = asyncio.create_task(stack.start())
    async with asyncio.timeout(60):
        while not stack.claimed:  # noqa: ASYNC110 - its start takes the lock first
            await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await stack.stop()
    assert read_stack_file(tmp_path) == {"queue": OWN}
