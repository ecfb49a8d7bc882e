"""0.3's `store.collection_based`: agl_otel.store."""

from __future__ import annotations

from agl_otel.store import CollectionBasedLightningStore

__all__ = ["CollectionBasedLightningStore"]
