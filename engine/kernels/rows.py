"""A GPU step's host values: how they lie in one array of words, so that a step costs one copy, and views for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels import Ints, Plan, Segment

Words = npt.NDArray[np.int32]
# Kernels are compiled for pointers to whole 16 bytes.
ALIGNED = 4


@dataclass(frozen=True, slots=True)
class RunLayout:
    """What a GPU's attention needs to know of a step's S segments: `table` [S, most] of pages, `starts` [S], `lengths` [S]."""

    table: Words
    starts: Ints
    lengths: Ints

    @property
    def decode(self) -> bool:
        """Whether every segment is one position."""
        return bool((self.lengths == 1).all())


def lay_out(segments: Sequence[Segment]) -> RunLayout:
    """The layout of any segments (no tensors in)."""
    table = np.zeros((len(segments), max(len(segment.pages) for segment in segments)), dtype=np.int32)
    for index, segment in enumerate(segments):
        table[index, : len(segment.pages)] = segment.pages
    return RunLayout(
        table=table,
        starts=np.array([segment.start for segment in segments], dtype=np.int64),
        lengths=np.array([segment.length for segment in segments], dtype=np.int64),
    )


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """A step's layout on the device, all int32. A `decode` step has `starts` [n], -1 for padding; others have `blocks` [B, 4].

    `table` [S, most] gives the segments' pages; rows from `live` [1] on are padding, and without it there is none. `flash` is
    there when FlashInfer may attend.
    """

    decode: bool
    table: Tensor
    starts: Tensor | None
    blocks: Tensor | None
    live: Tensor | None
    flash: RunLayout | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a step's values are: `rows` token rows and, unless it is a `decode` step, `blocks` query blocks."""

    rows: int
    blocks: int
    decode: bool

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Where each value lies among the words: its first word and how many they are."""
        sizes = {"live": 1, "ids": self.rows, "positions": 3 * self.rows}
        sizes |= {"starts": self.rows} if self.decode else {"write": self.rows, "blocks": 4 * self.blocks}
        found, first = {}, 0
        for name, size in sizes.items():
            found[name] = (first, size)
            first += -(-size // ALIGNED) * ALIGNED
        return found

    @property
    def words(self) -> int:
        """How many words a step takes."""
        first, size = list(self.places.values())[-1]
        return first + -(-size // ALIGNED) * ALIGNED


def fill(words: Words, shape: Shape, ids: Words, plan: Plan, blocks: Words | None) -> None:
    """Write a step of n token rows into `words` of a shape that may be larger: what it does not fill is padding.

    `ids` [n], `plan` on the host, `blocks` [B, 4] unless it is a decode step.
    """
    places = shape.places
    runs = plan.layout
    assert isinstance(runs, RunLayout)
    n = len(ids)
    words[:] = 0
    words[0] = n
    words[places["ids"][0] :][:n] = ids
    positions = words[places["positions"][0] :][: 3 * shape.rows].reshape(3, shape.rows)
    positions[:, :n] = plan.positions.numpy().view(np.int32)
    if shape.decode:
        starts = words[places["starts"][0] :][: shape.rows]
        starts[:n], starts[n:] = runs.starts, -1
        return
    assert blocks is not None
    write = words[places["write"][0] :][: shape.rows]
    write[:n], write[n:] = plan.write.numpy(), -1
    words[places["blocks"][0] :][: blocks.size] = blocks.reshape(-1)


def views(words: Tensor, shape: Shape, table: Tensor, page_size: int, *, padded: bool) -> tuple[Tensor, Plan]:
    """The ids [n] int32 and the plan that lie in the int32 `words` of a shape, over a `table` [S, most] of the same device."""
    parts = {name: words[first : first + size] for name, (first, size) in shape.places.items()}
    write = parts["starts" if shape.decode else "write"]
    layout = DeviceLayout(
        decode=shape.decode,
        table=table,
        starts=parts.get("starts"),
        blocks=parts["blocks"].view(-1, 4) if "blocks" in parts else None,
        live=parts["live"] if padded else None,
    )
    positions = parts["positions"].view(torch.float32).view(3, shape.rows)
    return parts["ids"], Plan(positions=positions, write=write, last=write, page_size=page_size, layout=layout)
