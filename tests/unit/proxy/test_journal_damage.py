"""A damaged journal is reported as such, also after a rollout was deleted from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_otel.proxy.journal import END, HEAD, SUFFIX, WHOLE, boot_id, packed, without
from agl_otel.proxy.recovery import read_journal
from agl_otel.service.framed import FramedFile


def record(rollout_id: str) -> tuple[int, bytes]:
    return END, packed([rollout_id, "at-1", "00" * 8, "0" * 32, "0" * 16, 1, 0, "0" * 16], b"the spans of " + rollout_id.encode())


@pytest.mark.parametrize("damaged", [False, True])
def test_deleting_a_rollout_does_not_hide_damage(tmp_path: Path, damaged: bool) -> None:
    (tmp_path / WHOLE).touch()
    path = tmp_path / f"1{SUFFIX}"
    file = FramedFile(path)
    file.write([(HEAD, packed([boot_id(), 0]))])
    for name in ("ro-1", "ro-2", "ro-3"):
        file.write([record(name)])
    file.close()
    if damaged:
        content = path.read_bytes()
        path.write_bytes(content.replace(b"the spans of ro-2", b"the spans of ro-9"))
    without(path, {"ro-1"})
    left = read_journal(tmp_path)
    assert left.gaps is damaged
    assert {key[0] for key, _ in left.attempts} == ({"ro-3"} if damaged else {"ro-2", "ro-3"})
