"""Agent Lightning 0.3 with its Weave tracer."""

import asyncio
import json
import os

import agentlightning as agl
import keep
from openai import OpenAI  # after Agent Lightning, as its users do


class Agent(agl.LitAgent):
    """The agent."""

    def rollout(self, task, resources, rollout):
        """Ask, and judge."""
        keep.by_hand(OpenAI())
        return 0.75


async def main():
    """One rollout through the runner; its spans as the store holds them."""
    from agentlightning.tracer.weave import WeaveTracer

    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner(WeaveTracer())
    with runner.run_context(agent=Agent(), store=store):
        rollout = await runner.step(keep.QUESTION, resources={"main_llm": agl.LLM(endpoint=os.environ["OPENAI_BASE_URL"], model="m")})
    rollout_id = getattr(rollout, "rollout_id", None) or (await store.query_rollouts())[0].rollout_id
    return [json.loads(span.model_dump_json()) for span in await store.query_spans(rollout_id)]


spans = asyncio.run(main())
for span in spans:
    span["resource"] = {"attributes": {}, "schema_url": ""}  # paths and process ids of the machine
keep.write("agentlightning", "weave", "openai", spans=spans)
os._exit(0)
