"""The load client's own process, so that the gate's work never delays a stamp: started here, and run as `python -m gate.load`.

One line of JSON goes in for each cell (a Job) and one comes out (its records and lag, and the speech to be judged). The API
key comes with the environment and appears in neither.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gate.cell import Cell
from gate.client import Measured, Target, measure
from gate.host import pinned
from gate.process import Child, environment, tail
from gate.record import Item, JudgePlan

KEY_VARIABLES = ("WALKGATE_GATE_API_KEY", "OPENAI_API_KEY")


class ClientError(RuntimeError):
    """The client process ended before it answered; the message ends with the tail of what it wrote to stderr."""


class Job(msgspec.Struct, frozen=True):
    """One cell to measure: see gate.client.measure. `with_key`: requests carry the API key of the environment."""

    target: Target
    cell: Cell
    warm: list[Item]
    items: list[Item]
    root: str
    with_key: bool = False
    judge: JudgePlan = JudgePlan()


def key_headers() -> dict[str, str]:
    """The Authorization header of the first API key that the environment holds; none without a key."""
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    return {"Authorization": f"Bearer {key}"} if key else {}


class LoadClient:
    """The handle of the client process; it is started when first needed, and again after it ended."""

    def __init__(self, cores: Sequence[int], log: Path) -> None:
        self.cores, self.log = cores, log
        self._child: Child | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """The running process, on the client's cores; its stderr goes to the log."""
        if self._child is not None and self._child.process.poll() is None:
            return self._child.process
        self.stop()
        # This gate first, whatever else lies there; packages may come by the caller's path.
        path = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
        # Safe path: a folder called gate where the user stands must not be run in our place.
        words = [sys.executable, "-P", "-m", "gate.load"]
        with self.log.open("ab") as log, pinned(self.cores):
            env = {**environment(), "PYTHONPATH": os.pathsep.join(filter(None, path))}
            self._child = Child(words, env=env, stdin=subprocess.PIPE, stderr=log)
        return self._child.process

    def measure(self, job: Job) -> Measured:
        """Have a cell measured; ClientError when the process ends first."""
        process = self.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:  # it ended before it had read the job
            answer = b""
        if not answer.endswith(b"\n"):
            raise ClientError(f"the load client {ending(process.wait())}\n{tail(self.log)}")
        return msgspec.json.decode(answer, type=Measured)

    def stop(self) -> None:
        """End the process, whatever it is at."""
        if self._child is not None:
            self._child.stop()
            self._child = None


def ending(code: int) -> str:
    """How a process ended, as the rest of a sentence."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


@contextmanager
def load_client(cores: Sequence[int], log: Path) -> Iterator[LoadClient]:
    """A client process for a session, ended with it."""
    client = LoadClient(cores, log)
    try:
        yield client
    finally:
        client.stop()


def main() -> None:
    """Answer one job a line until stdin ends."""
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        headers = key_headers() if job.with_key else {}
        found = measure(job.target, job.cell, job.warm, job.items, Path(job.root), headers, job.judge)
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
