from __future__ import annotations

import pytest

from agl_otel.errors import UsageError
from agl_otel.runner import placeholders


@pytest.mark.parametrize(
    ("argument", "task", "filled"),
    [
        ("{question}", {"question": "2+2?"}, "2+2?"),
        ("--q={question}", {"question": "a b"}, "--q=a b"),
        ("{n}", {"n": [1, "ü"]}, '[1, "ü"]'),
        ("{task}", "2+2?", "2+2?"),
        ("{input}", {"q": 1}, '{"q": 1}'),
        ("{task}", {"task": "mine"}, "mine"),
        ('{"q": "{q}", "n": {n}}', {"q": "x", "n": 3}, '{"q": "x", "n": 3}'),
        ("{{question}}", {"question": "no"}, "{question}"),
        ("${HOME} {} { print $1 } {0}", {}, "${HOME} {} { print $1 } {0}"),
        ("{q}", {"q": "{q} {other} \\1"}, "{q} {other} \\1"),
    ],
)
def test_placeholders_are_filled_from_the_task(argument: str, task: object, filled: str) -> None:
    assert placeholders.fill([argument], task) == [filled]


def test_an_unknown_placeholder_is_named_with_the_available_ones() -> None:
    with pytest.raises(UsageError, match=r"\{answer\}.*it offers \{task\}, \{input\}, \{question\}"):
        placeholders.check(["python", "agent.py", "{question}", "{answer}"], {"question": "q"})


def test_names_are_listed_once_and_in_order() -> None:
    assert placeholders.names_in(["{b}", "{a} {b}", "{{c}}"]) == ["b", "a"]
