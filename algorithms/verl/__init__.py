"""Reinforcement learning with verl on Ray, for agents that run anywhere and are read from their traces.

Users construct `VERL` (algorithm.py), which does not import verl. verl's processes run verl's trainers, to which this package adds a data
set (data.py), an agent loop (loop.py) and instrumentation (trainer.py) through verl's extension points. rollouts.py, samples.py, order.py,
keys.py and publish.py do not import verl and are tested without it.

The method `sample` of a trainer's replay buffer is wrapped: it sorts rows (order.py) and drops singleton groups (singletons.py). verl's
extension point for this, `trainer.v1.sampler.custom_sampler`, would replace the whole replay buffer, without `algorithm.filter_groups` and
`sync_refill_failed_groups`; it remains available to users, and their buffers are wrapped in the same way. The following names of verl 0.9.1
are private or replaced, because there is no public alternative:

- `_compute_old_log_prob`, `_compute_advantage` and `_validate` of its trainers, overridden to look at log-probs before an update, to read
  what the samples carry for the estimator of estimator.py, and to add the score of a validation to verl's metrics (trainer.py).

On the CPU only (cpu.py):

- `verl.workers.rollout.base._ROLLOUT_REGISTRY`: registers the rollout backend.
- `verl.utils.distributed.initialize_global_process_group_ray`, replaced: on the CPU it names the CPU's backend twice.
- VERL_ENGINE_DEVICE=cuda: the engines are registered for CUDA and NPU only, but are plain torch.
"""

from __future__ import annotations

from agl_otel.algorithms.verl.algorithm import VERL

__all__ = ["VERL"]
