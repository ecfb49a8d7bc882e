"""The read-only endpoint with its clients: curl, clickhouse-connect, and ClickHouse's error codes."""

from __future__ import annotations

import asyncio
import subprocess

import aiohttp
import clickhouse_connect
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from agl_otel.errors import QueryError
from agl_otel.traces.reader import TraceReader

from .otlp import post_spans, span_request
from .stack import Stack


async def test_clickhouse_connect_queries_and_makes_frames(stack: Stack) -> None:
    await post_spans(stack, span_request([("ro-cc", "at-1")], spans=3), ack="stored")

    def use() -> None:
        client = clickhouse_connect.get_client(host="127.0.0.1", port=stack.settings.clickhouse_port)
        try:
            assert client.query("SELECT count() FROM otel_traces WHERE RolloutId = {r:String}", parameters={"r": "ro-cc"}).result_rows == [
                (3,)
            ]
            assert client.command("SELECT 1 + 1") == 2
            rows = client.query(
                "SELECT SpanAttributes, Timestamp, Events.Name FROM otel.otel_traces WHERE RolloutId = %(r)s", parameters={"r": "ro-cc"}
            )
            assert len(rows.result_rows) == 3
            assert isinstance(rows.result_rows[0][0], dict)
            with pytest.raises(DatabaseError, match="only reading is allowed"):
                client.command("DROP TABLE otel.otel_traces")
        finally:
            client.close()

    await asyncio.to_thread(use)


async def test_curl_gets_answers_by_get_and_post(stack: Stack) -> None:
    def curl(*args: str) -> str:
        return subprocess.run(["curl", "-sS", *args], capture_output=True, text=True, timeout=300, check=True).stdout

    assert await asyncio.to_thread(curl, f"{stack.sql}/ping") == "Ok.\n"
    assert await asyncio.to_thread(curl, f"{stack.sql}/") == "Ok.\n"
    assert await asyncio.to_thread(curl, f"{stack.sql}/?query=SELECT%201") == "1\n"
    assert await asyncio.to_thread(curl, f"{stack.sql}/", "--data-binary", "SELECT 1 AS a FORMAT JSONEachRow") == '{"a":1}\n'
    assert (
        await asyncio.to_thread(curl, f"{stack.sql}/?param_n=7&default_format=CSV", "--data-binary", "SELECT {n:UInt8}, 'x'") == '7,"x"\n'
    )


async def test_errors_carry_clickhouses_code(stack: Stack) -> None:
    async with aiohttp.ClientSession() as session:
        for sql, status, code in [
            ("SELECT * FROM nothere", 404, "60"),
            ("SELEC 1", 403, "497"),
            ("SELECT 1 +", 400, "62"),
            ("", 403, "497"),
        ]:
            async with session.post(stack.sql, data=sql) as response:
                assert (response.status, response.headers.get("X-ClickHouse-Exception-Code")) == (status, code), await response.text()


async def test_reader_passes_lists_strings_and_numbers_as_parameters(reader: TraceReader) -> None:
    nasty = "it's a\ttab, a \\ and a\nnewline"
    rows = await reader.query(
        "SELECT {s:String} AS s, {l:Array(String)} AS l, {n:UInt64} AS n, {f:Array(Float64)} AS f",
        params={"s": nasty, "l": [nasty, ""], "n": 2**63, "f": [0.5, 1e300]},
    )
    assert rows == [{"s": nasty, "l": [nasty, ""], "n": 2**63, "f": [0.5, 1e300]}]


async def test_reader_sends_ten_thousand_rollout_ids(reader: TraceReader) -> None:
    assert await reader.spans([f"ro-{n:026d}" for n in range(10_000)]) == []


async def test_reader_reports_what_clickhouse_refused(reader: TraceReader) -> None:
    with pytest.raises(QueryError, match="UNKNOWN_TABLE"):
        await reader.query("SELECT * FROM nothere")
