"""Reads files of training data with the libraries they are for, and prints what these make of them as JSON: `trainers.py MODEL FOLDER`.

Runs in a process of its own, with the packages of tests/peers.txt on its path.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tinker  # pyright: ignore[reportMissingImports] - not in our own environment
import torch
from datasets import load_dataset, load_from_disk  # pyright: ignore[reportMissingImports] - as above
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports] - as above

Found = dict[str, Any]


def main(model_dir: str, folder: Path) -> Found:
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(model_dir)

    options: Any = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "max_steps": 1,
        "disable_tqdm": True,
        "per_device_train_batch_size": 8,
        "gradient_checkpointing": False,
        "bf16": False,
    }

    def loaded(name: str) -> Any:
        kind = Path(name).suffix.lstrip(".")
        if not kind:
            return load_from_disk(str(folder / name))
        reader = "json" if kind == "jsonl" else kind
        return load_dataset(reader, data_files=str(folder / name), split="train", cache_dir=str(folder / "cache"))

    def sft(name: str) -> Found:
        trainer: Any = SFTTrainer(model(), args=SFTConfig(**options), train_dataset=loaded(name), processing_class=tokenizer)
        batch = next(iter(trainer.get_train_dataloader()))
        done = trainer.train()
        return {**_lists(batch), "loss": done.training_loss}

    def dpo(name: str) -> Found:
        pairs = loaded(name)
        trainer: Any = DPOTrainer(model(), ref_model=model(), args=DPOConfig(**options), train_dataset=pairs, processing_class=tokenizer)
        tokenised = sorted(trainer.train_dataset["chosen_ids"])  # by TRL, from the messages
        trainer.train_dataset = pairs
        batch = next(iter(trainer.get_train_dataloader()))
        done = trainer.train()
        return {**_lists(batch), "tokenised": tokenised, "loss": done.training_loss}

    def datums(name: str) -> Found:
        rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        made: list[Any] = []
        for row in rows:
            read = tinker.ModelInput.from_ints(row["model_input"])
            made.append(tinker.Datum(read, {key: row[key] for key in ("target_tokens", "weights")}))
        return {
            "inputs": [datum.model_input.to_ints() for datum in made],
            "targets": [datum.loss_fn_inputs["target_tokens"].to_numpy().tolist() for datum in made],
            "weights": [datum.loss_fn_inputs["weights"].to_numpy().tolist() for datum in made],
        }

    readers: dict[str, Callable[[str], Found]] = {"sft": sft, "openai": sft, "dpo": dpo, "tinker": datums}
    return {
        path.name: readers[path.stem](path.name) for path in sorted(folder.iterdir()) if path.stem in readers and "pin" not in path.name
    }


def _lists(batch: dict[str, Any]) -> Found:
    return {name: value.tolist() for name, value in batch.items()}


if __name__ == "__main__":
    found = main(sys.argv[1], Path(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(found))
