"""The kinds of agents that a runner can run."""

from __future__ import annotations

from agl_otel.runner.agents.command import CommandAgent
from agl_otel.runner.agents.container import ContainerAgent
from agl_otel.runner.agents.function import FunctionAgent
from agl_otel.runner.agents.http import HttpAgent
from agl_otel.runner.agents.kubernetes import KubernetesAgent
from agl_otel.runner.job import Agent, Grader, Job
from agl_otel.runner.limits import Limits
from agl_otel.service.loading import load_function

__all__ = [
    "Agent",
    "CommandAgent",
    "ContainerAgent",
    "FunctionAgent",
    "Grader",
    "HttpAgent",
    "Job",
    "KubernetesAgent",
    "Limits",
    "load_function",
]
