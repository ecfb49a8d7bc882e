"""Adoption: a whole trace that nobody identified, once it is quiet, becomes a rollout of its own, of mode `production`.

So traces of a running product can be trained on. The rollout id is made from the trace id, and the attempt is the one that the queue
holds for it: two passes agree, and one that died is finished by the next. In this order: the rollout is started at the queue (an id that
exists is answered as it is), the spans and log records are copied, the attempt is ended. Who waits for production rollouts to finish
finds their spans. Spans that come later are found by the late pass, and change nothing at the queue.

The input is what the root span says went in (see INPUTS); None where it says nothing. A root span with an error is a failed attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from agl_otel.collector import faults
from agl_otel.collector.late_pass import ADOPTED, LatePass
from agl_otel.queue.client import QueueClient
from agl_otel.queue.updates import AttemptUpdate
from agl_otel.spans.tolerant import json_of
from agl_otel.traces.sql import named_query
from agl_otel.types import AttemptedRollout, EnqueueRolloutRequest
from agl_otel_hook import conventions

QUIET_SECONDS: Final = 60.0
TRACES: Final = 100  # started together
INPUTS: Final = ("gen_ai.input.messages", "input.value", conventions.OPERATION_INPUT, "traceloop.entity.input")
"""Attributes of a root span that say what went in, the first that is there counts: OpenTelemetry, OpenInference, ours, OpenLLMetry."""


class Root(NamedTuple):
    """The root span of a trace: a row of sql/adopt_roots.sql."""

    trace_id: str
    name: str
    service: str
    status: str
    message: str
    inputs: Mapping[str, str]
    first: float
    """When the trace began, Unix seconds."""
    last: float

    def request(self) -> EnqueueRolloutRequest:
        """The rollout that this trace becomes."""
        error = self.message or "the root span ended with an error"
        metadata: dict[str, Any] = {
            "trace_id": self.trace_id,
            "service": self.service,
            "name": self.name,
            "first_time": self.first,
            "last_time": self.last,
            **({"error": error} if self.status == "Error" else {}),
        }
        return EnqueueRolloutRequest(input=input_of(self.inputs), mode="production", rollout_id=ADOPTED + self.trace_id, metadata=metadata)


def input_of(attributes: Mapping[str, str]) -> Any:
    """What went in, as JSON where it is JSON; None where no attribute says so."""
    text = next((attributes[key] for key in INPUTS if attributes.get(key)), None)
    if text is None or text[:1] not in ("[", "{"):
        return text
    try:
        return json_of(text)
    except ValueError:
        return text


class Adoption:
    """Makes rollouts of quiet traces. Errors of ClickHouse and of the queue end a pass; the next one goes on."""

    def __init__(self, late: LatePass, queue: QueueClient, *, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._late = late
        self._queue = queue
        self._quiet_ms = int(quiet_seconds * 1000)
        self.counts: Counter[str] = Counter()
        """adopted: rollouts that were ended, ever."""

    async def run(self, since_ms: int, now_ms: int, *, unidentified: bool) -> None:
        """Adopt the traces that went quiet since the pass at `since_ms` (0: all), and finish what an earlier pass left unfinished.

        `unidentified` is what this pass's LatePass.run said: spans that came since then are not quiet.
        """
        await self._finish(await self._unfinished())
        if not unidentified:
            return
        quiet = now_ms - self._quiet_ms
        for part in await self._late.parts(since_ms):
            asked = {**part, "quiet": quiet, "since": max(0, since_ms - self._quiet_ms), "limit": TRACES}
            async for traces in self._late.traces("adopt_traces", asked):
                await self._finish(await self._start(traces))

    async def _start(self, traces: Sequence[str]) -> list[AttemptedRollout]:
        params = {"traces": list(traces), "inputs": list(INPUTS)}
        rows = await self._late.rows(named_query("adopt_roots"), params)
        roots = [Root(*row) for row in rows]  # pyright: ignore[reportArgumentType] the columns are those of Root
        started = await self._queue.start([root.request() for root in roots])
        faults.reach("adopt-started")
        return started

    async def _unfinished(self) -> list[AttemptedRollout]:
        """What a pass that died has started."""
        found = await self._queue.query_rollouts(
            rollout_id_contains=ADOPTED, mode_in=["production"], status_in=["preparing", "running"], limit=1000
        )
        return [rollout for rollout in found.items if isinstance(rollout, AttemptedRollout) and rollout.rollout_id.startswith(ADOPTED)]

    async def _finish(self, rollouts: Sequence[AttemptedRollout]) -> None:
        """Give the spans of these traces their ids, and end the attempts that are open."""
        if not rollouts:
            return
        ids = {r.rollout_id.removeprefix(ADOPTED): (r.rollout_id, r.attempt.attempt_id) for r in rollouts}
        await self._late.copy_spans(list(ids), ids)
        await self._late.copy_logs(list(ids))
        faults.reach("adopt-copied")
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
