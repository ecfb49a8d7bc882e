from __future__ import annotations

import pytest

from agl_otel.errors import UsageError
from agl_otel.runner.limits import parse_size
from agl_otel.runner.zygote.program import Program, imports_at_the_top, parse, touches_environment


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["agent.py", "-x"], Program("script", "agent.py", ("-x",))),
        (["-u", "-m", "pkg.mod", "a"], Program("module", "pkg.mod", ("a",), unbuffered=True)),
        (["-c", "print(1)"], Program("code", "print(1)", ())),
    ],
)
def test_a_python_command_line_is_parsed(arguments: list[str], found: Program) -> None:
    assert parse(arguments) == found
    assert Program.from_json(found.to_json()) == found


@pytest.mark.parametrize(("arguments", "why"), [([], "names no program"), (["-X", "dev", "a.py"], "option -X"), (["-m"], "follows -m")])
def test_a_command_that_cannot_be_forked_is_refused_with_the_reason(arguments: list[str], why: str) -> None:
    found = parse(arguments)
    assert isinstance(found, str) and why in found


def test_only_imports_before_any_other_effect_are_preloaded() -> None:
    source = '"""Doc."""\nfrom __future__ import annotations\nimport os, json\nLIMIT = 3\ndef f(): pass\nfrom openai import OpenAI\n'
    assert imports_at_the_top(source + "os.environ['HF_HOME'] = '/x'\nimport transformers\n") == ["os", "json", "openai"]
    assert imports_at_the_top("from . import mine\n") == []
    assert imports_at_the_top("def broken(:") == []


def test_a_program_that_may_change_its_environment_is_detected() -> None:
    assert touches_environment("import os\nos.environ['A'] = 'b'")
    assert touches_environment("")
    assert not touches_environment("import openai\nprint(1)")


def test_sizes_are_parsed_with_their_units() -> None:
    assert [parse_size(text) for text in ("1000", "2k", "512M", "1.5GiB", "1gb")] == [1000, 2048, 512 << 20, 3 << 29, 1 << 30]
    with pytest.raises(UsageError, match="'many' is not a size"):
        parse_size("many")
