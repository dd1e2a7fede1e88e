"""Standard output and error of the gate's process: that a reader went away changes no verdict, and a full disk is told once."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Stream(io.FileIO):
    """A standard stream that loses what can't be written; a fault of the machine's is raised once, with the stream's name."""

    def __init__(self, number: int, told: str) -> None:
        super().__init__(number, "wb", closefd=False)
        self._told = told
        self._lost = False

    def write(self, data: ReadableBuffer, /) -> int:
        """Write, or lose `data`: once that has failed, nothing more is tried."""
        if not self._lost:
            try:
                return super().write(data)
            except BrokenPipeError:  # `| head` has read enough
                self._lost = True
            except OSError as error:
                # Python itself tries again when it ends, and that failure would decide its exit code.
                self._lost = True
                if self._told:
                    error.filename = self._told
                    raise
        return memoryview(data).nbytes


def guard() -> None:
    """Put such streams in the place of this process's own; one that is closed or not the process's stays."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(sys.stdout, "standard output")
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(sys.stderr, "")  # there is nowhere left to tell it


def _guarded(stream: io.TextIOWrapper, told: str) -> io.TextIOWrapper:
    raw = _Stream(stream.fileno(), told)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=stream.line_buffering
    )
