"""Selections: tables of attempts that were chosen from traces, under a name with versions."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from pydantic import Field

from agl_otel.types.model import Model

NAMED: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}(@[1-9][0-9]{0,8})?$"
"""A selection as it is named: NAME, its current version, or NAME@VERSION."""


class Selected(Model):
    """An attempt of a selection: a row of its table."""

    rollout_id: str = Field(min_length=1)
    attempt_id: str = Field(min_length=1)
    reward: float | None = Field(default=None, allow_inf_nan=False)
    """When it was selected; None: it had none."""
    cluster: str = ""
    """What failed (adapters/failures.py); empty where that was not asked for."""
    value: float | None = Field(default=None, allow_inf_nan=False)
    """To the learner: the variance of the rewards at its task, or what the query gave; None: unknown."""

    @property
    def key(self) -> tuple[str, str]:
        """Its ids."""
        return self.rollout_id, self.attempt_id


class Selection(Model):
    """One version of a selection."""

    selection: str
    """Name and version (`hard@2`)."""
    name: str
    version: int
    digest: str
    """SHA-256 of the rows as JSON lines (adapters/batches.py)."""
    made: dict[str, Any]
    """How it was made: the options, and what each step left out."""
    rows: list[Selected]

    @property
    def rollout_ids(self) -> list[str]:
        """The rollouts of its attempts, in order."""
        return [row.rollout_id for row in self.rows]


class Gone(NamedTuple):
    """An attempt of a selection that is no longer what would be read."""

    rollout_id: str
    attempt_id: str
    why: Literal["deleted", "replaced"]
    """The queue has no such rollout, or a later attempt of it has replaced this one."""
