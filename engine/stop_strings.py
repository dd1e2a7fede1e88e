"""Where a text ends at a stop string, and how much of it may be shown before that is known. Pure; bytes in, counts out.

Matching is on UTF-8 and sees the text alone, never how tokens cut it. The match that ends first wins, of those that end
together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request (any number, none empty), matched against its text as that grows."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._searches = [_Search(stop.encode()) for stop in stops]
        self._pushed = 0
        self.shown = 0
        """How many bytes of the text may be shown: all but a tail that may become a stop string, or come after one."""
        self.matched = False

    def push(self, data: bytes) -> bool:
        """Add `data` to the text; True once a stop string is complete, and whatever follows it changes nothing."""
        for byte in data:
            if self.matched:
                break
            self._advance(byte)
        return self.matched

    def _advance(self, byte: int) -> None:
        for search in self._searches:
            search.advance(byte)
        self._pushed += 1
        complete = [search.length for search in self._searches if search.complete]
        self.matched = bool(complete)
        held = max(complete) if complete else max((search.held for search in self._searches), default=0)
        self.shown = self._pushed - held

    def finish(self) -> None:
        """The text has ended for another reason: all of it may be shown, unless a stop string was complete."""
        if not self.matched:
            self.shown = self._pushed


class _Search:
    """One pattern looked for in a stream of bytes (Knuth, Morris and Pratt): `held` bytes of it are the stream's tail."""

    def __init__(self, pattern: bytes) -> None:
        self._pattern = pattern
        self.length = len(pattern)
        self.held = 0
        # How much of the pattern is still the tail when its first n bytes were, and the next one is another.
        self._shorter = [0, 0]
        for byte in pattern[1:]:
            self._shorter.append(self._next(self._shorter[-1], byte))

    @property
    def complete(self) -> bool:
        return self.held == self.length

    def advance(self, byte: int) -> None:
        self.held = self._next(self.held, byte)

    def _next(self, held: int, byte: int) -> int:
        while held and self._pattern[held] != byte:
            held = self._shorter[held]
        return held + (self._pattern[held] == byte)
