"""A live table of training steps."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from agl_otel.algorithms.grpo.report import StepReport

ROWS_ON_SCREEN: Final = 12


class LiveSteps:
    """Context manager that shows the last ROWS_ON_SCREEN steps; without a terminal it prints a line for each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: deque[StepReport] = deque(maxlen=ROWS_ON_SCREEN)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> LiveSteps:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def add(self, step: StepReport) -> None:
        """Show a step."""
        self._rows.append(step)
        if self._live:
            self._live.update(self._table(), refresh=True)
        else:
            cells = [f"{name} {value}" for name, value in zip(_COLUMNS, _cells(step), strict=True) if value]
            self._console.print("   " + "  ".join(cells), soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 1))
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column in ("verdicts", "lost") else "right")
        for step in self._rows:
            table.add_row(*_cells(step))
        return table


_COLUMNS: Final = ("step", "reward", "model calls", "spans", "verdicts", "seconds", "lost")


def _cells(step: StepReport) -> tuple[str, ...]:
    verdicts = " ".join(f"{kind} {count}" for kind, count in sorted(step.verdicts.items())) + (
        f" ALARMS {step.alarms}" if step.alarms else ""
    )
    seconds = step.rollout_seconds + step.read_seconds + step.update_seconds
    return str(step.step), f"{step.reward_mean:.2f}", str(step.model_calls), str(step.spans), verdicts, f"{seconds:.2f}", step.losses
