"""Count the messages of a request without allocating them: in compiled code, with little more memory than the request takes. Pure.

Protobuf's parser merges repeated occurrences of a field that is declared singular. With types like OTLP's own in which no message field
is repeated, all messages at one place of a request merge into one, and only the heads of the others are lost: a tag and a length, at
least two bytes. The types are derived from OTLP's descriptors, so fields of later versions are counted, too.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from opentelemetry.proto.common.v1.common_pb2 import ArrayValue

from agl_otel.collector.expansion import MESSAGES
from agl_otel.collector.journal import Signal

HEAD_BYTES: Final = 2
"""Least size of a tag and a length."""
UNSURE: Final = 256
"""Maximal undercount: merged messages, nested at most a hundred deep, have longer lengths than the originals."""
_FIXED: Final = frozenset(
    getattr(FieldDescriptorProto, f"TYPE_{name}") for name in ("DOUBLE", "FLOAT", "FIXED64", "FIXED32", "SFIXED64", "SFIXED32")
)
"""Types of values that are as large in memory as on the wire."""


def messages(signal: Signal, raw: bytes, *, lists: bool = True) -> int:
    """Return the approximate number of messages in a request; long ones count as 1.5. Raises DecodeError if it cannot be parsed.

    With `lists`, messages in lists count, too, and so does each byte of packed numbers and of lists of texts.
    """
    kind, unfolding = _types(signal, lists)
    found = kind.FromString(raw)
    others = (len(raw) - found.ByteSize()) // HEAD_BYTES
    return others + _left(found, unfolding if lists else frozenset())


def _left(message: Message, unfolding: frozenset[str]) -> int:
    """Count the messages within a merged one, plus its bytes if its name is in `unfolding`."""
    own = message.ByteSize() if message.DESCRIPTOR.full_name in unfolding else 0
    return own + sum(1 + _left(inner, unfolding) for _, inner in message.ListFields())


@cache
def _types(signal: Signal, lists: bool) -> tuple[type[Message], frozenset[str]]:
    """Return a request's merging type, and the names of messages with values that are larger in memory than on the wire."""
    pool = DescriptorPool()
    unfolding: set[str] = set()
    request: Descriptor = MESSAGES[signal].DESCRIPTOR
    _add(pool, request.file, unfolding, lists, set())
    return GetMessageClass(pool.FindMessageTypeByName(request.full_name)), frozenset(unfolding)


def _add(pool: DescriptorPool, file: FileDescriptor, unfolding: set[str], lists: bool, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for each in file.dependencies:
        _add(pool, each, unfolding, lists, added)
    copy = FileDescriptorProto()
    file.CopyToProto(copy)
    copy.ClearField("service")
    for message in copy.message_type:
        _merge(message, f"{copy.package}.{message.name}", unfolding, lists)
    pool.AddSerializedFile(copy.SerializeToString())


def _merge(message: DescriptorProto, name: str, unfolding: set[str], lists: bool) -> None:
    """Keep only its message fields, and make them singular."""
    for inner in message.nested_type:
        _merge(inner, f"{name}.{inner.name}", unfolding, lists)
    kept: list[FieldDescriptorProto] = []
    for field in message.field:
        repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
        if field.type == FieldDescriptorProto.TYPE_MESSAGE:
            if lists or name != ArrayValue.DESCRIPTOR.full_name:
                kept.append(FieldDescriptorProto(name=field.name, number=field.number, type=field.type, type_name=field.type_name))
        elif repeated and field.type not in _FIXED:
            unfolding.add(name)
    del message.field[:]
    del message.oneof_decl[:]
    message.field.extend(kept)
