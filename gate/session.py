"""A session: one boot of an arm's server, its identity checked, its counters read, and its end made certain.

Not here: what is asked of the server (gate/client.py), and in which order sessions come (gate/order.py).
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gate.arm import Arm
from gate.host import Cores, pinned

# The caller's proxy variables must not send requests for 127.0.0.1 elsewhere.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class ServerError(RuntimeError):
    """A server that did not come up or does not answer; the message ends with the tail of its log."""


class Refused(RuntimeError):
    """A server that is not the one the plan names: another source or other weights. Nothing may be measured on it."""


@dataclass(frozen=True)
class Boot:
    """How servers are booted: the model folder, the device, the cores, and the time allowed (seconds)."""

    model: Path
    device: str
    cores: Cores
    boot_s: float = 300.0
    stop_s: float = 10.0


@dataclass(frozen=True)
class Server:
    """A running server: where it listens, its process, its log, and the seconds until it said it was healthy."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    boot_seconds: float

    def death(self) -> str | None:
        """A sentence if the server's process has ended, else None."""
        code = self.process.poll()
        return None if code is None else f"the server ended with exit code {code}\n{tail(self.log)}"

    def info(self) -> dict[str, object]:
        """The server's /info; ServerError when it does not answer with a JSON object."""
        try:
            found = json.loads(_get(f"{self.url}/info", timeout_s=10.0))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ServerError(f"/info did not answer with JSON ({error})\n{tail(self.log)}") from error
        if not isinstance(found, dict):
            raise ServerError(f"/info answered with {type(found).__name__}, not an object")
        return found

    def counters(self) -> dict[str, float]:
        """The server's `walkgate_*` counters now; empty when /metrics does not answer in time."""
        try:
            return parse_metrics(_get(f"{self.url}/metrics", timeout_s=5.0))
        except (OSError, ValueError, http.client.HTTPException):
            return {}


@contextmanager
def serving(arm: Arm, boot: Boot, log: Path) -> Iterator[Server]:
    """Start an arm's server, wait until it is healthy, yield it, and end its whole process group however this ends."""
    port = free_port()
    words = ["serve", str(boot.model), "--port", str(port), "--host", "127.0.0.1", "--device", boot.device]
    began = time.perf_counter()
    process = _start(arm, [*arm.command(*words), *arm.info.args], boot.cores, log)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_healthy(url, process, log, boot.boot_s)
        yield Server(url, process, log, time.perf_counter() - began)
    finally:
        stop(process, boot.stop_s)


def _start(arm: Arm, command: list[str], cores: Cores, log: Path) -> subprocess.Popen[bytes]:
    environment = arm.environment()
    if cores.server:
        environment.setdefault("OMP_NUM_THREADS", str(len(cores.server)))
    # The child inherits the affinity of the thread that starts it.
    with log.open("wb") as output, pinned(cores.server):
        return subprocess.Popen(
            command,
            cwd=arm.tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with(os.getpid()),
            start_new_session=True,  # its own group: one kill reaches front and engine, and Ctrl-C reaches neither
        )


def _end_with(parent: int) -> Callable[[], None] | None:
    """What a child runs before its program, so that it gets SIGTERM when the gate is gone; None where Linux is not."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here: after the fork as little as possible may run

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the gate died between the fork and the request
            os._exit(1)

    return ask


def _wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerError(f"the server ended with exit code {process.returncode} while starting\n{tail(log)}")
        # OSError covers a refused connection, a time-out and a 503 alike: not ready.
        with suppress(OSError, http.client.HTTPException):
            _get(f"{url}/health", timeout_s=2.0)
            return
        time.sleep(0.05)
    raise ServerError(f"the server was not healthy after {limit_s:.0f} s\n{tail(log)}")


def check_identity(info: dict[str, object], arm: Arm, weights: str) -> None:
    """Refuse a server whose /info does not state the tree's source digest and the plan's weights digest."""
    name, source = arm.info.name, info.get("source_digest")
    if source != arm.info.source_digest:
        raise Refused(
            f"{name}: the server runs source {_short(source)} from {info.get('source_root', 'an unnamed folder')}, "
            f"but the arm's tree {arm.tree} is {_short(arm.info.source_digest)}: another engine was imported, "
            f"or the tree changed after the plan"
        )
    if info.get("weights_digest") != weights:
        raise Refused(
            f"{name}: the server loaded weights {_short(info.get('weights_digest'))}, but the plan's model folder "
            f"is {_short(weights)}: both arms must serve the same weights"
        )


def _short(digest: object) -> str:
    return digest[:12] if isinstance(digest, str) else "(none stated)"


def stop(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """End a server's process group: SIGTERM, `patience_s` seconds, then SIGKILL for whatever is left of the group."""
    try:
        _signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    finally:
        # Also after a second Ctrl-C, and for children that outlived a front process which ended politely.
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # start_new_session made the process the leader, so its id is the group's id even after it has ended.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _get(url: str, timeout_s: float) -> str:
    with _OPENER.open(url, timeout=timeout_s) as reply:
        return str(reply.read().decode("utf-8", errors="replace"))


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text to {name with labels: value}: only counters, which end in `_total`, and only `walkgate_*`."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        bare = name.partition("{")[0]
        if bare.startswith("walkgate_") and bare.endswith("_total"):
            found[name] = float(value)
    return found


def counter_changes(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What each counter of `after` grew by since `before`; one that is new counts from zero."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a server's log, indented for a message."""
    try:
        text = log.read_bytes()[-8192:].decode("utf-8", errors="replace")
    except OSError:
        return f"  (no log at {log})"
    kept = text.splitlines()[-lines:]
    return "\n".join([f"  last lines of {log}:", *(f"  | {line}" for line in kept)]) if kept else f"  ({log} is empty)"
