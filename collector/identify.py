"""Identify spans. Pure: (what was read of a request, its metadata, known traces) → ids and explicit sequence, or the reason for a refusal.

The rules are in docs/otlp.md; conformance/*.json holds golden vectors that every implementation must pass. The order of spans
within a request does not matter. Of a repeated attribute key, the first counts. No clock, no I/O; the caller keeps the memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue, KeyValueList

from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.memory import Ids, Known, TraceMemory
from agl_otel.collector.scan import ID_KEYS, Scan, id_attributes, within
from agl_otel_hook import conventions

MAX_SEQUENCE: Final = 2**53

ROLLOUT_ID: Final = "rollout id breaks the rule [A-Za-z0-9._:-]{1,128}"
ATTEMPT_ID: Final = "attempt id breaks the rule [A-Za-z0-9._:-]{1,128}"
KEY: Final = "the sender's key is bound to another attempt"
TRAINING: Final = "only trainers send figures of training: an agent's key does not"
GIVEN: Final = "only the runner marks a reward as given: an agent's key does not"
PROXY: Final = "only the proxy sends agentlightning.llm and its attributes: an agent's key does not"
FEEDBACK: Final = "only the stack's own route takes feedback: an agent's key does not send agentlightning.feedback"
STEP: Final = "only trainers send agentlightning.train and its attributes: an agent's key does not"
_OF_THE_STACK: Final = {conventions.SPAN_LLM: PROXY, conventions.TRAIN: STEP, conventions.REWARD_GIVEN: GIVEN}
"""{name, or prefix of dotted names, that only services of the stack may send on spans: the reason for refusing it from others}."""
_OF_THE_STACKS_RECORDS: Final = {conventions.FEEDBACK: FEEDBACK}
"""The same, on log records."""


class _Level(NamedTuple):
    rollout_id: str = ""
    attempt_id: str = ""
    sequence: int | None = None
    reason: str = ""  # an id of this level breaks the rule


LEVELS: Final = ("span", "resource", "metadata")
_NOTHING: Final = _Level()
_NO_IDS: Final[Ids] = ("", "")
MAX_LEVELS: Final = 4096  # cache size: the spans of an attempt repeat the same ids
MAX_REMEMBERED_BYTES: Final = 1024  # longer ids, which are invalid, are not cached


def identify(
    scan: Scan, metadata: Mapping[str, str], known: Known | None, *, records: bool = False, levels: Counter[str] | None = None
) -> Identities:
    """Return the identities of a request's items. `metadata` has lower-case keys.

    `levels` counts the sources of ids: span, resource, metadata, trace or parent. `known` None, for senders with a bound key: nothing is
    inherited by trace or parent, as where the metadata asks for that. `bind` assigns items that name no rollout; their identities hold the
    attempt id that they name, if any.
    `records`: the items are log records, which inherit from their own span instead of a parent.
    """
    levels = Counter() if levels is None else levels
    if metadata.get(conventions.HEADER_INHERIT) == conventions.INHERIT_NONE:
        known = None
    found, unnamed = _named(scan, _metadata_level(metadata), levels)
    if scan.defects or (unnamed and known is not None):
        return _one_by_one(scan, found, unnamed, known, records=records, levels=levels)
    return Identities((count, unnamed.get(number, identity)) for number, (count, identity) in enumerate(found))


_UNNAMED: Final = Identity()


def _named(scan: Scan, lowest: _Level, levels: Counter[str]) -> tuple[list[tuple[int, Identity]], dict[int, Identity]]:
    """Apply rule 1. Returns (how many in a row, their identity), and {run: identity without a rollout id} of those whom no level names."""
    found: list[tuple[int, Identity]] = []
    unnamed: dict[int, Identity] = {}
    defects = [index for index, _ in scan.defects]
    runs, start = iter(scan.own), 0
    for ids, size in zip(scan.resources, scan.groups, strict=True):
        resource, end = _level(ids), start + size
        while start < end:
            count, own_ids = next(runs)
            own = _level(own_ids)
            identity, level = _explicit(own, resource, lowest)
            if level:
                levels[level] += count - len(within(defects, start, start + count))
            if identity is None:
                unnamed[len(found)] = _unnamed(own, resource, lowest)
            found.append((count, identity or _UNNAMED))
            start += count
    return found, unnamed


def _one_by_one(
    scan: Scan,
    runs: Sequence[tuple[int, Identity]],
    unnamed_runs: Mapping[int, Identity],
    known: Known | None,
    *,
    records: bool,
    levels: Counter[str],
) -> Identities:
    """Refuse the items with a defect, and apply rule 2 to those whom no level names."""
    found: list[Identity | None] = []
    unnamed: dict[int, Identity] = {}
    for number, (count, identity) in enumerate(runs):
        if number in unnamed_runs:
            unnamed.update(dict.fromkeys(range(len(found), len(found) + count), unnamed_runs[number]))
        found += [None if number in unnamed_runs else identity] * count
    for index, reason in scan.defects:
        found[index] = Identity(reason=reason)
        unnamed.pop(index, None)
    if records:
        for index, identity in unnamed.items():
            found[index] = _of_own_span(scan.trace_ids[index], scan.span_ids[index], identity, known, levels)
        return Identities.of(identity for identity in found if identity is not None)
    return Identities.of(_inherit_spans(scan, found, unnamed, known, levels))


def _of_own_span(trace_id: bytes, span_id: bytes, unnamed: Identity, known: Known | None, levels: Counter[str]) -> Identity:
    if known is None:
        return unnamed
    by_trace = known.opened_by(trace_id)
    ids = by_trace or known.span(trace_id, span_id) or _NO_IDS
    if ids[0]:
        levels["trace" if by_trace else "parent"] += 1
    return Identity(*ids, unnamed.sequence)


def named_by(resource: Iterable[KeyValue]) -> Identity:
    """Return the ids that a resource alone names, or the reason for a refusal."""
    level = _level(id_attributes(resource))
    return _explicit(_NOTHING, level, _NOTHING)[0] or _unnamed(_NOTHING, level, _NOTHING)


def bind(identities: Identities, bound: Ids, levels: Counter[str]) -> Identities:
    """Check named ids (nothing is inherited) against the attempt of the sender's key: refuse other attempts, assign the rest to it."""
    held = identities.map(lambda identity: bound_identity(identity, bound))
    levels["key"] += identities.count(lambda each: not each.rollout_id and not bound_identity(each, bound).reason)
    return held


