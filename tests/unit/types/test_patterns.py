"""Regular expressions that are none: refused by name wherever a user can give one, before data is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import pytest

from agl_otel.adapters import TracerTraceToTriplet, TraceToMessages
from agl_otel.adapters.logged import weighable
from agl_otel.adapters.masking import MaskRule
from agl_otel.adapters.records import Reading
from agl_otel.adapters.trajectories import to_trajectories
from agl_otel.cli import main
from agl_otel.errors import UsageError
from agl_otel.types.options import Pattern
from tests.unit.adapters.conftest import CallRow, TracesBuilder
from tests.unit.adapters.spans import call
from tests.unit.cli.test_numbers import COMMANDS

OPTIONS = [
    (path, option)
    for path, command in COMMANDS
    for option in command.params
    if isinstance(option, click.Option) and "REGEX" in str(option.metavar)
]
TAKERS: dict[str, Callable[[], Any]] = {
    "an agent_match": lambda: Reading(agent_match="("),
    "a masking rule": lambda: MaskRule("drop_text", text="("),
    "trajectories": lambda: to_trajectories(TracesBuilder().build(CallRow()), agent_match="("),
    "a back-test": lambda: weighable(TracesBuilder().build(CallRow()), agent_match="("),
    "triplets": lambda: TracerTraceToTriplet(llm_call_match="(")([call("a", 1, 2)]),
    "messages": lambda: TraceToMessages(agent_match="(")([call("a", 1, 2)]),
}


@pytest.mark.parametrize(("path", "option"), OPTIONS, ids=lambda each: "-".join(each) if isinstance(each, tuple) else each.opts[0])
def test_an_option_names_itself(path: tuple[str, ...], option: click.Option, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(option.type, Pattern)
    with pytest.raises(SystemExit) as ended:
        main([*path, option.opts[0], "("])
    output = capsys.readouterr().err
    assert ended.value.code == 2 and f"'{option.opts[0]}': '(' is no regular expression" in output and "Traceback" not in output


@pytest.mark.parametrize("take", TAKERS.values(), ids=list(TAKERS))
def test_the_library_names_the_pattern(take: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match=r"'\(' is no regular expression: missing \)"):
        take()


def test_every_command_that_takes_one_is_here() -> None:
    assert {path[0] for path, _ in OPTIONS} == {"backtest", "export", "replay"}
