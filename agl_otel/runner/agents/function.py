"""Function agents: a Python function, sync or async. Many attempts share the runner's process.

`attempt_scope` puts the attempt's ids into OpenTelemetry baggage, which attributes its spans, and its model calls at the proxy even
though the base URL names no attempt. The function returns a reward (a number or a dict of numbers), or an answer for a grader; None
means that it emitted its rewards itself or has none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from agl_otel.errors import AgentError, UsageError
from agl_otel.runner.binding import RESERVED, Binding
from agl_otel.runner.environment import Addresses, agent_resources, attempt_llm, shared_environment
from agl_otel.runner.job import Grader, Job, as_reward, check_returns, grade, reward
from agl_otel.runner.returned import spans_of
from agl_otel.runner.threads import call
from agl_otel.types import PromptTemplate
from agl_otel_hook import attempt_scope

INSTRUMENT: Final = ("openai", "httpx", "httpx2", "threading")
"""Instrumentors. openai 3 uses httpx2, other clients httpx; `threading` propagates the context to threads that an agent starts."""
_log = logging.getLogger(__name__)


class FunctionAgent:
    """Calls `function` for each attempt, with arguments bound to its parameter names (binding.py).

    Args:
        function: async, or sync: then each call runs in its own thread, which goes on when cancelled and whose result is discarded.
        grader: (task, answer) → reward.
        instrument: names of instrumentors for this process; the HTTP client's one propagates the attempt's ids to the proxy.
    """

    def __init__(self, function: Callable[..., Any], *, grader: Grader | None = None, instrument: tuple[str, ...] = INSTRUMENT) -> None:
        if not callable(function):
            raise UsageError(f"{function!r} is not a function")
        self.instrument = instrument
        self.hooked = True  # the runner's process counts its spans
        self._function = function
        self._binding = Binding(function)
        self._grader = grader

    def prepare(self, addresses: Addresses) -> None:
        """Point this process's SDKs at the proxy."""
        os.environ.update(shared_environment(os.environ, addresses))

    def check(self, task: Any) -> None:
        """Raise UsageError where the task cannot fill the function's parameters, or the function is a generator or a class."""
        check_returns(self._function)
        self._binding.arguments({**dict.fromkeys(RESERVED), "task": task})

    async def run(self, job: Job) -> None:
        """Call the function and emit or grade its result. Raises AgentError where it raises or returns an unusable value."""
        prompts = (resource for resource in job.resources.values() if isinstance(resource, PromptTemplate))
        rollout = job.rollout.model_copy(deep=True)  # what the agent changes in it is not graded
        values = {
            "task": rollout.input,
            "llm": attempt_llm(job.resources, *job.key, job.addresses.proxy, token=job.token),
            "prompt_template": next(prompts, None),
            "resources": agent_resources(job.resources, *job.key, job.addresses.proxy, token=job.token),
            "rollout": rollout,
        }
        args, kwargs = self._binding.arguments(values)
        with attempt_scope(*job.key, traceparent=job.traceparent):
            try:
                answer = await call(self._function, *args, **kwargs)
            except Exception as error:  # user code: any exception fails this attempt only
                _log.debug("%s raised in attempt %s", self._binding.name, job.attempt_id, exc_info=True)
                raise AgentError(f"{self._binding.name} raised {type(error).__name__}: {error}") from error
        if answer is None:
            return
        if self._grader is not None:
            await grade(job, self._grader, answer)
        elif (found := as_reward(answer)) is not None:
            await reward(job, found)
        elif (spans := spans_of(answer, job)) is not None:
            job.returned += spans
        else:
            raise AgentError(f"{self._binding.name} returned {_kind(answer)}: return a number, None or spans of one kind, or name a grader")


def _kind(answer: Any) -> str:
    if not isinstance(answer, (list, tuple)):
        return f"a {type(answer).__name__}"
    items = {type(item).__name__ for item in cast("Sequence[object]", answer)}
    return f"a {type(cast('object', answer)).__name__} of {', '.join(sorted(items))}"
