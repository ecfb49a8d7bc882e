"""Untrusted text in a terminal, a log and a JSON document: control characters are shown, never executed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from agl_otel.runner.__main__ import event_line
from agl_otel.runner.running import RunnerEvent
from agl_otel.service.logs import JsonFormatter, TextFormatter
from agl_otel.text import json_text, printable, printable_lines

HOSTILE = [
    "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\link", "\x9b31m", "\x08\x08\x08", "\r\x1b[Kok", "\u202egnp.exe",
    "\u2066x\u2069",    "a\x00b", "\x7f", "\x1b]52;c;ZXZpbA==\x07", "[bold red]x[/]", "\x1bP+q\x1b\\", "\x84\x85\x8d", "\u200f", "\u2028x",
]  # fmt: skip


def obeyed(text: str) -> bool:
    """Whether a terminal would interpret it."""
    return any(not (c.isprintable() or c == "\n") for c in text)


@pytest.mark.parametrize("text", HOSTILE)
def test_shown_text_has_no_control_characters(text: str) -> None:
    assert not obeyed(printable(text)) and "\n" not in printable(text)
    assert not obeyed(printable_lines(f"first\n{text}"))
    assert not obeyed(json_text({"a": [text]})) and json.loads(json_text({"a": [text]})) == {"a": [text]}
    event = RunnerEvent("ended", "ro-1", "at-1", outcome="failed", error=f"it broke\n{text}x", seconds=1.0)
    assert not obeyed(event_line(event)) and "\n" not in event_line(event)


def test_what_json_has_no_number_for_is_null() -> None:
    assert json.loads(json_text({"tail": float("inf"), "all": [float("nan"), (1.5, -0.0)]})) == {"tail": None, "all": [None, [1.5, 0.0]]}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_log_quotes_it_and_no_line_of_it_looks_like_a_record(text: str) -> None:
    record = logging.makeLogRecord({"msg": "it said %s", "args": (f"{text}\nERROR forged",), "levelname": "INFO"})
    lines = TextFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert not any(obeyed(line) for line in lines)
    assert all(line.startswith("    ") for line in lines[1:])
    assert not obeyed(JsonFormatter().format(record)) and json.loads(JsonFormatter().format(record))["message"].endswith("forged")


def test_a_commands_error_has_no_control_characters() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agl_otel", "export", "--store", "\x1b[31mx\u202e"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and not obeyed(done.stderr)
