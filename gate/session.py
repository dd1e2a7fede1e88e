"""A session: one boot of an arm's server (or a connection to one that runs), its identity checked, and its end made certain.

Not here: what is asked of the server (gate/client.py), and in which order sessions come (gate/order.py).
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gate.arm import Arm, Peer
from gate.host import Cores, pinned
from gate.load import key_headers
from gate.process import Child, last_lines, tail

API = "generate/1"
EXIT_USAGE = 64
URL_WAIT_S = 10.0  # a URL answered before the plan (gate/wish.py): one that is silent now has died and does not boot

# The caller's proxy variables must not send requests for 127.0.0.1 elsewhere; the load client knows no proxy either.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_FAULTS = (OSError, ValueError, RecursionError, http.client.HTTPException)  # recursion: JSON nested too deep


class ServerError(RuntimeError):
    """A server that did not come up or does not answer; the message ends with the tail of its log."""


class UsageError(ServerError):
    """A server that ended with exit code 64 while it started: its arguments are wrong, and `words` is its own sentence."""

    def __init__(self, words: str, log: Path) -> None:
        super().__init__(f"the server refused its command line: {words}\n{tail(log)}")
        self.words = words


class Refused(RuntimeError):
    """A server that is not the one the plan names: another source or other weights. Nothing may be measured on it."""


@dataclass(frozen=True)
class Boot:
    """How servers are booted: the model folder (None: the arm's own affair), the device, the cores, the time allowed (s)."""

    model: Path | None
    device: str
    cores: Cores
    boot_s: float = 300.0
    stop_s: float = 10.0


@dataclass(frozen=True)
class Server:
    """A running server: where it listens, its process (None: not ours), its log, and the seconds until it was healthy.

    `keyed` says that the API key of the environment goes with each request.
    """

    url: str
    child: Child | None
    log: Path
    boot_seconds: float
    keyed: bool = False

    def death(self, patience_s: float = 0.0) -> str | None:
        """A sentence if the server's process has ended, or does within `patience_s` seconds; else None."""
        if self.child is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            self.child.process.wait(patience_s)
        code = self.child.process.returncode
        return None if code is None else f"the server ended with exit code {code}\n{tail(self.log)}"

    def info(self) -> dict[str, object]:
        """The server's /info, empty for a peer that has none; ServerError when a tree's does not answer with an object."""
        if self.keyed:
            return peer_info(self.url)
        try:
            return _info(self.url)
        except _FAULTS as error:
            raise ServerError(f"/info did not answer with JSON ({error})\n{tail(self.log)}") from error

    def model_name(self) -> str:
        """The first name in /v1/models; Refused when there is none: the server has no OpenAI door."""
        try:
            return str(json.loads(_get(f"{self.url}/v1/models", 10.0, self.keyed))["data"][0]["id"])
        except (*_FAULTS, LookupError, TypeError) as error:
            raise Refused(
                f"{self.url}/v1/models names no model ({error}), so the server has no OpenAI door; an engine with /info is "
                f"asked by --door generate"
            ) from error

    def counters(self) -> dict[str, float]:
        """The server's `walkgate_*` counters now; empty when /metrics does not answer in time."""
        try:
            return parse_metrics(_get(f"{self.url}/metrics", 5.0, self.keyed))
        except _FAULTS:
            return {}


@contextmanager
def serving(arm: Arm | Peer, boot: Boot, log: Path) -> Iterator[Server]:
    """Start an arm's server, wait until it is healthy, yield it, and end its whole process group however this ends.

    A URL is waited for, 10 s at most, and never ended.
    """
    if isinstance(arm, Peer) and arm.url:
        began = time.perf_counter()
        _wait_healthy(arm.url, None, log, min(boot.boot_s, URL_WAIT_S))
        yield Server(arm.url, None, log, time.perf_counter() - began, keyed=True)
        return
    port = free_port()
    url, began = f"http://127.0.0.1:{port}", time.perf_counter()
    child = _start(arm, server_words(arm, boot, port), boot.cores, log)
    try:
        _wait_healthy(url, child, log, boot.boot_s)
        yield Server(url, child, log, time.perf_counter() - began, keyed=isinstance(arm, Peer))
    finally:
        child.stop(boot.stop_s)


def server_words(arm: Arm | Peer, boot: Boot, port: int) -> list[str]:
    """The command line of an arm's server at a port."""
    if isinstance(arm, Peer):
        return [*arm.command(port, boot.model), *arm.info.args]
    words = ["serve", str(boot.model), "--port", str(port), "--host", "127.0.0.1", "--device", boot.device]
    return [*arm.command(*words), *arm.info.args]


def _start(arm: Arm | Peer, command: list[str], cores: Cores, log: Path) -> Child:
    environment = arm.environment()
    if cores.server:
        environment.setdefault("OMP_NUM_THREADS", str(len(cores.server)))
    # The child inherits the affinity of the thread that starts it.
    with log.open("ab") as output, pinned(cores.server):
        return Child(command, cwd=arm.tree, env=environment, stdout=output, stderr=output)


def _wait_healthy(url: str, child: Child | None, log: Path, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        code = child.process.poll() if child is not None else None
        if code == EXIT_USAGE:
            raise UsageError(_last_line(log), log)
        if code is not None:
            raise ServerError(f"the server ended with exit code {code} while starting\n{tail(log)}")
        if is_healthy(url):
            return
        time.sleep(0.05)
    raise ServerError(f"the server was not healthy after {limit_s:.0f} s\n{tail(log)}")


def _last_line(log: Path) -> str:
    return next((line.strip() for line in reversed(last_lines(log)) if line.strip()), "it wrote nothing")


def is_healthy(url: str) -> bool:
    """Whether a server answers /health with 200, or /v1/models where it knows no /health."""
    # OSError covers a refused connection, a time-out and a 503 alike: not ready.
    with suppress(*_FAULTS):
        try:
            _get(f"{url}/health", 2.0)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                return False
            _get(f"{url}/v1/models", 2.0, keyed=True)
        return True
    return False


def is_healthy_within(url: str, limit_s: float) -> bool:
    """Whether a server answers within `limit_s` seconds: one that was started a moment ago still loads."""
    end = time.monotonic() + limit_s
    while not is_healthy(url):
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)
    return True


def peer_info(url: str) -> dict[str, object]:
    """A peer's /info; empty where it has none, or a page of its own at that place."""
    with suppress(*_FAULTS):
        return _info(url, keyed=True)
    return {}


def _info(url: str, keyed: bool = False) -> dict[str, object]:
    found = json.loads(_get(f"{url}/info", 10.0, keyed))
    if not isinstance(found, dict):
        raise ValueError(f"{type(found).__name__}, not an object")
    return found


def is_ours(info: dict[str, object]) -> bool:
    """Whether an /info is that of an engine with our own door."""
    api = info.get("api")
    return isinstance(api, list) and API in api


def check_identity(info: dict[str, object], arm: Arm | Peer, weights: str, door: str = "generate") -> None:
    """Refuse a server that is not the plan's: another source than the tree's, other weights, or no such door.

    A peer's source can't be checked; its weights are where both it and the plan state a digest.
    """
    name, source = arm.info.name, info.get("source_digest")
    if isinstance(arm, Arm) and source != arm.info.source_digest:
        raise Refused(
            f"{name}: the server runs source {_short(source)} from {info.get('source_root', 'an unnamed folder')}, "
            f"but the arm's tree {arm.tree} is {_short(arm.info.source_digest)}: another engine was imported, "
            f"or the tree changed after the plan"
        )
    stated = info.get("weights_digest")
    if weights and stated != weights and not (isinstance(arm, Peer) and stated is None):
        raise Refused(
            f"{name}: the server loaded weights {_short(stated)}, but the plan's model folder "
            f"is {_short(weights)}: both arms must serve the same weights"
        )
    if door == "generate" and isinstance(arm, Peer) and not is_ours(info):
        raise Refused(f"{name}: the server's /info does not list {API}; ask it by --door openai")


def _short(digest: object) -> str:
    return digest[:12] if isinstance(digest, str) else "(none stated)"


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _get(url: str, timeout_s: float, keyed: bool = False) -> str:
    request = urllib.request.Request(url, headers=key_headers() if keyed else {})
    with _OPENER.open(request, timeout=timeout_s) as reply:
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
