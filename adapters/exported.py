"""Gathers, page by page, what an export tells of its rows: the pin, and the figures of its report. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, cast

from agl_otel.adapters.bias import Bias, bias_of_attempts
from agl_otel.adapters.masking import MaskRule
from agl_otel.adapters.pins import Pin, Read, line_of
from agl_otel.adapters.records import Reading, Rows
from agl_otel.errors import UsageError
from agl_otel.types import VerdictKind
from agl_otel.types.columns import Traces


class Exported:
    """The rows of a batch: pages of different rollouts, in the order of the rows."""

    def __init__(self, reading: Reading, rules: Sequence[MaskRule]) -> None:
        self._reading, self._rules = reading, list(rules)
        self._read, self._bias = Read(), Bias()
        self._content = hashlib.sha256()
        self._counts, self._refused, self._breaks = Counter[str](), Counter[str](), Counter[str]()
        self._rewards = set[str]()

    def add(self, traces: Traces, found: Rows) -> None:
        """Add a page: what was read, and the rows made of it. Rows are serialised one at a time."""
        reading = self._reading
        self._read.add(traces)
        for row in found.rows:
            self._content.update(line_of(row).encode())
        self._refused.update(found.refused)
        self._breaks.update(found.breaks)
        take = cast("Collection[VerdictKind]", reading.take)
        self._bias.add(bias_of_attempts(traces, take=take, fill_reward=reading.fill_reward, reward_name=reading.reward))
        self._rewards.update(reward.name for rewards in traces.rewards.values() for reward in rewards)
        used = {row[name] for row in found.rows for name in ("rollout_id", "rejected_rollout_id") if name in row}
        self._counts.update(
            rows=len(found.rows),
            rollouts=len(traces.rollouts),
            rollouts_used=len(used),
            model_calls=len(traces.calls),
            several_choices=int(traces.calls.several_choices.sum()),
            without_messages=sum("messages" in row and not row["messages"] for row in found.rows),
        )

    def check_reward(self) -> None:
        """Raise UsageError if no attempt has the requested reward while some have rewards of other names."""
        wanted = self._reading.reward
        if wanted is not None and self._rewards and wanted not in self._rewards:
            raise UsageError(f"no attempt has a reward {wanted!r}: there are {', '.join(sorted(self._rewards))}")

    def pin(self, ids: Sequence[str]) -> Pin:
        """Return the batch's pin, with its rollouts in the order of `ids`."""
        read = self._read.rollouts
        rollouts = {rollout_id: read[rollout_id] for rollout_id in ids if rollout_id in read}
        return Pin(self._reading, self._rules, rollouts, self._read.digest, self._counts["rows"], self._content.hexdigest())

    def figures(self) -> dict[str, Any]:
        """Return the report's figures."""
        return {
            **self._counts,
            "refused": dict(self._refused),
            "refused_share": self._bias.shares(),
            "breaks": dict(self._breaks),
            "sha256": self._content.hexdigest(),
        }
