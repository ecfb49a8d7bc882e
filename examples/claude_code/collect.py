"""Run the agent on all instances, and write spans, a data set and a report.

    agl-otel store                                                                       # terminal 1
    agl-otel runner --grader grade.py:grade -- python agent.py "{instance}"              # terminal 2
    python collect.py http://localhost:8000/v1 MODEL --out out                           # terminal 3

MODEL is any model of a server with OpenAI's API (vLLM); what Claude Code asks for by Claude's names is answered by it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from instances import tasks

import agl_otel as agl
from agl_otel.adapters import Reading, rows_of


def aliases(backend: str, model: str) -> list[dict[str, object]]:
    """Map every name that begins with `claude-` to this model."""
    return [{"model_name": "claude-*", "litellm_params": {"model": f"hosted_vllm/{model}", "api_base": backend}}]


def written(out: Path, finished: list[Any], traces: Any, spans: dict[str, list[agl.Span]]) -> str:
    """Write the files of OUT; return the report."""
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"resolved": [], "unresolved": [], "failed": []}
    for rollout in finished:
        name, own = rollout.input["instance"], spans[rollout.rollout_id]
        (out / f"{name}.spans.json").write_text(json.dumps([span.model_dump(mode="json") for span in own], indent=1))
        solved = agl.find_final_reward(own) == 1.0
        report["failed" if rollout.status != "succeeded" else "resolved" if solved else "unresolved"].append(name)
    found = rows_of(Reading(form="trajectories"), traces)
    (out / "dataset.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found.rows))
    told = json.dumps({**report, "rows": len(found.rows), "refused": dict(found.refused)}, indent=1)
    (out / "report.json").write_text(told)
    return told


async def main(address: str, backend: str, model: str, out: Path) -> None:
    store = await agl.LightningStoreClient(address).open()
    proxy = agl.LLMProxy(model_list=aliases(backend, model), store=store)
    await proxy.start()
    # without a model: the agent requests one by name, and the proxy's model list has its address
    resources = await store.add_resources({"main_llm": agl.LLM(endpoint=f"{store.description.proxy}/v1", model="")})
    rollouts = await store.enqueue(tasks(), resources_id=resources.resources_id)
    finished = await store.wait([rollout.rollout_id for rollout in rollouts])
    traces = await store.traces(finished, texts=True)
    spans = {rollout.rollout_id: list(await store.query_spans(rollout.rollout_id)) for rollout in finished}
    print(written(out, finished, traces, spans))
    await proxy.stop()
    await store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("model")
    parser.add_argument("--store", default="http://localhost:4747")
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    asyncio.run(main(given.store, given.backend, given.model, given.out))
