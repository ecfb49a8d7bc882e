"""The path from `store.enqueue` to the SQL in docs/architecture.md: at most nine stops, each of which exists in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
ROW: Final = re.compile(r"^\| (\d) \| `(agl_otel/[\w/.]+)` (?:`(\w+)`|\(interceptors\)) \|", re.MULTILINE)


def test_the_walk_has_at_most_nine_stops_and_each_is_in_the_code() -> None:
    stops = ROW.findall((ROOT / "docs" / "architecture.md").read_text().partition("## From `store.enqueue`")[2])
    assert [int(number) for number, _, _ in stops] == [*range(1, len(stops) + 1)]
    assert 0 < len(stops) <= 9
    for _, file, name in stops:
        path = ROOT / file
        assert path.exists()
        if name:
            functions = {
                each.name for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in functions, f"{file} has no {name}"
