"""Reads blocks of ClickHouse's Native format, for comparison with rows: https://clickhouse.com/docs/interfaces/formats/Native"""

from __future__ import annotations

import struct
from typing import Any

_NUMBERS = {"UInt8": "B", "Bool": "?", "UInt32": "I", "UInt64": "Q", "Float32": "f", "DateTime64(9)": "q", "DateTime64(3)": "q"}


def read_block(data: bytes) -> list[dict[str, Any]]:
    """Return the rows of one block: maps as lists of pairs, times as integers."""
    reader = _Reader(data)
    columns, rows = reader.varint(), reader.varint()
    values = {reader.text(): reader.column(reader.text(), rows) for _ in range(columns)}
    assert reader.at == len(data), "there is something behind the block"
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def text(self) -> str:
        size = self.varint()
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def column(self, kind: str, rows: int) -> list[Any]:
        if kind == "String":
            return [self.text() for _ in range(rows)]
        if letter := _NUMBERS.get(kind):
            numbers = struct.unpack_from(f"<{rows}{letter}", self.data, self.at)
            self.at += struct.calcsize(f"<{rows}{letter}")
            return list(numbers)
        ends = self.column("UInt64", rows)
        count = ends[-1] if ends else 0
        if kind == "Map(String, String)":
            items = list(zip(self.column("String", count), self.column("String", count), strict=True))
        else:
            items = self.column(kind.removeprefix("Array(").removesuffix(")"), count)
        return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]
