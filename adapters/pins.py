"""A pin of a batch: its rollouts, how far and how each was read, and a hash of the rows, so that it can be reproduced or compared.

Pure: dataclasses and JSON. Observations never change, but late spans, further attempts and deletions may follow.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from agl_otel.adapters.masking import MaskRule
from agl_otel.adapters.records import Reading, Row
from agl_otel.errors import ConflictError, DataError
from agl_otel.types import AttemptedRollout
from agl_otel.types.columns import Traces, joined_digest

VERSION = 3
EXAMPLES = 10


@dataclass
class Read:
    """How far rollouts were read; grows by each page of them."""

    rollouts: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    """{rollout id: (latest attempt, highest sequence number read)}."""
    digest: str = ""
    """columns.Traces.digest: a hash of the identities of all spans that were read."""
    evaluations: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """columns.Traces.evaluations."""

    def add(self, traces: Traces) -> None:
        """Add a page."""
        for each in traces.rollouts:
            attempt_id = each.attempt.attempt_id if isinstance(each, AttemptedRollout) else ""
            self.rollouts[each.rollout_id] = (attempt_id, traces.highest_sequence.get(each.rollout_id, 0))
        self.digest = joined_digest(self.digest, traces.digest)
        self.evaluations |= traces.evaluations


@dataclass(frozen=True)
class Pin:
    """The origin of a batch."""

    reading: Reading
    rules: list[MaskRule]
    rollouts: dict[str, tuple[str, int]]
    digest: str
    """Of Read, as `rollouts`."""
    evaluations: dict[str, list[int]]
    """Likewise: the batch is made again with these, whatever feedback has come since."""
    rows: int
    content: str
    """SHA-256 of the rows."""
    selection: tuple[str, str] | None = None
    """Name with version, and digest, of the selection that the rollouts are of; None: of none."""

    def dumps(self) -> str:
        """Serialise as JSON, without the rules' salts, which are secrets."""
        rules = [{**asdict(rule), "salt": ""} for rule in self.rules]
        return json.dumps({"version": VERSION, **asdict(self), "rules": rules}, indent=1)

    @classmethod
    def loads(cls, text: str | bytes, where: str) -> Pin:
        """Parse JSON. Raises DataError, which names `where`."""
        try:
            held = json.loads(text)
            if held.pop("version") != VERSION:
                raise ValueError("another version")
            reading = _reading(held.pop("reading"))
            rules = [MaskRule(**rule) for rule in held.pop("rules")]
            rollouts = {name: (attempt, int(number)) for name, (attempt, number) in held.pop("rollouts").items()}
            selection = held.pop("selection")
            return cls(reading, rules, rollouts, selection=tuple(selection) if selection else None, **held)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{where} is no pin of this version of agl-otel ({error!r}): `agl-otel export` writes one beside its file"
            ) from None

    def check(self, again: Pin) -> None:
        """Raise ConflictError if the batch that was made again is another one."""
        if changes := self.changes(Read(again.rollouts, again.digest)):
            raise ConflictError(f"the batch cannot be made again, {len(changes)} things have changed: {'; '.join(changes[:5])}")
        if again.content != self.content:
            raise ConflictError(
                "the same spans were read, and other rows came out: another version of agl-otel wrote the pin, or other rules"
            )

    def changes(self, read: Read) -> list[str]:
        """Return messages about the differences of a new read; empty if it is the same."""
        now = read.rollouts
        messages = [f"rollout {name} is gone" for name in self.rollouts if name not in now]
        for name, (attempt, number) in self.rollouts.items():
            new_attempt, new_number = now.get(name, (attempt, number))
            if new_attempt != attempt:
                messages.append(f"rollout {name} has another latest attempt: {new_attempt}, not {attempt}")
            if new_number != number:
                messages.append(f"rollout {name} was read up to sequence {number}, and goes up to {new_number} now")
        if not messages and read.digest != self.digest:
            messages.append("spans came late with sequence numbers below the highest, or are gone")
        return messages


def _reading(held: dict[str, Any]) -> Reading:
    known = {each.name for each in fields(Reading)}
    given: dict[str, Any] = {name: value for name, value in held.items() if name in known}
    given |= {name: tuple(given[name]) for name in ("take", "reward_source") if name in given}
    return Reading(**given)


def line_of(row: Row) -> str:
    """Serialise a row as a canonical line of JSON."""
    return json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n"


class Differences:
    """Compares two conversions of the same rollouts page by page: rows by rollout, attempt and place."""

    def __init__(self) -> None:
        self._counts, self._changed = Counter[str](), Counter[str]()
        self._examples: list[dict[str, Any]] = []
        self._means = _Mean(), _Mean()

    def add(self, old: Sequence[Row], new: Sequence[Row]) -> None:
        """Add the rows of a page."""
        for mean, rows in zip(self._means, (old, new), strict=True):
            mean.add(rows)
        before, after = _keyed(old), _keyed(new)
        only_old, only_new = len(before.keys() - after.keys()), len(after.keys() - before.keys())
        self._counts.update(old=len(old), new=len(new), only_old=only_old, only_new=only_new, same=0)
        for key in before.keys() & after.keys():
            one, other = before[key], after[key]
            names = sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))
            self._counts["same"] += not names
            self._changed.update(names)
            if names and len(self._examples) < EXAMPLES:
                short = {name: [one.get(name), other.get(name)] for name in names if name in ("reward", "agent", "calls", "verdict")}
                self._examples.append({"rollout_id": key[0], "attempt_id": key[1], "fields": names, **short})

    def report(self) -> dict[str, Any]:
        """Return {old, new, only_old, only_new, same, changed: {field: count}, examples, reward_mean: [old, new]}."""
        return {
            **self._counts,
            "changed": dict(sorted(self._changed.items())),
            "examples": sorted(self._examples, key=lambda example: (example["rollout_id"], example["attempt_id"])),
            "reward_mean": [mean.value for mean in self._means],
        }


class _Mean:
    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, rows: Sequence[Row]) -> None:
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        self._sum += sum(rewards)
        self._count += len(rewards)

    @property
    def value(self) -> float | None:
        return round(self._sum / self._count, 6) if self._count else None


def _keyed(rows: Sequence[Row]) -> Mapping[tuple[str, str, int], Row]:
    counts: dict[tuple[str, str], int] = {}
    keyed: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        key = (row["rollout_id"], row["attempt_id"])
        counts[key] = counts.get(key, 0) + 1
        keyed[(*key, counts[key])] = row
    return keyed
