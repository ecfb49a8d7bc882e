"""The steps of a canary of `agl-otel improve`: how far it is, as a kill leaves it, and the judgement of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_otel.adapters.gates import canary_verdict
from agl_otel.jobs.improve_evidence import Arms
from agl_otel.jobs.improve_options import ImproveSpec


@dataclass(frozen=True)
class CanarySteps:
    """How far a canary is: `canary_begun.json`.

    It is written when a step has passed, and again when the next one's share is published. A step that was published is gone on with, by
    the rewards since then, unless it was withdrawn meanwhile, as while its model server starts; one
    that was not yet is published (again).
    """

    shares: Sequence[float]
    """Of all its steps, as they were when it began: a job file that was changed since concerns the next canary."""
    passed: Sequence[dict[str, Any]] = ()
    """The evidence of the steps that it passed (`judged_step`)."""
    began: float | None = None
    """When the step under way was published, in Unix seconds; None: it was not yet."""
    version: str = ""
    """Of the set of resources with its share."""

    @classmethod
    def of(cls, facts: dict[str, Any]) -> CanarySteps:
        """Return what a file holds."""
        return cls(facts["shares"], facts["passed"], facts["began"], facts["version"])

    def as_json(self) -> dict[str, Any]:
        """Return it for a file."""
        return asdict(self)

    @property
    def over(self) -> bool:
        """Whether it passed its last step."""
        return len(self.passed) == len(self.shares)

    @property
    def share(self) -> float:
        """Of the step under way."""
        return self.shares[len(self.passed)]

    @property
    def since(self) -> float:
        """When its first step was published, in Unix seconds."""
        since = self.passed[0]["began"] if self.passed else self.began
        assert since is not None, "it was published"
        return since

    def published(self, version: str, now: float) -> CanarySteps:
        """Return it with the step under way published as this version; in another one than before it begins anew."""
        return replace(self, began=now, version=version) if version != self.version else self

    def after(self, step: dict[str, Any]) -> CanarySteps:
        """Return it with one more step passed."""
        return replace(self, passed=[*self.passed, step], began=None, version="")


def seen_step(steps: CanarySteps, arms: Arms, bounds: tuple[float, float]) -> dict[str, Any]:
    """Return the evidence of the step under way so far.

    Args:
        steps: says which step it is.
        arms: the conversations of this step.
        bounds: between which rewards usually lie; others count as the nearer one.
    """
    mean, promoted_mean = (float(rewards.mean()) if len(rewards) else None for rewards in _clipped(arms, bounds))
    counts = {"begun": arms.begun, "rated": len(arms.canary), "promoted_rated": len(arms.promoted), "mixed": arms.mixed}
    about = {"share": steps.share, "began": steps.began, "version": steps.version}
    return {**about, "mean": mean, "promoted_mean": promoted_mean, **counts}


def judged_step(
    spec: ImproveSpec, steps: CanarySteps, arms: Arms, *, bounds: tuple[float, float], runs: bool, over: bool
) -> dict[str, Any] | None:
    """Return the evidence of the step under way, with `why` (a key of gates.REFUSALS, or empty: it has passed); None: wait.

    Args:
        spec: what is asked for.
        steps, arms, bounds: as for seen_step.
        runs: whether the canary's model server does.
        over: whether no more rewards are waited for.
    """
    canary, promoted = _clipped(arms, bounds)
    verdict, why = canary_verdict(
        canary,
        promoted,
        over=over,
        planned=spec.canary_rated,
        spread=bounds[1] - bounds[0],
        max_drop=spec.max_drop,
        steps=len(steps.shares),
    )
    if not runs:
        verdict, why = "roll_back", "canary_down"
    return None if verdict == "wait" else {"why": why, **seen_step(steps, arms, bounds)}


def _clipped(arms: Arms, bounds: tuple[float, float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the rewards of the canary and of the promoted weights, within the bounds."""
    return np.clip(arms.canary, *bounds), np.clip(arms.promoted, *bounds)
