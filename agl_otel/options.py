"""Kinds of options that commands of several rooms share."""

from __future__ import annotations

import math
from typing import Any, get_args

import click

from agl_otel.types import ADOPTED, NOT_RUN, RolloutMode


class RunMode(click.Choice[str]):
    """A mode of rollouts that runners run."""

    def __init__(self) -> None:
        super().__init__([mode for mode in get_args(RolloutMode) if mode != ADOPTED])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The mode, or click's refusal; of the one that no runner runs with the reason."""
        if value == ADOPTED:
            self.fail(NOT_RUN, param, ctx)
        return super().convert(value, param, ctx)


class Finite(click.FloatRange):
    """A number within bounds: neither NaN nor infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or click's refusal."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number
