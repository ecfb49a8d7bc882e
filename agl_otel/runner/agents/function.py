"""An agent that is a Python function, sync or async; many attempts share the runner's process.

Their spans are told apart by the baggage that `attempt_scope` puts into the context, and so are their model calls at the proxy, with
an OpenAI client whose base URL names no attempt. What it returns: a number or a dict of numbers is the reward; with a grader, any
answer but None is graded; None means that the agent emitted its rewards itself, or has none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final

from agl_otel.errors import AgentError, UsageError
from agl_otel.runner.binding import RESERVED, Binding
from agl_otel.runner.environment import Addresses, agent_resources, attempt_llm, shared_environment
from agl_otel.runner.job import Grader, Job, grade, is_reward, reward
from agl_otel.runner.threads import call
from agl_otel.types import PromptTemplate
from agl_otel_hook import attempt_scope

INSTRUMENT: Final = ("openai", "httpx", "httpx2", "threading")
"""openai 3 sends through httpx2, earlier ones and others through httpx; a thread that an agent starts works for its attempt."""
_log = logging.getLogger(__name__)


class FunctionAgent:
    """Runs `function` for each attempt, with the arguments that its parameters name (binding.py).

    Args:
        function: sync (each call in a thread of its own; one that was cancelled goes on, and its result is discarded) or async.
        grader: (task, answer) → reward.
        instrument: instrumentors for this process; the HTTP client's one carries the attempt's ids to the proxy.
    """

    def __init__(self, function: Callable[..., Any], *, grader: Grader | None = None, instrument: tuple[str, ...] = INSTRUMENT) -> None:
        if not callable(function):
            raise UsageError(f"{function!r} is no function")
        self.instrument = instrument
        self.hooked = True  # this process counts
        self._function = function
        self._binding = Binding(function)
        self._grader = grader

    def prepare(self, addresses: Addresses) -> None:
        """Point this process's SDKs at the proxy."""
        os.environ.update(shared_environment(os.environ, addresses))

    def check(self, task: Any) -> None:
        """Raise UsageError where the task lacks what the function's parameters name."""
        self._binding.arguments({**dict.fromkeys(RESERVED), "task": task})

    async def run(self, job: Job) -> None:
        """Call the function; emit or grade what it returns. Raises AgentError where it raised or returned what is neither."""
        prompts = (resource for resource in job.resources.values() if isinstance(resource, PromptTemplate))
        values = {
            "task": job.rollout.input,
            "llm": attempt_llm(job.resources, *job.key, job.addresses.proxy, token=job.token),
            "prompt_template": next(prompts, None),
            "resources": agent_resources(job.resources, *job.key, job.addresses.proxy, token=job.token),
            "rollout": job.rollout,
        }
        args, kwargs = self._binding.arguments(values)
        with attempt_scope(*job.key, traceparent=job.traceparent):
            try:
                answer = await call(self._function, *args, **kwargs)
            except Exception as error:  # the user's code: whatever it raises is data about this attempt
                _log.debug("%s raised in attempt %s", self._binding.name, job.attempt_id, exc_info=True)
                raise AgentError(f"{self._binding.name} raised {type(error).__name__}: {error}") from error
        if answer is None:
            return
        if self._grader is not None:
            await grade(job, self._grader, answer)
        elif is_reward(answer):
            await reward(job, answer)
        elif not isinstance(answer, str):
            raise AgentError(f"{self._binding.name} returned a {type(answer).__name__}: return a number, text for a grader, or None")
