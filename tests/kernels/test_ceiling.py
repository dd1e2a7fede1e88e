"""The kernel that measures a card's read-only ceiling reads every value once."""

import pytest
import torch

from tests.perf.ceiling import BLOCK, sum_blocks


@pytest.mark.parametrize("programs", [1, 3, 8])
def test_every_program_sums_its_own_blocks(programs, device):
    values = torch.randint(0, 100, (5 * BLOCK,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    by_block = values.view(5, BLOCK).sum(1)
    want = [int(by_block[program::programs].sum()) for program in range(programs)]
    assert sum_blocks(values.to(device), programs).tolist() == want
