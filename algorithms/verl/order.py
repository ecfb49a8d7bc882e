"""Sort the rows of a step into a reproducible order. Does not import verl.

Trajectories enter verl's replay buffer in the order in which their rollouts ended, and floating-point sums depend on the order: without
sorting, no run would be reproducible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Batch(Protocol):
    """A batch of verl's replay buffer; the keys of its rows are `{task's uid}_{session}_{number of the sample}`."""

    keys: list[str]

    def reorder(self, indexes: list[int]) -> None:
        """Reorder the rows with all their fields."""
        ...


class Buffer(Protocol):
    """verl's replay buffer."""

    @property
    def prompt_global_steps(self) -> Mapping[str, Mapping[str, int]]:
        """{partition: {uid: step}}, in the order in which tasks were requested."""
        ...

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Batch, dict[str, Any]]:
        """Wait for a batch and remove it from the buffer."""
        ...


def in_order(buffer: Buffer) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Wrap `buffer.sample` to sort the rows by task, in the order of the requests, then session, then sample."""
    sample = buffer.sample

    def sample_in_order(global_steps: int, partition_id: str, batch_size: int) -> tuple[Batch, dict[str, Any]]:
        batch, metrics = sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        place = {uid: number for number, uid in enumerate(buffer.prompt_global_steps[partition_id])}

        def row(index: int) -> tuple[int, int, int]:
            uid, session, number = batch.keys[index].rsplit("_", 2)
            return place[uid], int(session), int(number)

        batch.reorder(sorted(range(len(batch.keys)), key=row))
        return batch, metrics

    return sample_in_order
