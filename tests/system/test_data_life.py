"""Deleted and expired data is gone: all bytes of the data directory and all tables of a stack that ran real agents are searched."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import time
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agl_otel.settings import PORTS
from agl_otel.traces.opened import open_store
from tests.clickhouse_files import held
from tests.model_server import ModelServer
from tests.system.stack_process import Command, run, until

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
JANE, JOHN = "jane-doe-4711-of-elm-street", "john-roe-0815-of-oak-street"
AGENT = """
import logging, sys
import openai
from opentelemetry import metrics, trace

who = sys.argv[1]
print("asked by", who)
print("to stderr,", who, file=sys.stderr)
with trace.get_tracer("agent").start_as_current_span(f"look up {who}") as span:
    span.set_attribute("who", who)
    span.add_event(f"found {who}", {"who": who})
    logging.getLogger("agent").warning("a log of %s", who)
    metrics.get_meter("agent").create_counter("looked.up").add(1, {"who": who})
    openai.OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": f"I am {who}"}])
sys.exit(f"{who} makes it fail" if "fail" in sys.argv[2] else 0)
"""
JOB = """
[agent]
function = "{folder}/functions.py:answer"

[data]
train = "{folder}/tasks.jsonl"
val = "{folder}/tasks.jsonl"

[resources]
prompt_template = "be kind"
main_llm = {{ resource_type = "llm", endpoint = "{url}", model = "m" }}

[algorithm]
name = "{name}"
{options}
"""
CHOICES = 'choices = { prompt_template = ["be kind", "be short"] }'
FUNCTIONS = """
import agl_otel as agl

async def answer(task, prompt_template: agl.PromptTemplate, llm: agl.LLM) -> float:
    print("a function agent asked by", task["who"])
    return 0.5
"""


@dataclass
class Lived:
    """A running stack and its folders."""

    data: Path
    folder: Path
    env: dict[str, str]

    @property
    def stack(self) -> dict[str, str]:
        told = json.loads((self.data / "stack.json").read_text())
        return {name: entry["address"] for name, entry in told.items() if isinstance(entry, dict)}

    def sql(self, query: str) -> list[dict[str, Any]]:
        """Return the rows of a query at the collector's endpoint."""
        with urllib.request.urlopen(f"{self.stack['web']}/v1/agl/describe", timeout=60) as answer:
            address = json.load(answer)["clickhouse"]
        with urllib.request.urlopen(address, data=f"{query} FORMAT JSON".encode(), timeout=120) as answer:
            return json.load(answer)["data"]

    def agl(self, *arguments: str) -> str:
        done = run(*arguments, "--data-dir", str(self.data), cwd=self.folder, env=self.env)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
        return done.stdout + done.stderr

    def of(self, who: str) -> list[str]:
        listed = json.loads(self.agl("rollouts", "ls", "--input", who, "--limit", "1000", "--json").splitlines()[-1])
        return [item["rollout_id"] for item in listed["items"]]

    def play(self, *calls: tuple[str, str]) -> None:
        """Run one rollout of a command agent for each (who, how)."""
        tasks = self.folder / "command.jsonl"
        lines = [{"input": {"who": who, "how": how}, "metadata": {"run": f"of {who}", "name": who}} for who, how in calls]
        tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.agl("rollouts", "enqueue", "--file", str(tasks))
        command = [sys.executable, str(self.folder / "agent.py"), "{who}", "{how}"]
        most = ("--max-rollouts", str(len(calls)))
        with Command(
            "runner", "--store", self.stack["queue"], *most, "--", *command, log=self.folder / "runner.log", env=self.env
        ) as runner:
            assert runner.wait(300) == 0, runner.output

    def train(self, name: str, url: str, options: str, *tasks: str) -> None:
        """Run a job; its run folder is in the data directory."""
        (self.folder / "tasks.jsonl").write_text("".join(json.dumps({"who": who}) + "\n" for who in tasks))
        job = self.folder / f"{name}.toml"
        job.write_text(JOB.format(folder=self.folder, url=url, name=name, options=options))
        self.agl("train", str(job), "--run-dir", str(self.data / "runs" / name))


@contextlib.contextmanager
def lives(folder: Path, url: str, **more: str) -> Generator[Lived]:
    """Run a stack on the data directory in `folder` for the block."""
    data = folder / "data"
    free = [argument for port in PORTS for argument in (f"--{port.replace('_', '-')}", "0")]
    env = {"AGL_UPSTREAM_URL": url, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "AGL_RETENTION_DAYS": "0", **more}
    with Command("up", "--data-dir", str(data), *free, log=folder / "up.log", cwd=folder, env=env) as command:
        until(lambda: (data / "stack.json").exists() or command.process.poll() is not None, "the stack runs")
        assert command.process.poll() is None, command.output
        yield Lived(data, folder, env)


def mentions_of(lived: Lived, who: str) -> dict[str, int]:
    """Return {table of either store: number of rows that contain `who` anywhere}."""
    found: dict[str, int] = {}
    tables = lived.sql("SELECT name FROM system.tables WHERE database = 'otel' AND engine LIKE '%MergeTree'")
    for table in (row["name"] for row in tables):
        [row] = lived.sql(f"SELECT count() AS n FROM otel.{table} WHERE position(toString(tuple(*)), '{who}') > 0")
        found |= {table: int(row["n"])} if int(row["n"]) else {}
    with contextlib.closing(sqlite3.connect(f"file:{lived.data / 'queue.db'}?mode=ro", uri=True)) as queue:
        for (table,) in queue.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            rows = queue.execute(f'SELECT * FROM "{table}"').fetchall()
            found |= {table: count} if (count := sum(who in str(row) for row in rows)) else {}
    return found


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path


