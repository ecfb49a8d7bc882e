"""Converts the table of observed.py to CallColumns and rewards; token arrays become numpy views, without a Python loop over tokens.

pyarrow is imported on use (here, in reader.py and figures.py): most commands and services never read a table.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from agl_otel.spans.calls import error_of_call
from agl_otel.spans.history import expand_texts, expand_tools
from agl_otel.types.columns import AttemptKey, CallColumns, CallTexts, Ragged, Reward, SpanColumns
from agl_otel.types.sampling import Contract

Table = Any
"""A pyarrow.Table (pyarrow ships no types)."""
SpanKey = tuple[str, str, str]
"""(rollout id, attempt id, span id)."""
_TOKEN_COLUMNS: Final = ["PromptTokenIds", "ResponseTokenIds", "ResponseLogprobs"]
_ORDER: Final = ["RolloutId", "AttemptId", "Process", "Call", "Choice", "SequenceId", "SpanId"]
_REWARD_COLUMNS: Final = ["RolloutId", "AttemptId", "SequenceId", "SpanId", "Evaluated", "Time", "Rewards"]


def distinct_in_order(table: Table) -> Table:
    """Sort the rows of observed.py as CallColumns are, keeping for each identity the one with the lowest sequence number."""
    from pyarrow import compute

    pc: Any = compute  # untyped: its functions are generated on import
    narrow = table.drop_columns(_TOKEN_COLUMNS)
    identities = column(narrow, "Identity")
    order = np.lexsort((column(narrow, "SequenceId"), identities))
    again = np.flatnonzero(identities[order][1:] == identities[order][:-1]) + 1
    once = np.sort(np.delete(order, again)) if len(again) else np.arange(len(order))
    rows = once[pc.sort_indices(narrow.take(once), sort_keys=[(name, "ascending") for name in _ORDER]).to_numpy()]
    if np.array_equal(rows, np.arange(len(order))):
        return table
    narrow = narrow.take(rows)
    for name in _TOKEN_COLUMNS:
        narrow = narrow.append_column(name, _taken(table.column(name), rows))
    return narrow


def evaluations_of(table: Table) -> dict[str, list[int]]:
    """Return Traces.evaluations."""
    found: dict[str, list[int]] = {}
    records = table.filter(column(table, "IsRecord").astype(bool))
    for rollout_id, identity in zip(strings(records, "RolloutId"), column(records, "Identity").tolist(), strict=True):
        found.setdefault(rollout_id, []).append(identity)
    return found


def with_evaluations(table: Table, known: Collection[int]) -> Table:
    """Leave out the log records, which are evaluations, but for those of these identities."""
    others = column(table, "IsRecord").astype(bool) & ~np.isin(column(table, "Identity"), np.array([*known], np.uint64))
    return table.filter(~others) if others.any() else table


def _taken(lists: Any, rows: NDArray[np.int64]) -> Any:
    """Take rows of a column of arrays with a single copy; pyarrow's `take` would first combine the chunks of the whole column."""
    import pyarrow as pa

    values = [chunk.values.to_numpy() for chunk in lists.chunks]
    bounds = [chunk.offsets.to_numpy().astype(np.int64) for chunk in lists.chunks]
    starts, ends = (np.concatenate([each[part] for each in bounds])[rows] for part in (slice(-1), slice(1, None)))
    chunks = np.repeat(np.arange(len(bounds)), [len(each) - 1 for each in bounds])[rows]
    offsets = np.append(0, np.cumsum(ends - starts))
    filled = np.flatnonzero(ends > starts)
    apart = (chunks[filled][1:] != chunks[filled][:-1]) | (starts[filled][1:] != ends[filled][:-1])
    taken = np.empty(offsets[-1], values[0].dtype)
    for run in np.split(filled, np.flatnonzero(apart) + 1):  # contiguous rows
        if len(run):
            taken[offsets[run[0]] : offsets[run[-1] + 1]] = values[chunks[run[0]]][starts[run[0]] : ends[run[-1]]]
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(taken))


def reward_rows(table: Table) -> list[dict[str, Any]]:
    """Return the rows of observed.py with rewards (`Rewards` as a dict), ordered by rollout, attempt and sequence."""
    found = table.select(_REWARD_COLUMNS).filter(column(table, "IsReward").astype(bool))
    rows = [{**row, "Rewards": dict(row["Rewards"])} for row in found.to_pylist()]
    return sorted(rows, key=lambda row: (row["RolloutId"], row["AttemptId"], row["SequenceId"], row["SpanId"]))


def with_responses(rewards: dict[AttemptKey, list[Reward]], table: Table) -> dict[AttemptKey, list[Reward]]:
    """Return the rewards, where each evaluation that names no response has that of its span, by the table of observed.py."""
    if not any(each.time is not None and not each.response_id for found in rewards.values() for each in found):
        return rewards
    responses = {key: name for key, name in zip(_span_keys(table, "SpanId"), strings(table, "ResponseId"), strict=True) if name}

    def resolved(key: AttemptKey, reward: Reward) -> Reward:
        if reward.time is None or reward.response_id:
            return reward
        return replace(reward, response_id=responses.get((*key, reward.span_id), ""))

    return {key: [resolved(key, each) for each in found] for key, found in rewards.items()}


