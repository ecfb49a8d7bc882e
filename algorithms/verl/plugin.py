"""Imported by verl in each of its processes (VERL_USE_EXTERNAL_MODULES), before anything else of it is used."""

from __future__ import annotations

import os

if os.environ.get("VERL_PLATFORM") == "cpu":
    from agl_otel.algorithms.verl import cpu

    cpu.register()

from agl_otel.algorithms.verl.trainer import register_trainers

register_trainers()