def played(lived: Lived, url: str) -> dict[str, list[str]]:
    """Run rollouts of two people, of each kind, to their end; return {who: ids}."""
    lived.play(*((who, how) for who in (JANE, JOHN) for how in ("well", "fails")))
    lived.train("random_search", url, CHOICES, JANE, JOHN)
    ids = {who: lived.of(who) for who in (JANE, JOHN)}
    (lived.data / "refused").mkdir(exist_ok=True)
    for who, place in ((JANE, 1), (JOHN, 2)):  # a dead letter of each: a request that ClickHouse rejected
        about = {"reason": f"of {who}", "rollouts": [ids[who][0]]}
        stem = lived.data / "refused" / f"{int(time.time() * 1000)}-{place}-traces"
        stem.with_suffix(".json").write_text(json.dumps(about))
        stem.with_suffix(".otlp").write_text(who)
    return ids


def test_deleted_data_is_in_no_table_and_no_file_after_waiting(files: Path, model_server: ModelServer) -> None:
    with lives(files, model_server.url) as lived:
        ids = played(lived, model_server.url)
        assert {who: len(found) for who, found in ids.items()} == {JANE: 4, JOHN: 4}
        before = mentions_of(lived, JOHN)
        assert {"otel_traces", "otel_logs", "services", "inputs", "attempts", "run_tallies"} <= set(mentions_of(lived, JANE)), (
            "they are found"
        )
        assert {"traces", "wal", "refused", "runs"} <= {name.partition("/")[0] for name in held(lived.data, JANE)}
        lived.agl("rollouts", "delete", *ids[JANE], "--yes")
        assert mentions_of(lived, JANE) == {}
        left = {name.partition("/")[0] for name in held(lived.data, JANE)}
        assert left <= {"traces", "wal", "queue.db", "queue.db-wal"}, "what needs no ids waits"
        lived.agl("rollouts", "delete", *ids[JANE], "--yes", "--wait")
        assert held(lived.data, JANE) == {}
        assert (mentions_of(lived, JOHN), lived.of(JOHN)) == (before, ids[JOHN]), "what is another's is as it was"
        assert "refused" in {name.partition("/")[0] for name in held(lived.data, JOHN)}
    assert held(lived.data, JANE) == {}


AGED_DAYS = 3


def age(data: Path, ids: list[str], who: str) -> None:
    """Make a stopped stack's data of these rollouts three days older: only then does a retention of days differ from none."""
    engine = open_store(f"chdb:///{data / 'traces'}")
    of = {"rollouts": ids}
    for table, column in (("otel_traces", "ReceivedAt"), ("otel_logs", "ReceivedAt")):
        engine.command(f"ALTER TABLE otel.{table} MODIFY SETTING old_parts_lifetime = 0")  # otherwise files stay for eight minutes
        chosen, then = "RolloutId IN {rollouts:Array(String)}", f"{column} - INTERVAL {AGED_DAYS} DAY"
        engine.command(f"INSERT INTO otel.{table} SELECT * REPLACE ({then} AS {column}) FROM otel.{table} WHERE {chosen}", of)
        young = f"{chosen} AND {column} > now() - INTERVAL 1 DAY"
        engine.command(f"ALTER TABLE otel.{table} DELETE WHERE {young} SETTINGS mutations_sync = 2", of)
    engine.command("ALTER TABLE otel.services MODIFY SETTING old_parts_lifetime = 0")
    engine.close()
    with contextlib.closing(sqlite3.connect(data / "queue.db")) as queue, queue:
        queue.execute("PRAGMA secure_delete = ON")  # like the queue itself: overwritten data leaves no copy
        marks = ", ".join("?" * len(ids))
        queue.execute(f"UPDATE rollouts SET end_time = end_time - {AGED_DAYS * 86400} WHERE rollout_id IN ({marks})", ids)
    for path in list((data / "refused").iterdir()):
        if who in path.read_text():
            received, rest = path.name.split("-", 1)
            path.rename(path.with_name(f"{int(received) - AGED_DAYS * 86400_000}-{rest}"))


def test_data_past_the_retention_is_deleted_everywhere_and_the_rest_stays(files: Path, model_server: ModelServer) -> None:
    with lives(files, model_server.url) as lived:
        ids = played(lived, model_server.url)
        before = mentions_of(lived, JOHN)
    age(lived.data, ids[JANE], JANE)
    with lives(files, model_server.url, AGL_RETENTION_DAYS="1") as lived:
        until(lambda: set(mentions_of(lived, JANE)) <= {"services"}, "the tables hold nothing of them")
        swept = urllib.request.Request(f"{lived.stack['collector']}/maintain", data=b'{"since": 0}', method="POST")
        urllib.request.urlopen(swept, timeout=300).close()
        purged = urllib.request.Request(f"{lived.stack['collector']}/purge", method="POST")
        urllib.request.urlopen(purged, timeout=300).close()
        assert mentions_of(lived, JANE) == {}
        assert lived.sql("SELECT DISTINCT RolloutId FROM otel.rollout_summary_states WHERE RolloutId IN " + str(tuple(ids[JANE]))) == []
        run_folder = lived.data / "runs" / "random_search"

        def left() -> dict[str, int]:
            return {name: count for name, count in held(lived.data, JANE).items() if not (lived.data / name).is_relative_to(run_folder)}

        try:
            until(lambda: not left(), "nor does a file")
        except AssertionError as error:
            raise AssertionError(f"{error}: {left()}") from None
        assert (mentions_of(lived, JOHN), lived.of(JOHN)) == (before, ids[JOHN]), "what is younger is as it was"
        assert "refused" in {name.partition("/")[0] for name in held(lived.data, JOHN)}
