from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from agl_otel.algorithms.verl.order import in_order

TASKS = [f"{number:08x}-0000-4000-8000-000000000000" for number in (9, 3, 7)]  # as they were asked for; verl draws them anew in each run
ROWS = [(task, session, number) for task in TASKS for session in range(11) for number in range(2)]


@dataclass
class Rows:
    keys: list[str]
    tags: list[str]

    def reorder(self, indexes: list[int]) -> None:
        self.keys, self.tags = [self.keys[i] for i in indexes], [self.tags[i] for i in indexes]


class Replay:
    """A replay buffer that returns rows in the order of arrival."""

    def __init__(self, seed: int) -> None:
        self.prompt_global_steps = {"val": {"another": 1}, "train": dict.fromkeys([*TASKS, "not finished"], 4)}
        came = random.Random(seed).sample(ROWS, len(ROWS))
        self._keys = ["{}_{}_{}".format(*row) for row in came]

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Rows, dict[str, Any]]:
        assert (global_steps, partition_id, batch_size) == (4, "train", 3)
        return Rows(list(self._keys), [f"of {key}" for key in self._keys]), {"kept": 1}


def test_the_order_of_rows_is_independent_of_when_rollouts_ended() -> None:
    for seed in range(3):
        rows, metrics = in_order(Replay(seed))(global_steps=4, partition_id="train", batch_size=3)
        assert rows.keys == ["{}_{}_{}".format(*row) for row in ROWS]
        assert rows.tags == [f"of {key}" for key in rows.keys] and metrics == {"kept": 1}
