"""Identify spans. Pure: (request, request metadata, known traces) → ids and explicit sequence number, or the reason for a refusal.

The rules are contracts.md §2; conformance/*.json holds golden vectors that every implementation must pass. The order of spans
within a request does not matter. Of a repeated attribute key, the first counts. No clock, no I/O; the caller keeps the memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agl_otel.collector.memory import Ids, Known, TraceMemory
from agl_otel.collector.span_columns import SpanColumns
from agl_otel_hook import conventions

EARLIEST_UNIX_NANO: Final = 946_684_800 * 10**9  # 2000-01-01: ClickHouse would wrap times far outside its range to another year
AHEAD_NANO: Final = 24 * 3600 * 10**9
MAX_SEQUENCE: Final = 2**53

TRACE_ID: Final = "trace id is not 16 bytes or all zero"
SPAN_ID: Final = "span id is not 8 bytes or all zero"
PARENT_ID: Final = "parent span id is not 8 bytes"
TIMESTAMP: Final = "timestamp before 2000 or more than a day ahead"
ROLLOUT_ID: Final = "rollout id breaks the rule [A-Za-z0-9._:-]{1,128}"
ATTEMPT_ID: Final = "attempt id breaks the rule [A-Za-z0-9._:-]{1,128}"
KEY: Final = "the sender's key is bound to another attempt"
TRAINING: Final = "only trainers send figures of training: an agent's key does not"
GIVEN: Final = "only the runner marks a reward as given: an agent's key does not"
PROXY: Final = "only the proxy sends agentlightning.llm and its attributes: an agent's key does not"
STEP: Final = "only trainers send agentlightning.train and its attributes: an agent's key does not"
_OF_THE_STACK: Final = {conventions.SPAN_LLM: PROXY, conventions.TRAIN: STEP, conventions.REWARD_GIVEN: GIVEN}
"""{name, or prefix of dotted names, that only services of the stack may send: the reason for refusing it from others}."""


class Identity(NamedTuple):
    """The result of identification for one span or log record."""

    rollout_id: str = ""
    attempt_id: str = ""
    sequence: int | None = None
    """The explicit sequence number, if any."""
    reason: str = ""
    """Why it is refused; empty if it is accepted."""


class _Level(NamedTuple):
    rollout_id: str = ""
    attempt_id: str = ""
    sequence: int | None = None
    reason: str = ""  # an id of this level breaks the rule
    keys: int = 0  # number of attributes with an id key


LEVELS: Final = ("span", "resource", "metadata")
_NOTHING: Final = _Level()
_NO_IDS: Final[Ids] = ("", "")
_ID_KEYS: Final = frozenset({conventions.ROLLOUT_ID, conventions.ATTEMPT_ID, conventions.SEQUENCE_ID})
MAX_LEVELS: Final = 4096  # cache size: the spans of an attempt repeat the same ids
MAX_REMEMBERED_CHARACTERS: Final = 512  # longer ids, which are invalid, are not cached
_NO_TRACE: Final = bytes(16)
_NO_SPAN: Final = bytes(8)


def identify_spans(
    request: ExportTraceServiceRequest,
    metadata: Mapping[str, str],
    known: Known | None,
    *,
    now_unix_nano: int,
    levels: Counter[str] | None = None,
    raw: bytes = b"",
    columns: SpanColumns | None = None,
) -> list[Identity]:
    """Return one Identity per span, in the order of the request; spans with equal ids share the object. `metadata` has lower-case keys.

    `levels` counts the sources of ids: span, resource, metadata, trace or parent. `raw`, the request's bytes, avoids inspecting every
    attribute if they show that no span has ids of its own; `columns`, if they have been read already, avoids a second reading.
    `known` None, for senders with a bound key: nothing is inherited by trace or parent. `bind` assigns spans that name no rollout; their
    identities hold the attempt id that they name, if any.
    """
    levels = Counter() if levels is None else levels
    columns = SpanColumns.of(request, raw) if columns is None else columns
    lowest = _metadata_level(metadata)
    found: list[Identity | None] = []
    unnamed: dict[int, Identity] = {}
    latest = now_unix_nano + AHEAD_NANO
    resources = [_level(group.resource.attributes) for group in request.resource_spans]
    one_by_one = columns.id_keys != sum(resource.keys for resource in resources) or not _all_whole(columns, latest)
    for resource, (first, end) in zip(resources, columns.groups, strict=True):
        shared, giver = _explicit(_NOTHING, resource, lowest)  # of every span without ids of its own
        if shared is not None and not one_by_one:
            found += [shared] * (end - first)
            if giver:
                levels[giver] += end - first
            continue
        for span in columns.spans[first:end]:
            own = _level(span.attributes) if one_by_one else _NOTHING
            broken = _check_span(span, latest) if one_by_one else ""
            identity, level = (shared, giver) if own is _NOTHING else _explicit(own, resource, lowest)
            if broken:
                identity = Identity(reason=broken)
            elif level:
                levels[level] += 1
            if identity is None:
                unnamed[len(found)] = _unnamed(own, resource, lowest)
            found.append(identity)
    return _inherit_spans(columns.spans, found, unnamed, known, levels)


def identify_logs(
    request: ExportLogsServiceRequest,
    metadata: Mapping[str, str],
    known: Known | None,
    *,
    now_unix_nano: int,
    levels: Counter[str] | None = None,
) -> list[Identity]:
    """Return one Identity per log record: the same rules, with the record's own span in place of the parent."""
    levels = Counter() if levels is None else levels
    lowest = _metadata_level(metadata)
    found: list[Identity] = []
    for resource_logs in request.resource_logs:
        resource = _level(resource_logs.resource.attributes)
        for scope_logs in resource_logs.scope_logs:
            for record in scope_logs.log_records:
                own = _level(record.attributes)
                identity, level = _explicit(own, resource, lowest)
                if broken := _check_record(record, now_unix_nano + AHEAD_NANO):
                    identity = Identity(reason=broken)
                elif level:
                    levels[level] += 1
                if identity is None:
                    identity = _unnamed(own, resource, lowest)
                    if known is not None:
                        by_trace = known.opened_by(record.trace_id)
                        ids = by_trace or known.span(record.trace_id, record.span_id) or _NO_IDS
                        if ids[0]:
                            levels["trace" if by_trace else "parent"] += 1
                        identity = Identity(*ids, identity.sequence)
                found.append(identity)
    return found


