"""A runner's own ledgers, and those of dead runners."""

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

KEY = ("ro-1", "..")  # not usable as a folder name
PLACE = (1, 2)
DIES = """
import os, signal, sys
from pathlib import Path
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.records import Records
from agl_otel.runner.ledgers import Ledgers
ledgers = Ledgers("hooked", "python agent.py", Path(sys.argv[1]))
ledgers.create([("ro-1", ".."), ("ro-2", "at-2")])
Ledger(lambda: Records(str(ledgers.root))).started(("ro-1", ".."), 1, (1, 2))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_ledger_is_read_with_its_agents_command_and_removed_after_its_report(tmp_path: Path) -> None:
    ledgers = Ledgers("hooked", "python agent.py", tmp_path)
    ledgers.create([KEY])
    counting = Ledger(lambda: Records(str(ledgers.root)))
    marker = counting.started(KEY, 1, PLACE).marker
    ledger = ledgers.read(KEY)
    (process,) = ledger.processes
    assert (ledger.reach, ledger.command, ledger.problem) == ("hooked", "python agent.py", None)
    assert (process.pid, process.marker, process.begun, process.ended, process.closed) == (os.getpid(), marker, 1, 0, False)
    assert process.runner
    own = " ".join(Path("/proc/self/cmdline").read_text().split("\0"))
    assert process.command and own.startswith(process.command), "the system's command line, cut to the room in the record"
    ledgers.remove(KEY)
    assert "is gone" in (ledgers.read(KEY).problem or "")
    assert Ledgers(base=tmp_path).root == ledgers.root


def test_processes_without_a_record_are_reported_with_the_reason(tmp_path: Path) -> None:
    ledgers = Ledgers("hooked", "python agent.py", tmp_path)
    ledgers.create([KEY])
    folder = records.folder_of(ledgers.root, *KEY)
    Ledger(lambda: Records(str(ledgers.root))).started(KEY, 1, PLACE)
    with next(folder.iterdir()).open("r+b") as file:
        file.seek(3136)
        file.write(bytes([errno.EACCES]))
    (folder / f"7-1-{'a' * 16}-{errno.EMFILE}{records.NO_RECORD_SUFFIX}").mkdir(mode=0)
    without, parent = sorted(ledgers.read(KEY).processes, key=lambda process: process.pid)
    assert (without.pid, without.marker, without.no_record) == (7, "a" * 16, os.strerror(errno.EMFILE))
    assert (parent.begun, parent.no_record, parent.fork_without_record) == (1, "", os.strerror(errno.EACCES))
    ledgers.remove(KEY)
    assert not folder.exists()


def test_reports_are_bounded_whatever_the_agent_wrote(tmp_path: Path) -> None:
    ledgers = Ledgers("hooked", "python agent.py", tmp_path)
    ledgers.create([KEY])
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


def test_running_processes_are_listed_without_this_process(tmp_path: Path) -> None:
    ledgers = Ledgers(base=tmp_path)
    ledgers.create([KEY])
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


def test_ledgers_of_a_dead_runner_are_found_by_another(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    alive = Ledgers(base=tmp_path)
    alive.create([("ro-3", "at-3")])
    code = "import sys; from pathlib import Path; from agl_otel.runner.ledgers import Ledgers\n" + (
        "ledgers = Ledgers(base=Path(sys.argv[1]))\n"
        "for each in ledgers.orphaned():\n"
        "    print(each.rollout_id, each.attempt_id, ledgers.read_orphaned(each).model_dump_json())"
    )
    lines = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True).stdout.splitlines()
    assert sorted(line.split(" ", 2)[:2] for line in lines) == [["ro-1", ".."], ["ro-2", "at-2"]]
    left = next(line for line in lines if line.startswith("ro-1 "))
    assert '"begun":1,"ended":0' in left and '"runner":true' in left


def test_ledgers_of_a_dead_runner_are_claimed_by_one_runner(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False)
    code = """
