"""Memory and time of a training step with a real vocabulary: log-probs in chunks against log-probs from the logits of all positions.

The model has Qwen2.5-0.5B's shapes but two layers, random weights, and its tied head of 151,936 tokens. Each turn is a process of its own,
because its peak memory is what is measured: beyond what model and gradients take, of which both have the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from typing import Any, Final

from bench.harness import Contest, report, run_bench, take_turns

VOCABULARY: Final = 151_936
MEMORY_BAR: Final = 4.0  # at most a quarter of the baseline


def step(tokens: int, whole: bool) -> dict[str, float]:
    """Do a forward and a backward pass over rows of 512 tokens, half of them trained; return its GB beyond the model, and seconds."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from agl_otel.algorithms.grpo.logprobs import Scorer
    from agl_otel.algorithms.grpo.objective import token_logprobs

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=2,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model: Any = Qwen2ForCausalLM(config).eval()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    ids = torch.randint(0, VOCABULARY, (tokens // 512, 512))
    trained = torch.zeros_like(ids, dtype=torch.bool)
    trained[:, 256:] = True
    scorer = Scorer(model)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    if whole:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        where = trained[:, 1:]
        logprobs = token_logprobs(logits[where], ids[:, 1:][where])
    else:
        logprobs = scorer(ids.flatten(), [512] * len(ids), trained.flatten())
    logprobs.mean().backward()
    seconds = time.monotonic() - began
    return {"gb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6, "seconds": seconds}


async def compare(tokens: int, rounds: int) -> None:
    """Take turns and report."""
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}

    def turn(whole: bool) -> Any:
        async def measured() -> float:
            command = [sys.executable, "-m", "bench.training", "--step", str(tokens), *(["--whole"] if whole else [])]
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            printed, _ = await process.communicate()
            found[whole].append(json.loads(printed))
            return found[whole][-1]["gb"]

        return measured

    memory = await take_turns(turn(False), turn(True), rounds=rounds)
    inverse = Contest(memory.baseline, memory.ours)
    report("training", "peak memory saved", "GB", inverse, against="log-probs in chunks", bar=MEMORY_BAR, tokens=tokens)
    seconds = Contest(*([each["seconds"] for each in found[whole][1:]] for whole in (True, False)))
    report("training", "time of whole logits", "s", seconds, against="log-probs in chunks", bar=1.0, tokens=tokens)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step; whole logits of 8,192 take more than 20 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", type=int, help="do one step of so many tokens, and print what it took (a turn's process)")
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    if options.step:
        print(json.dumps(step(options.step, options.whole)))
    else:
        run_bench(compare(options.tokens, options.rounds))


if __name__ == "__main__":
    main()
