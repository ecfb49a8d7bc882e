"""A model behind the proxy: called by its name outside of rollouts, and within a rollout, where tokens and log-probs are recorded.

agl-otel store --port 4747          # in another terminal
python llm_proxy.py http://localhost:8000/v1 MODEL [--store http://localhost:4747]
"""

from __future__ import annotations

import argparse
import asyncio

import aiohttp
from openai import AsyncOpenAI

import agl_otel as agl


async def ask(base_url: str, model: str, question: str) -> str:
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        reply = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}])
    return reply.choices[0].message.content or ""


async def main(address: str, backend: str, model: str) -> None:
    store = await agl.LightningStoreClient(address).open()
    entry = {"model_name": "assistant", "litellm_params": {"model": f"hosted_vllm/{model}", "api_base": backend}}
    proxy = agl.LLMProxy(model_list=[entry], store=store)
    await proxy.start()
    print("of no rollout:", await ask(f"{store.description.proxy}/v1", "assistant", "What is a proxy?"))

    await store.add_resources({"main_llm": proxy.as_resource()})
    rollout = await store.start_rollout({"question": "What is a rollout?"})
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    llm = proxy.as_resource(*ids)
    print("of a rollout:", await ask(llm.endpoint, llm.model, rollout.input["question"]))
    await store.update_attempt(*ids, status="succeeded")
    async with aiohttp.ClientSession() as session:  # as a runner does: then the proxy's spans of the attempt are in the store
        await session.post(f"{llm.endpoint}/close")

    calls = (await store.traces([rollout.rollout_id])).calls
    print(f"{len(calls)} call: {len(calls.prompt[0])} tokens in, {len(calls.response[0])} out, {len(calls.logprobs[0])} log-probs")
    await proxy.stop()
    await store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", help="base URL of a server with OpenAI's API that returns token ids, such as vLLM")
    parser.add_argument("model", help="the model's name there")
    parser.add_argument("--store", default="http://localhost:4747")
    given = parser.parse_args()
    asyncio.run(main(given.store, given.backend, given.model))
