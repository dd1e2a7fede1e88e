"""Experts of few rows: gate and up, and down with the weighted sum, against plain torch in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.per_pair import cut, down_tile, gate_up_tile, per_pair_down, per_pair_gate_up
from engine.kernels.reference import ReferenceOps
from engine.kernels.router_topk import Picked, router_topk

TILE = {"BN": 4, "warps": 4, "stages": 1}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pick(device: torch.device, rows: int, experts: int, top_k: int, x: Tensor, live: int | None = None) -> Picked:
    masked = None if live is None else torch.tensor([live], dtype=torch.int32, device=device)
    logits = normal(rows, experts, seed=rows).to(device)
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
@pytest.mark.parametrize("experts, top_k, width, inter", [(8, 2, 32, 16), (5, 3, 40, 12), (9, 8, 64, 18)])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_gate_and_up_equal_torch_at_any_width(rows, experts, top_k, width, inter, normed, device):
    x, gate_up = normal(rows, width).to(device), normal(experts, 2 * inter, width, seed=1).to(device)
    norm = normal(width, seed=2).to(device) if normed else None
    picked = pick(device, rows, experts, top_k, x)
    h = per_pair_gate_up(x, norm, picked, gate_up, tile=TILE, pdl=False)
    close(h, gated(x, norm, picked, gate_up))


@pytest.mark.parametrize(
    "experts, top_k, width, inter", [(8, 2, 32, 16), (5, 3, 40, 12), (9, 8, 64, 23), (6, 1, 30, 48)]
)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_down_equals_torch_at_any_width(rows, experts, top_k, width, inter, device):
    residual, down = normal(rows, width).to(device), normal(experts, width, inter, seed=1).to(device)
    h = normal(rows * top_k, inter, seed=2).to(device)
    picked = pick(device, rows, experts, top_k, residual)
    close(per_pair_down(h, picked, down, residual, tile=TILE, pdl=False), summed(h, picked, down, residual))


def test_masked_rows_give_zeros_and_are_their_residual(device):
    x, gate_up = normal(5, 32).to(device), normal(6, 32, 32, seed=1).to(device)
    down, norm = normal(6, 32, 16, seed=2).to(device), normal(32, seed=3).to(device)
    picked = pick(device, 5, 6, 2, x, live=3)
    h = per_pair_gate_up(x, norm, picked, gate_up, tile=TILE, pdl=False)
    assert h[6:].tolist() == [[0.0] * 16] * 4
    close(h, gated(x, norm, picked, gate_up))
    h[6:] = float("nan")
    y = per_pair_down(h, picked, down, x, tile=TILE, pdl=False)
    assert torch.equal(y[3:], x[3:])
    close(y, summed(h, picked, down, x))


def test_the_whole_equals_the_definition_of_the_op(device):
    x, norm = normal(3, 32).to(device), torch.ones(32, device=device)
    gate_up, down = normal(8, 24, 32, seed=1).to(device), normal(8, 32, 12, seed=2).to(device)
    picked = pick(device, 3, 8, 4, x)
    h = per_pair_gate_up(x, norm, picked, gate_up, tile=TILE, pdl=False)
    y = per_pair_down(h, picked, down, x, tile=TILE, pdl=False)
    ops = ReferenceOps(torch.device("cpu"))
    normed = ops.rms_norm(x.cpu(), norm.cpu(), 1e-6)
    reference = x.cpu() + ops.experts(normed, picked.weights.cpu(), picked.ids.cpu().long(), gate_up.cpu(), down.cpu())
    torch.testing.assert_close(y.cpu(), reference, rtol=1e-4, atol=1e-4)


def test_float16_rounds_each_result_once(device):
    x, gate_up = normal(2, 32).half().to(device), normal(4, 32, 32, seed=1).half().to(device)
    down = normal(4, 32, 16, seed=2).half().to(device)
    picked = pick(device, 2, 4, 2, x)
    h = per_pair_gate_up(x, None, picked, gate_up, tile=TILE, pdl=False)
    y = per_pair_down(h, picked, down, x, tile=TILE, pdl=False)
    assert h.dtype == y.dtype == torch.float16
    close(h, gated(x, None, picked, gate_up), tolerance=2**-10)
    close(y, summed(h, picked, down, x), tolerance=2**-10)


def test_a_width_is_cut_into_three_where_that_wastes_less():
    assert [cut(width) for width in (768, 1024, 512, 700, 1408, 1)] == [
        (3, 256),
        (1, 1024),
        (1, 512),
        (3, 256),
        (3, 512),
        (1, 1),
    ]


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_default_tiles_divide_the_real_widths(rows):
    assert 768 % gate_up_tile(rows)["BN"] == 0
    assert 2048 % down_tile(rows)["BN"] == 0
