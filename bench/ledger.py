"""Cost of counting spans in a process: spans with the ledger and its record file against the same spans without.

Both get the attempt's ids and a marker, and neither is exported. The difference is the ledger's CPU time; counting never waits.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from agl_otel_hook.context import Key
from agl_otel_hook.ledger import Ledger, Place, Started
from agl_otel_hook.processor import AttemptProcessor
from agl_otel_hook.records import Records, folder_of, key_of, read
from bench.harness import Turn, report, report_against_bar, run_bench, take_turns

KEY: Final = ("ro-1", "at-1")
BAR_MICROSECONDS: Final = 3.0


class Uncounted(Ledger):
    """A ledger that gives spans a marker and counts none."""

    def started(self, key: Key, span_id: int, place: Place) -> Started:
        """Return the marker."""
        return Started(self._marker, late=False)

    def takes(self, span_id: int) -> bool:
        """Return that an exporter is to take the span."""
        return True

    def ended(self, key: Key, span_id: int, *, marker: str | None) -> bool:
        """Return that the attempt is never idle."""
        return False


class Exporting(SpanProcessor):
    """Asks the ledger about each ended span, as an exporter does, and exports none."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def on_end(self, span: ReadableSpan) -> None:
        """Ask (OpenTelemetry calls this)."""
        if (context := span.get_span_context()) is not None:
            self._ledger.takes(context.span_id)


def turn(ledger: Ledger, spans: int) -> Turn:
    """Make a turn that measures microseconds per span."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Exporting(ledger))
    provider.add_span_processor(AttemptProcessor(ledger, fallback=KEY))
    tracer = provider.get_tracer("bench")

    async def microseconds() -> float:
        with tracer.start_as_current_span("the agent"):  # keeps the attempt from being idle between two spans
            began = time.thread_time()
            for _ in range(spans):
                tracer.start_span("work").end()
            return 1e6 * (time.thread_time() - began) / spans

    return microseconds


async def compare(spans: int, rounds: int) -> None:
    """Take turns and report."""
    with tempfile.TemporaryDirectory() as root:
        folder_of(root, *KEY).mkdir()
        ledger = Ledger(lambda: Records(root))
        contest = await take_turns(turn(ledger, spans), turn(Uncounted(), spans), rounds=rounds)
        (process,) = read(folder_of(root, *KEY), key_of(*KEY))
        expected = (rounds + 1) * (spans + 1)
        if process.slot is None or (process.slot.begun, process.slot.ended) != (expected, expected):
            raise RuntimeError(f"{expected} spans have begun and ended, and the ledger has {process.slot}")
    report("ledger", "span", "us", contest, against="the same span, not counted")
    added = statistics.median(mine - theirs for mine, theirs in zip(contest.ours, contest.baseline, strict=True))
    report_against_bar("ledger", "added to a span", added, "us", BAR_MICROSECONDS)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=20_000, help="in one turn")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    run_bench(compare(options.spans, options.rounds))


if __name__ == "__main__":
    main()
