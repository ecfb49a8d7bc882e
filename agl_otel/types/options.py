"""Types of command-line options that commands of several rooms share."""

from __future__ import annotations

import math
from typing import Any, Final, get_args

import click

from agl_otel.errors import UsageError
from agl_otel.types import ADOPTED, NOT_RUN, RolloutMode
from agl_otel.types.patterns import checked_pattern

LARGEST: Final = (1 << 31) - 1
SHOWN: Final = 40


class RunMode(click.Choice[str]):
    """A rollout mode that runners run."""

    def __init__(self) -> None:
        super().__init__([mode for mode in get_args(RolloutMode) if mode != ADOPTED])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the mode, or fail as click does; for the mode that no runner runs, with the reason."""
        if value == ADOPTED:
            self.fail(NOT_RUN, param, ctx)
        return super().convert(value, param, ctx)


class Pattern(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]  # click 8.2 takes none
    """A regular expression."""

    name = "regex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return it, or fail as click does."""
        try:
            return checked_pattern(str(value), repr(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)


class Whole(click.IntRange):
    """A 32-bit integer within bounds, as the queue and ClickHouse use."""

    def __init__(self, min: int | None = None, max: int | None = None) -> None:  # noqa: A002 - click's names
        super().__init__(min, max)
        if min is None and max is None:
            self.name = "integer"

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number, or fail as click does."""
        number = super().convert(value, param, ctx)
        if abs(number) > LARGEST:
            self.fail(f"{str(value)[:SHOWN]} is beyond {LARGEST}", param, ctx)
        return number


class Finite(click.FloatRange):
    """A number within bounds: neither NaN nor infinite."""

    def __init__(self, min: float | None = None, max: float | None = None, *, min_open: bool = False) -> None:  # noqa: A002 - click's names
        super().__init__(min, max, min_open=min_open)
        if min is None and max is None:
            self.name = "float"

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail as click does."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number
