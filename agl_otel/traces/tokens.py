"""Arrow → CallColumns: token arrays are taken over as numpy views, without a Python loop over tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from agl_otel.columns import CallColumns, CallTexts, Ragged

Table = Any
"""A pyarrow.Table (pyarrow ships no types)."""
SpanKey = tuple[str, str, str]
"""(rollout id, attempt id, span id)."""


def agents_of(rows: Iterable[Mapping[str, Any]]) -> dict[SpanKey, str]:
    """For each span of sql/agents.sql the name of the nearest agent at or above it; empty where there is none."""
    parents: dict[SpanKey, SpanKey] = {}
    names: dict[SpanKey, str] = {}
    for row in rows:
        key = (row["RolloutId"], row["AttemptId"], row["SpanId"])
        parents[key] = (row["RolloutId"], row["AttemptId"], row["Parent"])
        if row["Agent"]:
            names[key] = row["Agent"]
    for key in parents:
        trail: list[SpanKey] = []
        at: SpanKey | None = key
        while at is not None and at not in names and at not in trail:
            trail.append(at)
            at = parents.get(at)
        name = names.get(at, "") if at is not None else ""
        names.update(dict.fromkeys(trail, name))
    return names


def call_columns(table: Table, agents: Mapping[SpanKey, str]) -> CallColumns:
    """The table of sql/calls.sql as columns."""
    rollouts, attempts, spans = (_strings(table, name) for name in ("RolloutId", "AttemptId", "SpanId"))
    return CallColumns(
        rollout_id=rollouts,
        attempt_id=attempts,
        process=_strings(table, "Process"),
        span_id=spans,
        parent_span_id=_strings(table, "ParentSpanId"),
        call=_numbers(table, "Call", np.int64),
        choice=_numbers(table, "Choice", np.int64),
        sequence=_numbers(table, "SequenceId", np.uint64),
        prefix_call=_numbers(table, "PrefixCall", np.int64),
        prefix_choice=_numbers(table, "PrefixChoice", np.int64),
        prompt=_ragged(table, "PromptTokenIds", np.int32),
        response=_ragged(table, "ResponseTokenIds", np.int32),
        logprobs=_ragged(table, "ResponseLogprobs", np.float32),
        model_version=_strings(table, "ModelVersion"),
        agent=[
            own or agents.get(key, "")
            for own, key in zip(_strings(table, "Agent"), zip(rollouts, attempts, spans, strict=True), strict=True)
        ],
        incomplete=_incomplete(table, rollouts, attempts),
        has_images=_numbers(table, "HasImages", np.bool_),
    )


def rollouts_to_read(calls: CallColumns) -> list[str]:
    """The rollouts of which an adapter needs what was said: those with images, or with a call that does not go on from another."""
    if not len(calls):
        return []
    keys = list(zip(calls.rollout_id, calls.attempt_id, calls.process, strict=True))
    wanted = (calls.prefix_call == 0) & np.array([False, *(a == b for a, b in itertools.pairwise(keys))])
    if calls.has_images is not None:
        wanted |= calls.has_images
    return list(dict.fromkeys(calls.rollout_id[row] for row in np.flatnonzero(wanted).tolist()))


def call_texts(table: Table, calls: CallColumns) -> CallTexts:
    """The table of sql/texts.sql, in the order of `calls`."""
    place = {key: row for row, key in enumerate(zip(*(_strings(table, n) for n in ("RolloutId", "AttemptId", "SpanId")), strict=True))}
    rows = [place.get(key, -1) for key in zip(calls.rollout_id, calls.attempt_id, calls.span_id, strict=True)]
    read = [[*_strings(table, name), ""] for name in ("Instructions", "Asked", "Answered", "Tools")]
    return CallTexts(*([column[row] for row in rows] for column in read))


def _incomplete(table: Table, rollouts: list[str], attempts: list[str]) -> list[str]:
    """Why a reply is not whole; a call that the client's SDK repeated is `retried`, because the agent never used its reply."""
    places = list(zip(rollouts, attempts, _strings(table, "Process"), strict=True))
    again = _numbers(table, "RetryOf", np.int64)
    repeated = {(*places[row], int(again[row])) for row in np.flatnonzero(again).tolist()}
    why = _strings(table, "Incomplete")
    if not repeated:
        return why
    calls = _numbers(table, "Call", np.int64).tolist()
    return [own or ("retried" if (*place, call) in repeated else "") for own, place, call in zip(why, places, calls, strict=True)]


def _column(table: Table, name: str) -> Any:
    return table.column(name).combine_chunks()


def _strings(table: Table, name: str) -> list[str]:
    return cast(list[str], _column(table, name).cast(pa.string()).to_pylist())


def _numbers(table: Table, name: str, dtype: type[Any]) -> NDArray[Any]:
    return _column(table, name).to_numpy(zero_copy_only=False).astype(dtype, copy=False)


def _ragged(table: Table, name: str, dtype: type[np.generic]) -> Ragged:
    lists = _column(table, name)
    offsets = lists.offsets.to_numpy().astype(np.int64)
    values = lists.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]] if len(lists) else np.zeros(0, dtype=dtype)
    # Token ids are stored as UInt32 and are below 2**31: the same bytes are their int32.
    return Ragged(values.view(dtype), offsets - offsets[0] if len(lists) else np.zeros(1, dtype=np.int64))
