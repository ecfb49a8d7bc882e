"""Cycles of `agl-otel improve` as a table."""

from __future__ import annotations

from typing import Any

from agl_otel.adapters.cycles import cycles_of
from agl_otel.cli.cycles import cycle_rows, reason_lines
from agl_otel.cli.output import clock
from tests.unit.adapters.test_cycles import stage, step

MADE: dict[str, Any] = {"training_run": "grpo-1", "selection": "improve-1@1"}
HELD_OUT: dict[str, Any] = {
    "held_out_before": 0.25,
    "held_out_after": 0.5,
    "held_out_gain_low": 0.1,
    "held_out_gain_high": 0.4,
    "drift": 0.0234,
}
CANARY: dict[str, Any] = {"canary_share": 0.1, "canary_begun": 40, "canary_rated": 34, "canary_mean": 0.625, "canary_promoted_mean": 0.5}


def test_a_row_has_the_evidence_and_the_versions_of_a_cycle() -> None:
    columns, [row] = cycle_rows(
        cycles_of([step(verdict="promoted", why="", backtest_gain=0.08, backtest_verdict="better", **MADE, **HELD_OUT, **CANARY)])
    )
    found = dict(zip(columns, row, strict=True))
    assert found == {
        "cycle": 1,
        "ended": found["ended"],
        "verdict": "promoted",
        "held-out": "0.250 → 0.500 [+0.100, +0.400]",
        "back-test": "+0.080 better",
        "drift": "0.0234",
        "canary": "0.1: 0.625 against 0.500, 34 of 40 rated",
        "version": "3 → 5",
        "attempts": "3 attempts in improve-1@1",
        "made by": "grpo-1",
    }


def test_a_cycle_that_came_to_no_evidence_has_only_its_verdict_and_reasons() -> None:
    why = "held_out_falls, trusted_lags"
    cycles = cycles_of([step(1, verdict="refused", why="no_new_weights"), step(2, verdict="rolled_back", why=why)])
    columns, rows = cycle_rows(cycles)
    assert columns == ["cycle", "ended", "verdict", "version", "attempts"]
    assert [row[2] for row in rows] == ["refused", "rolled back, ALARM"]
    lines = reason_lines(cycles, now=0.0)
    assert [line.plain for line in lines][:2] == [
        "cycle 1 refused: the update changed nothing",
        "cycle 2 rolled back: the held-out score fell by more than chance",
    ]
    assert ["red" in str(line.style) for line in lines] == [False, False, True]


def test_a_cycle_under_way_says_which_stage_is() -> None:
    columns, rows = cycle_rows(cycles_of([step(verdict="refused")], [stage("window", 1.0, attempts=256, selection="improve-1@2")]))
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    assert [each["verdict"] for each in found] == ["refused", "update …"]
    assert str(found[1]["ended"]) == f"since {clock(1.5)}, told {clock(1.5)}" and "told" not in str(found[0]["ended"])
    assert found[1]["attempts"] == "256 attempts in improve-1@2"


def test_a_window_under_way_says_what_it_waits_for() -> None:
    cycles = cycles_of([], [stage("window", 1.0, number=1, waits="3 of 8 attempts are rated, 6 have no reward")])
    _, [row] = cycle_rows(cycles)
    assert "window …" in row
    waits = "cycle 1 window …: 3 of 8 attempts are rated, 6 have no reward"
    silent = f"cycle 1 window …: nothing was told since {clock(1.5)}: does `agl-otel improve` still run?"
    for now, lines in ((60.0, [waits]), (600.0, [waits, silent]), (0.0, [waits])):
        assert [line.plain for line in reason_lines(cycles, now=now)] == lines


def test_what_a_store_has_is_shown_as_text() -> None:
    [line] = reason_lines(cycles_of([step(verdict="refused", why="\x1b[31mred")]), now=0.0)
    assert "\x1b" not in line.plain
