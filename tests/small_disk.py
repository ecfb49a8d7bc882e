"""A small disk of a process's own, to be filled: a tmpfs in a mount namespace that only it is in. Or a bound on files, for this process."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest


def on_small_disk(place: Path, size: str) -> list[str]:
    """What goes before the command line of a process for which the folder `place`, made here, is a disk of `size` ("8m").

    Skips the test where there are no user namespaces.
    """
    place.mkdir(parents=True, exist_ok=True)
    if not _can_mount():
        pytest.skip("this needs user namespaces, for a small disk of its own")
    mount = f'mount -t tmpfs -o size={size},mode=700 tmpfs "{place}" && exec "$0" "$@"'
    return ["unshare", "-Urm", "sh", "-c", mount]


def fill(pid: int, place: Path, *, leave: int = 0) -> Path:
    """Fill the disk of that process but for `leave` bytes; the file that does it. Unlink it to have room again."""
    ballast = Path(f"/proc/{pid}/root{place}/ballast")
    disk = os.statvfs(ballast.parent)
    with ballast.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, max(disk.f_bavail * disk.f_frsize - leave, 1))
    return ballast


@contextlib.contextmanager
def no_file_over(size: int) -> Generator[None]:
    """Files of this process cannot grow beyond `size` bytes (EFBIG: Python ignores SIGXFSZ)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@cache
def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "x", "/tmp"], check=False).returncode == 0
