"""The front process keeps to its share of a core."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.perf.front import CHAT, GENERATE, PACE_HZ, front_cpu


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_sixty_four_streams_of_sixty_tokens_a_second_take_less_than_half_a_core(tiny_checkpoint: Path, path: str):
    # The budget is a quarter of a core and an idle machine shows 0.14: twice the budget holds on a busy one too.
    cost = front_cpu(tiny_checkpoint, path, seconds=3.0)
    assert cost.pace_hz > PACE_HZ / 2
    assert cost.cores < 0.5
