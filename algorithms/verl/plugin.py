"""Imported by verl in each of its processes (VERL_USE_EXTERNAL_MODULES), before anything else of it is used."""

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


# not sooner: verl's trainers take a processor four seconds to import, and most of its processes have none
wrapt.register_post_import_hook(_register, "verl.trainer.ppo.v1")
