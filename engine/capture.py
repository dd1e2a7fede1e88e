"""Buckets of decode rows and what runs a step in them. On a CPU nothing is captured: `Eager` has the same two methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def buckets_up_to(limit: int) -> tuple[int, ...]:
    """Powers of two up to `limit`, and `limit` itself (no tensors)."""
    sizes = []
    size = 1
    while size < limit:
        sizes.append(size)
        size *= 2
    return (*sizes, limit)


class Eager:
    """Runs every step as it is. `captures` stays empty; a bucket is the step's own row count."""

    def __init__(self) -> None:
        self.captures: tuple[int, ...] = ()

    def bucket(self, rows: int) -> int:
        """Return the padded row count that `rows` rows run in."""
        return rows

    def run(self, rows: int, forward: Callable[[], Result]) -> Result:
        """Run `forward` for a step of `rows` rows."""
        return forward()
