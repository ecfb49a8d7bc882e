"""Read the objects of a request of generateContent, so that no field of them is lost. Pure."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any, Final, TypeVar, cast

from agl_otel.errors import UsageError
from agl_otel.proxy.reply import Json

T = TypeVar("T")
_LOWER: Final = re.compile(r"(?<=[a-z0-9])_([a-z])")


def camel(name: str) -> str:
    """Return a name in camelCase. Google's API takes names in snake_case, too."""
    return _LOWER.sub(lambda letter: letter[1].upper(), name) if "_" in name else name


def fields(value: Any, where: str, known: Set[str]) -> Json:
    """Return the fields of an object that are set, by their names in camelCase; of None none.

    Raises UsageError if it is no object, or has others than the known ones; those that are False may be there.
    """
    held: Json = {}
    for given, each in instance({} if value is None else value, dict, where).items():
        name = camel(given)
        if each is None or (each is False and name not in known):
            continue
        if name not in known:
            raise UsageError(f"{where} has {given[:100]!r}, which cannot be translated to chat/completions: leave it out")
        if name in held:
            raise UsageError(f"{where} has {name!r} twice")
        held[name] = each
    return held


def instance(value: Any, kind: type[T], where: str) -> T:
    """Return a value of that kind, a text not empty. Raises UsageError if it is another."""
    if not isinstance(value, kind) or (kind is str and not value) or (kind is int and isinstance(value, bool)):
        raise UsageError(f"{where} must be {_KINDS[kind]}")
    return value


def objects(value: Any, where: str) -> list[Json]:
    """Return the objects in a list; of None none. Raises UsageError if it is no list, or has something else in it."""
    return [instance(each, dict, f"each of {where}") for each in cast("list[Any]", instance([] if value is None else value, list, where))]


_KINDS: Final[dict[type, str]] = {dict: "a JSON object", list: "a list", str: "a text", int: "an integer", bool: "true or false"}
