"""Gathers, page by page, what an export tells of its rows: the pin, and the figures of its report. Pure."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final, cast

import numpy as np

from agl_otel.adapters.bias import Bias, bias_of_attempts
from agl_otel.adapters.masking import MaskRule
from agl_otel.adapters.pins import Pin, Read, line_of
from agl_otel.adapters.records import Reading, Row, Rows, attempts_as
from agl_otel.adapters.sampling import Assumed, unlike_of
from agl_otel.errors import UsageError
from agl_otel.types import VerdictKind
from agl_otel.types.columns import Traces

ASSUMED: Final = Assumed(1.0, temperatures="any")
"""By default GRPO scores a call at its own temperature; a step has calls of one."""
ROWS: Final = ("rows_without_calls", "rows_with_fewer_calls")
"""How many rows GRPO refuses all calls of, and how many a part of them."""


class Exported:
    """The rows of a batch: pages of different rollouts, in the order of the rows. `selection`: Pin.selection."""

    def __init__(self, reading: Reading, rules: Sequence[MaskRule], *, selection: tuple[str, str] | None = None) -> None:
        self._reading, self._rules, self._selection = reading, list(rules), selection
        self._read, self._bias = Read(), Bias()
        self._content = hashlib.sha256()
        self._counts, self._refused, self._breaks = Counter[str](), Counter[str](), Counter[str]()
        self._rewards = set[str]()
        self._training, self._differing = Counter[str](), Counter[str]()

    def add(self, traces: Traces, found: Rows) -> None:
        """Add a page: what was read, and the rows made of it. Rows are serialised one at a time."""
        reading = self._reading
        self._read.add(traces)
        traces = traces.trusting(reading.reward_source or None)
        for row in found.rows:
            self._content.update(line_of(row).encode())
        self._refused.update(found.refused)
        self._breaks.update(found.breaks)
        take = cast("Collection[VerdictKind]", reading.take)
        self._bias.add(bias_of_attempts(traces, take=take, fill_reward=attempts_as(reading).fill_reward, reward_name=reading.reward))
        self._rewards.update(reward.name for rewards in traces.rewards.values() for reward in rewards)
        self._train(found.rows)
        used = {row[name] for row in found.rows for name in ("rollout_id", "rejected_rollout_id") if name in row}
        self._counts.update(
            rows=len(found.rows),
            rollouts=len(traces.rollouts),
            rollouts_used=len(used),
            model_calls=len(traces.calls),
            several_choices=int(traces.calls.several_choices.sum()),
            without_messages=sum("messages" in row and not row["messages"] for row in found.rows),
        )

    def _train(self, rows: Sequence[Row]) -> None:
        """Count what GRPO refuses of rows with log-probs: of other forms nothing, since only a policy gradient compares distributions."""
        given = [] if self._reading.adapter else [row for row in rows if "logprobs" in row]
        temperatures = [math.nan if value is None else value for row in given for value in row["temperature"]]
        found = unlike_of(np.array(temperatures, np.float64), [text or "" for row in given for text in row["sampling"]], ASSUMED)
        differs = found.differs & ~found.greedy
        self._training.update(greedy=int(found.greedy.sum()), sampling_differs=int(differs.sum()))
        self._differing.update(found.counted(differs))
        refused = np.split(found.greedy | differs, np.cumsum([len(row["sampling"]) for row in given])[:-1]) if given else []
        self._counts.update(rows_without_calls=sum(bool(each.all()) for each in refused))
        self._counts.update(rows_with_fewer_calls=sum(bool(each.any()) and not each.all() for each in refused))

    def check_reward(self) -> None:
        """Raise UsageError if no attempt has the requested reward while some have rewards of other names."""
        wanted = self._reading.reward
        if wanted is not None and self._rewards and wanted not in self._rewards:
            raise UsageError(f"no attempt has a reward {wanted!r}: there are {', '.join(sorted(self._rewards))}")

    def pin(self, ids: Sequence[str]) -> Pin:
        """Return the batch's pin, with its rollouts in the order of `ids`."""
        read = self._read
        rollouts = {rollout_id: read.rollouts[rollout_id] for rollout_id in ids if rollout_id in read.rollouts}
        rows, content = self._counts["rows"], self._content.hexdigest()
        return Pin(self._reading, self._rules, rollouts, read.digest, read.evaluations, rows, content, self._selection)

    def figures(self) -> dict[str, Any]:
        """Return the report's figures."""
        return {
            **{name: count for name, count in self._counts.items() if name not in ROWS},
            "refused": dict(self._refused),
            "refused_share": self._bias.shares(),
            "breaks": dict(self._breaks),
            "in_training": {
                **{name: self._counts[name] for name in ROWS},
                "refused": dict(+self._training),
                "differing": dict(self._differing),
            },
            "sha256": self._content.hexdigest(),
        }
