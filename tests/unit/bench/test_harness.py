"""The exit code of a bench."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = """
from bench.harness import Contest, report, report_against_bar, run_bench

async def main():
    {figure}

run_bench(main())
"""


@pytest.mark.parametrize(
    ("figure", "missed"),
    [
        ("report_against_bar('ledger', 'added to a span', 3.0, 'us', 3.0)", ""),
        ("report_against_bar('ledger', 'added to a span', 3.1, 'us', 3.0)", "added to a span"),
        ("report('reads', 'one slow turn', 'ms', Contest([9.0, 9.0, 1.0], [1.0, 1.0, 1.0]), against='theirs', bar=8.0)", ""),
        ("report('reads', 'one fast turn', 'ms', Contest([9.0, 1.0, 1.0], [1.0, 1.0, 1.0]), against='theirs', bar=8.0)", "one fast turn"),
        ("report('reads', 'no bar', 'ms', Contest([1.0], [9.0]), against='theirs')", ""),
    ],
)
def test_a_bench_fails_if_a_median_misses_its_bar(figure: str, missed: str) -> None:
    command = [sys.executable, "-c", BENCH.format(figure=figure)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == ((1, f"missed the bar: {missed}\n") if missed else (0, "")), done.stderr
    assert done.stdout.startswith('{"bench": ')
