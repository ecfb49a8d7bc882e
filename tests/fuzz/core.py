"""Holds the compiled core to its specification on damaged requests: `python -m tests.fuzz.core --seconds 60 --seed 7`.

The requests are those of the golden vectors, changed as damage or other encoders would, and pieces of others put into them. Prints how many
were tried. A request that the two read differently, or make other rows of, is printed in hexadecimal, and the exit status is 1.
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
    return found


def _base64(value: Any) -> Any:
    """Convert ids: OTLP/JSON has them in hex, protobuf's own JSON mapping in base64."""
    if isinstance(value, dict):
        return {key: base64.b64encode(bytes.fromhex(item)).decode() if key in BYTES else _base64(item) for key, item in value.items()}
    return [_base64(item) for item in value] if isinstance(value, list) else value


def main(seconds: float, seed: int) -> int:
    """Compare until the time is over; return the exit status."""
    chance, corpus = random.Random(seed), seeds()
    end, tried = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        kind: Kind = chance.choice(("traces", "logs"))
        raw = chance.choice(corpus[kind])
        if chance.random() < 0.3:
            other = chance.choice(corpus[kind])
            at, start = chance.randint(0, len(raw)), chance.randint(0, len(other))
            raw = raw[:at] + other[start : start + chance.randint(1, 200)] + raw[at:]
        raw = mutate(raw, chance)
        tried += 1
        try:
            compare(kind, raw)
        except AssertionError as error:
            print(f"seed {seed}, request {tried}, {kind}: {raw.hex()}\n{error}", file=sys.stderr)
            return 1
    print(json.dumps({"seed": seed, "requests": tried, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    sys.exit(main(options.seconds, options.seed))