def named_by(resource: Iterable[KeyValue]) -> Identity:
    """Return the ids that a resource alone names, or the reason for a refusal."""
    level = _level(resource)
    return _explicit(_NOTHING, level, _NOTHING)[0] or _unnamed(_NOTHING, level, _NOTHING)


def bind(identities: Sequence[Identity], bound: Ids, levels: Counter[str]) -> list[Identity]:
    """Check named ids (nothing is inherited) against the attempt of the sender's key: refuse other attempts, assign the rest to it."""
    made: dict[Identity, Identity] = {}  # the spans of a request share their identities
    for identity in identities:
        if identity not in made:
            made[identity] = bound_identity(identity, bound)
        levels["key"] += not identity.rollout_id and not made[identity].reason
    return [made[identity] for identity in identities]


def bound_identity(identity: Identity, bound: Ids) -> Identity:
    """Check one identity against the attempt of the sender's key; return it as refused or as assigned."""
    if identity.reason or (identity.rollout_id, identity.attempt_id) == bound:
        return identity
    if identity.rollout_id in ("", bound[0]) and identity.attempt_id in ("", bound[1]):
        return Identity(*bound, identity.sequence)
    return Identity(reason=KEY)


def refuse_forged(identities: Sequence[Identity], spans: Sequence[Span], raw: bytes) -> list[Identity]:
    """Refuse an agent's spans that carry what only services of the stack may send; `raw` is the request's bytes."""
    if not any(name.encode() in raw for name in _OF_THE_STACK):
        return list(identities)
    return [
        Identity(reason=reason) if not identity.reason and (reason := _forged(span)) else identity
        for identity, span in zip(identities, spans, strict=True)
    ]


def _forged(span: Span) -> str:
    """Return why a span is refused from an agent, by its name and attribute keys; empty if it is accepted."""
    names = (span.name, *(each.key for each in span.attributes))
    return next((why for text in names for name, why in _OF_THE_STACK.items() if text == name or text.startswith(f"{name}.")), "")


def _all_whole(columns: SpanColumns, latest: int) -> bool:
    """Return whether all spans are valid, checked by column; _check_span finds the defect of each."""
    if not columns.spans:
        return True
    ids, spans, times = set(columns.trace_ids), columns.span_ids, columns.times
    return (
        set(map(len, ids)) == {16}
        and _NO_TRACE not in ids
        and set(map(len, spans)) == {8}
        and _NO_SPAN not in spans
        and set(map(len, columns.parent_ids)) <= {0, 8}
        and min(times) >= EARLIEST_UNIX_NANO
        and max(times) <= latest
    )


