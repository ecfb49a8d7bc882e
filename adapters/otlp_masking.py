"""Masks OTLP requests by the rules of masking.py before anything is stored: the log, the forwarded copy, and ClickHouse. Pure.

Already masked content is kept.

Spans, their events and log records are covered; agl_otel/spans/content.py lists the attributes with content. Content that cannot be split
into messages (a whole body, an unknown shape) matches every role. `drop_text` and `hash_text` keep the token ids. `drop_ids` replaces a
call's ids by as many zeros, since later calls refer to them by position, and marks the span as masked: the reply must not be trained on,
since it, or what it was sampled after, is gone. Which token belongs to which message is not stored, so all ids of the prompt or of the
reply are dropped. If the messages of a call do not decide which (none captured, too many left out, or they begin at another call than the
ids), both are dropped.

The agent's name is often on another span, which is not visible here: rules with an agent are for the export only.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agl_otel.adapters.masking import MaskRule, parse_rules, text_of
from agl_otel.adapters.texts import SHORTENED
from agl_otel.errors import SettingsError
from agl_otel.spans.content import MARKS, METADATA_FIELDS, content_at
from agl_otel.spans.dialects.dialect import Content, numbers
from agl_otel.spans.dialects.shapes import EVENTS, of_parts
from agl_otel.spans.tolerant import json_of
from agl_otel_hook import conventions

CHOICE: Final = "gen_ai.choice"
_EVENT_NAME: Final = "event.name"
_LOGPROBS: Final = "logprobs.content"
_TOKENS: Final = re.compile(r"token_ids|logprobs")
_ID_KEYS: Final = (conventions.LLM_PROMPT_TOKEN_IDS, conventions.LLM_RESPONSE_TOKEN_IDS)
_OPENING: Final = 200  # characters searched for SHORTENED


class Text(NamedTuple):
    """A message or another content attribute, as rules see it."""

    role: str
    """Empty if unknown."""
    text: str
    reply: bool | None
    """Whether the model wrote it in this call; None if unknown."""


def load_masker(path: str) -> Masker | None:
    """Load the masker of the setting `mask`; None if that is empty. Raises SettingsError."""
    if not path:
        return None
    try:
        rules = Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"AGL_MASK names {path}, which cannot be read: {error}") from None
    return Masker(parse_rules(rules, f"AGL_MASK: {path}"))


class Masker:
    """Applies rules to requests. `counts` is the number of texts and calls masked."""

    def __init__(self, rules: Sequence[MaskRule]) -> None:
        """Check the rules. Raises SettingsError for a rule with an agent."""
        if any(rule.agent for rule in rules):
            raise SettingsError("a masking rule names an agent: the collector sees no whole traces, use it with `agl-otel export --mask`")
        self._texts = [rule for rule in rules if rule.action != "drop_ids"]
        self._ids = [rule for rule in rules if rule.action == "drop_ids"]
        self.counts: Counter[str] = Counter()
        """`texts`: masked texts; `calls`: calls whose token ids were dropped."""

    def masked(self, signal: Literal["traces", "logs", "metrics"], raw: bytes) -> bytes:
        """Return the masked request, or `raw` itself if nothing is to be masked. Metrics hold no messages."""
        if signal == "metrics" or not (signal == "logs" or any(mark in raw for mark in MARKS)):
            return raw
        request = (ExportTraceServiceRequest if signal == "traces" else ExportLogsServiceRequest)()
        try:
            request.ParseFromString(raw)
        except DecodeError:  # refused elsewhere
            return raw
        before = self.counts.total()
        if isinstance(request, ExportTraceServiceRequest):
            for span in (span for r in request.resource_spans for s in r.scope_spans for span in s.spans):
                self._span(span)
        else:
            for record in (record for r in request.resource_logs for s in r.scope_logs for record in s.log_records):
                self._record(record)
        return request.SerializeToString() if self.counts.total() > before else raw

    def _span(self, span: Span) -> None:
        texts: list[Text] = []
        for event in span.events:
            texts += self._mask_content(event.name, event.attributes)
        texts += self._mask_content("", span.attributes)
        if self._ids and any(_TOKENS.search(attribute.key) or _holds_tokens(attribute) for attribute in span.attributes):
            self._take_ids(span.attributes, texts)

    def _record(self, record: LogRecord) -> None:
        names = (attribute.value.string_value for attribute in record.attributes if attribute.key == _EVENT_NAME)
        name = record.event_name or next(names, "")
        self._mask_content(name if record.body.WhichOneof("value") is None else "", record.attributes)
        if record.body.WhichOneof("value") is None:
            return
        text = _text(record.body)
        if name in EVENTS or name == CHOICE:
            if (rule := _of(self._texts, EVENTS.get(name, "assistant"), text)) is not None:
                masked = AnyValue(string_value=self._replace(rule, text))
                kept = [item for item in record.body.kvlist_value.values if item.key in METADATA_FIELDS]
                record.body.CopyFrom(AnyValue(kvlist_value=KeyValueList(values=[*kept, KeyValue(key="content", value=masked)])))
        elif (rule := _of([rule for rule in self._texts if not rule.role], "", text)) is not None:  # an agent's output or log
            record.body.CopyFrom(AnyValue(string_value=self._replace(rule, text)))

    def _mask_content(self, event: str, attributes: MutableSequence[KeyValue]) -> list[Text]:
        """Mask the content attributes of a span, or of an event of that name; return their original texts."""
        if event in EVENTS or event == CHOICE:
            return self._numbered(attributes, {"": list(attributes)}, Content("", "numbered", EVENTS.get(event, "assistant")))
        texts: list[Text] = []
        numbered: dict[Content, dict[str, list[KeyValue]]] = {}
        for attribute in attributes:
            content = content_at(attribute.key)
            if content is None or attribute.value.WhichOneof("value") in (None, "bool_value", "int_value", "double_value"):
                continue
            if content.shape == "numbered":
                group = content.key + attribute.key[len(content.key) :].partition(".")[0] + "."
                numbered.setdefault(content, {}).setdefault(group, []).append(attribute)
            elif content.shape == "messages":
                texts += self._messages(attribute.value, content)
            else:
                texts += self._text_of(attribute.value, content)
        for content, groups in numbered.items():
            texts += self._numbered(attributes, groups, content)
        return texts

    def _text_of(self, value: AnyValue, content: Content) -> list[Text]:
        text = _text(value)
        if (rule := _of(self._texts, content.role, text)) is not None:
            value.CopyFrom(AnyValue(string_value=_READABLE[content.shape](self._replace(rule, text), text)))
        return [Text(content.role, text, content.reply if content.role else None)]

    def _messages(self, value: AnyValue, content: Content) -> list[Text]:
        """Mask each message of a JSON list."""
        try:
            entries = [_read(entry, content.role) for entry in _list(_text(value))]
        except (ValueError, TypeError, KeyError, AttributeError):
            return self._text_of(value, content)
        texts = [Text(role, text, content.reply) for _, role, text in entries]
        rules = [_of(self._texts, one.role, one.text) for one in texts]
        if any(rules):
            kept = [
                entry if rule is None else _masked_message(entry, self._replace(rule, text))
                for (entry, _, text), rule in zip(entries, rules, strict=True)
            ]
            value.CopyFrom(AnyValue(string_value=json.dumps(kept, ensure_ascii=False, separators=(",", ":"))))
        return texts

    def _numbered(self, attributes: MutableSequence[KeyValue], groups: dict[str, list[KeyValue]], content: Content) -> list[Text]:
        """Mask flat keys, grouped by message: of a masked message METADATA_FIELDS and a text remain."""
        texts: list[Text] = []
        for group, own in groups.items():
            roles = (a.value.string_value for a in own if a.key.removeprefix(group) in ("role", "message.role"))
            role = next(roles, content.role)
            held = [a for a in own if a.key.removeprefix(group).removeprefix("message.") not in METADATA_FIELDS]
            if not held:
                continue
            text = _text(held[0].value) if len(held) == 1 else json.dumps({a.key.removeprefix(group): _text(a.value) for a in held})
            texts.append(Text(role, text, content.reply))
            if (rule := _of(self._texts, role, text)) is not None:
                inner = "message." if any(a.key.startswith(f"{group}message.") for a in own) else ""
                first, *others = held
                first.key = f"{group}{inner}content"
                first.value.CopyFrom(AnyValue(string_value=self._replace(rule, text)))
                _remove(attributes, {a.key for a in others})
        return texts

    def _take_ids(self, attributes: MutableSequence[KeyValue], texts: Sequence[Text]) -> None:
        named = {a.key: a.value.int_value for a in attributes if a.key in (conventions.LLM_MESSAGES_CALL, conventions.LLM_PREFIX_CALL)}
        elsewhere = named.get(conventions.LLM_MESSAGES_CALL, 0) not in (0, named.get(conventions.LLM_PREFIX_CALL, 0))
        elsewhere |= any(SHORTENED.match(one.text[:_OPENING]) is not None for one in texts)
        hits = [one for one in texts if any(rule.covers(one.role, one.text) for rule in self._ids)]
        given = not texts or elsewhere or any(one.reply is not True for one in hits)
        written = not texts or any(one.reply is not False for one in hits)
        if not given and not written:
            return
        self.counts["calls"] += 1
        dropped: set[str] = set()
        for attribute in attributes:
            key, value = attribute.key, attribute.value
            prompt = "prompt_token_ids" in key
            if key in _ID_KEYS:
                if given if prompt else written:
                    zeros = [AnyValue(int_value=0)] * len(value.array_value.values)
                    value.CopyFrom(AnyValue(array_value=ArrayValue(values=zeros)))
            elif key == conventions.LLM_ROUTED_EXPERTS:
                dropped.add(key)
            elif key == conventions.LLM_RESPONSE_LOGPROBS or key == _LOGPROBS:
                dropped |= {key} if written else set()
            elif "token_ids" in key:
                dropped |= {key} if (given if prompt else written) else set()
            elif _holds_tokens(attribute):
                dropped.add(key)
        _remove(attributes, dropped)
        _remove(attributes, {conventions.LLM_INCOMPLETE})
        attributes.append(KeyValue(key=conventions.LLM_INCOMPLETE, value=AnyValue(string_value=conventions.LLM_MASKED)))

    def _replace(self, rule: MaskRule, text: str) -> str:
        self.counts["texts"] += 1
        return rule.replacement(text)


def _numbers(_: str, text: str) -> str:
    return json.dumps(numbers(text))


_READABLE: Final[dict[str, Callable[[str, str], str]]] = {
    "text": lambda masked, _: masked,
    "messages": lambda masked, _: json.dumps([{"role": "system", "parts": [{"type": "text", "content": masked}]}]),
    "parts": lambda masked, _: json.dumps([{"type": "text", "content": masked}]),
    "body": lambda masked, _: json.dumps({"masked": masked}),
    "list": lambda *_: "[]",
    "logprobs": _numbers,
}
"""{shape: (replacement, original text) → an attribute that readers of its dialect can still parse}."""


def _of(rules: Iterable[MaskRule], role: str, text: str) -> MaskRule | None:
    """Return the last rule that applies, as at the export."""
    return next((rule for rule in reversed(list(rules)) if rule.covers(role, text)), None)


def _holds_tokens(attribute: KeyValue) -> bool:
    """Whether a content attribute holds token ids or the tokens' texts."""
    return content_at(attribute.key) is not None and _TOKENS.search(_text(attribute.value)) is not None


