"""Reward 1.0 if the agent's query returns the same rows as the correct one, in any order; else 0.0, also on an error."""

from __future__ import annotations

import sqlite3
from typing import Any

from databases import rows


def grade(task: dict[str, Any], answer: str) -> float:
    try:
        found = rows(task["database"], answer.strip())
    except sqlite3.Error:
        return 0.0
    return float(sorted(map(repr, found)) == sorted(map(repr, rows(task["database"], task["query"]))))
