"""The system statistics of heartbeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_otel.runner.snapshot import SystemSnapshot, gpus_of, pause_seconds


def machine(proc: Path, busy: int, idle: int) -> Path:
    """Write a /proc with these CPU ticks."""
    (proc / "net").mkdir(parents=True, exist_ok=True)
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    (proc / "meminfo").write_text(f"MemTotal: {8 << 20} kB\nMemFree: 1 kB\nMemAvailable: {6 << 20} kB\nHugePages_Total: 0\n")
    (proc / "cpuinfo").write_text("".join(f"model name : A chip\nphysical id : 0\ncore id : {core}\n\n" for core in (0, 0, 1, 1)))
    (proc / "net" / "dev").write_text(f"Inter-|  Receive\n face |bytes\n  lo: {'1048576 ' + '0 ' * 7}{2097152} {'0 ' * 7}\n")
    return proc


def test_cpu_usage_is_since_the_previous_snapshot_and_sizes_are_the_kernels(tmp_path: Path) -> None:
    snapshot = SystemSnapshot(proc=machine(tmp_path, 100, 100))
    machine(tmp_path, 175, 125)
    taken = snapshot.take()
    assert (taken["cpu_usage_pct"], taken["cpu_name"], taken["cpu_cores"]) == (75.0, "A chip", 2)
    assert (taken["mem_used_gb"], taken["mem_total_gb"], taken["mem_pct"]) == (2.0, 8.0, 25.0)
    assert (taken["bytes_recv_mb"], taken["bytes_sent_mb"]) == (1.0, 2.0)
    machine(tmp_path, 175, 225)
    assert snapshot.take()["cpu_usage_pct"] == 0.0


def test_this_machine_has_a_snapshot() -> None:
    taken = SystemSnapshot().take()
    assert {"timestamp", "host", "os", "cpu_threads", "load_1m", "disk_pct"} <= set(taken)


def test_unavailable_values_are_left_out(tmp_path: Path) -> None:
    taken = SystemSnapshot(proc=tmp_path / "none").take()
    assert not {"cpu_usage_pct", "mem_pct", "bytes_sent_mb"} & set(taken)


def test_gpus_are_parsed_and_unknown_values_are_none() -> None:
    assert gpus_of("NVIDIA H200, 7, 512, 143771, 31\nA, B, [N/A], 0, 10, 40\nno such line\n") == [
        {"gpu": "NVIDIA H200", "util_pct": 7, "mem_used_mb": 512, "mem_total_mb": 143771, "temp_c": 31},
        {"gpu": "A, B", "util_pct": None, "mem_used_mb": 0, "mem_total_mb": 10, "temp_c": 40},
    ]


@pytest.mark.parametrize(("interval", "jitter", "least", "most"), [(10.0, 0.5, 9.5, 10.5), (0.1, 0.5, 0.05, 0.15), (5.0, 0.0, 5.0, 5.0)])
def test_heartbeat_pauses_stay_within_the_jitter(interval: float, jitter: float, least: float, most: float) -> None:
    pauses = [pause_seconds(interval, jitter) for _ in range(200)]
    assert least <= min(pauses) <= max(pauses) <= most
    assert (len(set(pauses)) > 1) is (jitter > 0)
