"""The front of vLLM over a stand-in for `vllm serve`: arguments, weights, adapters, sleep. tests/system/test_vllm.py has the real one."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agl_otel.algorithms.grpo import serving as module_of_serving
from agl_otel.algorithms.grpo.algorithm import GRPO
from agl_otel.algorithms.grpo.options import Sampling
from agl_otel.algorithms.grpo.serving import ServerWeights, Serving, check_context, server_weights
from agl_otel.algorithms.grpo.vllm import STRICT, Front, make_front, tool_parser
from agl_otel.algorithms.model_files import ADAPTER_CONFIG, ADAPTER_FILE, WEIGHTS_FILE
from agl_otel.errors import ModelServerError, SettingsError, UsageError
from agl_otel.store import LightningStore
from agl_otel.types.sampling import heeded
from agl_otel_hook.conventions import HEADER_MODEL_VERSION, HEADER_SAMPLING
from tests.contract.algorithms.test_model_ports import serving
from tests.contract.collector.stack import until

ROOT = Path(__file__).parents[3]


@dataclass
class Served:
    url: str
    direct: str
    """The stand-in's own address."""
    model: Path
    session: aiohttp.ClientSession
    front: Front

    async def asked(self, *paths: str) -> list[Any]:
        """The bodies of requests to these paths, in order."""
        return [body for path, body in await self._requests() if path in paths]

    async def _requests(self, chats: int = 0) -> list[Any]:
        async with self.session.get(f"{self.direct}/asked?chats={chats}") as answer:
            return await answer.json()

    async def post(self, route: str, **body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + route, json=body) as answer:
            return answer.status, await answer.json()

    async def push(self, folder: Path, version: int) -> tuple[int, Any]:
        return await self.post("/weights", path=str(folder), version=version)

    async def chat(self, text: str = "hello", model: str | None = "policy") -> tuple[str, str]:
        """Return (version, what sampled the reply: the folder that its weights or adapter were read from)."""
        body = {**({"model": model} if model else {}), "messages": [{"role": "user", "content": text}]}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers[HEADER_SAMPLING] == self.front.heeds
            return answer.headers[HEADER_MODEL_VERSION], (await answer.json())["choices"][0]["message"]["content"]

    async def waiting(self) -> asyncio.Task[tuple[str, str]]:
        """Start a call that is answered after `go`, and return it once vLLM has it."""
        before = len(await self.asked("/v1/chat/completions"))
        call = asyncio.create_task(self.chat("wait"))
        await self._requests(before + 1)
        return call

    async def go(self) -> None:
        async with self.session.post(f"{self.direct}/go") as answer:
            assert answer.status == 200


def weights(folder: Path, *, adapter: bool = False) -> Path:
    folder.mkdir()
    (folder / (ADAPTER_FILE if adapter else WEIGHTS_FILE)).write_bytes(b"\0")
    if adapter:
        (folder / ADAPTER_CONFIG).write_text("{}")
    return folder


@asynccontextmanager
async def front(base: Path, *more: str, lora_rank: int | None = None, sleep: bool = False) -> AsyncGenerator[Served]:
    program, model = base / "vllm", weights(base / "model")
    program.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m tests.vllm_stand_in "$@"\n')
    program.chmod(0o755)
    options = argparse.Namespace(
        model=str(model), weights=None, version="1", name="policy", seed=3, vllm=str(program), log=str(base / "vllm.log"),
        lora_rank=lora_rank, sleep=sleep,
    )  # fmt: skip
    made = make_front(options, more)
    async with aiohttp.ClientSession() as session, made, serving(made.app()) as url:
        yield Served(url, made.url, model, session, made)


