"""0.3's `store.mongo`: a class whose error names PostgreSQL as replacement (agl_otel.compat.stores)."""

from __future__ import annotations

from agl_otel.store import MongoLightningStore

__all__ = ["MongoLightningStore"]
