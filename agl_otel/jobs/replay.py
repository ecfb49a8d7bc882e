"""Replay the model calls of stored attempts: a model gets each prompt again, and its tool calls are compared. No tool is called."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from itertools import groupby
from typing import Any, Final

from agl_otel.adapters.replay import Step, Tally, ToolCall, calls_in, steps_of
from agl_otel.errors import ModelServerError
from agl_otel.jobs.model_client import ModelClient, PromptRefusedError, tasks
from agl_otel.spans.tolerant import MALFORMED
from agl_otel.store import Store
from agl_otel.types import AttemptedRollout
from agl_otel.types.columns import AttemptKey

PAGE: Final = 100  # rollouts whose spans are in memory at a time
REFUSED_AT_FIRST: Final = 5
"""So many prompts refused before the first reply end a replay: then it is not the prompts."""


class Replay:
    """Replays attempts with a model."""

    def __init__(self, store: Store, model: ModelClient, *, seed: int = 0, agent_match: str | None = None) -> None:
        self._store, self._model, self._seed, self._agent_match = store, model, seed, agent_match
        self._answered, self._refused = False, 0
        self.tally = Tally()

    async def run(self, rollout_ids: Sequence[str], *, at_once: int) -> Tally:
        """Replay the latest attempts of these rollouts, `at_once` at a time. Raises ModelServerError."""
        room = asyncio.Semaphore(at_once)

        async def replay(key: AttemptKey, steps: Sequence[Step]) -> None:
            try:
                self.tally.add(key, steps, [await self._made(step) for step in steps])
            finally:
                room.release()

        async with tasks() as group:
            async for key, steps in self._attempts(rollout_ids):
                await room.acquire()
                group.create_task(replay(key, steps))
        return self.tally

    async def _attempts(self, rollout_ids: Sequence[str]) -> AsyncGenerator[tuple[AttemptKey, list[Step]]]:
        for start in range(0, len(rollout_ids), PAGE):
            page = list(rollout_ids[start : start + PAGE])
            rollouts, spans = await asyncio.gather(self._store.queue.query_rollouts(rollout_id_in=page), self._store.spans(page))
            latest = {(each.rollout_id, each.attempt.attempt_id) for each in rollouts if isinstance(each, AttemptedRollout)}
            own = sorted((each for each in spans if (each.rollout_id, each.attempt_id) in latest), key=lambda each: each.rollout_id)
            for key, found in groupby(own, key=lambda each: (each.rollout_id, each.attempt_id)):
                left_out = Counter[str]()
                steps = await asyncio.to_thread(steps_of, list(found), left_out, agent_match=self._agent_match)
                self.tally.left_out.update(left_out)
                yield key, steps

    async def _made(self, step: Step) -> list[ToolCall] | None:
        """Return the tool calls of the model's reply; None if the server refuses the prompt."""
        fields: dict[str, Any] = {"seed": self._seed}
        fields |= {"tools": step.tools} if step.tools else {}
        fields |= {"tool_choice": "required"} if step.tools and step.forced else {}
        try:
            reply = await self._model.reply(step.prompt, **fields)
            self._answered = True
            return calls_in(reply)
        except PromptRefusedError as error:
            self.tally.refusal = self.tally.refusal or str(error)
            self._refused += 1
            if not self._answered and self._refused >= REFUSED_AT_FIRST:
                raise ModelServerError(f"the first {REFUSED_AT_FIRST} prompts were refused, the last one: {error}") from None
            return None
        except MALFORMED as error:
            raise ModelServerError(f"the model server's tool calls are not in OpenAI's form: {type(error).__name__}: {error}") from None
