"""A run's folder on a full disk."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from agl_otel.algorithms.checked_files import write_json
from agl_otel.algorithms.model_files import as_os_errors
from agl_otel.algorithms.run_folder import METRICS, RunFolder
from agl_otel.errors import DiskFullError
from tests.small_disk import no_file_over

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


def test_the_error_of_safetensors_is_that_of_the_file(tmp_path: Path) -> None:
    """Its own names no kind, so that a push of an adapter to a full disk ended with a traceback."""
    file = tmp_path / "weights.safetensors"
    with no_file_over(1 << 12), pytest.raises(OSError, match="File too large") as error, as_os_errors(file):
        save_file({"weight": np.zeros(1 << 16, np.float32)}, file)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(file))
    with pytest.raises(SafetensorError), as_os_errors(file):
        raise SafetensorError("InvalidHeader")
