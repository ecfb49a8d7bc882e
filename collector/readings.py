"""What the collector's metrics read: one table of instruments over the counters of its parts. The prefix of the names is agl.collector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agl_otel.adapters.otlp_masking import Masker
from agl_otel.collector.commit import GroupCommit
from agl_otel.collector.core import Core
from agl_otel.collector.disk import DiskBudget, Level
from agl_otel.collector.forward import Forwarder
from agl_otel.collector.heartbeat import Heartbeats
from agl_otel.collector.intake import Intake
from agl_otel.collector.maintenance import Maintenance
from agl_otel.collector.refusals import Refusals
from agl_otel.collector.store_batch import BatchStore
from agl_otel.collector.store_watch import StoreWatch
from agl_otel.collector.telemetry import Readings, Telemetry
from agl_otel.collector.values import REPEATED
from agl_otel.collector.write import Writer
from agl_otel.net.in_flight import InFlight

SIGNALS: Final = ("traces", "logs", "metrics")
LEVEL_NUMBERS: Final[dict[Level, int]] = {"ok": 0, "warning": 1, "full": 2}
NO_ATTRIBUTES: Final[Mapping[str, str]] = {}


@dataclass(frozen=True)
class Parts:
    """The parts of the collector that the instruments read."""

    intake: Intake
    writer: Writer
    commit: GroupCommit
    store: BatchStore
    heartbeats: Heartbeats
    disk: DiskBudget
    in_flight: InFlight
    forwarder: Forwarder | None
    masker: Masker | None
    store_watch: StoreWatch
    refusals: Refusals
    core: Core
    maintenance: Maintenance


_Read = Callable[[Parts], Readings]


def _one(read: Callable[[Parts], float]) -> _Read:
    return lambda parts: [(read(parts), NO_ATTRIBUTES)]


def _counted(key: str) -> _Read:
    return _one(lambda parts: parts.intake.counts[key])


def _taken(parts: Parts) -> Readings:
    return [(parts.intake.counts[signal], {"signal": signal}) for signal in SIGNALS]


def _received(parts: Parts) -> Readings:
    refused = dict.fromkeys(SIGNALS, 0)
    for (signal, _), count in parts.intake.rejected.items():
        refused[signal] += count
    return [(parts.intake.counts[signal] + refused[signal], {"signal": signal}) for signal in SIGNALS]


def _forwarded(parts: Parts) -> Readings:
    counts = parts.forwarder.counts if parts.forwarder is not None else {}
    return [(count, {"outcome": outcome}) for outcome, count in counts.items() if outcome != "retries"]


def _masked(parts: Parts) -> Readings:
    counts = parts.masker.counts if parts.masker is not None else {}
    return [(count, {"what": what}) for what, count in counts.items()]


COUNTERS: Final[tuple[tuple[str, str, str, _Read], ...]] = (
    ("requests", "{request}", "OTLP requests that could be parsed, resends apart", _counted("requests")),
    (
        "refused_requests",
        "{request}",
        "requests refused as a whole, by reason and transport",
        lambda p: [(count, {"reason": reason, "transport": transport}) for (reason, transport), count in p.refusals.counts.items()],
    ),
    ("request_bytes", "By", "bytes of the requests, decompressed", _counted("bytes")),
    ("received", "{item}", "spans, log records and data points that came", _received),
    ("accepted", "{item}", "of them, those that were taken", _taken),
    (
        "rejected",
        "{item}",
        "of them, those that were refused, by reason",
        lambda p: [(count, {"signal": signal, "reason": reason}) for (signal, reason), count in p.intake.rejected.items()],
    ),
    (
        "identified",
        "{item}",
        "spans and log records with a rollout id, by the level that gave it",
        lambda p: [(count, {"level": level}) for level, count in p.intake.levels.items()],
    ),
    ("unidentified", "{item}", "spans and log records that no rule identifies; kept with empty ids", _counted("unidentified")),
    ("ambiguous_traces", "{trace}", "traces that two attempts claim to have opened", _one(lambda p: p.intake.memory.ambiguous)),
    (
        "ambiguous_evaluations",
        "{evaluation}",
        "evaluations whose response is of several attempts' calls; they get no ids",
        _one(lambda p: p.maintenance.counts()["ambiguous"]),
    ),
    ("resent", "{request}", "requests that came again; stored once", _counted("resent")),
    ("logged", "{request}", "requests that are on disk in the log", _counted("logged")),
    ("fsyncs", "{fsync}", "groups that were made durable together", _one(lambda p: p.commit.groups)),
    ("batches", "{batch}", "inserts", _one(lambda p: p.writer.batches)),
    ("inserted", "{row}", "rows that are visible to queries", _one(lambda p: p.store.counts["rows"])),
    ("recovered", "{row}", "of them, those that a batch in doubt still missed", _one(lambda p: p.store.counts["recovered"])),
    ("kept_aside", "{request}", "requests that cannot be stored, kept in refused/", _one(lambda p: p.store.counts["refused"])),
    (
        "repeated_keys",
        "{key}",
        "keys of attributes that were given again; the first counts, the others are dropped",
        _one(lambda p: p.store.counts[REPEATED]),
    ),
    (
        "unavailable",
        "{request}",
        "requests refused for now, which clients repeat, by reason",
        lambda p: [(p.disk.refused, {"reason": "disk"}), (p.in_flight.refused, {"reason": "in_flight"})],
    ),
    ("heartbeat_failures", "{call}", "reports that the queue did not take; sent again later", _one(lambda p: p.heartbeats.failures)),
    ("masked", "{item}", "texts that rules took out, and calls without their token ids", _masked),
    ("forwarded", "{request}", "copies for the second endpoint, by what became of them", _forwarded),
)
"""(name, unit, description, reader of the value)."""

GAUGES: Final[tuple[tuple[str, str, str, _Read], ...]] = (
    ("backlog", "{row}", "rows in the log that are not stored yet", _one(lambda p: p.writer.backlog)),
    ("log_bytes", "By", "size of the write-ahead log", _one(lambda p: p.commit.bytes_held)),
    ("log_budget_bytes", "By", "how large it may grow", _one(lambda p: p.disk.budget_bytes)),
    ("disk_free_bytes", "By", "free disk where the log lies", _one(lambda p: p.disk.free_bytes)),
    ("disk_level", "1", "0 fine, 1 warning, 2 full: nothing more is taken", _one(lambda p: LEVEL_NUMBERS[p.disk.level])),
    ("store_problems", "{problem}", "its disk is full, or a damaged part's rows may be lost", _one(lambda p: len(p.store_watch.problems))),
    (
        "compiled_core",
        "1",
        "1 if the compiled core reads requests, 0 if the slower Python code does",
        _one(lambda p: int(p.core.name == "compiled")),
    ),
    ("in_flight_bytes", "By", "requests between the socket and the disk", _one(lambda p: p.in_flight.bytes)),
    ("forward_queue_bytes", "By", "copies that wait", _one(lambda p: p.forwarder.queued_bytes if p.forwarder else 0)),
    ("traces_remembered", "{trace}", "traces by which later spans can be identified", _one(lambda p: len(p.intake.memory))),
)
"""(name, unit, description, reader of the value)."""


def watch(telemetry: Telemetry, parts: Parts) -> None:
    """Create every instrument of the tables."""

    def bind(read: _Read) -> Callable[[], Any]:
        return lambda: read(parts)

    for name, unit, description, read in COUNTERS:
        telemetry.count(name, unit, description, bind(read))
    for name, unit, description, read in GAUGES:
        telemetry.gauge(name, unit, description, bind(read))
