"""The loop over a fine-tuning service: roll out, keep the best rollouts, upload them, wait for the job, deploy, prune, validate, again.

    agl-otel train job.toml                     # against service.py, or with your resource's addresses in job.toml
    python finetune.py --store http://localhost:4747 --base-url https://RESOURCE.openai.azure.com/openai/v1 --model gpt-4.1-mini \
        --deployments https://management.azure.com/subscriptions/…/resourceGroups/…/providers/Microsoft.CognitiveServices/accounts/RESOURCE

Keys: AZURE_OPENAI_API_KEY for the models, AZURE_MANAGEMENT_TOKEN for deployments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from openai import AsyncOpenAI
from tasks import train, val

import agl_otel as agl
from agl_otel.adapters import Reading, rows_of
from agl_otel.adapters.formats import as_written
from agl_otel.algorithms.utils import items
from agl_otel.store import Store

MANAGEMENT_VERSION = "2024-10-01"
DONE = ("succeeded", "failed", "cancelled")


class Deployments:
    """Azure's management API for the deployments of one account: its URL, and a token for it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        self._session, self._url, self._token = session, url.rstrip("/"), token

    async def create(self, name: str, model: str, poll_seconds: float) -> None:
        """Deploy a model, and wait until it answers."""
        sku = {"name": "standard", "capacity": 1}
        body = {"sku": sku, "properties": {"model": {"format": "OpenAI", "name": model, "version": "1"}}}
        state = (await self._call("PUT", f"/{name}", body))["properties"]["provisioningState"]
        while state not in ("Succeeded", "Failed", "Canceled"):
            await asyncio.sleep(poll_seconds)
            state = (await self._call("GET", f"/{name}"))["properties"]["provisioningState"]
        if state != "Succeeded":
            raise RuntimeError(f"deployment {name} of {model} ended {state}")

    async def delete(self, name: str) -> None:
        await self._call("DELETE", f"/{name}")

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        url = f"{self._url}/deployments{path}?api-version={MANAGEMENT_VERSION}"
        async with self._session.request(method, url, json=body, headers={"authorization": f"Bearer {self._token}"}) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise RuntimeError(f"{method} {url} answered {answer.status}: {text}")
            return json.loads(text) if text else {}


@dataclass
class Finetuning:
    """One run of the loop. `step` is the loop."""

    store: Store
    service: AsyncOpenAI
    deployments: Deployments
    model: str
    """The initial deployment; each step fine-tunes the current one."""
    base_url: str
    data_filter_ratio: float = 0.5
    """Share of rollouts, those with the highest rewards, that are trained on."""
    rollouts_per_task: int = 4
    max_deployments: int = 1
    """Limit on deployments of this run; older ones are deleted."""
    poll_seconds: float = 10.0
    versions: list[str] = field(default_factory=list)

    async def run(self, steps: int, train_tasks: Sequence[Any], val_tasks: Sequence[Any]) -> list[float]:
        """Return the validation scores: before training, and after each step."""
        scores = [await self.validate(val_tasks)]
        for number in range(1, steps + 1):
            rows = await self.step(number, train_tasks)
            scores.append(await self.validate(val_tasks))
            shown = {"step": number, "rows": rows, "score": scores[-1], "deployed": self.versions}
            print(json.dumps(shown), flush=True)
        return scores

    async def step(self, number: int, tasks: Sequence[Any]) -> int:
        traces = await self.roll_out(list(tasks) * self.rollouts_per_task, "train")
        rows = await self.best(traces)
        job = await self.tuned(rows, f"step-{number}")
        await self.deploy(f"{self.model}-v{number}", job.fine_tuned_model)
        await self.prune()
        return len(rows)

    @property
    def deployed(self) -> str:
        return self.versions[-1] if self.versions else self.model

    async def roll_out(self, tasks: Sequence[Any], mode: str) -> Any:
        llm = agl.LLM(endpoint=self.base_url, model=self.deployed, api_key=self.service.api_key)
        resources = await self.store.publish({"main_llm": llm})
        rollouts = await self.store.enqueue(tasks, mode=mode, resources_id=resources.resources_id)
        return await self.store.traces(await self.store.wait([rollout.rollout_id for rollout in rollouts]))

    async def best(self, traces: Any) -> list[dict[str, Any]]:
        """Return conversations of the best rollouts, in the format of OpenAI's fine-tuning."""
        spans = await self.store.spans([rollout.rollout_id for rollout in traces.rollouts])
        found = rows_of(Reading(form="openai", top_fraction=self.data_filter_ratio), traces, spans)
        return [as_written("openai", row) for row in found.rows]

    async def tuned(self, rows: list[dict[str, Any]], suffix: str) -> Any:
        """Upload the rows, and wait for a fine-tuning job on them."""
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file = await self.service.files.create(file=(f"{suffix}.jsonl", content), purpose="fine-tune")
        await self.service.files.wait_for_processing(file.id, poll_interval=self.poll_seconds)
        job = await self.service.fine_tuning.jobs.create(training_file=file.id, model=self.deployed, suffix=suffix)
        while job.status not in DONE:
            await asyncio.sleep(self.poll_seconds)
            job = await self.service.fine_tuning.jobs.retrieve(job.id)
        if job.status != "succeeded":
            raise RuntimeError(f"fine-tuning job {job.id} ended {job.status}: {job.error}")
        return job

    async def deploy(self, name: str, model: str) -> None:
        await self.deployments.create(name, model, self.poll_seconds)
        self.versions.append(name)

    async def prune(self) -> None:
        while len(self.versions) > self.max_deployments:
            await self.deployments.delete(self.versions.pop(0))

    async def validate(self, tasks: Sequence[Any]) -> float:
        traces = await self.roll_out(tasks, "val")
        return sum(rewards[-1].value for rewards in traces.rewards.values() if rewards) / len(tasks)


class AzureFinetuning(agl.Algorithm):
    """The loop as an algorithm, for Trainer and job files. `more` are Finetuning's own options."""

    def __init__(self, *, base_url: str, deployments: str, model: str = "gpt-4.1-mini", steps: int = 2, **more: Any) -> None:
        super().__init__()
        self.base_url, self.deployments, self.model, self.steps, self.more = base_url, deployments, model, steps, more

    async def run(self, train_dataset: agl.Dataset[Any] | None = None, val_dataset: agl.Dataset[Any] | None = None) -> None:
        key = os.environ.get("AZURE_OPENAI_API_KEY", "none")
        async with AsyncOpenAI(base_url=self.base_url, api_key=key) as service, aiohttp.ClientSession() as session:
            deployments = Deployments(session, self.deployments, os.environ.get("AZURE_MANAGEMENT_TOKEN", ""))
            loop = Finetuning(self.get_store(), service, deployments, model=self.model, base_url=self.base_url, **self.more)
            scores = await loop.run(self.steps, items(train_dataset), items(val_dataset))
        print(json.dumps({"scores": scores}), flush=True)


async def main(options: argparse.Namespace) -> None:
    own = {"base_url": options.base_url, "deployments": options.deployments, "model": options.model, "steps": options.steps}
    algorithm = AzureFinetuning(**own, poll_seconds=options.poll_seconds)
    async with await Store.connect(options.store) as store:
        algorithm.set_store(store)
        await algorithm.run(train(), val())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="http://localhost:4747")
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--deployments", required=True, help="URL of the account in Azure's management API")
    parser.add_argument("--model", default="gpt-4.1-mini")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--poll-seconds", type=float, default=10.0)
    asyncio.run(main(parser.parse_args()))
