"""`agl-otel run` and `doctor` with a user's own command, and a real model server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_otel.settings import PORTS
from tests.model_server import ModelServer
from tests.system.stack_process import Command, naming, run, until

pytestmark = pytest.mark.full

AGENT = Path(__file__).parents[2] / "examples" / "first_light" / "agent.py"
KEY = "sk-a-real-persons-key"
FREE_PORTS = [argument for port in PORTS for argument in (f"--{port.replace('_', '-')}", "0")]


@pytest.fixture
def server(model_server: ModelServer) -> ModelServer:
    return model_server


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A running stack for tests that work with any stack; the content of its stack.json."""
    folder = tmp_path_factory.mktemp("stack")
    stack_file = folder / "data" / "stack.json"
    with Command("up", "--data-dir", str(folder / "data"), *FREE_PORTS, log=folder / "up.log", cwd=folder):
        until(stack_file.exists, "stack.json is written")
        yield json.loads(stack_file.read_text())


@pytest.fixture(scope="module")
def store(stack: dict[str, Any]) -> list[str]:
    """The option that names the stack."""
    return ["--store", stack["queue"]["address"]]


def environment(server: ModelServer | None = None) -> dict[str, str]:
    return {"OPENAI_BASE_URL": server.url if server else "http://127.0.0.1:9/v1", "OPENAI_API_KEY": KEY}


@pytest.mark.smoke
def test_run_shows_the_trace_of_an_unmodified_command(tmp_path: Path, server: ModelServer) -> None:
    data = tmp_path / "data"
    done = run("run", "--data-dir", str(data), "--", sys.executable, str(AGENT), "hello", cwd=tmp_path, env=environment(server))
    assert done.returncode == 0, done.stderr
    for part in ("succeeded", "verdict complete", "openai.chat", "8 + 7 tokens, weights 7"):
        assert part in done.stdout
    (where,) = re.findall(r"what it printed: `\S*agl-otel (rollouts show .*)`", " ".join(done.stdout.split()))
    assert "stdout:" in run(*shlex.split(where), cwd=tmp_path).stdout
    assert "agentlightning.llm" not in done.stdout, "the agent's span and the proxy's are one line"
    assert naming(data) == []
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}, "the model server gets the person's own key"
    stored = b"".join(path.read_bytes() for path in data.rglob("*") if path.is_file())
    assert KEY.encode() not in stored, "and nothing on disk does"


def test_a_stack_that_was_killed_records_where_it_is_started_again(tmp_path: Path, server: ModelServer) -> None:
    data = tmp_path / "data"
    with Command("up", "--data-dir", str(data), *FREE_PORTS, log=tmp_path / "up.log", cwd=tmp_path) as command:
        until((data / "stack.json").exists, "stack.json is written")
        command.process.kill()
        command.wait(300)
    until(lambda: naming(data) == [], "the services have ended")
    done = run("run", "--data-dir", str(data), "--", sys.executable, str(AGENT), "hello", cwd=tmp_path, env=environment(server))
    assert done.returncode == 0, done.stderr
    for part in ("verdict complete", "8 + 7 tokens, weights 7"):  # the proxy found the new collector, not the one that died
        assert part in done.stdout


def test_run_fills_the_command_from_the_task(tmp_path: Path, server: ModelServer, store: list[str]) -> None:
    command = [*store, "--", sys.executable, str(AGENT), "{q}"]
    done = run("run", "--json", "--task", '{"q": "42"}', *command, cwd=tmp_path, env=environment(server))
    shown: dict[str, Any] = json.loads(done.stdout)
    assert shown["rollout"]["input"] == {"q": "42"}
    assert any("42" in str(span["attributes"].get("gen_ai.input.messages")) for span in shown["spans"])
    runs = json.loads(run("runs", "ls", "--json", *store, cwd=tmp_path).stdout)
    assert [each["run_id"] for each in runs["items"]] == ["trials"], "however often an agent is tried, the list of runs has one line for it"


