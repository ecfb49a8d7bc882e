"""Convert nested data to span attributes: dotted keys, values of the types that OpenTelemetry takes, tags and links. Pure.

Names and results are those of Agent Lightning 0.3 (its utils/otel.py). agl_otel/spans/attributes.py reads them back.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from opentelemetry.semconv.attributes import exception_attributes

from agl_otel_hook import conventions

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
PRIMITIVES: Final = (str, bool, int, float)
_LISTS: Final[tuple[tuple[tuple[type, ...], type], ...]] = (
    ((str,), str),
    ((bool,), bool),
    ((int, bool), int),
    ((float, int, bool), float),
)
"""(types of the items, type that they become); the first match counts."""
_log = logging.getLogger(__name__)


def flatten_attributes(nested: Mapping[str, Any] | Sequence[Any], *, expand_leaf_lists: bool = False) -> dict[str, Any]:
    """Flatten nested mappings and lists to dotted keys. Empty ones disappear; other values stay unchanged.

    A list of one primitive type stays a value, unless `expand_leaf_lists`; items of other lists get their index as key. Raises ValueError
    for a key that is not a str.
    """
    flat: dict[str, Any] = {}
    _flatten(nested, "", flat, expand_leaf_lists)
    return flat


def _flatten(value: Any, path: str, flat: dict[str, Any], expand: bool) -> None:
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            if not isinstance(key, str):
                raise ValueError(f"attribute keys are strings, not {key!r} (in {path or 'the outermost mapping'})")
            _flatten(item, f"{path}.{key}" if path else key, flat, expand)
    elif isinstance(value, (list, tuple)) and not (path and not expand and _is_leaf(cast("Sequence[Any]", value), path)):
        for index, item in enumerate(cast("Sequence[Any]", value)):
            _flatten(item, f"{path}.{index}" if path else str(index), flat, expand)
    else:
        flat[path] = list(cast("Sequence[Any]", value)) if isinstance(value, tuple) else value


def _is_leaf(items: Sequence[Any], path: str) -> bool:
    if not items or not all(isinstance(item, PRIMITIVES) for item in items):
        return False
    kinds = {_kind(item) for item in items}
    if len(kinds) > 1:
        _log.warning("the list %r mixes %s: it becomes one attribute for each item", path, ", ".join(sorted(k.__name__ for k in kinds)))
    return len(kinds) == 1


def _kind(value: Any) -> type:
    return next(kind for kind in PRIMITIVES if isinstance(value, kind))


def sanitize_attributes(attributes: Mapping[str, Any], force: bool = True) -> dict[str, AttributeValue]:
    """Convert attributes to what OpenTelemetry takes: a value that is neither primitive nor a list of one primitive type becomes JSON.

    With `force`, objects that JSON cannot represent become their str(). Raises ValueError with the attribute's name where JSON fails.
    """
    clean: dict[str, AttributeValue] = {}
    for key, value in attributes.items():
        try:
            clean[key] = sanitize_attribute_value(value, force)
        except ValueError as error:
            raise ValueError(f"attribute {key!r}: {error}") from error
    return clean


def sanitize_attribute_value(value: Any, force: bool = True) -> AttributeValue:
    """Convert one value as `sanitize_attributes` does. Raises ValueError."""
    if isinstance(value, PRIMITIVES):
        return value
    if isinstance(value, (list, tuple)) and (items := _uniform(cast("Sequence[Any]", value))) is not None:
        return items
    try:
        return json.dumps(value, default=str if force else None)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{full_qualified_name(type(value))} cannot be written as JSON: {error}") from error


def sanitize_list_attribute_sanity(items: Sequence[Any]) -> AttributeValue:
    """Convert the items to one type: str, else bool, else int, else float. Raises ValueError where that is impossible."""
    uniform = _uniform(items)
    if uniform is None:
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise ValueError(f"a list attribute has items of one primitive type, not {kinds}")
    return uniform


def _uniform(items: Sequence[Any]) -> AttributeValue | None:
    becomes = next((kind for kinds, kind in _LISTS if all(isinstance(item, kinds) for item in items)), None)
    return cast("AttributeValue", [becomes(item) for item in items]) if becomes is not None else None


def check_attributes_sanity(attributes: Mapping[Any, Any]) -> None:
    """Raise ValueError with the name of the first attribute that OpenTelemetry would not take unchanged."""
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError(f"attribute keys are strings, not {key!r}")
        is_list = isinstance(value, (list, tuple)) and _uniform(cast("Sequence[Any]", value)) is not None
        if not is_list and not isinstance(value, PRIMITIVES):
            raise ValueError(f"attribute {key!r} is a {type(value).__name__}: use str, bool, int, float, or lists and dicts of them")


def full_qualified_name(kind: type) -> str:
    """Return `module.Class`, or `Class` for a builtin."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def format_exception_attributes(exception: BaseException) -> dict[str, AttributeValue]:
    """Return an exception as attributes of OpenTelemetry's semantic conventions."""
    return {
        exception_attributes.EXCEPTION_TYPE: type(exception).__name__,
        exception_attributes.EXCEPTION_MESSAGE: str(exception),
        exception_attributes.EXCEPTION_ESCAPED: True,
        exception_attributes.EXCEPTION_STACKTRACE: "".join(traceback.format_exception(exception)),
    }


def make_tag_attributes(tags: Sequence[str]) -> dict[str, Any]:
    """Return attributes that tag a span."""
    return flatten_attributes({conventions.TAG: list(tags)}, expand_leaf_lists=True)


def make_link_attributes(links: Mapping[str, str]) -> dict[str, Any]:
    """Return attributes that link a span to the spans that match every {key: value}. Raises ValueError for a value that is not a str."""
    wrong = [key for key, value in links.items() if not isinstance(value, str)]  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
    if wrong:
        raise ValueError(f"the value of link {wrong[0]!r} is a {type(links[wrong[0]]).__name__}: links match strings")
    found = [{conventions.LINK_KEY_MATCH: key, conventions.LINK_VALUE_MATCH: value} for key, value in links.items()]
    return flatten_attributes({conventions.LINK: found}, expand_leaf_lists=True)
