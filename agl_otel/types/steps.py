"""Steps of training runs: what made a version of the weights or prompts, and from which attempts."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from agl_otel.types.model import Model


class TrainingStep(Model):
    """One step of a training run; (run_id, step) names it."""

    run_id: str
    algorithm: str
    step: int
    """1, 2, … (a search's score of what it began with is step 0)."""
    resources_id: str = ""
    """The set of resources whose versions these are."""
    version_before: str = ""
    """What sampled the step's rollouts."""
    version_after: str = ""
    """What the step made; the one before where it changed nothing."""
    samples: int = 0
    refused: int = 0
    """Calls and attempts that were not trained on."""
    start_time: float
    end_time: float
    """Unix seconds."""
    metrics: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Numbers and texts, by name."""
    attempts: list[tuple[str, str]] = Field(default_factory=list[tuple[str, str]])
    """(rollout id, attempt id) of what was consumed. When a step is recorded, an empty attempt id means every attempt of the rollout."""
    unlinked: int = 0
    """Set by reading: how many more attempts were consumed of which no span was stored."""


class TrainingRun(Model):
    """A training run, as its steps tell of it."""

    run_id: str
    algorithm: str
    steps: int
    last_step: int
    last_version: str
    start_time: float
    end_time: float
    """Unix seconds."""