import sys
from pathlib import Path
from agl_otel.runner.ledgers import Ledgers
ledgers = Ledgers(base=Path(sys.argv[1]))
print(len(ledgers.orphaned()), flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"2\n"
        second = Ledgers(base=tmp_path)
        assert second.orphaned() == []
        first.kill()
        first.wait()
    found = second.orphaned()
    assert len(found) == len(second.orphaned()) == 2
    assert Ledgers(base=tmp_path).orphaned() == [], "claimed by the other runner of this process"
    for orphan in found:
        second.remove_orphaned(orphan)
    assert second.orphaned() == []
    second.close()
    assert [*tmp_path.iterdir()] == [second.root]


def test_a_transient_read_error_removes_no_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False)
    ledgers = Ledgers(base=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_read_note_bytes", lambda _: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        assert ledgers.orphaned() == []
    assert len(ledgers.orphaned()) == 2


def test_unclaimed_ledgers_are_removed_after_a_week(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False)
    hidden = tmp_path / ".half"
    hidden.mkdir()
    other = Ledgers(base=tmp_path)
    assert len(other.orphaned()) == 2
    other.close()
    assert len([*tmp_path.iterdir()]) == 3
    for path in [*tmp_path.rglob("*"), hidden]:
        os.utime(path, (1, 1))
    assert len(other.orphaned()) == 2, "this runner may still report them"
    other.close()
    assert [*tmp_path.iterdir()] == [other.root]


@pytest.mark.parametrize("spoil", [lambda folder: (folder.rmdir(), folder.touch()), lambda folder: folder.rmdir()], ids=["a file", "gone"])
def test_a_damaged_ledger_is_unreadable_and_removed(tmp_path: Path, spoil: Any) -> None:
    ledgers = Ledgers(base=tmp_path)
    ledgers.create([KEY])
    spoil(records.folder_of(ledgers.root, *KEY))
    assert "its folder" in (ledgers.read(KEY).problem or "")
    assert ledgers.running(KEY) == set()
    ledgers.remove(KEY)
    assert [path.name for path in ledgers.root.iterdir()] == ["lock"]


def test_a_runner_whose_folder_was_cleared_ends_quietly(tmp_path: Path) -> None:
    code = "import shutil, sys; from pathlib import Path; from agl_otel.runner.ledgers import Ledgers\n" + (
        "shutil.rmtree(Ledgers('here', base=Path(sys.argv[1])).root)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    assert done.stderr == ""


LOSES_ITS_LOCK = """
import sys
from pathlib import Path
from agl_otel.runner.ledgers import Ledgers
ledgers = Ledgers(base=Path(sys.argv[1]))
(ledgers.root / "lock").open().close()  # closing any descriptor of the file releases a POSIX lock
print(ledgers.root, flush=True)
input()
"""


def test_a_live_runner_that_lost_its_lock_keeps_its_folder(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", LOSES_ITS_LOCK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        root = Path(child.stdout.readline().decode().strip())
        assert Ledgers(base=tmp_path).orphaned() == []
        assert root.is_dir()
        child.kill()
        child.wait()
    ledgers = Ledgers(base=tmp_path)
    assert ledgers.orphaned() == []
    ledgers.close()
    assert not root.exists()


@pytest.mark.parametrize("cleared", ["nothing", "the root", "the base"])
def test_only_an_attempts_folder_is_open_to_other_users_and_only_below_a_closed_one(tmp_path: Path, cleared: str) -> None:
    """A container may run as any user, and mounts that folder alone. The folder for temporary files may be cleared."""
    base = tmp_path / "base"
    base.mkdir(mode=0o700)
    ledgers = Ledgers(base=base)
    if cleared != "nothing":
        shutil.rmtree(ledgers.root if cleared == "the root" else base)
    ledgers.create([KEY])
    folder = records.folder_of(ledgers.root, *KEY)
    assert [path.stat().st_mode & 0o777 for path in (base, ledgers.root, folder, folder.with_suffix(".json"))] == [
        0o700, 0o700, 0o777, 0o600,
    ]  # fmt: skip
    assert ledgers.read(KEY).problem is None


def test_no_ledger_is_made_in_a_folder_that_others_may_enter(tmp_path: Path) -> None:
    """Whoever else finds the folder for temporary files cleared may make one of the name."""
    base = tmp_path / "base"
    base.mkdir(mode=0o700)
    ledgers = Ledgers(base=base)
    shutil.rmtree(base)
    base.mkdir()
    base.chmod(0o755)
    with pytest.raises(PermissionError, match="only user"):
        ledgers.create([KEY])
    assert [*base.iterdir()] == []


def test_a_folder_that_other_users_may_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = module.user_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="only user"):
        module.user_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="only user"):
        module.user_folder()


def test_an_agent_cannot_make_its_runner_follow_a_link(tmp_path: Path) -> None:
    ledgers = Ledgers(base=tmp_path)
    ledgers.create([KEY])
    folder = records.folder_of(ledgers.root, *KEY)
    (folder / f"a{records.FILE_SUFFIX}").symlink_to("/etc/passwd")
    assert "a.ledger" in (ledgers.read(KEY).problem or "")


def test_a_link_in_place_of_a_ledger_is_not_followed(tmp_path: Path) -> None:
    """Reading, removing and creating a ledger leave the link's target, its mode and its content alone."""
    base, target = tmp_path / "base", tmp_path / "target"
    base.mkdir(mode=0o700)
    ledgers = Ledgers("hooked", base=base)
    target.mkdir(mode=0o750)
    (target / "kept").write_text("kept")
    folder = records.folder_of(ledgers.root, *KEY)
    ledgers.create([KEY])
    Ledger(lambda: Records(str(ledgers.root))).started(KEY, 1, PLACE)
    shutil.move(str(folder), target / "moved")
    folder.symlink_to(target / "moved")
    assert "Not a directory" in (ledgers.read(KEY).problem or "") and ledgers.running(KEY) == set()
    folder.unlink()
    folder.symlink_to(target)
    ledgers.create([KEY])
    assert folder.is_dir() and not folder.is_symlink()
    folder.rmdir()
    folder.symlink_to(target)
    ledgers.remove(KEY)
    assert not folder.is_symlink()
    note = folder.with_suffix(".json")
    note.symlink_to(target / "kept")
    ledgers.create([KEY])
    assert (target / "kept").read_text() == "kept" and not note.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o750 and sorted(path.name for path in target.iterdir()) == ["kept", "moved"]


def test_a_ledger_without_read_permission_is_removed(tmp_path: Path) -> None:
    ledgers = Ledgers(base=tmp_path)
    ledgers.create([KEY])
    folder = records.folder_of(ledgers.root, *KEY)
    (folder / "something").touch()
    folder.chmod(0)
    ledgers.remove(KEY)
    assert not folder.exists()


def test_secrets_of_a_command_line_are_not_in_a_ledger(tmp_path: Path) -> None:
    ledgers = Ledgers("hooked", "python agent.py --api-key sk-proj-abcdefghijklmnopqrstuvwx --password=hunter2", tmp_path)
    ledgers.create([KEY])
    shown = ledgers.read(KEY).command
    assert shown.startswith("python agent.py --api-key ")
    assert "sk-proj" not in shown
    assert "hunter2" not in shown
