"""The journal of responses keeps them for ten minutes, across restarts, and no longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.journal import ALREADY, Request
from agl_otel.collector.policy import DROPPED
from agl_otel.collector.resends import MAX_FILES, RESEND_SECONDS, Outcome, ResendJournal
from agl_otel.errors import SettingsError, UnavailableError
from tests.small_disk import no_file_over

NOW = 1_750_000_000.0
KEY = 1 << 127


def request(key: int, at: float = NOW, *reasons: str) -> Request:
    return Request("traces", int(at * 1000), Identities.of([Identity("ro-1", reason=reason) for reason in ("", *reasons)]), b"raw", key)


class Place:
    """A folder and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = NOW

    def opened(self, max_entries: int = 100) -> ResendJournal:
        return ResendJournal(self.folder, clock=lambda: self.now, max_entries=max_entries)

    def known_keys(self) -> list[int]:
        journal = self.opened()
        journal.close()
        return [each.key for each in journal.known]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "wal")


def test_responses_are_known_after_a_restart_with_their_outcomes(place: Place) -> None:
    journal = place.opened()
    journal.add([request(1, NOW, "bad", "bad", "worse", DROPPED, ALREADY), request(0, NOW)])
    journal.close()
    again = place.opened()
    assert [(each.key, each.outcome) for each in again.known] == [(1, Outcome(3, "2 × bad; 1 × worse"))]
    again.close()
    assert place.known_keys() == [1], "it is known by every start"


def test_responses_older_than_ten_minutes_leave_memory_and_disk(place: Place) -> None:
    journal = place.opened()
    for minute in range(60):
        place.now = NOW + 60 * minute
        journal.add([request(KEY + minute, place.now)])
        held = b"".join(path.read_bytes() for path in place.folder.glob("*.resends"))
        assert b"%d" % (KEY + minute) in held
        assert minute < 25 or b"%d" % (KEY + minute - 25) not in held
    journal.close()
    assert len([*place.folder.glob("*.resends")]) <= MAX_FILES
    assert place.known_keys() == [KEY + minute for minute in range(50, 60)]
    place.now += RESEND_SECONDS
    assert place.known_keys() == []
    assert sum(path.stat().st_size for path in place.folder.glob("*.resends")) == 0


def test_above_the_limit_the_newest_responses_are_kept(place: Place) -> None:
    journal = place.opened(max_entries=10)
    for number in range(200):
        journal.add([request(KEY + number, NOW + number / 1000)])
    journal.close()
    assert sum(path.read_bytes().count(b"[[") for path in place.folder.glob("*.resends")) < 25
    again = place.opened(max_entries=10)
    again.close()
    assert [each.key for each in again.known] == [KEY + number for number in range(190, 200)]


def test_a_damaged_record_loses_only_itself(place: Place) -> None:
    journal = place.opened()
    for number in range(3):
        journal.add([request(KEY + number)])
    journal.close()
    (path,) = place.folder.glob("*.resends")
    path.write_bytes(path.read_bytes().replace(b"%d" % (KEY + 1), b"%d" % (KEY + 3)))
    assert place.known_keys() == [KEY, KEY + 2]
    assert len([*place.folder.glob("*.damaged")]) == 1


def test_a_refused_write_can_be_repeated(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = place.opened()

    def no_space(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", no_space)
        with pytest.raises(UnavailableError, match="No space left"):
            journal.add([request(KEY)])
    journal.add([request(KEY)])
    journal.close()
    assert KEY in place.known_keys()
    (place.folder.parent / "file").write_text("")
    with pytest.raises(SettingsError, match="journal of resends"):
        ResendJournal(place.folder.parent / "file")


@pytest.mark.parametrize("limit", [1, 30])
def test_a_full_disk_adds_no_file_and_keeps_the_known_responses(place: Place, limit: int) -> None:
    journal = place.opened(max_entries=8)
    for number in range(MAX_FILES * 5):
        journal.add([request(KEY + number, NOW + number / 1000)])
    place.now += RESEND_SECONDS - 1
    with no_file_over(limit):
        for _ in range(20):
            with pytest.raises(UnavailableError):
                journal.add([request(KEY - 1, place.now)])
        assert len([*place.folder.iterdir()]) <= 2 * MAX_FILES
    journal.close()
    assert place.known_keys()[-1:] == [KEY + MAX_FILES * 5 - 1]
