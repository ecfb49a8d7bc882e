"""Framed files: a crash, a power loss or a bad disk loses only the affected records, is reported, and duplicates none."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from bisect import bisect_right
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agl_otel.errors import DataError
from agl_otel.service.framed import HEADER_BYTES, Frame, FramedFile, Lost, frame, mend, next_position, read, read_at, remove

Group = Sequence[tuple[int, bytes]]
PAGE = 4096
KINDS = st.integers(1, 5)
GROUPS = st.lists(st.lists(st.tuples(KINDS, st.binary(max_size=60)), min_size=1, max_size=4), min_size=1, max_size=6)
LARGE = st.lists(st.lists(st.tuples(KINDS, st.integers(0, 9000)), min_size=1, max_size=3), min_size=1, max_size=3)


@contextmanager
def folder() -> Generator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def written(path: Path, groups: Sequence[Group]) -> list[bytes]:
    """Append the groups; the file's bytes before the first and after each."""
    file = FramedFile(path)
    states = [b""]
    for group in groups:
        file.write(group)
        states.append(path.read_bytes())
    file.close()
    return states


def flat(groups: Sequence[Group]) -> list[tuple[int, int, bytes]]:
    return [(n, kind, payload) for n, (kind, payload) in enumerate(record for group in groups for record in group)]


def frames(entries: Sequence[Frame | Lost]) -> list[tuple[int, int, bytes]]:
    return [(each.position, each.kind, each.payload) for each in entries if isinstance(each, Frame)]


def lost(entries: Sequence[Frame | Lost]) -> list[Lost]:
    return [each for each in entries if isinstance(each, Lost)]


def group_of(groups: Sequence[Group], position: int) -> int:
    ends = [sum(map(len, groups[: n + 1])) for n in range(len(groups))]
    return next(n for n, end in enumerate(ends) if position < end)


@given(GROUPS)
def test_what_was_written_is_read_in_order(groups: list[Group]) -> None:
    with folder() as place:
        written(place / "log", groups)
        assert frames(read(place / "log")) == flat(groups)
        file, entries = FramedFile.mended(place / "log")
        assert entries == read(place / "log")
        ((position, offset),) = file.write([(7, b"more")])
        assert position == len(flat(groups))
        assert read_at(place / "log", offset, position) == b"more"
        file.close()
        assert frames(read(place / "log")) == [*flat(groups), (position, 7, b"more")]


