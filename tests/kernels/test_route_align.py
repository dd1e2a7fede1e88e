"""Alignment, of its own and in one kernel with the router: runs by expert, and equality of the two ways to the bit."""

import pytest
import torch
from torch import Tensor

from engine.kernels.align import Alignment, align
from engine.kernels.route_align import MAX_PAIRS, route_align
from engine.kernels.router_topk import router_topk
from engine.kernels.scratch import Scratch

ROWS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 33]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def runs(alignment: Alignment) -> dict[int, list[int]]:
    """The pairs of each expert that has any, in the order of the runs; they must follow one another."""
    count = int(alignment.runs)
    experts, offsets, counts = (
        places[:count].tolist() for places in (alignment.experts, alignment.offsets, alignment.counts)
    )
    assert offsets == [sum(counts[:run]) for run in range(count)]
    pairs = alignment.pairs.tolist()
    return {
        expert: pairs[offset : offset + length] for expert, offset, length in zip(experts, offsets, counts, strict=True)
    }


def int32(rows: list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


def test_runs_are_by_ascending_expert_and_hold_pairs_in_order(device):
    alignment = align(int32([[4, 0], [2, 4], [0, 4]], device), 6, pdl=False)
    assert list(runs(alignment).items()) == [(0, [1, 4]), (2, [2]), (4, [0, 3, 5])]


def test_masked_pairs_are_in_no_run(device):
    assert runs(align(int32([[1, 0], [4, 4], [1, 3]], device), 4, pdl=False)) == {0: [1], 1: [0, 4], 3: [5]}
    assert runs(align(int32([[4, 4], [4, 4]], device), 4, pdl=False)) == {}


@pytest.mark.parametrize("experts, top_k, rows", [(5, 2, 512), (5, 2, 513), (12, 8, 2048), (3, 1, 4097), (16, 1, 1)])
def test_any_number_of_pairs_equals_a_stable_sort(experts, top_k, rows, device):
    ids = torch.randint(experts + 1, (rows, top_k), dtype=torch.int32, generator=torch.Generator().manual_seed(rows))
    flat = ids.reshape(-1)
    expected = {e: (flat == e).nonzero()[:, 0].tolist() for e in sorted(set(flat.tolist()) - {experts})}
    assert list(runs(align(ids.to(device), experts, pdl=False)).items()) == list(expected.items())


def test_all_pairs_of_one_expert_are_one_run(device):
    assert runs(align(int32([[3]] * 1500, device), 4, pdl=False)) == {3: list(range(1500))}


def equal(logits: Tensor, top_k: int, scratch: Scratch, **how: object) -> None:
    """One kernel gives the bits of the two."""
    picked, alignment = route_align(logits, top_k, scratch=scratch, pdl=False, **how)
    alone = router_topk(logits, top_k, pdl=False, **how)
    assert torch.equal(picked.ids, alone.ids) and torch.equal(picked.weights, alone.weights)
    assert (picked.rstd is None) == (alone.rstd is None)
    assert picked.rstd is None or torch.equal(picked.rstd, alone.rstd)
    assert list(runs(alignment).items()) == list(runs(align(alone.ids, logits.shape[1], pdl=False)).items())


@pytest.mark.parametrize("rows", ROWS)
def test_one_kernel_equals_router_topk_and_align(rows, device):
    equal(normal(rows, 16).to(device), 4, Scratch(device), renormalise=True)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("experts, top_k", [(40, 8), (8, 1), (12, 2), (5, 3), (16, 6)])
def test_one_kernel_takes_any_top_k_and_either_scoring(experts, top_k, renormalise, scoring, device):
    logits = normal(5, experts, seed=top_k).to(device)
    equal(
        logits, top_k, Scratch(device), renormalise=renormalise, scoring=scoring, x=normal(5, 40).to(device), eps=1e-6
    )


def test_one_kernel_breaks_ties_as_two_do(device):
    equal(torch.zeros(9, 8, device=device), 3, Scratch(device), renormalise=True)
    equal((normal(9, 8) > 0).float().to(device), 3, Scratch(device), renormalise=True)


@pytest.mark.parametrize("live", [0, 1, 4, 7])
def test_one_kernel_leaves_masked_rows_out(live, device):
    masked = torch.tensor([live], dtype=torch.int32, device=device)
    equal(normal(7, 6).to(device), 2, Scratch(device), renormalise=True, live=masked)


def test_the_counter_is_zero_again_so_a_second_step_aligns_too(device):
    scratch = Scratch(device)
    equal(normal(4, 8).to(device), 2, scratch, renormalise=True)
    assert scratch.counters(1).tolist() == [0]
    equal(normal(6, 8, seed=1).to(device), 2, scratch, renormalise=True)


def test_one_kernel_takes_up_to_1024_pairs(device):
    scratch = Scratch(device)
    equal(normal(8, 130).to(device), 128, scratch, renormalise=True)
    with pytest.raises(ValueError, match="route_align takes up to 1024 pairs, not 1152"):
        route_align(normal(9, 130).to(device), 128, renormalise=True, scratch=scratch, pdl=False)
    assert MAX_PAIRS == 1024
