from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from agl_otel.settings import Settings
from agl_otel.stack.supervisor import LOCK_FILE, STACK_FILE, read_stack_file, running_address


def test_the_file_of_a_killed_stack_does_not_count_as_running(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    told = {"queue": {"pid": os.getpid(), "address": "127.0.0.1:1"}, "proxy": {"pid": gone.pid, "address": ""}}
    (tmp_path / STACK_FILE).write_text(json.dumps(told))
    assert read_stack_file(tmp_path) == told
    (tmp_path / STACK_FILE).write_text(json.dumps({"queue": {"pid": gone.pid, "address": "127.0.0.1:1"}}))
    assert read_stack_file(tmp_path) == {}
    assert read_stack_file(tmp_path / "nowhere") == {}


def test_services_that_outlive_their_killed_supervisor_are_no_stack_to_join(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    settings = Settings.private(data_dir=tmp_path)
    (tmp_path / STACK_FILE).write_text(json.dumps({"queue": {"pid": os.getpid(), "address": "127.0.0.1:1"}}))
    (tmp_path / LOCK_FILE).write_text(str(os.getpid()))
    assert running_address(settings) == "127.0.0.1:1"
    (tmp_path / LOCK_FILE).write_text(str(gone.pid))
    assert running_address(settings) == ""
    (tmp_path / LOCK_FILE).write_text("")  # written on a full disk
    assert running_address(settings) == "127.0.0.1:1"
