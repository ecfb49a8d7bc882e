"""Print tables and untrusted text: cut to the width of a terminal, uncut in pipes and files.

Control characters in untrusted text are escaped, and rich markup in it is not interpreted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agl_otel.cli.findings import MARKS, Finding
from agl_otel.text import printable

WIDEST_VALUE: Final = 60  # characters of a value on one line
WIDEST_LINE: Final = 10_000  # characters of a line of a message, and of a table cell in a pipe or file
WIDEST_OUTPUT: Final = 1 << 30


def open_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """Open the output of a command: as wide as the terminal or COLUMNS, else (in a pipe or file) of unlimited width."""
    made = Console(stderr=stderr, highlight=highlight)
    if not _has_width(made.file):
        made.width = WIDEST_OUTPUT
    return made


def table_of(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Build a table. Its first column is never cut, and no cell is in a pipe or file. Cells are plain text, never markup."""
    table = Table(title=None if title is None else escape(printable(title)), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(Text(plain(column)), no_wrap=number == 0)
    width = WIDEST_VALUE if _has_width(sys.stdout) else WIDEST_LINE
    for row in rows:
        table.add_row(*(Text("" if value is None else plain(value, width)) for value in row))
    return table


def _has_width(stream: IO[str]) -> bool:
    return stream.isatty() or os.environ.get("COLUMNS", "").isdigit()


def plain(value: object, width: int = WIDEST_VALUE) -> str:
    """Format `value` as one line of at most `width` characters, with control characters escaped."""
    text = printable(str(value))
    return text if len(text) <= width else text[: width - 1] + "…"


def print_findings(console: Console, findings: Iterable[Finding]) -> None:
    """Print findings whole, each with its mark, reasons and remedy."""
    for finding in findings:
        console.print(f"{MARKS[finding.state]} ", end="")
        console.print(Text(f"{printable(finding.what)}: {printable(finding.detail)}"), soft_wrap=True)
        for reason in finding.reasons:
            console.print(Text(f"    {printable(reason)}"), soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"    {finding.remedy}", "yellow"), soft_wrap=True)
