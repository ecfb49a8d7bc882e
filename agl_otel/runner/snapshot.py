"""System statistics of a runner's machine, sent with each heartbeat under the keys of Agent Lightning 0.3.

They are read from /proc; values that cannot be read are left out without an error. In keys, gb means 2^30 bytes and mb 2^20 bytes.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Final

GPU_SECONDS: Final = 5.0  # time limit of nvidia-smi
_GPU_QUERY: Final = ("--query-gpu=name,utilization.gpu,memory.used,memory.total,temperature.gpu", "--format=csv,noheader,nounits")
_GPU_KEYS: Final = ("util_pct", "mem_used_mb", "mem_total_mb", "temp_c")
_IDLE: Final = (3, 4)  # idle and iowait in the first line of /proc/stat
_TICKS: Final = 8  # user nice system idle iowait irq softirq steal; guest time is part of user


class SystemSnapshot:
    """Takes snapshots of this machine. CPU usage is measured since the previous snapshot (the first: since construction)."""

    def __init__(self, *, gpu: bool = False, proc: Path = Path("/proc")) -> None:
        self._gpu = gpu
        self._proc = proc
        self._ticks = self._cpu_ticks()
        self._fixed: dict[str, Any] = {"host": platform.node(), "os": platform.platform(), "cpu_threads": os.cpu_count(), **self._cores()}

    def take(self) -> dict[str, Any]:
        """Return timestamp (Unix seconds), host, os, cpu_*, load_1m, load_5m, load_15m, mem_*, disk_* (of the root) and bytes_*.

        With `gpu` also gpus, a list of dicts, if nvidia-smi finds any.
        """
        taken = {"timestamp": time.time(), **self._fixed, **self._cpu(), **_load(), **self._memory(), **_disk(), **self._network()}
        if self._gpu and (gpus := _gpus()):
            taken["gpus"] = gpus
        return taken

    def _cpu(self) -> dict[str, float]:
        before, self._ticks = self._ticks, self._cpu_ticks()
        passed = [now - then for now, then in zip(self._ticks, before, strict=False)]
        if len(passed) <= max(_IDLE) or sum(passed) <= 0:
            return {}
        return {"cpu_usage_pct": round(100.0 * min(1.0, max(0.0, 1.0 - sum(passed[place] for place in _IDLE) / sum(passed))), 1)}

    def _cpu_ticks(self) -> list[int]:
        return [int(number) for number in self._read("stat").partition("\n")[0].split()[1 : 1 + _TICKS]]

    def _cores(self) -> dict[str, Any]:
        cores: set[tuple[str, str]] = set()
        name = package = ""
        for line in self._read("cpuinfo").splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            if key == "model name":
                name = value
            elif key == "physical id":
                package = value
            elif key == "core id":
                cores.add((package, value))
        return {"cpu_name": name or platform.machine(), "cpu_cores": len(cores) or os.cpu_count()}

    def _memory(self) -> dict[str, float]:
        lines = (line.partition(":") for line in self._read("meminfo").splitlines())
        kib = {name: int(rest.split()[0]) for name, _, rest in lines if rest.split()}
        if not kib.get("MemTotal") or "MemAvailable" not in kib:
            return {}
        return _use("mem", (kib["MemTotal"] - kib["MemAvailable"]) << 10, kib["MemTotal"] << 10)

    def _network(self) -> dict[str, float]:
        lines = (line.partition(":") for line in self._read("net/dev").splitlines())
        counts = [[int(number) for number in rest.split()] for _, _, rest in lines if rest]
        if not counts:
            return {}
        received, sent = (sum(count[place] for count in counts) for place in (0, 8))
        return {"bytes_sent_mb": round(sent / 2**20, 2), "bytes_recv_mb": round(received / 2**20, 2)}

    def _read(self, name: str) -> str:
        try:
            return (self._proc / name).read_text()
        except OSError:
            return ""


def pause_seconds(interval_seconds: float, jitter_seconds: float) -> float:
    """Draw the pause until the next heartbeat: the interval ± the jitter, which is capped at half the interval."""
    jitter = min(abs(jitter_seconds), interval_seconds / 2)
    return interval_seconds + random.uniform(-jitter, jitter)


def gpus_of(listing: str) -> list[dict[str, Any]]:
    """Parse nvidia-smi's CSV into a dict per GPU: gpu (name), util_pct, mem_used_mb, mem_total_mb, temp_c; None for unknown values."""
    found: list[dict[str, Any]] = []
    for line in listing.splitlines():
        name, *numbers = (part.strip() for part in line.rsplit(",", len(_GPU_KEYS)))
        if len(numbers) == len(_GPU_KEYS):
            known = zip(_GPU_KEYS, numbers, strict=True)
            found.append({"gpu": name, **{key: int(text) if text.isdigit() else None for key, text in known}})
    return found


def _gpus() -> list[dict[str, Any]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *_GPU_QUERY], capture_output=True, text=True, timeout=GPU_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return gpus_of(done.stdout)


def _load() -> dict[str, float]:
    try:
        return dict(zip(("load_1m", "load_5m", "load_15m"), (round(load, 2) for load in os.getloadavg()), strict=True))
    except OSError:
        return {}


def _disk() -> dict[str, float]:
    disk = shutil.disk_usage("/")
    return _use("disk", disk.used, disk.total) if disk.total else {}


def _use(what: str, used: int, total: int) -> dict[str, float]:
    gb = {f"{what}_used_gb": round(used / 2**30, 2), f"{what}_total_gb": round(total / 2**30, 2)}
    return {**gb, f"{what}_pct": round(100.0 * used / total, 1)}
