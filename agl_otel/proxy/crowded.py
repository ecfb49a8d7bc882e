"""Parse an agent's request, and refuse one with too many JSON values: each costs time and memory, however few bytes it has. Pure.

Ten kilobytes of gzip can unfold to millions of empty messages, which would block all other calls for seconds.
"""

from __future__ import annotations

from typing import Final

from agl_otel.errors import RefusedError, UsageError
from agl_otel.proxy.reply import Json, parse_object

MAX_OBJECTS: Final = 100_000  # a message takes a few, a tool some fifty
MAX_VALUES: Final = 500_000  # objects, lists, texts and numbers: a prompt may be token ids
MAX_MODEL: Final = 1024  # characters of a model's name, which is repeated in errors and in each event of a translated answer


def read(raw: bytes, path: str) -> Json:
    """Parse a body as a JSON object.

    Raises UsageError if it is not one or its model's name is too long, RefusedError (413) if it has too many values.
    """
    if len(raw) > MAX_OBJECTS:
        objects, values = _count(raw)
        if (objects > MAX_OBJECTS or values > MAX_VALUES) and b"\0" not in raw[:4]:  # not UTF-16 or UTF-32
            objects, values = _count(_without_texts(raw))
        if objects > MAX_OBJECTS or values > MAX_VALUES:
            raise RefusedError(
                f"the body of {path} holds more than {MAX_OBJECTS} JSON objects or {MAX_VALUES} JSON values: the proxy takes no more",
                status=413,
                code="too_many_values",
            )
    asked = parse_object(raw)
    if asked is None:
        raise UsageError(f"the body of {path} must be a JSON object")
    model = asked.get("model")
    if isinstance(model, str) and len(model) > MAX_MODEL:
        raise UsageError(f"the model that the body of {path} names has {len(model)} characters: a name has {MAX_MODEL} characters at most")
    return asked


def _count(raw: bytes) -> tuple[int, int]:
    """Upper bounds of the numbers of objects and values; exact if no string contains brackets or commas."""
    objects = raw.count(b"{")
    return objects, objects + raw.count(b"[") + raw.count(b",")


def _without_texts(raw: bytes) -> bytes:
    """Strip the strings from a JSON text; return it unchanged if there are too many of them."""
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * MAX_VALUES:  # a key and a text for each value
        return raw
    return b"".join(bare.split(b'"')[::2])
