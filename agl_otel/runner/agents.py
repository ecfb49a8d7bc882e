"""The agents a runner can run, by the names that users import."""

from __future__ import annotations

from agl_otel.runner.command import CommandAgent
from agl_otel.runner.container import ContainerAgent
from agl_otel.runner.endpoint import HttpAgent
from agl_otel.runner.function import FunctionAgent
from agl_otel.runner.job import Agent, Grader, Job
from agl_otel.runner.kubernetes import KubernetesAgent
from agl_otel.runner.limits import Limits
from agl_otel.runner.loading import load_function

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
