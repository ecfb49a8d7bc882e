"""Recovery of dead proxies' journals: each independently, whatever its records."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_otel.proxy import recovery as recoveries
from agl_otel.proxy.journal import END, HEAD, LOCK, START, SUFFIX, WHOLE, boot_id, packed
from agl_otel.proxy.recovery import JournalRecovery, read_journal
from agl_otel.service.framed import DAMAGED, LOST, FramedFile
from agl_otel_hook import conventions
from agl_otel_hook.context import Key

MARKER = "0123456789abcdef"


def record(kind: int, rollout_id: str) -> tuple[int, bytes]:
    return kind, packed([rollout_id, "at", MARKER, "1" * 32, "2" * 16, 1, 0, "3" * 16])


def dead(folder: Path, *records: tuple[int, bytes], boot: str | None = None) -> Path:
    """A journal whose lock is free, of this boot of the machine by default."""
    folder.mkdir(parents=True)
    (folder / LOCK).touch()
    (folder / WHOLE).touch()
    file = FramedFile(folder / f"{1:012d}{SUFFIX}")
    file.write([(HEAD, packed([boot or boot_id(), 0]))])
    for each in records:
        file.write([each])
    file.close()
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def key(rollout_id: str) -> Key:
    return rollout_id, "at"


class Collector:
    """Accepts requests, except those of the refused rollout; `go` releases those that wait."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.go = threading.Event()
        self.go.set()
        self.asked = threading.Event()
        self.requests: list[bytes] = []

    def send(self, request: bytes) -> bool:
        self.asked.set()
        self.go.wait()
        if self.refused and self.refused.encode() in request:
            return False
        self.requests.append(request)
        return True

    def seals(self) -> dict[str, tuple[int, int]]:
        """{rollout: (spans, dropped)}."""
        found: dict[str, tuple[int, int]] = {}
        for request in self.requests:
            for resource in ExportTraceServiceRequest.FromString(request).resource_spans:
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    held = {each.key: each.value for each in span.attributes}
                    if conventions.SEAL_SPANS in held:
                        says = held[conventions.SEAL_SPANS].int_value, held[conventions.SEAL_DROPPED].int_value
                        found[held[conventions.ROLLOUT_ID].string_value] = says
        return found


async def all_known(rollout_ids: Sequence[str]) -> Collection[str]:
    return rollout_ids


async def test_a_journal_that_cannot_be_sent_delays_only_its_own_attempts(tmp_path: Path) -> None:
    for number, name in enumerate(("ro-stuck", "ro-1", "ro-2")):
        dead(tmp_path / f"{number}", record(END, name))
    collector = Collector(refused="ro-stuck")
    recovery = JournalRecovery(tmp_path, collector.send, all_known)
    await recovery.start()
    counts = await recovery.counts([key("ro-1"), key("ro-2")], timeout_seconds=300)
    assert [[(count.spans, count.dropped) for count in counts or ()] for counts in counts] == [[(1, 0)], [(1, 0)]]
    counts = await recovery.counts([key("ro-stuck"), key("ro-1"), key("ro-none")], timeout_seconds=0.01)
    assert counts[0] is None and counts[1] and counts[2] == []
    await recovery.stop()
    assert names_in(tmp_path) == ["0"]


async def test_a_rollout_deleted_during_recovery_is_not_sent_or_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recoveries, "REQUEST_BYTES", 1)
    names = [f"ro-{number:03d}" for number in range(200)]
    folder = dead(tmp_path / "0", *(record(END, name) for name in names))
    collector = Collector()
    collector.go.clear()
    recovery = JournalRecovery(tmp_path, collector.send, all_known)
    await recovery.start()
    await asyncio.to_thread(collector.asked.wait)
    closing = asyncio.create_task(recovery.counts([key(names[-1])], timeout_seconds=300))
    await asyncio.sleep(0)
    await recovery.forget(names[1:])
    assert await closing != [None]
    assert not any(name.encode() in path.read_bytes() for name in names[1:] for path in folder.iterdir())
    collector.go.set()
    assert await recovery.counts([key(names[0])], timeout_seconds=300) != [None]
    await recovery.stop()
    assert collector.seals() == {names[0]: (1, 0)} and names_in(tmp_path) == []


