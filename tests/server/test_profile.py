"""`POST /profile` on a real server: windows of steps, what is refused, and what ends a window early."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.serving import Server, command, environment, serving, wait_until
from tests.shared import REPOSITORY

JSON = {"Content-Type": "application/json"}
API = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
NAMES = "name: must be 1 to 100 of the letters A-Z and a-z, digits, _, - and ."
SAID = {"text": "Name three rivers.", "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def profiled(tiny_checkpoint: Path, folder: Path) -> Iterator[Server]:
    with serving(tiny_checkpoint, folder.parent / "profiled.log", "--profile-dir", str(folder)) as running:
        yield running


def ask(server: Server, **body: object) -> tuple[int, dict]:
    status, data = server.request("POST", "/profile", json.dumps(body).encode(), JSON)
    return status, json.loads(data)


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """A server that answers one request after the other."""
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            server.answer(**SAID)

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(go_on)
        try:
            yield
        finally:
            stop.set()
            working.result(60)


def ranges(path: str | Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


def windows(server: Server) -> float:
    return server.metrics()["profile_windows_total"]


def open_window(server: Server, **body: object) -> http.client.HTTPConnection:
    """A connection that waits for the end of a window which is open by now."""
    before = windows(server)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/profile", json.dumps(body).encode(), JSON)
    assert wait_until(lambda: windows(server) == before + 1, 10)
    return connection


def test_a_window_is_a_trace_of_its_steps_and_changes_no_token(profiled: Server, folder: Path):
    plain = profiled.answer(**SAID)["token_ids"]
    before = windows(profiled)
    with ThreadPoolExecutor(1) as pool:
        window = pool.submit(ask, profiled, steps=8, skip=3, name="eight")
        assert wait_until(lambda: windows(profiled) == before + 1, 10)
        assert profiled.answer(**SAID)["token_ids"] == plain
        status, answer = window.result(30)
    assert status == 200
    assert answer.keys() == {"kind", "steps", "path", "seconds", "complete"}
    path = folder / "eight.json.gz"
    assert (answer["kind"], answer["steps"], answer["complete"], answer["path"]) == ("torch", 8, True, str(path))
    assert 0 < answer["seconds"] < 30
    names = [re.fullmatch(r"walkgate\.step (\d+) (\w+) rows=1 bucket=1", name) for name in ranges(path)]
    assert len(names) == 8 and all(names)
    numbers = [int(name[1]) for name in names]
    assert numbers == list(range(numbers[0], numbers[0] + 8))
    assert {name[2] for name in names} == {"thinker_text_decode"}


def test_a_trace_without_a_name_gets_one_of_its_own(profiled: Server, folder: Path):
    with busy(profiled):
        paths = [ask(profiled, steps=2, skip=0)[1]["path"] for _ in range(2)]
    assert len(set(paths)) == 2
    assert all(Path(path).parent == folder and len(ranges(path)) == 2 for path in paths)


def test_a_window_without_steps_ends_with_its_time_and_leaves_no_trace(profiled: Server, folder: Path):
    assert ask(profiled, seconds=0.3, name="none") == (
        200,
        {"kind": "torch", "steps": 0, "path": None, "seconds": 0.0, "complete": False},
    )
    assert not (folder / "none.json.gz").exists()


def test_a_window_that_gets_some_of_its_steps_says_how_many(profiled: Server):
    connection = open_window(profiled, steps=200, skip=4, seconds=3.0, name="some")
    profiled.answer(**SAID)
    answer = json.loads(connection.getresponse().read())
    # The prompt is one step, which makes the first of the 60 tokens.
    assert (answer["steps"], answer["complete"]) == (60 - 4, False)
    assert len(ranges(answer["path"])) == 60 - 4


def test_a_second_window_is_refused_and_a_client_that_leaves_does_not_close_its_own(profiled: Server, folder: Path):
    left = profiled.metrics()["http_disconnected_total"]
    connection = open_window(profiled, steps=5, skip=2, name="left")
    status, refused = ask(profiled, steps=1)
    assert (status, refused["error"]["code"]) == (409, "profile_open")
    connection.close()
    assert wait_until(lambda: profiled.metrics()["http_disconnected_total"] == left + 1, 10)
    assert ask(profiled, steps=1)[0] == 409
    profiled.answer(**SAID)
    assert wait_until((folder / "left.json.gz").exists, 10)
    assert wait_until(lambda: ask(profiled, seconds=0.1)[0] == 200, 10)
    assert len(ranges(folder / "left.json.gz")) == 5


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"kind": "nsight"}, "kind", "'torch' or 'cuda'"),
        ({"kind": "cuda"}, "kind", "needs a GPU and this engine runs on a CPU"),
        ({"kind": "cuda", "name": "a"}, "name", "writes no trace here"),
        ({"steps": 0}, "steps", "greater than or equal to 1"),
        ({"steps": 201}, "steps", "less than or equal to 200"),
        ({"steps": "5"}, "steps", "integer"),
        ({"steps": True}, "steps", "integer"),
        ({"skip": -1}, "skip", "greater than or equal to 0"),
        ({"skip": 10**6}, "skip", "less than or equal to 100000"),
        ({"seconds": 0}, "seconds", "greater than 0"),
        ({"seconds": 601}, "seconds", "less than or equal to 600"),
        ({"seconds": float("nan")}, "seconds", "finite"),
        ({"name": ""}, "name", NAMES),
        ({"name": "a/b"}, "name", NAMES),
        ({"name": "a\n"}, "name", NAMES),
        ({"name": "a" * 101}, "name", NAMES),
        ({"name": "taken"}, "name", "taken.json.gz is there already"),
        ({"path": "/etc/passwd"}, "path", "no such field"),
        ({"step": 5}, "step", "did you mean 'steps'"),
    ],
)
def test_what_cannot_be_profiled_is_refused(profiled: Server, folder: Path, body: dict, field: str, words: str):
    (folder / "taken.json.gz").touch()
    status, answer = ask(profiled, **body)
    assert (status, answer["error"]["field"]) == (400, field)
    assert words in answer["error"]["message"]


def test_two_dots_are_a_name_inside_the_folder(profiled: Server, folder: Path):
    with busy(profiled):
        assert ask(profiled, steps=1, skip=0, name="..")[1]["path"] == str(folder / "...json.gz")
    assert len(ranges(folder / "...json.gz")) == 1


def test_a_body_that_is_no_json_is_refused(profiled: Server):
    for data, headers, status in ((b"{", JSON, 400), (b"", JSON, 400), (b"{}", {}, 415), (b"[" * 101, JSON, 400)):
        assert profiled.request("POST", "/profile", data, headers)[0] == status


def test_a_trace_that_cannot_be_written_is_a_500_and_the_server_goes_on(profiled: Server, folder: Path):
    moved = folder.with_name("moved")
    folder.rename(moved)
    try:
        with busy(profiled):
            status, answer = ask(profiled, steps=2, skip=0)
    finally:
        moved.rename(folder)
    assert (status, answer["error"]["code"]) == (500, "engine")
    assert f"{folder}/steps-" in answer["error"]["message"]
    assert "No such file or directory; make room in the folder of --profile-dir" in answer["error"]["message"]
    with busy(profiled):
        assert ask(profiled, steps=2, skip=0)[1]["complete"] is True


@pytest.mark.skipif(shutil.which("curl") is None, reason="the example uses curl")
def test_the_example_of_the_manual_works(profiled: Server):
    start = API.index("## POST /profile")
    [script] = re.findall(r"```sh\n(.*?)```", API[start : API.index("\n## ", start + 1)], flags=re.DOTALL)
    at_port = script.replace("127.0.0.1:8000", f"127.0.0.1:{profiled.port}")
    assert at_port != script
    with busy(profiled):
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", at_port], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"] is True


def test_without_a_folder_nothing_is_profiled(server: Server):
    status, answer = ask(server)
    assert (status, answer["error"]["code"]) == (403, "profile_off")
    assert "--profile-dir DIR" in answer["error"]["message"]
    assert windows(server) == 0


def test_an_engine_that_dies_while_a_window_is_open_is_a_503(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log", "--profile-dir", str(tmp_path)) as running:
        connection = open_window(running, name="never")
        os.kill(running.engine_pid(), signal.SIGKILL)
        reply = connection.getresponse()
        answer = json.loads(reply.read())
        assert (reply.status, answer["error"]["code"]) == (503, "engine_dead")
        assert running.process.wait(10) == 70


def test_a_drain_ends_the_window_at_once_and_lets_no_other_begin(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log", "--profile-dir", str(tmp_path)) as running:
        late = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
        late.putrequest("POST", "/profile")
        for name, value in (JSON | {"Content-Length": "2"}).items():
            late.putheader(name, value)
        late.endheaders()
        waiting = open_window(running, steps=9, seconds=600)
        asked = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        answer = json.loads(waiting.getresponse().read())
        assert (answer["steps"], answer["path"], answer["complete"]) == (0, None, False)
        late.send(b"{}")
        reply = late.getresponse()
        assert (reply.status, json.loads(reply.read())["error"]["code"]) == (503, "draining")
        assert running.process.wait(10) == 0
        assert time.monotonic() - asked < 10


@pytest.mark.parametrize(
    ("name", "words"),
    [("", "the name is empty"), ("none", "does not exist"), ("file", "is not a folder")],
)
def test_what_is_no_folder_is_a_wrong_flag(tiny_checkpoint: Path, tmp_path: Path, name: str, words: str):
    (tmp_path / "file").touch()
    folder = tmp_path / name if name else ""
    serve = command("serve", str(tiny_checkpoint), "--port", "0", "--profile-dir", str(folder))
    done = subprocess.run(serve, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 64
    assert "--profile-dir" in done.stderr and words in done.stderr
