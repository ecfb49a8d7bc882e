"""No query that a client may send writes, reads a file or a URL, or changes data."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agl_otel.collector.sqlhttp import SqlEndpoint
from agl_otel.errors import AglError
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.migrate import migrate

SECRET = "the-canary-sings"

# FILE, OUT and PORT are filled in. Every one must fail, or answer without the secret, a new file, a connection or a changed row.
HOSTILE = [
    # writing files
    "SELECT 1 INTO OUTFILE 'OUT'",
    "SELECT 1 INTO OUTFILE 'OUT' FORMAT CSV",
    "select 1 into/**/outfile 'OUT'",
    "SELECT 1 INTO\nOUTFILE 'OUT' AND STDOUT",
    "SELECT 1 iNtO oUtFiLe 'OUT' TRUNCATE",
    "EXPLAIN SELECT 1 INTO OUTFILE 'OUT'",
    "EXPLAIN AST SELECT 1 INTO OUTFILE 'OUT'",
    "SHOW TABLES INTO OUTFILE 'OUT'",
    "SHOW DATABASES INTO OUTFILE 'OUT'",
    "DESCRIBE TABLE otel_traces INTO OUTFILE 'OUT'",
    "EXISTS TABLE otel_traces INTO OUTFILE 'OUT'",
    "SELECT 1) INTO OUTFILE 'OUT' --",
    "SELECT 1) INTO OUTFILE 'OUT' /*",
    "SELECT * FROM (SELECT 1 INTO OUTFILE 'OUT')",
    "SELECT 1 SETTINGS max_threads = 1 INTO OUTFILE 'OUT'",
    "SELECT 1 UNION ALL SELECT 2 INTO OUTFILE 'OUT'",
    "SELECT '\\'' INTO OUTFILE 'OUT'",
    "SELECT $x$ ' $x$ INTO OUTFILE 'OUT'",
    "SELECT 1 FORMAT CSV INTO OUTFILE 'OUT'",
    "WITH 1 AS x SELECT x INTO OUTFILE 'OUT' COMPRESSION 'gzip'",
    "INSERT INTO FUNCTION file('OUT', 'CSV', 'a Int8') VALUES (1)",
    "SELECT 1 SETTINGS output_format_schema = 'OUT' FORMAT Protobuf",
    "SELECT 1 AS a FORMAT CapnProto SETTINGS format_schema = 'OUT:M', output_format_schema = 'OUT'",
    "SELECT 1 FORMAT Template SETTINGS format_template_resultset = 'FILE'",
    "SELECT 1 FORMAT SQLInsert SETTINGS output_format_sql_insert_table_name = 'x'",
    # reading files
    "SELECT * FROM file('FILE', 'LineAsString')",
    "SELECT * FROM FILE('FILE', 'LineAsString')",
    "SELECT * FROM `file`('FILE', 'LineAsString')",
    "SELECT * FROM \"file\"('FILE', 'LineAsString')",
    "SELECT * FROM/**/file/**/('FILE', 'LineAsString')",
    "SELECT file('FILE')",
    "SELECT `file`('FILE')",
    "SELECT arrayMap(x -> file(x), ['FILE'])",
    "SELECT * FROM 'FILE'",
    "SELECT * FROM `FILE`",
    "SELECT * FROM \"FILE\"",
    "SELECT * FROM default.`FILE`",
    "SELECT 'x' IN (SELECT * FROM default.`FILE`)",
    "SELECT 'x' IN default.`FILE`",
    "SELECT 'x' IN file('FILE', 'LineAsString')",
    "SELECT * FROM otel_traces WHERE SpanName IN (SELECT * FROM file('FILE', 'LineAsString'))",
    "WITH x AS (SELECT * FROM file('FILE', 'LineAsString')) SELECT * FROM x",
    "SELECT (SELECT line FROM file('FILE', 'LineAsString'))",
    "SELECT 1 FROM numbers(1) JOIN file('FILE', 'LineAsString') AS f ON 1",
    "SELECT 1 UNION ALL SELECT * FROM file('FILE', 'LineAsString')",
    "SELECT * FROM view(SELECT * FROM file('FILE', 'LineAsString'))",
    "SELECT * FROM loop(file('FILE', 'LineAsString')) LIMIT 1",
    "SELECT * FROM viewExplain('EXPLAIN', '', (SELECT * FROM file('FILE')))",
    "SELECT * FROM fileCluster('default', 'FILE', 'LineAsString')",
    "SELECT * FROM filesystem('FILE')",
    "SELECT * FROM executable('cat FILE', 'LineAsString', 'line String')",
    "SELECT * FROM sqlite('FILE', 't')",
    "SELECT * FROM icebergLocal('FILE')",
    "SELECT * FROM deltaLakeLocal('FILE')",
    "SELECT * FROM eval('SELECT * FROM file(''FILE'', ''LineAsString'')')",
    "SELECT * FROM python('os')",
    "SELECT * FROM Python(SECRET)",
    "DESCRIBE TABLE file('FILE', 'LineAsString')",
    "DESCRIBE (SELECT * FROM file('FILE'))",
    "DESC 'FILE'",
    "EXPLAIN SELECT * FROM file('FILE', 'LineAsString')",
    "EXPLAIN ESTIMATE SELECT * FROM file('FILE', 'LineAsString')",
    "SHOW CREATE TABLE `FILE`",
    "SHOW CREATE TABLE default.`FILE`",
    "EXISTS `FILE`",
    "FROM file('FILE', 'LineAsString') SELECT *",
    "(SELECT * FROM file('FILE', 'LineAsString'))",
    # reaching out
    "SELECT * FROM url('http://127.0.0.1:PORT/x', 'LineAsString')",
    "SELECT * FROM URL('http://127.0.0.1:PORT/x', 'LineAsString', 'line String')",
    "DESCRIBE url('http://127.0.0.1:PORT/x')",
    "SELECT 1 WHERE 'a' IN url('http://127.0.0.1:PORT/x', 'LineAsString')",
    "SELECT * FROM s3('http://127.0.0.1:PORT/b/x', 'CSV')",
    "SELECT * FROM gcs('http://127.0.0.1:PORT/b/x', 'CSV')",
    "SELECT * FROM hdfs('hdfs://127.0.0.1:PORT/x', 'CSV')",
    "SELECT * FROM remote('127.0.0.1:PORT', system.one)",
    "SELECT * FROM remoteSecure('127.0.0.1:PORT', system.one)",
    "SELECT * FROM cluster('default', system.one)",
    "SELECT * FROM mysql('127.0.0.1:PORT', 'd', 't', 'u', 'p')",
    "SELECT * FROM postgresql('127.0.0.1:PORT', 'd', 't', 'u', 'p')",
    "SELECT * FROM mongodb('127.0.0.1:PORT', 'd', 't', 'u', 'p', 'a Int8')",
    "SELECT * FROM redis('127.0.0.1:PORT', 'k', 'k String')",
    "SELECT * FROM odbc('DSN=x', 'd', 't')",
    "SELECT * FROM jdbc('x', 'd', 't')",
    "SELECT aiGenerate('x')",
    "SELECT AIEmbed('x')",
    # changing data
    "INSERT INTO otel_traces (SpanName) VALUES ('x')",
    "INSERT INTO otel_traces (SpanName) SELECT 'x'",
    "ALTER TABLE otel_traces DELETE WHERE 1",
    "DELETE FROM otel_traces WHERE 1",
    "UPDATE otel_traces SET SpanName = 'x' WHERE 1",
    "TRUNCATE TABLE otel_traces",
    "DROP TABLE otel_traces",
    "DROP DATABASE otel",
    "DETACH TABLE otel_traces",
    "RENAME TABLE otel_traces TO x",
    "OPTIMIZE TABLE otel_traces FINAL",
    "CREATE TABLE x (a Int8) ENGINE = Memory",
    "CREATE TEMPORARY TABLE x (a Int8)",
    "CREATE FUNCTION f AS x -> x",
    "CREATE VIEW v AS SELECT 1",
    "ATTACH TABLE x FROM 'FILE' (a Int8) ENGINE = File(CSV)",
    "SYSTEM SHUTDOWN",
    "SYSTEM STOP MERGES",
    "SYSTEM FLUSH LOGS",
    "KILL QUERY WHERE 1",
    "BACKUP TABLE otel_traces TO File('OUT')",
    "GRANT ALL ON *.* TO default",
    "SET readonly = 0",
    "SET max_memory_usage = 0",
    "USE system",
    "SELECT 1; DROP TABLE otel_traces",
    "SELECT 1;\nSELECT file('FILE')",
    "SELECT 1; SELECT * FROM file('FILE', 'LineAsString')",
    "SELECT 1 /* ; */ ; DROP TABLE otel_traces",
    "SELECT ';' ; INSERT INTO otel_traces (SpanName) VALUES ('x')",
    "-- SELECT\nDROP TABLE otel_traces",
    "/* SELECT */ TRUNCATE TABLE otel_traces",
    "EXPLAIN AST SELECT 1; SELECT file('FILE')",
    "EXPLAIN PLAN INSERT INTO otel_traces (SpanName) VALUES ('x')",
    "EXPLAIN TABLE OVERRIDE mysql('127.0.0.1:PORT', 'd', 't', 'u', 'p')",
    "SELECT 1 PARALLEL WITH DROP TABLE otel_traces",
    "SHOW TABLES; DROP TABLE otel_traces",
    "SHOW TABLES FROM otel LIKE 'x'; DROP TABLE otel_traces",
    "DESCRIBE TABLE otel_traces; DROP TABLE otel_traces",
    "SELECT 1 FORMAT CSV; DROP TABLE otel_traces",
    # getting rid of the limits
    "SELECT 1 SETTINGS readonly = 0",
    "SELECT 1 SETTINGS max_memory_usage = 0",
    "SELECT * FROM (SELECT 1 SETTINGS max_execution_time = 0)",
    "SELECT 1 SETTINGS allow_ddl = 1, max_threads = 64",
    "SELECT 1 SETTINGS force_index_by_date",
    "SELECT sleep(3)",
    "SELECT sleepEachRow(3) FROM numbers(100)",
    "SELECT * FROM system.stack_trace",
]  # fmt: skip


class Canary:
    """Listens, and remembers whether anybody came."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.visits = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.visits += 1
            connection.close()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    made = Canary()
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChdbEngine]:
    made = ChdbEngine(tmp_path_factory.mktemp("hostile") / "traces")
    migrate(made, where="the test")
    made.insert("otel.otel_traces", ["SpanName"], b'{"SpanName":"kept"}\n')
    yield made
    made.close()


