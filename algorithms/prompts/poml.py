"""Render the editor's prompt files, in POML (microsoft.github.io/poml): the project's in wording/, or a user's.

A subset of the language is rendered here, with the same output as the `poml` package (a test compares): `poml`, `role`, `task`,
`output-format`, `p`, `cp caption=`, `list` and `item`, with `for="x in xs"`, `if="x"`, `whiteSpace="pre"` and `{{ dotted.names }}`. Other
files are rendered by the `poml` package, which includes Node (36 MB) and is imported only then.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from agl_otel.errors import SettingsError

WORDING: Final = Path(__file__).parent / "wording"
_CAPTIONS: Final = {"role": "Role", "task": "Task", "output-format": "Output Format"}
_ATTRIBUTES: Final = {"for", "if", "caption", "whiteSpace"}
_VALUE: Final = re.compile(r"\{\{\s*([\w.]+)\s*\}\}")
_LOOP: Final = re.compile(r"(\w+)\s+in\s+([\w.]+)")
Values = Mapping[str, Any]


class _UnsupportedError(Exception):
    """The file uses POML that is not rendered here."""


def render(path: Path, values: Values) -> str:
    """Render a POML file with `values`.

    Raises SettingsError where the file is missing or invalid, uses a name that is not in `values`, or needs the poml package and that is
    not installed.
    """
    try:
        return _rendered(path, values)
    except _UnsupportedError as why:
        answer = _package(path, why).poml(str(path), context=dict(values), chat=True, format="openai_chat")
        return "\n\n".join(str(message["content"]) for message in answer["messages"])


def check(path: Path, values: Values) -> None:
    """Raise SettingsError where `render` would, without running the poml package, which checks its own files."""
    try:
        _rendered(path, values)
    except _UnsupportedError as why:
        _package(path, why)


def _rendered(path: Path, values: Values) -> str:
    try:
        root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        return "\n\n".join(block for child in root for block in _blocks(child, values))
    except OSError as error:
        raise SettingsError(f"prompt file {path} cannot be read: {error.strerror}") from error
    except (ElementTree.ParseError, UnicodeDecodeError) as error:
        raise SettingsError(f"prompt file {path} is not POML: {error}") from error
    except KeyError as error:
        raise SettingsError(f"prompt file {path} asks for {{{{ {error.args[0]} }}}}: there are {', '.join(values)}") from error


def _package(path: Path, why: _UnsupportedError) -> Any:
    try:
        return importlib.import_module("poml")
    except ModuleNotFoundError:
        raise SettingsError(f"prompt file {path} uses {why}, which needs the poml package: pip install poml") from None


def _blocks(element: ElementTree.Element, values: Values) -> list[str]:
    """Render the blocks of an element, with its `for` and `if`."""
    if (more := set(element.attrib) - _ATTRIBUTES) or element.tag not in _ELEMENTS:
        raise _UnsupportedError(f"<{element.tag}{''.join(f' {name}=' for name in sorted(more))}>")
    if "for" in element.attrib:
        if not (loop := _LOOP.fullmatch(element.attrib["for"].strip())):
            raise _UnsupportedError(f'for="{element.attrib["for"]}"')
        return [block for each in _value(loop[2], values) for block in _blocks_if(element, {**values, loop[1]: each})]
    return _blocks_if(element, values)


def _blocks_if(element: ElementTree.Element, values: Values) -> list[str]:
    if "if" in element.attrib and not _value(element.attrib["if"].strip(" {}"), values):
        return []
    return _ELEMENTS[element.tag](element, values)


def _paragraph(element: ElementTree.Element, values: Values) -> list[str]:
    if len(element):
        raise _UnsupportedError(f"elements in <{element.tag}>")
    plain = element.text or ""
    return [_filled(plain if element.get("whiteSpace") == "pre" else " ".join(plain.split()), values)]


def _captioned(element: ElementTree.Element, values: Values) -> list[str]:
    caption = _CAPTIONS.get(element.tag) or _filled(element.attrib["caption"], values)
    inside = [block for child in element for block in _blocks(child, values)] if len(element) else _paragraph(element, values)
    return [f"# {caption}", *inside]


def _list(element: ElementTree.Element, values: Values) -> list[str]:
    items = [item for child in element for item in _blocks(child, values)]
    return ["\n".join(f"- {item}" for item in items)]


_ELEMENTS: Final[dict[str, Callable[[ElementTree.Element, Values], list[str]]]] = {
    "p": _paragraph,
    "item": _paragraph,
    "role": _captioned,
    "task": _captioned,
    "output-format": _captioned,
    "cp": _captioned,
    "list": _list,
}


def _filled(text: str, values: Values) -> str:
    if "{{" in _VALUE.sub("", text):
        raise _UnsupportedError(f"the expression in {text.strip()[:60]!r}")
    return _VALUE.sub(lambda found: str(_value(found[1], values)), text)


def _value(path: str, values: Values) -> Any:
    found: Any = values
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            raise KeyError(path)
        found = found[name]
    return found