@pytest.mark.parametrize(
    ("timeout", "code", "words"),
    [
        ("60", "import sys; print('it broke', file=sys.stderr); sys.exit(1)", ["failed", "exit code 1", "it broke"]),
        (
            "3",
            "import signal; signal.pause()",
            ["failed", "ran (past the attempt's|longer than) 3 s"],
        ),  # reported by the runner or the queue, whichever checks first
    ],
)
def test_a_command_that_fails_or_hangs_is_reported_with_exit_code_1(
    tmp_path: Path, store: list[str], timeout: str, code: str, words: list[str]
) -> None:
    def total() -> int:
        return json.loads(run("rollouts", "--json", *store, cwd=tmp_path).stdout)["total"]

    before = total()
    done = run("run", "--timeout", timeout, *store, "--", sys.executable, "-c", code, cwd=tmp_path, env=environment())
    assert done.returncode == 1
    for word in words:
        assert re.search(word, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert total() == before + 1, "what happened is kept"


def test_a_cross_is_about_training_and_leaves_the_exit_code_to_the_command(tmp_path: Path, store: list[str]) -> None:
    for command, code in (("pass", 0), ("raise SystemExit(3)", 1)):
        done = run("run", *store, "--", sys.executable, "-c", command, cwd=tmp_path, env=environment())
        assert done.returncode == code and ("✗ " in done.stderr or code == 1), done.stderr
        assert ("the command ended well, so `run` exits with 0; what ✗ marks prevents training" in done.stderr) == (code == 0)


OTHERS = "import os, pathlib; pathlib.Path('ran').open('a').write(os.environ['AGL_TASK'] + ' ')"


@pytest.mark.parametrize("command", ["run", "doctor"])
def test_a_command_has_its_own_runner_which_runs_nothing_else(tmp_path: Path, server: ModelServer, store: list[str], command: str) -> None:
    tasks, ours = tmp_path / "tasks.jsonl", [sys.executable, "-c", "import pathlib; pathlib.Path('mine').touch(exist_ok=False)"]
    with Command("runner", *store, "--", sys.executable, "-c", OTHERS, log=tmp_path / "runner.log", cwd=tmp_path) as idle:
        tasks.write_text('"first"')
        run("rollouts", "enqueue", "--file", str(tasks), "--mode", "train", *store, cwd=tmp_path)
        until((tmp_path / "ran").exists, "the other runner serves")
        done = run(command, *store, "--task", '"ours"', "--", *ours, cwd=tmp_path, env=environment(server))
        assert done.returncode in (0, 3), done.stderr
        assert (tmp_path / "mine").exists() and (tmp_path / "ran").read_text() == '"first" '
        idle.process.terminate()
        idle.wait(300)
    (tmp_path / "mine").unlink()
    tasks.write_text('"innocent"')
    enqueued = run("rollouts", "enqueue", "--file", str(tasks), "--mode", "test", "--json", *store, cwd=tmp_path)
    run(command, *store, "--task", '"ours"', "--", *ours, cwd=tmp_path, env=environment(server))
    (waiting,) = json.loads(enqueued.stdout)["rollout_ids"]
    shown = json.loads(run("rollouts", "show", waiting, "--json", *store, cwd=tmp_path).stdout)
    assert shown["rollout"]["status"] == "queuing" and (tmp_path / "mine").exists()
    run("rollouts", "delete", waiting, "--yes", *store, cwd=tmp_path)


def test_run_changes_no_published_model_and_uses_the_stacks_own(tmp_path: Path, server: ModelServer) -> None:
    data = tmp_path / "data"
    env = {"AGL_UPSTREAM_URL": server.url, "AGL_UPSTREAM_KEY": KEY}
    ours = ["--data-dir", str(data), "--", sys.executable, str(AGENT), "hello"]
    with Command("up", "--data-dir", str(data), *FREE_PORTS, log=tmp_path / "up.log", cwd=tmp_path, env=env):
        until((data / "stack.json").exists, "stack.json is written")
        done = run("run", *ours, cwd=tmp_path)
        assert done.returncode == 0 and "8 + 7 tokens, weights 7" in done.stdout, done.stdout + done.stderr
        assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
        done = run("run", *ours, cwd=tmp_path, env=environment(server))
        assert done.returncode == 0, done.stderr
        latest = run("resources", "show", "--data-dir", str(data), cwd=tmp_path)
        assert "no resources yet" in latest.stderr, latest.stdout


DIES = """
import os, signal, sys
from opentelemetry import trace
print("line one\\nline two", flush=True)
print("\\x1b[31mto stderr", file=sys.stderr, flush=True)
with trace.get_tracer("a").start_as_current_span("work"):
    if os.fork() == 0:
        with trace.get_tracer("a").start_as_current_span("in the child"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.wait()
sys.exit(3)
"""


def test_missing_spans_are_shown_by_process_with_the_error_and_the_output(tmp_path: Path, store: list[str]) -> None:
    done = run("run", *store, "--", sys.executable, "-c", DIES, cwd=tmp_path, env=environment())
    missing = r"process \d+ \(.*python.*\):\s1\sspan\swas\sin\sflight\swhen\sit\sdied"
    assert re.search(missing, re.sub(r"\s+", " ", done.stdout)), done.stdout
    (newest,) = json.loads(run("rollouts", "--limit", "1", "--json", *store, cwd=tmp_path).stdout)["items"]
    rollout_id = newest["rollout_id"]
    shown = json.loads(run("rollouts", "show", rollout_id, "--json", *store, cwd=tmp_path).stdout)
    ((attempt_id, verdict),) = shown["verdicts"].items()
    assert (verdict["kind"], verdict["missing"]) == ("incomplete", 1)
    assert "exit code 3" in shown["attempts"][0]["error"]
    assert sorted((each["attempt_id"], each["stream"], each["text"]) for each in shown["output"]) == [
        (attempt_id, "stderr", "\x1b[31mto stderr\n"),
        (attempt_id, "stdout", "line one\nline two\n"),
    ]
    text = re.sub(r"\s+", " ", run("rollouts", "show", rollout_id, *store, cwd=tmp_path).stdout)  # the lines of a terminal are short
    for part in ("verdict incomplete", "in flight when it died", "exit code 3", "line one line two", r"\x1b[31mto stderr"):
        assert part in text, text


MANY_DIE = """
import os, signal, time
from opentelemetry import trace
for _ in range(6):
    if os.fork() == 0:
        trace.get_tracer("a").start_span("in the child")
        os.kill(os.getpid(), signal.SIGKILL)
    print(os.wait()[0])
"""


def test_doctor_and_traces_show_name_every_process_that_is_missing_something(tmp_path: Path, server: ModelServer, store: list[str]) -> None:
    done = run("doctor", *store, "--", sys.executable, "-c", MANY_DIE + "#" * 500, cwd=tmp_path, env=environment(server))
    assert done.returncode == 3, done.stderr
    (newest,) = json.loads(run("rollouts", "--limit", "1", "--json", *store, cwd=tmp_path).stdout)["items"]
    printed = json.loads(run("rollouts", "show", newest["rollout_id"], "--json", *store, cwd=tmp_path).stdout)
    died = {int(line) for each in printed["output"] if each["stream"] == "stdout" for line in each["text"].split()}
    missing = re.compile(r"process (\d+) \(.{20,120}\): 1 span was in flight when it died")
    lines = [found[1] for line in done.stdout.splitlines() if (found := missing.search(line))]
    assert len(died) == 6 and {int(pid) for pid in lines} == died, done.stdout
    tree = re.sub(r"\s+", " ", run("traces", "show", newest["rollout_id"], *store, cwd=tmp_path).stdout)
    assert {int(pid) for pid in missing.findall(tree)} == died, tree


ASKS = """
import json, os, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
"""


@pytest.mark.parametrize(
    "command",
    [["sh", "-c"], ["uv", "run", "agent"], pytest.param(["poetry", "run", "agent"], marks=pytest.mark.long), ["node", "agent.js"]],
    ids=" ".join,
)
def test_a_command_that_cannot_be_hooked_is_named_wherever_its_verdict_is_shown(
    tmp_path: Path, server: ModelServer, stack: dict[str, Any], store: list[str], command: list[str]
) -> None:
    """All calls of its model are recorded, so it is complete; a note says that its own spans were not counted."""
    (tmp_path / "asks.py").write_text(ASKS)
    asks = f"exec {sys.executable} {tmp_path / 'asks.py'}"
    if command[0] != "sh":  # stands for a launcher that may not be installed; it only must not be a Python of ours
        stub = tmp_path / "bin" / command[0]
        stub.parent.mkdir()
        stub.write_text(f"#!/bin/sh\n{asks}\n")
        stub.chmod(0o755)
    whole = [shutil.which("sh") or "sh", *command[1:], asks] if command[0] == "sh" else [str(tmp_path / "bin" / command[0]), *command[1:]]
    note = f"the agent's own spans are not counted: it does not run under the hook ({' '.join(whole)[:100]}"
    env = environment(server)

    def shows(*arguments: str) -> str:
        return re.sub(r"\s+", " ", run(*arguments, cwd=tmp_path, env=env).stdout)

    def printed(text: str) -> bool:  # a terminal also breaks lines within words
        return re.sub(r"\s", "", note)[:120] in re.sub(r"\s", "", text)

    seen = shows("run", *store, "--", *whole)
    assert "verdict complete" in seen and printed(seen), seen
    (newest,) = json.loads(run("rollouts", "--limit", "1", "--json", *store, cwd=tmp_path).stdout)["items"]
    for text in (shows("traces", "show", newest["rollout_id"], *store), shows("rollouts", "show", newest["rollout_id"], *store)):
        assert "verdict complete" in text and printed(text), text
    examined = shows("doctor", *store, "--", *whole)
    assert "everything it emitted is stored: complete" in examined and printed(examined), examined
    with urllib.request.urlopen(f"{stack['web']['address']}/v1/agl/rollouts/{newest['rollout_id']}/figures") as answer:
        (figures,) = json.loads(answer.read())
    assert figures["verdict"]["kind"] == "complete" and figures["verdict"]["notes"][0].startswith(note), figures


def test_a_missing_command_and_a_task_that_is_not_json_are_usage_errors(tmp_path: Path) -> None:
    for arguments in (["--", "no-such-program-here"], ["--task", "{", "--", "true"], ["--", "echo", "{missing}"]):
        done = run("run", *arguments, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
    assert not (tmp_path / ".agl" / "stack.json").exists()


def test_doctor_reports_no_problem_with_a_good_agent(tmp_path: Path, server: ModelServer) -> None:
    done = run("doctor", "--json", "--", sys.executable, str(AGENT), "hello", cwd=tmp_path, env=environment(server))
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["good"], report


def test_sampling_set_by_the_agent_is_shown(tmp_path: Path, server: ModelServer, store: list[str]) -> None:
    code = "import openai; ask = openai.OpenAI().chat.completions.create; said = [{'role': 'user', 'content': 'hi'}]; "
    code += "ask(model='m', messages=said); ask(model='m', messages=said, temperature=0.25, top_p=0.5)"
    done = run("doctor", "--json", *store, "--", sys.executable, "-c", code, cwd=tmp_path, env=environment(server))
    (found,) = [each for each in json.loads(done.stdout)["findings"] if "temperature" in each["what"]]
    assert found["state"] == "advice" and "1 of 2 calls sets temperature 0.25" in found["detail"]
    (latest, *_) = json.loads(run("rollouts", "--json", *store, cwd=tmp_path).stdout)["items"]
    shown = run("traces", "show", latest["rollout_id"], *store, cwd=tmp_path).stdout
    assert shown.count("own temperature 0.25") == 1, shown


RAISES = "raise ValueError('no number in the answer: ' + 300 * 'x')"
ASKS_ONCE = """
import openai
ask, said = openai.OpenAI(max_retries=0).chat.completions.create, [{'role': 'user', 'content': 'hi'}]
print(ask(model='m', messages=said).choices[0].message.content)
"""
GRADE = "def grade(task, answer):\n    return float(answer == 'ih:0')\n\ndef nothing(task, answer):\n    return None\n"
REPORTED: dict[str, tuple[list[str], list[str], str]] = {
    "it raises": (
        [],
        ["-c", ASKS_ONCE + RAISES],
        "✗ the command ended well: python ended with exit code 1: ValueError: no number in the answer: " + 300 * "x",
    ),
    "it takes too long": (
        ["--timeout", "3"],
        ["-c", "import signal; signal.pause()"],
        "✗ the command ended well: the agent ran past the attempt's 3 s\n    give it longer: --timeout SECONDS",
    ),
    "it asks nothing": (
        [],
        ["-c", "print(1)"],
        "✗ its model calls pass through the proxy: none\n    the agent must take its model's address",
    ),
    "it has no hook": ([], ["-I", "-c", "print(1)"], "✗ it runs under the hook: it was loaded in no process of "),
    "it speaks Responses": (
        [],
        ["-c", "import openai; openai.OpenAI(max_retries=0).responses.create(model='m', input='hi')"],
        "✗ the model answers its calls: 0 of 1: the model server does not have the protocol of the call, Responses (of OpenAI)",
    ),
    "it is greedy": ([], ["-c", ASKS_ONCE + "ask(model='m', messages=said, temperature=0)"], "! training takes its calls: 1 of 2 calls"),
    "its grader scores it": (["--grader", "grade.py:grade"], ["-c", ASKS_ONCE], "✓ it has a reward: 1, by the grader"),
    "its grader gives none": (["--grader", "grade.py:nothing"], ["-c", ASKS_ONCE], "✗ it has a reward: none: the grader returned None"),
}


@pytest.mark.parametrize("case", REPORTED)
def test_doctor_names_one_cause_and_its_remedy(tmp_path: Path, server: ModelServer, store: list[str], case: str) -> None:
    options, arguments, text = REPORTED[case]
    (tmp_path / "grade.py").write_text(GRADE)
    done = run("doctor", *store, *options, "--", sys.executable, *arguments, cwd=tmp_path, env=environment(server))
    crosses = [line for line in done.stdout.splitlines() if line.startswith("✗")]
    assert text in done.stdout and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert (done.returncode, len(crosses)) == ((3, 1) if text[0] == "✗" else (0, 0)), done.stdout


def test_doctor_does_not_start_an_agent_whose_model_server_is_away(tmp_path: Path) -> None:
    done = run("doctor", "--", sys.executable, "-c", "open('ran', 'w')", cwd=tmp_path, env=environment())
    assert done.returncode == 3 and not (tmp_path / "ran").exists() and not (tmp_path / ".agl").exists()
    refused = "✗ the model server can be reached: http://127.0.0.1:9/v1 cannot be reached: Connection refused: "
    assert refused in done.stdout and "correct its address (OPENAI_BASE_URL)" in done.stdout
    assert "– the command ended well: not started (first: the model server can be reached)" in done.stdout


def test_run_tells_what_is_wrong_and_which_endpoint_gets_nothing_any_more(tmp_path: Path, server: ModelServer, store: list[str]) -> None:
    env = {**environment(server), "OTEL_EXPORTER_OTLP_ENDPOINT": "http://vendor.example:4318"}
    done = run("run", *store, "--", sys.executable, "-c", "print(1)", cwd=tmp_path, env=env)
    assert done.returncode == 0 and "✗ its model calls pass through the proxy: none" in done.stderr, done.stderr
    assert "AGL_FORWARD_OTLP=http://vendor.example:4318" in done.stderr
    done = run("run", *store, "--", sys.executable, str(AGENT), "hello", cwd=tmp_path, env=environment(server))
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize(("failing", "words"), [(True, "500"), (False, "cannot be reached")])
def test_doctor_distinguishes_a_failing_model_server_from_an_unreachable_one(
    tmp_path: Path, server: ModelServer, store: list[str], failing: bool, words: str
) -> None:
    server.status = 500
    command = [*store, "--", sys.executable, str(AGENT), "hello"]
    done = run("doctor", "--json", *command, cwd=tmp_path, env=environment(server if failing else None))
    assert done.returncode == 3
    report = json.loads(done.stdout)
    assert words in json.dumps(report["findings"]), report
