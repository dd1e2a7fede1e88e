"""The small kernels around the products, each against its definition in plain torch."""

import math

import pytest
import torch
from torch import Tensor

from engine.kernels import MEDIA
from engine.kernels.pointwise import ARGMAX_BLOCK, argmax_slots, embed_rows, rms_norm, rope_tables, silu_mul
from engine.kernels.reference import ReferenceOps
from engine.kernels.scratch import SMALLEST, Scratch

ROWS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 33]
REFERENCE = ReferenceOps(torch.device("cpu"))
INF = math.inf


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [64, 48, 1])
def test_rms_norm_equals_its_definition(rows, width, device):
    x, weight = normal(rows, width), normal(width, seed=1)
    ours = rms_norm(x.to(device), weight.to(device), 1e-6, pdl=False).cpu()
    torch.testing.assert_close(ours, REFERENCE.rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-6)


def test_rms_norm_rounds_before_the_weight_comes_in(device):
    # 3 / sqrt(5) is 1.3416407..., in float16 1.341796875. Times 19 that is 25.4941..., which rounds to 25.5; with one
    # rounding it would be 25.4911..., which rounds to 25.484375.
    x = torch.tensor([[1.0, 3.0]], dtype=torch.float16, device=device)
    weight = torch.tensor([1.0, 19.0], dtype=torch.float16, device=device)
    assert rms_norm(x, weight, 0.0, pdl=False).cpu().tolist() == [[0.447265625, 25.5]]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("half", [8, 12])
def test_rope_tables_turn_each_channel_with_its_axis(rows, half, device):
    positions = torch.randint(0, 32768, (3, rows), generator=torch.Generator().manual_seed(rows)).float()
    axes = torch.arange(half) % 3
    frequencies = 1e6 ** (-torch.arange(half) / half)
    angles = (positions[axes].t() * frequencies).double()
    for integer in (torch.int64, torch.int32):
        cos, sin = rope_tables(
            positions.to(device), axes.to(device, integer), frequencies.to(device), torch.float32, pdl=False
        )
        assert cos.shape == sin.shape == (rows, 2 * half)
        for ours, theirs in ((cos, angles.cos()), (sin, angles.sin())):
            torch.testing.assert_close(ours.cpu().double(), torch.cat([theirs, theirs], -1), rtol=0, atol=2e-7)


def test_rope_tables_round_to_the_type_asked_for(device):
    positions, axes = torch.zeros(3, 2, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    cos, sin = rope_tables(positions, axes, torch.ones(4, device=device), torch.float16, pdl=False)
    assert cos.dtype == sin.dtype == torch.float16
    assert cos.tolist() == [[1.0] * 8] * 2
    assert sin.tolist() == [[0.0] * 8] * 2


@pytest.mark.parametrize("width", [16, 20])
def test_rows_come_from_the_table_the_slots_and_the_media(width, device):
    table, media = normal(10, width).to(device), normal(5, width, seed=1).to(device)
    ids = torch.tensor([3, MEDIA, -1, -3, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([7, 8, 9], device=device)
    ours = embed_rows(table, ids, slots, media, pdl=False)
    assert torch.equal(ours, torch.stack([table[3], media[1], table[7], table[9], table[0]]))


def test_a_media_row_without_media_is_zero(device):
    ids = torch.tensor([1, MEDIA], dtype=torch.int32, device=device)
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    assert embed_rows(table, ids, slots, None, pdl=False).tolist() == [[3.0, 4.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 768), (3, 40), (17, 64), (2, 1500)])
def test_silu_mul_equals_its_definition(dtype, rows, width, device):
    gate_up = normal(rows, 2 * width, dtype=dtype)
    ours = silu_mul(gate_up.to(device), pdl=False).cpu()
    gate, up = gate_up.double().chunk(2, dim=-1)
    theirs = gate * torch.sigmoid(gate) * up
    assert ours.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


def greedy(logits: Tensor, slots: list[int], count: int, device: torch.device) -> tuple[list[int], list[int]]:
    """The chosen ids and the `count` slots afterwards, which held -7 before."""
    tokens = torch.full((count,), -7, dtype=torch.int64, device=device)
    scratch = Scratch(device)
    rows = torch.tensor(slots, dtype=torch.int32, device=device)
    chosen = argmax_slots(logits.to(device), rows, tokens, scratch=scratch, pdl=False)
    assert chosen.dtype == torch.int64
    assert not scratch.counters(SMALLEST).any()
    return chosen.tolist(), tokens.tolist()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("vocab", [50, ARGMAX_BLOCK, 2 * ARGMAX_BLOCK + 7])
def test_the_largest_logit_is_chosen_and_goes_to_its_slot(rows, vocab, device):
    logits = normal(rows, vocab, seed=rows)
    chosen, tokens = greedy(logits, list(reversed(range(rows))), rows, device)
    assert chosen == logits.argmax(-1).tolist()
    assert tokens == list(reversed(chosen))


def test_ties_go_to_the_lowest_id_within_a_block_and_across_blocks(device):
    logits = torch.zeros(3, 3 * ARGMAX_BLOCK)
    logits[0, [9, 11]] = 1.0
    logits[1, [ARGMAX_BLOCK - 1, ARGMAX_BLOCK, 2 * ARGMAX_BLOCK]] = 1.0
    assert greedy(logits, [0, 1, 2], 3, device)[0] == [9, ARGMAX_BLOCK - 1, 0]


def test_a_padded_row_writes_no_slot(device):
    logits = torch.eye(3)
    assert greedy(logits, [2, -1, 0], 4, device) == ([0, 1, 2], [2, -7, 0, -7])


def test_the_id_is_one_of_the_vocabulary_whatever_the_logits(device):
    logits = torch.full((4, ARGMAX_BLOCK + 5), -INF)
    logits[1] = math.nan
    logits[2, 7] = math.nan
    logits[2, 8] = -3.0
    logits[3, ARGMAX_BLOCK + 4] = INF
    assert greedy(logits, [0, 1, 2, 3], 4, device)[0] == [0, 0, 8, ARGMAX_BLOCK + 4]
