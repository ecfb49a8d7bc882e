"""The data set for verl's data loaders: tasks from files with one JSON value per line. verl does not interpret the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset


class Tasks(Dataset[dict[str, Any]]):
    """The tasks in `data_files`, the files train.jsonl or val.jsonl of a run; built by verl (`data.custom_cls`)."""

    def __init__(self, data_files: str | Sequence[str], tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1) -> None:
        files = [data_files] if isinstance(data_files, str) else list(data_files)
        self._mode = Path(files[0]).stem
        lines = [line for file in files for line in Path(file).read_text().splitlines()]
        self._tasks = lines[:max_samples] if max_samples >= 0 else lines

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, place: int) -> dict[str, Any]:
        """Return a row for verl's trainer, which needs `raw_prompt` to count rows."""
        return {
            "raw_prompt": [{"role": "user", "content": self._tasks[place]}],
            "task": self._tasks[place],
            "mode": self._mode,
            "index": place,
            "data_source": "agl_otel",
            "reward_model": {"ground_truth": None},
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
        }
