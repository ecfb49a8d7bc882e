"""Reinforcement learning by verl on Ray, with agents that run anywhere and are read from their traces.

algorithm.py is what users touch (`VERL`); it imports no verl. What runs in verl's processes is its own trainer, with a dataset (data.py),
an agent loop (loop.py), and watched trainers (trainer.py) by the ways that verl has for them. rollouts.py, samples.py, order.py, keys.py,
publish.py know no verl either, and are tested without it.

`sample` of a trainer's replay buffer is replaced by one that sorts (order.py) and leaves out what is alone. verl's own way,
`trainer.v1.sampler.custom_sampler`, is a replay buffer of the user's own in the place of verl's, which then gets neither
`algorithm.filter_groups` nor `sync_refill_failed_groups`: it is left to users, and their buffer is wrapped as verl's are. Names of verl
0.9.1 that are private, or replaced, because there is no public way; all for the CPU (cpu.py), none on GPUs:

- `verl.workers.rollout.base._ROLLOUT_REGISTRY`: where a trainer's side of a rollout backend is named.
- `verl.utils.distributed.initialize_global_process_group_ray`, replaced: it names the CPU's backend twice where the device is the CPU.
- VERL_ENGINE_DEVICE=cuda: its engines are registered for CUDA and NPU, and are plain torch.
"""

from __future__ import annotations

from agl_otel.algorithms.verl.algorithm import VERL

__all__ = ["VERL"]
