"""Experts of many rows: grouped gate and up, and down with the sum over ranks, against plain torch in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.align import align
from engine.kernels.grouped_gemm import MOST_BLOCKS, down_tile, gate_up_tile, grouped_down, grouped_gate_up
from engine.kernels.per_pair import per_pair_down, per_pair_gate_up
from engine.kernels.reference import ReferenceOps
from engine.kernels.router_topk import Picked, router_topk

ROWS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 33]
TILE = {"BM": 16, "BN": 16, "BK": 16, "warps": 4, "stages": 1}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pick(x: Tensor, experts: int, top_k: int, live: int | None = None, away_from: int | None = None) -> Picked:
    """A random choice for the rows of `x` [n, H], which leaves out an expert where one is named."""
    logits = normal(x.shape[0], experts, seed=x.shape[0]).to(x.device)
    if away_from is not None:
        logits[:, away_from] = -float("inf")
    masked = None if live is None else torch.tensor([live], dtype=torch.int32, device=x.device)
    return router_topk(logits, top_k, renormalise=True, x=x, eps=1e-6, live=masked, pdl=False)


def gated(x: Tensor, norm: Tensor | None, picked: Picked, gate_up: Tensor) -> Tensor:
    """h [n * k, I] in float64; zeros for masked pairs."""
    x, gate_up, ids = x.cpu().double(), gate_up.cpu().double(), picked.ids.cpu()
    if norm is not None:
        x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.cpu().double()
    weights = picked.weights.cpu().double()
    h = torch.zeros(*ids.shape, gate_up.shape[1] // 2, dtype=torch.float64)
    for row, rank in (ids < gate_up.shape[0]).nonzero().tolist():
        gate, up = (gate_up[ids[row, rank]] @ x[row]).chunk(2)
        h[row, rank] = F.silu(gate) * up * weights[row, rank]
    return h.flatten(0, 1)


def summed(h: Tensor, picked: Picked, down: Tensor, residual: Tensor) -> Tensor:
    """The residual plus each row's pairs [n, H] in float64."""
    h, down, ids, y = h.cpu().double(), down.cpu().double(), picked.ids.cpu(), residual.cpu().double()
    for row, rank in (ids < down.shape[0]).nonzero().tolist():
        y[row] += down[ids[row, rank]] @ h[row * ids.shape[1] + rank]
    return y


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("rows", ROWS)
def test_gate_and_up_equal_torch_for_any_number_of_rows(rows, normed, device):
    x, gate_up = normal(rows, 32).to(device), normal(6, 32, 32, seed=1).to(device)
    norm = normal(32, seed=2).to(device) if normed else None
    picked = pick(x, 6, 2)
    h = grouped_gate_up(x, norm, picked, align(picked.ids, 6, pdl=False), gate_up, tile=TILE, pdl=False)
    close(h, gated(x, norm, picked, gate_up))


@pytest.mark.parametrize("rows", ROWS)
def test_down_equals_torch_for_any_number_of_rows(rows, device):
    residual, down = normal(rows, 32).to(device), normal(6, 32, 16, seed=1).to(device)
    h = normal(rows * 2, 16, seed=2).to(device)
    picked = pick(residual, 6, 2)
    y = grouped_down(h, picked, align(picked.ids, 6, pdl=False), down, residual, tile=TILE, pdl=False)
    close(y, summed(h, picked, down, residual))


@pytest.mark.parametrize(
    "experts, top_k, width, inter", [(5, 3, 40, 12), (8, 8, 24, 18), (3, 1, 30, 7), (4, 2, 300, 8)]
)
def test_any_width_equals_torch(experts, top_k, width, inter, device):
    x, norm = normal(5, width).to(device), normal(width, seed=3).to(device)
    gate_up = (normal(experts, 2 * inter, width, seed=1) * width**-0.5).to(device)
    down = normal(experts, width, inter, seed=2).to(device)
    picked = pick(x, experts, top_k)
    alignment = align(picked.ids, experts, pdl=False)
    h = grouped_gate_up(x, norm, picked, alignment, gate_up, tile=TILE, pdl=False)
    close(h, gated(x, norm, picked, gate_up))
    y = grouped_down(h, picked, alignment, down, x, tile=TILE, pdl=False)
    close(y, summed(h, picked, down, x))


@pytest.mark.parametrize("rows", [20, 70, 129, 150])
def test_a_run_of_more_pairs_than_a_block_is_done_whole(rows, device):
    assert rows < 129 or rows > 16 * MOST_BLOCKS
    x, gate_up = normal(rows, 16).to(device), normal(2, 16, 16, seed=1).to(device)
    down, norm = normal(2, 16, 8, seed=2).to(device), normal(16, seed=3).to(device)
    picked = pick(x, 2, 1, away_from=1)
    alignment = align(picked.ids, 2, pdl=False)
    assert alignment.counts[:1].tolist() == [rows]
    h = grouped_gate_up(x, norm, picked, alignment, gate_up, tile=TILE, pdl=False)
    close(h, gated(x, norm, picked, gate_up))
    y = grouped_down(h, picked, alignment, down, x, tile=TILE, pdl=False)
    close(y, summed(h, picked, down, x))


