"""The collector's interface to a ClickHouse, embedded or a server: a handful of primitives, synchronous and thread-safe.

Engines differ in how they connect to ClickHouse, not in SQL. Policy (batches, retries, recovery) does not belong here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from agl_otel.errors import AglError

DATABASE: Final = "otel"
_CODE: Final = re.compile(r"Code: (\d+)")

DATA_CODES: Final = {
    6: "CANNOT_PARSE_TEXT",
    25: "CANNOT_PARSE_ESCAPE_SEQUENCE",
    26: "CANNOT_PARSE_QUOTED_STRING",
    27: "CANNOT_PARSE_INPUT_ASSERTION_FAILED",
    38: "CANNOT_PARSE_DATE",
    41: "CANNOT_PARSE_DATETIME",
    69: "ARGUMENT_OUT_OF_BOUND",
    70: "CANNOT_CONVERT_TYPE",
    72: "CANNOT_PARSE_NUMBER",
    117: "INCORRECT_DATA",
    128: "TOO_LARGE_ARRAY_SIZE",
    130: "CANNOT_READ_ARRAY_FROM_TEXT",
    131: "TOO_LARGE_STRING_SIZE",
    190: "SIZES_OF_ARRAYS_DONT_MATCH",
    321: "VALUE_IS_OUT_OF_RANGE_OF_DATA_TYPE",
    349: "CANNOT_INSERT_NULL_IN_ORDINARY_COLUMN",
    366: "SIZES_OF_NESTED_COLUMNS_ARE_INCONSISTENT",
    407: "DECIMAL_OVERFLOW",
    467: "CANNOT_PARSE_BOOL",
    563: "CANNOT_READ_MAP_FROM_TEXT",
    632: "UNEXPECTED_DATA_AFTER_PARSED_VALUE",
}
"""Errors for which the rows are at fault, so that a retry cannot help. Codes that a disk, a connection, the schema or rights may also cause
are left out (33 CANNOT_READ_ALL_DATA, 53 TYPE_MISMATCH, 16, 60, 497): inserts that fail with them are retried."""


class ClickHouseError(AglError):
    """An error from ClickHouse; `code` is its number (0 if it gave none)."""

    def __init__(self, message: str) -> None:
        found = _CODE.search(message)
        self.code = int(found.group(1)) if found else 0
        super().__init__(message)

    @property
    def is_data_error(self) -> bool:
        """Whether the rows are at fault, so that a retry cannot help."""
        return self.code in DATA_CODES


# Row filters on system tables for readers: they hide the DDL, defaults and partitions of other databases. The first entry that matches a
# table's name or its alias applies; the guard refuses aliases with these names. A setting, it applies in every subquery too.
READERS_SEE: Final = {
    **{f"system.{table}": f"database = '{DATABASE}'" for table in ("tables", "columns", "parts", "databases")},
    "system.functions": "origin = 'System'",
}


def map_literal(values: Mapping[str, str]) -> str:
    """Format a map as in SQL and settings."""
    return "{" + ", ".join(f"'{_quoted(name)}': '{_quoted(value)}'" for name, value in values.items()) + "}"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


# Settings of every insert, regardless of the user's profile: deduplication also covers what views write.
INSERT_SETTINGS: Final[dict[str, str | int]] = {
    "async_insert": 0,  # an acknowledged insert is on disk
    "insert_deduplicate": 1,
    "deduplicate_blocks_in_dependent_materialized_views": 1,
}


class Engine(Protocol):
    """One ClickHouse. Methods block; they may be called from several threads."""

    @property
    def cluster(self) -> str:
        """The name of the cluster that it is a node of; empty for a single server. See cluster.py."""
        ...

    @property
    def embedded(self) -> bool:
        """Whether it runs in this process, which is then its only writer."""
        ...

    def command(self, sql: str, params: Mapping[str, object] | None = None) -> None:
        """Run a statement that returns nothing. Raises ClickHouseError."""
        ...

    def delete(self, table: str, condition: str, params: Mapping[str, object]) -> None:
        """Delete matching rows on every node. Deleted rows are invisible to queries when this returns. Raises ClickHouseError."""
        ...

    def insert(
        self, table: str, columns: Sequence[str], rows: Iterable[bytes], *, format_name: str = "JSONEachRow", token: str = ""
    ) -> None:
        """Insert `rows`, the pieces of a text or block in a format of ClickHouse, on disk when this returns.

        `columns` may be empty for a format that names them. After a ClickHouseError some rows may be stored. ClickHouse skips blocks whose
        `token` (without one: content) it has already inserted, per partition and also behind views; after a crash it may remember a block
        that it has lost.
        """
        ...

    def select(self, sql: str, params: Mapping[str, object] | None = None) -> list[list[object]]:
        """Return the rows of one of the program's own queries, without limits; not for users' SQL. Raises ClickHouseError."""
        ...

    def close(self) -> None:
        """Close the connections and release the data."""
        ...


def parameter(value: object) -> str:
    """Format a value of a {name:Type} parameter for ClickHouse: strings TSV-escaped, lists as array literals."""
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


def insert_into(table: str, columns: Sequence[str]) -> str:
    """Format the head of an INSERT."""
    return f"INSERT INTO {table} ({', '.join(columns)})" if columns else f"INSERT INTO {table}"


READ_SETTINGS: Final[dict[str, str | int]] = {
    "max_memory_usage": 2 << 30,
    "max_execution_time": 60,
    "max_result_rows": 20_000_000,
    "max_result_bytes": 1 << 30,
    "merge_tree_min_rows_for_concurrent_read": 16_384,  # some hundred rollouts, each one granule, should be read by several threads
    "preferred_block_size_bytes": 4 << 20,  # rows of random rollouts in fewer, larger blocks: each has a cost on both sides
    "output_format_json_quote_64bit_integers": 0,
    "additional_table_filters": map_literal(READERS_SEE),
}
"""Settings of every read, which no query can exceed; guard.py in the collector decides which queries may run."""
