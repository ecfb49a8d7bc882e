"""Runs the commands of the docs: each command of a page, in a block or with an option in the text, runs on one stack, or NOT_RUN has the
reason why it does not.

Commands that ask before they remove something get "y". tests/unit/test_docs.py checks the names and options of all commands.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import agl_otel as agl
from agl_otel.adapters.otlp_masking import load_masker
from agl_otel.jobs.job import Job
from agl_otel_hook import conventions
from tests.system.stack_process import ENVIRONMENT, Command, run, until
from tests.unit.test_docs import PAGES, ROOT, commands_in

pytestmark = pytest.mark.full
MY_AGENT: Final = "import sys\nimport agl_otel as agl\n\nagl.emit_reward(1.0)\nprint('answer to', *sys.argv[1:])\n"
NOT_RUN: Final = {
    r"agl-otel (up|store)\b": "it stays: the module's own stack is one",
    r"agl-otel demo --stay": "it stays until Ctrl+C, and is the demo otherwise",
    r"agl-otel top$": "a live screen that stays: tests/contract/cli and tests/unit/cli draw it",
    r"agl-otel train\b": "it needs a model or a page's own files: test_examples.py, test_sft_job.py, test_verl.py …",
    r"agl-otel (runs|traces steps)\b": "it needs a run: tests/contract/store/test_runs_command.py and test_steps.py",
    r"agl-otel export\b": "it needs model calls with token ids: tests/contract/store/test_export.py",
    r"agl-otel backtest\b": "it needs a model, and attempts of another: tests/system/test_demo.py",
    r"agl-otel replay\b": "it needs a model, and attempts with tools: tests/contract/store/test_replay.py",
    r"agl-otel runner\b": "it stays: tests/system/test_runner.py plays runners",
    r"agl-otel data move\b": "it needs a stopped stack and servers: test_backup.py and test_move.py in tests/contract",
    r"agl-otel .*--data-dir \.agl/demo-": "of a demo that was played: tests/system/test_demo.py",
    r"agl-otel run -- python agent\.py": "of an example or a skill's reader, with a model: tests/system/test_examples.py",
    r"agl-otel feedback ro-": "of a rollout of the reader's: tests/contract/store/test_feedback.py",
    r"agl-otel improve\b": "it needs a model, and users: tests/system/test_improve.py",
    r"agl-otel judge\b": "it needs a model: tests/contract/store/test_judge.py plays the walk",
    r"agl-otel select\b": "it needs attempts: tests/contract/store/test_selections.py plays the walk",
    r"agl-otel rubrics (show|put)\b": "of a rubric of the reader's: tests/contract/store/test_rubrics_command.py",
    r"agl-otel token\b": "it needs a stack with a token: tests/unit/net/test_auth.py",
    r"agl-otel run -- pytest evals": "of a reader's tests: tests/system/test_injection.py runs pytest",
    r"agl-otel doctor -- python agent\.py": "the same command with my_agent.py is run",
}
"""{pattern of a command in the docs: why it is not run here}; an example's own README is run by the test of the example."""
WITHOUT_A_STACK: Final = {"demo.md": "the demo has a data directory of its own, and has ended"}
"""{page whose commands run in a folder without a stack: why}."""
OTHERS_NOT_RUN: Final = {
    r"make (demo|test|setup|lint|chaos|chaos-queue|proof|wheel)\b": "CI runs these, or they take an hour; that they exist: test_docs.py",
    r"cp deploy/compose/\.env\.example|docker compose|kubectl |helm ": "needs Docker or a cluster: test_deploy.py checks",
    r"AGL_UNIDENTIFIED=adopt agl-otel up$": "it stays: tests/improve_world.py starts it so",
    r"AGL_UPSTREAM_URL=\S+ agl-otel up$": "it stays, and its model server is the reader's",
    r"jaeger --config": "needs a Jaeger: tests/system/test_jaeger.py starts it with this file",
    r"python -m bench\.scale plan": "tests/unit/bench plays it",
    r"uvx --find-links dist": "the demo from the wheel: `make wheel` tries the wheels, test_demo.py the demo",
    r"pip install": "the package itself: tests/try_wheel.py tries the wheel; others' from where a test has its own environment",
    r"python -(c|m) .*(make_policy|grpo\.server)|OPENAI_BASE_URL=\S+ \S+ agl-otel run": "the server stays: tests/contract/algorithms",
    r"vllm serve models/mine": "it needs vLLM; test_model_export.py in tests/contract opens an exported folder with our server",
    r"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=\S+ vllm serve": "it needs vllm: test_engine_spans.py in tests/contract/store has such an engine",
    r"OTEL_EXPORTER_OTLP_ENDPOINT=\S+ python send\.py": "of docs/otlp.md: a test below runs it on this stack's ports",
    r"curl -s -d .*/(pause|resume)$": "of a proxy at its usual port: tests/contract/proxy/test_pool.py",
    r"curl -s -H .* http://127\.0\.0\.1:4748/v1/agl/resources": "of a stack at its usual ports: tests/contract/web/test_rest.py",
    r"sha256sum hard\.jsonl": "of docs/selection.md, whose walk tests/contract/store/test_selections.py plays",
    r"export AGL_STORE=": "of docs/three-terminals.md, where the stack is at its usual port",
    r"export AGL_CLICKHOUSE_URL=": "of docs/clickhouse.md, where the server is the reader's: tests/contract/collector/test_server.py",
    r"curl -H \"Authorization: Bearer \$AGL_TOKEN\"": "of docs/traces.md: a test below runs it on this stack's port",
    r"python (optimise|runner|algorithm)\.py": "of an example: test_prompt_search.py and test_tutorial.py play it",
}
"""The same for commands that are not ours."""
OTHER_LANGUAGES: Final = {
    "text": "what a command prints or says of itself",
    "py": "docs/recipes.md: of agents that `make matrix` plays in environments of their own",
    "sql": "docs/tables.md: written from the schema, which test_docs.py holds it against",
    "json": "docs/model-servers.md: what a model server answers; tests/model_server.py answers so",
    "yaml": "docs/masking.md, docs/otlp.md: of a Collector with parts that our build has not",
    "go": "docs/otlp.md: of an agent with OpenTelemetry's Go SDK; the names are those of docs/semconv.md",
    "js": "docs/otlp.md: the same with the Node.js SDK",
    "protobuf": "docs/grpc.md: written from the .proto",
}
"""Languages of blocks that are not run; toml is parsed, python and commands are run or listed with a reason."""
PYTHON_NOT_RUN: Final = {
    "self._informative_groups": "a method of GRPO, which a test holds to the code",
    "reply = OpenAI()": "my_agent.py of docs/three-terminals.md: needs a model server",
    "await store.": "a piece of a program with a store: tests/system/test_tutorial.py plays the whole",
    "Trainer(algorithm=VERL": "needs Ray and verl: tests/system/test_verl.py",
    "algorithm=agl.APO(": "needs models: cut from optimise.py, which tests/system/test_prompt_search.py plays",
    "asyncio.run(main(sys.argv": "reward_later.py of docs/late-rewards.md: a test below runs it on a stack",
    "OTLPSpanExporter()": "send.py of docs/otlp.md: a test below runs it on a stack",
    "Trainer(algorithm=grpo": "needs a model server and torch: tests/system/test_sft_trainer.py",
}


