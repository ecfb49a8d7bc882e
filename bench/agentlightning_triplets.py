"""Time Agent Lightning 0.3's TracerTraceToTriplet. Run by bench.adapters with an interpreter that has Agent Lightning 0.3.

Reads spans from the file named on the command line, then adapts all of them once for every line on stdin and prints
{"seconds", "tokens"}. `as_03` is called by the parent process, which has no Agent Lightning.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any


def as_03(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make one attempt's spans as 0.3's tracer stores them: a root, a span for each call, and the reward."""
    first = calls[0]
    root = f"{int(first['span_id'], 16) + 60:016x}"
    own = {"rollout_id": first["rollout_id"], "attempt_id": "at-1", "trace_id": first["trace_id"]}
    spans: list[dict[str, Any]] = [
        {
            **own,
            "span_id": root,
            "parent_id": None,
            "sequence_id": 1,
            "name": "agent",
            "start_time": 1.0,
            "end_time": 1000.0,
            "attributes": {},
        }
    ]
    for call in calls:
        attributes: dict[str, Any] = {
            "gen_ai.request.model": "a/model-7b",
            "gen_ai.response.id": f"{call['rollout_id']}-{call['number']}",
            "prompt_token_ids": call["prompt"],
            "response_token_ids": call["response"],
            "logprobs.content": json.dumps([{"token": "t", "logprob": value} for value in call["logprobs"]]),
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": call["answer"],
        }
        for place, message in enumerate(call["messages"]):
            attributes |= {f"gen_ai.prompt.{place}.{key}": value for key, value in message.items()}
        start = 10.0 * call["number"]
        spans.append(
            {**own, "span_id": call["span_id"], "parent_id": root, "sequence_id": call["number"] + 1, "name": "openai.chat.completion",
             "start_time": start, "end_time": start + 5, "attributes": attributes}
        )  # fmt: skip
    reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 1.0}
    last = f"{int(first['span_id'], 16) + 61:016x}"
    spans.append(
        {**own, "span_id": last, "parent_id": root, "sequence_id": 99, "name": "agentlightning.annotation",
         "start_time": 990.0, "end_time": 990.0, "attributes": reward}
    )  # fmt: skip
    return spans


def main() -> None:
    """Adapt all spans once per input line."""
    types: Any = importlib.import_module("agentlightning.types")
    adapter = importlib.import_module("agentlightning.adapter").TracerTraceToTriplet()
    rest = {
        "status": types.TraceStatus(status_code="OK"),
        "events": [],
        "links": [],
        "context": None,
        "parent": None,
        "resource": types.OtelResource(attributes={}, schema_url=""),
    }
    attempts = [[types.Span(**span, **rest) for span in spans] for spans in json.loads(Path(sys.argv[1]).read_text())]
    for _ in sys.stdin:
        start = time.perf_counter()
        adapted = [adapter.adapt(spans) for spans in attempts]
        seconds = time.perf_counter() - start
        tokens = sum(len(triplet.response["token_ids"]) for triplets in adapted for triplet in triplets)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
