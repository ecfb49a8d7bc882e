from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agl_otel.errors import UsageError
from agl_otel.runner.binding import Binding

TASK = {"question": "2+2?", "level": 3}


def only_task(task: Any) -> None: ...
def one_of_any_name(x: Any) -> None: ...
def task_keys(question: Any, level: Any) -> None: ...
def one_key(question: Any) -> None: ...
def mixed(question: Any, llm: Any, *, rollout: Any) -> None: ...
def classic(task: Any, resources: Any, rollout: Any) -> None: ...
def unnamed_and_llm(x: Any, llm: Any) -> None: ...
def with_default(task: Any, temperature: float = 0.5, level: int = 1) -> None: ...
def positional_only(x: Any, /) -> None: ...
def nothing() -> None: ...
def stars(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (only_task, [], {"task": TASK}),
        (one_of_any_name, [], {"x": TASK}),
        (task_keys, [], {"question": "2+2?", "level": 3}),
        (one_key, [], {"question": "2+2?"}),
        (mixed, [], {"question": "2+2?", "llm": "LLM", "rollout": "ROLLOUT"}),
        (classic, [], {"task": TASK, "resources": "RESOURCES", "rollout": "ROLLOUT"}),
        (unnamed_and_llm, [], {"x": TASK, "llm": "LLM"}),
        (with_default, [], {"task": TASK, "level": 3}),
        (positional_only, [TASK], {}),
        (nothing, [], {}),
        (stars, [TASK], {}),
    ],
)
def test_parameters_are_bound_by_name(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
    reserved = {"task": TASK, "llm": "LLM", "resources": "RESOURCES", "rollout": "ROLLOUT"}
    bound = Binding(function).arguments(reserved)
    assert bound == (args, kwargs)
    function(*bound[0], **bound[1])


def test_unfilled_parameters_are_named() -> None:
    def agent(question: Any, context: Any, answer: Any) -> None: ...

    with pytest.raises(UsageError, match=r"takes context, answer, which nothing fills.*task's keys question, level"):
        Binding(agent).arguments({"task": TASK, "llm": None, "resources": {}, "rollout": None})


def test_a_method_and_a_callable_object_are_functions_too() -> None:
    class Agent:
        def __call__(self, task: Any) -> Any:
            return task

        def solve(self, question: Any) -> Any:
            return question

    reserved = {"task": TASK, "llm": None, "resources": {}, "rollout": None}
    assert Binding(Agent()).arguments(reserved) == ([], {"task": TASK})
    assert Binding(Agent().solve).arguments(reserved) == ([], {"question": "2+2?"})
