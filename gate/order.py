"""The order of sessions: balanced blocks whose first arm is drawn by a stored seed.

A block ABBA cancels a linear drift of the machine; followed by its mirror BAAB it cancels a quadratic one too.
"""

from __future__ import annotations

import random

ARMS = ("base", "head")


def session_order(sessions_per_arm: int, seed: int) -> list[str]:
    """The arm of each slot: ABBA BAAB ABBA … with A drawn by `seed`; an odd count ends in half a block.

    ValueError for fewer than one session an arm.
    """
    if sessions_per_arm < 1:
        raise ValueError(f"sessions_per_arm is {sessions_per_arm}; a comparison needs at least 1 session an arm")
    first, second = ARMS if random.Random(seed).random() < 0.5 else ARMS[::-1]
    # Not a fixed first arm: whatever a first boot costs would always fall on the same side.
    block, mirror = [first, second, second, first], [second, first, first, second]
    slots: list[str] = []
    while len(slots) < 2 * sessions_per_arm:
        slots += block
        block, mirror = mirror, block
    return slots[: 2 * sessions_per_arm]
