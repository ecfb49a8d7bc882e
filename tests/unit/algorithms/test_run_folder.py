"""A run's folder on a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_otel.algorithms.run_folder import METRICS, RunFolder, write_json
from agl_otel.errors import DiskFullError

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def test_the_error_for_a_full_disk_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, algorithm="a", options={})
    (tmp_path / METRICS).symlink_to(FULL)
    with pytest.raises(DiskFullError, match=rf"^{tmp_path}/{METRICS} cannot be written, its disk is full .*make room"):
        folder.metric({"step": 1})
    folder.close()
    (tmp_path / ".state.json.new").symlink_to(FULL)
    with pytest.raises(DiskFullError, match=rf"^{tmp_path}/state.json cannot be written, its disk is full"):
        write_json(tmp_path / "state.json", {"step": 1})
    assert not (tmp_path / "state.json").exists()
