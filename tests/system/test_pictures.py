"""`make pictures`, into another folder than that of the docs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.web.browser import built
from tests.unit.test_docs import MOST_OF_A_PICTURE, ROOT

pytest.importorskip("torch", reason="needs the [train] extra")
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def test_pictures_are_made_from_a_demo(tmp_path: Path) -> None:
    built()
    if shutil.which("chromium") is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    done = subprocess.run(
        [sys.executable, "-m", "docs.pictures.make", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    committed = {path.name for path in (ROOT / "docs" / "pictures").iterdir() if path.suffix in (".svg", ".png")}
    assert {path.name: path.stat().st_size <= MOST_OF_A_PICTURE for path in tmp_path.iterdir()} == dict.fromkeys(committed, True)
