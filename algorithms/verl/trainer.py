"""verl's own trainers, watched: after each update they say which weights are served, and with each step what became of its rollouts.

`register_trainer` is verl's way to add a trainer, and all that is overridden are its hooks (`on_…`), `step` and `fit`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import ray  # pyright: ignore[reportMissingImports] - of the extra [verl], as the next ones
from omegaconf import open_dict  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer  # pyright: ignore[reportMissingImports]

from agl_otel.algorithms.run_log import RunLog
from agl_otel.algorithms.verl.order import in_order
from agl_otel.algorithms.verl.publish import Publisher, sampling_of
from agl_otel.algorithms.verl.samples import Counts, figures_of, nothing_left
from agl_otel.algorithms.verl.spec import SECTION, Spec, step_of
from agl_otel.algorithms.verl.tally import make_tally
from agl_otel.errors import DataError
from agl_otel.store import Store

MODES: Final = ("sync", "colocate_async", "separate_async")
PREFIX: Final = "agl_otel_"
"""Before the name of a trainer of verl's in `trainer.v1.trainer_mode`."""
_log = logging.getLogger(__name__)


def watched(trainer: Any) -> Any:
    """A subclass of one of verl's trainers that publishes weights versions and counts."""

    class Watched(trainer):
        def __init__(self, config: Any) -> None:
            self._spec = Spec.of(config[SECTION])
            with open_dict(config):
                config.trainer.v1.trainer_mode = self._spec.trainer_mode  # verl looks at its own names
            self._tally = make_tally(ray)
            self._store = Store(self._spec.store)
            self._version = ""
            self._validating = False
            self._stepped = Counts()
            self._began = 0.0
            self._figures: dict[str, float] = {}
            self._told = RunLog(self._store, run_id=self._spec.run_id, algorithm="verl")
            super().__init__(config)

        def fit(self, agent_loop_manager: Any) -> None:
            try:
                super().fit(agent_loop_manager)
            except Exception as error:
                what = f"the validation after step {self.global_steps}" if self._validating else f"step {self.global_steps}"
                counts: Counts = ray.get(self._tally.take.remote("val" if self._validating else "train"))
                if told := nothing_left(counts, what):
                    raise DataError(told) from error
                raise

        def on_init_end(self) -> None:
            super().on_init_end()
            self.replay_buffer.sample = in_order(self.replay_buffer)
            self._publish()

        def on_step_end(self) -> None:
            super().on_step_end()
            before = self._version
            self._publish()
            step = step_of(self._spec, self._stepped, self.global_steps, (before, self._version), self._began)
            asyncio.run(self._told.note(step, self._figures))

        def on_validate_begin(self) -> None:
            super().on_validate_begin()
            self._validating = True

        def on_validate_end(self) -> None:
            super().on_validate_end()
            self._validating = False
            _log.info("validation: %s", ray.get(self._tally.take.remote("val")).metrics)

        def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
            self._began = time.time()
            batch = super().step(metrics, timing_raw)
            counts: Counts = ray.get(self._tally.take.remote("train"))
            if counts.reward_least == counts.reward_most:
                _log.warning("step %d teaches nothing: the rewards are all %s", self.global_steps, counts.reward_least)
            metrics.update(counts.metrics)
            self._stepped = counts
            self._figures = {"step": float(self.global_steps), **figures_of(metrics)}
            return batch

        def _publish(self) -> None:
            addresses = self.llm_server_manager.get_addresses()
            publisher = Publisher(self._store, self._spec, sampling_of(self.config.actor_rollout_ref.rollout))
            self._version = asyncio.run(publisher.publish(addresses, self.global_steps))

    return Watched


def register_trainers() -> None:
    """Have verl know them."""
    for mode in MODES:
        register_trainer(PREFIX + mode)(watched(get_trainer_cls(mode)))
