"""Adapters: what was observed in, training samples out. Pure functions on columns and spans; no I/O."""

from __future__ import annotations

from agl_otel.adapters.messages import to_messages
from agl_otel.adapters.trajectories import TrajectoryBatch, to_trajectories

__all__ = ["TrajectoryBatch", "to_messages", "to_trajectories"]
