"""Print tables and untrusted text: cut to the width of a terminal, uncut in pipes and files.

Control characters in untrusted text are escaped, and rich markup in it is not interpreted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Final, cast

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agl_otel.cli.findings import MARKS, Finding
from agl_otel.settings import DAY_SECONDS
from agl_otel.text import printable

WIDEST_VALUE: Final = 60  # characters of a value on one line
WIDEST_LINE: Final = 10_000  # characters of a line of a message, and of a table cell in a pipe or file
WIDEST_OUTPUT: Final = 1 << 30
GAP: Final = 2  # columns between those of a table without rules


def open_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """Open the output of a command: as wide as the terminal or COLUMNS, else (in a pipe or file) of unlimited width."""
    made = Console(stderr=stderr, highlight=highlight)
    if not _has_width(made.file):
        made.width = WIDEST_OUTPUT
    return made


def counted(count: int, noun: str) -> str:
    """Return "1 call", "2 calls"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def table_of(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Build a table. Its first column is never cut, and no cell is in a pipe or file. Cells are plain text, never markup."""
    table = Table(title=None if title is None else escape(printable(title)), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(Text(plain(column)), no_wrap=number == 0)
    width = WIDEST_VALUE if _has_width(sys.stdout) else WIDEST_LINE
    for row in rows:
        table.add_row(*(Text("" if value is None else plain(value, width)) for value in row))
    return table


def lines_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, cut: str, width: int) -> Table:
    """Build a table without rules, of one line a row: in a terminal of this `width` the column `cut` gets what the others leave."""
    cells = [[Text("" if value is None else plain(value, WIDEST_LINE)) for value in row] for row in rows]
    place = columns.index(cut)
    others = [max([len(name), *(row[number].cell_len for row in cells)]) for number, name in enumerate(columns) if number != place]
    room = max(len(cut), width - sum(others) - GAP * len(others))
    table = Table(title=escape(printable(title)), title_justify="left", box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="right" if name == "reward" else "left")
    for row in cells:
        row[place].truncate(room, overflow="ellipsis")
        table.add_row(*row)
    return table


def brief(value: object) -> str:
    """Format a task for a line: the fields of an object without JSON's quotes, and without the name of the first if that is a text."""
    if not isinstance(value, Mapping):
        return _as_text(value)
    fields = [*cast("Mapping[object, object]", value).items()]
    return ", ".join(
        f"{'' if not place and isinstance(field, str) else f'{name}: '}{_as_text(field)}" for place, (name, field) in enumerate(fields)
    )


def clock(at: float | None) -> str:
    """Format a local time, with the date unless it is today's."""
    if at is None:
        return ""
    local = time.localtime(at)
    return time.strftime("%H:%M:%S" if local[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", local)


def moment(at: float) -> str:
    """Format a local time with its date and zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))


def lasted(seconds: float) -> str:
    """Format a length of time, such as 3.20 s, 5 min 12 s, 3 h 20 min, 2 d 4 h."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    whole, day = int(seconds), int(DAY_SECONDS)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < day:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // day} d {whole % day // 3600} h"


def _has_width(stream: IO[str]) -> bool:
    return stream.isatty() or os.environ.get("COLUMNS", "").isdigit()


def plain(value: object, width: int = WIDEST_VALUE) -> str:
    """Format `value` as one line of at most `width` characters, with control characters escaped."""
    text = printable(str(value))
    return text if len(text) <= width else text[: width - 1] + "…"


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def print_findings(console: Console, findings: Iterable[Finding]) -> None:
    """Print findings whole, each with its mark, reasons and remedy."""
    for finding in findings:
        console.print(f"{MARKS[finding.state]} ", end="")
        console.print(Text(f"{printable(finding.what)}: {printable(finding.detail)}"), soft_wrap=True)
        for reason in finding.reasons:
            console.print(Text(f"    {printable(reason)}"), soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"    {finding.remedy}", "yellow"), soft_wrap=True)
