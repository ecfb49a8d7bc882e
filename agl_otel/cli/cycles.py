"""The cycles of `agl-otel improve` as a table, and why weights were not promoted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from agl_otel.adapters.cycles import Cycle
from agl_otel.cli.output import clock, counted, plain
from agl_otel.types import TrainingRun

CYCLE_COLUMNS: Final = (
    "cycle",
    "ended",
    "verdict",
    "held-out",
    "back-test",
    "trusted",
    "drift",
    "canary",
    "version",
    "attempts",
    "trained by",
)


def cycle_rows(cycles: Sequence[Cycle]) -> tuple[list[str], list[list[object]]]:
    """Return the columns that some cycle fills, and a row for each cycle."""
    rows = [_row(each) for each in cycles]
    shown = [place for place in range(len(CYCLE_COLUMNS)) if any(row[place] not in (None, "") for row in rows)]
    return [CYCLE_COLUMNS[place] for place in shown], [[row[place] for place in shown] for row in rows]


def reason_lines(cycles: Sequence[Cycle]) -> list[Text]:
    """Return a line for each reason against a cycle's weights, alarms in red."""
    told = [(each, reason) for each in cycles for reason in each.reasons]
    return [
        Text(f"cycle {each.cycle} {_verdict(each)}: {plain(reason.text)}", style="bold red" if reason.alarm else "")
        for each, reason in told
    ]


def promoted_of(trained: TrainingRun) -> str:
    """Return how many cycles were promoted, in words."""
    return f"{trained.promoted:,} of {trained.steps:,} promoted"


def _row(cycle: Cycle) -> tuple[object, ...]:
    changed = cycle.version_before != cycle.version_after
    return (
        cycle.cycle,
        clock(cycle.end_time),
        _verdict(cycle) + (", ALARM" if any(reason.alarm for reason in cycle.reasons) else ""),
        _held_out(cycle),
        _estimated(cycle.backtest_gain, cycle.backtest_verdict),
        _estimated(cycle.trusted_gain, cycle.trusted_verdict),
        None if cycle.drift is None else f"{cycle.drift:.3g}",
        _canary(cycle),
        f"{cycle.version_before} → {cycle.version_after}" if changed else cycle.version_after,
        f"{counted(cycle.attempts + cycle.unlinked, 'attempt')}{f' in {cycle.selection}' if cycle.selection else ''}",
        cycle.training_run,
    )


def _verdict(cycle: Cycle) -> str:
    return cycle.verdict.replace("_", " ")


def _held_out(cycle: Cycle) -> str | None:
    if cycle.held_out_before is None or cycle.held_out_after is None:
        return None
    scores = f"{cycle.held_out_before:.3f} → {cycle.held_out_after:.3f}"
    low, high = cycle.held_out_gain_low, cycle.held_out_gain_high
    return scores if low is None or high is None else f"{scores} [{low:+.3f}, {high:+.3f}]"


def _estimated(gain: float | None, verdict: str) -> str | None:
    return None if gain is None else f"{gain:+.3f} {verdict}"


def _canary(cycle: Cycle) -> str | None:
    if cycle.canary_share is None:
        return None
    means = ["none" if mean is None else f"{mean:.3f}" for mean in (cycle.canary_mean, cycle.canary_promoted_mean)]
    return f"{cycle.canary_share:.3g}: {means[0]} against {means[1]}, {cycle.canary_rated or 0:,} of {cycle.canary_begun or 0:,} rated"
