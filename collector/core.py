"""The compiled core (native/), where it is installed, and else its specification in Python: both read requests and build rows alike."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, Protocol

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.collector import crowded, expansion
from agl_otel.collector.decode import LOG_COLUMNS, SERVICE_NAME, TRACE_COLUMNS, Accepted, JsonRows, log_rows, span_rows
from agl_otel.collector.journal import Request
from agl_otel.collector.scan import (
    EARLIEST_UNIX_NANO,
    ID_KEYS,
    MAX_SPAN_TOKENS,
    PARENT_ID,
    SPAN_ID,
    TIMESTAMP,
    TOO_MANY_ATTRIBUTES,
    TOO_MANY_TOKENS,
    TRACE_ID,
    Scan,
    scan_records,
    scan_spans,
)
from agl_otel.collector.values import TOKEN_COLUMNS
from agl_otel.errors import DataError, SettingsError
from agl_otel.traces.schema import DERIVED, derived_columns
from agl_otel_hook import conventions

try:
    from agl_otel.collector import _native  # pyright: ignore[reportAttributeAccessIssue] - built by `make setup` where cargo is at hand
except ImportError:
    _native = None

COMPILED: Final = _native is not None
"""Whether the compiled core is installed."""
_logger = logging.getLogger(__name__)
Kind = Literal["traces", "logs"]
_DEFECTS: Final = {
    "trace_id": TRACE_ID,
    "span_id": SPAN_ID,
    "parent_id": PARENT_ID,
    "timestamp": TIMESTAMP,
    "attributes": TOO_MANY_ATTRIBUTES,
    "tokens": TOO_MANY_TOKENS,
}


class Rows(Protocol):
    """The rows of a batch in one table."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns of the table that the rows have."""
        ...

    @property
    def format_name(self) -> str:
        """ClickHouse's name of the format of `take`."""
        ...

    def __len__(self) -> int:
        """The number of rows."""
        ...

    @property
    def repeated(self) -> int:
        """The number of repeated attribute keys, which were dropped."""
        ...

    def add(self, request: Request, numbers: Sequence[int], *, batch: int, first: int, only: frozenset[int] | None) -> None:
        """Add the rows of a request, or those at the positions in the batch that `only` has. Raises ValueError, and then adds nothing.

        `numbers` has the sequence number of each accepted item, and `first` is the position of the first of them.
        """
        ...

    def take(self) -> Iterable[bytes]:
        """Return the rows, in pieces; they can be taken once."""
        ...


class Core(Protocol):
    """Reads requests and builds rows."""

    name: str

    def scan(self, signal: Kind, raw: bytes, *, latest: int, max_attributes: int) -> tuple[Scan, int]:
        """Read a request; return also the approximate size of its rows in bytes (expansion.py). See `scan_spans`.

        Raises DecodeError if it is no such request, DataError if it is too crowded.
        """
        ...

    def rows(self, kind: Kind) -> Rows:
        """Start the rows of a batch."""
        ...


class PythonCore:
    """The specification."""

    name = "python"

    def scan(self, signal: Kind, raw: bytes, *, latest: int, max_attributes: int) -> tuple[Scan, int]:
        """Read a request."""
        messages = crowded.check(signal, raw)
        if signal == "logs":
            records = ExportLogsServiceRequest.FromString(raw)
            return scan_records(records, latest=latest), expansion.size(records, raw, messages)
        spans = ExportTraceServiceRequest.FromString(raw)
        return scan_spans(spans, latest=latest, max_attributes=max_attributes), expansion.size(spans, raw, messages)

    def rows(self, kind: Kind) -> Rows:
        """Start the rows of a batch."""
        return PythonRows(kind)


class PythonRows(JsonRows):
    """Rows as JSON."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(LOG_COLUMNS if kind == "logs" else TRACE_COLUMNS)
        self._kind: Kind = kind

    def add(self, request: Request, numbers: Sequence[int], *, batch: int, first: int, only: frozenset[int] | None) -> None:
        """Add the rows of a request."""
        build = log_rows if self._kind == "logs" else span_rows
        accepted = Accepted(request.identities, iter(numbers), first, only)
        self.rows += build(request.raw, accepted, received_ms=request.received_ms, batch=batch, counts=self.counts)


class CompiledCore:
    """The compiled core."""

    name = "compiled"

    def __init__(self, native: Any) -> None:
        self._native = native
        self._core = native.Core(
            ids=ID_KEYS,
            attempt=conventions.SPAN_ATTEMPT,
            seal=conventions.SPAN_SEAL,
            tokens=tuple(TOKEN_COLUMNS),
            service=SERVICE_NAME,
            **derived_columns(),
        )

    def scan(self, signal: Kind, raw: bytes, *, latest: int, max_attributes: int) -> tuple[Scan, int]:
        """Read a request."""
        bounds: dict[str, int] = {
            "earliest": EARLIEST_UNIX_NANO,
            "latest": latest,
            "max_attributes": max_attributes,
            "max_tokens": MAX_SPAN_TOKENS,
        }
        try:
            found = self._core.scan(signal, raw, **bounds)
        except self._native.MalformedError as error:
            raise DecodeError(str(error)) from None
        except self._native.PanicError as error:
            _logger.exception("a request of %d bytes is refused", len(raw))
            raise DataError(str(error)) from None
        crowded.check_counts(len(raw), found.parts, found.others, found.messages, found.values)
        scan = Scan(
            found.trace_ids,
            found.span_ids,
            found.parent_ids,
            found.groups,
            found.resources,
            found.own,
            [(index, _DEFECTS[name]) for index, name in found.defects],
            found.opening,
            found.silent,
        )
        return scan, found.expanded

    def rows(self, kind: Kind) -> Rows:
        """Start the rows of a batch."""
        return CompiledRows(self._core.rows(kind), kind)


class CompiledRows:
    """Rows as a block of ClickHouse's Native format."""

    format_name = "Native"

    def __init__(self, rows: Any, kind: Kind) -> None:
        self._rows = rows
        self.columns: Sequence[str] = LOG_COLUMNS if kind == "logs" else (*TRACE_COLUMNS, *DERIVED)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def repeated(self) -> int:
        """The number of repeated attribute keys, which were dropped."""
        return self._rows.repeated

    def add(self, request: Request, numbers: Sequence[int], *, batch: int, first: int, only: frozenset[int] | None) -> None:
        """Add the rows of a request."""
        runs = [(count, None if each.reason else (each.rollout_id, each.attempt_id)) for count, each in request.identities.runs]
        self._rows.add(request.raw, runs, numbers, received_ms=request.received_ms, batch=batch, first=first, only=only)

    def take(self) -> Iterable[bytes]:
        """Return the rows."""
        return self._rows.take()


def core(choice: Literal["auto", "compiled", "python"] = "auto") -> Core:
    """Return the compiled core or the one in Python; `auto`: the compiled one if it is installed.

    Raises SettingsError if it must be compiled and is not installed.
    """
    if choice == "python" or (choice == "auto" and _native is None):
        return PythonCore()
    if _native is None:
        raise SettingsError(
            "AGL_CORE=compiled, and the compiled core is not installed: take a wheel for this platform, in a checkout `make core` (needs "
            "Rust's cargo), or AGL_CORE=auto"
        )
    return CompiledCore(_native)
