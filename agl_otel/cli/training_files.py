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
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Self

from agl_otel.adapters.pins import line_of
from agl_otel.adapters.records import Row
from agl_otel.errors import UsageError

Write = Callable[[Sequence[Row]], object]
"""Writes a page of rows."""
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


@contextmanager
def _jsonl(target: Path) -> Generator[Write]:
    with target.open("w", encoding="utf-8") as file:
        yield lambda rows: file.writelines(map(line_of, rows))


@contextmanager
def _parquet(target: Path) -> Generator[Write]:
    parquet: Any = importlib.import_module("pyarrow.parquet")
    with _Spool(target.parent) as spool:
        yield spool.write
        with parquet.ParquetWriter(target, spool.schema()) as file:
            for table in spool.tables():
                file.write_table(table)


def check_target(target: Path, *others: Path, replace: bool) -> None:
    """Check that rows can be written to `target`. Raises UsageError if it or one of the `others` that are written with it is there already.

    An empty folder is free. With `replace` only what no export wrote is refused: for a folder, anything but a data set.
    """
    taken = [path for path in (target, *others) if (any(path.iterdir()) if path.is_dir() else os.path.lexists(path))]
    if target in taken and not target.suffix and not (target / "state.json").exists():
        raise UsageError(f"{target} is there already and holds no data set: name another folder, or a file that ends in .jsonl or .parquet")
    if taken and not replace:
        raise UsageError(f"{taken[0]} is there already: name another file or folder, or replace it with --force")


@contextmanager
def writing_rows(target: Path) -> Generator[Write]:
    """Yield a function that writes pages of rows in the format of the target's suffix; the target appears, whole, when the block has ended.

    Raises UsageError if it is a folder that holds no data set, OSError.
    """
    check_target(target, replace=True)
    if target.suffix and target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    beside = target.with_name(f".{target.name}.new")
    _remove(beside)  # of an export that was killed
    try:
        with WRITERS[target.suffix](beside) as write:
            yield write
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


@contextmanager
def _folder(target: Path) -> Generator[Write]:
    """Write the format of `Dataset.save_to_disk`."""
    target.mkdir(parents=True)
    pyarrow: Any = importlib.import_module("pyarrow")
    with _Spool(target) as spool:
        yield spool.write
        schema = spool.schema()
        with pyarrow.OSFile(str(target / _DATA), "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
            for table in spool.tables():
                stream.write_table(table)
    with (target / _DATA).open("rb") as data:
        fingerprint = hashlib.file_digest(data, "sha256").hexdigest()[:16]
    state = {
        "_data_files": [{"filename": _DATA}],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (target / "dataset_info.json").write_text(json.dumps({"citation": "", "description": "", "homepage": "", "license": ""}))
    (target / "state.json").write_text(json.dumps(state, indent=1))


@contextmanager
def to_stdout(*, at_end: bool) -> Generator[Write]:
    """Yield a function that writes JSON lines to standard output; `at_end`: nothing before the block has ended without an error."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") if at_end else nullcontext(sys.stdout) as file:
        yield lambda rows: file.writelines(map(line_of, rows))
        if at_end:
            file.seek(0)
            shutil.copyfileobj(file, sys.stdout)


WRITERS: Final[dict[str, Callable[[Path], AbstractContextManager[Write]]]] = {".jsonl": _jsonl, ".parquet": _parquet, "": _folder}
"""{suffix of the file name: writer of a new file}; a name without a suffix is a folder."""


class _Spool:
    """Pages of rows in a file of `folder` without a name, until the types of all columns are known: one may be empty in the first pages."""

    def __init__(self, folder: Path) -> None:
        self._pyarrow: Any = importlib.import_module("pyarrow")
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by __exit__
        self._columns: dict[str, _Column] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, rows: Sequence[Row]) -> None:
        """Add a page."""
        if not rows:
            return  # it would become an empty row group
        for name in dict.fromkeys(name for row in rows for name in row):
            self._columns.setdefault(name, _Column()).add(self._pyarrow, [row.get(name) for row in rows])
        pickle.dump(rows, self._file, pickle.HIGHEST_PROTOCOL)

    def schema(self) -> Any:
        """Return the schema of all pages."""
        return self._pyarrow.schema([(name, column.type(self._pyarrow, name)) for name, column in self._columns.items()])

    def tables(self) -> Iterator[Any]:
        """Yield each page as a table of that schema."""
        schema, end = self.schema(), self._file.tell()
        self._file.seek(0)
        while self._file.tell() < end:
            rows: list[Row] = pickle.load(self._file)
            columns = {
                name: self._pyarrow.array(self._columns[name].written(name, [row.get(name) for row in rows], kind), type=kind)
                for name, kind in zip(schema.names, schema.types, strict=True)
            }
            yield self._pyarrow.table(columns, schema=schema)


class _Column:
    """What the values of a column are, over all pages."""

    def __init__(self) -> None:
        self._lists, self._nested = True, False
        self._plain: list[Any] = []

    def add(self, pyarrow: Any, values: Sequence[Any]) -> None:
        """Add the values of a page."""
        self._lists &= all(value is None or isinstance(value, list) for value in values)
        self._nested |= any(isinstance(value, (list, dict)) for value in values)
        if not self._nested and (kind := pyarrow.array(values).type) not in self._plain:
            self._plain.append(kind)

    def type(self, pyarrow: Any, name: str) -> Any:
        """Return the type of the column of this name; text for JSON."""
        numbers = _NUMBERS.get(name.rpartition("_")[2])
        if self._lists and name in _MESSAGES:
            return pyarrow.list_(_message_type(pyarrow))
        if self._lists and (numbers or name == "images"):
            return pyarrow.list_(getattr(pyarrow, numbers or "string")())
        if self._nested:
            return pyarrow.string()
        schemas = [pyarrow.schema([(name, kind)]) for kind in self._plain]
        return pyarrow.unify_schemas(schemas, promote_options="permissive").field(name).type

    def written(self, name: str, values: list[Any], kind: Any) -> list[Any]:
        """Return the values as its type `kind` holds them."""
        if self._lists and name in _MESSAGES:
            return [value and list(map(_message, value)) for value in values]
        return [None if value is None else _json(value) for value in values] if self._nested and kind == "string" else values


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
