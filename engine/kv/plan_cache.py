"""Plans of decode steps, one kept a walk and moved on from step to step instead of being laid out anew.

A decode step differs from its walk's last one by its positions only, as long as the same tracks run in it. Everything that
hangs on the tracks (pages, offsets) is then kept; what hangs on positions is worked out for all rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels import BLOCK, AttentionGroup, Plan
from engine.kv.plan import Positions, build_plan
from engine.step import Row, Step

Ints = npt.NDArray[np.int64]
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
    lows: Ints
    plan: Plan


class PlanCache:
    """Makes the plans of one component's steps. `counters` tell hits, and misses by reason; other steps have no entry.

    Steps are compared by value: the slots and generations of their rows, in order, and their pages.
    """

    def __init__(self, page_size: int, device: torch.device, decode_walks: Walks, *, enabled: bool) -> None:
        self._page_size = page_size
        self._device = device
        self._decode_walks = decode_walks
        self._enabled = enabled
        self._entries: dict[Walks, _Entry] = {}
        self.counters = {"hits": 0, "uncached": 0} | {f"misses_{reason}": 0 for reason in REASONS}

    def plan(self, step: Step, positions: Positions) -> Plan:
        """Return the plan of `step` over its n token rows; `positions(row)` gives a row's [3, length] places."""
        walks = frozenset(row.walk for row in step.rows)
        if not self._enabled or not walks <= self._decode_walks:
            self.counters["uncached"] += 1
            return build_plan(step, positions, self._page_size, self._device)
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
        plan = build_plan(step, positions, self._page_size, self._device)
        pages = np.zeros((len(step.rows), max(len(row.pages) for row in step.rows)), dtype=np.int64)
        for index, row in enumerate(step.rows):
            pages[index, : len(row.pages)] = row.pages
        starts = _starts(step)
        # Decode rows lie after the prompt, where a track's place is its position plus a constant, the same on all axes.
        offsets = np.array([positions(row)[0, 0] for row in step.rows], dtype=np.float32) - starts
        return _Entry(step.rows, pages, offsets.astype(np.float32), starts // BLOCK, plan)

    def _advance(self, entry: _Entry, step: Step) -> None:
        """Move the entry's plan to the positions of `step`. Earlier plans stay as they are: steps in flight may read them."""
        starts = _starts(step)
        lows = starts // BLOCK
        page, inside = starts // self._page_size, starts % self._page_size
        write = entry.pages[np.arange(len(starts)), page] * self._page_size + inside
        places = np.broadcast_to((starts + entry.offsets).astype(np.float32), (3, len(starts)))
        old = entry.plan.groups if np.array_equal(lows, entry.lows) else None
        groups, at = self._groups(entry.pages, starts, old)
        entry.plan = Plan(
            positions=self._tensor(places.copy()),
            write=self._tensor(write),
            last=entry.plan.last,
            page_size=self._page_size,
            groups=groups,
            places=self._tensor(at),
        )
        entry.rows, entry.lows = step.rows, lows

    def _groups(
        self, pages: Ints, starts: Ints, old: tuple[AttentionGroup, ...] | None
    ) -> tuple[tuple[AttentionGroup, ...], Ints]:
        """The attention groups of rows at `starts` [R] and each row's place among them; `old` has those of the same blocks."""
        seen = starts // self._page_size + 1
        groups = []
        places = np.zeros_like(starts)
        before = 0
        for number, count in enumerate(dict.fromkeys(seen.tolist())):
            members = np.flatnonzero(seen == count)
            places[members] = before + BLOCK * np.arange(len(members)) + starts[members] % BLOCK
            rows = np.zeros(BLOCK * len(members), dtype=np.int64)
            rows[places[members] - before] = members
            before += len(rows)
            if old is not None:
                kept = old[number]
                groups.append(AttentionGroup(kept.blocks, self._tensor(rows), kept.pages, kept.future))
                continue
            lows = starts[members] // BLOCK * BLOCK
            ends = lows[:, None, None, None, None] + np.arange(BLOCK)[:, None]
            groups.append(
                AttentionGroup(
                    blocks=len(members),
                    rows=self._tensor(rows),
                    pages=self._tensor(pages[members, :count].reshape(-1)),
                    future=self._tensor(np.arange(count * self._page_size) > ends),
                )
            )
        return tuple(groups), places

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


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
