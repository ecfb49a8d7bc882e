"""The log format of services and commands: text, or one JSON object per line (setting `log_format`).

Messages may quote agents and untrusted clients, so control sequences are escaped: a terminal shows them and does not execute them.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Final, Literal

from agl_otel.text import json_text, printable_lines

TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
_CALLERS: Final = ("httpx", "httpx2")
"""Loggers of clients of models, with a line for each call at INFO."""
_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class ErrorFilter(logging.Filter):
    """Suppress library tracebacks for errors that any client can trigger (the client got an error response)."""

    def __init__(self, *errors: type[BaseException]) -> None:
        super().__init__()
        self._errors = errors

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        return not (record.exc_info and isinstance(record.exc_info[1], self._errors))


class TextFormatter(logging.Formatter):
    """Formats a record as its line, with further lines indented below."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text with control characters escaped."""
        return printable_lines(super().format(record))


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time, level, logger, message, exception, and the fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line of JSON."""
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
    """Log to stderr in lines of the form `line`; `force` replaces an existing configuration of logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter(line))
    logging.basicConfig(level=level, handlers=[handler], force=force)
    for name in _CALLERS:
        logging.getLogger(name).setLevel(max(logging.getLevelNamesMapping()[level], logging.WARNING))
