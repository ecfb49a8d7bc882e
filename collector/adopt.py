"""Adoption: turn a quiet trace in which no span was identified into a rollout of its own, with mode `production`.

This makes traces of a running product usable for training. Traces with the same `gen_ai.conversation.id` (the first in each) become one
rollout, also those that go quiet when it has ended. The rollout id is derived from the trace id or the conversation's, and the queue
holds one attempt for it; two passes therefore agree, and a pass that died is finished by the next. Order: start the rollout at the queue
(an existing id is returned unchanged), copy the spans and log records, end the attempt. A client that waits for a production rollout to
finish therefore finds its spans. Later spans are copied by the late pass and change nothing at the queue.

The input is read from the root span (see INPUTS); None if it has none. A root span with an error makes a failed attempt. Of a
conversation, the first trace's root has the input, and the last's decides; so a pass starts it with all of its traces that are quiet.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from agl_otel.collector import faults
from agl_otel.collector.late_pass import ADOPTED, CONVERSATION, LatePass, names_in
from agl_otel.queue.client import QueueClient
from agl_otel.queue.updates import AttemptUpdate
from agl_otel.spans.tolerant import json_of
from agl_otel.traces.sql import named_query
from agl_otel.types import AttemptedRollout, EnqueueRolloutRequest
from agl_otel_hook import conventions

TRACES: Final = 100  # per request to the queue, and copied together
NAMED: Final = (
    1_000  # traces that the metadata of a conversation's rollout name: a pass that dies is finished for them, and the others join
)
INPUTS: Final = ("gen_ai.input.messages", "input.value", conventions.OPERATION_INPUT, "traceloop.entity.input")
"""Root span attributes that may hold the input, in order of precedence: OpenTelemetry, OpenInference, ours, OpenLLMetry."""


Adopted = list[tuple[AttemptedRollout, Sequence[str]]]
"""Rollouts, each with the ids of traces that it is made of."""


class Quiet(NamedTuple):
    """The quiet traces that become one rollout, one or several of a conversation: a row of sql/adopt_rollouts.sql."""

    conversation: str
    """Empty if no span has one."""
    trace_ids: Sequence[str]
    """In order of their beginnings."""
    root: tuple[str, str, Mapping[str, str]]
    """Name, service and inputs of the first trace's root."""
    outcome: tuple[str, str]
    """Status and its message of the root of the trace that ended last."""
    first: float
    """Unix seconds."""
    last: float

    @property
    def rollout_id(self) -> str:
        """The id of the rollout that the traces become, or become a part of."""
        if self.conversation:
            return CONVERSATION + hashlib.sha256(self.conversation.encode()).hexdigest()[:32]
        return ADOPTED + self.trace_ids[0]


def request(quiet: Quiet) -> EnqueueRolloutRequest:
    """Build the request for the rollout that these traces become."""
    name, service, inputs = quiet.root
    status, message = quiet.outcome
    error = message or "the root span ended with an error"
    metadata: dict[str, Any] = {
        "trace_id": quiet.trace_ids[0],
        "service": service,
        "name": name,
        "first_time": quiet.first,
        "last_time": quiet.last,
        **({"conversation_id": quiet.conversation, "trace_ids": [*quiet.trace_ids[:NAMED]]} if quiet.conversation else {}),
        **({"error": error} if status == "Error" else {}),
    }
    return EnqueueRolloutRequest(input=input_of(inputs), mode="production", rollout_id=quiet.rollout_id, metadata=metadata)


def input_of(attributes: Mapping[str, str]) -> Any:
    """Return the input, parsed if it is a JSON list or object; None if no attribute holds one."""
    text = next((attributes[key] for key in INPUTS if attributes.get(key)), None)
    if text is None or text[:1] not in ("[", "{"):
        return text
    try:
        return json_of(text)
    except ValueError:
        return text


class Adoption:
    """Makes rollouts of quiet traces. Errors of ClickHouse and of the queue end a pass; the next one continues."""

    def __init__(self, late: LatePass, queue: QueueClient, *, quiet_seconds: float) -> None:
        self._late = late
        self._queue = queue
        self._quiet_ms = int(quiet_seconds * 1000)
        self.counts: Counter[str] = Counter()
        """adopted: number of rollouts ended since the start."""

    async def run(self, since_ms: int, now_ms: int, *, unidentified: bool) -> None:
        """Adopt the traces that went quiet since the pass at `since_ms` (0: all), and finish what an earlier pass left unfinished.

        `unidentified`: whether this pass's LatePass.run found spans without ids; spans received since then are not quiet yet.
        """
        await self._finish(await self._unfinished())
        if not unidentified:
            return
        times = {"quiet": now_ms - self._quiet_ms, "since": max(0, since_ms - self._quiet_ms)}
        for part in await self._late.parts(since_ms):
            async for traces in self._late.traces("adopt_traces", {**part, **times, "limit": TRACES}):
                await self._finish(await self._start(traces, times))

    async def _start(self, traces: Sequence[str], times: Mapping[str, int]) -> Adopted:
        """Start the rollouts of these traces, a conversation with all its quiet ones: they decide its input and outcome."""
        params = {"traces": list(traces), "inputs": list(INPUTS), **times, **names_in("adopt_rollouts")}
        rows = await self._late.rows(named_query("adopt_rollouts"), params)
        found = {quiet.rollout_id: quiet for quiet in (Quiet(*row) for row in rows)}
        started = await self._queue.start([request(quiet) for quiet in found.values()])
        faults.failpoint("adopt-started")
        return [(rollout, found[rollout.rollout_id].trace_ids) for rollout in started]

    async def _unfinished(self) -> Adopted:
        """Find the rollouts that an earlier pass started and did not end."""
        adopted: Adopted = []
        for prefix in (ADOPTED, CONVERSATION):
            found = await self._queue.query_rollouts(
                rollout_id_contains=prefix, mode_in=["production"], status_in=["preparing", "running"], limit=1000
            )
            for rollout in found.items:
                if isinstance(rollout, AttemptedRollout) and rollout.rollout_id.startswith(prefix):
                    adopted.append((rollout, (rollout.metadata or {}).get("trace_ids") or [rollout.rollout_id.removeprefix(ADOPTED)]))
        return adopted

    async def _finish(self, adopted: Adopted) -> None:
        """Copy the spans and logs of the traces with the ids of their rollouts, and end the open attempts."""
        if not adopted:
            return
        rollouts = [rollout for rollout, _ in adopted]
        ids = {trace_id: (rollout.rollout_id, rollout.attempt.attempt_id) for rollout, traces in adopted for trace_id in traces}
        for start in range(0, len(ids), TRACES):
            traces = [*ids][start : start + TRACES]
            await self._late.copy_spans(traces, ids)
            await self._late.copy_logs(traces)
        faults.failpoint("adopt-copied")
        ends = [_end(rollout) for rollout in rollouts if rollout.attempt.status in ("preparing", "running")]
        if ends:
            await self._queue.update_attempts(ends)
        self.counts["adopted"] += len(ends)


def _end(rollout: AttemptedRollout) -> AttemptUpdate:
    error = (rollout.metadata or {}).get("error")
    return AttemptUpdate(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        status="succeeded" if error is None else "failed",
        error=error,
    )
