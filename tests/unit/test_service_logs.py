"""The report of a failed test: its output, the logs of its services, and its name."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUITE = """
    import os
    import pytest

    @pytest.fixture(scope="module")
    def old(tmp_path_factory):
        log = tmp_path_factory.mktemp("old") / "old.log"
        log.write_text("of a service that has ended\\n")
        os.utime(log, (0, 0))

    @pytest.fixture
    def service(tmp_path):
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "queue.log").write_text("the start" + "." * 4000 + "no space left\\n")

    def test_fails(old, service):
        print("what the test printed")
        assert False
"""


def test_a_failed_test_ends_with_its_output_its_services_logs_and_its_name(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(textwrap.dedent(SUITE))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.service_logs", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(tmp_path), "--basetemp", str(tmp_path / "temporary"), str(tmp_path / "test_it.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment, timeout=100)
    assert done.returncode == 1, done.stderr
    shown = done.stdout
    places = [
        shown.index(each)
        for each in ("what the test printed", "test_fails0/logs/queue.log ends with", "no space left", "FAILED test_it.py")
    ]
    assert places == sorted(places), shown
    assert "of a service that has ended" not in shown and "the start." not in shown
