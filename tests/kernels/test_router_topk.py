"""The router's choice: ids by rank with ties to the lowest expert, weights under both scorings, masked rows, rstd."""

import pytest
import torch
from torch import Tensor

from engine.kernels.gemv import gemv
from engine.kernels.router_topk import route_one, router_topk
from engine.kernels.scratch import Scratch

ROWS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 33]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_sorting(logits: Tensor, top_k: int, renormalise: bool, scoring: str) -> tuple[Tensor, Tensor]:
    """Weights and ids [n, k] as a stable sort gives them."""
    ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
    scores = ranked.softmax(-1) if scoring == "softmax" else ranked.sigmoid()
    weights = scores[:, :top_k]
    return weights / weights.sum(-1, keepdim=True) if renormalise else weights, ids[:, :top_k]


def agree(logits: Tensor, top_k: int, renormalise: bool = True, scoring: str = "softmax") -> None:
    picked = router_topk(logits, top_k, renormalise=renormalise, scoring=scoring, pdl=False)
    weights, ids = by_sorting(logits.cpu(), top_k, renormalise, scoring)
    assert picked.ids.tolist() == ids.tolist()
    assert (picked.ids.dtype, picked.weights.dtype, picked.rstd) == (torch.int32, torch.float32, None)
    torch.testing.assert_close(picked.weights.cpu(), weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_any_number_equal_a_stable_sort(rows, device):
    agree(normal(rows, 16).to(device), 4)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("experts, top_k", [(128, 8), (8, 1), (12, 2), (5, 3), (16, 6), (6, 6)])
def test_any_top_k_and_number_of_experts_equal_a_stable_sort(experts, top_k, renormalise, scoring, device):
    agree(normal(3, experts, seed=top_k).mul(3).to(device), top_k, renormalise, scoring)


def test_ties_go_to_the_lowest_expert(device):
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 0.0], [0.5] * 5, [-3.0, -3.0, -7.0, -1.0, -1.0]], device=device)
    picked = router_topk(logits, 3, renormalise=True, pdl=False)
    assert picked.ids.tolist() == [[1, 3, 0], [0, 1, 2], [3, 4, 0]]
    torch.testing.assert_close(picked.weights[1].cpu(), torch.full((3,), 1 / 3))


def test_a_zero_of_either_sign_is_the_same_logit(device):
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0]], device=device)
    assert router_topk(logits, 3, renormalise=True, pdl=False).ids.tolist() == [[0, 1, 3]]


def test_excluded_experts_come_last_and_weigh_nothing(device):
    low = -float("inf")
    picked = router_topk(torch.tensor([[low, 1.0, low, 1.0, low]], device=device), 3, renormalise=True, pdl=False)
    assert picked.ids.tolist() == [[1, 3, 0]]
    assert picked.weights.tolist() == [[0.5, 0.5, 0.0]]


def test_large_logits_do_not_overflow(device):
    picked = router_topk(torch.tensor([[1000.0, 999.0, -1000.0]], device=device), 2, renormalise=False, pdl=False)
    torch.testing.assert_close(picked.weights.cpu(), torch.tensor([[0.7310586, 0.2689414]]))


@pytest.mark.parametrize("live", [0, 1, 3, 5])
def test_masked_rows_route_nowhere(live, device):
    logits = normal(5, 6).to(device)
    masked = router_topk(
        logits, 2, renormalise=True, live=torch.tensor([live], dtype=torch.int32, device=device), pdl=False
    )
    everything = router_topk(logits, 2, renormalise=True, pdl=False)
    assert masked.ids.tolist() == everything.ids[:live].tolist() + [[6, 6]] * (5 - live)
    assert masked.weights.tolist() == everything.weights[:live].tolist() + [[0.0, 0.0]] * (5 - live)


@pytest.mark.parametrize("width", [32, 40])
def test_the_rows_that_the_experts_read_give_their_rstd(width, device):
    x = normal(3, width).to(device)
    picked = router_topk(normal(3, 8).to(device), 2, renormalise=True, x=x, eps=1e-3, pdl=False)
    assert picked.rstd is not None
    torch.testing.assert_close(picked.rstd, (x.square().mean(-1) + 1e-3).rsqrt())


def test_half_precision_rows_give_a_float32_rstd(device):
    x = normal(2, 32).half().to(device)
    picked = router_topk(normal(2, 8).to(device), 2, renormalise=True, x=x, eps=1e-6, pdl=False)
    assert picked.rstd is not None and picked.rstd.dtype == torch.float32
    torch.testing.assert_close(picked.rstd, (x.float().square().mean(-1) + 1e-6).rsqrt())


def test_what_cannot_be_ranked_is_refused(device):
    logits = normal(1, 4).to(device)
    with pytest.raises(ValueError, match="top_k must be 1 to 4, is 5"):
        router_topk(logits, 5, renormalise=True, pdl=False)
    with pytest.raises(ValueError, match="scoring must be softmax or sigmoid, is 'linear'"):
        router_topk(logits, 2, renormalise=True, scoring="linear", pdl=False)


@pytest.mark.parametrize(("experts", "width", "block"), [(16, 64, 2), (10, 48, 4), (128, 96, 8)])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("alive", [None, 1, 0])
def test_one_kernel_routes_a_single_row_as_its_product_and_router_topk_do(
    device: torch.device, experts: int, width: int, block: int, renormalise: bool, alive: int | None
):
    generator = torch.Generator().manual_seed(experts + width)
    x = torch.randn(1, width, generator=generator).to(device)
    norm = (torch.rand(width, generator=generator) + 0.5).to(device)
    router = torch.randn(experts, width, generator=generator).to(device)
    live = None if alive is None else torch.tensor([alive], dtype=torch.int32, device=device)
    tile, scratch = {"BN": block, "warps": 4, "stages": 1}, Scratch(device)
    logits = gemv(x, router, norm=norm, eps=1e-6, out_dtype=torch.float32, tile=tile, pdl=False)
    wanted = router_topk(logits, 3, renormalise=renormalise, x=x, eps=1e-6, live=live, pdl=False)
    for _ in range(2):  # the counter is at zero again
        found = route_one(
            x, norm, 1e-6, router, 3, renormalise=renormalise, live=live, scratch=scratch, tile=tile, pdl=False
        )
        assert torch.equal(found.ids, wanted.ids)
        torch.testing.assert_close(found.weights, wanted.weights)
        assert found.rstd is not None and wanted.rstd is not None
        torch.testing.assert_close(found.rstd, wanted.rstd)
