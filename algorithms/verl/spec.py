"""The section `agl_otel` of verl's config, which verl's processes read; and the steps that they record. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from agl_otel.algorithms.grpo.options import Advantages
from agl_otel.algorithms.run_folder import OTHER_CODE, other_code
from agl_otel.algorithms.run_log import flat
from agl_otel.algorithms.utils import retry_lost_runner
from agl_otel.algorithms.verl.samples import Counts, Rules
from agl_otel.types import RolloutConfig, RolloutMode, TrainingStep
from agl_otel.types.resources import Bridging, StrictTools

SECTION: Final = "agl_otel"
RESOURCE_NAME: Final = "main_llm"
ROLLOUT_SECONDS: Final = 1200.0


@dataclass(frozen=True)
class Spec:
    """The parameters of one start of a run, as JSON. Contains no secrets, because verl prints its config."""

    store: str
    """Address of the stack."""
    run_id: str
    start: int
    """1, 2, …: number of this start; later ones resume the run."""
    trainer_mode: str = "sync"
    """verl's name of the trainer that is instrumented (trainer.py)."""
    reports_version: bool = False
    """Whether the model server sends the version of its weights with each response; otherwise it is set in the proxies."""
    ratio_error_limit: float | None = None
    """VERL's option."""
    seed: int | None = None
    """Seed of the rollouts' sampling; None: random."""
    bridge: Bridging = "off"
    """VERL's option."""
    strict_tools: StrictTools = "keep"
    """VERL's option."""
    rollout_config: dict[str, Any] = field(default_factory=lambda: retry_lost_runner(ROLLOUT_SECONDS).model_dump())
    step_seconds: float | None = None
    """Rollouts of a step that have not finished after this time are cancelled, left out and counted. None: no limit."""
    reward_sources: list[str] | None = None
    """VERL's option."""
    reward_wait_seconds: float = 0.0
    """VERL's option."""
    rules: dict[str, Any] = field(default_factory=lambda: asdict(Rules()))
    run_label: str = ""
    """RUN_LABEL of the rollouts; empty: they have none."""
    forced: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """That of run.json (run_folder.py)."""

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Spec:
        """Create it from the section of verl's config."""
        return cls(**dict(section))

    @property
    def sample_rules(self) -> Rules:
        """`rules` as an object."""
        advantages = Advantages(**self.rules["advantages"])
        given: dict[str, Any] = {**self.rules, "take": tuple(self.rules["take"]), "advantages": advantages}
        return Rules(**given)

    @property
    def config(self) -> RolloutConfig:
        """`rollout_config` as an object."""
        return RolloutConfig(**self.rollout_config)

    def resources_id(self, mode: RolloutMode) -> str:
        """Return the id of the resources for this mode; training and validation have different sampling parameters."""
        return f"{self.run_id}-{mode}"


def sink_step(run_id: str, line: Mapping[str, Any], ended: float) -> TrainingStep:
    """Convert a line of metrics.jsonl for metric sinks: this package's metrics, under the names common to all trainers, and verl's."""
    numbers = {name: value for name, value in flat(line).items() if name != "step" and isinstance(value, int | float)}
    return TrainingStep(
        run_id=run_id,
        algorithm="verl",
        step=int(line["step"]),
        samples=int(numbers.get("trajectories", 0)),
        refused=int(sum(line.get("refused", {}).values())),
        start_time=ended,
        end_time=ended,
        metrics=numbers,
    )


def training_step(
    spec: Spec, counts: Counts, figures: Mapping[str, float], step: int, versions: tuple[str, str], began: float
) -> TrainingStep:
    """Create the record of a step. `versions`: of the resources before and after it; `began`: its start, in Unix seconds."""
    return TrainingStep(
        run_id=spec.run_id,
        algorithm="verl",
        step=step,
        resources_id=spec.resources_id("train"),
        version_before=versions[0],
        version_after=versions[1],
        samples=int(figures["trajectories"]),
        refused=sum(counts.refused.values()),
        start_time=began,
        end_time=time.time(),
        metrics={**figures, **({OTHER_CODE: named} if (named := other_code(spec.forced, step)) else {})},
        attempts=counts.attempts,
    )
