"""Write rows to files that trainers read: JSON lines, Parquet, or a folder for `datasets.load_from_disk`.

The type of a column depends on its name alone, so that files of different exports can be concatenated: ids and masks are lists of numbers,
messages are lists of structures, and other nested values (tools, metadata) are JSON text.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from agl_otel.adapters.pins import line_of
from agl_otel.adapters.records import Row
from agl_otel.errors import UsageError

_MESSAGES: Final = frozenset({"messages", "rejected_messages", "prompt", "chosen", "rejected", "preferred_output", "non_preferred_output"})
_NUMBERS: Final = {
    "ids": "int32",
    "labels": "int32",
    "input": "int32",
    "tokens": "int32",
    "mask": "int8",
    "logprobs": "float32",
    "weights": "float32",
    "temperature": "float32",
    "p": "float32",
}
"""{last word of a column's name: the type of the numbers in its lists}."""
_DATA: Final = "data-00000-of-00001.arrow"


def _jsonl(target: Path, rows: Sequence[Row]) -> None:
    with target.open("w", encoding="utf-8") as file:
        file.writelines(map(line_of, rows))


def _parquet(target: Path, rows: Sequence[Row]) -> None:
    importlib.import_module("pyarrow.parquet").write_table(_table(rows), target)


def check_target(target: Path, *others: Path, replace: bool) -> None:
    """Check that rows can be written to `target`. Raises UsageError if it or one of the `others` that are written with it is there already.

    An empty folder is free. With `replace` only what no export wrote is refused: for a folder, anything but a data set.
    """
    taken = [path for path in (target, *others) if (any(path.iterdir()) if path.is_dir() else os.path.lexists(path))]
    if target in taken and not target.suffix and not (target / "state.json").exists():
        raise UsageError(f"{target} is there already and holds no data set: name another folder, or a file that ends in .jsonl or .parquet")
    if taken and not replace:
        raise UsageError(f"{taken[0]} is there already: name another file or folder, or replace it with --force")


def write_rows(target: Path, rows: Sequence[Row]) -> None:
    """Write rows in the format of the target's suffix, atomically. Raises UsageError if it is a folder that holds no data set, OSError."""
    check_target(target, replace=True)
    if target.suffix and target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    beside = target.with_name(f".{target.name}.new")
    _remove(beside)  # of an export that was killed
    try:
        WRITERS[target.suffix](beside, rows)
        if target.is_dir():
            _remove(target)
        beside.replace(target)
    except BaseException:
        _remove(beside)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _folder(target: Path, rows: Sequence[Row]) -> None:
    """Write the format of `Dataset.save_to_disk`."""
    target.mkdir(parents=True)
    table = _table(rows)
    pyarrow: Any = importlib.import_module("pyarrow")
    with pyarrow.OSFile(str(target / _DATA), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    state = {
        "_data_files": [{"filename": _DATA}],
        "_fingerprint": hashlib.sha256((target / _DATA).read_bytes()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (target / "dataset_info.json").write_text(json.dumps({"citation": "", "description": "", "homepage": "", "license": ""}))
    (target / "state.json").write_text(json.dumps(state, indent=1))


def to_stdout(rows: Sequence[Row]) -> None:
    """Write JSON lines to standard output."""
    sys.stdout.writelines(map(line_of, rows))


WRITERS: Final[dict[str, Callable[[Path, Sequence[Row]], None]]] = {".jsonl": _jsonl, ".parquet": _parquet, "": _folder}
"""{suffix of the file name: writer of a new file}; a name without a suffix is a folder."""


def _table(rows: Sequence[Row]) -> Any:
    pyarrow: Any = importlib.import_module("pyarrow")
    return pyarrow.table({name: _column(pyarrow, name, rows) for name in dict.fromkeys(name for row in rows for name in row)})


def _column(pyarrow: Any, name: str, rows: Sequence[Row]) -> Any:
    values = [row.get(name) for row in rows]
    lists = all(value is None or isinstance(value, list) for value in values)
    if lists and name in _MESSAGES:
        return pyarrow.array([value and list(map(_message, value)) for value in values], type=pyarrow.list_(_message_type(pyarrow)))
    numbers = _NUMBERS.get(name.rpartition("_")[2])
    if lists and (numbers or name == "images"):
        return pyarrow.array(values, type=pyarrow.list_(getattr(pyarrow, numbers or "string")()))
    nested = any(isinstance(value, (list, dict)) for value in values)
    return pyarrow.array([None if value is None else _json(value) for value in values], type=pyarrow.string()) if nested else values


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Convert content that is a list of parts (images) to JSON text."""
    content = message.get("content")
    return {**message, "content": content if content is None or isinstance(content, str) else _json(content)}


def _message_type(pyarrow: Any) -> Any:
    text = pyarrow.string()
    function = pyarrow.struct([("name", text), ("arguments", text)])
    call = pyarrow.struct([("id", text), ("type", text), ("function", function)])
    fields = [("role", text), ("content", text), ("name", text), ("tool_call_id", text), ("tool_calls", pyarrow.list_(call))]
    return pyarrow.struct([*fields, ("weight", pyarrow.int8())])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