def learn(
    request: ExportTraceServiceRequest,
    identities: Sequence[Identity],
    memory: TraceMemory,
    *,
    now: float,
    columns: SpanColumns | None = None,
    by_key: bool = False,
) -> None:
    """Remember the results of `identify_spans` for later requests; `by_key`: the sender's key is bound to an attempt."""
    columns = SpanColumns.of(request) if columns is None else columns
    start = 0
    for (trace_id, identity), run in groupby(zip(columns.trace_ids, identities, strict=True)):
        end = start + sum(1 for _ in run)
        if identity.rollout_id and not identity.reason:
            opening = [span.span_id for span in columns.spans[start:end] if _opens(span)] if columns.may_open else ()
            memory.learn(
                trace_id, columns.span_ids[start:end], (identity.rollout_id, identity.attempt_id), opens=opening, now=now, by_key=by_key
            )
        start = end


def _opens(span: Span) -> bool:
    return span.name == conventions.SPAN_ATTEMPT and not any(span.parent_span_id)


def _explicit(own: _Level, resource: _Level, lowest: _Level) -> tuple[Identity | None, str]:
    """Apply rule 1; return the identity and the level that gave the ids, or (None, "") if no level names a rollout."""
    levels = (own, resource, lowest)
    for position, level in enumerate(levels):
        if level.reason:
            return Identity(reason=level.reason), ""
        if level.rollout_id:
            giver = level
            if not level.attempt_id:
                lower = (other for other in levels[position + 1 :] if other.attempt_id and other.rollout_id == level.rollout_id)
                giver = next(lower, _NOTHING)
            if giver.reason:
                return Identity(reason=giver.reason), ""
            return Identity(level.rollout_id, giver.attempt_id, _sequence_of(own, resource)), LEVELS[position]
    return None, ""


def _unnamed(own: _Level, resource: _Level, lowest: _Level) -> Identity:
    """Return the identity of an item without a rollout id at any level: the first attempt id named, and the sequence number."""
    return Identity("", own.attempt_id or resource.attempt_id or lowest.attempt_id, _sequence_of(own, resource))


def _inherit_spans(
    spans: Sequence[Span], found: Sequence[Identity | None], unnamed: Mapping[int, Identity], known: Known | None, levels: Counter[str]
) -> list[Identity]:
    """Apply rule 2 to entries that are None: inherit by the trace, else by the parent, from this request or earlier ones."""
    if not unnamed or known is None:
        return [unnamed[index] if identity is None else identity for index, identity in enumerate(found)]
    opened: dict[bytes, Ids | None] = {}
    here: dict[tuple[bytes, bytes], int] = {}
    for index, (span, identity) in enumerate(zip(spans, found, strict=True)):
        here.setdefault((span.trace_id, span.span_id), index)
        if identity is not None and identity.rollout_id and _opens(span):
            ids = (identity.rollout_id, identity.attempt_id)
            opened[span.trace_id] = ids if opened.get(span.trace_id, ids) == ids else None
    for trace_id, ids in opened.items():
        before = known.opened_by(trace_id)
        if before is not None and ids is not None and before != ids:
            opened[trace_id] = None
    result: list[Identity] = []
    resolved: dict[int, Ids] = {}
    for index, identity in enumerate(found):
        if identity is None:
            ids = _inherited(index, spans, found, here, opened, known, resolved)
            if ids[0]:
                trace_id = spans[index].trace_id
                by_trace = opened[trace_id] if trace_id in opened else known.opened_by(trace_id)
                levels["trace" if by_trace else "parent"] += 1
            identity = Identity(*ids, unnamed[index].sequence)
        result.append(identity)
    return result


