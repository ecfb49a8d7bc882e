"""Masking rules: masked text reaches neither the log nor the tables nor the copy, and calls without their token ids are stored."""

from __future__ import annotations

import json
from pathlib import Path

from agl_otel_hook import conventions
from tests.otlp_receiver import OtlpReceiver

from .otlp import post_spans, request_of, span
from .stack import Stack, until

CALL = {
    conventions.LLM_CALL: 1,
    conventions.LLM_CHOICE: 0,
    conventions.LLM_PROMPT_TOKEN_IDS: [1, 2],
    conventions.LLM_RESPONSE_TOKEN_IDS: [3],
    conventions.LLM_RESPONSE_LOGPROBS: [-0.5],
    "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "my number is 4711"}]}]),
    "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "noted"}]}]),
}


async def test_a_masked_text_is_neither_stored_nor_logged_nor_copied(own_stack: Stack, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\naction = 'drop_text'\nrole = 'user'\ntext = '[0-9]'\n")
    copy = OtlpReceiver()
    try:
        own_stack.settings = own_stack.settings.model_copy(update={"mask": str(rules), "forward_otlp": copy.http_url})
        await own_stack.start_collector()  # no queue yet: the request stays in the log
        await post_spans(
            own_stack, request_of([span(conventions.SPAN_LLM, CALL)], {conventions.ROLLOUT_ID: "ro-1", conventions.ATTEMPT_ID: "at-1"})
        )
        logged = b"".join(path.read_bytes() for path in own_stack.settings.wal_dir.iterdir() if path.is_file())
        assert (b"4711" in logged, b"noted" in logged) == (False, True)

        async def copies() -> int:
            return len(copy.bodies)

        await until(copies, bool)
        assert all(b"4711" not in body for _, body, _ in copy.bodies)
        await own_stack.start_queue()
        async with own_stack.reader() as reader:
            await reader.barrier()
            (stored,) = await reader.spans(["ro-1"])
        assert "[masked]" in str(stored.attributes["gen_ai.input.messages"])
        assert "noted" in str(stored.attributes["gen_ai.output.messages"])
        assert stored.attributes[conventions.LLM_PROMPT_TOKEN_IDS] == [1, 2]
    finally:
        copy.close()


async def test_a_call_whose_ids_were_dropped_is_stored_with_zeros_and_without_log_probs(own_stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text("[[rule]]\naction = 'drop_ids'\nrole = 'assistant'\n")
    own_stack.settings = own_stack.settings.model_copy(update={"mask": str(tmp_path / "rules.toml")})
    await own_stack.start_queue()
    await own_stack.start_collector()
    await post_spans(own_stack, request_of([span(conventions.SPAN_LLM, CALL)], {conventions.ROLLOUT_ID: "ro-1"}), ack="stored")
    async with own_stack.reader() as reader:
        (row,) = await reader.query(
            "SELECT ResponseTokenIds AS ids, ResponseLogprobs AS logprobs, PromptTokenIds AS prompt FROM otel_traces"
        )
        assert row == {"ids": [0], "logprobs": [], "prompt": [1, 2]}
        (stored,) = await reader.spans(["ro-1"])
        assert stored.attributes[conventions.LLM_INCOMPLETE] == conventions.LLM_MASKED