def shown() -> list[tuple[str, str]]:
    """Return (page, command) of all pages except the reference and the pages of examples, which the examples' tests run."""
    pages = [page for page in PAGES if page.name != "cli.md" and page.parent.parent.name != "examples" and page.parent.name != "examples"]
    return [
        (page.name, typed.split("  #")[0].strip())
        for page in pages
        for typed in (*commands_in(page.read_text()), *commands_in_prose(page.read_text()))
    ]


def commands_in_prose(text: str) -> list[str]:
    """The commands with an option that stand between backquotes, without those that leave something to the reader."""
    found = re.findall(r"(?<!`)`(agl-otel [^`]*? --[^`]*)`", text)
    return [each for each in found if "…" not in each and not re.search(r"\b[A-Z]{2,}", each)]


def reason(typed: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, typed)), None)


RUN: Final = [*dict.fromkeys((typed, page not in WITHOUT_A_STACK) for page, typed in shown() if reason(typed) is None)]
"""(command, whether a stack runs in the reader's folder)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The reader's folder: my_agent.py, tasks.jsonl, and a stack that runs in its `.agl`."""
    place = tmp_path_factory.mktemp("reader")
    (place / "my_agent.py").write_text(MY_AGENT)
    (place / "tasks.jsonl").write_text('{"question": "What is 2 + 2?"}\n')
    ports = [word for name in ("queue", "otlp-grpc", "otlp-http", "clickhouse", "proxy", "web") for word in (f"--{name}-port", "0")]
    with Command("up", *ports, log=place / "up.log", cwd=place) as stack:
        until(lambda: (place / ".agl" / "stack.json").exists() or stack.process.poll() is not None, "the stack runs")
        assert stack.process.poll() is None, stack.output
        yield place


