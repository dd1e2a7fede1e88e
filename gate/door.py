"""A door: the HTTP interface at which a server is asked. What both doors share: the question's ends and the added-up reply.

The doors themselves are gate/generate.py (our own interface) and gate/openai.py (everybody's); both arms of a run are asked at
the same one. Replies are read after a cell is over, from lines stamped when they arrived.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gate.cell import Cell
from gate.record import EventStamp, Item

Stamped = tuple[int, bytes]  # µs since the request was sent, and one line of the reply


class DoorError(ValueError):
    """A reply that breaks the door's contract; the message is one sentence for the record."""


@dataclass
class Reply:
    """A reply added up over its lines. `stated_samples` is what the server says it sent, where it says so."""

    events: list[EventStamp] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    top2: list[tuple[int, int, float, float]] = field(default_factory=list)
    trace: list[tuple[int, int, int]] = field(default_factory=list)
    text: str = ""
    pcm_samples: int = 0
    pcm_sha256: str | None = None
    pcm: bytes = b""
    sample_rate: int = 24000  # of the contract; what the stream states counts
    finish_reason: str | None = None
    audio_finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stated_samples: int | None = None
    error: str | None = None


class Door(Protocol):
    """One interface: where to post, what to write, and how to read what comes back."""

    @property
    def path(self) -> str:
        """Where to post, such as /generate."""

    @property
    def accept(self) -> str:
        """The media type of a streamed reply."""

    def body(self, cell: Cell, item: Item, root: Path) -> bytes:
        """The JSON body for one item in one cell; audio paths are relative to `root` unless absolute."""

    def read(self, lines: Sequence[Stamped]) -> Reply:
        """Add up the lines of a reply of status 200; what is wrong with the stream stands in `error`."""

    def refusal(self, body: bytes) -> str:
        """The sentence in the body of another status."""


class Pcm:
    """Sound as it arrives: its samples counted, 16-bit mono."""

    def __init__(self) -> None:
        self.samples = 0
        self.data = bytearray()

    def push(self, data: bytes) -> int:
        """Add bytes and return how many samples they bring."""
        self.data += data
        self.samples += len(data) // 2
        return len(data) // 2

    def digest(self) -> str | None:
        """SHA-256 hex of all bytes so far; None where none came."""
        return hashlib.sha256(self.data).hexdigest() if self.samples else None
