"""Training data files, read by the training libraries: the sampled ids are the ids trained on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_otel.adapters.formats import as_written
from agl_otel.adapters.records import IGNORED, Reading, rows_of
from agl_otel.algorithms.grpo.tiny import make_model, make_tokenizer
from agl_otel.cli.training_files import WRITERS
from agl_otel.types import AttemptedRollout, Span
from tests.peer_packages import peer_packages
from tests.unit.adapters.conftest import CallRow, TracesBuilder, reward
from tests.unit.adapters.spans import proxy_call
from tests.unit.adapters.test_texts import text, texts

pytestmark = pytest.mark.full

ASKED = text("user", "hello")


def two_answers(tokenizer: Any) -> Any:
    """Two attempts at one task: "hi" with reward 1 as one token that no tokeniser makes of it, and "no" with reward 0."""
    messages = [{"role": "user", "content": "hello"}]
    prompt = tokenizer(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False), add_special_tokens=False)[
        "input_ids"
    ]
    end = tokenizer.eos_token_id
    builder = TracesBuilder(rewards={("ro-2", "at-1"): [reward(0.0)]})
    odd = [7, *tokenizer("hi")["input_ids"], end]
    built = builder.build(
        CallRow(rollout="ro-1", prompt=prompt, response=odd),
        CallRow(rollout="ro-2", prompt=prompt, response=[*tokenizer("no")["input_ids"], end]),
    )
    return replace(built, texts=texts(([ASKED], "hi"), ([ASKED], "no"))), prompt, odd


def spans_of(rollout: AttemptedRollout, answer: str) -> list[Span]:
    made = proxy_call(
        "a", 1, 2, **{"gen_ai.input.messages": json.dumps([ASKED]), "gen_ai.output.messages": json.dumps([text("assistant", answer)])}
    )
    return [made.model_copy(update={"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id})]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the libraries read from our files, and what was sampled ("sampled")."""
    peers = peer_packages()
    tokenizer: Any = make_tokenizer()
    traces, prompt, odd = two_answers(tokenizer)
    spans = [span for rollout, answer in zip(traces.rollouts, ("hi", "no"), strict=True) for span in spans_of(rollout, answer)]
    place = tmp_path_factory.mktemp("files")
    for name in ("sft.jsonl", "sft.parquet", "sft", "openai.jsonl", "openai.parquet", "dpo.jsonl", "tinker.jsonl"):
        form = Path(name).stem
        found = rows_of(Reading(form=form), traces, spans)
        assert found.refused == {}
        with WRITERS[Path(name).suffix](place / name) as write:
            write([as_written(form, row) for row in found.rows])
    model = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(model)
    make_model(tokenizer).save_pretrained(model)
    command = [sys.executable, str(Path(__file__).with_name("trainers.py")), str(model), str(place), str(model / "read.json")]
    offline = {"PYTHONPATH": str(peers), "HF_HUB_OFFLINE": "1", "HF_HOME": str(model), "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads((model / "read.json").read_text()), "sampled": (prompt, odd)}


@pytest.mark.parametrize("name", ["sft.jsonl", "sft.parquet", "sft"])
def test_trl_trains_on_the_ids_that_were_sampled(read: dict[str, Any], name: str) -> None:
    prompt, odd = read["sampled"]
    batch = read[name]
    rows = sorted(zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True), key=lambda row: -sum(row[2]))
    assert len(rows) == 2
    assert rows[0] == (prompt + odd, [IGNORED] * len(prompt) + odd, [1] * len(prompt + odd))
    assert batch["loss"] > 0


def test_trl_reads_conversations_with_the_models_template(read: dict[str, Any]) -> None:
    prompt, _ = read["sampled"]
    for name in ("openai.jsonl", "openai.parquet"):
        assert any(row[: len(prompt)] == prompt for row in read[name]["input_ids"])
        assert not any(7 in row[len(prompt) :] for row in read[name]["input_ids"])  # tokenised again: what was sampled is lost


def test_trl_prefers_by_ids_what_it_would_otherwise_tokenise_again(read: dict[str, Any]) -> None:
    prompt, odd = read["sampled"]
    batch = read["dpo.jsonl"]
    chosen, rejected = batch["input_ids"]
    assert chosen[: len(prompt + odd)] == prompt + odd
    assert rejected[: len(prompt)] == prompt
    assert batch["completion_mask"][0][: len(prompt + odd)] == [0] * len(prompt) + [1] * len(odd)
    assert batch["tokenised"] != [odd]
    assert batch["loss"] > 0


def test_tinker_accepts_the_rows_as_training_data(read: dict[str, Any]) -> None:
    prompt, odd = read["sampled"]
    found = read["tinker.jsonl"]
    assert (found["inputs"][0], found["targets"][0]) == ((prompt + odd)[:-1], (prompt + odd)[1:])
    assert found["weights"][0] == [0.0] * (len(prompt) - 1) + [1.0] * len(odd)