def test_an_idle_expert_is_never_read(device):
    x, gate_up, down = (
        normal(9, 32).to(device),
        normal(5, 32, 32, seed=1).to(device),
        normal(5, 32, 16, seed=2).to(device),
    )
    gate_up[2] = float("nan")
    down[2] = float("nan")
    picked = pick(x, 5, 2, away_from=2)
    alignment = align(picked.ids, 5, pdl=False)
    h = grouped_gate_up(x, None, picked, alignment, gate_up, tile=TILE, pdl=False)
    assert grouped_down(h, picked, alignment, down, x, tile=TILE, pdl=False).isfinite().all()


@pytest.mark.parametrize("width", [32, 256])
@pytest.mark.parametrize("live", [0, 3])
def test_masked_rows_are_their_residual_whatever_lies_in_their_pairs(live, width, device):
    x, gate_up = normal(5, width).to(device), normal(6, 32, width, seed=1).mul(width**-0.5).to(device)
    down = normal(6, width, 16, seed=2).to(device)
    picked = pick(x, 6, 2, live=live)
    alignment = align(picked.ids, 6, pdl=False)
    h = grouped_gate_up(x, None, picked, alignment, gate_up, tile=TILE, pdl=False)
    close(h[: 2 * live], gated(x, None, picked, gate_up)[: 2 * live])
    h[2 * live :] = float("nan")
    y = grouped_down(h, picked, alignment, down, x, tile=TILE, pdl=False)
    assert torch.equal(y[live:], x[live:])
    close(y[:live], summed(h, picked, down, x)[:live])


def test_grouped_and_per_pair_agree_with_the_definition_of_the_op(device):
    x, norm = normal(4, 32).to(device), torch.ones(32, device=device)
    gate_up, down = normal(8, 32, 32, seed=1).to(device), normal(8, 32, 16, seed=2).to(device)
    picked = pick(x, 8, 4)
    alignment = align(picked.ids, 8, pdl=False)
    h = grouped_gate_up(x, norm, picked, alignment, gate_up, tile=TILE, pdl=False)
    grouped = grouped_down(h, picked, alignment, down, x, tile=TILE, pdl=False)
    pair_tile = {"BN": 4, "warps": 4, "stages": 1}
    h = per_pair_gate_up(x, norm, picked, gate_up, tile=pair_tile, pdl=False)
    alone = per_pair_down(h, picked, down, x, tile=pair_tile, pdl=False)
    ops = ReferenceOps(torch.device("cpu"))
    normed = ops.rms_norm(x.cpu(), norm.cpu(), 1e-6)
    reference = x.cpu() + ops.experts(normed, picked.weights.cpu(), picked.ids.cpu().long(), gate_up.cpu(), down.cpu())
    torch.testing.assert_close(grouped.cpu(), reference, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(alone.cpu(), reference, rtol=1e-4, atol=1e-4)


def test_a_row_has_the_same_bits_in_any_company(device):
    x, gate_up, down = (
        normal(33, 32).to(device),
        normal(4, 32, 32, seed=1).to(device),
        normal(4, 32, 16, seed=2).to(device),
    )
    picked = pick(x, 4, 2)

    def run(low: int, high: int) -> Tensor:
        part = Picked(picked.weights[low:high], picked.ids[low:high], None)
        alignment = align(part.ids, 4, pdl=False)
        h = grouped_gate_up(x[low:high], None, part, alignment, gate_up, tile=TILE, pdl=False)
        return grouped_down(h, part, alignment, down, x[low:high], tile=TILE, pdl=False)

    everything = run(0, 33)
    for low, high in [(0, 1), (7, 9), (16, 33), (32, 33)]:
        assert torch.equal(run(low, high), everything[low:high])


def test_float16_rounds_each_result_once(device):
    x, gate_up = normal(3, 32).half().to(device), normal(4, 32, 32, seed=1).half().to(device)
    down = normal(4, 32, 16, seed=2).half().to(device)
    picked = pick(x, 4, 2)
    alignment = align(picked.ids, 4, pdl=False)
    h = grouped_gate_up(x, None, picked, alignment, gate_up, tile=TILE, pdl=False)
    y = grouped_down(h, picked, alignment, down, x, tile=TILE, pdl=False)
    assert h.dtype == y.dtype == torch.float16
    close(h, gated(x, None, picked, gate_up), tolerance=2**-10)
    close(y, summed(h, picked, down, x), tolerance=2**-10)


@pytest.mark.parametrize("rows", [1, 8, 64, 200, 512, 2048, 4096])
def test_default_tiles_divide_the_real_widths_and_fit_shared_memory(rows):
    for dtype, size in ((torch.bfloat16, 2), (torch.float32, 4)):
        up, down = gate_up_tile(rows, dtype), down_tile(rows, dtype)
        assert 768 % up["BN"] == 2048 % up["BK"] == 2048 % down["BN"] == 768 % down["BK"] == 0
        assert (2 * up["BN"] + up["BM"]) * up["BK"] * size * up["stages"] <= 227 * 1024
        assert (down["BN"] + down["BM"]) * down["BK"] * size * down["stages"] <= 227 * 1024
