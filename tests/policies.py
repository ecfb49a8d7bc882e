"""The warm-started tiny model, made once for all workers of a run of the tests: it takes a processor several seconds."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path


def tiny_policy_in(shared: Path) -> Path:
    """The folder of `make_policy(seed=0)` below `shared`, a folder of this run of the tests; whoever comes first makes it, all others wait.

    It gets its name when it is whole, and the lock ends with the process that holds it: a maker that dies leaves nothing that another takes
    for a model.
    """
    made = shared / "tiny-policy"
    with (shared / "tiny-policy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            import torch

            from agl_otel.algorithms.grpo.tiny import make_policy

            torch.set_num_threads(1)
            make_policy(place := Path(tempfile.mkdtemp(dir=shared)))
            place.rename(made)
    return made
