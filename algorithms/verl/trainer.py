"""Instrument verl's trainers: publish the weights version after each update, and record each step with its counts.

The trainers are added with verl's `register_trainer`; hooks (`on_…`), `step` and `fit` are overridden, and the three private methods that
the package's docstring names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import ray  # pyright: ignore[reportMissingImports] - of the extra [verl], as the next ones
import torch
import transfer_queue as tq  # pyright: ignore[reportMissingImports] - of the [verl] extra
from omegaconf import open_dict  # pyright: ignore[reportMissingImports] - of the [verl] extra
from verl.trainer.ppo.core_algos import register_adv_est  # pyright: ignore[reportMissingImports] - of the [verl] extra
from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer  # pyright: ignore[reportMissingImports] - of the [verl] extra

from agl_otel.adapters.losses import lost
from agl_otel.algorithms.report import (
    MANY_WITHOUT_SAMPLE,
    NOT_FINITE_STEPS,
    choices_warning,
    differing_warning,
    singleton_warning,
    without_sample_warning,
)
from agl_otel.algorithms.run_log import RunLog
from agl_otel.algorithms.validation import figures_of
from agl_otel.algorithms.verl.credit import ESTIMATOR
from agl_otel.algorithms.verl.estimator import CARRIED
from agl_otel.algorithms.verl.figures import Update, as_metrics, not_finite_in, stack_figures, step_figures
from agl_otel.algorithms.verl.order import in_order
from agl_otel.algorithms.verl.publish import Publisher, sampling_by_mode
from agl_otel.algorithms.verl.ratios import compared
from agl_otel.algorithms.verl.samples import Counts, all_refused
from agl_otel.algorithms.verl.singletons import compares_groups, groups_of, singleton_keys
from agl_otel.algorithms.verl.spec import SECTION, Spec, training_step
from agl_otel.algorithms.verl.tally import make_tally
from agl_otel.errors import AgentError, DataError
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
        self._ratios: tuple[float, float] | None = None
        self._not_finite: list[str] = []
        """Of the last steps in a row that were not finite: what was not."""
        self._told_choices = False
        self._run_log = RunLog(self._store, run_id=self._spec.run_id, algorithm="verl")
        super().__init__(config)

    def fit(self, agent_loop_manager: Any) -> None:
        """Train.

        Raises AgentError where the user's function of credit fails; DataError where all rollouts of a step or of a validation were refused,
        with the reasons; where the tokens of a step were not sampled as verl assumes (VERL's ratio_error_limit); and where NOT_FINITE_STEPS
        steps in a row were not finite.
        """
        try:
            super().fit(agent_loop_manager)
            self._check_finite()
        except Exception as error:
            what = f"the validation after step {self.global_steps}" if self._validating else f"step {self.global_steps}"
            counts: Counts = ray.get(self._tally.take.remote("val" if self._validating else "train"))
            if counts.errors:
                raise AgentError(next(iter(counts.errors))) from error
            if message := all_refused(counts, what):
                raise DataError(message) from error
            raise

    def on_init_end(self) -> None:
        """Wrap the replay buffer's `sample`, and publish the initial weights."""
        super().on_init_end()
        self._sample = in_order(self.replay_buffer)
        self.replay_buffer.sample = self._sample_comparable
        self._publish()

    def on_step_begin(self) -> None:
        """End the run where the last steps were not finite; their lines are written by now."""
        super().on_step_begin()
        self._check_finite()

    def on_step_end(self) -> None:
        """Publish the new weights, and record the step."""
        super().on_step_end()
        before = self._version
        self._publish()
        step = training_step(self._spec, self._step_counts, self._figures, self.global_steps, (before, self._version), self._began)
        asyncio.run(self._run_log.note(step, stack_figures(self._figures, self.global_steps)))

    def on_validate_begin(self) -> None:
        """Note that a validation is running, for the error message of `fit`."""
        super().on_validate_begin()
        self._validating = True

    def on_validate_end(self) -> None:
        """Note the end of the validation."""
        super().on_validate_end()
        self._validating = False

    def _validate(self) -> Any:
        """Run one of verl's validations, and add the score over all of its rollouts: verl's is that of the rollouts with a sample."""
        metrics = super()._validate()
        counts: Counts = ray.get(self._tally.take.remote("val"))
        return metrics | as_metrics(figures_of(counts.score))

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        """Run one of verl's steps, and add this package's metrics to verl's."""
        self._began = time.time()
        self._singletons, self._ratios = [], None
        batch = super().step(metrics, timing_raw)
        counts: Counts = ray.get(self._tally.take.remote("train"))
        counts.attempts = [attempt for attempt in counts.attempts if attempt[0] not in self._singletons]
        self._step_counts = counts
        self._figures = step_figures(counts, self._update(batch, metrics, timing_raw["gen"]))
        metrics.update(as_metrics(self._figures))
        self._warn(counts)
        if wrong := not_finite_in(metrics):
            _log.warning("step %d: %s; verl skipped the update", self.global_steps, wrong)
        self._not_finite = [*self._not_finite, wrong] if wrong else []
        return batch

    def _update(self, batch: Any, metrics: dict[str, Any], rollout_seconds: float) -> Update:
        """Read what the step trained on; rows that verl padded the batch with are none of it."""
        rows = [place for place, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        keys = [batch.keys[place] for place in rows]
        read = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["response_mask", "num_turns"])
        turns = read.pop("num_turns").tolist()  # two for each call (loop.py)
        return Update(
            trajectories=len(rows),
            tokens=int(read.to_padded_tensor()["response_mask"].sum()),
            calls_trained=int(sum(turns)) // 2,
            off_policy=sum(not self._is_current(batch.tags[place]) for place in rows),
            singleton_groups=len(self._singletons),
            metrics=metrics,
            rollout_seconds=rollout_seconds,
            update_seconds=time.time() - self._began - rollout_seconds,
            ratios=self._ratios,
        )

    def _is_current(self, tag: dict[str, Any]) -> bool:
        """Return whether the weights with which the step began sampled this row."""
        return tag["min_global_steps"] == self.global_steps - 1

    def _warn(self, counts: Counts) -> None:
        step, without = self.global_steps, counts.rollouts - counts.sampled
        if (why := counts.without_effect) is not None:
            _log.warning("step %d changes no weights: %s", step, why)
        if refused := counts.refused["sampling_differs"]:
            _log.warning("%s", differing_warning(step, refused, counts.calls, counts.differing))
        if counts.several_choices:
            told, self._told_choices = self._told_choices, True
            _log.warning("%s", choices_warning(step, counts.several_choices, counts.sampled_calls, told=told))
        if without > MANY_WITHOUT_SAMPLE * counts.rollouts:
            losses = lost(self._figures, counts.refused)
            _log.warning("%s", without_sample_warning(step, counts.rollouts, without, losses, counts.failures))

    def _check_finite(self) -> None:
        """Raise DataError where the last NOT_FINITE_STEPS steps were not finite."""
        if len(self._not_finite) >= NOT_FINITE_STEPS:
            raise DataError(
                f"{NOT_FINITE_STEPS} steps in a row were not finite (the last: {self._not_finite[-1]}), so the run ends: lower "
                "actor_rollout_ref.actor.optim.lr, and look at the rewards. verl skipped these updates, so checkpoints have finite weights"
            )

    # --- log-probs before the update

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute log-probs as verl does, and compare them with the captured ones, before anything has changed. Raises DataError."""
        batch = super()._compute_old_log_prob(batch, metrics=metrics)
        bypassed = (self.config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False)
        if not bypassed and getattr(self, "local_trigger_step", 0) == 0:  # later triggers of a step have weights of their own
            self._ratios = self._compare(batch)
        return batch

    def _compare(self, batch: Any) -> tuple[float, float]:
        """Return objective.max_ratio_error and, over rows of the current weights, worst_ratio_error. Raises DataError beyond the limit."""
        fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
        read = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields).to_padded_tensor()
        written = read["response_mask"].bool()
        current = torch.tensor([self._is_current(tag) for tag in batch.tags])
        return compared(read["old_log_probs"], read["rollout_log_probs"], written, current, limit=self._spec.ratio_error_limit)

    # --- credit by calls

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute advantages as verl does, by an estimator that knows what the rows carry."""
        if self._spec.sample_rules.advantages.of_calls:
            read = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
            CARRIED.rows = list(read["extra_fields"])
        return super()._compute_advantage(batch, metrics=metrics)

    # --- singleton groups

    def _sample_comparable(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Sample from the replay buffer, sorted, and without singleton groups."""
        batch, metrics = self._sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        if errors := ray.get(self._tally.errors.remote("train")):
            raise AgentError(errors[0])
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
    """Register the instrumented trainers and the estimator of samples' advantages with verl."""
    register_adv_est(ESTIMATOR)(CARRIED)
    for mode in MODES:
        register_trainer(PREFIX + mode)(instrumented(get_trainer_cls(mode)))
