"""The disk budget warns early and refuses when it is used up."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from agl_otel.collector.disk import DiskBudget, level
from agl_otel.errors import UnavailableError


@pytest.mark.parametrize(
    ("held", "free", "expected"),
    [
        (0, 1000, "ok"),
        (69, 1000, "ok"),
        (70, 1000, "warning"),
        (99, 1000, "warning"),
        (100, 1000, "full"),
        (0, 39, "warning"),
        (0, 9, "full"),
    ],
)
def test_the_level_depends_on_the_log_size_and_the_free_space(held: int, free: int, expected: str) -> None:
    assert level(held, 100, free, 10, Path("wal"))[0] == expected


def test_a_change_of_level_is_logged_once_and_a_full_disk_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    budget = DiskBudget(tmp_path, budget_bytes=100, reserve_bytes=10, free=lambda _: 1000)
    for held in (10, 75, 80):
        budget.check(held)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="AGL_WAL_BUDGET_BYTES"):
            budget.check(100)
    budget.check(0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "INFO"]
    assert (budget.level, budget.refused) == ("ok", 2)


def test_a_disk_that_refuses_is_full_and_is_tried_again(tmp_path: Path) -> None:
    refusals = ["its quota is spent"]
    budget = DiskBudget(tmp_path, budget_bytes=100, free=lambda _: 1000, refusal=lambda: refusals[0])
    assert budget.current_level(0) == ("full", "its quota is spent")
    budget.check(0)
    refusals[0] = ""
    assert budget.current_level(0) == ("ok", "")


def test_free_space_of_the_real_disk_is_measured(tmp_path: Path) -> None:
    budget = DiskBudget(tmp_path, budget_bytes=100, reserve_bytes=0)
    budget.check(0)
    assert budget.free_bytes > 0
