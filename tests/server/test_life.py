"""How a server starts, what it survives, and how it ends: no request is lost without a word, no process is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from engine.config import ServerSettings
from engine.errors import CheckpointError, WalkgateError
from engine.model.config import OmniConfig
from engine.server import life
from engine.server.cli import SHAPES_NAME, _listen, _model_folder
from engine.server.source import TRAINED_MODEL, trained_model
from tests.server.serving import (
    Server,
    audio_file,
    base64_text,
    command,
    environment,
    gone,
    serving,
    started,
    tone,
    wait_ready,
    wait_until,
)
from tests.shared import REPOSITORY

LONG = {"text": "Count to a thousand.", "max_tokens": 4000, "ignore_eos": True}


def idle(server: Server) -> bool:
    found = server.metrics()
    return found["requests_running"] == found["requests_waiting"] == found["http_open"] == 0


def run(*words: str, seconds: float = 60, **extra: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*words), capture_output=True, text=True, timeout=seconds, env=environment(**extra), cwd=REPOSITORY
    )


def raw_request(server: Server, body: dict, receive_buffer: int | None = None) -> socket.socket:
    """A connection on which a request was sent and nothing is read, with a small buffer if one is asked for."""
    data = json.dumps(body).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(60)
    client.connect(("127.0.0.1", server.port))
    client.sendall(head.encode() + data)
    return client


def test_a_client_that_leaves_its_stream_cancels_its_request(server: Server):
    before = server.metrics()
    reply = server.open_stream(**LONG)
    assert json.loads(reply.readline())["token_ids"]
    reply.close()
    assert wait_until(lambda: idle(server), 5)
    after = server.metrics()
    assert after["requests_cancelled_total"] - before["requests_cancelled_total"] == 1
    assert after["http_disconnected_total"] - before["http_disconnected_total"] == 1
    assert after["thinker_pages_free"] == after["thinker_pages"]
    assert after["slots_free"] == after["slots"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_any_answer_cancels_its_request(server: Server, stream: bool):
    before = server.metrics()["requests_cancelled_total"]
    with raw_request(server, LONG | {"stream": stream}):
        assert wait_until(lambda: server.metrics()["requests_running"] == 1, 5)
    assert wait_until(lambda: idle(server), 5)
    assert server.metrics()["requests_cancelled_total"] - before == 1


def test_twenty_cancelled_speech_requests_give_everything_back(server: Server):
    for _ in range(20):
        reply = server.open_stream(**LONG, output=["text", "audio"], speech={"ignore_eos": True})
        reply.readline()
        reply.close()
    assert wait_until(lambda: idle(server), 10)
    after = server.metrics()
    assert after["thinker_pages_free"] == after["thinker_pages"]
    assert after["talker_pages_free"] == after["talker_pages"]
    assert after["slots_free"] == after["slots"]


@pytest.mark.slow
def test_a_client_that_does_not_read_holds_up_nobody(server: Server):
    # Some 4 MB: more than the kernel keeps for a connection whose reader has a small window (2.8 MB, measured).
    speech = {"max_frames": 700, "ignore_eos": True, "codes": True}
    body = {"text": "Sing.", "output": ["audio"], "max_tokens": 20, "ignore_eos": True, "stream": True}
    before = server.metrics()
    with raw_request(server, body | {"speech": speech}, receive_buffer=4096) as slow:
        assert wait_until(lambda: server.metrics()["frames_total"] > before["frames_total"], 10)
        with ThreadPoolExecutor(8) as others:
            quick = [others.submit(server.answer, text="Quick.", max_tokens=40, ignore_eos=True) for _ in range(8)]
            assert [one.result(30)["usage"]["completion_tokens"] for one in quick] == [40] * 8
        assert server.metrics()["requests_running"] == 1
        # The engine ends the request although its reader has taken next to nothing of it: the front holds the rest.
        assert wait_until(lambda: server.metrics()["requests_running"] == 0, 60)
        assert server.metrics()["http_open"] == 1
        received = b""
        while b'"finished":true' not in received:
            received += slow.recv(1 << 16)
    assert len(received) > 3_500_000
    assert b'"audio_frames":700' in received
    assert wait_until(lambda: idle(server), 5)


def test_a_request_that_can_never_fit_the_pages_is_a_400_and_not_a_hang(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log", "--kv-pages", "8", "--model-len", "1024") as server:
        status, answer = server.post({"text": "a", "max_tokens": 500})
        assert status == 400, answer
        assert "8" in answer["error"]["message"]
        status, answer = server.post({"text": "a", "max_tokens": 500, "stream": True})
        assert status == 400, answer
        assert server.answer(text="a", max_tokens=20, ignore_eos=True)["usage"]["completion_tokens"] == 20
        status, answer = server.post({"text": "a", "max_tokens": 1024})
        assert (status, answer["error"]["field"]) == (400, "max_tokens")
        assert "1024" in answer["error"]["message"]
        assert server.get("/info")[1]["limits"]["max_audio_seconds"] == 77


def test_a_limit_that_was_not_asked_for_shrinks_to_the_pages_that_there_are(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log", "--kv-pages", "4") as server:
        usage = server.answer(text="a", ignore_eos=True)["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] == 4 * 16
        speech = {"ignore_eos": True}
        usage = server.answer(text="a", ignore_eos=True, output=["text", "audio"], speech=speech)["usage"]
        assert 16 < usage["audio_frames"] < 4 * 16
        status, answer = server.post({"text": "a", "output": ["audio"], "speech": {"max_frames": 100}})
        assert (status, answer["error"]["field"]) == (400, "speech.max_frames")
        status, answer = server.post({"text": "a" * 100})
        assert (status, answer["error"]["field"]) == (400, "text")
        assert "this server takes 64 tokens a request" in answer["error"]["message"]
        chat = {"model": tiny_checkpoint.name, "messages": [{"role": "user", "content": "a"}]}
        headers = {"Content-Type": "application/json"}
        assert server.request("POST", "/v1/chat/completions", json.dumps(chat).encode(), headers)[0] == 200


def test_switches_show_in_info_and_leave_the_text_alone(server: Server, tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log", "--disable", "batching, text_walk") as other:
        switches = other.get("/info")[1]["switches"]
        assert sorted(name for name, on in switches.items() if not on) == ["batching", "launch_ahead", "text_walk"]
        body = {"text": "What changes?", "max_tokens": 12, "ignore_eos": True}
        assert other.answer(**body) == server.answer(**body)


def test_health_says_starting_before_it_says_ok(tiny_checkpoint: Path, tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with started(tmp_path / "log", str(tiny_checkpoint), "--port", str(port)) as server:
        server.port = port
        seen: list[tuple[int, str]] = []
        told: list[tuple[str, int, float]] = []

        def ok() -> bool:
            try:
                status, answer = server.get("/health")
            except OSError:
                return False
            seen.append((status, answer["status"]))
            if status != 200:
                refused, info, metrics = server.post({"text": "a"}), server.get("/info"), server.metrics()
                if server.get("/health")[0] != 200:  # it did not become ready in between
                    told.append((refused[1]["error"]["code"], info[0], metrics["engine_answered"]))
            return status == 200

        assert wait_until(ok, 90)
        assert told and set(told) == {("starting", 503, 0)}
        assert seen[0] == (503, "starting")
        assert seen[-1] == (200, "ok")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_engine_starts_ends_quietly_with_0(tmp_path: Path, number: signal.Signals):
    with started(tmp_path / "log", "--port", "0") as server:
        status = Path(f"/proc/{server.process.pid}/status")

        def catches_signals() -> bool:
            caught = re.search(r"SigCgt:\s*(\w+)", status.read_text())
            return bool(caught and int(caught[1], 16) & (1 << (signal.SIGTERM - 1)))

        assert wait_until(catches_signals, 30)
        server.process.send_signal(number)
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.text()


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@contextmanager
def with_template(checkpoint: Path, folder: Path, source: str, *words: str) -> Iterator[Server]:
    """A server, asked for at a port of its own, of a copy of the checkpoint with another chat template."""
    model = folder / "model"
    shutil.copytree(checkpoint, model)
    (model / "chat_template.jinja").write_text(source)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with started(folder / "log", str(model), "--port", str(port), *words) as server:
        server.port = port
        yield server


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_whose_chat_template_never_does(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    monkeypatch.setenv("TMPDIR", str(sockets))
    with with_template(tiny_checkpoint, tmp_path, ENDLESS + "{{ messages[0].content }}") as server:
        assert wait_until(lambda: answers(server.port, 503), 60)
        time.sleep(2.0)  # by when another template would have been read
        engine = server.engine_pid()
        server.process.send_signal(number)
        assert server.process.wait(10) == 0
        assert wait_until(lambda: gone(engine), 2)
        assert "Traceback" not in server.text()
    assert list(sockets.iterdir()) == []


def test_a_request_at_which_the_chat_template_never_ends_does_not_keep_the_server(
    tiny_checkpoint: Path, tmp_path: Path
):
    source = "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    with with_template(tiny_checkpoint, tmp_path, source, "--drain-seconds", "1") as server:
        assert wait_until(lambda: answers(server.port), 60)
        with raw_request(server, {"text": "loop", "max_tokens": 1}) as client:
            assert wait_until(lambda: server.metrics()["http_open"] == 1, 10)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(10) == 0
            assert b"shutting_down" in client.recv(1 << 16)
        assert "omni: cut: 1 open request\n" in server.text() and "Traceback" not in server.text()


def test_an_interrupt_under_load_ends_streams_with_an_error_and_the_process_with_0(
    tiny_checkpoint: Path, tmp_path: Path
):
    with serving(tiny_checkpoint, tmp_path / "log") as server:
        engine = server.engine_pid()
        replies = [server.open_stream(**LONG) for _ in range(4)]
        for reply in replies:
            reply.readline()
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        last = [json.loads(reply.read().splitlines()[-1])["error"] for reply in replies]
        assert [(error["message"], error["code"]) for error in last] == [
            ("the server is shutting down", "shutting_down")
        ] * 4
        assert "omni: cut: 4 open requests\n" in server.text() and "draining" not in server.text()
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < 5
        assert wait_until(lambda: gone(engine), 2)
        assert "Traceback" not in server.text()


def test_a_signal_to_the_whole_process_group_is_a_clean_end_too(tiny_checkpoint: Path, tmp_path: Path):
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command("serve", str(tiny_checkpoint), "--port", "0"),
            stdout=out, stderr=out, env=environment(), start_new_session=True,
        )  # fmt: skip
    server = wait_ready(Server(process, 0, log))
    engine = server.engine_pid()
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(10) == 0
    assert wait_until(lambda: gone(engine), 2)


def test_an_engine_that_is_killed_fails_its_streams_within_two_seconds_and_ends_the_server_with_70(
    tiny_checkpoint: Path, tmp_path: Path
):
    with serving(tiny_checkpoint, tmp_path / "log") as server:
        replies = [server.open_stream(**LONG) for _ in range(2)]
        chat = LONG | {"model": "tiny-checkpoint", "messages": [{"role": "user", "content": "Count."}]}
        del chat["text"]
        replies.append(server.open_stream("/v1/chat/completions", **chat))
        for reply in replies:
            reply.readline()
        began = time.monotonic()
        os.kill(server.engine_pid(), signal.SIGKILL)
        last = [json.loads(reply.read().strip().splitlines()[-1].removeprefix(b"data: ")) for reply in replies]
        assert time.monotonic() - began < 2
        assert [line["error"]["message"] for line in last] == ["the engine process ended by signal 9"] * 3
        assert server.get("/health") == (503, {"status": "dead"})
        status, answer = server.post({"text": "a"})
        assert (status, answer["error"]["code"]) == (503, "dead")
        assert server.process.wait(10) == 70
        assert time.monotonic() - began < 2.5
        assert "the engine process ended by signal 9" in server.text()


def test_an_engine_whose_front_is_killed_ends_too(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log") as server:
        engine = server.engine_pid()
        server.process.kill()
        assert wait_until(lambda: gone(engine), 2)


def test_no_socket_folder_is_left_behind(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "t"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    with serving(tiny_checkpoint, tmp_path / "log") as server:
        assert list(place.iterdir()) == []
        assert server.answer(text="Still joined?", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
        server.process.terminate()
        assert server.process.wait(10) == 0
    assert list(place.iterdir()) == []


def test_a_tree_in_the_working_folder_is_not_imported_by_the_engine(tiny_checkpoint: Path, tmp_path: Path):
    decoy = tmp_path / "engine"
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise SystemExit('the decoy was imported')\n")
    log = tmp_path / "log"
    # As the installed command does it: the interpreter gets a script, so the working folder is not on its own path.
    script = tmp_path / "bin" / "omni"
    script.parent.mkdir()
    script.write_text("from engine.server.cli import main\nmain()\n")
    words = [sys.executable, str(script), "serve", str(tiny_checkpoint), "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, cwd=tmp_path, env=environment())
    try:
        server = wait_ready(Server(process, 0, log))
        assert server.get("/info")[1]["source_root"] == str(REPOSITORY)
        assert psutil.Process(server.engine_pid()).cwd() == str(tmp_path)
    finally:
        process.terminate()
        process.wait(10)


def test_a_port_in_use_is_one_line_and_1(server: Server, tiny_checkpoint: Path):
    done = run("serve", str(tiny_checkpoint), "--port", str(server.port))
    assert done.returncode == 1
    want = f"omni: can't listen on 127.0.0.1:{server.port}: Address already in use; name another with --port\n"
    assert done.stderr == want


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("serve", "/nowhere"), 1, "/nowhere is not a folder"),
        (("serve", "tests"), 1, "tests has no config.json"),
        (("serve", "--disable", "batchin"), 64, "no switch is called 'batchin'; there are text_walk"),
        (("serve", "--dtype", "int8"), 64, "--dtype must be one of float32, bfloat16, float16"),
        (("serve", "--port", "x"), 64, "--port"),
        (("serve", "--port", "70000"), 64, "--port"),
        (("serve", "--threads", "0"), 64, "--threads"),
        (("serve", "--threads", "1025"), 64, "--threads must be at most 1024, is 1025"),
        (("serve", "--kv-pages", "1" + 30 * "0"), 64, "--kv-pages must be at most 4194304"),
        (("serve", "--device", "abacus"), 64, "--device 'abacus' is not served yet; there is cpu"),
        (("serve", "--device", "cuda:x"), 64, "--device 'cuda:x' is not served yet"),
        (("serve", "--batch-invariant"), 64, "--batch-invariant is for a GPU"),
        (("serve", "--prot", "1"), 64, "--prot"),
        (("serve", "--max-queue", "-1"), 64, "--max-queue"),
        (("serve", "--wedge-seconds", "nan"), 64, "--wedge-seconds must be above 0 and finite, is nan"),
        (("serve", "--drain-seconds", "-1"), 64, "--drain-seconds must be at least 0 and finite, is -1"),
        (("serve", "--api-key", ""), 64, "a key of --api-key or WALKGATE_API_KEY is empty"),
        (("serv",), 64, "serv"),
        (("tiny",), 64, "--out"),
        (("tiny", "--out", "tests"), 64, "not an empty folder"),
        (("tiny", "train", "--out", "tests", "--plan", "large"), 64, "--plan must be one of h200, small"),
        (("tiny", "train", "--out", "tests", "--only", "export"), 64, "--only: stage export needs texts"),
        (("info", "/nowhere"), 1, "/nowhere is not a folder"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_the_fault(words: tuple[str, ...], code: int, message: str):
    done = run(*words)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert done.stderr.startswith("omni: ") and done.stderr.count("\n") == 1


def test_a_model_len_beyond_the_model_is_refused(tiny_checkpoint: Path):
    done = run("serve", str(tiny_checkpoint), "--port", "0", "--model-len", "5000")
    assert done.returncode == 64
    assert "--model-len 5000 is more than the model's 4096 positions" in done.stderr


def test_more_audio_than_the_model_holds_is_refused(tiny_checkpoint: Path):
    done = run("serve", str(tiny_checkpoint), "--port", "0", "--model-len", "1024", "--max-audio-seconds", "78")
    assert done.returncode == 64
    assert "--max-audio-seconds 78 is more than the 77 s that 1024 tokens hold" in done.stderr


def test_a_folder_without_weights_ends_with_the_reason(tiny_checkpoint: Path, tmp_path: Path):
    for file in tiny_checkpoint.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    done = run("serve", str(tmp_path), "--port", "0")
    assert done.returncode == 1, done.stderr
    assert "safetensors" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_http_side_that_fails_ends_the_server_with_the_reason(tiny_checkpoint: Path):
    listener = socket.socket()
    listener.close()
    children = set(psutil.Process().children())
    serving_it = life.serve(
        tiny_checkpoint, OmniConfig.load(tiny_checkpoint), ServerSettings(), listener, lambda _: pytest.fail("ready")
    )
    with pytest.raises(WalkgateError, match=r"the HTTP server ended: .*Bad file descriptor"):
        asyncio.run(asyncio.wait_for(serving_it, 60))
    left = set(psutil.Process().children()) - children
    assert wait_until(lambda: all(gone(child.pid) for child in left), 10)


def test_weights_that_are_cut_off_end_the_server_with_the_files_name(tiny_checkpoint: Path, tmp_path: Path):
    shutil.copytree(tiny_checkpoint, tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    done = run("serve", str(file.parent), "--port", "0")
    assert done.returncode == 1, done.stderr
    assert f"{file} can't be read as safetensors" in done.stderr
    assert done.stderr.count("\n") == 1


def test_pages_beyond_the_memory_are_one_line_and_1(tiny_checkpoint: Path):
    # 8 GiB of address space: enough to load the model, too little for the pages.
    words = command("serve", str(tiny_checkpoint), "--port", "0", "--kv-pages", "4000000")
    limited = ["bash", "-c", 'ulimit -v 8388608; exec "$@"', "bash", *words]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=60, env=environment(), cwd=REPOSITORY)
    assert done.returncode == 1, done.stderr
    assert "there is no memory for 4000000 KV pages; ask for fewer with --kv-pages" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_is_claimed_before_anything_is_loaded():
    first = _listen("127.0.0.1", 0)
    try:
        port = first.getsockname()[1]
        with pytest.raises(WalkgateError, match=f"can't listen on 127.0.0.1:{port}: Address already in use"):
            _listen("127.0.0.1", port)
    finally:
        first.close()


def test_a_client_that_leaves_while_its_clips_are_read_ends_that_work(server: Server):
    clips = [base64_text(audio_file(tone(0.03), kind="FLAC"))] * 4000
    before = server.metrics()["http_disconnected_total"]
    with raw_request(server, {"text": "a", "max_tokens": 1, "audio": clips}):
        assert wait_until(lambda: server.metrics()["http_open"] == 1, 5)
    assert wait_until(lambda: idle(server), 1)  # all of them would take about two seconds
    assert server.metrics()["http_disconnected_total"] - before == 1


def test_tiny_makes_the_folder_and_info_reads_it_as_json(tmp_path: Path):
    done = run("tiny", "--out", str(tmp_path / "small"))
    assert done.returncode == 0, done.stderr
    shown = run("info", str(tmp_path / "small"), "--json")
    found = json.loads(shown.stdout)
    assert found["model"]["thinker"]["vocab"] == 512
    assert found["limits"] == {"max_model_len": 4096, "max_audio_seconds": 313}
    assert found["source_root"] == str(REPOSITORY)
    assert found["tasks"] == ["T2T", "A2T", "T2S", "A2S"]


def test_the_released_shapes_are_made_once_in_the_users_cache(tmp_path: Path):
    first = run("info", SHAPES_NAME, XDG_CACHE_HOME=str(tmp_path))
    assert first.returncode == 0, first.stderr
    (folder,) = (tmp_path / "walkgate").iterdir()
    assert folder.name.startswith(SHAPES_NAME)
    made = (folder / "config.json").stat().st_mtime_ns
    second = run("info", SHAPES_NAME, XDG_CACHE_HOME=str(tmp_path))
    assert second.stdout == first.stdout
    assert str(folder) in second.stdout
    assert (folder / "config.json").stat().st_mtime_ns == made


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("closed", [">/dev/full", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_server_serves_where_its_words_go_nowhere(tiny_checkpoint: Path, closed: str):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = shlex.join(command("serve", str(tiny_checkpoint), "--port", str(port)))
    with subprocess.Popen(
        ["bash", "-c", f"exec {words} {closed}"], env=environment(), stderr=subprocess.PIPE
    ) as server:
        try:
            assert wait_until(lambda: answers(port), 60)
        finally:
            server.terminate()
        assert server.wait(30) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", ["info", "info --json", "--help", "serve --help", "tiny --help"])
def test_output_that_finds_no_room_is_one_line_and_1_and_a_reader_that_left_is_no_fault(words: str):
    omni = f"{shlex.join(command())} {words}"
    for script, code, complaint in (
        (f"{omni} > /dev/full", 1, "omni: standard output can't be written: No space left on device\n"),
        (f"{omni} | true; exit ${{PIPESTATUS[0]}}", 0, ""),
    ):
        done = subprocess.run(["bash", "-c", script], env=environment(), capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (code, complaint)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_complaint_that_finds_no_room_keeps_its_exit_code():
    script = f"{shlex.join(command('serve', '--port', 'x'))} 2> /dev/full"
    assert subprocess.run(["bash", "-c", script], env=environment(), timeout=60).returncode == 64


def answers(port: int, status: int = 200) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return reply.status == status
    except urllib.error.HTTPError as error:
        return error.code == status
    except OSError:
        return False


def test_without_a_model_and_by_its_name_the_trained_one_of_the_package_is_meant(tmp_path: Path):
    found = [run("info", *words, "--json", XDG_CACHE_HOME=str(tmp_path)) for words in ((), (TRAINED_MODEL,))]
    assert [done.returncode for done in found] == [0, 0], found[0].stderr
    assert found[0].stdout == found[1].stdout
    assert json.loads(found[0].stdout)["model"]["folder"] == str(trained_model())
    assert list(tmp_path.iterdir()) == []


def test_the_trained_model_is_served_by_its_name_and_speaks_until_it_ends(tmp_path: Path):
    with serving(Path(TRAINED_MODEL), tmp_path / "log") as server:
        answer = server.answer(text="What is two plus three?", max_tokens=64, output=["text", "audio"])
        assert (answer["finish_reason"], answer["audio_finish_reason"]) == ("stop", "stop")
        assert [one["id"] for one in server.get("/v1/models")[1]["data"]] == [TRAINED_MODEL]


def test_a_source_without_the_trained_model_says_what_to_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.server.cli.trained_model", lambda: tmp_path / TRAINED_MODEL)
    for model in (None, Path(TRAINED_MODEL)):
        with pytest.raises(
            CheckpointError, match=r"this source has no .*/omni-tiny; name a checkpoint folder: omni tiny"
        ):
            _model_folder(model)


def test_help_has_examples():
    for words in ((), ("serve",), ("tiny",), ("info",)):
        done = run(*words, "--help")
        assert done.returncode == 0
        assert "omni" in done.stdout
        assert "python" not in done.stdout
        assert not words or "Example" in done.stdout
        if words == ("serve",):
            assert all(
                path in done.stdout for path in ("/v1/chat/completions", "/v1/audio/speech", "/generate", "/metrics")
            )
