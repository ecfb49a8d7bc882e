"""Files of training data are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_otel.cli.training_files import WRITERS, write_rows

WHOLE = [{"task": "a"}, {"task": "b"}]


@pytest.mark.parametrize("ending", WRITERS)
def test_an_export_that_fails_leaves_the_earlier_one_and_nothing_beside_it(tmp_path: Path, ending: str) -> None:
    target = tmp_path / f"rows{ending}"
    (tmp_path / f".rows{ending}.new").write_text("of an export that was killed")
    write_rows(target, WHOLE)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises((TypeError, ValueError)):
        write_rows(target, [*WHOLE, {"task": {1, 2}}])
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    target = tmp_path / "rows.jsonl"
    target.mkdir()
    (target / "own.txt").write_text("the user's")
    with pytest.raises(IsADirectoryError):
        write_rows(target, WHOLE)
    assert [path.name for path in tmp_path.rglob("*")] == ["rows.jsonl", "own.txt"]
