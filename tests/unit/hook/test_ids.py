"""Span ids are independent of `random`: an agent may seed it, and a fork copies its state."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span

from agl_otel_hook.hook import Hook


class OwnIds(RandomIdGenerator):
    """A user's own id generator."""


def started(provider: TracerProvider) -> Span:
    return provider.get_tracer("agent").start_span("work")


@pytest.fixture
def provider() -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    Hook(None).adopt(provider)
    return provider


def test_ids_and_the_random_numbers_of_an_agent_are_independent(provider: TracerProvider) -> None:
    random.seed(1)
    untraced = [random.random() for _ in range(3)]
    ids: list[tuple[int, int]] = []
    for _ in range(2):
        random.seed(1)
        drawn: list[float] = []
        for _ in range(3):
            context = started(provider).get_span_context()
            ids.append((context.trace_id, context.span_id))
            drawn.append(random.random())
        assert drawn == untraced
    assert len({trace for trace, _ in ids}) == len({span for _, span in ids}) == 6


FORKED = """
import ctypes, os
from opentelemetry.sdk.trace import TracerProvider
from agl_otel_hook.hook import Hook

provider = TracerProvider(shutdown_on_exit=False)
Hook(None).adopt(provider)
child = ctypes.PyDLL(None).fork()
os.write(1, b"%d\\n" % provider.get_tracer("agent").start_span("work").get_span_context().span_id)
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_fork_made_outside_python_draws_other_ids() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, check=True, timeout=60)  # a process without threads
    assert len(set(ended.stdout.split())) == 2


def test_an_id_generator_chosen_by_the_user_is_kept() -> None:
    provider = TracerProvider(id_generator=OwnIds(), shutdown_on_exit=False)
    Hook(None).adopt(provider)
    assert type(provider.id_generator) is OwnIds
