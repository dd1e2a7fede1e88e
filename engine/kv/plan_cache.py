"""Plans of decode steps, one kept a walk and moved on from step to step instead of being laid out anew.

A decode step differs from its walk's last one by its positions only, as long as the same tracks run in it. Everything that
hangs on the tracks (pages, offsets) is then kept; what hangs on positions is worked out for all rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import Ints, Ops, Plan
from engine.kv.plan import Positions, build_plan
from engine.step import Row, Step

Walks = frozenset[str]

# Why a decode step was laid out anew: its walk's first; other tracks than the last time; a track in the place of another
# (same slots, other generations); other pages.
REASONS = ("first", "rows", "generation", "pages")


@dataclass(slots=True)
class _Entry:
    """The last plan of one walk and what it was made from: R rows, `pages` [R, most], `offsets` [R] from row to position."""

    rows: tuple[Row, ...]
    pages: Ints
    offsets: npt.NDArray[np.float32]
    starts: Ints
    plan: Plan


class PlanCache:
    """Makes the plans of one component's steps, on the host. `counters` tell hits, and misses by reason.

    Steps that are not all decode have no entry. Steps are compared by value: the slots and generations of their rows, in
    order, and their pages.
    """

    def __init__(self, page_size: int, ops: Ops, decode_walks: Walks, *, enabled: bool) -> None:
        self._page_size = page_size
        self._ops = ops
        self._decode_walks = decode_walks
        self._enabled = enabled
        self._entries: dict[Walks, _Entry] = {}
        self.counters = {"hits": 0, "uncached": 0} | {f"misses_{reason}": 0 for reason in REASONS}

    def plan(self, step: Step, positions: Positions) -> Plan:
        """Return the plan of `step` over its n token rows; `positions(row)` gives a row's [3, length] places."""
        walks = frozenset(row.walk for row in step.rows)
        if not self._enabled or not walks <= self._decode_walks:
            self.counters["uncached"] += 1
            return build_plan(step, positions, self._page_size, self._ops)
        entry = self._entries.get(walks)
        reason = _why_not(entry, step.rows)
        if reason is None and entry is not None:
            self.counters["hits"] += 1
            self._advance(entry, step)
            return entry.plan
        self.counters[f"misses_{reason}"] += 1
        self._entries[walks] = entry = self._lay_out(step, positions)
        return entry.plan

    def _lay_out(self, step: Step, positions: Positions) -> _Entry:
        plan = build_plan(step, positions, self._page_size, self._ops)
        pages = np.zeros((len(step.rows), max(len(row.pages) for row in step.rows)), dtype=np.int64)
        for index, row in enumerate(step.rows):
            pages[index, : len(row.pages)] = row.pages
        starts = _starts(step)
        # Decode rows lie after the prompt, where a track's place is its position plus a constant, the same on all axes.
        offsets = np.array([positions(row)[0, 0] for row in step.rows], dtype=np.float32) - starts
        return _Entry(step.rows, pages, offsets.astype(np.float32), starts, plan)

    def _advance(self, entry: _Entry, step: Step) -> None:
        """Move the entry's plan to the positions of `step`. Earlier plans stay as they are: steps in flight may read them."""
        starts = _starts(step)
        page, inside = starts // self._page_size, starts % self._page_size
        write = entry.pages[np.arange(len(starts)), page] * self._page_size + inside
        places = np.broadcast_to((starts + entry.offsets).astype(np.float32), (3, len(starts)))
        layout = self._ops.move_on(entry.plan.layout, entry.pages, entry.starts, starts, self._page_size)
        entry.plan = Plan(
            positions=torch.from_numpy(places.copy()),
            write=torch.from_numpy(write),
            last=entry.plan.last,
            page_size=self._page_size,
            layout=layout,
        )
        entry.rows, entry.starts = step.rows, starts


def _starts(step: Step) -> Ints:
    return np.fromiter((row.start for row in step.rows), np.int64, len(step.rows))


def _why_not(entry: _Entry | None, rows: tuple[Row, ...]) -> str | None:
    """Why `entry` can't be moved on to `rows`, or None when it can."""
    if entry is None:
        return "first"
    if [row.slot for row in rows] != [row.slot for row in entry.rows]:
        return "rows"
    if [row.generation for row in rows] != [row.generation for row in entry.rows]:
        return "generation"
    if any(now.pages != then.pages for now, then in zip(rows, entry.rows, strict=True)):
        return "pages"
    return None
