"""The proxy's journal on a full disk: its files stay bounded, and it recovers when there is room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanKind

from agl_otel.proxy import journal as journals
from agl_otel.proxy.journal import END, HEAD, LOCK, LOSSY, SUFFIX, WHOLE, Journal, boot_id, packed, without
from agl_otel.proxy.recovery import read_journal
from agl_otel.service.framed import FramedFile
from agl_otel_hook.ledger import Count, Ledger
from agl_otel_hook.whole import Begun, WholeSpan, WholeSpans
from tests.small_disk import no_file_over

KEY = ("ro", "at")
SALT_ONLY = 30  # bytes: room for a salt, and not for a HEAD


class Kept:
    """A journal that is tidied by hand, and its spans."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger()
        self.spans = WholeSpans("scope", Resource({}), self.ledger, export=lambda _: None, on_idle=lambda _: None)
        self.journal = Journal(folder, self.ledger, self.spans.head())

    def call(self, size: int = 100) -> WholeSpan:
        span = self.begin()
        made = self.spans.made(span, "call", SpanKind.CLIENT, {"text": "x" * size}, 1, 2)
        self.journal.end(span, [made])
        return made

    def begin(self) -> Begun:
        span = self.spans.begin(KEY, None)
        self.journal.start(span)
        return span

    def tidy(self, times: int) -> None:
        for _ in range(times):
            with contextlib.suppress(OSError):
                self.journal.tidy()

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def segments(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{SUFFIX}"))

    def dropped(self) -> int:
        count = self.ledger.count(KEY)
        return count.dropped if count is not None else 0


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    monkeypatch.setattr(journals, "TIDY_SECONDS", 3600.0)
    kept = Kept(tmp_path / "journal")
    yield kept
    kept.journal.close()


@pytest.mark.parametrize("limit", [1, SALT_ONLY])
def test_a_full_disk_does_not_leak_files_or_descriptors(kept: Kept, limit: int) -> None:
    with no_file_over(limit):
        span = kept.call()
        kept.journal.settled([span])
        kept.tidy(1)
        before = kept.files(), descriptors()
        kept.tidy(20)
        assert (kept.files(), descriptors()) == before
        assert [name for name in kept.files() if not name.startswith("000000000001")] == [LOCK, LOSSY]
    kept.tidy(2)
    assert kept.journal.trouble == "" and WHOLE in kept.files()


def test_no_segments_pile_up_after_a_full_disk_while_the_collector_is_down(kept: Kept) -> None:
    unsent = kept.call(journals.SEGMENT_BYTES)
    kept.tidy(1)
    with no_file_over(1):
        kept.journal.settled([kept.call()])
    kept.tidy(3)
    before = kept.files()
    kept.tidy(20)
    assert kept.files() == before
    kept.journal.settled([unsent])
    kept.tidy(3)
    assert kept.journal.trouble == "" and len(kept.segments()) == 1


def test_records_that_cannot_be_copied_keep_their_segment(kept: Kept) -> None:
    room_for_a_head = kept.segments()[0].stat().st_size + 1
    under_way = kept.begin()
    kept.journal.settled([kept.call()])
    with no_file_over(room_for_a_head):
        kept.tidy(20)
        assert len(kept.segments()) == 2
    assert kept.dropped() == 0 and kept.journal.trouble == ""
    kept.tidy(1)
    assert len(kept.segments()) == 1
    assert list(read_journal(kept.folder).attempts[KEY, under_way.marker].open) == [f"{under_way.context.span_id:016x}"]


def test_a_call_that_was_never_forwarded_is_not_missing_and_its_attempt_sealed(kept: Kept) -> None:
    waiting = kept.spans.begin(KEY, None)
    kept.journal.known(waiting)
    left = read_journal(kept.folder)
    assert left.count((KEY, waiting.marker)) == Count(waiting.marker, 0, 0)
    kept.journal.start(waiting)
    kept.journal.known(waiting)
    left = read_journal(kept.folder)
    assert left.count((KEY, waiting.marker)) == Count(waiting.marker, 1, 0)
    kept.journal.end(waiting, [kept.spans.made(waiting, "call", SpanKind.CLIENT, {}, 1, 2)])
    assert not read_journal(kept.folder).attempts[KEY, waiting.marker].open


@pytest.mark.parametrize("limit", [1, SALT_ONLY, 100])
def test_a_failed_deletion_leaves_the_journal_unchanged(tmp_path: Path, limit: int) -> None:
    path = tmp_path / f"1{SUFFIX}"
    file = FramedFile(path)
    file.write([(HEAD, packed([boot_id(), 0]))])
    for name in ("ro-1", "ro-2"):
        file.write([(END, packed([name, "at-1", "00" * 8, "0" * 32, "0" * 16, 1, 0, "0" * 16]))])
    file.close()
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}, descriptors()
    with no_file_over(limit), pytest.raises(OSError, match="File too large"):
        without(path, {"ro-1"})
    assert ({each.name: each.read_bytes() for each in tmp_path.iterdir()}, descriptors()) == before
    without(path, {"ro-1"})
    assert b"ro-1" not in b"".join(each.read_bytes() for each in tmp_path.iterdir())
