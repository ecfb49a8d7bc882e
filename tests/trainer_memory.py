"""The peak memory of GRPO's trainer beside its estimate: `Setting.compared` runs `python -m tests.trainer_memory`, a process of its own.

Resident memory (VmHWM, proc_pid_status(5)) beyond what the process has before the model is loaded. Linux only.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from agl_otel.jobs.memory import Estimate

BAR: Final = 0.2
"""How far an estimate may be from the measured peak, as a share of that."""
NARROW: Final[Mapping[str, Any]] = {"hidden_size": 256, "intermediate_size": 1408, "num_attention_heads": 4}
TRAINED_TOKENS: Final = 512  # of each pass: more than two chunks of logits of a vocabulary of 151,936


@dataclass(frozen=True)
class Peaks:
    """Bytes beyond the process's own, at the most."""

    step: int
    """Of the second optimizer step, made of two forward and backward passes."""
    save: int
    """While the weights are written for the server, and a checkpoint."""


class Setting(NamedTuple):
    """A size of the twin (tests/qwen_twin.py), options of GRPO, and the size of a pass."""

    widths: Mapping[str, Any]
    options: Mapping[str, Any]
    tokens: int
    rows: int

    def compared(self, folder: Path) -> tuple[Estimate, Peaks]:
        """Make the model in `folder`; return the estimate of the memory that it needs, and the peaks of steps."""
        from agl_otel.algorithms.grpo.logprobs import CHUNK_LOGITS
        from agl_otel.jobs.memory import Plan, trainer
        from agl_otel.jobs.model_check import model_facts
        from tests.qwen_twin import make_twin

        attention = self.options.get("attention")
        plan = Plan(
            pass_tokens=self.tokens,
            row_tokens=self.tokens // self.rows,
            bfloat16=self.options["dtype"] == "bfloat16",
            lora_rank=self.options.get("lora_rank"),
            gradient_checkpointing=self.options.get("gradient_checkpointing", False),
            eager=attention == "eager",
            reference="kl" in self.options,
            chunk_logits=CHUNK_LOGITS,
        )
        estimate = trainer(model_facts(make_twin(folder, **self.widths), attention=attention), plan)
        return estimate, _measured(folder, self)


def _measured(folder: Path, setting: Setting) -> Peaks:
    arguments = [str(folder), json.dumps(dict(setting.options)), str(setting.tokens), str(setting.rows)]
    command = [sys.executable, "-m", "tests.trainer_memory", *arguments]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "2"}  # what is freed goes back at once: torch's own peak
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1], env=env).stdout
    return Peaks(**json.loads(printed.splitlines()[-1]))


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> None:
    """Reset VmHWM to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _batch(tokens: int, rows: int, vocabulary: int, passes: int) -> Any:
    """Return trajectories of `passes` passes of `rows` rows, `tokens` tokens together."""
    import numpy as np

    from agl_otel.adapters.trajectories import TrajectoryBatch
    from agl_otel.types.columns import Ragged

    count, width = rows * passes, tokens // rows
    written = max(1, min(width // 2, TRAINED_TOKENS // rows))
    source = np.random.default_rng(0)

    def ragged(values: Any, length: int) -> Ragged:
        return Ragged(values, np.arange(count + 1) * length)

    return TrajectoryBatch(
        prompt=ragged(source.integers(0, vocabulary, count * (width - written)), width - written),
        response=ragged(source.integers(0, vocabulary, count * written), written),
        response_mask=ragged(np.ones(count * written, np.int8), written),
        logprobs=ragged(np.full(count * written, -11.9, np.float32), written),
        reward=np.arange(count, dtype=np.float32),
        rollout_id=[f"ro-{row}" for row in range(count)],
        attempt_id=[""] * count,
        agent=[""] * count,
        calls=np.ones(count, np.int64),
        model_version=[""] * count,
        verdict=["complete"] * count,
        images=[[] for _ in range(count)],
        rows=ragged(np.arange(count), 1),
        refused=Counter(),
        breaks=Counter(),
    )


def main(folder: Path, options: dict[str, Any], tokens: int, rows: int) -> None:
    import numpy as np
    import torch

    from agl_otel.algorithms.grpo.algorithm import GRPO
    from agl_otel.algorithms.grpo.checkpoint import Checkpoints, State
    from agl_otel.algorithms.grpo.learner import Learner
    from agl_otel.algorithms.grpo.lora import with_lora
    from agl_otel.algorithms.grpo.policy import save_weights
    from tests.qwen_twin import make_model

    torch.set_num_threads(options.pop("threads", 2))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 1000}
    low, rank = options["dtype"] == "bfloat16", options.get("lora_rank")
    small: Any = make_model(**sizes)
    if rank is not None:  # peft and its code are the process's own: some 70 MB
        small = with_lora(small.to(torch.bfloat16 if low else torch.float32), rank)
    learner = Learner(small, learning_rate=0.0, compute_dtype=torch.bfloat16 if low and rank is None else torch.float32)
    learner.update(_batch(64, 2, 1000, 1), np.array([1.0, -1.0], np.float32))  # loads the code of kernels
    del small, learner
    grpo: Any = GRPO.from_options(model_dir=folder, model_server_url="", micro_batch_tokens=tokens, **options)
    base = _status("VmRSS")
    grpo._load()
    learner = grpo._learner
    vocabulary = grpo.policy.vocabulary
    learner.ratio_error_limit = None
    learner.updates = 1

    def update(batch: Any) -> None:
        count = len(batch)
        learner.update(batch, np.where(np.arange(count) % 2, 1.0, -1.0).astype(np.float32))

    update(_batch(64 * 2, 2, vocabulary, 1))
    forget_peak()
    update(_batch(tokens, rows, vocabulary, 2))
    step = _status("VmHWM")
    forget_peak()
    with TemporaryDirectory(dir=folder) as place:
        pushed = save_weights(grpo.policy.model, Path(place) / "1", dtype=torch.bfloat16 if grpo.updates.in_bfloat16 else None)
        checkpoints = Checkpoints(Path(place), keep=1)
        checkpoints.save(
            State("run", 1, "", 1, {}, 0), grpo.policy.model, learner.optimizer, pushed=None if grpo.updates.in_bfloat16 else pushed
        )
    print(json.dumps({"step": step - base, "save": _status("VmHWM") - base}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
