"""No query from a client writes, reads a file or a URL, or changes data."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_otel.collector import guard, guard_tables
from agl_otel.collector.sqlhttp import SqlEndpoint, public_text
from agl_otel.errors import AglError, QueryError
from agl_otel.traces import chdb
from agl_otel.traces import clickhouse_server as server_engine
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.chdb import ChdbEngine
from agl_otel.traces.engine import ClickHouseError
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.schema import create_schema
from tests.clickhouse_server import ClickHouseServer

SECRET = "the-canary-sings"

CORPUS = json.loads((Path(__file__).parent / "hostile.json").read_text())
"""{attack: queries, or [query, {parameter: value}]}; FILE, OUT and PORT are filled in, and <<text*3>> stands for texttexttext."""
BOMBS = CORPUS.pop("bombs")
HOSTILE = [entry for entries in CORPUS.values() for entry in entries]
LIMITS = {"max_execution_time": 0.3, "max_memory_usage": 512 << 20, "max_result_rows": 200_000, "max_result_bytes": 64 << 20}
"""The limits of readers, lower than in production."""
TIMEOUT_EXCEEDED = 159


class Canary:
    """Listens on a port and counts connections."""

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
def limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for limited in (chdb.READ_LIMITS, server_engine.READ_LIMITS):
            for name, value in LIMITS.items():
                patch.setitem(limited, name, value)  # pyright: ignore[reportArgumentType] - Final only outside this test
        yield


@pytest.fixture(scope="module", params=["chdb", pytest.param("server", marks=pytest.mark.full)])
def engine(request: pytest.FixtureRequest, limits: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceStore]:
    if request.param == "chdb":
        made: TraceStore = ChdbEngine(tmp_path_factory.mktemp("hostile") / "traces")
        fill(made)
        yield made
        made.close()
    else:
        with ClickHouseServer(tmp_path_factory.mktemp("hostile-server")) as server:
            made = server_engine.ServerEngine(ServerAddress.parse(server.url()))
            fill(made)
            made.command("CREATE DATABASE theirs")
            made.command(f"CREATE TABLE theirs.secrets ENGINE = MergeTree ORDER BY () AS SELECT '{SECRET}' AS secret")
            yield made
            made.close()


def fill(engine: TraceStore) -> None:
    create_schema(engine, where="the test")
    engine.insert("otel.otel_traces", ["SpanName"], [b'{"SpanName":"kept"}\n'])
    engine.command("CREATE DATABASE zz_theirs")
    engine.command(
        f"CREATE TABLE zz_theirs.wages (name String DEFAULT '{SECRET}') ENGINE = MergeTree PARTITION BY name ORDER BY () COMMENT '{SECRET}'"
    )
    engine.command("INSERT INTO zz_theirs.wages VALUES (DEFAULT)")
    engine.command(f"CREATE FUNCTION canary AS (x) -> concat(x, '{SECRET}')")


@pytest.fixture(scope="module")
def endpoint(engine: TraceStore) -> Iterator[SqlEndpoint]:
    made = SqlEndpoint(engine, shared=isinstance(engine, server_engine.ServerEngine))
    yield made
    made.close()


def schema(engine: TraceStore) -> list[list[object]]:
    """Return everything that a query must not change."""
    return engine.select(
        "SELECT database, name, engine FROM system.tables WHERE database IN ('otel', 'default', 'theirs') ORDER BY ALL"
    ) + engine.select("SELECT SpanName FROM otel.otel_traces")


@pytest.fixture(scope="module")
def before(engine: TraceStore) -> list[list[object]]:
    return schema(engine)


def filled(entry: str | list[Any], folder: Path, port: int) -> tuple[str, dict[str, str]]:
    """Return (query, parameters) of an entry of the corpus."""
    sql, params = (entry, {}) if isinstance(entry, str) else entry

    def put_in(text: str) -> str:
        text = re.sub(r"<<(.*?)\*(\d+)>>", lambda match: match[1] * int(match[2]), text)
        text = re.sub(r"(?<=['\"`])FILE|(?<=cat )FILE|\AFILE\Z", str(folder / "secret.txt"), text)
        return re.sub(r"'OUT|\AOUT\Z", lambda match: match[0].replace("OUT", f"{folder}/out"), text).replace("PORT", str(port))

    return put_in(sql), {name: put_in(value) for name, value in params.items()}


def answered(endpoint: SqlEndpoint, sql: str) -> bytes:
    """Return the response to `sql`; retry if the short time limit of these tests ends the query on a loaded machine."""
    for _ in range(20):
        try:
            return endpoint.run(sql, {}, {}, "TSV")[0]
        except ClickHouseError as error:
            assert error.code == TIMEOUT_EXCEEDED, error
    raise AssertionError(f"every try of {sql!r} took too long")


def short(entry: Any) -> str:
    return re.sub(r"\W+", "-", str(entry))[:60]


def test_the_corpus_is_large_and_has_no_duplicates() -> None:
    assert len(HOSTILE) >= 400 and len(BOMBS) >= 90
    assert len({json.dumps(entry) for entry in HOSTILE + BOMBS}) == len(HOSTILE) + len(BOMBS)


@pytest.mark.parametrize("entry", HOSTILE, ids=short)
def test_hostile_query_is_refused_and_does_no_harm(
    entry: Any, engine: TraceStore, endpoint: SqlEndpoint, before: list[list[object]], canary: Canary, tmp_path: Path
) -> None:
    (tmp_path / "secret.txt").write_text(SECRET)
    with pytest.raises(AglError) as refused:
        endpoint.run(*filled(entry, tmp_path, canary.port), {}, "TSV")
    assert SECRET not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["secret.txt"]
    assert canary.visits == 0
    assert schema(engine) == before


@pytest.mark.full
@pytest.mark.parametrize("entry", BOMBS, ids=short)
def test_a_bomb_ends_and_leaves_nothing_for_the_next_query(entry: Any, engine: TraceStore, endpoint: SqlEndpoint, tmp_path: Path) -> None:
    with contextlib.suppress(AglError):
        answer, _ = endpoint.run(*filled(entry, tmp_path, 1), {}, "TSV")
        assert len(answer) <= LIMITS["max_result_bytes"]
    assert answered(endpoint, "SELECT SpanName FROM otel_traces") == b"kept\n"
    assert list(tmp_path.iterdir()) == []


def test_an_error_after_the_first_rows_affects_only_its_query(endpoint: SqlEndpoint) -> None:
    with pytest.raises(ClickHouseError, match=r"is non-zero|TIMEOUT_EXCEEDED"):
        endpoint.run("SELECT number, throwIf(number = 150000) FROM numbers(190000)", {}, {}, "TSV")


def test_every_table_function_but_the_harmless_ones_is_refused(engine: TraceStore, endpoint: SqlEndpoint) -> None:
    """Including those that later ClickHouse releases add."""
    names = [str(name) for (name,) in engine.select("SELECT name FROM system.table_functions ORDER BY name")]
    for name in names:
        if name.lower() not in guard.SAFE_TABLE_FUNCTIONS:
            with pytest.raises(AglError):
                endpoint.run(f"SELECT * FROM {name}('x')", {}, {}, "TSV")
    assert {"file", "url", "remote"} < set(names)


@pytest.mark.parametrize("sql", ["SELECT * FROM theirs.secrets", "SELECT 1 IN theirs.secrets", "SHOW CREATE TABLE theirs.secrets"])
def test_other_databases_tables_are_inaccessible(sql: str, endpoint: SqlEndpoint) -> None:
    with pytest.raises(AglError):  # of the embedded ClickHouse, because it has none
        endpoint.run(sql, {}, {}, "TSV")


DESCRIBING = [
    "SELECT create_table_query FROM system.tables",
    "SELECT comment FROM system.tables AS x",
    "SELECT comment FROM system.tables AS `system.functions`",
    "SELECT default_expression FROM system.columns",
    "SELECT * FROM system.columns ORDER BY ALL SETTINGS enable_analyzer = 0",
    "SELECT partition FROM system.parts",
    "SELECT name FROM system.databases",
    "SELECT database FROM system.databases AS `system.tables`",
    "SELECT create_query FROM system.functions",
    "SELECT create_query FROM system.functions AS `system.tables`",
    "SELECT (SELECT groupArray(partition) FROM system.parts)",
    "WITH x AS (SELECT * FROM system.tables) SELECT * FROM x",
    "SELECT b.comment FROM system.one AS a CROSS JOIN system.tables AS b",
    "SELECT comment FROM system.{t:Identifier}",
    f"SELECT 1 FROM system.one WHERE '{SECRET}' IN (SELECT partition FROM system.parts)",
    "SELECT comment FROM system.tables SETTINGS additional_table_filters = {}",
    "SELECT comment FROM (SELECT * FROM system.tables SETTINGS additional_table_filters = {})",
    "SHOW DATABASES",
    "SHOW FUNCTIONS",
    "SHOW TABLES FROM zz_theirs",
    "SHOW TABLES IN `zz_theirs`",
    "SHOW FULL TABLES FROM zz_theirs LIKE 'w%'",
    "SHOW COLUMNS FROM wages FROM zz_theirs",
    "SHOW FULL COLUMNS IN wages IN `zz_theirs`",
    "SELECT * FROM wage",
    "SELECT * FROM zz_their.wages",
]


@pytest.mark.parametrize("sql", DESCRIBING)
def test_describe_statements_see_only_our_own_database(sql: str, endpoint: SqlEndpoint) -> None:
    try:
        answer = endpoint.run(sql, {"t": "tables"}, {}, "TSV")[0].decode()
    except AglError as refused:
        answer = public_text(str(refused)).replace(sql, "")
    assert not [word for word in (SECRET, "zz_theirs", "wages", "canary") if word in answer]


HINT = "Maybe you meant zz_theirs.wages"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (f"no table. \n {HINT}?. (UNKNOWN_TABLE)", "no table. (UNKNOWN_TABLE)"),
        (f"{' ' * 2_000_000}{HINT}?{' ' * 2_000_000}x", " "),
        (f"{HINT}?. {HINT}? " * 100_000 + "end", " end"),
        (f"{HINT} " * 100_000, HINT),  # not a hint of ClickHouse: those end with a question mark
    ],
    ids=["a hint", "blanks", "hints", "questions without an end"],
)
def test_an_error_is_read_in_one_pass_however_long_the_query_that_it_quotes(message: str, shown: str) -> None:
    """The search must not restart at each blank or at each start of a hint: the test would not end."""
    text = public_text(f"Code: 60. DB::Exception: {message}")
    assert text.startswith(shown) and len(text) <= 4002


@pytest.mark.parametrize(
    "sql",
    [
        "SHOW COLUMNS FROM wages FROM zz_theirs",
        "SHOW FULL COLUMNS IN wages IN `zz_theirs`",
        "SHOW TABLES IN zz_theirs",
        "SHOW CREATE TABLE zz_theirs.wages",
        "SHOW CREATE DATABASE zz_theirs",
        "EXISTS DATABASE zz_theirs",
        "DESCRIBE zz_theirs.wages",
    ],
)
def test_a_statement_about_another_database_is_refused(sql: str) -> None:
    with pytest.raises(QueryError, match="only otel"):
        guard_tables.check_fixed(sql)
    guard_tables.check_fixed(sql.replace("zz_theirs", "otel"))


def test_readers_are_limited(endpoint: SqlEndpoint) -> None:
    for name, value in LIMITS.items():
        assert float(endpoint.run(f"SELECT toString(getSetting('{name}'))", {}, {}, "TSV")[0]) == value


@pytest.mark.parametrize(
    "name", ["readonly", "max_memory_usage", "max_execution_time", "output_format_schema", "allow_introspection_functions"]
)
def test_settings_that_loosen_limits_are_dropped_from_urls(name: str) -> None:
    from agl_otel.collector.guard import filter_settings

    assert filter_settings({name: "0", "output_format_json_quote_64bit_integers": "1"}) == {"output_format_json_quote_64bit_integers": "1"}


def test_a_setting_cannot_smuggle_sql(endpoint: SqlEndpoint) -> None:
    from agl_otel.collector.guard import filter_settings

    assert filter_settings({"max_threads": "1"}) == {"max_threads": "1"}
    assert filter_settings({"max_threads": "64"}) == {}
    assert filter_settings({"session_timezone": "UTC' , readonly = 0, max_threads = '1"}) == {}


def test_a_parameter_is_data(endpoint: SqlEndpoint) -> None:
    answer, _ = endpoint.run("SELECT {a:String}", {"a": "x') INTO OUTFILE 'y"}, {}, "TSVRaw")
    assert answer == b"x') INTO OUTFILE 'y\n"


def test_a_checked_query_runs_with_other_values(endpoint: SqlEndpoint) -> None:
    for value in ("1", "2", "3"):
        assert endpoint.run("SELECT {passed:UInt8} FORMAT CSV", {"passed": value}, {}, "TSV") == (f"{value}\n".encode(), "CSV")


def test_a_checked_query_does_not_run_with_other_identifiers(endpoint: SqlEndpoint) -> None:
    for sql, harmless, hostile in (
        ("SELECT count() > 0 FROM system.{t:Identifier}", "one", "processes"),
        ("SELECT count() > 0 FROM {t:Identifier}(2)", "numbers", "sleep"),
        ("SELECT {t:Identifier}('x') != ''", "lower", "file"),
    ):
        with contextlib.suppress(AglError):  # some of them pass on neither engine
            assert endpoint.run(sql, {"t": harmless}, {}, "TSV")[0] in (b"1\n", b"true\n")
        with pytest.raises(AglError):
            endpoint.run(sql, {"t": hostile}, {}, "TSV")


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
def test_listing_and_describing_tables_is_allowed(sql: str, endpoint: SqlEndpoint) -> None:
    assert endpoint.run(sql, {}, {}, "TSV")[0]


def test_a_query_that_takes_too_much_memory_ends(endpoint: SqlEndpoint) -> None:
    with pytest.raises(AglError, match=r"MEMORY_LIMIT_EXCEEDED|memory limit"):
        endpoint.run("SELECT length(repeat('x', 1000000000))", {}, {}, "TSV")


def test_rows_of_a_query_that_failed_are_not_in_the_answer_to_the_next(engine: TraceStore) -> None:
    failing = "SELECT 'left over', throwIf(number = 50000) FROM numbers(60000) SETTINGS max_block_size = 1000"
    with pytest.raises(AglError):
        engine.read(failing, "TSV")
    assert engine.read("SELECT 'next'", "TSV") == b"next\n"
    with pytest.raises(AglError):
        engine.select(failing)
    assert engine.select("SELECT 'next'") == [["next"]]
