"""Batches of attempts that are chosen from traces: which are left in at each step, and the table with a digest that comes of it. Pure.

The table is JSON lines, a row for each attempt, in canonical form, so that its SHA-256 is that of the file. selection.py, by contrast,
chooses among the attempts of one conversion by their rewards.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from agl_otel.adapters.pins import line_of
from agl_otel.adapters.selection import task_key
from agl_otel.errors import DataError
from agl_otel.types import AttemptedRollout, Rollout
from agl_otel.types.selections import Gone, Selected

K = TypeVar("K", bound=Hashable)
_SYSTEM: Final = ("system", "developer")
_FRAME: Final = ("role", "type")
"""Fields of messages and their parts that say nothing of a task."""
LEFT_OUT: Final = {
    "not_in_queue": "the queue has no such rollout: it was deleted, or its spans came without one",
    "not_ended": "it has not ended, or has no attempt",
    "replaced": "a later attempt of its rollout has replaced it",
    "trial": "a trial, made by `agl-otel run` or `doctor`",
    "held_out": "of mode val or test, whose tasks score the training (--over takes them)",
    "other_window": "not of the run, the modes or the time that were asked for (--run, --over, --since)",
    "not_failed": "it did not fail (--failed, --below)",
    "other_cluster": "another thing failed (--cluster)",
    "near_duplicate": "its task is almost another one, which was enqueued before (--near)",
    "beyond_task": "its task has others enough (--per-task)",
    "beyond_cluster": "its cluster has others enough (--per-cluster)",
    "beyond_top": "others come before it (--top)",
}
"""{reason for leaving out an attempt: its text}, in the order of the steps."""


def lines_of(rows: Iterable[Selected]) -> str:
    """Return the table as canonical JSON lines."""
    return "".join(line_of(row.model_dump()) for row in rows)


def digest_of(lines: str) -> str:
    """Return the digest of a table in canonical JSON lines: its SHA-256, in hex."""
    return hashlib.sha256(lines.encode()).hexdigest()


def rows_in(lines: str, digest: str, where: str) -> list[Selected]:
    """Read a table. Raises DataError, which names `where`, if it is not the one of this digest, or no table."""
    if (found := digest_of(lines)) != digest:
        raise DataError(
            f"{where} is damaged or was edited: its rows have the digest {found[:16]}…, not {digest[:16]}…; select again under its name"
        )
    try:
        return [Selected.model_validate_json(line) for line in lines.split("\n")[:-1]]
    except ValueError as error:
        raise DataError(f"{where} is no selection: {error}") from None


def gone(rows: Iterable[Selected], rollouts: Mapping[str, Rollout | AttemptedRollout]) -> list[Gone]:
    """Return the attempts that are deleted or replaced by now; `rollouts` are those of the queue, by id."""
    found: list[Gone] = []
    for row in rows:
        rollout = rollouts.get(row.rollout_id)
        if rollout is None:
            found.append(Gone(*row.key, "deleted"))
        elif not isinstance(rollout, AttemptedRollout) or rollout.attempt.attempt_id != row.attempt_id:
            found.append(Gone(*row.key, "replaced"))
    return found


def task_of(rollout: Rollout) -> str:
    """Return the key of a rollout's task (selection.task_key); of one without an input, whose task is not known, one of its own."""
    return task_key(rollout) if rollout.input is not None else f"rollout {rollout.rollout_id}"


def task_text(rollout: Rollout) -> str:
    """Return what a task says: the texts of its input, without those of the system in chat messages, which all tasks have in common."""
    return "\n".join(_texts(rollout.input)) if rollout.input is not None else rollout.rollout_id


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        if fields.get("role") not in _SYSTEM:
            for name, inner in fields.items():
                if not isinstance(inner, str) or name not in _FRAME:
                    yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in cast("Sequence[Any]", value):
            yield from _texts(inner)
    elif value is not None:
        yield str(value)


def variances(rewards: Mapping[K, float | None], tasks: Mapping[K, str]) -> dict[K, float | None]:
    """Return the value of each attempt to a learner: the variance of the rewards at its task, p (1 - p) if they are 0 and 1.

    An advantage is a reward minus the mean of its group, so a task of which all attempts earn the same teaches nothing ("Learning to Reason
    at the Frontier of Learnability", arXiv:2502.12272). None: fewer than two attempts at the task have a reward, or this one has none.
    """
    groups: dict[str, list[float]] = {}
    for key, reward in rewards.items():
        if reward is not None:
            groups.setdefault(tasks[key], []).append(reward)
    values = {task: statistics.pvariance(group) if len(group) > 1 else None for task, group in groups.items()}
    return {key: values[tasks[key]] if reward is not None else None for key, reward in rewards.items()}


def by_value(keys: Sequence[K], values: Mapping[K, float | None], tasks: Mapping[K, str]) -> list[K]:
    """Order attempts by falling value, those of one task together, unknown values last; else the order stays."""
    first: dict[str, tuple[float, int]] = {}
    for place, key in enumerate(keys):
        value = values[key]
        falling = float("inf") if value is None else -value
        task = tasks[key]
        first[task] = min(first.get(task, (falling, place)), (falling, place))
    return sorted(keys, key=lambda key: (first[tasks[key]], values[key] is None, -(values[key] or 0.0)))


def beyond(keys: Iterable[K], groups: Mapping[K, str], most: int) -> list[K]:
    """Return the keys after the first `most` of each group."""
    seen, out = Counter[str](), list[K]()
    for key in keys:
        seen[groups[key]] += 1
        if seen[groups[key]] > most:
            out.append(key)
    return out