def _inherited(
    start: int,
    spans: Sequence[Span],
    found: Sequence[Identity | None],
    here: Mapping[tuple[bytes, bytes], int],
    opened: Mapping[bytes, Ids | None],
    known: Known,
    resolved: dict[int, Ids],
) -> Ids:
    trail: list[int] = []
    index: int | None = start
    ids = _NO_IDS
    while index is not None:
        identity = found[index]
        if identity is not None:  # an ancestor that names its rollout, or a refused one
            ids = (identity.rollout_id, identity.attempt_id)
            break
        if index in resolved:
            ids = resolved[index]
            break
        resolved[index] = _NO_IDS  # result for a cycle of parents
        trail.append(index)
        span = spans[index]
        by_trace = opened[span.trace_id] if span.trace_id in opened else known.opened_by(span.trace_id)
        if by_trace is not None:
            ids = by_trace
            break
        parent = (span.trace_id, span.parent_span_id)
        index = here.get(parent)
        if index is None:
            ids = known.span(*parent) or _NO_IDS
    for passed in trail:
        resolved[passed] = ids
    return ids


def _metadata_level(metadata: Mapping[str, str]) -> _Level:
    return _checked(metadata.get(conventions.HEADER_ROLLOUT_ID, ""), metadata.get(conventions.HEADER_ATTEMPT_ID, ""), None)


def _level(attributes: Iterable[KeyValue]) -> _Level:
    rollout: AnyValue | None = None
    attempt: AnyValue | None = None
    sequence: AnyValue | None = None
    ours = [each for each in attributes if each.key in _ID_KEYS]  # most attributes are not ids
    for attribute in ours:
        if attribute.key == conventions.ROLLOUT_ID:
            rollout = attribute.value if rollout is None else rollout
        elif attribute.key == conventions.ATTEMPT_ID:
            attempt = attribute.value if attempt is None else attempt
        else:
            sequence = attribute.value if sequence is None else sequence
    if rollout is None and attempt is None and sequence is None:
        return _NOTHING
    return _checked(_text(rollout), _text(attempt), _integer(sequence), len(ours))


def _checked(rollout_id: str, attempt_id: str, sequence: int | None, keys: int = 0) -> _Level:
    short = len(rollout_id) + len(attempt_id) <= MAX_REMEMBERED_CHARACTERS
    return (_check_ids if short else _check_ids.__wrapped__)(rollout_id, attempt_id, sequence, keys)


@lru_cache(MAX_LEVELS)
def _check_ids(rollout_id: str, attempt_id: str, sequence: int | None, keys: int) -> _Level:
    reason = ""
    if rollout_id and not conventions.is_valid_id(rollout_id):
        reason = ROLLOUT_ID
    elif rollout_id and attempt_id and not conventions.is_valid_id(attempt_id):
        reason = ATTEMPT_ID
    return _Level(rollout_id, attempt_id, sequence, reason, keys)


def _text(value: AnyValue | None) -> str:
    """Convert an id to text: strings and integers are ids; other values become a text that is never a valid id."""
    kind = value.WhichOneof("value") if value is not None else None
    if value is None or kind is None:
        return ""
    if kind == "string_value":
        return value.string_value
    return str(value.int_value) if kind == "int_value" else f"<{kind}>"


def _integer(value: AnyValue | None) -> int | None:
    kind = value.WhichOneof("value") if value is not None else None
    if value is None or kind not in {"int_value", "string_value"}:
        return None
    if kind == "string_value":
        text = value.string_value
        if not (text.isascii() and text.isdigit() and len(text) <= 16):
            return None
        number = int(text)
    else:
        number = value.int_value
    return number if 0 <= number < MAX_SEQUENCE else None


def _sequence_of(own: _Level, resource: _Level) -> int | None:
    return own.sequence if own.sequence is not None else resource.sequence


def _check_span(span: Span, latest: int) -> str:
    if len(span.trace_id) != 16 or span.trace_id == _NO_TRACE:
        return TRACE_ID
    if len(span.span_id) != 8 or span.span_id == _NO_SPAN:
        return SPAN_ID
    if len(span.parent_span_id) not in {0, 8}:
        return PARENT_ID
    if not EARLIEST_UNIX_NANO <= span.start_time_unix_nano <= latest or not EARLIEST_UNIX_NANO <= span.end_time_unix_nano <= latest:
        return TIMESTAMP
    if (events := span.events) and any(event.time_unix_nano > latest for event in events):
        return TIMESTAMP
    return ""


def _check_record(record: LogRecord, latest: int) -> str:
    if record.trace_id and len(record.trace_id) != 16:
        return TRACE_ID
    if record.span_id and len(record.span_id) != 8:
        return SPAN_ID
    stamp = record.time_unix_nano or record.observed_time_unix_nano
    if stamp and not EARLIEST_UNIX_NANO <= stamp <= latest:
        return TIMESTAMP
    return ""
