"""A queue moved from SQLite to PostgreSQL continues unchanged."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from agl_otel.queue.client import AttemptUpdate
from agl_otel.queue.sqlite import table_names
from agl_otel.types import LLM, EnqueueRolloutRequest
from tests.command import run_command
from tests.local_queue import LocalQueue
from tests.postgres_server import Postgres


def agl(data_dir: Path, url: str, *command: str) -> subprocess.CompletedProcess[str]:
    arguments = ("data", *(command or ("move", "--queue", url)), "--data-dir", str(data_dir), "--json")
    return run_command(arguments, {**os.environ, "AGL_QUEUE_URL": url if command else ""})


async def known(queue: LocalQueue) -> list[object]:
    """Rollouts, attempts of one, a set of resources."""
    rollouts, attempts = await queue.client.query_rollouts(), await queue.client.query_attempts("ro-1")
    return [*rollouts.items, *attempts.items, await queue.client.get_resources("rs-1")]


async def test_rollouts_are_moved_to_postgresql_with_all_their_rows(postgres: Postgres, tmp_path: Path) -> None:
    requests = [EnqueueRolloutRequest(input={"n": n, "text": "tab\there, \\N and é"}, rollout_id=f"ro-{n}", mode="train") for n in range(5)]
    async with LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}") as old:
        await old.client.put_resources({"llm": LLM(endpoint="http://m", model="policy")}, resources_id="rs-1")
        await old.client.enqueue(requests)
        first, second = await old.client.claim(2, worker_id="w-1")
        await old.client.update_attempts([AttemptUpdate(rollout_id="ro-0", attempt_id=first.attempt.attempt_id, status="succeeded")])
        await old.client.take_sequence([("ro-1", 7, 0)])
        before = await known(old)
        counted = await old.client.statistics()
    url = postgres.new_schema()
    moved = agl(tmp_path, url)
    assert moved.returncode == 0, moved.stderr
    assert json.loads(moved.stdout)["queue"]["rollouts"] == 5
    async with LocalQueue(url) as new:
        assert await known(new) == before
        now = await new.client.statistics()
        assert {name: now[name] for name in now if name.startswith("total")} == {
            name: counted[name] for name in now if name.startswith("total")
        }
        assert now["rollouts_by_status"] == counted["rollouts_by_status"]
        (added,) = await new.client.enqueue([EnqueueRolloutRequest(input=6, rollout_id="ro-new")])
        assert [each.rollout_id for each in await new.client.claim(9)] == ["ro-2", "ro-3", "ro-4", added.rollout_id]
        token = AttemptUpdate(rollout_id="ro-1", attempt_id=second.attempt.attempt_id, status="succeeded", token=second.token)
        assert (await new.client.update_attempts([token]))[0].status == "succeeded"
        assert await new.client.take_sequence([("ro-1", 1, 0)]) == [8]
    again = agl(tmp_path, url)
    assert again.returncode and "nothing is overwritten" in again.stderr and "Traceback" not in again.stderr


async def test_both_engines_have_the_same_tables_columns_and_indexes(postgres: Postgres, tmp_path: Path) -> None:
    """What moves from one to the other is copied by the names of its columns."""
    url = postgres.new_schema()
    async with LocalQueue(url), LocalQueue(f"sqlite:///{tmp_path / 'queue.db'}"):
        pass
    name = url.rpartition("%3D")[2]
    columns = postgres.sql(f"SELECT table_name || '.' || column_name FROM information_schema.columns WHERE table_schema = '{name}'")
    indexes = postgres.sql(f"SELECT indexname FROM pg_indexes WHERE schemaname = '{name}'")
    with sqlite3.connect(tmp_path / "queue.db") as database:
        made = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")}
        here = {f"{table}.{row[1]}" for table in table_names(database) for row in database.execute(f"PRAGMA table_info({table})")}
    database.close()
    assert here == set(columns.split())
    assert made <= set(indexes.split())


@pytest.mark.full
async def test_a_stack_with_its_queue_on_postgresql_is_backed_up_and_restored(postgres: Postgres, tmp_path: Path) -> None:
    url, data, copy = postgres.new_schema(), tmp_path / "data", tmp_path / "copy"
    schema = url.rpartition("%3D")[2]
    data.mkdir()
    async with LocalQueue(url) as queue:
        await queue.client.put_resources({"llm": LLM(endpoint="http://m", model="policy")}, resources_id="rs-1")
        await queue.client.enqueue([EnqueueRolloutRequest(input=n, rollout_id=f"ro-{n}") for n in range(3)])
        await queue.client.claim(1, worker_id="w-1")
        await queue.client.take_sequence([("ro-1", 7, 0)])
        before = await known(queue)
        done = agl(data, url, "backup", str(copy))  # of a queue that serves
    assert done.returncode == 0 and json.loads(done.stdout)["queue"]["rows"]["rollouts"] == 3, done.stderr
    for target, why in (
        (url, "nothing is overwritten"),
        (postgres.new_schema(), f"the backup is of the schema '{schema}'"),
        ("", "name an empty PostgreSQL database"),
    ):
        refused = agl(tmp_path / "restored", target, "restore", str(copy))
        assert refused.returncode and why in refused.stderr and "Traceback" not in refused.stderr
        assert not (tmp_path / "restored").exists()
    postgres.sql("CREATE DATABASE elsewhere")
    postgres.sql(f"CREATE SCHEMA {schema}", database="elsewhere")
    other = postgres.url(schema, database="elsewhere")
    done = agl(tmp_path / "restored", other, "restore", str(copy))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "restored" / "queue.db").exists()
    async with LocalQueue(other) as queue:
        assert await known(queue) == before
        assert await queue.client.take_sequence([("ro-1", 1, 0)]) == [8]
        await queue.client.enqueue([EnqueueRolloutRequest(input=9, rollout_id="ro-later")])
        assert [each.rollout_id for each in await queue.client.claim(9)] == ["ro-1", "ro-2", "ro-later"]
