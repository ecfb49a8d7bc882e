"""Steps of training runs: how each version of the weights or prompts was made, and from which attempts."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from agl_otel.types.model import Model


class TrainingStep(Model):
    """One step of a training run; (run_id, step) names it."""

    run_id: str
    algorithm: str
    step: int
    """1, 2, … (step 0 of a search is the score of its initial prompt)."""
    resources_id: str = ""
    """The set of resources to which the versions belong."""
    version_before: str = ""
    """The version that sampled the step's rollouts."""
    version_after: str = ""
    """The version after the step; the same as before if the step changed nothing."""
    samples: int = 0
    refused: int = 0
    """Calls and attempts left out of training."""
    start_time: float
    end_time: float
    """Unix seconds."""
    metrics: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Numbers and texts, by name."""
    attempts: list[tuple[str, str]] = Field(default_factory=list[tuple[str, str]])
    """(rollout id, attempt id) of the consumed attempts. For recording, an empty attempt id means every attempt of the rollout."""
    unlinked: int = 0
    """Set on reading: how many further attempts were consumed that have no stored span."""


class TrainingStage(Model):
    """A stage of a step that takes long, as of a cycle of `agl-otel improve`, as far as it is; (run_id, step, name) names it."""

    run_id: str
    algorithm: str
    step: int
    name: str
    resources_id: str = ""
    """The set of resources that the step may change."""
    start_time: float
    end_time: float
    """Unix seconds; while it is under way, of its recording."""
    metrics: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Numbers and texts, by name: what it has found."""


class PublishingStep(Model):
    """A step of a training run by which versions of a set of resources were published: those after `version_before`, to `version_after`."""

    run_id: str
    algorithm: str
    step: int
    version_before: str
    version_after: str
    verdict: str
    """That of a cycle of `agl-otel improve`; else empty."""


class TrainingRun(Model):
    """A training run, summed up from its steps and its outcome."""

    run_id: str
    algorithm: str
    outcome: str = ""
    """How it ended: `finished`, `interrupted`, or `error: ` and the error. Empty while it runs, and if it was killed."""
    steps: int
    last_step: int
    last_version: str
    promoted: int = 0
    """Cycles of `agl-otel improve` whose weights were promoted."""
    start_time: float
    end_time: float
    """Unix seconds."""

    def has_made(self, step: int) -> bool:
        """Return whether the run made this step, or may still; not so of one whose rollouts waited or ran when it was stopped or failed.

        A user's algorithm need not record steps: then each counts as made.
        """
        return self.outcome in ("", "finished") or not self.steps or step <= self.last_step
