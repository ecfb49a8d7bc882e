"""Files private to their owner: a data directory, a run's folder, and everything in them.

Services and commands create no file that other users can read, whichever library creates it: `keep_private` sets the umask. Agents get
the umask with which the service or command was started. In a user's process (a Trainer in a script) the umask is left alone: there only
the folder, and the files that this package creates, are private.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import IO, Any, Final

UMASK: Final = 0o077
_given = -1


def keep_private() -> None:
    """Set the umask so that all files this process creates are private; for services and commands, not for a user's process."""
    global _given
    before = os.umask(UMASK)
    if _given < 0:
        _given = before


def original_umask() -> int:
    """Return the umask for agents and other foreign processes (subprocess's): the one before `keep_private`, or -1 without that call."""
    return _given


def make_folder(path: Path) -> None:
    """Create a private folder if missing; its parents follow the umask. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_file(path: Path, mode: str) -> IO[Any]:
    """Open a file as `open` does; a new one is private."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def access_problem(path: Path) -> str:
    """Return a message with owner and remedy if this user may not look into this folder; else an empty string."""
    if os.access(path, os.R_OK | os.X_OK):
        return ""
    try:
        found = path.stat()
    except OSError:
        return ""
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = f"user {found.st_uid}"
    return f"{path} is closed to you: it belongs to {owner}, mode {found.st_mode & 0o777:o}. Run this as that user, or name another folder"


def exposure_problem(path: Path) -> str:
    """Return a message with the remedy if other users can access this folder; else an empty string."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        return ""
    return f"other users of this machine may read {path} (mode {mode:o}): chmod -R go-rwx {path}" if mode & UMASK else ""
