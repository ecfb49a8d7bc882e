"""Counts that processes write to files, read as by a runner: after any end of a process, with any content of the folder."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from agl_otel_hook import records
from agl_otel_hook.ledger import CHECKED_ATTEMPTS, Count, Ledger
from agl_otel_hook.processor import AttemptProcessor
from agl_otel_hook.records import ReadProcess, ReadSlot, Records, UnreadableError, folder_of, key_of, read

KEY = ("ro-1", "at-1")
OTHER = ("ro-2", "at-2")
PLACE = (1, 2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for key in (KEY, OTHER):
        folder_of(tmp_path, *key).mkdir()
    return tmp_path


def slots(root: Path, key: tuple[str, str] = KEY, *, last: bool = False) -> list[ReadSlot]:
    return [process.slot for process in processes(root, key, last=last) if process.slot is not None]


def processes(root: Path, key: tuple[str, str] = KEY, *, last: bool = False) -> list[ReadProcess]:
    return read(folder_of(root, *key), key_of(*key), last=last)


def counts(slot: ReadSlot) -> tuple[int, int, int, int, bool]:
    return slot.begun, slot.ended, slot.abandoned, slot.dropped, slot.closed


def ledger(root: Path) -> Ledger:
    return Ledger(lambda: Records(str(root)))


def test_a_loaded_hook_is_known_before_its_first_span(root: Path) -> None:
    counting = ledger(root)
    counting.loaded(KEY)
    (process,) = processes(root)
    assert (process.pid, process.start_ticks, process.slot) == (os.getpid(), records.start_ticks(os.getpid()), None)
    assert process.command == records.own_command()[: records.MAX_COMMAND_BYTES]
    assert processes(root, OTHER) == []


def test_a_file_has_all_its_blocks(root: Path) -> None:
    """On a full disk, a hole in it would be a SIGBUS in the agent."""
    ledger(root).loaded(KEY)
    (path,) = folder_of(root, *KEY).iterdir()
    assert path.stat().st_blocks * 512 >= records.FILE_BYTES


def test_counts_are_written_as_spans_begin_and_end(root: Path) -> None:
    counting = ledger(root)
    marker = counting.started(KEY, 1, PLACE).marker
    (slot,) = slots(root)
    assert (slot.marker, counts(slot)) == (marker, (1, 0, 0, 0, False))
    for span in (2, 3):
        counting.started(KEY, span, PLACE)
    counting.ended(KEY, 1, marker=marker)
    counting.ended(KEY, 2, marker=None)  # not sampled, or without its marker: never exported
    counting.dropped(KEY, marker)
    assert [counts(slot) for slot in slots(root)] == [(3, 1, 1, 1, False)]
    counting.close()
    assert [counts(slot) for slot in slots(root)] == [(3, 1, 2, 1, True)]


def test_a_process_continues_to_count_after_reopen(root: Path) -> None:
    counting = ledger(root)
    marker = counting.started(KEY, 1, PLACE).marker
    counting.close()
    counting.reopen()
    assert [counts(slot) for slot in slots(root)] == [(1, 0, 0, 0, False)]
    counting.close()
    counting.ended(KEY, 1, marker=marker)
    assert [counts(slot) for slot in slots(root)] == [(1, 1, 0, 0, True)]
    counting.started(KEY, 2, PLACE)
    assert [counts(slot) for slot in slots(root)] == [(2, 1, 0, 0, False)]


def test_a_span_inside_an_exporter_at_close_is_not_abandoned(root: Path) -> None:
    """It may be stored or lost; counted as abandoned, its loss would go unnoticed."""
    counting, entered, go = ledger(root), threading.Event(), threading.Event()

    class Exports(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            entered.set()
            go.wait()

    ours, provider = AttemptProcessor(counting, fallback=KEY), TracerProvider(shutdown_on_exit=False)
    for processor in (Exports(), ours):
        provider.add_span_processor(processor)
    left_open = provider.get_tracer("a").start_span("left open")
    thread = threading.Thread(target=lambda: provider.get_tracer("a").start_span("work").end())
    thread.start()
    entered.wait()
    counting.close(ours.ending())
    assert [counts(slot) for slot in slots(root)] == [(2, 0, 1, 0, True)]
    go.set()
    thread.join()
    assert [counts(slot) for slot in slots(root)] == [(2, 1, 1, 0, True)]
    assert left_open.is_recording()


def test_a_span_begun_after_the_last_read_is_late_and_not_counted(root: Path) -> None:
    counting = ledger(root)
    marker = counting.started(KEY, 1, PLACE).marker
    assert [counts(slot) for slot in slots(root, last=True)] == [(1, 0, 0, 0, False)]
    assert counting.started(KEY, 2, PLACE) == (marker, True)
    for span in (1, 2):
        counting.ended(KEY, span, marker=marker)
    assert [counts(slot) for slot in slots(root)] == [(1, 1, 0, 0, False)]
    assert counting.started(OTHER, 3, PLACE).late is False


def test_a_process_makes_one_file_for_each_64_attempts(root: Path) -> None:
    counting = ledger(root)
    keys = [(f"ro-many-{number}", "at-1") for number in range(150)]
    for number, key in enumerate(keys):
        folder_of(root, *key).mkdir()
        counting.started(key, number, PLACE)
    assert [len(slots(root, key)) for key in keys] == [1] * 150
    assert len({path.stat().st_ino for path in root.glob(f"*/*{records.FILE_SUFFIX}")}) == 3  # 64 slots each
    for key in keys[:100]:
        counting.forget(key)
        assert slots(root, key) == []


def test_slots_are_reused_after_they_are_read(root: Path) -> None:
    counting = ledger(root)
    for number in range(300):
        key = (f"ro-many-{number}", "at-1")
        folder_of(root, *key).mkdir()
        counting.ended(key, number, marker=counting.started(key, number, PLACE).marker)
        counting.sealed(key, Count(counting.marker, 1, 0))
        assert [counts(slot) for slot in slots(root, key, last=True)] == [(1, 1, 0, 0, False)]
    assert len({path.stat().st_ino for path in root.glob(f"*/*{records.FILE_SUFFIX}")}) == 1


def test_an_attempt_without_a_folder_is_announced(root: Path) -> None:
    unrecorded: list[tuple[str, str]] = []
    counting = Ledger(lambda: Records(str(root)), on_unrecorded=unrecorded.append)
    elsewhere = ("ro-elsewhere", "at-1")
    for span, key in enumerate((KEY, elsewhere, KEY, elsewhere)):
        counting.started(key, span, PLACE)
    assert unrecorded == [elsewhere]


def test_an_attempt_is_recorded_below_the_root_that_has_its_folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.mktemp("own")
    mine = ("ro-mine", "at-1")
    folder_of(own, *mine).mkdir()
    for counting in (ledger(root), Ledger()):
        counting.keep(str(own))
        counting.keep(str(root))
        for span, key in enumerate((mine, KEY)):
            counting.started(key, span, PLACE)
        assert counting.unrecorded() == []
        assert [
            len(slots(place, key)) for place, key in ((own, mine), (root, KEY), (own, KEY), (root, mine)) if folder_of(place, *key).is_dir()
        ] == [1, 1]
        for key in (mine, KEY):
            counting.forget(key)


def test_a_runner_keeps_one_file_in_its_root_for_changing_attempts(root: Path) -> None:
    counting = Ledger()
    counting.keep(str(root))
    for number in range(130):
        key = (f"ro-many-{number}", "at-1")
        folder_of(root, *key).mkdir()
        counting.ended(key, number, marker=counting.started(key, number, PLACE).marker)
        assert [counts(slot) for slot in slots(root, key)] == [(1, 1, 0, 0, False)]
        if number >= 65:  # all slots of the first file are taken
            counting.forget((f"ro-many-{number - 65}", "at-1"))
        if number >= 100:
            shutil.rmtree(folder_of(root, f"ro-many-{number - 65}", "at-1"))
    assert len([*root.glob(f"*{records.FILE_SUFFIX}")]) == 1
    assert len({path.stat().st_ino for path in root.glob(f"*/*{records.FILE_SUFFIX}")}) == 3  # 64 slots each


def test_open_spans_of_a_closed_attempt_are_abandoned_unless_they_end_later(root: Path) -> None:
    counting = ledger(root)
    marker = counting.started(KEY, 1, PLACE).marker
    counting.started(KEY, 2, PLACE)
    counting.started(OTHER, 3, PLACE)
    counting.end_attempt(KEY)
    counting.end_attempt(("ro-unknown", "at-1"))
    assert [counts(slot) for slot in (*slots(root), *slots(root, OTHER))] == [(2, 0, 2, 0, True), (1, 0, 0, 0, False)]
    counting.ended(KEY, 1, marker=marker)
    assert [counts(slot) for slot in slots(root)] == [(2, 1, 1, 0, True)]


def test_a_span_of_an_attempt_that_has_ended_is_late_and_in_no_count(root: Path) -> None:
    counting = ledger(root)
    counting.ended(KEY, 1, marker=counting.started(KEY, 1, PLACE).marker)
    counting.end_attempt(KEY)
    assert counting.started(KEY, 2, PLACE) == ("", True)
    assert not counting.ended(KEY, 2, marker="")
    assert [counts(slot) for slot in slots(root)] == [(1, 1, 0, 0, True)]
    shutil.rmtree(folder_of(root, *KEY))
    counting.forget(KEY)  # as a runner that has completed it
    assert counting.started(KEY, 3, PLACE) == ("", True) and counting.count(KEY) is None
    assert counting.started(OTHER, 4, PLACE).late is False


def test_later_attempts_are_recorded_after_a_folder_is_removed(root: Path) -> None:
    counting = ledger(root)
    counting.started(KEY, 1, PLACE)
    for path in folder_of(root, *KEY).iterdir():
        path.unlink()
    folder_of(root, *KEY).rmdir()
    counting.started(OTHER, 2, PLACE)
    assert [counts(slot) for slot in slots(root, OTHER)] == [(1, 0, 0, 0, False)]


def test_counts_survive_a_kill_and_a_fork_counts_under_its_own_marker(root: Path) -> None:
    code = f"""
