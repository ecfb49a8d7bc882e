"""The hook in processes into which it comes late: with the first import of a library, in whatever thread or task that is."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.otlp_receiver import OtlpReceiver
from tests.system.hooked_agent import KEY, SPAN_ID, TRACE_ID, Agent, sealed_completely

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


@pytest.mark.parametrize("wait", ["thread.join()", "while thread.is_alive(): time.sleep(0.1)"])
def test_sigterm_seals_what_a_thread_has_made_that_brought_the_hook(receiver: OtlpReceiver, late: Agent, wait: str) -> None:
    """Only the main thread can install a handler, and it may wait for the other one."""
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
