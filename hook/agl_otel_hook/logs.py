"""Processors of an agent's log records. A separate module because importing the SDK's logs takes a tenth of a second."""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from opentelemetry._logs import get_logger_provider
from opentelemetry.sdk._logs import LoggerProvider, LogRecordProcessor
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

from agl_otel_hook import conventions
from agl_otel_hook.context import key_of
from agl_otel_hook.guard import never_raises
from agl_otel_hook.processor import key_of_attributes
from agl_otel_hook.request_keys import KeyedExporter, RequestKeys

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import ReadWriteLogRecord  # before 1.39: LogData

_queue: Final[Any] = getattr(BatchLogRecordProcessor, "on_emit" if hasattr(BatchLogRecordProcessor, "on_emit") else "emit")


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
        _queue(self, log_record)

    def emit(self, log_data: Any) -> None:
        """Queue a record (OpenTelemetry before 1.35 calls this)."""
        self.on_emit(log_data)

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


def add_processors(processors: Iterable[LogRecordProcessor]) -> None:
    """Add processors to the global logger provider, if it is the SDK's."""
    provider = get_logger_provider()
    if isinstance(provider, LoggerProvider):
        for processor in processors:
            provider.add_log_record_processor(processor)


@never_raises
def _mark(record: ReadWriteLogRecord) -> None:
    key = key_of(getattr(record.log_record, "context", None))  # before 1.35 it has none: this is called in the current one
    attributes = record.log_record.attributes
    if key is not None and isinstance(attributes, MutableMapping) and conventions.ROLLOUT_ID not in attributes:
        attributes[conventions.ROLLOUT_ID] = key[0]
        if key[1]:
            attributes[conventions.ATTEMPT_ID] = key[1]