import os, signal
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.records import Records
ledger = Ledger(lambda: Records({str(root)!r}))
marker = ledger.started({KEY!r}, 1, (1, 2)).marker
ledger.started({KEY!r}, 2, (1, 2))
if os.fork() == 0:
    ledger.ended({KEY!r}, 1, marker=marker)  # the parent's: counts nothing here
    ledger.started({KEY!r}, 3, (1, 2))
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
ledger.ended({KEY!r}, 1, marker=marker)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    found = slots(root)
    assert sorted(map(counts, found)) == [(1, 0, 0, 0, False), (2, 1, 0, 0, False)]
    assert len({slot.marker for slot in found}) == 2


NO_RECORD = {
    "no descriptor": ("resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))", errno.EMFILE),
    "no room": ("resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))", errno.EFBIG),
}
DROPS = "os.setgroups([]); os.setgid(65534); os.setuid(65534)"
COUNTS = """
import os, resource, signal
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.records import Records
ledger = Ledger(lambda: Records({root!r}))
"""


def in_a_process(root: Path, code: str) -> None:
    done = subprocess.run([sys.executable, "-c", COUNTS.format(root=str(root)) + code], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def with_a_killed_fork(known: str, fork: str, change: str) -> str:
    """Return code of a process whose fork is killed within two spans of KEY, which it begins after `change`."""
    return f"""
KEY = {KEY!r}
{known}
{fork}
    {change}
    for span in (2, 3):
        ledger.started(KEY, span, (1, 2))
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("why", NO_RECORD)
@pytest.mark.parametrize("fork", ["if os.fork() == 0:", "import ctypes\nif ctypes.PyDLL(None).fork() == 0:", "if True:"])
def test_a_process_that_cannot_make_a_record_is_known_once_it_begins_a_span(root: Path, why: str, fork: str) -> None:
    take, expected = NO_RECORD[why]
    code = f"""
if {fork != "if True:"}:
    ledger.started({OTHER!r}, 1, (1, 2))
{fork}
    {take}
    ledger.started({KEY!r}, 2, (1, 2))
    print(ledger.count({KEY!r}).marker, os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""
    in_a_process(root, code)
    (process,) = processes(root)
    assert (process.slot, process.no_record and process.no_record.errno) == (None, expected)
    assert process.no_record is not None and len(process.no_record.marker) == 16
    assert all(other.no_record is None and other.fork_errno == 0 for other in processes(root, OTHER))


def test_a_process_without_a_record_and_without_spans_is_not_reported(root: Path) -> None:
    in_a_process(root, f"{NO_RECORD['no room'][0]}\ntry: ledger.loaded({KEY!r})\nfinally: os.kill(os.getpid(), signal.SIGKILL)\n")
    assert processes(root) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("known", ["ledger.started(KEY, 1, (1, 2))", "ledger.loaded(KEY)"])
@pytest.mark.parametrize("between", ["", "if os.fork(): os.wait(); os._exit(0)"])
def test_a_fork_without_access_to_the_folder_is_known_from_its_parent(root: Path, known: str, between: str) -> None:
    """Also with a fork between the two that has no record yet."""
    root.chmod(0o700)
    known_twice = f"{known}\nledger.started({OTHER!r}, 1, (1, 2))"
    in_a_process(root, with_a_killed_fork(known_twice, "if os.fork() == 0:", f"{between or 'pass'}\n    {DROPS}"))
    (process,) = processes(root)
    assert (process.fork_errno, process.no_record) == (errno.EACCES, None)
    assert [counts(slot) for slot in slots(root)] == ([(1, 0, 0, 0, False)] if "started" in known else [])
    (other,) = processes(root, OTHER)
    assert other.fork_errno == (0 if "started" in known else errno.EACCES)  # without a slot, the errno holds for every attempt of the file


LEAVES = {
    "a chroot": "os.chroot({empty!r})",
    "a mount over the root": "leave(); mount({root!r})",
    "a mount over the folder": "leave(); mount({folder!r})",
    "a mount over what has the root": "leave(); mount({above!r})",
}
LEAVE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def leave():
    assert libc.unshare(0x20000) == 0 and libc.mount(b'none', b'/', None, 1 << 18 | 1 << 14, None) == 0, ctypes.get_errno()
def mount(path):
    assert libc.mount(b'none', path.encode(), b'tmpfs', 0, None) == 0, ctypes.get_errno()
"""


def leaving(root: Path, how: str) -> str:
    """Return code that moves a process to where the folder of KEY is another or missing."""
    empty = root / "empty"
    empty.mkdir()
    return LEAVES[how].format(empty=str(empty), root=str(root), folder=str(folder_of(root, *KEY)), above=str(root.parent))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its root or mount")
@pytest.mark.parametrize("known", ["ledger.started(KEY, 1, (1, 2))", "ledger.loaded(KEY)"])
@pytest.mark.parametrize("fork", ["if os.fork() == 0:", "if ctypes.PyDLL(None).fork() == 0:", "if os.fork() == 0 and os.fork() == 0:"])
@pytest.mark.parametrize("how", LEAVES)
def test_a_fork_that_has_left_the_folder_is_known_from_its_parent(root: Path, how: str, fork: str, known: str) -> None:
    """Its path leads nowhere there, or to a folder that nobody reads."""
    in_a_process(root, LEAVE + with_a_killed_fork(known, fork, leaving(root, how)))
    (process,) = processes(root)
    assert (process.fork_errno, process.no_record) == (errno.ENOENT, None)
    assert [counts(slot) for slot in slots(root)] == ([(1, 0, 0, 0, False)] if "started" in known else [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its root or mount")
@pytest.mark.parametrize("how", LEAVES)
def test_a_fork_of_a_runner_that_has_left_the_folder_is_known_from_it(root: Path, how: str) -> None:
    code = f"""{LEAVE}
ledger = Ledger()
ledger.keep({str(root)!r})
ledger.started({KEY!r}, 1, (1, 2))
if os.fork() == 0:
    {leaving(root, how)}
    ledger.started({KEY!r}, 2, (1, 2))
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""
    in_a_process(root, code)
    assert [process.fork_errno for process in processes(root)] == [errno.ENOENT]
    assert [counts(slot) for slot in slots(root)] == [(1, 0, 0, 0, False)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its root or mount")
@pytest.mark.parametrize("how", LEAVES)
def test_a_process_that_has_left_the_folder_before_its_first_span_is_known(root: Path, how: str) -> None:
    code = f"""{LEAVE}
ledger.loaded({KEY!r})
{leaving(root, how)}
ledger.started({KEY!r}, 1, (1, 2))
os.kill(os.getpid(), signal.SIGKILL)
"""
    in_a_process(root, code)
    assert [(process.slot, process.fork_errno) for process in processes(root)] == [(None, errno.ENOENT)]


def test_a_fork_that_works_for_an_attempt_without_a_folder_is_announced(root: Path) -> None:
    code = f"""
unrecorded = []
ledger = Ledger(lambda: Records({str(root)!r}), on_unrecorded=unrecorded.append)
ledger.started({KEY!r}, 1, (1, 2))
child = os.fork()
if child == 0:
    ledger.started(("ro-elsewhere", "at-1"), 2, (1, 2))
    ledger.started({OTHER!r}, 3, (1, 2))
    os._exit(unrecorded != [("ro-elsewhere", "at-1")])
assert os.wait() == (child, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    in_a_process(root, code)
    found = [*processes(root), *processes(root, OTHER)]
    assert [(process.fork_errno, process.no_record) for process in found] == [(0, None), (0, None)]
    assert [len(slots(root, key)) for key in (KEY, OTHER)] == [1, 1]


def test_a_reused_slot_has_no_fork_errors_of_its_previous_attempt(root: Path) -> None:
    counting = ledger(root)
    counting.started(KEY, 1, PLACE)
    (path,) = folder_of(root, *KEY).iterdir()
    with path.open("r+b") as file:
        file.seek(3136)
        file.write(b"\x0d")
    assert [process.fork_errno for process in processes(root)] == [errno.EACCES]
    counting.forget(KEY)
    counting.started(OTHER, 2, PLACE)
    assert [process.fork_errno for process in processes(root, OTHER)] == [0]


def test_counts_survive_the_reuse_of_their_slot_during_a_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = ledger(root)
    counting.ended(KEY, 1, marker=counting.started(KEY, 1, PLACE).marker)
    mark = records._mark_read  # pyright: ignore[reportPrivateUsage]  # called between the two reads

    def goes_on(*arguments: Any) -> None:
        mark(*arguments)
        counting.started(OTHER, 2, PLACE)

    monkeypatch.setattr(records, "_mark_read", goes_on)
    assert [counts(slot) for slot in slots(root, last=True)] == [(1, 1, 0, 0, False)]


@pytest.mark.parametrize("leaked", [0, 1, 10])
def test_a_worker_frees_read_attempts_despite_leaked_spans(root: Path, leaked: int) -> None:
    counting = ledger(root)
    for number in range(1000):
        key = (f"ro-a{number}", "at")
        folder_of(root, *key).mkdir()
        marker = counting.started(key, number, PLACE).marker
        if number >= leaked:
            counting.ended(key, number, marker=marker)
        processes(root, key, last=True)
    assert len(counting.unsealed()) <= leaked + CHECKED_ATTEMPTS
    assert len({path.stat().st_ino for path in root.glob("*/*.ledger")}) == 1


@pytest.mark.parametrize(
    ("child", "of_child"),
    [
        ("ledger.started(KEY, 2, (1, 2))", [(1, 0, 0, 0, False)]),
        ("ledger.ended(KEY, 1, marker=marker)", []),
        ("ledger.dropped(KEY, marker)", []),
        ("ledger.forget(KEY)", []),
        ("ledger.close(); ledger.reopen()", []),
        ("ledger.close()", []),
    ],
)
def test_a_fork_made_outside_python_counts_separately(root: Path, child: str, of_child: list[tuple[int, int, int, int, bool]]) -> None:
    code = f"""
import ctypes, os
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.records import Records
KEY = {KEY!r}
ledger = Ledger(lambda: Records({str(root)!r}))
marker = ledger.started(KEY, 1, (1, 2)).marker
if ctypes.PyDLL(None).fork() == 0:
    {child}
    assert not ledger.takes(1)
    os._exit(0)
_, status = os.wait()
raise SystemExit(status)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert sorted(counts(slot) for slot in slots(root)) == [(1, 0, 0, 0, False), *of_child]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _link_to_another_attempts(path: Path) -> None:
    root = path.parents[1]
    ledger(root).started(OTHER, 1, PLACE)
    (written,) = folder_of(root, *OTHER).iterdir()
    path.symlink_to(written)


def _short(path: Path) -> None:
    path.write_bytes(b"AGLLDGR1")


def _no_failure(path: Path) -> None:
    path.with_name(path.name + ".failed").mkdir()


def _foreign(path: Path) -> None:
    path.write_bytes(bytes(records.FILE_BYTES))


def _folder(path: Path) -> None:
    path.mkdir()


def _two_counts(path: Path) -> None:
    """Write the file of a process to `path`, with its first slot duplicated."""
    counting = ledger(path.parents[1])
    counting.started(KEY, 1, PLACE)
    (written,) = path.parent.glob(f"*{records.FILE_SUFFIX}")
    written.rename(path)
    with path.open("r+b") as file:
        file.seek(4096)
        slot = file.read(64)
        file.write(slot)


def _long_command(path: Path) -> None:
    path.write_bytes((b"AGLLDGR1" + b"\xff" * 24).ljust(records.FILE_BYTES, b"\0"))


@pytest.mark.parametrize(
    "make", [_no_failure, _fifo, _link, _link_to_another_attempts, _short, _foreign, _folder, _long_command, _two_counts]
)
def test_a_malformed_file_makes_a_ledger_unreadable(root: Path, make: Callable[[Path], None]) -> None:
    name = f"x\n{records.FILE_SUFFIX}"
    make(folder_of(root, *KEY) / name)
    with pytest.raises(UnreadableError, match=r"'x\\n\.ledger(\.failed)?'"):
        processes(root)


def test_a_ledger_with_too_many_files_is_unreadable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_FILES", 3)
    for number in range(4):
        (folder_of(root, *KEY) / f"{number}{records.FILE_SUFFIX}").touch()
    with pytest.raises(UnreadableError, match="more than 3 files"):
        processes(root)


def test_a_removed_folder_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="is gone"):
        processes(tmp_path)


def test_a_process_survives_a_full_disk_without_a_record(tmp_path: Path) -> None:
    """A file that cannot be allocated in full is not mapped: a hole in it would be a SIGBUS."""
    code = f"""
import resource
from agl_otel_hook.records import Records
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    Records({str(tmp_path)!r}).loaded(*{KEY!r})
except OSError as error:
    print(type(error).__name__)
"""
    folder_of(tmp_path, *KEY).mkdir()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "OSError"
    assert list(folder_of(tmp_path, *KEY).iterdir()) == []
