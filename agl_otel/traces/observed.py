"""Derives from the rows of sql/traces.sql what each span is (call, seal, reward, …) and what it says, by whole columns.

Texts are parsed once for each distinct one, so the work grows with the variety of the facts more than with the number of spans.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agl_otel.traces.names import NAMES

Table = Any
"""A pyarrow.Table (pyarrow ships no types)."""
_STORED: Final = ["RolloutId", "AttemptId", "SpanId", "ParentSpanId", "SequenceId", "Identity", "SpanName", "IsRecord", "HasMedia"]
_TOKENS: Final = ["PromptTokenIds", "ResponseTokenIds", "ResponseLogprobs"]
_READ: Final = [*_STORED, "Timestamp", "Duration", "Facts", "Rewards", "Evaluated"]
_TEXTS: Final = {
    "Process": "process",
    "Caller": "caller",
    "ModelVersion": "model_version",
    "Incomplete": "incomplete",
    "Sampling": "sampling",
    "ResponseId": "response",
}
_NUMBERS: Final = {
    "Call": "call",
    "Choice": "choice",
    "PrefixCall": "prefix_call",
    "PrefixChoice": "prefix_choice",
    "RetryOf": "retry_of",
    "SealSpans": "seal_spans",
    "Dropped": "seal_dropped",
}
_REALS: Final = {"Temperature": "temperature", "TopP": "top_p"}
_INTEGER: Final = re.compile(r"[+-]?[0-9]+")
_REAL: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def integer(text: str) -> int:
    """Return `text` as ClickHouse's toInt64OrZero does: 0 if it is not a number or has more than 64 bits."""
    number = int(text) if _INTEGER.fullmatch(text) and len(text) <= 40 else 0
    return number if -(1 << 63) <= number < 1 << 63 else 0


def real(text: str) -> float:
    """Return `text` as a finite number, NaN if it is none."""
    return float(text) if _REAL.fullmatch(text) else float("nan")


def with_derived(table: Table) -> Table:
    """Return the rows of sql/traces.sql, in their order, with the columns that facts.py and tokens.py read; the token columns as they are.

    A call without a number named no rollout when the proxy recorded it: its trace was adopted. A seal span without a count is an
    announcement: its process has begun to work for the attempt. A log record is no span, and no more than its rewards.
    """
    import pyarrow as pa
    from pyarrow import compute

    pc: Any = compute  # untyped: its functions are generated on import
    read = table.select(_READ).combine_chunks()
    facts = _Facts(_whole(read, "Facts"))
    names = _whole(read, "SpanName")

    def named(name: str) -> NDArray[np.bool_]:
        return pc.equal(names, NAMES[name]).to_numpy(zero_copy_only=False)

    def says(name: str, text: str) -> NDArray[np.bool_]:
        return facts.parsed(name, lambda value: value == text, False, np.bool_)

    seal, attempt, annotation = named("seal"), named("attempt"), named("annotation")
    made: dict[str, Any] = {name: facts.texts(fact) for name, fact in _TEXTS.items()}
    made |= {name: facts.parsed(fact, integer, 0, np.int64) for name, fact in _NUMBERS.items()}
    made |= {name: facts.parsed(fact, real, np.nan, np.float64) for name, fact in _REALS.items()}
    is_seal = seal & facts.has("seal_spans")
    record = _whole(read, "IsRecord").to_numpy(zero_copy_only=False).astype(bool)
    counted = ~seal & ~attempt & ~record & ~says("late", "true")
    time = _whole(read, "Timestamp").cast(pa.int64()).to_numpy()
    for name in ("SealSpans", "Dropped"):
        made[name] = np.where(is_seal, np.maximum(made[name], 0), 0)
    replied = np.concatenate(
        [np.zeros(0, bool), *(np.diff(chunk.offsets.to_numpy()) > 0 for chunk in table.column("ResponseTokenIds").chunks)]
    )
    made |= {
        "IsSpan": ~seal & ~attempt & ~record,
        "IsAnnotation": counted & annotation,
        "IsCounted": counted,
        "IsSeal": is_seal,
        "SealTime": np.where(is_seal, time, 0),
        "IsClosing": is_seal & says("seal_closing", "true"),
        "Hooked": attempt & says("hooked", "true"),
        "IsCall": facts.has("call") | (named("llm") & replied),
        "IsTruncated": facts.parsed("finish", lambda value: '"length"' in value, False, np.bool_),
    }
    in_graph = pc.starts_with(names, NAMES["task"]).to_numpy(zero_copy_only=False) & says("integration", "langgraph")
    workflow = pc.if_else(pc.starts_with(names, NAMES["workflow_span"]), facts.texts("workflow"), "")
    agent = pc.if_else(in_graph, facts.texts("node"), workflow)
    for name in ("own_agent", "agent"):
        agent = pc.if_else(pc.not_equal(facts.texts(name), ""), facts.texts(name), agent)
    made["Agent"] = agent
    rewards = _whole(read, "Rewards")
    made |= {"Rewards": rewards, "Evaluated": read.column("Evaluated"), "Time": time, "Duration": read.column("Duration")}
    made["IsReward"] = (counted | record) & (np.diff(rewards.offsets.to_numpy()) > 0)
    derived = pa.table({**{name: read.column(name) for name in _STORED}, **made})
    for name in _TOKENS:
        derived = derived.append_column(name, table.column(name))
    return derived


class _Facts:
    """A column of maps from text to text. Of a key that a map has twice, the first value counts, as in ClickHouse."""

    def __init__(self, maps: Any) -> None:
        import pyarrow as pa

        starts = maps.offsets.to_numpy()
        self._count = len(maps)
        self._rows = np.repeat(np.arange(self._count), np.diff(starts))
        keys = maps.keys[starts[0] : starts[-1]].cast(pa.string()).dictionary_encode()
        values = maps.items[starts[0] : starts[-1]].cast(pa.string()).dictionary_encode()
        self._names: list[str] = keys.dictionary.to_pylist()
        self._keys = keys.indices.to_numpy()
        self._values = values.indices.to_numpy()
        self._distinct = pa.concat_arrays([values.dictionary, pa.array([""])])

    def _chosen(self, name: str) -> NDArray[np.int64]:
        """Return for each row the place of its value in `_distinct`, or -1."""
        chosen = np.full(self._count, -1)
        if NAMES[name] in self._names:
            found = np.flatnonzero(self._keys == self._names.index(NAMES[name]))[::-1]
            chosen[self._rows[found]] = self._values[found]
        return chosen

    def has(self, name: str) -> NDArray[np.bool_]:
        """Return which rows have the fact."""
        return self._chosen(name) >= 0

    def texts(self, name: str) -> Any:
        """Return the fact of each row, an empty text where it has none."""
        chosen = self._chosen(name)
        return self._distinct.take(np.where(chosen < 0, len(self._distinct) - 1, chosen))

    def parsed(self, name: str, parse: Callable[[str], Any], absent: Any, dtype: type[np.generic]) -> NDArray[Any]:
        """Return `parse` of the fact of each row, `absent` where it has none."""
        distinct, places = np.unique(self._chosen(name), return_inverse=True)
        values = [absent if place < 0 else parse(self._distinct[place].as_py()) for place in distinct.tolist()]
        return np.array(values, dtype=dtype)[places]


def _whole(table: Table, name: str) -> Any:
    """Return a column of a table without chunks."""
    found = table.column(name)
    return found.chunk(0) if found.num_chunks == 1 else found.combine_chunks()