async def test_a_call_in_flight_keeps_its_adapter_while_new_calls_get_the_next(tmp_path: Path) -> None:
    one, two, three = (weights(tmp_path / name, adapter=True) for name in ("one", "two", "three"))
    async with front(tmp_path, lora_rank=5) as served:
        ((*_, argv),) = [await served.asked("argv")]
        assert " ".join(argv).find("--enable-lora --max-lora-rank 8 --max-loras 2") > 0
        assert await served.chat() == ("1", str(served.model))
        assert await served.push(one, 2) == (200, {"version": "2"})
        early = await served.waiting()
        assert await served.push(two, 3) == (200, {"version": "3"}), "nothing waits for the call in flight"
        for model in ("policy", None, "policy-1"):
            assert await served.chat(model=model) == ("3", str(two)) and not early.done(), model
        third = asyncio.create_task(served.push(three, 4))
        assert await served.chat() == ("3", str(two)), "calls go on"
        assert not third.done(), "vLLM has room for two adapters, and the first is in use"
        await served.go()
        assert await early == ("2", str(one))
        assert await third == (200, {"version": "4"}) and await served.chat() == ("4", str(three))
        assert await served.asked("/v1/unload_lora_adapter") == [{"lora_name": "policy-1"}]
        assert await served.asked("/collective_rpc", "/reset_prefix_cache") == [], "the weights themselves stay"
        assert await server_weights(served.session, served.url) == ServerWeights("4", str(three), adapter_rank=8)


async def test_new_weights_wait_for_the_calls_in_flight_and_hold_back_new_ones(tmp_path: Path) -> None:
    new = weights(tmp_path / "new")
    async with front(tmp_path) as served:
        early = await served.waiting()
        push = asyncio.create_task(served.push(new, 2))
        await until(lambda: asyncio.sleep(0, served.front.held), bool)
        late = asyncio.create_task(served.chat())
        assert await served.asked("/collective_rpc") == [] and not push.done()
        await served.go()
        assert await early == ("1", str(served.model)) and await push == (200, {"version": "2"}) and await late == ("2", str(new))
        assert await served.asked("/collective_rpc") == [{"method": "reload_weights", "kwargs": {"weights_path": str(new)}}]
        assert len(await served.asked("/reset_prefix_cache")) == 1
        status, body = await served.push(weights(tmp_path / "adapter", adapter=True), 3)
        assert status == 400 and "because it was started without --lora-rank: start it again" in body["error"]["message"]
        status, body = await served.push(tmp_path, 3)
        assert (status, body["error"]["message"]) == (400, f"cannot read weights from {tmp_path}: it holds no model.safetensors")


async def test_weights_that_the_server_has_get_a_version_and_are_not_read_again(tmp_path: Path) -> None:
    async with front(tmp_path) as served:
        assert await server_weights(served.session, served.url) == ServerWeights("1", str(served.model))
        assert await served.push(served.model, 7) == (200, {"version": "7"})
        assert await served.chat() == ("7", str(served.model)) and await served.asked("/collective_rpc") == []
        (served.model / WEIGHTS_FILE).write_bytes(b"other")
        assert await server_weights(served.session, served.url) == ServerWeights("7")
        assert await served.push(served.model, 8) == (200, {"version": "8"})
        assert len(await served.asked("/collective_rpc")) == 1, "its files have changed"


async def test_an_adapter_is_refused_over_weights_that_were_replaced(tmp_path: Path) -> None:
    async with front(tmp_path, lora_rank=8) as served:
        assert (await served.push(weights(tmp_path / "merged"), 2))[0] == 200
        assert (await server_weights(served.session, served.url)).adapter_rank == 0, "so that the trainer pushes merged weights"
        status, body = await served.push(weights(tmp_path / "adapter", adapter=True), 3)
        assert status == 400 and "because its own weights were replaced" in body["error"]["message"]


async def test_calls_wait_while_the_server_sleeps(tmp_path: Path) -> None:
    new = weights(tmp_path / "new")
    async with front(tmp_path, sleep=True) as served:
        ((*_, argv),) = [await served.asked("argv")]
        assert "--enable-sleep-mode" in argv and (await server_weights(served.session, served.url)).sleeps
        early = await served.waiting()
        asleep = asyncio.create_task(served.post("/sleep"))
        await served.go()
        assert await early == ("1", str(served.model)) and await asleep == (200, {"asleep": True})
        assert await served.post("/sleep") == (200, {"asleep": True})
        late = asyncio.create_task(served.chat())
        assert await served.post("/wake") == (200, {"asleep": False}) and await late == ("1", str(served.model))
        assert await served.post("/sleep") == (200, {"asleep": True})
        late = asyncio.create_task(served.chat())
        assert await served.push(new, 2) == (200, {"version": "2"}) and await late == ("2", str(new)), "weights wake it"
        assert [await served.asked(path) for path in ("/sleep?level=1", "/wake_up")] == [[None, None], [None, None]]


