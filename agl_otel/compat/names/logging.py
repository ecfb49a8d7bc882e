"""0.3's `logging`: set up Python's logging for programs that use this package. Repeated calls replace the earlier set-up."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

PACKAGE: Final = "agl_otel"
FORMAT: Final = "%(asctime)s [%(levelname)s] (Process-%(process)d %(name)s) %(message)s"
COLORS: Final = {"DEBUG": 36, "INFO": 32, "WARNING": 33, "ERROR": 31, "CRITICAL": 35}
_OURS: Final = "_agl_otel_handler"
Level = int | str

__all__ = ["configure_logger", "setup_logging", "setup_module_logging"]


class _Colored(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return f"\x1b[{COLORS.get(record.levelname, 0)}m{super().formatMessage(record)}\x1b[0m"


def setup_logging(
    level: Level = "INFO",
    *,
    console: bool = True,
    color: bool | Mapping[str, object] | None = None,
    propagate: bool = False,
    disable_existing_loggers: bool = False,
    capture_warnings: bool = False,
    submodule_levels: Mapping[str, Level] | None = None,
    extra_handlers: Sequence[logging.Handler] | None = None,
    formatter: logging.Formatter | None = None,
    apply_to: Sequence[str] | None = None,
    files: str | Path | Mapping[str, str | Path] | None = None,
) -> None:
    """Log this package to the terminal and to files.

    Args:
        level: level of this package.
        console: whether to log to standard error.
        color: whether to use colors; None: on a terminal only.
        propagate: whether handlers of the root logger get the records too.
        disable_existing_loggers: disable all existing loggers except this package's and those of `apply_to`.
        capture_warnings: whether to log Python's warnings.
        submodule_levels: {logger: level}, for parts with another level.
        extra_handlers: further handlers.
        formatter: formatter of records; the default has time, level, process and logger.
        apply_to: further loggers to set up in the same way.
        files: one file for all, or {logger: file}.
    """
    logging.captureWarnings(capture_warnings)
    if disable_existing_loggers:
        for name in list(logging.root.manager.loggerDict):
            logging.getLogger(name).disabled = not name.startswith((PACKAGE, *(apply_to or ())))
    loggers = [setup_module_logging(level, name=name, console=console, color=color, propagate=propagate, formatter=formatter)
               for name in (PACKAGE, *(apply_to or ()))]  # fmt: skip
    for handler in extra_handlers or ():
        for logger in loggers:
            _add(logger, handler, formatter)
    for name, path in _files(files, [logger.name for logger in loggers]):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        _add(logging.getLogger(name), logging.FileHandler(path), formatter or logging.Formatter(FORMAT))
    for name, other in (submodule_levels or {}).items():
        logging.getLogger(name).setLevel(other)


def setup_module_logging(
    level: Level = "INFO",
    *,
    name: str = PACKAGE,
    console: bool = True,
    color: bool | Mapping[str, object] | None = None,
    propagate: bool = False,
    formatter: logging.Formatter | None = None,
) -> logging.Logger:
    """Set up one logger, replacing its earlier set-up, and return it. Arguments as of `setup_logging`."""
    logger = logging.getLogger(name)
    for handler in [handler for handler in logger.handlers if getattr(handler, _OURS, False)]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)
    logger.propagate = propagate
    if console:
        colored = sys.stderr.isatty() if color is None else bool(color)
        _add(logger, logging.StreamHandler(), formatter or (_Colored if colored else logging.Formatter)(FORMAT))
    return logger


def configure_logger(level: Level = logging.INFO, name: str = PACKAGE) -> logging.Logger:
    """Deprecated since 0.3: `setup_logging`."""
    warnings.warn("configure_logger is deprecated: call setup_logging()", DeprecationWarning, stacklevel=2)
    return setup_module_logging(level, name=name)


def _add(logger: logging.Logger, handler: logging.Handler, formatter: logging.Formatter | None) -> None:
    if formatter is not None:
        handler.setFormatter(formatter)
    setattr(handler, _OURS, True)
    logger.addHandler(handler)


def _files(files: str | Path | Mapping[str, str | Path] | None, names: Sequence[str]) -> list[tuple[str, str | Path]]:
    if files is None:
        return []
    return list(files.items()) if isinstance(files, Mapping) else [(name, files) for name in names]
