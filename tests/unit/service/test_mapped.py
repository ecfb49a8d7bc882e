"""What only the start of a large library has used is unmapped, and the library goes on working."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SMAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(not SMAPS.exists(), reason="there is no /proc/self/smaps here")
OPENED = """
import sys
from agl_otel.traces import opened

def kilobytes():
    of = {"Rss:": 0, "Anonymous:": 0}
    for line in open("/proc/self/smaps"):
        field, *values = line.split()
        if not field.endswith(":"):
            counted = values[-1].rpartition("/")[2].startswith("_chdb")
        elif counted and field in of:
            of[field] += int(values[0])
    print(of["Rss:"] - of["Anonymous:"], of["Anonymous:"])

def measured(library):
    kilobytes()
    unmap_unused(library)
    kilobytes()

unmap_unused, opened.unmap_unused = opened.unmap_unused, measured
store = opened.open_store("chdb:///" + sys.argv[1])
print(store.select("SELECT uniq(number), max(toString(number)) FROM numbers(100000)"))
store.close()
"""


def test_opening_a_store_unmaps_what_its_library_has_not_changed(tmp_path: Path) -> None:
    """Compared at one moment: how much is mapped at each use of a page depends on how much of the file the kernel has cached."""
    done = subprocess.run([sys.executable, "-c", OPENED, str(tmp_path / "traces")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after, rows = done.stdout.splitlines()
    (clean, own), (clean_after, own_after) = (map(int, line.split()) for line in (before, after))
    assert clean_after < clean / 4, "the library's own threads use some of it again at once"
    assert 0 < own <= own_after, "pages that the process has changed stay"
    assert "99999" in rows
