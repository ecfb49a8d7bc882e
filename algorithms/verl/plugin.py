"""Register this package's platform and trainers; verl imports it first in each of its processes (VERL_USE_EXTERNAL_MODULES)."""

from __future__ import annotations

import os
from typing import Any

import wrapt

if os.environ.get("VERL_PLATFORM") == "cpu":
    from agl_otel.algorithms.verl import cpu

    cpu.register()


def _register(_: Any) -> None:
    from agl_otel.algorithms.verl.trainer import register_trainers

    register_trainers()


# deferred: verl's trainers take four seconds of CPU time to import, and most of its processes do not use them
wrapt.register_post_import_hook(_register, "verl.trainer.ppo.v1")
