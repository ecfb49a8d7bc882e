"""verl's own trainers, watched: after each update they say which weights are served, and with each step what became of its rollouts.

`register_trainer` is verl's way to add a trainer, and all that is overridden are its hooks (`on_init_end`, `on_step_end`, `step`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import aiohttp
import ray  # pyright: ignore[reportMissingImports] - of the extra [verl], as the next ones
from omegaconf import open_dict  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer  # pyright: ignore[reportMissingImports]

from agl_otel.algorithms.verl.publish import Publisher, sampling_of
from agl_otel.algorithms.verl.samples import figures_of
from agl_otel.algorithms.verl.spec import SECTION, Spec
from agl_otel.algorithms.verl.tally import make_tally
from agl_otel.errors import AglError
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
            super().__init__(config)

        def on_init_end(self) -> None:
            super().on_init_end()
            self._publish()

        def on_step_end(self) -> None:
            super().on_step_end()
            self._publish()

        def on_validate_end(self) -> None:
            super().on_validate_end()
            _log.info("validation: %s", ray.get(self._tally.take.remote("val")).metrics)

        def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
            try:
                return super().step(metrics, timing_raw)
            finally:
                counts = ray.get(self._tally.take.remote("train")).metrics
                metrics.update(counts)
                if not counts["agl/samples"]:
                    _log.error("step %d has nothing to train on: %s", self.global_steps, counts)
                self._record(metrics)

        def _publish(self) -> None:
            addresses = self.llm_server_manager.get_addresses()
            publisher = Publisher(self._store, self._spec, sampling_of(self.config.actor_rollout_ref.rollout))
            asyncio.run(publisher.publish(addresses, self.global_steps))

        def _record(self, metrics: dict[str, Any]) -> None:
            figures = {"step": float(self.global_steps), **figures_of(metrics)}
            try:
                asyncio.run(self._store.record_figures(figures, algorithm="verl"))
            except (AglError, aiohttp.ClientError) as error:
                _log.warning("the figures of step %d are in no metrics: %s", self.global_steps, error)

    return Watched


def register_trainers() -> None:
    """Have verl know them."""
    for mode in MODES:
        register_trainer(PREFIX + mode)(watched(get_trainer_cls(mode)))
