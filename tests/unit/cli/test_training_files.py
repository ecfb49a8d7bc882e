"""Files of training data are written whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agl_otel.adapters.records import Row
from agl_otel.cli.training_files import WRITERS, writing_rows

WHOLE = [{"task": "a"}, {"task": "b"}]


def write_rows(target: Path, *pages: Sequence[Row]) -> None:
    with writing_rows(target) as write:
        for rows in pages:
            write(rows)


@pytest.mark.parametrize("ending", WRITERS)
def test_an_export_that_fails_leaves_the_earlier_one_and_nothing_beside_it(tmp_path: Path, ending: str) -> None:
    target = tmp_path / f"rows{ending}"
    (tmp_path / f".rows{ending}.new").write_text("of an export that was killed")
    write_rows(target, WHOLE)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises((TypeError, ValueError)):
        write_rows(target, WHOLE, [{"task": {1, 2}}])
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    target = tmp_path / "rows.jsonl"
    target.mkdir()
    (target / "own.txt").write_text("the user's")
    with pytest.raises(IsADirectoryError):
        write_rows(target, WHOLE)
    assert [path.name for path in tmp_path.rglob("*")] == ["rows.jsonl", "own.txt"]


def table_of(target: Path) -> Any:
    if target.suffix:
        return pq.read_table(target)
    with pa.OSFile(str(target / "data-00000-of-00001.arrow")) as file:
        return pa.ipc.open_stream(file).read_all()


COLUMNS: dict[str, list[Any]] = {
    "prompt_ids": [[], None, [1, 2]],
    "logprobs": [None, [], [-0.5]],
    "messages": [[], None, [{"role": "user", "content": [{"type": "text", "text": "hi"}], "weight": 0}]],
    "images": [[], [], ["data:"]],
    "reward": [None, 1, 0.5],
    "tools": [None, None, [{"name": "search"}]],
    "metadata": [None, "plain", {"a": 1}],
    "own": ["text", [1], None],
    "empty": [None, None, None],
}


@pytest.mark.parametrize("ending", [".parquet", ""])
@pytest.mark.parametrize("order", [1, -1])
def test_the_columns_of_a_file_have_the_types_that_all_of_its_rows_give_them(tmp_path: Path, ending: str, order: int) -> None:
    rows = [{name: values[number] for name, values in COLUMNS.items()} for number in range(3)][::order]
    late = {"late": "in the last page only"}
    write_rows(tmp_path / f"once{ending}", [*rows, late])
    write_rows(tmp_path / f"pages{ending}", *([row] for row in rows), [], [late])
    once, pages = (table_of(tmp_path / f"{name}{ending}") for name in ("once", "pages"))
    assert pages.schema == once.schema
    assert pages.to_pylist() == once.to_pylist()
    types = {field.name: str(field.type) for field in pages.schema}
    assert (types["prompt_ids"], types["reward"], types["tools"], types["own"], types["empty"], types["late"]) == (
        "list<element: int32>" if ending else "list<item: int32>",
        "double",
        "string",
        "string",
        "null",
        "string",
    )


@pytest.mark.parametrize("ending", WRITERS)
def test_a_file_without_rows_is_written(tmp_path: Path, ending: str) -> None:
    write_rows(tmp_path / f"rows{ending}", [])
    assert (tmp_path / "rows.jsonl").read_bytes() == b"" if ending == ".jsonl" else table_of(tmp_path / f"rows{ending}").num_rows == 0
