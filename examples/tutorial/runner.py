"""Terminal 2: a runner. `agl-otel store` runs in terminal 1, algorithm.py in terminal 3."""

from __future__ import annotations

import asyncio
import os

from agent import simple_agent

import agl_otel as agl

STORE = os.environ.get("TUTORIAL_STORE", "http://localhost:4747")


async def main() -> None:
    agl.setup_logging()
    runner = agl.LitAgentRunner[str](tracer=agl.AgentOpsTracer())
    with runner.run_context(agent=simple_agent, store=agl.LightningStoreClient(STORE), worker_id=0):
        await runner.iter()


if __name__ == "__main__":
    asyncio.run(main())
