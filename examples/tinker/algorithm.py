"""An algorithm over Tinker that serves its own sampler as a model, and trains on the traces of agents that use it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np
from serving import Served

import agl_otel as agl
from agl_otel.adapters import to_transitions
from agl_otel.algorithms.utils import sampling_seed


class TinkerGRPO(agl.Algorithm):
    """Group-relative advantages (GRPO, arXiv:2402.03300) and Tinker's importance-sampling loss.

    Args:
        tinker: the `tinker` module, or what stands for it.
        service: its ServiceClient.
    """

    def __init__(
        self,
        tinker: Any,
        service: Any,
        *,
        base_model: str,
        steps: int = 8,
        group_size: int = 16,
        learning_rate: float = 1e-4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.tinker, self.service, self.base_model = tinker, service, base_model
        self.steps, self.group_size, self.learning_rate, self.seed = steps, group_size, learning_rate, seed

    async def run(self, train_dataset: agl.Dataset[Any] | None = None, val_dataset: agl.Dataset[Any] | None = None) -> None:
        tasks = [train_dataset[place] for place in range(len(train_dataset or []))]
        training = await self.service.create_lora_training_client_async(base_model=self.base_model)
        async with Served(self.tinker, training.get_tokenizer()) as served:
            for number in range(1, self.steps + 1):
                served.sampler = await training.save_weights_and_get_sampling_client_async(name=f"step-{number}")
                served.version = str(number)
                print(json.dumps(await self.step(number, tasks, training, served)), flush=True)

    async def step(self, number: int, tasks: list[Any], training: Any, served: Served) -> dict[str, Any]:
        """The loop: enqueue, wait, read, train. The next step's sampler has the new weights."""
        store = self.get_store()
        resources = await store.publish({"main_llm": agl.LLM(endpoint=served.url, model=self.base_model)})
        requests = [
            agl.EnqueueRolloutRequest(
                input=task,
                mode="train",
                resources_id=resources.resources_id,
                metadata={"sampling_seed": sampling_seed(self.seed, number, place, copy)},
            )
            for place, task in enumerate(tasks)
            for copy in range(self.group_size)
        ]
        rollouts = await store.enqueue(requests)
        traces = await store.traces(await store.wait([rollout.rollout_id for rollout in rollouts]))
        calls = to_transitions(traces)
        reward = dict(zip(calls.rollout_id, calls.reward.tolist(), strict=True))
        groups: dict[str, list[float]] = defaultdict(list)
        for rollout in traces.rollouts:
            groups[json.dumps(rollout.input)].append(reward[rollout.rollout_id])
        mean = {rollout.rollout_id: float(np.mean(groups[json.dumps(rollout.input)])) for rollout in traces.rollouts}
        data = [
            self.datum(*each, reward[rollout_id] - mean[rollout_id])
            for rollout_id, *each in zip(calls.rollout_id, calls.prompt, calls.response, calls.logprobs, strict=True)
        ]
        await training.forward_backward_async(data, loss_fn="importance_sampling")
        await training.optim_step_async(self.tinker.AdamParams(learning_rate=self.learning_rate))
        stale = sum(version != served.version for version in calls.model_version)
        return {"step": number, "reward": float(np.mean(list(reward.values()))), "calls": len(data), "stale": stale}

    def datum(self, prompt: Any, response: Any, logprobs: Any, advantage: float) -> Any:
        """Make a training datum: input tokens and, for each position, target token, log-prob and advantage."""
        ids, before = [*prompt.tolist(), *response.tolist()], [0.0] * (len(prompt) - 1)
        inputs = {
            "target_tokens": ids[1:],
            "logprobs": before + logprobs.tolist(),
            "advantages": before + [advantage] * len(response),
        }
        return self.tinker.Datum(model_input=self.tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
