"""The agent loop that verl calls for each session: run a rollout, and convert its traces to samples.

Only names of verl's public documentation on agent loops are used: AgentLoopBase, AgentLoopOutput, register.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import Any, Final

import numpy as np
import ray  # pyright: ignore[reportMissingImports] - of the extra [verl], as the next ones
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register  # pyright: ignore[reportMissingImports]

from agl_otel.algorithms.verl.estimator import ADVANTAGES
from agl_otel.algorithms.verl.samples import Counts, Sample
from agl_otel.algorithms.verl.sessions import RolloutRequest, Rollouts
from agl_otel.algorithms.verl.spec import SECTION, Spec
from agl_otel.algorithms.verl.tally import find_tally
from agl_otel.store import Store
from agl_otel.types import RUN_LABEL, RolloutMode

NAME: Final = "agl_otel"
_log = logging.getLogger(__name__)


@register(NAME)  # pyright: ignore[reportUntypedClassDecorator] - it is not in our own environment
class TracedAgentLoop(AgentLoopBase):
    """Runs a session as a rollout of the queue."""

    def __init__(self, trainer_config: Any, **_: Any) -> None:
        # without super().__init__, which would create a tokenizer for each session; nothing is tokenised here
        self.config = trainer_config.config

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
        """Run one rollout and return its samples as AgentLoopOutput; none where it was refused, which the tally counts.

        `sampling_params` are ignored: the published resource `main_llm` has them, for training and for validation.
        """
        section = _plain(self.config[SECTION])
        section["rules"] |= of_training(self.config)
        model = self.config.actor_rollout_ref.model
        rollouts = _rollouts(json.dumps(section), model.path, bool(model.get("trust_remote_code", False)))
        result = await rollouts.run(
            RolloutRequest(
                task=json.loads(row["task"]),
                mode=row["mode"],
                step=int(row["global_steps"]),
                index=int(row["index"]),
                session=int(row["session_id"]),
            )
        )
        return [output_of(sample, result.rollout_id) for sample in result.samples]


def of_training(config: Any) -> dict[str, Any]:
    """Return the fields of Rules that verl's resolved config decides."""
    rollout = config.actor_rollout_ref.rollout
    return {
        "max_prompt_tokens": config.data.max_prompt_length,
        "max_response_tokens": config.data.max_response_length,
        "temperature": float(rollout.temperature),
        "scale_advantages": bool(config.algorithm.get("norm_adv_by_std_in_grpo", True)),
    }


def output_of(sample: Sample, rollout_id: str) -> Any:
    """Convert a sample to an AgentLoopOutput."""
    return AgentLoopOutput(
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        response_mask=sample.response_mask,
        response_logprobs=sample.logprobs,
        reward_score=sample.reward,
        num_turns=2 * sample.calls,
        metrics={},
        extra_fields={
            **dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), sample.version),
            "turn_scores": [],
            "tool_rewards": [],
            "reward_extra_info": {},
            "rollout_id": rollout_id,
            **({ADVANTAGES: np.array(sample.advantages, np.float32)} if sample.advantages is not None else {}),
        },
    )


@functools.cache
def _rollouts(spec: str, model: str, trust_remote_code: bool) -> Rollouts:
    """Create the process's Rollouts; a worker of verl has one event loop."""
    run = Spec.of(json.loads(spec))
    run.rules["vocabulary"] = _vocabulary(model, trust_remote_code)
    tally = find_tally(ray)

    async def count(mode: RolloutMode, counts: Counts) -> None:
        await tally.add.remote(mode, counts)

    store = Store(run.store)
    return Rollouts(store.labelled({RUN_LABEL: run.run_label}) if run.run_label else store, run, count)


def _vocabulary(model: str, trust_remote_code: bool) -> int | None:
    """Return the vocabulary size in the model's config (tokenizers may have fewer ids); None, with a warning, where it cannot be read."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:  # verl may support a file system that transformers does not
        _log.warning("the config of the model %s cannot be read, so token ids beyond its vocabulary are not refused: %s", model, error)
        return None
    return int(config.get_text_config().vocab_size)


def _plain(section: Any) -> Any:
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports] - of the extra [verl]

    return OmegaConf.to_container(section, resolve=True)