@pytest.fixture(scope="module")
def endpoint(engine: ChdbEngine) -> Iterator[SqlEndpoint]:
    made = SqlEndpoint(engine)
    yield made
    made.close()


def schema(engine: ChdbEngine) -> list[list[object]]:
    """What a query may not change."""
    return engine.select(
        "SELECT database, name, engine FROM system.tables WHERE database IN ('otel', 'default') ORDER BY ALL"
    ) + engine.select("SELECT SpanName FROM otel.otel_traces")


@pytest.mark.parametrize("sql", HOSTILE)
def test_hostile_query_does_no_harm(sql: str, engine: ChdbEngine, endpoint: SqlEndpoint, canary: Canary, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    before = schema(engine)
    sql = sql.replace("FILE", str(secret) if "OUTFILE" not in sql else "FILE").replace("'OUT'", f"'{tmp_path}/out'")
    sql = sql.replace("'OUT:M'", f"'{tmp_path}/out:M'").replace("PORT", str(canary.port))
    try:
        answer, _ = endpoint.run(sql, {}, {}, "TSV")
    except AglError:
        answer = b""
    assert SECRET.encode() not in answer
    assert [path.name for path in tmp_path.iterdir()] == ["secret.txt"]
    assert canary.visits == 0
    assert schema(engine) == before


@pytest.mark.parametrize("sql", HOSTILE)
def test_hostile_query_is_refused_not_answered(sql: str, endpoint: SqlEndpoint, tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_text(SECRET)
    sql = sql.replace("FILE", str(tmp_path / "f.txt") if "OUTFILE" not in sql else "FILE").replace("'OUT'", f"'{tmp_path}/out'")
    with pytest.raises(AglError):
        endpoint.run(sql.replace("PORT", "1"), {}, {}, "TSV")


@pytest.mark.parametrize(
    "name", ["readonly", "max_memory_usage", "max_execution_time", "output_format_schema", "allow_introspection_functions"]
)
def test_settings_that_loosen_limits_are_dropped_from_urls(name: str) -> None:
    from agl_otel.collector.guard import filter_settings

    assert filter_settings({name: "0", "output_format_json_quote_64bit_integers": "1"}) == {"output_format_json_quote_64bit_integers": "1"}


def test_a_setting_cannot_smuggle_sql(endpoint: SqlEndpoint) -> None:
    from agl_otel.collector.guard import filter_settings

    assert filter_settings({"session_timezone": "UTC' , readonly = 0, max_threads = '1"}) == {}


def test_a_parameter_is_data(endpoint: SqlEndpoint) -> None:
    answer, _ = endpoint.run("SELECT {a:String}", {"a": "x') INTO OUTFILE 'y"}, {}, "TSVRaw")
    assert answer == b"x') INTO OUTFILE 'y\n"


HARMLESS = [
    ("SELECT 1", b"1\n"),
    ("select 1 as a, 2 as b FORMAT CSV", b"1,2\n"),
    ("SELECT 1; ", b"1\n"),
    ("-- hello\nSELECT 1 -- world", b"1\n"),
    ("WITH x AS (SELECT 3 AS a) SELECT a FROM x", b"3\n"),
    ("(SELECT 1) UNION ALL (SELECT 1)", b"1\n1\n"),
    ("SELECT number FROM numbers(3) ORDER BY number DESC", b"2\n1\n0\n"),
    ("SELECT SpanName FROM otel_traces", b"kept\n"),
    ("SELECT SpanName FROM otel.otel_traces LIMIT 1 SETTINGS max_block_size = 10 FORMAT TSV", b"kept\n"),
    ("SELECT SpanName FROM otel_traces FORMAT TSV SETTINGS max_block_size = 10", b"kept\n"),
    ("FROM otel_traces SELECT SpanName", b"kept\n"),
    ("EXISTS TABLE otel_traces", b"1\n"),
    ("SELECT ';', 'FORMAT x', '-- no'", b";\tFORMAT x\t-- no\n"),
    ("SHOW TABLES FROM otel LIKE 'otel_logs'", b"otel_logs\n"),
    ("SELECT 'a' || {b:String}", b"ab\n"),
]


@pytest.mark.parametrize(("sql", "answer"), HARMLESS)
def test_ordinary_query_is_answered(sql: str, answer: bytes, endpoint: SqlEndpoint) -> None:
    assert endpoint.run(sql, {"b": "b"}, {}, "TSV")[0] == answer


LOOKING = [
    "DESCRIBE TABLE otel_traces",
    "DESC otel.otel_logs",
    "EXPLAIN SELECT 1",
    "EXPLAIN AST SELECT 1",
    "DESCRIBE (SELECT 1 AS a)",
    "SHOW CREATE TABLE otel_traces",
    "SHOW FULL COLUMNS FROM otel_traces",
    "SHOW DATABASES",
    "SHOW SETTINGS LIKE 'max%'",
]


@pytest.mark.parametrize("sql", LOOKING)
def test_looking_around_is_allowed(sql: str, endpoint: SqlEndpoint) -> None:
    assert endpoint.run(sql, {}, {}, "TSV")[0]


def test_a_query_that_takes_too_much_memory_ends(endpoint: SqlEndpoint) -> None:
    with pytest.raises(AglError, match=r"MEMORY_LIMIT_EXCEEDED|memory limit"):
        endpoint.run("SELECT length(groupArray(number)) FROM numbers(1000000000)", {}, {}, "TSV")
