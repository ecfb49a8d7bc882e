"""`agl-otel up` warns at once of what would show only later."""

from __future__ import annotations

import pytest
from aiohttp import web

from agl_otel.cli.up import warn_of_silent_clickhouse
from agl_otel.errors import SettingsError
from agl_otel.net.http_server import listen, make_runner
from agl_otel.settings import Settings, free_ports


async def test_a_clickhouse_server_that_does_not_answer_is_named_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    await warn_of_silent_clickhouse(Settings(clickhouse_url=f"clickhouse://me:s3cret@127.0.0.1:9000/otel?http_port={port}"))
    told = capsys.readouterr().err
    assert told.startswith(f"warning: ClickHouse at clickhouse://me@127.0.0.1:9000/otel does not answer at http://127.0.0.1:{port}/ping")
    assert "s3cret" not in told


async def test_no_warning_where_it_answers_or_is_embedded(capsys: pytest.CaptureFixture[str]) -> None:
    async def ping(_: web.Request) -> web.Response:
        return web.Response(text="Ok.\n")

    app = web.Application()
    app.router.add_get("/ping", ping)
    runner = make_runner(app)
    await runner.setup()
    try:
        port = await listen(runner, "127.0.0.1", 0, None)
        for url in ("", "chdb:///somewhere", f"clickhouse://127.0.0.1/otel?http_port={port}"):
            await warn_of_silent_clickhouse(Settings(clickhouse_url=url))
    finally:
        await runner.cleanup()
    assert capsys.readouterr().err == ""


async def test_a_url_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(SettingsError, match="unknown options: ssl"):
        await warn_of_silent_clickhouse(Settings(clickhouse_url="clickhouse://host/otel?ssl=1"))
