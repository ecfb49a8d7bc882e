"""Counts the messages of a request without making them: compiled code does it, in little more memory than the request takes. Pure.

Protobuf's parser merges what comes again in a field that is not repeated. So in types like OTLP's own, none of whose messages is repeated,
all messages of one place of a request become one, and what is lost are the heads of the others: a tag and a length, two bytes at least.
The types are made from OTLP's descriptors: a field that a later version adds is counted, too.
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
"""The least that a tag and a length take."""
UNSURE: Final = 256
"""How many messages fewer than there are may be counted: merged ones, at most a hundred deep, have longer lengths than each had."""
_FIXED: Final = frozenset(
    getattr(FieldDescriptorProto, f"TYPE_{name}") for name in ("DOUBLE", "FLOAT", "FIXED64", "FIXED32", "SFIXED64", "SFIXED32")
)
"""Types of values that take as many bytes in memory as on the wire."""


def messages(signal: Signal, raw: bytes, *, lists: bool = True) -> int:
    """How many messages a request holds, about: long ones count half as much again. Raises DecodeError where it cannot be read.

    With `lists`, those of the values of lists are among them, and each byte of packed numbers and of lists of texts counts as one more.
    """
    kind, unfolding = _types(signal, lists)
    found = kind.FromString(raw)
    heads = (len(raw) - found.ByteSize()) // HEAD_BYTES
    return heads + _left(found, unfolding if lists else frozenset())


def _left(message: Message, unfolding: frozenset[str]) -> int:
    """How many messages are in a merged one, and its bytes where its name is in `unfolding`."""
    own = message.ByteSize() if message.DESCRIPTOR.full_name in unfolding else 0
    return own + sum(1 + _left(inner, unfolding) for _, inner in message.ListFields())


@cache
def _types(signal: Signal, lists: bool) -> tuple[type[Message], frozenset[str]]:
    """The merging type of a request, and the names of messages with values that are larger in memory than on the wire."""
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
    """Leave the messages in it alone, none of them repeated."""
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
