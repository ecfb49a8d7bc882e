"""The estimate of the trainer's memory against the peak of real steps, on a CPU: the table of docs/real-models.md, and more options.

tests/system/test_trainer_memory.py has a few of these settings.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final

from bench.harness import report_against_bar, run_bench
from tests.trainer_memory import BAR, NARROW, Setting

GIGABYTE: Final = 1e9
SETTINGS: Final = (
    Setting({}, {"dtype": "float32"}, 2048, 2),
    Setting(NARROW, {"dtype": "float32"}, 64, 1),
    Setting(NARROW, {"dtype": "float32"}, 8192, 8),
    Setting(NARROW, {"dtype": "bfloat16"}, 8192, 8),
    Setting(NARROW, {"dtype": "float32", "gradient_checkpointing": True}, 8192, 8),
    Setting(NARROW, {"dtype": "bfloat16", "gradient_checkpointing": True}, 8192, 8),
    Setting(NARROW, {"dtype": "float32", "kl": 0.1}, 2048, 2),
    Setting(NARROW, {"dtype": "float32", "lora_rank": 8}, 8192, 8),
    Setting(NARROW, {"dtype": "bfloat16", "lora_rank": 8}, 2048, 2),
    Setting(NARROW, {"dtype": "bfloat16", "lora_rank": 8}, 8192, 8),
    Setting(NARROW, {"dtype": "bfloat16", "lora_rank": 8, "gradient_checkpointing": True}, 8192, 8),
    Setting(NARROW, {"dtype": "float32", "attention": "eager"}, 2048, 2),
    Setting(NARROW, {"dtype": "bfloat16", "attention": "eager"}, 2048, 2),
)


async def main() -> None:
    """Compare each setting."""
    argparse.ArgumentParser(prog="python -m bench.trainer_memory", description=__doc__).parse_args()
    for setting in SETTINGS:
        with tempfile.TemporaryDirectory() as place:
            estimate, found = setting.compared(Path(place))
        peak = max(found.step, found.save)
        report_against_bar(
            "trainer_memory",
            f"estimate's error: width {setting.widths.get('hidden_size', 896)}, {dict(setting.options)}, {setting.tokens} tokens",
            abs(estimate.peak / peak - 1),
            "of the peak",
            BAR,
            measured_gb=round(peak / GIGABYTE, 2),
            estimated_gb=round(estimate.peak / GIGABYTE, 2),
        )


if __name__ == "__main__":
    run_bench(main())
