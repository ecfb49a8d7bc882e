"""Processors of an agent's log records. A separate module because importing the SDK's logs takes a tenth of a second."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

from opentelemetry.sdk._logs import ReadWriteLogRecord
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

from agl_otel_hook import conventions
from agl_otel_hook.context import key_of
from agl_otel_hook.guard import never_raises
from agl_otel_hook.processor import key_of_attributes
from agl_otel_hook.request_keys import KeyedExporter, RequestKeys


class Logs(BatchLogRecordProcessor):
    """The SDK's batch processor, except that its shutdown does nothing in a fork that has logged nothing.

    There, if a library forked outside Python, the SDK's shutdown would wait half a minute for a thread of the parent. The first record
    that a fork logs makes the SDK's processor start anew.
    """

    def __init__(self, exporter: Any) -> None:
        super().__init__(exporter)
        self._logged_in = os.getpid()

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        """Queue a record (OpenTelemetry calls this)."""
        self._logged_in = os.getpid()
        super().on_emit(log_record)

    def shutdown(self) -> None:
        """Export the queue; do nothing in a fork that has logged nothing."""
        if self._logged_in == os.getpid():
            super().shutdown()


class AttemptLogs(Logs):
    """Processor that sets the ids of the context's attempt on log records and exports them with its key; a batch loses the context."""

    def __init__(self, exporter: Any, given: RequestKeys) -> None:
        keyed: Any = KeyedExporter(exporter, lambda record: given.of(key_of_attributes(record.log_record)))
        super().__init__(keyed)

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        """Set the ids and queue the record (OpenTelemetry calls this)."""
        _mark(log_record)
        super().on_emit(log_record)


@never_raises
def _mark(record: ReadWriteLogRecord) -> None:
    key, attributes = key_of(record.log_record.context), record.log_record.attributes
    if key is not None and isinstance(attributes, MutableMapping) and conventions.ROLLOUT_ID not in attributes:
        attributes[conventions.ROLLOUT_ID] = key[0]
        if key[1]:
            attributes[conventions.ATTEMPT_ID] = key[1]
