"""Faults planted in a copy of the engine: which ones cost one request, and which ones end the server with a word."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.server.serving import Server, environment, wait_ready, wait_until
from tests.shared import REPOSITORY

ADD = "    def add(self, request: Request) -> None:\n"
STEP = "    def step(self) -> list[Event]:\n"


def planted(tmp_path: Path, after: str, code: str, name: str = "engine.py") -> Path:
    """A copy of the engine's tree in which `code` follows every line `after` of the file."""
    tree = tmp_path / "tree"
    shutil.copytree(REPOSITORY / "engine", tree / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    file = tree / "engine" / name
    source = file.read_text()
    assert after in source, f"{after!r} is not in {name}"
    file.write_text(source.replace(after, after + code))
    return tree


@contextmanager
def served(tree: Path, model: Path, log: Path, *words: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "engine.server.cli", "serve", str(model), "--port", "0", *words]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=tree, env=environment(PYTHONPATH=str(tree)))
    try:
        yield Server(process, 0, log)
    finally:
        process.kill()
        process.wait()


def test_a_fault_while_one_request_is_added_is_a_500_and_the_others_go_on(tiny_checkpoint: Path, tmp_path: Path):
    fault = "        if request.max_tokens == 13:\n            raise ValueError('thirteen is planted')\n"
    tree = planted(tmp_path, ADD, fault)
    with served(tree, tiny_checkpoint, tmp_path / "log") as server:
        wait_ready(server)
        assert server.get("/info")[1]["source_root"] == str(tree)
        other = server.open_stream(text="Go on.", max_tokens=300, ignore_eos=True)
        other.readline()
        for stream in (True, False):
            status, answer = server.post({"text": "a", "max_tokens": 13, "stream": stream})
            assert (status, answer["error"]["message"]) == (500, "ValueError: thirteen is planted")
        assert json.loads(other.read().splitlines()[-1])["usage"]["completion_tokens"] == 300
        assert "thirteen is planted" in server.text()


def test_a_request_that_fails_in_the_model_ends_alone_streamed_or_not(tiny_checkpoint: Path, tmp_path: Path):
    # Only the request with the long prompt ever decodes at position 220.
    fault = "        if any(row.start == 220 for row in step.rows):\n            raise ValueError('planted')\n"
    tree = planted(tmp_path, "    def launch(self, step: Step) -> Launched:\n", fault, "runner.py")
    long = {"prompt_token_ids": [65] * 200, "max_tokens": 100, "ignore_eos": True}
    with served(tree, tiny_checkpoint, tmp_path / "log") as server:
        wait_ready(server)
        short = {"text": "Go on.", "max_tokens": 100, "ignore_eos": True}
        alone = server.answer(**short)
        other = server.open_stream(**short)
        lines = server.lines(**long)
        assert sum(len(line.get("token_ids", [])) for line in lines) == 21
        assert lines[-1] == {"error": {"message": "ValueError: planted", "field": None, "code": "engine"}}
        assert server.post(long) == (500, lines[-1])
        ids = [token for line in other.read().splitlines() for token in json.loads(line).get("token_ids", [])]
        assert ids == alone["token_ids"]
        found = server.metrics()
        assert found["http_failed_total"] == found["requests_failed_total"] == 2
        assert found["thinker_pages_free"] == found["thinker_pages"]


def test_a_fault_of_a_step_ends_every_stream_and_the_server_with_70(tiny_checkpoint: Path, tmp_path: Path):
    count = "        self.count = getattr(self, 'count', 0) + 1\n"
    tree = planted(tmp_path, STEP, f"{count}        if self.count == 5:\n            raise RuntimeError('planted')\n")
    with served(tree, tiny_checkpoint, tmp_path / "log") as server:
        wait_ready(server)
        reply = server.open_stream(text="Go on.", max_tokens=300, ignore_eos=True)
        lines = [json.loads(line) for line in reply.read().splitlines()]
        assert sum(len(line.get("token_ids", [])) for line in lines) == 4
        assert lines[-1]["error"]["message"] == "the engine process ended with exit code 70"
        assert server.process.wait(5) == 70
        assert "RuntimeError: planted" in server.text()


def test_an_engine_from_another_tree_is_refused(tiny_checkpoint: Path, tmp_path: Path):
    tree = planted(tmp_path, ADD, "")
    worker = tree / "engine" / "server" / "worker.py"
    worker.write_text(worker.read_text().replace("str(engine.__file__)", "'/elsewhere/engine/__init__.py'"))
    with served(tree, tiny_checkpoint, tmp_path / "log") as server:
        assert server.process.wait(60) == 1
        assert "the engine process imported /elsewhere/engine/__init__.py" in server.text()


@pytest.mark.parametrize("seconds", [0.6, 1.4])
def test_a_signal_while_the_model_loads_is_a_clean_end(tiny_checkpoint: Path, tmp_path: Path, seconds: float):
    tree = planted(tmp_path, "        self.model = model\n", "        import time\n        time.sleep(60)\n")
    with served(tree, tiny_checkpoint, tmp_path / "log") as server:
        # The front has its signal handlers once it has a child.
        assert wait_until(lambda: psutil.Process(server.process.pid).children() != [], 30)
        time.sleep(seconds)
        children = psutil.Process(server.process.pid).children()
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < 5
        assert not any(child.is_running() for child in children)
