"""How services and commands write their logs: text for people, or one JSON object a line for machines (setting `log_format`).

What is logged may quote agents and strangers: it is written so that a terminal shows it and does not obey it.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Final, Literal

from agl_otel.text import json_text, printable_lines

TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class WithoutErrors(logging.Filter):
    """Drops what a library logs with a traceback of one of these errors: strangers can cause as many as they like, and were answered."""

    def __init__(self, *errors: type[BaseException]) -> None:
        super().__init__()
        self._errors = errors

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record stays."""
        return not (record.exc_info and isinstance(record.exc_info[1], self._errors))


class TextFormatter(logging.Formatter):
    """One record: its line, and indented below what belongs to it."""

    def format(self, record: logging.LogRecord) -> str:
        """Without characters that a terminal would obey."""
        return printable_lines(super().format(record))


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, exception, and what the call gave as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json_text(entry)


def configure(level: str, style: Literal["text", "json"] = "text", *, line: str = TEXT, force: bool = False) -> None:
    """Log to stderr, in lines of the form `line`; with `force` also where somebody has configured logging before."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter(line))
    logging.basicConfig(level=level, handlers=[handler], force=force)
