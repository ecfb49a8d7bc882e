"""Log records of an agent's process. A module of its own because importing the SDK's logs takes a tenth of a second."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

from opentelemetry.sdk._logs import ReadWriteLogRecord
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

from agl_otel_hook import conventions
from agl_otel_hook.context import key_of
from agl_otel_hook.given import GivenKeys, KeyedExporter
from agl_otel_hook.guard import never_raises
from agl_otel_hook.processor import key_of_attributes


class Logs(BatchLogRecordProcessor):
    """The SDK's, which starts anew in a fork when something is logged there, and before that is at its end without waiting for anything.

    Its own shutdown waits half a minute for a thread of the parent, where a library has forked without Python.
    """

    def __init__(self, exporter: Any) -> None:
        super().__init__(exporter)
        self._logged_in = os.getpid()

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        """Take a record (OpenTelemetry calls this)."""
        self._logged_in = os.getpid()
        super().on_emit(log_record)

    def shutdown(self) -> None:
        """Export what is waiting; nothing is in a fork in which nothing was logged."""
        if self._logged_in == os.getpid():
            super().shutdown()


class AttemptLogs(Logs):
    """Writes the ids of the context's attempt onto log records, which a batch forgets, and exports them with the attempt's key."""

    def __init__(self, exporter: Any, given: GivenKeys) -> None:
        keyed: Any = KeyedExporter(exporter, lambda record: given.of(key_of_attributes(record.log_record)))
        super().__init__(keyed)

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        """Mark the record (OpenTelemetry calls this)."""
        _mark(log_record)
        super().on_emit(log_record)


@never_raises
def _mark(record: ReadWriteLogRecord) -> None:
    key, attributes = key_of(record.log_record.context), record.log_record.attributes
    if key is not None and isinstance(attributes, MutableMapping) and conventions.ROLLOUT_ID not in attributes:
        attributes[conventions.ROLLOUT_ID] = key[0]
        if key[1]:
            attributes[conventions.ATTEMPT_ID] = key[1]
