"""The write-ahead log: what was appended is replayed, whatever is torn off its end."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_otel.collector import faults
from agl_otel.collector.wal import Log
from agl_otel.errors import DataError, SettingsError, UnavailableError

RECORDS = st.lists(st.lists(st.tuples(st.integers(1, 5), st.binary(max_size=40)), min_size=1, max_size=4), max_size=8)


def contents(log: Log) -> list[tuple[int, int, bytes]]:
    return [(record.position, record.kind, record.payload) for record in log.replay()]


@settings(deadline=None, max_examples=60)
@given(groups=RECORDS, segment_bytes=st.integers(1, 200))
def test_what_was_appended_is_replayed_in_order(groups: list[list[tuple[int, bytes]]], segment_bytes: int) -> None:
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
@given(groups=RECORDS.filter(len), damage=st.data())
def test_a_torn_or_damaged_tail_costs_only_itself(groups: list[list[tuple[int, bytes]]], damage: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log = Log(Path(directory))
        ends: list[int] = []
        for group in groups:
            place = log.append(group)[-1]
            ends.append(place.offset + place.length)
        log.close()
        (path,) = Path(directory).glob("*.wal")
        data = bytearray(path.read_bytes())
        at = damage.draw(st.integers(0, len(data)), "torn at")
        if damage.draw(st.booleans(), "flipped, not cut") and at < len(data):
            data[at] ^= 1 << damage.draw(st.integers(0, 7))
        else:
            del data[at:]
            data += damage.draw(st.binary(max_size=12), "garbage after it")
        path.write_bytes(data)

        records = [record for group in groups for record in group]
        again = Log(Path(directory))
        kept = contents(again)
        whole = sum(len(group) for group, end in zip(groups, ends, strict=True) if end <= at)
        assert len(kept) >= whole
        assert [(kind, payload) for _, kind, payload in kept[:whole]] == records[:whole]
        (place,) = again.append([(1, b"after")])
        assert place.position == len(kept)
        again.close()
        third = Log(Path(directory))
        assert contents(third) == [*kept, (len(kept), 1, b"after")]
        assert third.torn_bytes == 0
        third.close()


def test_segments_are_deleted_only_when_all_of_them_is_stored(tmp_path: Path) -> None:
    log = Log(tmp_path, segment_bytes=1)
    for number in range(4):
        log.append([(1, bytes([number])), (1, b"x")])
    assert len(list(tmp_path.glob("*.wal"))) == 4
    log.release(3)
    assert [record.position for record in log.replay()] == [2, 3, 4, 5, 6, 7]
    log.release(100)
    assert [record.position for record in log.replay()] == [6, 7]
    log.close()


def test_a_log_that_turned_over_lets_go_of_all_that_came_before(tmp_path: Path) -> None:
    log = Log(tmp_path)
    assert log.turn_over() == 0
    log.append([(1, b"a"), (1, b"b")])
    assert log.turn_over() == log.turn_over() == 2
    log.append([(1, b"c")])
    log.release(2)
    assert contents(log) == [(2, 1, b"c")]
    log.close()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Where it holds True, there is no room for another segment."""
    answer = [False]

    def refuse() -> None:
        if answer[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(faults.hooks, "segment-opened", refuse)
    return answer


def test_a_segment_that_cannot_be_begun_costs_nothing_that_was_acked(tmp_path: Path, full: list[bool]) -> None:
    log = Log(tmp_path, segment_bytes=20)
    log.append([(1, b"a" * 20)])
    full[0] = True
    for _ in range(2):
        with pytest.raises(UnavailableError, match="No space left"):
            log.append([(1, b"refused")])
    with pytest.raises(UnavailableError, match="No space left"):
        log.turn_over()
    full[0] = False
    log.append([(1, b"b")])
    expected = [(0, 1, b"a" * 20), (1, 1, b"b")]
    assert contents(log) == expected
    log.close()
    again = Log(tmp_path)
    assert contents(again) == expected
    assert again.append([(1, b"c")])[0].position == 2
    again.close()


def test_positions_go_on_after_everything_was_cleared(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append([(1, b"a"), (1, b"b")])
    log.clear()
    assert contents(log) == []
    log.close()
    again = Log(tmp_path)
    assert again.append([(1, b"c")])[0].position == 2
    again.close()


def test_damage_in_an_older_segment_is_kept_aside_and_the_rest_is_read(tmp_path: Path) -> None:
    log = Log(tmp_path, segment_bytes=1)
    for number in range(3):
        log.append([(1, bytes([number]) * 10)])
    log.close()
    first = min(tmp_path.glob("*.wal"))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    again = Log(tmp_path)
    assert [record.position for record in again.replay()] == [1, 2]
    assert first.with_suffix(".damaged").read_bytes() == bytes(data)
    again.close()


def test_reading_a_record_that_was_damaged_says_so(tmp_path: Path) -> None:
    log = Log(tmp_path)
    (place,) = log.append([(1, b"hello")])
    data = bytearray(place.segment.read_bytes())
    data[-1] ^= 1
    place.segment.write_bytes(data)
    with pytest.raises(DataError, match="record 0"):
        log.read(place)
    log.close()


def test_a_log_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="write-ahead log"):
        Log(tmp_path / "file" / "wal")
