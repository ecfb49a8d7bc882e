"""Holds the compiled core to its specification on damaged requests: `python -m tests.fuzz.core --seconds 60 --seed 7`.

The requests are the golden vectors', and generated ones like an agent's of a few hundred spans; changed as damage or other encoders would,
with pieces of others put into them. Both cores read each, and make its rows. Prints how many requests, spans and records were compared:
`read` of those that both accept, `rows` of those whose rows were compared too. A request that the two read differently, or make other rows
of, is printed in hexadecimal, and the exit status is 1: add it to collector/conformance/wire/wire.json. `--seeds FILE` writes the requests
before they are changed, one a line, as `make fuzz-native` takes them.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agl_otel.collector.core import Kind
from agl_otel_hook import conventions
from tests.cores import compare
from tests.otlp_requests import NOW, mutate

CONFORMANCE: Final = Path(__file__).parents[2] / "collector" / "conformance"
BYTES: Final = {"traceId", "spanId", "parentSpanId"}
LONG: Final = 300
"""Spans of a generated request."""
MOST: Final = 50 * LONG
"""A generated request has more bytes."""


def seeds() -> dict[Kind, list[bytes]]:
    """Return the requests of the golden vectors, {signal: serialised}."""
    found: dict[Kind, list[bytes]] = {"traces": [], "logs": []}
    for file in sorted(CONFORMANCE.glob("*.json")):
        for vector in json.loads(file.read_text())["vectors"]:
            for step in vector["steps"]:
                logs = "resourceLogs" in step["request"]
                request = (ExportLogsServiceRequest if logs else ExportTraceServiceRequest)()
                found["logs" if logs else "traces"].append(json_format.ParseDict(_base64(step["request"]), request).SerializeToString())
    values = [
        json_format.ParseDict(each["value"], AnyValue()) for each in json.loads((CONFORMANCE / "values/values.json").read_text())["vectors"]
    ]
    keys = [conventions.LLM_PROMPT_TOKEN_IDS, conventions.LLM_RESPONSE_LOGPROBS, "k", "resource:k"]
    for first in range(0, len(values), 8):
        some = [KeyValue(key=keys[number % len(keys)], value=value) for number, value in enumerate(values[first : first + 8])]
        spans = ExportTraceServiceRequest()
        span = spans.resource_spans.add().scope_spans.add().spans.add(trace_id=b"t" * 16, span_id=b"s" * 8, name="n", attributes=some)
        span.start_time_unix_nano = span.end_time_unix_nano = NOW
        span.events.add(name="e", attributes=some)
        found["traces"].append(spans.SerializeToString())
        logs = ExportLogsServiceRequest()
        logs.resource_logs.add().scope_logs.add().log_records.add(time_unix_nano=NOW, body=values[first], attributes=some)
        found["logs"].append(logs.SerializeToString())
    for vector in json.loads((CONFORMANCE / "wire/wire.json").read_text())["vectors"]:
        found[vector["signal"]].append(bytes.fromhex(vector["request"]))
    return found


def _base64(value: Any) -> Any:
    """Convert ids: OTLP/JSON has them in hex, protobuf's own JSON mapping in base64."""
    if isinstance(value, dict):
        return {key: base64.b64encode(bytes.fromhex(item)).decode() if key in BYTES else _base64(item) for key, item in value.items()}
    return [_base64(item) for item in value] if isinstance(value, list) else value


def long_request(chance: random.Random) -> bytes:
    """Generate the request of an agent: spans of which each differs from the next in an id, a number or a name."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.add(key=conventions.ROLLOUT_ID).value.string_value = f"ro-{chance.randrange(9)}"
    spans = group.scope_spans.add().spans
    for _ in range(LONG):
        span = spans.add(trace_id=chance.randbytes(16), span_id=chance.randbytes(8), name=chance.choice(("a", conventions.SPAN_SEAL)))
        span.start_time_unix_nano = span.end_time_unix_nano = NOW
        value = span.attributes.add(key=chance.choice(("n", "k", conventions.LLM_CALL))).value
        if chance.random() < 0.5:
            value.int_value = chance.randrange(1 << 40)
        else:
            value.double_value = chance.random()
    return request.SerializeToString()


def main(seconds: float, seed: int) -> int:
    """Compare until the time is over; return the exit status."""
    chance, corpus = random.Random(seed), seeds()
    long = [long_request(chance) for _ in range(64)]
    end, tried, read, made = time.monotonic() + seconds, 0, 0, 0
    while time.monotonic() < end:
        kind: Kind = chance.choice(("traces", "logs"))
        raw = chance.choice(corpus[kind])
        if chance.random() < 0.3:
            other = chance.choice(corpus[kind])
            at, start = chance.randint(0, len(raw)), chance.randint(0, len(other))
            raw = raw[:at] + other[start : start + chance.randint(1, 200)] + raw[at:]
        raw = mutate(raw, chance)
        if kind == "traces" and chance.random() < 0.5:
            before, at = chance.choice(long), chance.randrange(MOST)
            raw = before + raw if chance.random() < 0.5 else before[:at] + bytes([before[at] ^ 1 << chance.randrange(8)]) + before[at + 1 :]
        tried += 1
        with_rows = len(raw) < 16384 or chance.random() < 0.1  # they cost a hundred times as much as reading
        try:
            items = compare(kind, raw, with_rows=with_rows)
        except AssertionError as error:
            print(f"seed {seed}, request {tried}, {kind}: {raw.hex()}\n{error}", file=sys.stderr)
            return 1
        read, made = read + items, made + with_rows * items
    print(json.dumps({"seed": seed, "requests": tried, "read": read, "rows": made, "seconds": seconds}))
    return 0


def write_seeds(file: Path) -> None:
    """Write the requests as lines `traces|logs HEX`."""
    found = seeds()
    found["traces"].append(long_request(random.Random(1)))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{kind} {raw.hex()}\n" for kind, requests in found.items() for raw in requests))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--seeds", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.seeds is not None:
        write_seeds(options.seeds)
        sys.exit(0)
    sys.exit(main(options.seconds, options.seed))
