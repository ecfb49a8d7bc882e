"""A pin of a batch: its rollouts, how far and how each was read, and a hash of the rows, so that it can be reproduced or compared.

Pure: dataclasses and JSON. Observations never change, but late spans, further attempts and deletions may follow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from agl_otel.adapters.masking import MaskRule
from agl_otel.adapters.records import Reading, Row
from agl_otel.errors import DataError
from agl_otel.types import AttemptedRollout
from agl_otel.types.columns import Traces

VERSION = 1


@dataclass(frozen=True)
class Pin:
    """The origin of a batch."""

    reading: Reading
    rules: list[MaskRule]
    rollouts: dict[str, tuple[str, int]]
    """{rollout id: (latest attempt, highest sequence number read)}."""
    digest: str
    """columns.Traces.digest: a hash of the identities of all spans that were read."""
    rows: int
    content: str
    """SHA-256 of the rows."""

    @classmethod
    def of(cls, reading: Reading, rules: Sequence[MaskRule], traces: Traces, rows: Sequence[Row]) -> Pin:
        """Make the pin of a batch. Rows are serialised one at a time."""
        return cls(reading, list(rules), read_of(traces), traces.digest, len(rows), content_hash(map(line_of, rows)))

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
            return cls(reading, rules, rollouts, **held)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{where} is no pin of this version of agl-otel ({error!r}): `agl-otel export` writes one beside its file"
            ) from None

    def changes(self, traces: Traces) -> list[str]:
        """Return messages about the differences of a new read; empty if it is the same."""
        now = read_of(traces)
        messages = [f"rollout {name} is gone" for name in self.rollouts if name not in now]
        for name, (attempt, number) in self.rollouts.items():
            new_attempt, new_number = now.get(name, (attempt, number))
            if new_attempt != attempt:
                messages.append(f"rollout {name} has another latest attempt: {new_attempt}, not {attempt}")
            if new_number != number:
                messages.append(f"rollout {name} was read up to sequence {number}, and goes up to {new_number} now")
        if not messages and traces.digest != self.digest:
            messages.append("spans came late with sequence numbers below the highest, or are gone")
        return messages


def _reading(held: dict[str, Any]) -> Reading:
    known = {each.name for each in fields(Reading)}
    given: dict[str, Any] = {name: value for name, value in held.items() if name in known}
    if "take" in given:
        given["take"] = tuple(given["take"])
    return Reading(**given)


def read_of(traces: Traces) -> dict[str, tuple[str, int]]:
    """Return {rollout id: (latest attempt, highest sequence number)}."""
    return {
        r.rollout_id: (r.attempt.attempt_id if isinstance(r, AttemptedRollout) else "", traces.highest_sequence.get(r.rollout_id, 0))
        for r in traces.rollouts
    }


def content_hash(lines: Iterable[str]) -> str:
    """Return the SHA-256 of rows given as lines of JSON."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
    return digest.hexdigest()


def line_of(row: Row) -> str:
    """Serialise a row as a canonical line of JSON."""
    return json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n"


def differences(old: Sequence[Row], new: Sequence[Row]) -> dict[str, Any]:
    """Compare rows by rollout, attempt and place; return {only_old, only_new, same, changed: {field: count}, examples}."""
    before, after = _keyed(old), _keyed(new)
    changed: dict[str, int] = {}
    examples: list[dict[str, Any]] = []
    same = 0
    for key in before.keys() & after.keys():
        names = sorted(n for n in before[key].keys() | after[key].keys() if before[key].get(n) != after[key].get(n))
        same += not names
        for name in names:
            changed[name] = changed.get(name, 0) + 1
        if names and len(examples) < 10:
            short = {
                name: [before[key].get(name), after[key].get(name)] for name in names if name in ("reward", "agent", "calls", "verdict")
            }
            examples.append({"rollout_id": key[0], "attempt_id": key[1], "fields": names, **short})
    return {
        "old": len(old),
        "new": len(new),
        "only_old": len(before.keys() - after.keys()),
        "only_new": len(after.keys() - before.keys()),
        "same": same,
        "changed": dict(sorted(changed.items())),
        "examples": sorted(examples, key=lambda example: (example["rollout_id"], example["attempt_id"])),
        "reward_mean": [_mean(old), _mean(new)],
    }


def _keyed(rows: Sequence[Row]) -> Mapping[tuple[str, str, int], Row]:
    counts: dict[tuple[str, str], int] = {}
    keyed: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        key = (row["rollout_id"], row["attempt_id"])
        counts[key] = counts.get(key, 0) + 1
        keyed[(*key, counts[key])] = row
    return keyed


def _mean(rows: Sequence[Row]) -> float | None:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return round(sum(rewards) / len(rewards), 6) if rewards else None
