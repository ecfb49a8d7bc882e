"""All repeated fields of OTLP's requests, from their descriptors, so that fields of later versions are included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from agl_otel.collector.expansion import MESSAGES
from agl_otel.collector.journal import Signal
from agl_otel_hook.varint import varint


class Repeated(NamedTuple):
    """A repeated field of a request."""

    signal: Signal
    path: tuple[FieldDescriptor, ...]
    """The fields from the request down to it."""

    @property
    def field(self) -> FieldDescriptor:
        return self.path[-1]

    @property
    def name(self) -> str:
        return f"{self.signal}: {'.'.join(field.name for field in self.path)}"

    def request(self, content: bytes) -> bytes:
        """Build a request with these bytes in the message that contains the field."""
        for field in reversed(self.path[:-1]):
            content = enclosed(field, content)
        return content


def enclosed(field: FieldDescriptor, content: bytes) -> bytes:
    """Serialise a field of bytes, a text or a message."""
    return varint(field.number << 3 | 2) + varint(len(content)) + content


def repeated_fields() -> list[Repeated]:
    """Return all of them; fields within values only once."""
    return [Repeated(signal, path) for signal, message in MESSAGES.items() for path in _paths(message.DESCRIPTOR, ())]


def _paths(message: Descriptor, above: tuple[FieldDescriptor, ...]) -> Iterator[tuple[FieldDescriptor, ...]]:
    for field in message.fields:
        path = (*above, field)
        if field.is_repeated:
            yield path
        if field.message_type is not None and all(field.message_type is not each.message_type for each in above):
            yield from _paths(field.message_type, path)
