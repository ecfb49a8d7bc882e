"""The write-ahead log: appended records are replayed, even if the end of the log is torn."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_otel.collector import faults
from agl_otel.collector.wal import Log, Record
from agl_otel.errors import DataError, SettingsError, UnavailableError
from agl_otel.service.framed import HEADER_BYTES, Lost

RECORDS = st.lists(st.lists(st.tuples(st.integers(1, 5), st.binary(max_size=40)), min_size=1, max_size=4), max_size=8)


def contents(log: Log) -> list[tuple[int, int, bytes]]:
    return [(record.position, record.kind, record.payload) for record in log.replay() if isinstance(record, Record)]


def missing(log: Log) -> list[tuple[int, int, bool]]:
    return [(lost.first, lost.last, lost.damage) for lost in log.replay() if isinstance(lost, Lost)]


@settings(deadline=None, max_examples=60)
@given(groups=RECORDS, segment_bytes=st.integers(1, 200))
def test_appended_records_are_replayed_in_order(groups: list[list[tuple[int, bytes]]], segment_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log = Log(Path(directory), segment_bytes=segment_bytes)
        places = [place for group in groups for place in log.append(group)]
        expected = [(n, kind, payload) for n, (kind, payload) in enumerate(record for group in groups for record in group)]
        assert [log.read(place) for place in places] == [payload for _, _, payload in expected]
        log.close()
        again = Log(Path(directory), segment_bytes=segment_bytes)
        assert contents(again) == expected
        assert again.torn_bytes == 0
        again.close()


@settings(deadline=None, max_examples=100)
@given(groups=RECORDS.filter(len), segment_bytes=st.sampled_from([1, 150, 1 << 20]), damage=st.data())
def test_damage_loses_only_the_damaged_record_and_positions_stay(
    groups: list[list[tuple[int, bytes]]], segment_bytes: int, damage: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log = Log(Path(directory), segment_bytes=segment_bytes)
        places = [place for group in groups for place in log.append(group)]
        log.close()
        records = [(n, *record) for n, record in enumerate(record for group in groups for record in group)]
        hit = damage.draw(st.sampled_from(places), "record")
        data = bytearray(hit.segment.read_bytes())
        data[hit.offset + damage.draw(st.integers(0, HEADER_BYTES + hit.length + 3), "byte")] ^= 1 << damage.draw(st.integers(0, 7), "bit")
        hit.segment.write_bytes(data)
        in_last_group = hit.position >= len(records) - len(groups[-1])

        for start in range(2):
            again = Log(Path(directory))
            assert contents(again) == [record for record in records if record[0] != hit.position]
            assert missing(again) == [(hit.position, hit.position, not in_last_group)]
            assert (again.torn_bytes > 0, again.damaged_bytes > 0) == ((in_last_group, not in_last_group) if start == 0 else (False, False))
            (place,) = again.append([(1, b"after")])
            assert place.position == len(records)
            records.append((place.position, 1, b"after"))
            assert again.read(place) == b"after"
            again.close()


@given(groups=RECORDS.filter(len), cut=st.data())
@settings(deadline=None, max_examples=60)
def test_a_torn_tail_loses_only_the_torn_records(groups: list[list[tuple[int, bytes]]], cut: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log = Log(Path(directory))
        places = [place for group in groups for place in log.append(group)]
        log.close()
        path = places[0].segment
        at = cut.draw(st.integers(0, path.stat().st_size), "torn at")
        path.write_bytes(path.read_bytes()[:at] + cut.draw(st.binary(max_size=12), "garbage after it"))
        records = [(n, *record) for n, record in enumerate(record for group in groups for record in group)]
        again = Log(Path(directory))
        assert contents(again) == [
            record for record, place in zip(records, places, strict=True) if place.offset + HEADER_BYTES + place.length + 4 <= at
        ]
        assert not any(damage for _, _, damage in missing(again))
        assert again.damaged_bytes == 0
        again.close()


def test_a_segment_is_deleted_only_when_all_its_records_are_stored(tmp_path: Path) -> None:
    log = Log(tmp_path, segment_bytes=1)
    for number in range(4):
        log.append([(1, bytes([number])), (1, b"x")])
    assert len(list(tmp_path.glob("*.wal"))) == 4
    log.release(3)
    assert [position for position, _, _ in contents(log)] == [2, 3, 4, 5, 6, 7]
    log.release(100)
    assert [position for position, _, _ in contents(log)] == [6, 7]
    assert len(list(tmp_path.iterdir())) == 2, "a segment and the copy of its salt"
    log.close()


def test_after_a_new_segment_all_earlier_ones_can_be_deleted(tmp_path: Path) -> None:
    log = Log(tmp_path)
    assert log.rotate() == 0
    log.append([(1, b"a"), (1, b"b")])
    assert log.rotate() == log.rotate() == 2
    log.append([(1, b"c")])
    log.release(2)
    assert contents(log) == [(2, 1, b"c")]
    log.close()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A switch: while it holds True, there is no space for another segment."""
    answer = [False]

    def refuse() -> None:
        if answer[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(faults.hooks, "segment-opened", refuse)
    return answer


def test_a_segment_that_cannot_be_opened_loses_no_acked_record(tmp_path: Path, full: list[bool]) -> None:
    log = Log(tmp_path, segment_bytes=20)
    log.append([(1, b"a" * 20)])
    full[0] = True
    for _ in range(2):
        with pytest.raises(UnavailableError, match="No space left"):
            log.append([(1, b"refused")])
    with pytest.raises(UnavailableError, match="No space left"):
        log.rotate()
    full[0] = False
    log.append([(1, b"b")])
    expected = [(0, 1, b"a" * 20), (1, 1, b"b")]
    assert contents(log) == expected
    log.close()
    again = Log(tmp_path)
    assert contents(again) == expected
    assert again.append([(1, b"c")])[0].position == 2
    again.close()


def test_positions_continue_after_the_log_was_cleared(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append([(1, b"a"), (1, b"b")])
    log.clear()
    assert contents(log) == []
    log.close()
    again = Log(tmp_path)
    assert again.append([(1, b"c")])[0].position == 2
    again.close()


def test_a_missing_segment_is_reported_as_lost(tmp_path: Path) -> None:
    log = Log(tmp_path, segment_bytes=1)
    for number in range(3):
        log.append([(1, bytes([number])), (1, b"x")])
    log.close()
    sorted(tmp_path.glob("*.wal"))[1].unlink()
    again = Log(tmp_path)
    assert [position for position, _, _ in contents(again)] == [0, 1, 4, 5]
    assert missing(again) == [(2, 3, True)]
    again.close()


def test_opening_removes_unfinished_files_of_an_earlier_process(tmp_path: Path) -> None:
    Log(tmp_path).close()
    for name in (".00000000000000000000.wal.new", "00000000000000000007.wal.salt"):
        (tmp_path / name).write_bytes(b"x")
    Log(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {"00000000000000000000.wal", "00000000000000000000.wal.salt"}


def test_a_group_that_could_not_be_synced_is_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path)
    log.append([(1, b"a")])
    failed = [True]

    def refuse() -> None:
        if failed[0]:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setitem(faults.hooks, "written", refuse)
    with pytest.raises(UnavailableError, match="Input/output error"):
        log.append([(1, b"refused"), (1, b"refused")])
    failed[0] = False
    assert log.append([(1, b"b")])[0].position == 1
    log.close()
    again = Log(tmp_path)
    assert contents(again) == [(0, 1, b"a"), (1, 1, b"b")]
    assert missing(again) == []
    again.close()


def test_reading_a_damaged_record_raises_an_error(tmp_path: Path) -> None:
    log = Log(tmp_path)
    (place,) = log.append([(1, b"hello")])
    data = bytearray(place.segment.read_bytes())
    data[-1] ^= 1
    place.segment.write_bytes(data)
    with pytest.raises(DataError, match="record 0"):
        log.read(place)
    log.close()


def test_a_log_that_cannot_be_created_is_a_settings_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="write-ahead log"):
        Log(tmp_path / "file" / "wal")
