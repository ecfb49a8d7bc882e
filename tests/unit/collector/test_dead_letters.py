from __future__ import annotations

from pathlib import Path

from agl_otel.collector import dead_letters
from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.journal import Request


def kept(folder: Path, position: int, *rollout_ids: str) -> Path:
    request = Request("traces", position, Identities.of([Identity(rollout_id) for rollout_id in rollout_ids]), b"bytes")
    return dead_letters.write(folder, position, request, "ClickHouse says no")


def test_only_files_that_may_hold_data_of_a_deleted_rollout_are_deleted(tmp_path: Path) -> None:
    refused, log = tmp_path / "refused", tmp_path / "wal"
    log.mkdir()
    for name in ("1.damaged", "1.wal"):
        (log / name).write_bytes(b"x")
    other, named, unknown = kept(refused, 1, "ro-1"), kept(refused, 2, "ro-2", "ro-1"), kept(refused, 3, "")
    untold = kept(refused, 4, "ro-1")
    untold.with_suffix(".json").write_text('{"reason": "not told whose"}')
    assert dead_letters.forget(refused, log, []) == 0 and len(list(refused.iterdir())) == 8
    assert dead_letters.forget(refused, log, ["ro-2"]) == 7
    assert {path.name for path in refused.iterdir()} == {other.name, other.with_suffix(".json").name}
    assert [path.name for path in log.iterdir()] == ["1.wal"]
    assert not named.exists() and not unknown.exists() and not untold.exists()
    assert dead_letters.forget(tmp_path / "none", tmp_path / "none", ["ro-2"]) == 0