REMEDY = r"\. Look at the model server's log, and start the run again, which .*, or leave out --sleep \(\[policy\] sleep\)"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("/sleep", r"/sleep failed \(HTTP 400 .*vLLM refused /sleep\?level=1: HTTP 500 CUDA error.*\)" + REMEDY),
        ("busy", r"/sleep failed \(no answer within 0\.01 s\)" + REMEDY),
        ("/wake_up", r"/wake failed \(HTTP 400 .*vLLM refused /wake_up: HTTP 500 CUDA error.*\)" + REMEDY),
        ("killed", r"/wake failed \(HTTP 502 .*vLLM does not answer: .*\)" + REMEDY),
    ],
    ids=["refuses to sleep", "calls that do not end", "does not wake", "killed while asleep"],
)
async def test_a_server_that_does_not_sleep_or_wake_ends_the_run_with_the_remedy(
    store: LightningStore, tmp_path: Path, fault: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", fault)
    async with front(tmp_path, sleep=True) as served:
        trainer = Serving(store, served.session, url=served.url, sampling={"max_tokens": 8}, run_id="grpo-1")
        await trainer.begin(None)
        early = await served.waiting()
        if fault == "busy":
            monkeypatch.setattr(module_of_serving, "SLEEP_SECONDS", 0.01)
        else:
            await served.go()
        with pytest.raises(ModelServerError, match=words):
            async with trainer.asleep(partial(asyncio.sleep, 0)):
                if fault == "killed":
                    os.kill(served.front.process.pid, signal.SIGKILL)
        if fault == "busy":
            await served.go()
        assert await early == ("1", str(served.model)), "what was in flight is answered"


async def test_a_server_without_sleep_offers_none(tmp_path: Path) -> None:
    async with front(tmp_path) as served, served.session.post(f"{served.url}/sleep", json={}) as answer:
        assert answer.status == 404 and not (await server_weights(served.session, served.url)).sleeps


async def test_a_release_that_cannot_load_weights_from_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_RELEASE", "0.15.1")
    with pytest.raises(SettingsError, match=r"vLLM 0\.15\.1 cannot load weights from a folder, .*: install 0\.16 or a newer release"):
        async with front(tmp_path):
            pass


async def test_vllm_itself_can_be_sampled_only_and_no_rollout_runs(tmp_path: Path, store: LightningStore) -> None:
    async with front(tmp_path) as served:
        grpo = GRPO(model_dir=served.model, model_server_url=served.direct)
        with pytest.raises(
            ModelServerError, match=r"can be sampled, but not trained: GET .*/weights answers HTTP 404.*grpo\.vllm --model DIR"
        ):
            await grpo.train(store, ["a task"])
        assert list(await store.query_rollouts()) == []


async def test_max_tokens_beyond_the_servers_context_are_refused_before_a_rollout_runs(tmp_path: Path, store: LightningStore) -> None:
    async with front(tmp_path, "--max-model-len", "512") as served:
        assert await check_context(served.session, served.url, 511) == 512
        grpo = GRPO(model_dir=served.model, model_server_url=served.url, sampling=Sampling(max_tokens=512))
        with pytest.raises(UsageError, match=r"max_tokens = 512: it must be less than 512, because the context of the model server"):
            await grpo.train(store, ["a task"])
        assert list(await store.query_rollouts()) == []


HERMES = "{%- if tools %}<tools></tools><tool_call>\n{}</tool_call>{%- endif %}"
TEMPLATES = {
    HERMES: "hermes",
    "{% if tools %}<tool_call>\n<function=name>{% endif %}": "qwen3_coder",
    "{% if tools %}<|python_tag|>{% endif %}": "llama3_json",
    "{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}": "mistral",
    "{% if tools %}<tool_call>name<arg_key>a</arg_key>{% endif %}": None,
    "{{ messages[0].content }}": None,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_tool_parser_is_the_one_of_the_chat_templates_format(template: str, tmp_path: Path) -> None:
    assert tool_parser(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert tool_parser(tmp_path) == TEMPLATES[template]
    (tmp_path / "chat_template.jinja").write_text(HERMES)
    assert tool_parser(tmp_path) == "hermes", "transformers prefers this file, too"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--logprobs-mode", "raw_logprobs"], "--logprobs-mode, but the front sets it itself"),
        (["--enforce-eager", "--logprobs_mode=raw_logprobs"], "--logprobs-mode, but the front sets it itself"),
        (["--logprobs-m", "raw_logprobs"], "--logprobs-mode, but the front sets it itself"),
        (["--generation-config", "auto"], "--generation-config, but the front sets it itself"),
        (["--logits-processors", "my.Banner"], "--logits-processors, but the trainer assumes samples of the model's own distribution"),
        (["--override-generation-config.top_k", "5"], "--override-generation-config, but the trainer assumes"),
        (["--override_gen.top_k=5"], "--override-generation-config, but the trainer assumes"),
        (["--config", "vllm.yaml"], "--config, but"),
        (["--quantization", "awq"], "--quantization, but quantised weights sample other tokens"),
        (["-qawq"], "-q, but quantised weights sample other tokens"),
    ],
)
def test_options_that_would_belie_what_the_front_says_of_its_answers_are_refused(tmp_path: Path, given: list[str], says: str) -> None:
    with pytest.raises(SettingsError, match=rf"vllm serve has {re.escape(says)}.*: leave it out"):
        make_front(options_of(tmp_path), given)
    assert "--gpu-memory-utilization" in make_front(options_of(tmp_path), ["--gpu-memory-utilization", "0.4"]).process.argv


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model.v3", "tokenizer.json"])
def test_the_tokenizer_with_which_vllm_constrains_every_chat_is_not_taken(tmp_path: Path, name: str) -> None:
    """vLLM's parser of Mistral's tool calls sets a grammar for each chat, with tools or without, if the tokenizer is Mistral's."""
    (tmp_path / name).touch()
    argv = make_front(options_of(tmp_path), ["--enable-auto-tool-choice", "--tool-call-parser", "mistral"]).process.argv
    assert ("--tokenizer-mode hf" in " ".join(argv)) == (name != "tokenizer.json")
    with pytest.raises(SettingsError, match="--tokenizer-mode, but the trainer has the model's own tokenizer"):
        make_front(options_of(tmp_path), ["--tokenizer-mode", "mistral"])


def options_of(model: Path) -> argparse.Namespace:
    return argparse.Namespace(
        model=str(model), weights=None, version="1", name="policy", seed=0, vllm=sys.executable, log="log", lora_rank=None, sleep=False
    )


@pytest.mark.parametrize(("set_to", "said"), [(None, "*, -strict_tools"), ("0", "*, -strict_tools"), ("True", "*"), ("1", "*")])
def test_vllm_enforces_no_strict_tools_and_the_front_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, set_to: str | None, said: str
) -> None:
    monkeypatch.delenv(STRICT, raising=False)
    if set_to is not None:
        monkeypatch.setenv(STRICT, set_to)
    front = make_front(options_of(tmp_path), [])
    assert heeded(front.heeds) == frozenset(said.split(", "))
    assert front.process.env.get(STRICT) == (set_to or "0")


def test_a_tool_parser_that_is_given_stays(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(HERMES)
    options = options_of(tmp_path)
    assert make_front(options, []).process.argv[-3:] == ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    given = ["--enable-auto-tool-choice", "--tool-call-parser", "xlam"]
    assert make_front(options, given).process.argv.count("--tool-call-parser") == 1
