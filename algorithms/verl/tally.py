"""Collect the counts of all machines' agent loops in one Ray actor, from which the trainer takes them for a step's metrics."""

from __future__ import annotations

from typing import Any, Final

from agl_otel.algorithms.verl.samples import Counts

NAME: Final = "agl_otel_tally"


class Tally:
    """Counts by mode; runs as a Ray actor."""

    def __init__(self) -> None:
        self._counts: dict[str, Counts] = {}

    def add(self, mode: str, counts: Counts) -> None:
        """Add counts."""
        self._counts.setdefault(mode, Counts()).add(counts)

    def errors(self, mode: str) -> list[str]:
        """Return Counts.errors since the last call of `take`."""
        return list(self._counts.get(mode, Counts()).errors)

    def take(self, mode: str) -> Counts:
        """Return and reset the counts since the last call."""
        return self._counts.pop(mode, Counts())


def make_tally(ray: Any) -> Any:
    """Create the run's tally actor and return its handle, with which it ends."""
    return ray.remote(Tally).options(name=NAME, num_cpus=0, get_if_exists=True).remote()


def find_tally(ray: Any) -> Any:
    """Return the handle of the run's tally actor, which the trainer has created."""
    return ray.get_actor(NAME)
