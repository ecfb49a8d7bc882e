from __future__ import annotations

from agl_otel.runner.metrics import RunnerMeters
from agl_otel.runner.running import RunnerEvent


def test_running_and_ended_attempts_are_counted_and_events_forwarded() -> None:
    heard: list[RunnerEvent] = []
    meters = RunnerMeters(heard.append)
    events = [RunnerEvent("started", "ro-1", "at-1"), RunnerEvent("started", "ro-2", "at-2")]
    events.append(RunnerEvent("ended", "ro-1", "at-1", "succeeded", seconds=2.5))
    for event in events:
        meters.record(event)
    lines = meters.meters.text().splitlines()
    assert {"agl_runner_running 1.0", 'agl_runner_attempts_total{outcome="succeeded"} 1.0'} <= {*lines}
    assert 'agl_runner_attempts_duration_sum{outcome="succeeded"} 2.5' in lines and heard == events
