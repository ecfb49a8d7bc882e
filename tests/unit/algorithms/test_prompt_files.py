"""Rendering of the project's prompt files, and checks of edited templates."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agl_otel.algorithms.prompts.candidates import cleaned, template_problem
from agl_otel.algorithms.prompts.poml import WORDING, render
from agl_otel.errors import SettingsError

RECORDED = Path(__file__).parents[2] / "recordings" / "poml.json"
RECORDING: dict[str, Any] = json.loads(RECORDED.read_text())


@pytest.mark.parametrize("path", sorted(WORDING.glob("*.poml")), ids=lambda path: path.stem)
def test_every_prompt_file_is_rendered_like_the_poml_package_does(path: Path) -> None:
    assert render(path, RECORDING["values"]) == RECORDING["rendered"][path.name]


def test_errors_name_the_file_and_the_missing_value(tmp_path: Path) -> None:
    path = tmp_path / "own.poml"
    with pytest.raises(SettingsError, match=r"own\.poml cannot be read"):
        render(path, {})
    path.write_text("<poml><p>{{ sample.colour }}</p></poml>")
    with pytest.raises(SettingsError, match=r"asks for \{\{ sample.colour \}\}: there are sample"):
        render(path, {"sample": {"number": 1}})
    path.write_text("<poml><p></poml>")
    with pytest.raises(SettingsError, match="is not POML"):
        render(path, {})


@pytest.mark.skipif(find_spec("poml") is not None, reason="poml is installed and renders it")
@pytest.mark.parametrize("content", ["<img src='x'/>", "<p>{{ 1 + 1 }}</p>", "<p speaker='system'>x</p>", "<p>a <b>c</b></p>"])
def test_unsupported_poml_requires_the_package(tmp_path: Path, content: str) -> None:
    path = tmp_path / "own.poml"
    path.write_text(f"<poml>{content}</poml>")
    with pytest.raises(SettingsError, match="needs the poml package: pip install poml"):
        render(path, {})


@pytest.mark.parametrize(
    ("text", "before", "words"),
    [
        ("Please say {question}", "Say {question}", ""),
        ("Say it", "Say {question}", "it lacks {question}"),
        ("{question} as {format}", "{question}", "it invents {format}"),
        ('{question} as {"a": 1}', "{question}", 'it invents {"a"}'),
        ("{question} as {{1}}", "{question}", ""),
        ("{question} {", "{question}", "it is no f-string template"),
        ("{question:>12}, {question!r}", "{question}", ""),
        ("{question:>1000000000}", "{question}", "it is no f-string template: {question:>1000000000} asks for"),
        ("{question:{question}}", "{question}", "it is no f-string template: {question:{question}} asks for"),
        ("{question.text}", "{question}", "it is no f-string template: {question.text} reaches into"),
        ("{question[1]}", "{question}", "it is no f-string template: {question[1]} reaches into"),
    ],
)
def test_an_edit_must_keep_its_placeholders(text: str, before: str, words: str) -> None:
    why = template_problem(text, before, "f-string")
    assert why.startswith(words) and bool(why) == bool(words)
    assert template_problem(text, before, "jinja") == ""


@pytest.mark.parametrize(
    ("answer", "prompt"),
    [
        ("  Say it.\n", "Say it."),
        ("```\nSay it.\n```", "Say it."),
        ("```text\nSay\nit.\n```\n", "Say\nit."),
        ("Use ```x```", "Use ```x```"),
    ],
)
def test_a_code_fence_around_an_answer_is_removed(answer: str, prompt: str) -> None:
    assert cleaned(answer) == prompt
