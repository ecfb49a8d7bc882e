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
from agl_otel.traces.opened import open_store

store = open_store("chdb:///" + sys.argv[1])
print(store.select("SELECT uniq(number), max(toString(number)) FROM numbers(100000)"))
mapped = dirty = 0
for line in open("/proc/self/smaps"):
    field, *values = line.split()
    if not field.endswith(":"):
        counted = values[-1].rpartition("/")[2].startswith("_chdb")
    elif counted and field == "Rss:":
        mapped += int(values[0])
    elif counted and field == "Anonymous:":
        dirty += int(values[0])
print(mapped, dirty)
store.close()
"""


def test_a_store_keeps_little_of_its_library_mapped(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", OPENED, str(tmp_path / "traces")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows, figures = done.stdout.splitlines()
    mapped, dirty = map(int, figures.split())
    assert "99999" in rows
    assert 0 < dirty < mapped < dirty + 60_000, "kilobytes; 175,000 more are mapped where nothing is unmapped"
