"""A runner's ledgers: its own, and those of runners that died."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agl_otel.runner import ledgers as module
from agl_otel.runner.ledgers import Ledgers
from agl_otel_hook import records
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.records import Records

KEY = ("ro-1", "..")  # an id that is no name of a folder
PLACE = (1, 2)
DIES = """
import os, signal, sys
from pathlib import Path
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.records import Records
from agl_otel.runner.ledgers import Ledgers
ledgers = Ledgers("here", "hooked", "python agent.py", Path(sys.argv[1]))
ledgers.begin([("ro-1", ".."), ("ro-2", "at-2")])
Ledger(lambda: Records(str(ledgers.root))).started(("ro-1", ".."), 1, (1, 2))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_ledger_is_read_with_its_agents_command_and_forgotten_when_it_is_handed_in(tmp_path: Path) -> None:
    ledgers = Ledgers("here", "hooked", "python agent.py", tmp_path)
    ledgers.begin([KEY])
    counting = Ledger(lambda: Records(str(ledgers.root)))
    marker = counting.started(KEY, 1, PLACE).marker
    ledger = ledgers.read(KEY)
    (process,) = ledger.processes
    assert (ledger.reach, ledger.command, ledger.problem) == ("hooked", "python agent.py", None)
    assert (process.pid, process.marker, process.begun, process.ended, process.closed) == (os.getpid(), marker, 1, 0, False)
    assert process.runner
    own = " ".join(Path("/proc/self/cmdline").read_text().split("\0"))
    assert process.command and own.startswith(process.command), "as the system has it, as far as there is room"
    ledgers.forget(KEY)
    assert "is gone" in (ledgers.read(KEY).problem or "")
    assert Ledgers("here", base=tmp_path).root == ledgers.root


def test_processes_that_could_keep_no_record_are_handed_in_with_the_reason(tmp_path: Path) -> None:
    ledgers = Ledgers("here", "hooked", "python agent.py", tmp_path)
    ledgers.begin([KEY])
    folder = records.folder_of(ledgers.root, *KEY)
    Ledger(lambda: Records(str(ledgers.root))).started(KEY, 1, PLACE)
    with next(folder.iterdir()).open("r+b") as file:
        file.seek(3136)
        file.write(bytes([errno.EACCES]))
    (folder / f"7-1-{'a' * 16}-{errno.EMFILE}{records.NO_RECORD_SUFFIX}").mkdir(mode=0)
    without, parent = sorted(ledgers.read(KEY).processes, key=lambda process: process.pid)
    assert (without.pid, without.marker, without.no_record) == (7, "a" * 16, os.strerror(errno.EMFILE))
    assert (parent.begun, parent.no_record, parent.fork_without_record) == (1, "", os.strerror(errno.EACCES))
    ledgers.forget(KEY)
    assert not folder.exists()


def test_what_is_handed_in_is_bounded_whatever_the_agent_has_put_there(tmp_path: Path) -> None:
    ledgers = Ledgers("here", "hooked", "python agent.py", tmp_path)
    ledgers.begin([KEY])
    folder = records.folder_of(ledgers.root, *KEY)
    command = ("\N{SNAKE}" * 250).encode()
    header = struct.pack("=8sQQQ", b"AGLLDGR1", 2**64 - 1, 2**64 - 1, len(command)) + command
    slot = records.key_of(*KEY) + b"\xff" * 48
    forged = tmp_path / "forged"
    forged.write_bytes((header.ljust(4096, b"\0") + slot).ljust(records.FILE_BYTES, b"\0"))
    for number in range(records.MAX_FILES):
        os.link(forged, folder / f"{number}{records.FILE_SUFFIX}")
    ledger = ledgers.read(KEY)
    assert (ledger.problem, len(ledger.processes)) == (None, records.MAX_FILES)
    assert len(ledger.model_dump_json().encode()) < 2 << 20
    assert all(process.command for process in ledger.processes)


def test_it_names_the_running_processes_and_never_its_own(tmp_path: Path) -> None:
    ledgers = Ledgers("here", base=tmp_path)
    ledgers.begin([KEY])
    code = "import sys; from agl_otel_hook.records import Records; Records(sys.argv[1]).loaded(*sys.argv[2:]); print(); input()"
    Records(str(ledgers.root)).loaded(*KEY)
    arguments = [sys.executable, "-c", code, str(ledgers.root), *KEY]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert ledgers.running(KEY) == {child.pid}
        assert {process.pid: process.runner for process in ledgers.read(KEY).processes} == {os.getpid(): True, child.pid: False}
        child.kill()
        child.wait()
    assert ledgers.running(KEY) == set()


def test_what_a_dead_runner_left_is_found_by_the_next_one_of_its_store(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert Ledgers("elsewhere", base=tmp_path).left() == []
    alive = Ledgers("here", base=tmp_path)
    alive.begin([("ro-3", "at-3")])
    code = "import sys; from pathlib import Path; from agl_otel.runner.ledgers import Ledgers\n" + (
        "for left in Ledgers('here', base=Path(sys.argv[1])).left(): print(left.rollout_id, left.attempt_id, left.ledger.model_dump_json())"
    )
    lines = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True).stdout.splitlines()
    assert sorted(line.split(" ", 2)[:2] for line in lines) == [["ro-1", ".."], ["ro-2", "at-2"]]
    left = next(line for line in lines if line.startswith("ro-1 "))
    assert '"begun":1,"ended":0' in left and '"runner":true' in left