def bound_identity(identity: Identity, bound: Ids) -> Identity:
    """Check one identity against the attempt of the sender's key; return it as refused or as assigned."""
    if identity.reason or (identity.rollout_id, identity.attempt_id) == bound:
        return identity
    if identity.rollout_id in ("", bound[0]) and identity.attempt_id in ("", bound[1]):
        return Identity(*bound, identity.sequence)
    return Identity(reason=KEY)


def refuse_forged(identities: Identities, raw: bytes, *, records: bool) -> Identities:
    """Refuse an agent's spans, or log records, that carry what only services of the stack may send; `raw` is the request's bytes."""
    if not any(name.encode() in raw for name in (_OF_THE_STACKS_RECORDS if records else _OF_THE_STACK)):
        return identities
    reasons = _forged_records(raw) if records else _forged_spans(raw)
    checked = zip(identities, reasons, strict=True)
    return Identities.of(Identity(reason=reason) if reason and not identity.reason else identity for identity, reason in checked)


def _forged_spans(raw: bytes) -> Iterator[str]:
    """Yield why each span is refused from an agent, by its name and attribute keys; empty if it is accepted."""
    request = ExportTraceServiceRequest.FromString(raw)
    spans = (span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans)
    return (_forged((span.name, *(each.key for each in span.attributes)), _OF_THE_STACK) for span in spans)


def _forged_records(raw: bytes) -> Iterator[str]:
    """Yield the same of log records, by their attribute keys."""
    request = ExportLogsServiceRequest.FromString(raw)
    records = (record for group in request.resource_logs for scope in group.scope_logs for record in scope.log_records)
    return (_forged((each.key for each in record.attributes), _OF_THE_STACKS_RECORDS) for record in records)


def _forged(names: Iterable[str], of_the_stack: Mapping[str, str]) -> str:
    return next((why for text in names for name, why in of_the_stack.items() if text == name or text.startswith(f"{name}.")), "")


