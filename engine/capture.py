"""What runs a step's forward, and in which bucket of rows. On a CPU nothing is captured: `Eager` has the same two methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Eager:
    """Runs every step as it is, in a bucket of its own row count; `buckets` lists captured sizes, so it stays empty."""

    mode = "eager"
    buckets: tuple[int, ...] = ()

    def bucket(self, rows: int) -> int:
        """Return the padded row count that `rows` rows run in (no tensors)."""
        return rows

    def run(self, rows: int, forward: Callable[[], Result]) -> Result:
        """Run `forward` for a step of `rows` rows."""
        return forward()