def _agents(table: Table, calls: Table) -> list[str]:
    """Return for each call the name of the nearest agent at or above its span, or an empty string."""
    own, names = strings(calls, "Agent"), strings(table, "Agent")
    if all(own) or not any(names):
        return own
    keys = _span_keys(table, "SpanId")
    parents = dict(zip(keys, _span_keys(table, "ParentSpanId"), strict=True))
    known = {key: name for key, name in zip(keys, names, strict=True) if name}
    return [name or _nearest(key, parents, known) for name, key in zip(own, _span_keys(calls, "SpanId"), strict=True)]


def _nearest(key: SpanKey, parents: Mapping[SpanKey, SpanKey], known: dict[SpanKey, str]) -> str:
    trail: list[SpanKey] = []
    at: SpanKey | None = key
    while at is not None and at not in known:
        known[at] = ""  # ends cycles of parents
        trail.append(at)
        at = parents.get(at)
    name = known.get(at, "") if at is not None else ""
    known.update(dict.fromkeys(trail, name))  # each ancestor is visited once
    return name


def _span_keys(table: Table, name: str) -> list[SpanKey]:
    return list(zip(strings(table, "RolloutId"), strings(table, "AttemptId"), strings(table, name), strict=True))


def call_columns(table: Table) -> CallColumns:
    """Return the model calls in the table of observed.py as columns."""
    is_call = column(table, "IsCall").astype(bool)
    calls = table.drop_columns([*_TOKEN_COLUMNS, "Rewards"]).filter(is_call)
    rollouts, attempts, processes = strings(calls, "RolloutId"), strings(calls, "AttemptId"), strings(calls, "Process")
    contracts, began = _contracts(calls), _numbers(calls, "Time", np.int64)
    return CallColumns(
        rollout_id=rollouts,
        attempt_id=attempts,
        process=processes,
        span_id=strings(calls, "SpanId"),
        parent_span_id=strings(calls, "ParentSpanId"),
        call=_call_numbers(_numbers(calls, "Call", np.int64), rollouts, attempts, processes),
        choice=_numbers(calls, "Choice", np.int64),
        sequence=_numbers(calls, "SequenceId", np.uint64),
        prefix_call=_numbers(calls, "PrefixCall", np.int64),
        prefix_choice=_numbers(calls, "PrefixChoice", np.int64),
        prompt=_ragged(table, "PromptTokenIds", is_call, np.int32),
        response=_ragged(table, "ResponseTokenIds", is_call, np.int32),
        logprobs=_ragged(table, "ResponseLogprobs", is_call, np.float32),
        model_version=strings(calls, "ModelVersion"),
        agent=_agents(table, calls),
        incomplete=_incomplete(calls, rollouts, attempts),
        has_media=_numbers(calls, "HasMedia", np.bool_),
        truncated=_numbers(calls, "IsTruncated", np.bool_),
        temperature=_temperatures(contracts, _numbers(calls, "Temperature", np.float64)),
        contract=contracts,
        top_p=_numbers(calls, "TopP", np.float64),
        response_id=strings(calls, "ResponseId"),
        began=began,
        ended=began + _numbers(calls, "Duration", np.int64),
    )


def span_columns(table: Table) -> SpanColumns:
    """Return the spans in the table of observed.py as columns."""
    import pyarrow as pa

    spans = table.drop_columns([*_TOKEN_COLUMNS, "Rewards"]).filter(pa.array(~column(table, "IsRecord").astype(bool)))
    return SpanColumns(
        rollout_id=strings(spans, "RolloutId"),
        attempt_id=strings(spans, "AttemptId"),
        span_id=strings(spans, "SpanId"),
        parent_span_id=strings(spans, "ParentSpanId"),
        name=strings(spans, "SpanName"),
        sequence=_numbers(spans, "SequenceId", np.uint64),
    )


def _contracts(calls: Table) -> list[str]:
    """Return the column of contracts, of which few are distinct, with one object for each."""
    import pyarrow as pa

    coded = _chunk(calls, "Sampling").cast(pa.string()).dictionary_encode()
    texts: list[str] = coded.dictionary.to_pylist()
    return [texts[code] for code in coded.indices.to_pylist()]


