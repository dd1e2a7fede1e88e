"""The machine a session runs on: what it is, how busy it is, and which cores the server and the client get.

Everything here is read-only but pinning: clocks, governors and limits are recorded and never set.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

HEAVY_PERCENT = 20.0  # of one core; less is the noise of an idle desktop
_GPU_FIELDS = ("name", "uuid", "driver_version", "memory.total", "clocks.sm", "clocks.mem", "temperature.gpu")


@dataclass(frozen=True)
class Cores:
    """Core numbers for the server and for the client; `shared` where one core has to do for both."""

    server: tuple[int, ...]
    client: tuple[int, ...]
    shared: bool

    def sentence(self) -> str:
        """How the cores are split, for the plan's price and the report."""
        if not self.server:
            return "cores are not pinned: this platform has no affinity call"
        if self.shared:
            return f"server and client share core {self.server[0]}: its times include the client's own work"
        return f"server on cores {_ranges(self.server)}, client on {_ranges(self.client)}"


def _ranges(cores: Sequence[int]) -> str:
    return ",".join(str(core) for core in cores)


def split_cores(allowed: Sequence[int], siblings: Mapping[int, frozenset[int]]) -> Cores:
    """Split the allowed cores into disjoint sets: whole physical cores to the client where that leaves the server most.

    `siblings` gives for a core the hardware threads of its physical core (itself included); a core may be missing.
    """
    cores = sorted(allowed)
    if len(cores) < 2:
        return Cores(tuple(cores), tuple(cores), shared=bool(cores))
    wanted = 2 if len(cores) >= 16 else 1
    client: set[int] = set()
    for core in reversed(cores):
        if len(client) < wanted:
            client |= (siblings.get(core, frozenset({core})) & set(cores)) | {core}
    if len(client) * 2 > len(cores):  # two threads of one physical core: each side gets one of them
        client = set(cores[-wanted:])
    return Cores(tuple(core for core in cores if core not in client), tuple(sorted(client)), shared=False)


def available_cores() -> Cores:
    """The split of the cores this process may use; empty sets where the platform has no affinity call."""
    if not hasattr(os, "sched_getaffinity"):
        return Cores((), (), shared=False)
    allowed = sorted(os.sched_getaffinity(0))
    return split_cores(allowed, {core: _siblings(core) for core in allowed})


def _siblings(core: int) -> frozenset[int]:
    text = _read(Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found | {core})


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Run the calling thread, and processes it starts meanwhile, on `cores` only; restored afterwards."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def machine_record(own: int | None = None) -> dict[str, object]:
    """What the machine is and does now: processor, memory, load, versions, GPUs, throttling, other heavy processes.

    `own` is the process id of the gate: it and its children are not "others". Seconds and bytes carry their unit in the name.
    """
    memory = psutil.virtual_memory()
    return {
        "time_unix_s": round(time.time(), 3),
        "monotonic_s": round(time.monotonic(), 6),
        "cpu_model": cpu_model(),
        "cores_logical": os.cpu_count() or 0,
        "cores_allowed": _allowed(),
        "memory_total_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "throttled_s": throttled_seconds(),
        "steal_s": round(float(getattr(psutil.cpu_times(), "steal", 0.0)), 2),
        "heavy_processes": heavy_processes(own if own is not None else os.getpid()),
        "gpus": gpus(),
    }


def _allowed() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 0))


def cpu_model() -> str:
    """The processor's name as the operating system gives it."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.lower().startswith(("model name", "hardware")):
            return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"]).strip() or platform.processor()
    return platform.processor() or platform.machine()


def throttled_seconds() -> float:
    """Seconds this container was held back by its CPU quota since it began; 0.0 where there is no such count."""
    return round(throttled_from(_cgroup_stat()), 6)


def throttled_from(stat: str) -> float:
    """Throttled seconds in the text of a `cpu.stat` file (version 2 counts µs, version 1 ns); 0.0 if it has none."""
    for line in stat.splitlines():
        name, _, value = line.partition(" ")
        if name == "throttled_usec":
            return int(value) / 1e6
        if name == "throttled_time":
            return int(value) / 1e9
    return 0.0


def _cgroup_stat() -> str:
    groups = [line.split(":", 2) for line in _read(Path("/proc/self/cgroup")).splitlines()]
    tails = [parts[2] for parts in groups if len(parts) == 3 and (parts[1] == "" or "cpu" in parts[1].split(","))]
    roots = ("/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct")
    # Inside a container the path of the group is often the host's; the mount's root then is our own group.
    for tail in [*tails, ""]:
        for root in roots:
            text = _read(Path(root + tail) / "cpu.stat")
            if "throttled" in text:
                return text
    return ""


def heavy_processes(own: int, window_s: float = 0.2) -> list[dict[str, object]]:
    """Processes of others that use more than a fifth of a core during `window_s`: pid, name and percent of one core."""
    others = [process for process in psutil.process_iter() if not _is_ours(process, own)]
    for process in others:
        _percent(process)
    time.sleep(window_s)
    measured = [(process, _percent(process)) for process in others]
    heavy = sorted(((p, use) for p, use in measured if use > HEAVY_PERCENT), key=lambda pair: -pair[1])
    return [{"pid": process.pid, "name": _name(process), "percent": round(use, 1)} for process, use in heavy[:5]]


def _is_ours(process: psutil.Process, own: int) -> bool:
    try:
        return process.pid == own or any(parent.pid == own for parent in process.parents())
    except psutil.Error:
        return True


def _percent(process: psutil.Process) -> float:
    try:
        return float(process.cpu_percent(None))
    except psutil.Error:
        return 0.0


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "gone"


def gpus() -> list[dict[str, str]]:
    """One row per NVIDIA GPU, with the fields of nvidia-smi's own names; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    text = _output(["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"])
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines() if line.strip()]
    return [dict(zip(_GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(_GPU_FIELDS)]


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
