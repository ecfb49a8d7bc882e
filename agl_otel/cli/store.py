"""`agl-otel store`: Agent Lightning 0.3's command, which serves all its clients' requests on one address."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any, Final

import click

from agl_otel.cli.common import Terminated, data_dir_option, json_option, print_json, run_async, setup_logging
from agl_otel.cli.output import open_console
from agl_otel.errors import SettingsError
from agl_otel.service.ports import port_beside
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import Stack
from agl_otel.types.options import Whole

_LEVELS: Final = click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False)
_BACKENDS: Final = click.Choice(["default", "memory", "mongo"])


@click.command()
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 accepts connections from other machines."
)
@click.option("--port", default=4747, show_default=True, type=Whole(0, 65535), help="REST, OTLP/HTTP, metrics; 0: a free one.")
@click.option("--queue-port", type=Whole(0, 65535), help="gRPC of the queue.  [default: the port after --port]")
@click.option("--cors-origin", "cors_origins", multiple=True, help="Let pages of this origin call (repeatable; * for all).")
@click.option("--log-level", default="INFO", show_default=True, type=_LEVELS)
@click.option("--tracker", multiple=True, help="Changes nothing: metrics are always at /metrics and /v1/prometheus.")
@click.option("--n-workers", default=1, show_default=True, type=Whole(min=1), help="Changes nothing: services are processes.")
@click.option("--backend", default="default", show_default=True, type=_BACKENDS, help="memory: a temporary folder instead of --data-dir.")
@click.option("--mongo-uri", hidden=True)
@click.option("--queue", "queue_url", metavar="URL", help="postgresql://…  [default: SQLite in the data directory]")
@click.option("--clickhouse", "clickhouse_url", metavar="URL", help="clickhouse://…  [default: embedded, in the data directory]")
@data_dir_option
@json_option
def store(
    host: str, port: int, queue_port: int | None, cors_origins: tuple[str, ...], log_level: str, backend: str, mongo_uri: str | None,
    queue_url: str | None, clickhouse_url: str | None, data_dir: Path | None, as_json: bool, **_: Any,
) -> None:  # fmt: skip
    """Run the stack without runners until Ctrl+C; everything answers at http://HOST:PORT.

    LightningStoreClient("http://localhost:4747") needs nothing else. It is `agl-otel up` with other ports: the other services use free
    ports, which clients learn from this one.
    """
    if backend == "mongo" or mongo_uri:
        raise SettingsError("there is no MongoDB backend: use PostgreSQL with --queue postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
    setup_logging(log_level)
    free = dict.fromkeys(("otlp_grpc_port", "otlp_http_port", "clickhouse_port", "proxy_port"), 0)
    host = "127.0.0.1" if host == "localhost" else host

    async def main() -> None:
        with contextlib.ExitStack() as closers:
            folder, load = data_dir, Settings.load
            if backend == "memory":
                load = Settings.private
                folder = Path(closers.enter_context(tempfile.TemporaryDirectory(prefix="agl-otel-", ignore_cleanup_errors=True)))
            settings = load(
                host=host, web_port=port, queue_port=port_beside(host, port) if queue_port is None else queue_port, data_dir=folder,
                log_level=log_level, cors_origins=",".join(cors_origins), queue_url=queue_url, clickhouse_url=clickhouse_url, **free,
            )  # fmt: skip
            async with Stack(settings) as stack:
                _show(stack, as_json)
                await stack.failed

    with contextlib.suppress(Terminated):
        run_async(main)


def _show(stack: Stack, as_json: bool) -> None:
    addresses = stack.addresses()
    url = addresses["web"]
    if as_json:
        print_json({"url": url, "data_dir": str(stack.data_dir), "addresses": addresses})
        return
    console = open_console(highlight=False)
    console.print(f"the store is at {url}  (queue {stack.address}, data in {stack.data_dir})", soft_wrap=True)
    console.print(f"clients:  LightningStoreClient({url!r})   or  export AGL_STORE={url}\nCtrl+C stops it.", soft_wrap=True)
