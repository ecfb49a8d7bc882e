"""A pinned batch: which rollouts, how much of each was read, how, and what came out; so that it can be made again, or be shown to differ.

Pure: dataclasses and JSON. What was observed never changes, but more may come: late spans, a further attempt, a deletion.
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
    """What a batch was made of."""

    reading: Reading
    rules: list[MaskRule]
    rollouts: dict[str, tuple[str, int]]
    """{rollout id: (its latest attempt, the highest sequence number read)}."""
    digest: str
    """columns.Traces.digest: a hash of the identities of all spans that were read."""
    rows: int
    content: str
    """SHA-256 of the rows."""

    @classmethod
    def of(cls, reading: Reading, rules: Sequence[MaskRule], traces: Traces, rows: Sequence[Row]) -> Pin:
        """The pin of what was just read. No more than one row is text at a time."""
        return cls(reading, list(rules), read_of(traces), traces.digest, len(rows), content_hash(map(line_of, rows)))

    def dumps(self) -> str:
        """As JSON. The salt of a rule is a secret and is left out."""
        rules = [{**asdict(rule), "salt": ""} for rule in self.rules]
        return json.dumps({"version": VERSION, **asdict(self), "rules": rules}, indent=1)

    @classmethod
    def loads(cls, text: str | bytes, where: str) -> Pin:
        """From JSON. Raises DataError that names `where`."""
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
        """What is otherwise now, in words; nothing where the same was read again."""
        now = read_of(traces)
        said = [f"rollout {name} is gone" for name in self.rollouts if name not in now]
        for name, (attempt, number) in self.rollouts.items():
            new_attempt, new_number = now.get(name, (attempt, number))
            if new_attempt != attempt:
                said.append(f"rollout {name} has another latest attempt: {new_attempt}, not {attempt}")
            if new_number != number:
                said.append(f"rollout {name} was read up to sequence {number}, and goes up to {new_number} now")
        if not said and traces.digest != self.digest:
            said.append("spans came late with sequence numbers below the highest, or are gone")
        return said


def _reading(held: dict[str, Any]) -> Reading:
    known = {each.name for each in fields(Reading)}
    given: dict[str, Any] = {name: value for name, value in held.items() if name in known}
    if "take" in given:
        given["take"] = tuple(given["take"])
    return Reading(**given)


def read_of(traces: Traces) -> dict[str, tuple[str, int]]:
    """{rollout id: (latest attempt, highest sequence number)}."""
    return {
        r.rollout_id: (r.attempt.attempt_id if isinstance(r, AttemptedRollout) else "", traces.highest_sequence.get(r.rollout_id, 0))
        for r in traces.rollouts
    }


def content_hash(lines: Iterable[str]) -> str:
    """SHA-256 of the rows as lines of JSON."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
    return digest.hexdigest()


def line_of(row: Row) -> str:
    """A row as a line of JSON, the same for equal rows."""
    return json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n"


def differences(old: Sequence[Row], new: Sequence[Row]) -> dict[str, Any]:
    """{only_old, only_new, same, changed: {field: how many}, examples}: rows are the same where rollout, attempt and place in it are."""
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
