"""What the collector needs of a ClickHouse, embedded or a server: a handful of primitives, synchronous and thread-safe.

Engines differ in how they reach ClickHouse, not in SQL. Policy (batches, retries, recovery) does not belong here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from agl_otel.errors import AglError

DATABASE: Final = "otel"
_CODE: Final = re.compile(r"Code: (\d+)")

# Errors that say "this data cannot be taken", whatever is tried again: parsing, types, ranges, UTF-8.
DATA_CODES: Final = frozenset({6, 26, 27, 33, 38, 41, 53, 69, 70, 72, 117, 121, 131, 190, 321, 349, 407, 457, 641})


class ClickHouseError(AglError):
    """ClickHouse answered an error; `code` is its number (0 where none was given)."""

    def __init__(self, message: str) -> None:
        found = _CODE.search(message)
        self.code = int(found.group(1)) if found else 0
        super().__init__(message)

    @property
    def about_the_data(self) -> bool:
        """Whether the rows are at fault, so that trying them again cannot help."""
        return self.code in DATA_CODES


def protobuf_settings(schema: str) -> dict[str, str | int]:
    """The settings that an insert of length-delimited messages `Request` of the .proto text `schema` needs."""
    return {
        "format_schema_source": "string",
        "format_schema": schema,
        "format_schema_message_name": "Request",
        "input_format_protobuf_oneof_presence": 1,
    }


class Engine(Protocol):
    """One ClickHouse. Methods block; they may be called from several threads."""

    def command(self, sql: str, params: Mapping[str, object] | None = None) -> None:
        """Run a statement that returns nothing. Raises ClickHouseError."""
        ...

    def insert(self, table: str, columns: Sequence[str], rows: bytes, *, deduplicate: bool = True) -> None:
        """Insert JSONEachRow `rows`, on disk when this returns. Raises ClickHouseError; then some rows may be stored.

        With `deduplicate` ClickHouse skips what it remembers to have taken, which after a crash it may remember without having it.
        """
        ...

    def insert_protobuf(self, table: str, schema: Path, data: bytes) -> None:
        """Insert length-delimited messages `Request` of the .proto file `schema`; as `insert` without `deduplicate`."""
        ...

    def select(self, sql: str, params: Mapping[str, object] | None = None) -> list[list[object]]:
        """The rows of a query by the owner of the data: no limits, not for other people's SQL. Raises ClickHouseError."""
        ...

    def close(self) -> None:
        """Let go of the data."""
        ...


def parameter(value: object) -> str:
    """`value` as ClickHouse takes the text of a {name:Type} parameter: strings TSV-escaped, lists as array literals."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_literal(item) for item in value) + "]"  # pyright: ignore[reportUnknownVariableType] items of any kind
    return _tsv(str(value))


def _literal(value: object) -> str:
    if isinstance(value, str):
        return "'" + _tsv(value).replace("'", "\\'") + "'"
    return parameter(value)


def _tsv(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")
