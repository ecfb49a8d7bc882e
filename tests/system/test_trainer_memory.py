"""The estimate of a trainer's memory against the measured peak of real steps, with a vocabulary of 151,936."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

from agl_otel.jobs.memory import SAVE
from tests.trainer_memory import BAR, NARROW, Setting

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
CASES = (
    Setting(NARROW, {"dtype": "float32", "lora_rank": 8}, 4096, 4),
    Setting(NARROW, {"dtype": "bfloat16", "gradient_checkpointing": True}, 4096, 4),
    Setting(NARROW, {"dtype": "bfloat16", "lora_rank": 8, "gradient_checkpointing": True}, 8192, 8),
    Setting(NARROW, {"dtype": "bfloat16", "attention": "eager", "kl": 0.1}, 1024, 1),
)
"""Each option once; `python -m bench.trainer_memory` has the whole table, and the model at its own width."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(map(str, case.options.values())), marks=pytest.mark.long if "kl" in case.options else ())
        for case in CASES
    ],
)
def test_the_estimate_is_within_a_fifth_of_the_measured_peak(case: Setting, tmp_path: Path) -> None:
    estimate, found = case.compared(tmp_path)
    assert estimate.peak / max(found.step, found.save) == pytest.approx(1.0, abs=BAR), (estimate, found)
    saving = sum(part.bytes for part in estimate.parts if part.phase in (None, SAVE))
    slack = 100e6  # of code, buffers and what the allocator keeps, where little is held
    assert abs(saving - found.save) < BAR * found.save + slack, (estimate, found)
