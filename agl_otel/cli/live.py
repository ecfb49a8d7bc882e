"""A live table of training steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agl_otel.adapters.losses import cut_replies

ROWS_ON_SCREEN: Final = 12


class Step(Protocol):
    """What is shown of a step; StepReport (algorithms/grpo/report.py) and verl's ShownStep have it."""

    @property
    def step(self) -> int: ...  # noqa: D102 - as in StepReport, as are the next ones
    @property
    def reward_mean(self) -> float: ...  # noqa: D102
    @property
    def model_calls(self) -> int: ...  # noqa: D102
    @property
    def spans(self) -> int: ...  # noqa: D102
    @property
    def verdicts(self) -> Mapping[str, int]: ...  # noqa: D102
    @property
    def alarms(self) -> int: ...  # noqa: D102
    @property
    def seconds(self) -> float: ...  # noqa: D102
    @property
    def losses(self) -> str: ...  # noqa: D102
    @property
    def replies_cut(self) -> int: ...  # noqa: D102


class LiveSteps:
    """Context manager that shows the last ROWS_ON_SCREEN steps; without a terminal it prints a line for each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: deque[Step] = deque(maxlen=ROWS_ON_SCREEN)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> LiveSteps:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def add(self, step: Step) -> None:
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
            table.add_column(column, justify="left" if column in ("verdicts", "lost", "cut") else "right")
        for step in self._rows:
            table.add_row(*_cells(step))
        return table


_COLUMNS: Final = ("step", "reward", "model calls", "spans", "verdicts", "seconds", "lost", "cut")


def _cells(step: Step) -> tuple[str, ...]:
    verdicts = " ".join(f"{kind} {count}" for kind, count in sorted(step.verdicts.items())) + (
        f" ALARMS {step.alarms}" if step.alarms else ""
    )
    figures = (str(step.step), f"{step.reward_mean:.2f}", str(step.model_calls), str(step.spans), verdicts, f"{step.seconds:.2f}")
    return *figures, step.losses, cut_replies(step.replies_cut)
