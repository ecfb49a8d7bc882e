"""0.3's `trainer`: agl_otel.compat.trainer."""

from __future__ import annotations

from agl_otel.compat.trainer import Trainer, build_component

__all__ = ["Trainer", "build_component"]
