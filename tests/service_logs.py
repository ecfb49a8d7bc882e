"""What a failed test's report has beside its output: the ends of the logs that its services wrote meanwhile."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

SHOWN_BYTES: Final = 4000  # of each log: a traceback and what led to it
STARTED: Final = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs to the report of a part of a test (setup, call, teardown) that failed."""
    report = yield
    started = item.stash.setdefault(STARTED, call.start)
    if report.failed:
        folder = item.config._tmp_path_factory.getbasetemp()  # pyright: ignore[reportAttributeAccessIssue]  # the fixture needs a request
        for log in sorted(folder.rglob("*.log")):
            if (end := _end_if_written_since(log, started)) is not None:
                report.sections.append((f"{log.relative_to(folder)} ends with", end))
    return report


def _end_if_written_since(log: Path, start: float) -> str | None:
    try:
        if not log.is_file() or log.stat().st_mtime < start - 1.0:  # the time of a file is that of a clock tick before
            return None
        return log.read_bytes()[-SHOWN_BYTES:].decode(errors="replace")
    except OSError:  # deleted by a service that still runs
        return None