@pytest.mark.parametrize(("typed", "on_a_stack"), RUN)
def test_a_command_of_the_docs_runs(typed: str, on_a_stack: bool, folder: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        typed, shell=True, cwd=folder if on_a_stack else tmp_path, env={**ENVIRONMENT, "PATH": path}, input="y\n" * 3, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    fine = (0, 3) if typed.startswith("agl-otel doctor") else (0,)  # 3: doctor reports something missing, here a model call
    assert done.returncode in fine and "Traceback" not in done.stderr, f"{typed}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"


def blocks() -> list[tuple[str, str, str]]:
    """Return (page, language, block) of the pages whose commands shown() returns."""
    pages = [page for page in PAGES if page.parent.parent.name != "examples" and page.parent.name != "examples"]
    return [
        (page.name, language, block)
        for page in pages
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    ]


def test_other_commands_of_the_docs_have_a_reason_not_to_run() -> None:
    typed: list[str] = []
    for _, language, block in blocks():
        if language in ("console", "bash", "sh", ""):
            lines = block.replace("\\\n", " ").splitlines()
            prompted = any(line.startswith("$ ") for line in lines)
            typed += [line.removeprefix("$ ") for line in lines if line.strip() and (line.startswith("$ ") or not prompted)]
    others = [each for each in typed if not each.startswith("agl-otel ")]
    assert not [each for each in others if not any(re.match(pattern, each) for pattern in OTHERS_NOT_RUN)]
    assert not [pattern for pattern in OTHERS_NOT_RUN if not any(re.match(pattern, each) for each in others)]


def test_blocks_of_other_languages_are_parsed_or_have_a_reason_not_to_be(tmp_path: Path) -> None:
    known = {"console", "bash", "sh", "", "python", "toml", *OTHER_LANGUAGES}
    found = {language for _, language, _ in blocks()}
    assert {*OTHER_LANGUAGES} <= found <= known
    job = tomllib.loads((ROOT / "examples" / "first_light" / "job.toml").read_text())
    path = tmp_path / "block.toml"
    for page, language, block in blocks():
        if language != "toml":
            continue
        given = tomllib.loads(block)
        if "rule" in given:
            path.write_text(block)
            assert load_masker(str(path)) is not None, page
            continue
        whole = {"agent": job["agent"], "data": job["data"], **given}  # part of a job: its other tables are those of an example
        Job.model_validate(whole)


def test_every_reason_applies_to_a_command() -> None:
    typed = [each for _, each in shown()]
    assert not [pattern for pattern in NOT_RUN if not any(re.match(pattern, each) for each in typed)]
    assert len(RUN) >= 10, RUN
    assert not WITHOUT_A_STACK.keys() - {page for page, _ in shown()}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_of_the_docs_run(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        if not any(piece in block for piece in PYTHON_NOT_RUN):
            names: dict[str, Any] = {"__name__": "docs"}
            exec(compile(block, page.name, "exec", dont_inherit=True), names)


def test_the_docs_program_that_reads_traces_works_on_a_stack(folder: Path) -> None:
    (block,) = [
        block
        for block in re.findall(
            r"^```python\n(.*?)^```", (ROOT / "skills/agl-otel/patterns.md").read_text(), flags=re.MULTILINE | re.DOTALL
        )
        if "async def read(" in block
    ]
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(block, "patterns.md", "exec", dont_inherit=True), names)
    asyncio.run(names["read"](json.loads((folder / ".agl" / "stack.json").read_text())["queue"]["address"]))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_docs_script_that_sends_otlp_is_read_back(protocol: str, folder: Path, tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "otlp.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "send.py").write_text(script.replace("proto.http", f"proto.{protocol}"))
    until(lambda: "Ctrl+C" in (folder / "up.log").read_text(), "up has printed the endpoints, which it does after stack.json is there")
    (endpoint,) = re.findall(rf"otlp {protocol} +(\S+)", (folder / "up.log").read_text())
    headers = f"agl-rollout-id=ro-by-{protocol},agl-ack=stored"
    env = {**ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_HEADERS": headers}
    sent = subprocess.run([sys.executable, "send.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True)
    query = f"SELECT RolloutId, SpanName, ServiceName FROM otel_traces WHERE TraceId = '{sent.stdout.strip()}'"
    shown = run("traces", "sql", query, "--json", cwd=folder)
    assert json.loads(shown.stdout) == [{"RolloutId": f"ro-by-{protocol}", "SpanName": "answer", "ServiceName": "my-fleet"}], sent.stderr


def test_the_docs_ways_to_read_by_sql_work_on_a_stack(folder: Path) -> None:
    page = (ROOT / "docs" / "traces.md").read_text()
    (block,) = [each for each in re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL) if "def rows(" in each]
    address = json.loads((folder / ".agl" / "stack.json").read_text())["web"]["address"]
    described = json.loads(urllib.request.urlopen(f"{address}/v1/agl/describe").read())
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(block, "traces.md", "exec", dont_inherit=True), names)
    assert names["rows"]("SELECT 1 AS n", described["clickhouse"]) == [{"n": 1}]
    (command,) = re.findall(r"^\$ (curl (?:.*\\\n)*.*)$", page, flags=re.MULTILINE)
    typed = command.replace("http://127.0.0.1:8123", described["clickhouse"])
    done = subprocess.run(typed, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "Exception" not in done.stdout, done.stdout + done.stderr
    for sql in re.findall(r"`(SELECT [^`]*FROM otel_traces[^`]*)`", page):
        names["rows"](sql, described["clickhouse"])


def test_the_docs_script_that_rewards_later_is_read_as_the_page_says(folder: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "late-rewards.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "reward_later.py").write_text(script)
    address = json.loads((folder / ".agl" / "stack.json").read_text())["queue"]["address"]

    async def play() -> list[float | None]:
        async with agl.LightningStoreClient(address) as store:
            begun = await store.start_rollout(input="how many?")
            ids = {"rollout_id": begun.rollout_id, "attempt_id": begun.attempt.attempt_id}

            def add(value: float, number: int, **attributes: bool) -> Any:
                made = agl.emit_reward(value, propagate=False, attributes=attributes)
                return store.add_span(agl.Span.from_core_fields(made, **ids, sequence_id=number))

            await add(1.0, await store.get_next_span_sequence_id(**ids))
            await store.update_attempt(*ids.values(), status="succeeded")
            found: list[float | None] = []
            for value in ("0.25", "0.75"):
                command = [sys.executable, "reward_later.py", begun.rollout_id, value]
                await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, env={**ENVIRONMENT, "AGL_STORE": address}, check=True)
                found.append(agl.find_final_reward(await store.query_spans(begun.rollout_id)))
            await add(0.5, 1, **{conventions.REWARD_GIVEN: True})
            return [*found, agl.find_final_reward(await store.query_spans(begun.rollout_id))]

    assert asyncio.run(play()) == [0.25, 0.75, 0.5]
