"""The hook in processes into which it comes late: with the first import of a library, in whatever thread or task that is."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from agl_otel.runner.injection import FOLDER
from tests.otlp_receiver import OtlpReceiver
from tests.system.hooked_agent import IDS, KEY, SPAN_ID, TRACE_ID, Agent, sealed_completely

pytestmark = pytest.mark.full


@pytest.fixture
def late(receiver: OtlpReceiver, tmp_path: Path) -> Agent:
    return Agent(receiver, tmp_path, injected=True)


SPAN = "from opentelemetry import trace; trace.get_tracer('agent').start_span({name!r}).end()"
TERMINATE = "os.kill(os.getpid(), signal.SIGTERM)"
HANDLERS = {
    "of asyncio": (
        f"""
        import asyncio
        async def main():
            stop = asyncio.Event()
            def on_term(): print('stops', flush=True); stop.set()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_term)
            {SPAN.format(name="work")}
            {TERMINATE}
            await stop.wait()
            await asyncio.sleep(1)
            sys.exit(5)
        asyncio.run(main())
        """,
        5,
    ),
    "that exits": (
        f"""
        signal.signal(signal.SIGTERM, lambda *_: (print('stops', flush=True), sys.exit(5)))
        {SPAN.format(name="work")}
        {TERMINATE}
        time.sleep(60)
        """,
        5,
    ),
    "that restores the default and is killed by it": (  # as uvicorn
        f"""
        def on_term(number, frame):
            print('stops', flush=True)
            signal.signal(number, before)
            signal.raise_signal(number)
            time.sleep(60)
        before = signal.signal(signal.SIGTERM, on_term)
        {SPAN.format(name="work")}
        {TERMINATE}
        time.sleep(60)
        """,
        -signal.SIGTERM,
    ),
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_handler_of_the_agents_own_runs_once_and_ends_it_as_ever(receiver: OtlpReceiver, late: Agent, handler: str) -> None:
    code, expected = HANDLERS[handler]
    assert late.run(code) == (expected, "stops\n", "")
    assert receiver.spans("work") and sealed_completely(receiver)


@pytest.mark.parametrize("wait", ["thread.join()", "threading.Event().wait()"])
def test_sigterm_seals_what_a_thread_has_made_that_brought_the_hook(receiver: OtlpReceiver, late: Agent, wait: str) -> None:
    """Only the main thread can install a handler, and it waits for another one."""
    code = f"""
    def work():
        {SPAN.format(name="work")}
        print('works', flush=True)
        time.sleep(60)
    thread = threading.Thread(target=work)
    thread.start()
    {wait}
    """
    with late.start(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "works\n"
        process.terminate()
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (-signal.SIGTERM, "")
    assert receiver.spans("work") and sealed_completely(receiver)


FIRST = {
    "a thread": f"""
        def first(): {SPAN.format(name="first")}
        thread = threading.Thread(target=first)
        thread.start(); thread.join()
        {SPAN.format(name="later")}
        def last(): {SPAN.format(name="elsewhere")}
        thread = threading.Thread(target=last)
        thread.start(); thread.join()
        """,
    "a task": """
        import asyncio
        async def make(name): from opentelemetry import trace; trace.get_tracer('agent').start_span(name).end()
        async def main():
            await asyncio.create_task(make('first'))
            await make('later')
            await asyncio.create_task(make('elsewhere'))
        asyncio.run(main())
        """,
}


@pytest.mark.parametrize("first", FIRST)
def test_all_spans_are_below_the_attempt_wherever_the_first_is_made(receiver: OtlpReceiver, late: Agent, first: str) -> None:
    status, _, err = late.run(FIRST[first])
    assert (status, err) == (0, "")
    spans = {name: receiver.spans(name)[0] for name in ("first", "later", "elsewhere")}
    assert {(span.key, span.trace_id, span.parent_id) for span in spans.values()} == {(KEY, TRACE_ID, SPAN_ID)}
    assert sealed_completely(receiver)


def test_a_span_of_an_empty_context_has_a_trace_of_its_own(receiver: OtlpReceiver, late: Agent) -> None:
    code = """
    from opentelemetry import context, trace
    token = context.attach(context.Context())
    trace.get_tracer('agent').start_span('alone').end()
    context.detach(token)
    trace.get_tracer('agent').start_span('below').end()
    """
    status, _, err = late.run(code)
    (alone,), (below,) = receiver.spans("alone"), receiver.spans("below")
    assert (status, err, alone.key, alone.trace_id != TRACE_ID, below.trace_id) == (0, "", KEY, True, TRACE_ID)


LOUD = """
class Old:
    def __init_subclass__(cls):
        import warnings
        warnings.warn('subclassing is deprecated', DeprecationWarning, stacklevel=2)
"""
INSTRUMENTATION = """
import loud
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
class Wraps(loud.Old): pass
class Instrumentor(BaseInstrumentor):
    def instrumentation_dependencies(self): return []
    def _instrument(self, **kwargs): loud.instrumented = True
    def _uninstrument(self, **kwargs): pass
"""


@pytest.mark.parametrize("filters", [("default", []), ("error", ["own"])])
def test_warnings_of_what_is_loaded_with_the_hook_are_neither_shown_nor_raised(
    late: Agent, tmp_path: Path, filters: tuple[str, list[str]]
) -> None:
    of, name = tmp_path / "loud-1.dist-info", tmp_path / "opentelemetry" / "instrumentation" / "loud" / "__init__.py"
    of.mkdir()
    name.parent.mkdir(parents=True)
    (of / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1\n")
    (of / "entry_points.txt").write_text("[opentelemetry_instrumentor]\nloud = opentelemetry.instrumentation.loud:Instrumentor\n")
    name.write_text(INSTRUMENTATION)
    (tmp_path / "loud.py").write_text(LOUD)
    action, raised = filters
    code = f"""
    import warnings
    warnings.simplefilter({action!r})
    first = warnings.filters[0]
    import loud
    print(loud.instrumented, first in warnings.filters, 'agl-otel' in str(warnings.filters))
    try: warnings.warn('own')
    except UserWarning as error: print(error)
    """
    status, out, err = late.run(code, {**IDS, "PYTHONPATH": os.pathsep.join([FOLDER, str(tmp_path)])})
    assert (status, out.splitlines()) == (0, ["True True False", *raised]), err
    assert "deprecated" not in err


def test_what_is_imported_when_the_process_ends_is_imported_as_without_the_hook(late: Agent, tmp_path: Path) -> None:
    (tmp_path / "httpx.py").write_text("Client = 1\n")
    code = """
    import atexit
    thread = threading.Thread(target=int); thread.start(); thread.join()
    def ends():
        import httpx
        print(httpx.Client)
        print('agl_otel_hook.hook' in sys.modules)
    atexit.register(ends)
    """
    assert late.run(code) == (0, "1\nFalse\n", "")