async def test_attempts_in_a_journal_from_before_a_reboot_are_incomplete(tmp_path: Path) -> None:
    """Nothing was synced: the last records may be missing."""
    dead(tmp_path / "0", record(END, "ro-before"), boot="another")
    dead(tmp_path / "1", record(END, "ro-since"))
    collector = Collector()
    recovery = JournalRecovery(tmp_path, collector.send, all_known)
    await recovery.start()
    counts = await recovery.counts([key("ro-before"), key("ro-since")], timeout_seconds=300)
    await recovery.stop()
    assert [[(count.spans, count.dropped) for count in counts or ()] for counts in counts] == [[(1, 1)], [(1, 0)]]
    assert collector.seals() == {"ro-before": (1, 1), "ro-since": (1, 0)}


async def test_a_journal_older_than_the_retention_is_removed_unsent(tmp_path: Path) -> None:
    for path in dead(tmp_path / "0", record(END, "ro-old")).iterdir():
        os.utime(path, (999, 999))
    for path in dead(tmp_path / "1", record(END, "ro-new")).iterdir():
        os.utime(path, (1000, 1000))
    collector = Collector()
    recovery = JournalRecovery(tmp_path, collector.send, all_known, oldest=1000)
    await recovery.start()
    assert await recovery.counts([key("ro-old")], timeout_seconds=300) == [[]]
    assert await recovery.counts([key("ro-new")], timeout_seconds=300) != [[]]
    await recovery.stop()
    assert names_in(tmp_path) == [] and collector.seals() == {"ro-new": (1, 0)}


BAD = {
    "no head": (START, b""),
    "no JSON": (START, b"\x04\x00\x00\x00nope"),
    "no list": (START, packed({"a": 1})),
    "too few": (START, packed(["ro-bad"])),
    "a number for a name": (END, packed([1, "at", MARKER, "1" * 32, "2" * 16, 1, 0, "3" * 16])),
    "a text for a count": (END, packed(["ro-bad", "at", MARKER, "1" * 32, "2" * 16, "1", 0, "3" * 16])),
    "no trace id": (END, packed(["ro-bad", "at", MARKER, "trace", "2" * 16, 1, 0, "3" * 16])),
    "an empty HEAD": (HEAD, packed([])),
    "a loss that tells nothing": (LOST, b"nothing"),
    "a loss of another kind": (LOST, b'{"first": "one"}'),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
async def test_a_damaged_journal_is_kept_and_its_attempts_are_incomplete(
    tmp_path: Path, bad: tuple[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    dead(tmp_path / "0", record(END, "ro-1"), bad, record(END, "ro-2"))
    dead(tmp_path / "1", record(END, "ro-3"))
    collector = Collector()
    recovery = JournalRecovery(tmp_path, collector.send, all_known)
    await recovery.start()
    assert None not in await recovery.counts([key(f"ro-{number}") for number in (1, 2, 3)], timeout_seconds=300)
    assert collector.seals() == {"ro-1": (1, 1), "ro-2": (1, 1), "ro-3": (1, 0)}
    await recovery.stop()
    assert names_in(tmp_path) == [f"0{DAMAGED}"]
    assert [str(tmp_path / f"0{DAMAGED}") in said.getMessage() for said in caplog.records if said.levelname == "ERROR"] == [True]
    again = JournalRecovery(tmp_path, collector.send, all_known)
    await again.start()
    assert await again.counts([key("ro-1")], timeout_seconds=300) == [[]], "it was sent"
    await again.forget(["ro-another"])
    await again.stop()
    assert names_in(tmp_path) == [], "nobody can tell whose the damage is"


HEADS = st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=9), max_leaves=9)
FIELDS = st.sampled_from(["ro", "1" * 32, "2" * 16, 1, -1, "", None, 2.5])


@given(
    st.lists(
        st.tuples(
            st.integers(0, 7), st.one_of(st.binary(max_size=9), HEADS.map(packed), st.lists(FIELDS, min_size=8, max_size=8).map(packed))
        )
    )
)
def test_no_record_prevents_reading_and_sending_a_journal(records: list[tuple[int, bytes]]) -> None:
    with TemporaryDirectory() as folder:
        left = read_journal(dead(Path(folder) / "0", *records))
        for request in left.requests():
            ExportTraceServiceRequest.FromString(request)
        assert all(left.count(name).spans >= 0 for name in left.attempts)
