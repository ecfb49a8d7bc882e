"""A small disk of a process's own, to be filled: a tmpfs in a mount namespace that only it is in. Or a bound on files, for this process."""

from __future__ import annotations

import contextlib
import errno
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
    with ballast.open("wb", buffering=0) as file:
        size = 0
        while (free := _free(ballast.parent) - leave) > 0:
            try:
                os.posix_fallocate(file.fileno(), size, free)
            except OSError as error:  # the process wrote in between, and took some of it
                if error.errno != errno.ENOSPC:
                    raise
            else:
                size += free
    return ballast


def _free(place: Path) -> int:
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize


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


QUOTA = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Whether the switch is on and the descriptor is a file of the folder. */
static int refused(int fd) {
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    const char *folder = getenv("QUOTA_FOLDER");
    if (length < 0 || access(getenv("QUOTA_SWITCH"), F_OK)) return 0;
    path[length] = 0;
    return !strncmp(path, folder, strlen(folder));
}
#define REFUSING(name, declared, given) \
    ssize_t name declared { \
        static ssize_t (*real) declared; \
        if (refused(fd)) { errno = EDQUOT; return -1; } \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        return real given; \
    }
REFUSING(write, (int fd, const void *data, size_t size), (fd, data, size))
REFUSING(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
REFUSING(pwrite64, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
"""


def with_quota(folder: Path, place: Path) -> tuple[dict[str, str], Path]:
    """The environment of a process whose writes to files in `folder` fail with EDQUOT while a file is there, and that file's path.

    For kernels without quotas. `place` takes the library. Skips the test where there is no C compiler.
    """
    if shutil.which("cc") is None:
        pytest.skip("this needs a C compiler, to have a quota on any kernel")
    source, library, switch = place / "quota.c", place / "quota.so", place / "full"
    source.write_text(QUOTA)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "QUOTA_FOLDER": str(folder), "QUOTA_SWITCH": str(switch)}, switch