def _temperatures(contracts: Sequence[str], requested: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each call's temperature: of its contract, else the requested one of its span."""
    known = {text: contract.temperature for text in set(contracts) if (contract := Contract.loads(text)) is not None}
    return np.array([known.get(text, asked) for text, asked in zip(contracts, requested.tolist(), strict=True)], np.float64)


def _call_numbers(numbers: NDArray[np.int64], *place: Sequence[str]) -> NDArray[np.int64]:
    """Number the calls. Those that were sent without a rollout id have no number yet and get the next ones, in the order of their arrival.

    `place` are the columns within whose values calls are numbered.
    """
    if numbers.all():
        return numbers
    given, count = numbers.copy(), Counter[tuple[str, ...]]()
    places = list(zip(*place, strict=True))
    for row in np.flatnonzero(numbers).tolist():  # others go on from these numbers
        count[places[row]] = max(count[places[row]], int(numbers[row]))
    for row in np.flatnonzero(numbers == 0).tolist():
        count[places[row]] += 1
        given[row] = count[places[row]]
    return given


def rollouts_to_read(calls: CallColumns) -> list[str]:
    """Return the rollouts whose content an adapter needs: those with images, or with a call that does not continue an earlier one."""
    if not len(calls):
        return []
    keys = list(zip(calls.rollout_id, calls.attempt_id, calls.process, strict=True))
    needed = (calls.prefix_call == 0) & np.array([False, *(a == b for a, b in itertools.pairwise(keys))])
    if calls.has_media is not None:
        needed |= calls.has_media
    return list(dict.fromkeys(calls.rollout_id[row] for row in np.flatnonzero(needed).tolist()))


def call_texts(table: Table, calls: CallColumns) -> CallTexts:
    """Return the table of sql/texts.sql in the order of `calls`."""
    place = {key: row for row, key in enumerate(zip(*(strings(table, n) for n in ("RolloutId", "AttemptId", "SpanId")), strict=True))}
    rows = [place.get(key, -1) for key in zip(calls.rollout_id, calls.attempt_id, calls.span_id, strict=True)]
    read = [[*strings(table, name), ""] for name in ("Instructions", "Asked", "Answered", "Tools", "Versions", "Experts", "Bridge")]
    instructions, asked, answered, tools, versions, experts, bridges = ([column[row] for row in rows] for column in read)
    numbers = [np.append(_numbers(table, name, np.int64), 0)[rows].tolist() for name in ("MessagesCall", "MessagesBefore", "ToolsCall")]
    messages_call, messages_before, tools_call = numbers
    places = list(zip(calls.rollout_id, calls.attempt_id, calls.process, calls.call.tolist(), strict=True))
    if any(messages_call):
        asked = expand_texts(places, asked, messages_call, messages_before)
    if any(tools_call):
        tools = expand_tools(places, tools, tools_call)
    return CallTexts(instructions, asked, answered, tools, versions, experts, bridges)


def call_errors(table: Table) -> Counter[str]:
    """Count the rows of sql/call_errors.sql by their texts."""
    return Counter(map(error_of_call, column(table, "HttpStatus").tolist(), strings(table, "Message")))


def _incomplete(table: Table, rollouts: list[str], attempts: list[str]) -> list[str]:
    """Return why each reply is incomplete; a call that the client's SDK repeated is `retried`, since the agent never used its reply."""
    places = list(zip(rollouts, attempts, strings(table, "Process"), strict=True))
    again = _numbers(table, "RetryOf", np.int64)
    repeated = {(*places[row], int(again[row])) for row in np.flatnonzero(again).tolist()}
    why = strings(table, "Incomplete")
    if not repeated:
        return why
    calls = _numbers(table, "Call", np.int64).tolist()
    return [own or ("retried" if (*place, call) in repeated else "") for own, place, call in zip(why, places, calls, strict=True)]


def column(table: Table, name: str) -> NDArray[Any]:
    """Return a column of numbers."""
    return _chunk(table, name).to_numpy(zero_copy_only=False)


def _chunk(table: Table, name: str) -> Any:
    found = table.column(name)
    return found.chunk(0) if found.num_chunks == 1 else found.combine_chunks()  # copies even a single chunk, hence the case before


def strings(table: Table, name: str) -> list[str]:
    """Return a column of texts."""
    import pyarrow as pa

    return cast(list[str], _chunk(table, name).cast(pa.string()).to_pylist())


def _numbers(table: Table, name: str, dtype: type[Any]) -> NDArray[Any]:
    return column(table, name).astype(dtype, copy=False)


def _ragged(table: Table, name: str, taken: NDArray[np.bool_], dtype: type[np.generic]) -> Ragged:
    """Return the arrays of the `taken` rows; no copy where the rows between them are empty, as they mostly are."""
    import pyarrow as pa

    lists = _chunk(table, name)
    if not taken.any():
        return Ragged(np.zeros(0, dtype=dtype), np.zeros(1, dtype=np.int64))
    offsets = lists.offsets.to_numpy().astype(np.int64)
    starts, ends = offsets[:-1][taken], offsets[1:][taken]
    if not np.array_equal(starts[1:], ends[:-1]):
        lists = lists.filter(pa.array(taken))
        offsets = lists.offsets.to_numpy().astype(np.int64)
        starts, ends = offsets[:-1], offsets[1:]
    values = lists.values.to_numpy(zero_copy_only=False)[starts[0] : ends[-1]]
    # Token ids are stored as UInt32 and are below 2**31, so their bytes are valid int32.
    return Ragged(values.view(dtype), np.append(starts, ends[-1]) - starts[0])
