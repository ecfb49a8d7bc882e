"""The cycles of `agl-otel improve` as a table, and why what they made was not promoted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.text import Text

from agl_otel.adapters.cycles import SILENT_SECONDS, Cycle
from agl_otel.cli.output import WIDEST_LINE, clock, counted, plain
from agl_otel.types import TrainingRun


def cycle_rows(cycles: Sequence[Cycle]) -> tuple[list[str], list[list[object]]]:
    """Return the columns that some cycle fills, and a row for each cycle."""
    columns = {name: values for name, cell in _CELLS.items() if any(values := [cell(cycle) for cycle in cycles])}
    return [*columns], [list(row) for row in zip(*columns.values(), strict=True)]


def reason_lines(cycles: Sequence[Cycle], *, now: float) -> list[Text]:
    """Return a line for each reason against what a cycle made, alarms in red, what a stage waits for, and where it is silent.

    `now`: Unix seconds; 0 where the run is known to have ended.
    """

    def line(cycle: Cycle, text: str, *, is_bad: bool = False) -> Text:
        return Text(f"cycle {cycle.cycle} {_verdict(cycle)}: {text}", style="bold red" if is_bad else "")

    lines = [line(each, plain(reason.text, WIDEST_LINE), is_bad=reason.alarm) for each in cycles for reason in each.reasons]
    for each in cycles:
        if each.waits:
            lines.append(line(each, plain(each.waits, WIDEST_LINE)))
        if each.stage and now - each.end_time > SILENT_SECONDS:
            lines.append(line(each, f"nothing was told since {clock(each.end_time)}: does `agl-otel improve` still run?", is_bad=True))
    return lines


def promoted_of(trained: TrainingRun) -> str:
    """Return how many cycles were promoted, in words."""
    return f"{trained.promoted:,} of {trained.steps:,} promoted"


def _verdict(cycle: Cycle) -> str:
    return cycle.verdict.replace("_", " ") or f"{cycle.stage} …"


def _under_way(cycle: Cycle) -> str:
    return f"since {clock(cycle.stage_began or cycle.start_time)}, told {clock(cycle.end_time)}"


def _held_out(cycle: Cycle) -> str | None:
    if cycle.held_out_before is None or cycle.held_out_after is None:
        return None
    scores = f"{cycle.held_out_before:.3f} → {cycle.held_out_after:.3f}"
    low, high = cycle.held_out_gain_low, cycle.held_out_gain_high
    return scores if low is None or high is None else f"{scores} [{low:+.3f}, {high:+.3f}]"


def _versions(cycle: Cycle) -> str:
    changed = cycle.version_before != cycle.version_after
    return f"{cycle.version_before} → {cycle.version_after}" if changed else cycle.version_after


def _window(cycle: Cycle) -> str:
    where = f" in {cycle.selection}" if cycle.selection else ""
    return counted(cycle.attempts + cycle.unlinked, "attempt") + where


def _estimated(gain: float | None, verdict: str) -> str | None:
    return None if gain is None else f"{gain:+.3f} {verdict.replace('_', ' ')}"


def _canary(cycle: Cycle) -> str | None:
    if cycle.canary_share is None:
        return None
    means = ["none" if mean is None else f"{mean:.3f}" for mean in (cycle.canary_mean, cycle.canary_promoted_mean)]
    return f"{cycle.canary_share:.3g}: {means[0]} against {means[1]}, {cycle.canary_rated or 0:,} of {cycle.canary_begun or 0:,} rated"


_CELLS: Final[dict[str, Callable[[Cycle], object]]] = {
    "cycle": lambda cycle: cycle.cycle,
    "ended": lambda cycle: _under_way(cycle) if cycle.stage else clock(cycle.end_time),
    "verdict": lambda cycle: _verdict(cycle) + (", ALARM" if any(reason.alarm for reason in cycle.reasons) else ""),
    "held-out": _held_out,
    "back-test": lambda cycle: _estimated(cycle.backtest_gain, cycle.backtest_verdict),
    "trusted": lambda cycle: _estimated(cycle.trusted_gain, cycle.trusted_verdict),
    "drift": lambda cycle: None if cycle.drift is None else f"{cycle.drift:.3g}",
    "canary": _canary,
    "version": _versions,
    "attempts": _window,
    "made by": lambda cycle: cycle.training_run,
}
