"""What the whole suite shares: how hypothesis searches, a tracer provider for each file, one tiny model, and logs of failed tests.

`make test` plays the same examples each time, so that what passed here passes there. `make search` draws new ones; what it finds becomes a
test of its own, or an `@example`.
"""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from opentelemetry import trace
from opentelemetry.util._once import Once

from agl_otel.compat.tracer import process
from agl_otel.service.interpreter import tune_for_startup
from agl_otel.telemetry.setup import uninstrument_all
from agl_otel_hook import waiting
from agl_otel_hook.unwrapping import remove_wrappers
from tests.one_certificate import read_one_certificate
from tests.otlp_receiver import OtlpReceiver
from tests.service_logs import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]  # a hook

pytest.register_assert_rewrite("tests.cores")  # whose assertions compare for many tests

# Several workers share the cores, and no model here is large: a second thread of torch or numpy would wait for its turn, at full speed.
os.environ.setdefault("OMP_NUM_THREADS", "1")
read_one_certificate()
tune_for_startup()

_ROOT = Path(__file__).parents[1]
_NOT_USERS = [
    sysconfig.get_path("stdlib"),
    sys.prefix,
    *(_ROOT / room for room in ("agl_otel", "adapters", "algorithms", "bench", "collector", "hook", "tests")),
]

# A busy machine is no fault of a test: nothing here depends on time.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("suite", calm, derandomize=True)
settings.register_profile("search", calm)
settings.load_profile("suite")


def pytest_collection_finish() -> None:
    """What is loaded by now (torch, thousands of tests) stays: no search for garbage goes through it again."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """The last search, at the interpreter's end: without it triton's bindings print what they miss."""
    gc.unfreeze()


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    """Receive what a test's processes export."""
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(autouse=True, scope="module")
def own_tracer_provider() -> Iterator[None]:
    """OpenTelemetry lets a process set its tracer provider once; here each file may, as if it had a process of its own.

    What a file instrumented does not stay so: it would put headers of its own onto the requests of the next.
    """
    yield
    process.shut_down()
    uninstrument_all()
    waiting.forget_all()
    for point in entry_points(group="opentelemetry_instrumentor"):
        if point.module in sys.modules and (instrumentor := point.load()()).is_instrumented_by_opentelemetry:
            instrumentor.uninstrument()
            remove_wrappers(instrumentor)
    process._telemetry = None  # pyright: ignore[reportPrivateUsage] - nothing public forgets it, nor the two below
    trace._TRACER_PROVIDER = None  # pyright: ignore[reportPrivateUsage]
    trace._TRACER_PROVIDER_SET_ONCE = Once()  # pyright: ignore[reportPrivateUsage]


@pytest.fixture(autouse=True, scope="module")
def own_user_modules() -> Iterator[None]:
    """Unload the agents, graders and tasks that a file's tests loaded: another file's job may have an `agent.py` of its own."""
    before, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - before:
        file = Path(getattr(sys.modules[name], "__file__", None) or sys.prefix)
        if not any(file.is_relative_to(place) for place in _NOT_USERS):
            del sys.modules[name]
    sys.path[:] = path


@pytest.fixture(scope="session")
def tiny_policy() -> Path:
    """The folder of `make_policy(seed=0)`, as committed: to read, or to copy to where a run looks before it makes its own."""
    return Path(__file__).with_name("tiny_policy")
