"""1.0 where the agent's query gives the rows that the right one gives, in any order; 0.0 otherwise, also where it cannot be run."""

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
