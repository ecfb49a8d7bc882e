"""0.3's `logging`: set up Python's logging for programs that use this package. One set-up, whatever is called how often."""

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
        level: of this package.
        console: whether to log to standard error.
        color: whether in color; None: where it is a terminal.
        propagate: whether handlers of the root logger get the lines too.
        disable_existing_loggers: switch off loggers that were made before and are none of `apply_to`.
        capture_warnings: whether Python's warnings go to the log.
        submodule_levels: {logger: level}, for parts that are to say more or less.
        extra_handlers: more places for the lines.
        formatter: how a line looks; the default has time, level, process and logger.
        apply_to: further loggers that are set up in the same way.
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
    """Log one logger to the terminal; earlier set-ups of it are replaced. Returns it. Arguments as of `setup_logging`."""
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
