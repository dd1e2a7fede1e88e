"""A session's server: started in its own tree, checked, and ended with everything it started."""

from __future__ import annotations

import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

import gate.session
from gate.arm import Arm, ArmChoice, Peer, laid_out, make_model, weights_digest
from gate.host import Cores
from gate.session import (
    Boot,
    Refused,
    Server,
    ServerError,
    UsageError,
    check_identity,
    counter_changes,
    free_port,
    parse_metrics,
    peer_info,
    serving,
)
from tests.gate.trees import make_tree


def make_arm(tmp_path: Path, *args: str, **behaviour: object) -> tuple[Arm, Boot]:
    tree = make_tree(tmp_path / "tree", **behaviour)
    choice = ArmChoice("base", str(tree), args=args)
    with laid_out((choice,), tmp_path, tmp_path / "run", keep=False) as (arm,):
        model = make_model(arm, tmp_path / "model")
    return arm, Boot(model, "cpu", Cores((), (), False), boot_s=20.0, stop_s=1.0)


def test_a_server_runs_its_own_tree_with_the_arms_arguments_and_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoy = make_tree(tmp_path / "decoy", exit_at_start=9)
    monkeypatch.chdir(decoy)
    monkeypatch.setenv("PYTHONPATH", str(decoy))
    arm, boot = make_arm(tmp_path, "--disable", "plan_cache", boot_ms=300)
    with serving(arm, boot, tmp_path / "server.log") as server:
        info = server.info()
        check_identity(info, arm, weights_digest(boot.model))
        assert info["source_root"] == str(tmp_path / "tree")
        assert info["arguments"][-4:] == ["--device", "cpu", "--disable", "plan_cache"]  # type: ignore[index]
        assert server.boot_seconds >= 0.3
        assert server.counters() == {"walkgate_tokens_total": 0.0, 'walkgate_requests_total{task="any"}': 0.0}
        assert server.death() is None
    assert server.child.process.returncode is not None
    assert not psutil.pid_exists(server.child.process.pid)


def test_a_server_that_ignores_the_polite_signal_is_killed_also_after_an_interrupt(tmp_path: Path) -> None:
    arm, boot = make_arm(tmp_path, ignore_sigterm=True)
    with pytest.raises(KeyboardInterrupt), serving(arm, boot, tmp_path / "server.log") as server:
        raise KeyboardInterrupt
    assert server.child.process.returncode == -9


def test_a_child_that_outlives_the_front_process_is_killed_with_its_group(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    cli = tree / "engine" / "server" / "cli.py"
    pid_file = tmp_path / "child.pid"
    start = "def serve(model: Path, port: int) -> None:\n"
    spawn = f"""    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path({str(pid_file)!r}).write_text(str(child.pid))
"""
    cli.write_text(cli.read_text().replace(start, start + spawn))
    with laid_out((ArmChoice("base", str(tree)),), tmp_path, tmp_path / "run", keep=False) as (arm,):
        boot = Boot(make_model(arm, tmp_path / "model"), "cpu", Cores((), (), False), 20.0, 2.0)
    with serving(arm, boot, tmp_path / "server.log"):
        child = int(pid_file.read_text())
        assert psutil.pid_exists(child)
    end = time.monotonic() + 5
    while _alive(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_server_that_ends_while_starting_is_an_error_with_the_tail_of_its_log(tmp_path: Path) -> None:
    arm, boot = make_arm(tmp_path, exit_at_start=4)
    told = r"(?s)exit code 4 while starting.*\| the fake gives up at once"
    with pytest.raises(ServerError, match=told), serving(arm, boot, tmp_path / "server.log"):
        pass


def test_a_server_that_never_gets_healthy_is_an_error_and_is_ended(tmp_path: Path) -> None:
    arm, boot = make_arm(tmp_path, boot_ms=60000)
    short = Boot(boot.model, "cpu", boot.cores, boot_s=1.5, stop_s=1.0)
    with pytest.raises(ServerError, match="not healthy after 2 s"), serving(arm, short, tmp_path / "server.log"):
        pass
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(boot.model) in (p.info["cmdline"] or [])]


def test_a_server_that_refuses_its_arguments_after_a_long_log_is_quoted_by_its_last_line(tmp_path: Path) -> None:
    arm, boot = make_arm(tmp_path, exit_at_start=64)
    log = tmp_path / "server.log"
    with log.open("wb") as file:
        file.truncate(2**40)  # a hole of a TiB: nothing could read it whole
    with pytest.raises(UsageError) as told, serving(arm, boot, log):
        pass
    assert told.value.words == "the fake gives up at once: no such switch"


def test_a_url_that_has_died_costs_a_short_wait_and_not_a_whole_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate.session, "URL_WAIT_S", 0.5)
    arm, boot = make_arm(tmp_path)
    peer, began = Peer(arm.info, tmp_path, url=f"http://127.0.0.1:{free_port()}"), time.monotonic()
    with pytest.raises(ServerError, match="was not healthy after"), serving(peer, boot, tmp_path / "server.log"):
        pass
    assert time.monotonic() - began < boot.boot_s / 4


class Deep(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[" * 100_000)


def test_an_info_nested_too_deep_is_none_of_a_peer_and_an_error_of_a_tree(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Deep) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert peer_info(url) == {}
        with pytest.raises(ServerError, match="/info did not answer with JSON"):
            Server(url, None, tmp_path / "server.log", 0.0).info()
        server.shutdown()


def test_another_source_or_other_weights_are_refused_with_a_sentence(tmp_path: Path) -> None:
    arm, boot = make_arm(tmp_path)
    weights = weights_digest(boot.model)
    good = {"source_digest": arm.info.source_digest, "weights_digest": weights, "source_root": "/other"}
    check_identity(good, arm, weights)
    with pytest.raises(Refused, match=r"^base: the server runs source 123456789abc from /other, but the arm's tree"):
        check_identity(good | {"source_digest": "123456789abcdef"}, arm, weights)
    with pytest.raises(Refused, match=r"^base: the server runs source \(none stated\)"):
        check_identity({}, arm, weights)
    with pytest.raises(Refused, match=r"^base: the server loaded weights 123456789abc, but the plan's model folder"):
        check_identity(good | {"weights_digest": "123456789abcdef"}, arm, weights)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity call on this platform")
def test_the_server_is_pinned_to_its_cores_and_told_how_many_threads_they_carry(tmp_path: Path) -> None:
    arm, boot = make_arm(tmp_path)
    core = min(os.sched_getaffinity(0))
    pinned_boot = Boot(boot.model, "cpu", Cores((core,), (core,), True), 20.0, 1.0)
    with serving(arm, pinned_boot, tmp_path / "server.log") as server:
        (program,) = psutil.Process(server.child.process.pid).children()
        assert os.sched_getaffinity(program.pid) == {core}
        if sys.platform == "linux":
            environment = Path(f"/proc/{program.pid}/environ").read_bytes().split(b"\0")
            assert b"OMP_NUM_THREADS=1" in environment


def test_counters_are_the_engines_own_without_gauges_and_creation_times() -> None:
    text = (
        "# TYPE walkgate_steps counter\nwalkgate_steps_total 12.0\nwalkgate_steps_created 1.7e9\nwalkgate_resident_bytes 8.0\n"
        'walkgate_plans_total{walk="a b"} 3\npython_gc_objects 5\n'
    )
    assert parse_metrics(text) == {"walkgate_steps_total": 12.0, 'walkgate_plans_total{walk="a b"}': 3.0}
    assert counter_changes({"a": 2.0}, {"a": 5.0, "b": 1.0}) == {"a": 3.0, "b": 1.0}
