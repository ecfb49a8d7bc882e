"""What a run's processes must know, as JSON: the section `agl_otel` of verl's config. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from agl_otel.algorithms.utils import retry_lost_runner
from agl_otel.algorithms.verl.samples import Counts, Rules
from agl_otel.types import RolloutConfig, RolloutMode, TrainingStep

SECTION: Final = "agl_otel"
OURS: Final = "agl/"
"""Before our names among verl's metrics."""
RESOURCE_NAME: Final = "main_llm"
ROLLOUT_SECONDS: Final = 1200.0


@dataclass(frozen=True)
class Spec:
    """One start of one run. No secrets: verl prints its config."""

    store: str
    """The address of the stack."""
    run_id: str
    start: int
    """1, 2, …: how often the run was begun or gone on with."""
    trainer_mode: str = "sync"
    """verl's own name of the trainer that is watched (trainer.py)."""
    says_version: bool = False
    """Whether the model server says in its answers which weights sampled them; else the proxies are told."""
    seed: int | None = None
    """Of what rollouts sample, handed to the model server; None: it draws as it likes."""
    rollout_config: dict[str, Any] = field(default_factory=lambda: retry_lost_runner(ROLLOUT_SECONDS).model_dump())
    step_seconds: float | None = None
    """Rollouts that have not finished by then are cancelled, left out, and counted."""
    rules: dict[str, Any] = field(default_factory=lambda: asdict(Rules()))

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Spec:
        """Read it from verl's config."""
        return cls(**dict(section))

    @property
    def sample_rules(self) -> Rules:
        """What becomes a sample."""
        given: dict[str, Any] = {**self.rules, "take": tuple(self.rules["take"])}
        return Rules(**given)

    @property
    def config(self) -> RolloutConfig:
        """How rollouts are run."""
        return RolloutConfig(**self.rollout_config)

    def resources_id(self, mode: RolloutMode) -> str:
        """The resources of the run's rollouts: training and validation sample differently."""
        return f"{self.run_id}-{mode}"


def sink_step(run_id: str, line: Mapping[str, Any], ended: float) -> TrainingStep:
    """A line of metrics.jsonl as metric sinks take it: ours under the names that other trainers' figures have, verl's as they are."""
    numbers = {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}
    ours = {name.removeprefix(OURS).replace("/", "."): value for name, value in numbers.items() if name.startswith(OURS)}
    refused = sum(value for name, value in ours.items() if name.startswith("refused."))
    return TrainingStep(
        run_id=run_id,
        algorithm="verl",
        step=int(line["step"]),
        refused=int(refused),
        start_time=ended,
        end_time=ended,
        metrics={name: value for name, value in numbers.items() if not name.startswith(OURS)} | ours,
    )


def training_step(
    spec: Spec, counts: Counts, figures: Mapping[str, float], step: int, versions: tuple[str, str], began: float
) -> TrainingStep:
    """What the store is told of a step: `versions` of the resources sampled it, and came of it; it began at `began` (Unix seconds)."""
    told = {name.removeprefix(OURS).replace("/", "."): value for name, value in counts.metrics.items()}
    return TrainingStep(
        run_id=spec.run_id,
        algorithm="verl",
        step=step,
        resources_id=spec.resources_id("train"),
        version_before=versions[0],
        version_after=versions[1],
        samples=counts.samples,
        refused=sum(counts.refused.values()),
        start_time=began,
        end_time=time.time(),
        metrics=told | {name: value for name, value in figures.items() if name not in ("step", "refused")},
        attempts=counts.attempts,
    )
