"""0.3's `store.base`: agl_otel.store."""

from __future__ import annotations

from agl_otel.compat.stores import UNSET, LightningStoreCapabilities, LightningStoreStatistics

__all__ = ["UNSET", "LightningStoreCapabilities", "LightningStoreStatistics"]
