"""0.3's `store.mongo`: a name that says to use PostgreSQL (agl_otel.compat.stores)."""

from __future__ import annotations

from agl_otel.store import MongoLightningStore

__all__ = ["MongoLightningStore"]
