"""The SQL of the traces: schema.sql, and one file per named query."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
REFILLS: Final = ("refill_trace_id_ts", "refill_rollout_summary", "refill_services")
"""Named queries that rewrite what the materialized views derive from one batch."""


@cache
def named_query(name: str) -> str:
    """Return the text of NAME.sql."""
    return (_HERE / f"{name}.sql").read_text()
