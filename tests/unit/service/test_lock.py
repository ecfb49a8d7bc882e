from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agl_otel.errors import InUseError, SettingsError
from agl_otel.service.lock import FileLock, folder_beside


def hold(path: Path) -> FileLock:
    """A lock as services take it."""
    return FileLock.hold(path, what=f"the folder {path.parent}", taken=lambda pid: f"{path.parent} is used by process {pid}")


def test_a_second_taker_gets_the_id_of_the_holding_process(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    with hold(path), pytest.raises(InUseError, match=rf"new is used by process {os.getpid()}$"):
        hold(path)
    hold(path).close()


def test_the_end_of_a_process_releases_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = f"""
import sys
from pathlib import Path
from agl_otel.service.lock import FileLock, folder_beside
lock = FileLock.hold(Path({str(path)!r}), what="", taken=str)
print(flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"\n"
    with pytest.raises(InUseError, match=f"is used by process {other.pid}$"):
        hold(path)
    other.kill()
    other.communicate()
    with hold(path):
        assert path.read_text() == str(os.getpid())


def test_a_holder_that_left_no_id_is_not_named(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock.take(path), pytest.raises(InUseError, match=r"process \?$"):
        hold(path)


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=rf"the folder {tmp_path}/file cannot be written: .*AGL_DATA_DIR"):
        hold(tmp_path / "file" / "lock")


def test_a_lock_file_may_not_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "another")
    with pytest.raises(SettingsError):
        hold(tmp_path / "lock")
    assert not (tmp_path / "another").exists()


def test_a_lock_file_is_private_to_its_owner(tmp_path: Path) -> None:
    with hold(tmp_path / "made" / "lock"):
        assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "made" / "lock").stat().st_mode & 0o777 == 0o600


def test_closing_twice_does_not_close_a_reused_descriptor(tmp_path: Path) -> None:
    lock = hold(tmp_path / "lock")
    lock.close()
    with (tmp_path / "file").open("w") as file:
        lock.close()
        file.write("still open")
    assert (tmp_path / "file").read_text() == "still open"


def test_a_temporary_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    target = tmp_path / "out[1]"
    code = f"""
import sys
from pathlib import Path
from agl_otel.service.lock import folder_beside
with folder_beside(Path({str(target)!r})) as beside:
    (beside / "part").touch()
    print(beside.name, flush=True)
    sys.stdin.read()
"""
    others = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    killed, living = [other.stdout.readline().strip() for other in others if other.stdout is not None]
    others[0].kill()
    others[0].communicate()
    for mine in (".out[1].settings", ".out1.agl-otel-12345678"):
        (tmp_path / mine).mkdir()
    assert (tmp_path / killed / "part").exists()
    with folder_beside(target) as beside:
        assert {path.name for path in tmp_path.iterdir()} == {living, beside.name, ".out[1].settings", ".out1.agl-otel-12345678"}
        beside.replace(target)
    others[1].communicate()
    assert {path.name for path in tmp_path.iterdir()} == {"out[1]", ".out[1].settings", ".out1.agl-otel-12345678"}
