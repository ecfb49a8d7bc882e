"""Write spans of a rollout without a runner: start a rollout, trace it, emit a reward, complete it, read it back.

agl-otel store                      # in another terminal
python write_traces.py [--store http://localhost:4747]
"""

from __future__ import annotations

import argparse
import asyncio

import agl_otel as agl


@agl.operation
def look_up(word: str) -> str:
    return {"rollout": "one try at a task"}.get(word, "unknown")


async def main(address: str) -> None:
    store, tracer = agl.LightningStoreClient(address), agl.OtelTracer()
    rollout = await store.start_rollout({"word": "rollout"}, mode="train")
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    async with tracer.trace_context("by hand", store=store, rollout_id=ids[0], attempt_id=ids[1]) as otel:
        with otel.start_as_current_span("think") as span:  # every OpenTelemetry span in this block belongs to the rollout
            span.set_attribute("depth", 1)
            answer = look_up(rollout.input["word"])
        agl.emit_message(answer)
        agl.emit_reward(1.0 if answer != "unknown" else 0.0)
    await store.update_attempt(*ids, status="succeeded")

    for span in await store.query_spans(rollout.rollout_id):
        print(f"{span.sequence_id:>3}  {span.name}")
    print(f"reward {agl.find_final_reward(await store.query_spans(rollout.rollout_id))}")
    finished = await store.get_rollout_by_id(rollout.rollout_id)
    verdicts = (await store.traces([rollout.rollout_id])).verdicts
    print(f"{rollout.rollout_id} {finished.status}, verdict {verdicts[ids].kind}")
    await store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="http://localhost:4747")
    asyncio.run(main(parser.parse_args().store))