@settings(max_examples=200)
@given(groups=GROUPS, data=st.data())
def test_one_flipped_bit_loses_one_record_whose_place_and_bytes_are_kept(groups: list[Group], data: st.DataObject) -> None:
    with folder() as place:
        path = place / "log"
        whole = written(path, groups)[-1]
        bit = data.draw(st.integers(0, 8 * len(whole) - 1), "bit")
        bad = bytearray(whole)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        hit = bisect_right(_offsets(groups), bit // 8) - 1
        entries = mend(path)
        (loss,) = lost(entries)
        assert (loss.first, loss.last) == (hit, hit)
        assert loss.damage == (group_of(groups, hit) < len(groups) - 1)
        assert loss.kind in (None, flat(groups)[hit][1])
        assert frames(entries) == [each for each in flat(groups) if each[0] != hit]
        damaged = (place / loss.aside).read_bytes()
        assert damaged == bytes(bad)[loss.offset : loss.offset + loss.size]
        assert flat(groups)[hit][2] in damaged or bit // 8 >= _offsets(groups)[hit] + HEADER_BYTES
        assert read(path) == mend(path) == entries, "a second start finds nothing new, and still knows of the gap"
        assert next_position(entries) == len(flat(groups))


def _offsets(groups: Sequence[Group]) -> list[int]:
    sizes = [HEADER_BYTES + len(payload) + 4 for _, _, payload in flat(groups)]
    return [sum(sizes[:n]) for n in range(len(sizes))]


@settings(max_examples=150)
@given(groups=LARGE, data=st.data())
def test_after_a_power_loss_any_page_of_the_last_group_may_be_missing(groups: list[list[tuple[int, int]]], data: st.DataObject) -> None:
    filled = [[(kind, os.urandom(size)) for kind, size in group] for group in groups]
    with folder() as place:
        path = place / "log"
        *_, before, after = written(path, filled)
        first_page = len(before) // PAGE
        missing = data.draw(st.sets(st.integers(first_page, len(after) // PAGE)), "missing pages")
        found = bytearray(after)
        for page in missing:
            span = slice(page * PAGE, min((page + 1) * PAGE, len(after)))
            found[span] = before[span].ljust(span.stop - span.start, b"\0")
        length = data.draw(st.sampled_from([len(after), len(before), max(len(before), (len(after) - 1) // PAGE * PAGE)]), "length")
        path.write_bytes(found[:length])
        entries = mend(path)
        earlier = flat(filled[:-1])
        assert frames(entries)[: len(earlier)] == earlier
        assert set(frames(entries)) <= set(flat(filled))
        assert not any(each.damage for each in lost(entries))
        if not missing and length == len(after):
            assert frames(entries) == flat(filled)
        reachable = {position for position, start, end in _spans(filled) if end <= length and not _touches(start, end, missing)}
        assert reachable <= {each.position for each in entries if isinstance(each, Frame)}, "whole records of the last group are kept"


def _spans(groups: Sequence[Group]) -> list[tuple[int, int, int]]:
    return [
        (position, start, start + HEADER_BYTES + len(payload) + 4)
        for (position, _, payload), start in zip(flat(groups), _offsets(groups), strict=True)
    ]


def _touches(start: int, end: int, pages: set[int]) -> bool:
    return any(page * PAGE < end and start < (page + 1) * PAGE for page in pages)


@given(GROUPS, st.integers(0, 2**63), KINDS, st.data())
@example([[(1, b"a"), (1, b"b")], [(1, b"c")]], 3, 1, None)
def test_frames_inside_payloads_are_never_read_as_records(groups: list[Group], seed: int, kind: int, data: st.DataObject | None) -> None:
    """An attacker knows the format but not the salt, or sends back a copy of this very file."""
    with folder() as place:
        path = place / "log"
        file = FramedFile(path)
        expected: list[tuple[int, int, bytes]] = []
        for group in groups:
            salt = seed.to_bytes(8, "little")
            strange = b"".join(b"".join(frame(salt, len(expected) + n, len(expected), kind, b"strange")) for n in range(4))
            inner = [(number, payload + strange + path.read_bytes()) for number, payload in group]
            expected += [(position, *record) for (position, _), record in zip(file.write(inner), inner, strict=True)]
        file.close()
        hit = data.draw(st.integers(0, len(expected) - 1), "damaged header") if data is not None else 1
        offset = _offsets([[(number, payload) for _, number, payload in expected]])[hit]
        bad = bytearray(path.read_bytes())
        bad[offset] ^= 1
        path.write_bytes(bad)
        entries = mend(path)
        assert frames(entries) == [each for each in expected if each[0] != hit]
        assert [(each.first, each.last) for each in lost(entries)] == [(hit, hit)]


@given(GROUPS, st.data())
def test_garbage_loses_only_the_overwritten_records(groups: list[Group], data: st.DataObject) -> None:
    with folder() as place:
        path = place / "log"
        whole = written(path, groups)[-1]
        start = data.draw(st.integers(0, len(whole) - 1), "from")
        garbage = data.draw(st.binary(min_size=1, max_size=200), "garbage")
        path.write_bytes(whole[:start] + garbage + whole[start + len(garbage) :])
        entries = mend(path)
        untouched = [each for each, (_, a, b) in zip(flat(groups), _spans(groups), strict=True) if b <= start or a >= start + len(garbage)]
        assert frames(entries)[: sum(b <= start for _, _, b in _spans(groups))] == [
            each for each, (_, _, b) in zip(flat(groups), _spans(groups), strict=True) if b <= start
        ]
        assert set(untouched) <= set(frames(entries)) <= set(flat(groups))
        assert mend(path) == entries


def test_the_report_names_what_is_lost_and_where_its_bytes_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    written(path, [[(1, b"first"), (2, b"second")], [(1, b"third")]])
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"second", b"secone").replace(b"third", b"thirt"))
    with caplog.at_level(logging.WARNING):
        mend(path, describe=lambda kind, payload: f"kind {kind}, {payload.decode()}")
    damaged, torn = (record for record in caplog.records if record.name == "agl_otel.service.framed")
    assert damaged.levelno == logging.ERROR
    assert f"{path}: damaged, lost: record 1 (kind 2, secone);" in damaged.getMessage()
    assert torn.levelno == logging.WARNING
    assert "torn or damaged; it is unknown whether it was acknowledged: record 2 (kind 1, thirt);" in torn.getMessage()
    assert str(tmp_path / "log.damaged") in torn.getMessage()
    assert (tmp_path / "log.damaged").read_bytes().count(b"secone") == 1
    assert [each.about for each in lost(read(path))] == ["kind 2, secone", "kind 1, thirt"]


def test_later_damage_is_kept_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, [[(1, b"first")], [(1, b"second")], [(1, b"third")]])
    for word in (b"first", b"second"):
        path.write_bytes(path.read_bytes().replace(word, word.upper()))
        mend(path)
    assert b"FIRST" in (tmp_path / "log.damaged").read_bytes()
    assert b"SECOND" in (tmp_path / "log.2.damaged").read_bytes()
    assert [(each.first, each.aside) for each in lost(read(path))] == [(0, "log.damaged"), (1, "log.2.damaged")]


@pytest.mark.parametrize("copy", [b"", b"\0" * 12, None], ids=["empty", "zeros", "gone"])
def test_losing_the_copy_of_the_salt_loses_no_record(copy: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, [[(1, b"first")], [(1, b"second")]])
    beside = tmp_path / "log.salt"
    whole = beside.read_bytes()
    if copy is None:
        beside.unlink()
    else:
        beside.write_bytes(copy)
    assert [each.kind for each in mend(path) if isinstance(each, Frame)] == [1, 1]
    assert beside.read_bytes() == whole


def test_an_unreadable_file_is_kept_aside_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"something else\n" * 10)
    file, entries = FramedFile.mended(path)
    assert [(each.first, each.size, each.damage) for each in lost(entries)] == [(0, 150, False)]
    assert (tmp_path / "log.damaged").read_bytes() == b"something else\n" * 10
    file.write([(1, b"goes on")])
    file.close()
    assert frames(read(path)) == [(1, 1, b"goes on")]


@pytest.mark.parametrize("cut", [0, 10, HEADER_BYTES + 3])
def test_what_is_missing_before_the_next_file_of_a_log_is_damage(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "log"
    *_, before, after = written(path, [[(1, b"first")], [(1, b"second"), (1, b"third")]])
    path.write_bytes(after[: len(before) + cut])
    loss = lost(mend(path, end=3))
    assert [position for each in loss for position in range(each.first, each.last + 1)] == [1, 2]
    assert all(each.damage for each in loss)
    assert lost(read(path, end=3)) == loss


def test_a_record_of_the_next_file_is_not_read_from_this_one(tmp_path: Path) -> None:
    """It was written but could be neither synced nor truncated; the next file has another record of its position."""
    path = tmp_path / "log"
    written(path, [[(1, b"first")], [(1, b"given up")]])
    assert frames(mend(path, end=1)) == [(0, 1, b"first")]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = FramedFile(path)
    file.write([(1, b"first")])
    size = path.stat().st_size
    file.write([(1, b"second"), (1, b"third")])
    file.cut(size, 1)
    assert file.write([(1, b"instead")]) == [(1, size)]
    file.close()
    assert frames(read(path)) == [(0, 1, b"first"), (1, 1, b"instead")]


def test_files_are_private_to_their_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written(tmp_path / "log", [[(1, b"first")]])
        (tmp_path / "log").write_bytes(b"damaged")
        mend(tmp_path / "log")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"log": 0o600, "log.salt": 0o600, "log.damaged": 0o600}


def test_a_removed_file_leaves_nothing(tmp_path: Path) -> None:
    written(tmp_path / "log", [[(1, b"first")]])
    remove(tmp_path / "log")
    remove(tmp_path / "log")
    assert not list(tmp_path.iterdir())
    assert read(tmp_path / "log") == mend(tmp_path / "log") == []


def test_a_damaged_single_record_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, [[(1, b"hello")]])
    with pytest.raises(DataError, match="record 1"):
        read_at(path, 0, 1)
    path.write_bytes(path.read_bytes().replace(b"hello", b"hallo"))
    with pytest.raises(DataError, match="record 0"):
        read_at(path, 0, 0)
