"""Train a model on rows, in a separate process, so that the GPU is free afterwards.

    python train.py rows.jsonl MODEL_FOLDER OUT_FOLDER [--backend unsloth]

A row has `input_ids`, `labels` (-100 where there is no loss) and `attention_mask`: nothing is tokenised here.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

Rows = list[dict[str, list[int]]]
COLUMNS = ("input_ids", "labels", "attention_mask")


def plain(rows: Rows, model_folder: Path, out: Path, *, epochs: int, learning_rate: float, batch_rows: int = 16) -> None:
    """Fine-tune all weights with transformers and torch, for small models, also on a CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    source = random.Random(0)
    for _ in range(epochs):
        order = source.sample(rows, len(rows))
        for start in range(0, len(order), batch_rows):
            batch = order[start : start + batch_rows]
            width = max(len(row["input_ids"]) for row in batch)
            filler = dict(zip(COLUMNS, (0, -100, 0), strict=True))
            padded = {name: torch.tensor([row[name] + [filler[name]] * (width - len(row[name])) for row in batch]) for name in COLUMNS}
            model(**padded).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(out)


def unsloth(rows: Rows, model_folder: Path, out: Path, *, epochs: int, learning_rate: float) -> None:
    """Train LoRA with Unsloth and TRL, and merge it; needs a GPU."""
    from unsloth import FastLanguageModel  # isort: skip  # first: it patches the others

    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = FastLanguageModel.from_pretrained(str(model_folder), max_seq_length=4096, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
    settings: dict[str, Any] = {"output_dir": str(out / "trainer"), "num_train_epochs": epochs, "learning_rate": learning_rate}
    config = SFTConfig(**settings, per_device_train_batch_size=4, save_strategy="no", report_to="none")
    SFTTrainer(model=model, processing_class=tokenizer, train_dataset=Dataset.from_list(rows), args=config).train()
    model.save_pretrained_merged(str(out), tokenizer, save_method="merged_16bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--backend", choices=("plain", "unsloth"), default="plain")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    given = parser.parse_args()
    read = [{name: row[name] for name in COLUMNS} for row in map(json.loads, given.rows.read_text().splitlines())]
    {"plain": plain, "unsloth": unsloth}[given.backend](
        read, given.model, given.out, epochs=given.epochs, learning_rate=given.learning_rate
    )
