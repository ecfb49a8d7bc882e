"""Files that are for their owner only: a data directory, a run's folder, and all that is in them.

Processes that are ours alone (services, commands) make nothing that others may read, whatever library makes it: `keep_private` sets their
umask. Agents are started with the one of whoever started us. A process of the user's (a Trainer in a script) keeps its own: there the
folder is closed, and files that are made by our hands.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, Final

UMASK: Final = 0o077
_given = -1


def keep_private() -> None:
    """From here on, what this process makes is its owner's only. For processes that are ours alone."""
    global _given
    before = os.umask(UMASK)
    if _given < 0:
        _given = before


def given_umask() -> int:
    """The umask for processes that are not ours (as subprocess takes it): the one before `keep_private`; -1 where that was not called."""
    return _given


def make_folder(path: Path) -> None:
    """Make a folder for its owner only, where there is none; its parents as the umask has it. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_file(path: Path, mode: str) -> IO[Any]:
    """As `open`; a file that is made is its owner's only."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def open_to_others(path: Path) -> str:
    """What to say of a folder that other users of the machine may look into, with the remedy; empty where they may not."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        return ""
    return f"other users of this machine may read {path} (mode {mode:o}): chmod -R go-rwx {path}" if mode & UMASK else ""
