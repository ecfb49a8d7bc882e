"""Instrument verl's trainers: publish the weights version after each update, and record each step with its counts.

The trainers are added with verl's `register_trainer`; only hooks (`on_…`), `step` and `fit` are overridden.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import ray  # pyright: ignore[reportMissingImports] - of the extra [verl], as the next ones
import transfer_queue as tq  # pyright: ignore[reportMissingImports]
from omegaconf import open_dict  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer  # pyright: ignore[reportMissingImports]

from agl_otel.adapters.own_sampling import several_choices_warning
from agl_otel.algorithms.grpo.objective import max_ratio_error
from agl_otel.algorithms.report import own_sampling_warning, singleton_warning
from agl_otel.algorithms.run_log import RunLog
from agl_otel.algorithms.verl.order import in_order
from agl_otel.algorithms.verl.publish import Publisher, sampling_by_mode
from agl_otel.algorithms.verl.samples import Counts, all_refused, figures_of
from agl_otel.algorithms.verl.singletons import compares_groups, groups_of, singleton_keys
from agl_otel.algorithms.verl.spec import SECTION, Spec, training_step
from agl_otel.algorithms.verl.tally import make_tally
from agl_otel.errors import DataError
from agl_otel.store import Store

MODES: Final = ("sync", "colocate_async", "separate_async")
PREFIX: Final = "agl_otel_"
"""Prefix of the names of verl's trainers in `trainer.v1.trainer_mode`."""
_log = logging.getLogger(__name__)
_Trainer: Any = object
"""Stands for the class of verl's trainer, which `instrumented` mixes in."""


class InstrumentedTrainer(_Trainer):
    """A mix-in over one of verl's trainers that publishes weights versions and records steps."""

    def __init__(self, config: Any) -> None:
        self._spec = Spec.of(config[SECTION])
        with open_dict(config):
            config.trainer.v1.trainer_mode = self._spec.trainer_mode  # verl compares it with its own names
        self._tally = make_tally(ray)
        self._store = Store(self._spec.store)
        self._version = ""
        self._validating = False
        self._step_counts = Counts()
        self._singletons: list[str] = []
        self._began = 0.0
        self._figures: dict[str, float] = {}
        self._run_log = RunLog(self._store, run_id=self._spec.run_id, algorithm="verl")
        super().__init__(config)

    def fit(self, agent_loop_manager: Any) -> None:
        """Train. Raises DataError with the reasons where all rollouts of a step or of a validation were refused."""
        try:
            super().fit(agent_loop_manager)
        except Exception as error:
            what = f"the validation after step {self.global_steps}" if self._validating else f"step {self.global_steps}"
            counts: Counts = ray.get(self._tally.take.remote("val" if self._validating else "train"))
            if message := all_refused(counts, what):
                raise DataError(message) from error
            raise

    def on_init_end(self) -> None:
        """Wrap the replay buffer's `sample`, and publish the initial weights."""
        super().on_init_end()
        self._sample = in_order(self.replay_buffer)
        self.replay_buffer.sample = self._sample_comparable
        self._publish()

    def on_step_end(self) -> None:
        """Publish the new weights, and record the step."""
        super().on_step_end()
        before = self._version
        self._publish()
        step = training_step(self._spec, self._step_counts, self._figures, self.global_steps, (before, self._version), self._began)
        asyncio.run(self._run_log.note(step, self._figures))

    def on_validate_begin(self) -> None:
        """Note that a validation is running, for the error message of `fit`."""
        super().on_validate_begin()
        self._validating = True

    def on_validate_end(self) -> None:
        """Note the end of the validation, and log its counts."""
        super().on_validate_end()
        self._validating = False
        _log.info("validation: %s", ray.get(self._tally.take.remote("val")).metrics)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        """Run one of verl's steps, and add this package's metrics to verl's."""
        self._began = time.time()
        self._singletons = []
        batch = super().step(metrics, timing_raw)
        counts: Counts = ray.get(self._tally.take.remote("train"))
        if counts.reward_least == counts.reward_most:
            _log.warning("step %d changes no weights: the rewards are all %s", self.global_steps, counts.reward_least)
        if counts.own_sampling:
            _log.warning("%s", own_sampling_warning(self.global_steps, counts.own_sampling, counts.sampled_calls))
        if counts.several_choices:
            _log.warning("step %d: %s", self.global_steps, several_choices_warning(counts.several_choices, counts.sampled_calls))
        counts.attempts = [attempt for attempt in counts.attempts if attempt[0] not in self._singletons]
        rows = [tag for tag in batch.tags if not tag.get("is_padding", False)]
        stale = sum(tag["min_global_steps"] != self.global_steps - 1 for tag in rows)
        figures = {**figures_of(counts, trained=len(rows), stale=stale), **self._drift(batch), "singleton_groups": len(self._singletons)}
        metrics.update(counts.metrics | {f"agl/{name}": value for name, value in figures.items()})
        self._step_counts = counts
        self._figures = {"step": self.global_steps, **figures}
        return batch

    def _drift(self, batch: Any) -> dict[str, float]:
        """Compare the captured log-probs with those that verl computed before its update; empty where verl did not compute them."""
        if (self.config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False):
            return {}
        fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
        read = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields).to_padded_tensor()
        written = read["response_mask"].bool()
        return {"logprob_drift": max_ratio_error(read["old_log_probs"][written], read["rollout_log_probs"][written])}

    # --- singleton groups

    def _sample_comparable(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Sample from the replay buffer, sorted, and without singleton groups."""
        batch, metrics = self._sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        compared = compares_groups(str(self.config.algorithm.adv_estimator), self.config.actor_rollout_ref.rollout.n)
        singletons = singleton_keys(batch.keys) if compared and partition_id == "train" else []
        return self._drop_singletons(batch, singletons) if singletons else batch, metrics

    def _drop_singletons(self, batch: Any, singletons: list[str]) -> Any:
        """Drop the rows with these keys from the batch. If no others are left, set all rewards to 0 instead."""
        extra = tq.kv_batch_get(keys=singletons, partition_id=batch.partition_id, select_fields=["extra_fields"])["extra_fields"]
        rollouts = list(dict.fromkeys(str(each["rollout_id"]) for each in extra))
        self._singletons += rollouts
        _log.warning("%s", singleton_warning(self.global_steps, rollouts, groups_of(batch.keys)))
        left = [key for key in batch.keys if key not in set(singletons)]
        if left:
            tq.kv_clear(keys=singletons, partition_id=batch.partition_id)
            return batch.select_keys(left)
        scores = tq.kv_batch_get(keys=singletons, partition_id=batch.partition_id, select_fields=["rm_scores"])
        scores["rm_scores"] = scores["rm_scores"] * 0.0
        tq.kv_batch_put(keys=singletons, partition_id=batch.partition_id, fields=scores)
        return batch

    def _publish(self) -> None:
        addresses = self.llm_server_manager.get_addresses()
        publisher = Publisher(self._store, self._spec, sampling_by_mode(self.config.actor_rollout_ref.rollout))
        self._version = asyncio.run(publisher.publish(addresses, self.global_steps))


def instrumented(trainer: Any) -> Any:
    """Derive a class from `InstrumentedTrainer` and one of verl's trainers."""
    return type("Instrumented", (InstrumentedTrainer, trainer), {})


def register_trainers() -> None:
    """Register the instrumented trainers with verl."""
    for mode in MODES:
        register_trainer(PREFIX + mode)(instrumented(get_trainer_cls(mode)))
