"""The dead letters of a collector: requests that ClickHouse refused (refused/), and damaged pieces of its log (*.damaged).

They are kept for inspection and never read back, so deletion handles them here. It removes each request that names a deleted rollout
or has a row without a known rollout, which may belong to it, and every damaged piece, whose content is unknown. Retention (expiry.py)
removes them by age.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, NamedTuple

from agl_otel.collector.journal import Request
from agl_otel.service.framed import DAMAGED, sync_folder, write_private

NAMED: Final = 5


def write(folder: Path, position: int, request: Request, reason: str) -> Path:
    """Write a request and the reason for its refusal; return the path of the file with its bytes."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stem = folder / f"{request.received_ms}-{position}-{request.signal}"
    of = sorted({each.rollout_id for _, each in request.identities.runs if not each.reason})
    about = {"reason": reason, "signal": request.signal, "received_ms": request.received_ms, "rollouts": of}
    write_private(stem.with_suffix(".json"), json.dumps(about).encode())  # written first: without it, a deletion removes the bytes
    write_private(stem.with_suffix(".otlp"), request.raw)
    sync_folder(folder)  # the log deletes the request soon
    return stem.with_suffix(".otlp")


class DeadLetters(NamedTuple):
    """Summary of the refused requests."""

    requests: int
    latest: list[dict[str, Any]]
    """The latest NAMED of them, newest first: file, reason, signal, received_ms, rollouts."""


def listed(folder: Path) -> DeadLetters:
    """List the requests that `write` has written and that still exist."""
    found = sorted(folder.glob("*.otlp"), key=_received_ms, reverse=True)
    return DeadLetters(len(found), [{"file": str(path), **_about(path)} for path in found[:NAMED]])


def _about(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return {"reason": "not known"}


def forget(refused: Path, log: Path, rollout_ids: Collection[str]) -> int:
    """Remove files that hold, or may hold, data of these rollouts; return their number. Raises OSError."""
    if not rollout_ids:
        return 0
    removed = [path for path in refused.glob("*.otlp") if _may_hold(path, set(rollout_ids))]
    files = [*(each for path in removed for each in (path, path.with_suffix(".json"))), *log.glob(f"*{DAMAGED}")]
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def expire(refused: Path, log: Path, before: float) -> int:
    """Remove files received, or found damaged, before a time (Unix seconds); return their number. Raises OSError."""
    old = [path for path in refused.glob("*") if _received_ms(path) < before * 1000]
    old += [path for path in log.glob(f"*{DAMAGED}") if path.stat().st_mtime < before]
    for path in old:
        path.unlink(missing_ok=True)
    return len(old)


def _received_ms(path: Path) -> float:
    """Return the time of receipt from the file's name, else its modification time."""
    prefix = path.name.partition("-")[0]
    return int(prefix) if prefix.isdecimal() else path.stat().st_mtime * 1000


def _may_hold(path: Path, rollout_ids: set[str]) -> bool:
    try:
        about: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    except (FileNotFoundError, ValueError):
        return True
    of: list[str] | None = about.get("rollouts")
    return not of or "" in of or not rollout_ids.isdisjoint(of)
