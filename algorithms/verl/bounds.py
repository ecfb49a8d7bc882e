"""Bounds of the keys of verl's config by which runs are set up most often; the other keys are checked by verl alone."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, create_model

from agl_otel.algorithms.options import STRICT, Clip, KlCoefficient, LearningRate, MaxGradNorm, SamplingTemperature, check
from agl_otel.algorithms.verl.keys import get, has
from agl_otel.errors import UsageError

Count = Annotated[int, Field(ge=1, description="it is a number of tasks, tokens, passes or devices")]
CountOrAll = Annotated[int, Field(ge=-1, description="-1 is for all, or for never")]
_ACTOR: Final = "actor_rollout_ref.actor"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
BOUNDS: Final[Mapping[str, Any]] = {
    "data.train_batch_size": Count,
    "data.max_prompt_length": Count,
    "data.max_response_length": Count,
    f"{_ROLLOUT}.n": Count,
    f"{_ROLLOUT}.temperature": SamplingTemperature,
    f"{_ROLLOUT}.tensor_model_parallel_size": Count,
    f"{_ROLLOUT}.gpu_memory_utilization": Annotated[float, Field(gt=0, le=1, description="it is a share of the GPU's memory")],
    f"{_ACTOR}.ppo_mini_batch_size": Count,
    f"{_ACTOR}.ppo_epochs": Count,
    f"{_ACTOR}.optim.lr": LearningRate,
    f"{_ACTOR}.grad_clip": MaxGradNorm,
    f"{_ACTOR}.clip_ratio": Clip,
    f"{_ACTOR}.kl_loss_coef": KlCoefficient,
    "critic.optim.lr": LearningRate,
    "algorithm.gamma": Annotated[float, Field(ge=0, le=1, description="it discounts rewards")],
    "algorithm.lam": Annotated[float, Field(ge=0, le=1, description="it discounts advantages")],
    "trainer.total_epochs": Count,
    "trainer.total_training_steps": Count,
    "trainer.n_gpus_per_node": Count,
    "trainer.nnodes": Count,
    "trainer.save_freq": CountOrAll,
    "trainer.test_freq": CountOrAll,
    "trainer.device": Literal["cpu", "cuda", "npu", "xpu"],
}
"""{dotted path of verl 0.9.1: type and bounds}. A null, or an interpolation such as "${data.train_batch_size}", is left to verl."""
SECTIONS: Final = frozenset(
    {
        *("actor_rollout_ref", "algorithm", "critic", "data", "distillation", "global_profiler", "model_engine", "ray_kwargs", "reward"),
        *("sandbox_fusion", "skip", "trainer", "transfer_queue"),
    }
)
"""Of verl 0.9.1's config, without the two that keys.NO_PLACE refuses; its own files are checked in compose.py, where it is installed."""
_FIELDS: Final[dict[str, Any]] = {path: (kind, None) for path, kind in BOUNDS.items()}
_Config = create_model("VerlConfig", __config__=STRICT, **_FIELDS)


def check_values(config: Mapping[str, Any]) -> None:
    """Raise UsageError, which names the key, for a value out of its bounds and for a misspelt section of a translated config."""
    for section in config:
        if section not in SECTIONS and (close := difflib.get_close_matches(section, SECTIONS, 1, cutoff=0.8)):
            raise UsageError(f"config has the unknown section {section}: did you mean {close[0]}?")
    given = {path: get(config, path) for path in BOUNDS if has(config, path)}
    check(_Config, {path: value for path, value in given.items() if value is not None and not str(value).startswith("${")})
    batch, mini = get(config, "data.train_batch_size"), get(config, f"{_ACTOR}.ppo_mini_batch_size")
    if isinstance(batch, int) and isinstance(mini, int) and mini > batch:
        raise UsageError(
            f"{_ACTOR}.ppo_mini_batch_size = {mini}: it must be at most data.train_batch_size ({batch}), because a step's tasks are split "
            "into mini-batches; give such a value"
        )
