"""Whole comparisons with peers: servers that are no tree of ours, started by a command or running at a URL."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import gate.wish
from gate.arm import ArmChoice, ArmError, resolve
from gate.client import Limits
from gate.process import Child
from gate.run import carry_out, resume, write_report
from gate.session import Refused, free_port, is_healthy, serving
from gate.wish import Wish, check
from tests.gate.test_run import Notes
from tests.gate.test_session import make_arm
from tests.gate.trees import make_tree, make_workloads, serve_words


def make_wish(tmp_path: Path, base: str, head: str, **changes: object) -> Wish:
    wish = Wish(
        choices=(ArmChoice("base", base), ArmChoice("head", head)),
        repository=tmp_path,
        run_dir=tmp_path / "run",
        sessions=2,
        cells=("T2T@1",),
        workloads=make_workloads(tmp_path / "workloads"),
        limits=Limits(request_s=10.0, silence_s=2.0),
        boot_s=20.0,
    )
    return replace(wish, **changes)  # type: ignore[arg-type]


def command(tmp_path: Path, name: str, **behaviour: object) -> str:
    return "cmd:" + serve_words(make_tree(tmp_path / name, **behaviour))


def model(tmp_path: Path) -> Path:
    folder = tmp_path / "some" / "where" / "weights"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


@contextmanager
def running(tmp_path: Path, *names: str, **behaviour: object) -> Iterator[list[str]]:
    """URLs of servers that nobody but this test starts and ends."""
    with ExitStack() as stack:
        urls = []
        for name in names:
            arm, boot = make_arm(tmp_path / name, **behaviour)
            urls.append(stack.enter_context(serving(arm, boot, tmp_path / f"{name}.log")).url)
        yield urls


def test_two_commands_are_booted_asked_at_the_openai_door_and_compared_as_text(tmp_path: Path) -> None:
    flip = {"marker": "number", "step": 5}
    base, head = command(tmp_path, "one", peer=True), command(tmp_path, "two", peer=True, flip=flip)
    wish = make_wish(tmp_path, base, head, model=model(tmp_path))
    folder = carry_out(wish, Notes())
    data = folder.load()
    assert (data.plan.door, [arm.kind for arm in data.plan.arms]) == ("openai", ["command", "command"])
    assert [session.info for session in data.sessions] == [{}] * 4
    assert all(record.ok and record.completion_tokens == 8 and not record.token_ids for record in data.records)
    outcome = write_report(folder)
    report = folder.report.read_text()
    assert outcome.code == 1 and {move.item for move in outcome.comparisons.moves} != set()
    assert "a peer: no /info, source not checked (command arm)" in report
    assert "- both arms were asked at /v1/chat/completions: tokens are counted by usage and compared as text" in report
    assert "prompt tokens a request, base and head: T2T@1 3 and 3. Equal in every request." in report
    assert "**Tokens** (greedy, as text, a step is a character;" in report
    assert "one boot" not in report.replace("each number is one boot", "")
    assert f"weights {data.plan.model_digest}" in report and str(tmp_path / "some") not in report
    assert str(tmp_path / "some") not in (folder.path / "report.json").read_text()
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path / "one") in " ".join(p.info["cmdline"] or [])]
    assert left == []


def test_a_tree_beside_a_peer_is_asked_at_the_same_door_and_a_prompt_that_grew_shows(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    peer = command(tmp_path, "two", peer=True, page=True, sound="omni", more_prompt=5)
    wish = make_wish(tmp_path, str(tree), peer, cells=("A2T@1", "A2S@1"), sessions=1)
    folder = carry_out(wish, Notes())
    data = folder.load()
    assert data.plan.door == "openai" and all(record.ok for record in data.records)
    by_arm = {record.arm: record.pcm_samples for record in data.records if record.cell == "A2S@1"}
    # Our server is told how many frames; the peer knows no such field and speaks for as long as it likes.
    assert by_arm == {"base": 4 * 1920, "head": 8 * 1920}
    write_report(folder)
    told = "A2T@1 3 and 8 (equal in 0 of 3 requests); A2S@1 3 and 8 (equal in 0 of 2 requests)."
    assert f"{told} **The arms did not read the same prompt.**" in folder.report.read_text()


def test_two_urls_of_ours_are_asked_at_our_door_left_running_and_their_verdicts_marked(tmp_path: Path) -> None:
    with running(tmp_path, "one", "two", token_ms=3) as (base, head):
        folder = carry_out(make_wish(tmp_path, base + "/v1/", head), Notes())
        assert is_healthy(base) and is_healthy(head)
    data = folder.load()
    assert (data.plan.door, data.plan.model_path) == ("generate", "")
    assert [arm.ref for arm in data.plan.arms] == [base, head]
    assert all(record.ok and len(record.token_ids) == 8 for record in data.records)
    outcome = write_report(folder)
    report = folder.report.read_text()
    assert outcome.comparisons.one_boot == ["base", "head"]
    source = next(session.source_digest for session in data.sessions if session.arm == "base")
    assert f"source {source}, not checked (URL arm)" in report
    assert "- one boot: every session of base and head met the same running server" in report
    # The two trees differ in nothing, and so do the bytes that their digests are of.
    assert not outcome.comparisons.faults


def test_urls_with_other_weights_or_a_source_that_changed_are_invalid(tmp_path: Path) -> None:
    with running(tmp_path, "one", weights_digest="e" * 64) as (base,), running(tmp_path, "two") as (head,):
        folder = carry_out(make_wish(tmp_path, base, head, sessions=1), Notes())
    assert write_report(folder).code == 3
    assert "loaded weights" in folder.report.read_text()


def test_a_url_beside_a_tree_must_serve_the_plans_weights(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    with (
        running(tmp_path, "one", weights_digest="e" * 64) as (url,),
        pytest.raises(Refused, match="head: the server loaded weights eeeeeeeeeeee"),
    ):
        carry_out(make_wish(tmp_path, str(tree), url, sessions=1), Notes())


def test_the_door_can_be_asked_for_and_one_that_a_server_has_not_is_refused(tmp_path: Path) -> None:
    ours, peer = command(tmp_path, "one"), command(tmp_path, "two", peer=True)
    asked = make_wish(tmp_path, ours, ours, model=model(tmp_path), door="generate", sessions=1)
    data = carry_out(asked, Notes()).load()
    assert all(record.ok and len(record.token_ids) == 8 for record in data.records)
    wrong = replace(asked, choices=(ArmChoice("base", peer), ArmChoice("head", peer)), run_dir=tmp_path / "other")
    with pytest.raises(Refused, match=r"head: the server's /info does not list generate/1; ask it by --door openai"):
        carry_out(wrong, Notes())
    with pytest.raises(ArmError, match="--door 'window' does not exist; there are auto, generate, openai"):
        check(replace(asked, door="window"))


def test_the_api_key_reaches_peers_and_no_file_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "another-secret")
    monkeypatch.setenv("WALKGATE_GATE_API_KEY", "a-secret-of-mine")
    base = command(tmp_path, "one", peer=True, key="a-secret-of-mine")
    folder = carry_out(make_wish(tmp_path, base, base, model=model(tmp_path), sessions=1), Notes())
    write_report(folder)
    assert all(record.ok for record in folder.load().records)
    written = [path for path in folder.path.rglob("*") if path.is_file()]
    assert len(written) > 10
    assert [path for path in written if b"secret-of-mine" in path.read_bytes()] == []


def test_a_peer_that_never_sends_usage_is_broken_and_says_why(tmp_path: Path) -> None:
    good, bad = command(tmp_path, "one", peer=True), command(tmp_path, "two", peer=True, no_usage=True)
    folder = carry_out(make_wish(tmp_path, good, bad, model=model(tmp_path), sessions=1), Notes())
    assert write_report(folder).code == 1
    assert "no usage came, though stream_options.include_usage asked for it" in folder.report.read_text()


@pytest.mark.parametrize(
    ("ref", "told"),
    [
        ("cmd:serve --port 8000", "does not say where its port goes; put {port} there"),
        ("cmd:no-such-program --port {port}", "starts with 'no-such-program', which is no program on PATH"),
        ("cmd:sh 'x {port}", "is not quoted as a shell wants it"),
        ("ftp://host:1", "is no server's address; write http://host:port"),
        ("http://", "is no server's address"),
        ("http://me:pass@host:1", "holds a password, which the report would show"),
    ],
)
def test_a_peer_that_cannot_be_is_one_sentence(tmp_path: Path, ref: str, told: str) -> None:
    with pytest.raises(ArmError) as caught:
        resolve(ArmChoice("head", ref), tmp_path)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_url_whose_server_was_started_a_moment_ago_is_waited_for(tmp_path: Path) -> None:
    port, tree = free_port(), make_tree(tmp_path / "slow", boot_ms=1500)
    words = [
        sys.executable,
        str(tree / "engine" / "server" / "cli.py"),
        "serve",
        str(model(tmp_path)),
        "--port",
        str(port),
    ]
    server = Child(words, cwd=tmp_path, env=dict(os.environ))
    try:
        url = f"http://127.0.0.1:{port}"
        assert not is_healthy(url)
        check(make_wish(tmp_path, url, url))
        assert is_healthy(url)
    finally:
        server.stop()


def test_a_peer_that_lacks_what_it_needs_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate.wish, "URL_PATIENCE_S", 1.0)
    peer = command(tmp_path, "one", peer=True)
    with pytest.raises(ArmError, match=r"a command names \{model\}, but there is none: name a checkpoint with --model"):
        carry_out(make_wish(tmp_path, peer, peer), Notes())
    away = make_wish(tmp_path / "b", "http://127.0.0.1:9", "http://127.0.0.1:9")
    with pytest.raises(
        ArmError, match=r"base http://127\.0\.0\.1:9 answers neither /health nor /v1/models in 1 s; start it first"
    ):
        carry_out(away, Notes())
    with pytest.raises(ArmError, match=r"head is a URL, so --head-args and --head-env reach nobody"):
        resolve(ArmChoice("head", "http://127.0.0.1:9", args=("--x",)), tmp_path)
    assert not (tmp_path / "run").exists() and not (tmp_path / "b" / "run").exists()


def test_a_run_with_peers_is_resumed_from_its_wish(tmp_path: Path) -> None:
    base = command(tmp_path, "one", peer=True)
    wish = make_wish(tmp_path, base, base, model=model(tmp_path), sessions=1)
    folder = carry_out(wish, Notes(), stop_after_s=0.0)
    assert folder.load().records == []
    again = resume(folder.path, Notes()).load()
    assert len(again.records) == 2 * 5 and all(record.ok for record in again.records)
    words = shlex.split(again.plan.command)
    assert words[:4] == ["gate", "compare", base, base]


def test_a_commands_folder_and_environment_are_the_gates_with_the_arms_own(tmp_path: Path) -> None:
    script = tmp_path / "peer.sh"
    tree = make_tree(tmp_path / "one", peer=True)
    serve = serve_words(tree).format(port="$1", model=".")
    script.write_text(f'pwd > "{tmp_path}/where"; echo "$X" >> "{tmp_path}/where"; exec {serve}\n')
    choice = ArmChoice("base", "cmd:sh peer.sh {port}", env=(("X", "7"),))
    wish = make_wish(tmp_path, "", "", sessions=1)
    carry_out(replace(wish, choices=(replace(choice), replace(choice, name="head"))), Notes())
    assert (tmp_path / "where").read_text().splitlines() == [str(tmp_path), "7"]
