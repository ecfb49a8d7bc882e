"""Requests of attempts at paths that the proxy does not have: no model calls, so nothing else records them."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from typing import Final

from agl_otel_hook import conventions
from agl_otel_hook.context import Key

MAX_ATTEMPTS: Final = 100
MAX_PATHS: Final = 8
OTHERS: Final = "others"
_LONGEST: Final = 200  # characters of a path
_SCOPED: Final = re.compile(r"/rollout/([^/]+)/attempt/([^/]+)(/.*)?")


def scoped(path: str) -> tuple[Key | None, str]:
    """Return the attempt in a path, if any, and the path below it."""
    found = _SCOPED.fullmatch(path)
    if found is None or not all(map(conventions.is_valid_id, found.group(1, 2))):
        return None, path
    return (found[1], found[2]), found[3] or "/"


class UnknownPaths:
    """Counts the requests of the latest attempts that made any, by path."""

    def __init__(self, *, attempts: int = MAX_ATTEMPTS, paths: int = MAX_PATHS) -> None:
        self._most_attempts, self._most_paths = attempts, paths
        self._counts: OrderedDict[Key, Counter[str]] = OrderedDict()

    def add(self, key: Key, path: str) -> None:
        """Count a request of the attempt."""
        counts = self._counts.setdefault(key, Counter())
        self._counts.move_to_end(key)
        shown = path[:_LONGEST]
        counts[shown if shown in counts or len(counts) < self._most_paths else OTHERS] += 1
        if len(self._counts) > self._most_attempts:
            self._counts.popitem(last=False)

    def as_json(self) -> dict[str, dict[str, int]]:
        """Return {"ROLLOUT/ATTEMPT": {path: count}}."""
        return {"/".join(key): dict(counts) for key, counts in self._counts.items()}