def learn(scan: Scan, identities: Identities, memory: TraceMemory, *, now: float, by_key: bool = False) -> None:
    """Remember the results of `identify` for later requests; `by_key`: the sender's key is bound to an attempt."""
    end = 0
    for count, identity in identities.runs:
        start, end = end, end + count
        if not identity.rollout_id or identity.reason:
            continue
        for trace_id, run in groupby(scan.trace_ids[start:end]):
            stop = start + sum(1 for _ in run)
            opening = [scan.span_ids[index] for index in within(scan.opening, start, stop)]
            ids = (identity.rollout_id, identity.attempt_id)
            memory.learn(trace_id, scan.span_ids[start:stop], ids, opens=opening, now=now, by_key=by_key)
            start = stop


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
    scan: Scan, found: Sequence[Identity | None], unnamed: Mapping[int, Identity], known: Known | None, levels: Counter[str]
) -> list[Identity]:
    """Apply rule 2 to entries that are None: inherit by the trace, else by the parent, from this request or earlier ones."""
    if not unnamed or known is None:
        return [unnamed[index] if identity is None else identity for index, identity in enumerate(found)]
    opened: dict[bytes, Ids | None] = {}
    for index in scan.opening:
        identity, trace_id = found[index], scan.trace_ids[index]
        if identity is not None and identity.rollout_id:
            ids = (identity.rollout_id, identity.attempt_id)
            opened[trace_id] = ids if opened.get(trace_id, ids) == ids else None
    for trace_id, ids in opened.items():
        before = known.opened_by(trace_id)
        if before is not None and ids is not None and before != ids:
            opened[trace_id] = None
    here: dict[tuple[bytes, bytes], int] = {}
    for index, span in enumerate(zip(scan.trace_ids, scan.span_ids, strict=True)):
        here.setdefault(span, index)
    result: list[Identity] = []
    resolved: dict[int, Ids] = {}
    for index, identity in enumerate(found):
        if identity is None:
            ids = _inherited(index, scan, found, here, opened, known, resolved)
            if ids[0]:
                trace_id = scan.trace_ids[index]
                by_trace = opened[trace_id] if trace_id in opened else known.opened_by(trace_id)
                levels["trace" if by_trace else "parent"] += 1
            identity = Identity(*ids, unnamed[index].sequence)
        result.append(identity)
    return result


def _inherited(
    start: int,
    scan: Scan,
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
        trace_id = scan.trace_ids[index]
        by_trace = opened[trace_id] if trace_id in opened else known.opened_by(trace_id)
        if by_trace is not None:
            ids = by_trace
            break
        parent = (trace_id, scan.parent_ids[index])
        index = here.get(parent)
        if index is None:
            ids = known.span(*parent) or _NO_IDS
    for passed in trail:
        resolved[passed] = ids
    return ids


def _metadata_level(metadata: Mapping[str, str]) -> _Level:
    return _checked(metadata.get(conventions.HEADER_ROLLOUT_ID, ""), metadata.get(conventions.HEADER_ATTEMPT_ID, ""), None)


def _level(ids: bytes) -> _Level:
    """Read the attributes of one level that are ids (Scan)."""
    if not ids:
        return _NOTHING
    return (_read_ids if len(ids) <= MAX_REMEMBERED_BYTES else _read_ids.__wrapped__)(ids)


@lru_cache(MAX_LEVELS)
def _read_ids(ids: bytes) -> _Level:
    first: dict[str, AnyValue] = {}
    for attribute in KeyValueList.FromString(ids).values:
        first.setdefault(attribute.key, attribute.value)
    rollout_id, attempt_id, sequence = (first.get(key) for key in ID_KEYS)
    return _checked(_text(rollout_id), _text(attempt_id), _integer(sequence))


def _checked(rollout_id: str, attempt_id: str, sequence: int | None) -> _Level:
    reason = ""
    if rollout_id and not conventions.is_valid_id(rollout_id):
        reason = ROLLOUT_ID
    elif rollout_id and attempt_id and not conventions.is_valid_id(attempt_id):
        reason = ATTEMPT_ID
    return _Level(rollout_id, attempt_id, sequence, reason)


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