def test_what_a_dead_runner_left_is_handed_in_by_one(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False)
    code = """
import sys
from pathlib import Path
from agl_otel.runner.ledgers import Ledgers
ledgers = Ledgers("here", base=Path(sys.argv[1]))
print(len(ledgers.left()), flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"2\n"
        second = Ledgers("here", base=tmp_path)
        assert second.left() == []
        first.kill()
        first.wait()
    found = second.left()
    assert len(found) == len(second.left()) == 2
    assert Ledgers("here", base=tmp_path).left() == [], "the other runner of this process has them"
    for left in found:
        second.forget_left(left)
    assert second.left() == []
    assert [*tmp_path.iterdir()] == [second.root]


def test_a_look_that_fails_for_a_moment_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False)
    ledgers = Ledgers("here", base=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_noted", lambda _: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        assert ledgers.left() == []
    assert len(ledgers.left()) == 2


def test_what_nobody_hands_in_for_a_week_goes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False)
    hidden = tmp_path / ".half"
    hidden.mkdir()
    other = Ledgers("elsewhere", base=tmp_path)
    assert other.left() == []
    assert len([*tmp_path.iterdir()]) == 3
    for path in [*tmp_path.rglob("*"), hidden]:
        os.utime(path, (1, 1))
    assert other.left() == []
    assert [*tmp_path.iterdir()] == [other.root]


@pytest.mark.parametrize("spoil", [lambda folder: (folder.rmdir(), folder.touch()), lambda folder: folder.rmdir()], ids=["a file", "gone"])
def test_a_folder_that_an_agent_has_spoilt_is_unreadable_and_goes(tmp_path: Path, spoil: Any) -> None:
    ledgers = Ledgers("here", base=tmp_path)
    ledgers.begin([KEY])
    spoil(records.folder_of(ledgers.root, *KEY))
    assert "its folder" in (ledgers.read(KEY).problem or "")
    assert ledgers.running(KEY) == set()
    ledgers.forget(KEY)
    assert [path.name for path in ledgers.root.iterdir()] == ["lock"]


LOSES_ITS_LOCK = """
import sys
from pathlib import Path
from agl_otel.runner.ledgers import Ledgers
ledgers = Ledgers("here", base=Path(sys.argv[1]))
(ledgers.root / "lock").open().close()  # what closes all files of a process does to a lock of this kind, too
print(ledgers.root, flush=True)
input()
"""


def test_a_runner_that_lost_its_lock_and_lives_keeps_its_folder(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", LOSES_ITS_LOCK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        root = Path(child.stdout.readline().decode().strip())
        assert Ledgers("here", base=tmp_path).left() == []
        assert root.is_dir()
        child.kill()
        child.wait()
    assert Ledgers("here", base=tmp_path).left() == []
    assert not root.exists()


def test_folders_are_made_again_where_somebody_cleared_them(tmp_path: Path) -> None:
    ledgers = Ledgers("here", base=tmp_path)
    shutil.rmtree(ledgers.root)
    ledgers.begin([KEY])
    assert ledgers.read(KEY).problem is None


def test_a_folder_that_others_may_enter_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = module.own_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="only user"):
        module.own_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="only user"):
        module.own_folder()


def test_an_agent_cannot_make_its_runner_follow_a_link(tmp_path: Path) -> None:
    ledgers = Ledgers("here", base=tmp_path)
    ledgers.begin([KEY])
    folder = records.folder_of(ledgers.root, *KEY)
    (folder / f"a{records.FILE_SUFFIX}").symlink_to("/etc/passwd")
    assert "a.ledger" in (ledgers.read(KEY).problem or "")


def test_a_link_in_the_place_of_a_ledger_is_not_followed(tmp_path: Path) -> None:
    """Neither to read, nor to remove, nor to begin: what it names keeps its mode and what is in it."""
    base, target = tmp_path / "base", tmp_path / "target"
    base.mkdir()
    ledgers = Ledgers("here", "hooked", base=base)
    target.mkdir(mode=0o750)
    (target / "kept").write_text("kept")
    folder = records.folder_of(ledgers.root, *KEY)
    ledgers.begin([KEY])
    Ledger(lambda: Records(str(ledgers.root))).started(KEY, 1, PLACE)
    shutil.move(str(folder), target / "moved")
    folder.symlink_to(target / "moved")
    assert "Not a directory" in (ledgers.read(KEY).problem or "") and ledgers.running(KEY) == set()
    folder.unlink()
    folder.symlink_to(target)
    ledgers.begin([KEY])
    assert folder.is_dir() and not folder.is_symlink()
    folder.rmdir()
    folder.symlink_to(target)
    ledgers.forget(KEY)
    assert not folder.is_symlink()
    note = folder.with_suffix(".json")
    note.symlink_to(target / "kept")
    ledgers.begin([KEY])
    assert (target / "kept").read_text() == "kept" and not note.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o750 and sorted(path.name for path in target.iterdir()) == ["kept", "moved"]


def test_a_ledger_that_may_not_be_read_is_removed(tmp_path: Path) -> None:
    ledgers = Ledgers("here", base=tmp_path)
    ledgers.begin([KEY])
    folder = records.folder_of(ledgers.root, *KEY)
    (folder / "something").touch()
    folder.chmod(0)
    ledgers.forget(KEY)
    assert not folder.exists()
