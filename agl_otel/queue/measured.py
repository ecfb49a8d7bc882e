"""The queue's own metrics: calls, transactions and ended rollouts, under Agent Lightning 0.3's names.

0.3 counted the calls of its store, by method, and of its collections. Here the store is this service, and a collection's call is a
transaction of the engine.
"""

from __future__ import annotations

import re
from typing import Final

from agl_otel.errors import AglError
from agl_otel.queue.engine import Signals
from agl_otel.telemetry.meters import Meters

STORE_METHODS: Final = {
    "Enqueue": "enqueue_many_rollouts",
    "Claim": "dequeue_many_rollouts",
    "Start": "start_rollout",
    "UpdateRollouts": "update_rollout",
    "UpdateAttempts": "update_attempt",
    "PutResources": "update_resources",
    "Heartbeat": "update_worker",
    "TakeSequence": "get_many_span_sequence_ids",
    "Wait": "wait_for_rollouts",
}
"""{call: method of 0.3's store}; other calls keep their own names, in snake case."""


def store_method(call: str) -> str:
    """Return the `method` label of a call."""
    return STORE_METHODS.get(call) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", call).lower()


class QueueMeters:
    """The metrics of a queue service."""

    def __init__(self) -> None:
        self.meters = Meters()
        self._calls = self.meters.counter("agl.store.total", "Calls of the queue.", "method", "store_pubmeth", "status")
        self._call_took = self.meters.durations(
            "agl.store.latency", "Seconds of a call, the waiting of a claim and of a wait included.", "method", "store_pubmeth", "status"
        )
        self._transactions = self.meters.counter("agl.collections.total", "Transactions of the queue's database.", "operation", "status")
        self._transaction_took = self.meters.durations(
            "agl.collections.latency", "Seconds from when one is asked for until it is on the disk.", "operation", "status"
        )
        self._ended = self.meters.counter("agl.rollouts.total", "Rollouts that ended.", "status", "mode")
        self._rollout_took = self.meters.durations("agl.rollouts.duration", "Seconds from their start until then.", "status", "mode")

    def called(self, call: str, status: str, seconds: float) -> None:
        """Count a call that has ended; see grpc_server.Observe."""
        method = store_method(call)
        self._calls(method, method, status)
        self._call_took(seconds, method, method, status)

    def committed(self, signals: Signals) -> None:
        """Count the ended rollouts of a committed transaction; signals of other services do not include them."""
        for status, mode, seconds in signals.ended:
            self._ended(status, mode)
            self._rollout_took(seconds, status, mode)

    def transacted(self, operation: str, error: BaseException | None, seconds: float) -> None:
        """Count a transaction that has ended; see engine.Record."""
        status = "OK" if error is None else type(error).__name__ if isinstance(error, AglError) else "UNKNOWN"
        self._transactions(operation, status)
        self._transaction_took(seconds, operation, status)
