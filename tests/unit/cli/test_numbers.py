"""Invalid values for every number, size and span of time among the commands' options."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import click
import pytest

from agl_otel.cli import cli, main
from agl_otel.cli.queue import span_of_time
from agl_otel.errors import UsageError
from agl_otel.runner.limits import parse_size
from agl_otel.types.options import Finite, Whole

NONSENSE = ("-1", "0", "nan", "-nan", "inf", "-Infinity", "1e999", "1_0", "", " ", "9" * 30, "9" * 5000, "0x10", "١e")
SECONDS = {"--timeout", "--every", "--interval", "--hours"}
"""Options that are a time: none may be 0, except that of `wait`, which then checks once."""
NUMBERS = (click.types.IntParamType, click.types.FloatParamType)


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from commands(found, (*path, name))
    else:
        yield path, command


COMMANDS = list(commands(cli))
OPTIONS = [
    (path, option)
    for path, command in COMMANDS
    for option in command.params
    if isinstance(option, click.Option) and isinstance(option.type, NUMBERS)
]


def test_every_number_option_has_a_bounded_type() -> None:
    assert len(OPTIONS) > 30
    assert [(path, option.name) for path, option in OPTIONS if not isinstance(option.type, Whole | Finite)] == []


@pytest.mark.parametrize(("path", "option"), OPTIONS, ids=lambda each: "-".join(each) if isinstance(each, tuple) else each.opts[0])
def test_a_value_that_is_not_a_number_is_a_usage_error(
    path: tuple[str, ...], option: click.Option, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in NONSENSE:
        try:
            given: Any = option.type.convert(value, option, None)
        except click.UsageError:
            with pytest.raises(SystemExit) as ended:
                main([*path, option.opts[0], *[value] * option.nargs])
            output = capsys.readouterr()
            assert (ended.value.code, option.opts[0] in output.err, "Traceback" in output.err) == (2, True, False), output
        else:
            assert math.isfinite(given) and (isinstance(given, float) or abs(given) < 2**31)
            assert value.strip("-1") or given == -1
            if option.opts[0] in SECONDS and path != ("rollouts", "wait"):
                assert given > 0, (path, option.opts, value)


def test_an_invalid_size_or_span_of_time_is_a_usage_error() -> None:
    for value in (*NONSENSE, *(f"{number}{unit}" for number in ("-1", "nan", "inf", "1e999", "9" * 400) for unit in "sGd")):
        with pytest.raises(UsageError, match="is not a span of time"):
            span_of_time(value)
        if value != "9" * 30 and not value.isdecimal():
            with pytest.raises(UsageError, match="is not a size"):
                parse_size(value)
    for value in ("0", "0G", "9" * 30, "9" * 400 + "G"):
        with pytest.raises(UsageError, match="is not a size"):
            parse_size(value)
