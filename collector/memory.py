"""Memory of recent traces, used to identify a span without ids of its own by its trace or its parent.

Bounded and local: the late pass finds in ClickHouse what it has forgotten, and children that arrived before their parents. The caller
passes the time, so that the memory is as testable as the policy that reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Protocol

Ids = tuple[str, str]
"""(rollout id, attempt id); the attempt id may be empty."""

MAX_TRACES: Final = 1_000_000
MAX_SPANS: Final = 1_000_000  # about 150 bytes each
MAX_AGE_SECONDS: Final = 3600.0


class Known(Protocol):
    """The memory, as identification uses it."""

    def opened_by(self, trace_id: bytes) -> Ids | None:
        """Return the ids of the attempt whose `agentlightning.attempt` root span opened this trace; None if there is none or several."""
        ...

    def span(self, trace_id: bytes, span_id: bytes) -> Ids | None:
        """Return the ids of a span that was seen before."""
        ...


class _Trace:
    __slots__ = ("ambiguous", "by_key", "opened", "owner", "seen_at", "several", "spans")

    def __init__(self, owner: Ids, *, by_key: bool) -> None:
        self.owner = owner
        """Ids of the first span."""
        self.several = False
        """Whether there were spans with other ids, too."""
        self.by_key = by_key
        """Whether all senders had bound keys."""
        self.opened: Ids | None = None
        self.ambiguous = False
        self.spans: dict[bytes, Ids] = {}
        self.seen_at = 0.0


class TraceMemory:
    """Remembers up to `max_traces` traces for `max_age_seconds` after their last span, and up to `max_spans` of their spans."""

    def __init__(self, *, max_traces: int = MAX_TRACES, max_spans: int = MAX_SPANS, max_age_seconds: float = MAX_AGE_SECONDS) -> None:
        self._traces: OrderedDict[bytes, _Trace] = OrderedDict()
        self._limits = (max_traces, max_spans, max_age_seconds)
        self.spans_held = 0
        self.ambiguous = 0
        """Number of traces that two attempts claim to have opened."""

    def __len__(self) -> int:
        return len(self._traces)

    def opened_by(self, trace_id: bytes) -> Ids | None:
        """See Known."""
        trace = self._traces.get(trace_id)
        return trace.opened if trace is not None and not trace.ambiguous else None

    def span(self, trace_id: bytes, span_id: bytes) -> Ids | None:
        """See Known."""
        trace = self._traces.get(trace_id)
        return trace.spans.get(span_id) if trace is not None else None

    def learn(
        self, trace_id: bytes, span_ids: Sequence[bytes], ids: Ids, *, opens: Sequence[bytes] = (), now: float, by_key: bool = False
    ) -> None:
        """Remember identified spans; `opens` are those of them that are an attempt's root span.

        `by_key`: the sender's key is bound to this attempt, and it may know the ids of others' traces. Its spans count only until another
        sender contradicts them. `now` is any monotonic clock in seconds.
        """
        trace = self._traces.get(trace_id)
        if trace is None:
            trace = self._traces[trace_id] = _Trace(ids, by_key=by_key)
        else:
            self._traces.move_to_end(trace_id)
        trace.seen_at = now
        if not self._may_identify(trace, ids, by_key=by_key):
            return
        if opens:
            if trace.opened is not None and trace.opened != ids:
                self.ambiguous += not trace.ambiguous
                trace.ambiguous = True
            trace.opened = trace.opened or ids
        held = len(trace.spans)
        # The trace identifies the spans of a trace with one attempt: only spans with other ids need an entry.
        if trace.ambiguous or trace.opened != ids:
            for span_id in span_ids:
                trace.spans.setdefault(span_id, ids)
        for span_id in opens:
            trace.spans[span_id] = ids
        self.spans_held += len(trace.spans) - held
        self._forget(now)

    def _may_identify(self, trace: _Trace, ids: Ids, *, by_key: bool) -> bool:
        """Return whether this sender's ids count for the trace; drop entries of lower authority."""
        differs = trace.several or trace.owner != ids
        if trace.by_key and differs:
            self.spans_held -= len(trace.spans)
            trace.opened, trace.spans = None, {}
        if by_key:
            trace.several = trace.several or (trace.by_key and differs)
            return not differs
        if trace.by_key:
            trace.owner, trace.several, trace.by_key = ids, False, False
        else:
            trace.several = differs
        return True

    def _forget(self, now: float) -> None:
        max_traces, max_spans, max_age = self._limits
        while self._traces:
            trace_id, oldest = next(iter(self._traces.items()))
            if len(self._traces) <= max_traces and self.spans_held <= max_spans and now - oldest.seen_at <= max_age:
                return
            del self._traces[trace_id]
            self.spans_held -= len(oldest.spans)
