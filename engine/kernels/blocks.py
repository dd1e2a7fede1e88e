"""How a CPU's attention is laid out: queries in blocks of BLOCK absolute positions, grouped by how many pages they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kernels import BLOCK, Ints, Segment


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Blocks of BLOCK positions, of any segments, that see the same number of pages.

    `rows` [blocks * BLOCK] int64, the token row at each place (its segment's first where a block reaches beyond it); `pages`
    [blocks * seen] int64; `mask` [blocks, BLOCK, seen * page_size] float32, 0 where a place may look, else -inf.
    """

    blocks: int
    rows: Tensor
    pages: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """All blocks of a step, by group; `places` [n] int64 is the place of each token row among the rows of all groups."""

    groups: tuple[AttentionGroup, ...]
    places: Tensor


def lay_out(segments: Sequence[Segment], page_size: int, device: torch.device) -> BlockLayout:
    """Group the blocks of any segments by the pages that they see (no tensors in)."""
    by_seen: dict[int, list[tuple[Segment, int]]] = {}
    for segment in segments:
        for low in range(segment.start // BLOCK * BLOCK, segment.start + segment.length, BLOCK):
            by_seen.setdefault(low // page_size + 1, []).append((segment, low))
    groups, places = [], [0] * sum(segment.length for segment in segments)
    before = 0
    for seen, blocks in by_seen.items():
        picked: list[int] = []
        pages: list[int] = []
        for segment, low in blocks:
            pages += segment.pages[:seen]
            for at in range(low - segment.start, low - segment.start + BLOCK):
                inside = 0 <= at < segment.length
                picked.append(segment.offset + at if inside else segment.offset)
                if inside:
                    places[segment.offset + at] = before + len(picked) - 1
        before += len(picked)
        groups.append(
            AttentionGroup(
                blocks=len(blocks),
                rows=torch.tensor(picked, dtype=torch.int64, device=device),
                pages=torch.tensor(pages, dtype=torch.int64, device=device),
                mask=_mask(np.array([low for _, low in blocks]), seen * page_size).to(device),
            )
        )
    return BlockLayout(tuple(groups), torch.tensor(places, dtype=torch.int64, device=device))


def move_on(
    layout: BlockLayout, pages: Ints, before: Ints, starts: Ints, page_size: int, device: torch.device
) -> BlockLayout:
    """Lay out decode rows at `starts` [R], reusing what rows at `before` [R] had if no row has left its block."""
    if np.array_equal(before // BLOCK, starts // BLOCK):
        return BlockLayout(layout.groups, layout.places + torch.from_numpy(starts - before).to(device))
    seen = starts // page_size + 1
    groups = []
    places = np.zeros_like(starts)
    used = 0
    for count in dict.fromkeys(seen.tolist()):
        members = np.flatnonzero(seen == count)
        places[members] = used + BLOCK * np.arange(len(members)) + starts[members] % BLOCK
        used += BLOCK * len(members)
        groups.append(
            AttentionGroup(
                blocks=len(members),
                rows=torch.from_numpy(np.repeat(members, BLOCK)).to(device),
                pages=torch.from_numpy(pages[members, :count].reshape(-1)).to(device),
                mask=_mask(starts[members] // BLOCK * BLOCK, count * page_size).to(device),
            )
        )
    return BlockLayout(tuple(groups), torch.from_numpy(places).to(device))


def _mask(lows: Ints, length: int) -> Tensor:
    """What the blocks from positions `lows` [blocks] add to their scores of `length` positions: [blocks, BLOCK, length]."""
    later = np.arange(length) > lows[:, None, None] + np.arange(BLOCK)[:, None]
    return torch.from_numpy(np.where(later, np.float32(-np.inf), np.float32(0)))