def _text(value: AnyValue) -> str:
    kind = value.WhichOneof("value")
    return value.string_value if kind == "string_value" else json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {item.key: _plain(item.value) for item in value.kvlist_value.values}
    return json_format.MessageToDict(value).get("bytesValue") if kind == "bytes_value" else getattr(value, kind) if kind else None


def _list(text: str) -> list[dict[str, Any]]:
    found = json_of(text)
    if not isinstance(found, list):
        raise TypeError("no list of messages")
    return [json_of(entry) if isinstance(entry, str) else entry for entry in cast("list[Any]", found)]


def _read(entry: dict[str, Any], role: str) -> tuple[dict[str, Any], str, str]:
    """Return (message, its role, its text as in the export)."""
    messages = of_parts(entry) if "parts" in entry else [entry]
    return entry, str(entry.get("role") or role or entry["role"]), "\n".join(map(text_of, messages))


def _masked_message(entry: dict[str, Any], text: str) -> dict[str, Any]:
    """Replace the message's content by `text`, keeping the tool call that it answers and its finish reason."""
    kept = {key: value for key, value in entry.items() if key in METADATA_FIELDS}
    if "parts" not in entry:
        return {**kept, "content": text}
    answers = [part for part in entry["parts"] if part.get("type") == "tool_call_response"]
    parts = [{"type": "tool_call_response", "id": part.get("id"), "response": text} for part in answers]
    return {**kept, "parts": parts or [{"type": "text", "content": text}]}


def _remove(attributes: MutableSequence[KeyValue], keys: set[str]) -> None:
    for place in range(len(attributes) - 1, -1, -1):
        if attributes[place].key in keys:
            del attributes[place]
