"""Stored copies of options hold everything but secrets."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from agl_otel.text import LEFT_OUT, error_text, is_secret, without_secrets

SECRET = "zQ81-hunter2-not-to-be-kept"


@pytest.mark.parametrize(
    "given",
    [
        {"api_key": SECRET},
        {"editor": {"apiKey": SECRET, "OPENAI_API_KEY": SECRET}},
        {"headers": {"Authorization": f"Bearer {SECRET}", "X-Api-Key": SECRET, "Cookie": f"a={SECRET}"}},
        {"hf_token": SECRET, "db_password": SECRET, "clientSecret": SECRET, "secret_access_key": SECRET},
        {"base_url": f"https://someone:{SECRET}@models.example/v1"},
        {"base_url": f"https://{SECRET}@models.example/v1?x=1"},
        {"base_url": f"https://someone:p@{SECRET}@models.example/v1"},
        {"url": f"https://models.example/v1?api_key={SECRET}&model=m"},
        {"note": f"send Authorization: Bearer {SECRET} to it"},
        {"command": ["python", "agent.py", "--api-key", SECRET, "--seed", "1"]},
        {"command": ["python", "agent.py", f"--api-key={SECRET}"]},
        {"litellm_params": [{"model": "openai/m", "api_key": SECRET}]},
        {"anything": f"sk-proj-{SECRET}"},
        {"anything": "AKIAIOSFODNN7EXAMPLE" + SECRET},
    ],
)
def test_a_secret_is_replaced_by_a_mark(given: dict[str, Any]) -> None:
    kept = json.dumps(without_secrets(given))
    assert SECRET not in kept and "hunter2" not in kept and LEFT_OUT in kept


KEPT: dict[str, Any] = {
    "max_tokens": 512, "max_editor_tokens": None, "tokenizer": "qwen", "pad_token": "<pad>", "eos_token": "</s>", "key": "round-1",
    "api_key_env": "OPENAI_API_KEY", "api_key": None, "password": "", "secret_tasks": ["a", 1], "gradient_prompt_files": ["a.poml"],
    "base_url": "https://models.example:8000/v1?version=2", "mail": "jane@doe.example", "text": "ask for the sk- of risk-free basic words",
    "command": ["python", "agent.py", "--task", "{question}", "--verbose", "--max-tokens", "5"], "rate": 0.5, "nested": [{"a": (1, 2)}],
}  # fmt: skip


def test_other_values_are_kept_unchanged() -> None:
    assert without_secrets(KEPT) == json.loads(json.dumps(KEPT))


def test_redaction_is_idempotent() -> None:
    once = without_secrets(
        {"api_key": SECRET, "url": f"https://a:{SECRET}@b/", "say": f"Bearer {SECRET}", "x": [f"--token={SECRET}"], **KEPT}
    )
    assert without_secrets(once) == once


def test_names_of_tokens_of_text_are_no_secrets() -> None:
    assert [name for name in ("token", "authToken", "bos_token", "cost_per_token", "tokens", "token_ids") if is_secret(name)] == [
        "token",
        "authToken",
    ]


async def test_an_error_is_told_without_the_headers_of_its_request_and_in_short() -> None:
    url, headers = URL("http://127.0.0.1/v1"), CIMultiDict({"x-api-key": SECRET})
    error = aiohttp.ClientResponseError(
        aiohttp.RequestInfo(url, "POST", CIMultiDictProxy(headers), url), (), status=400, message="Bad \x1b[2J " + "-" * 10_000
    )
    assert SECRET in repr(error)
    text = error_text(error)
    assert SECRET not in text and text.startswith("ClientResponseError: 400") and len(text) < 510 and text.isprintable()
    assert error_text(TimeoutError()) == "TimeoutError"
    assert SECRET not in error_text(OSError("x" * 480 + f" --token={SECRET}" * 3)), "it is cut within a secret"


@given(st.lists(st.sampled_from(["-", "--", "a", "B", "1", "_", "=", " ", "api-", "key", "token", "\n"])).map("".join))
def test_a_secret_after_a_flag_is_left_out_whatever_stands_before_it(before: str) -> None:
    for flag in ("--api-key", "-X-Token", "--db-password", "-secret", "--my-API-KEY"):
        assert SECRET not in without_secrets(f'{before}{flag}={SECRET}" {flag}={SECRET}')


@pytest.mark.full
@pytest.mark.parametrize(
    "piece",
    ["-", "-a", "-token", "--api-key", "sk- ", "token-", "a-token ", "bearer ", "bearer  ", "://a", "?key", "https://a:b", "&token= "],
)
def test_a_long_text_is_looked_through_once(piece: str) -> None:
    """Not all that follows once more from each of its pieces: such a test would not end."""
    assert without_secrets(piece * 500_000) == piece * 500_000
    assert SECRET not in without_secrets(f"{piece * 500_000} --token={SECRET}")
