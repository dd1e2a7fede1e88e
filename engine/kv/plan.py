"""Step -> Plan: where each row's positions lie in the cache, and their places on the three axes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import Ops, Plan, Segment, host_plan
from engine.step import Row, Step

Positions = Callable[[Row], npt.NDArray[np.float32]]


def build_plan(step: Step, positions: Positions, page_size: int, ops: Ops) -> Plan:
    """Plan `step` over its n token rows, on the host; `positions(row)` gives a row's [3, length] places (axes t, h, w)."""
    segments = []
    offset = 0
    for row in step.rows:
        segments.append(Segment(offset=offset, length=row.length, start=row.start, pages=row.pages))
        offset += row.length
    places = np.concatenate([positions(row) for row in step.rows], axis=1)
    return host_plan(tuple(segments), torch.from_numpy(places), page_size, ops)
