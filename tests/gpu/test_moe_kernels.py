"""The expert kernels on a GPU at the released widths, against plain torch in float64."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import grouped_gemm, per_pair
from engine.kernels.align import Alignment, align
from engine.kernels.gemv import gemv, gemv_tile
from engine.kernels.route_align import route_align
from engine.kernels.router_topk import Picked, route_one, router_topk
from engine.kernels.scratch import Scratch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
ROWS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 64, 100, 127, 128, 129]
EXPERTS, TOP_K, WIDTH, INTER = 128, 8, 2048, 768
EPS = 1e-6
# Relative RMS error. In bfloat16 a rounding alone is 0.0017, and the grouped products round x * norm too.
BOUNDS = {torch.bfloat16: 0.006, torch.float32: 5e-6}
DTYPES = pytest.mark.parametrize("weights", list(BOUNDS), indirect=True, ids=["bfloat16", "float32"])


class Weights:
    """The norm and the experts of one layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(0, 0.02)

        self.dtype = dtype
        self.norm = normal(WIDTH) * 10 + 1
        self.gate_up = normal(EXPERTS, 2 * INTER, WIDTH)
        self.down = normal(EXPERTS, WIDTH, INTER)


@pytest.fixture(scope="module")
def weights(request: pytest.FixtureRequest) -> Iterator[Weights]:
    torch.manual_seed(0)
    yield Weights(request.param)
    torch.cuda.empty_cache()


def int32(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


def choose(x: Tensor, live: int, pdl: bool = False) -> Picked:
    logits = torch.randn(len(x), EXPERTS, device=DEVICE)
    return router_topk(logits, TOP_K, renormalise=True, x=x, eps=EPS, live=int32(live), pdl=pdl)


def error(ours: Tensor, theirs: Tensor) -> float:
    """Relative RMS error, infinite where anything is not finite."""
    if not ours.isfinite().all():
        return float("inf")
    return float((ours.double() - theirs).norm() / theirs.norm())


def definition(x: Tensor, picked: Picked, weights: Weights, normed: bool) -> tuple[Tensor, Tensor]:
    """h [n * k, I] and what the experts add to the residual [n, H], both in float64; zeros for masked pairs."""
    wide = x.double()
    if normed:
        wide = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weights.norm.double()
    ids, share = picked.ids.reshape(-1), picked.weights.double().reshape(-1, 1)
    h = torch.zeros(len(ids), INTER, dtype=torch.float64, device=DEVICE)
    out = torch.zeros(len(ids), WIDTH, dtype=torch.float64, device=DEVICE)
    for expert in sorted(set(ids.tolist()) - {EXPERTS}):
        pairs = (ids == expert).nonzero()[:, 0]
        gate, up = (wide[pairs // TOP_K] @ weights.gate_up[expert].double().t()).chunk(2, -1)
        h[pairs] = F.silu(gate) * up * share[pairs]
        out[pairs] = h[pairs] @ weights.down[expert].double().t()
    return h, out.view(len(x), TOP_K, WIDTH).sum(1)


def pairwise(x: Tensor, norm: Tensor | None, picked: Picked, weights: Weights, pdl: bool) -> tuple[Tensor, Tensor]:
    tile = per_pair.gate_up_tile(len(x))
    h = per_pair.per_pair_gate_up(x, norm, picked, weights.gate_up, tile=tile, pdl=pdl)
    return h, per_pair.per_pair_down(h, picked, weights.down, x, tile=per_pair.down_tile(len(x)), pdl=pdl)


def grouped(
    x: Tensor, norm: Tensor | None, picked: Picked, alignment: Alignment, weights: Weights, pdl: bool
) -> tuple[Tensor, Tensor]:
    tile = grouped_gemm.gate_up_tile(len(x), x.dtype)
    h = grouped_gemm.grouped_gate_up(x, norm, picked, alignment, weights.gate_up, tile=tile, pdl=pdl)
    tile = grouped_gemm.down_tile(len(x), x.dtype)
    return h, grouped_gemm.grouped_down(h, picked, alignment, weights.down, x, tile=tile, pdl=pdl)


def runs(alignment: Alignment) -> list[tuple[int, list[int]]]:
    """Each run's expert and pairs."""
    places = zip(alignment.experts.tolist(), alignment.offsets.tolist(), alignment.counts.tolist(), strict=True)
    pairs = alignment.pairs.tolist()
    return [(expert, pairs[at : at + count]) for expert, at, count in list(places)[: int(alignment.runs)]]


def sorted_runs(ids: Tensor) -> list[tuple[int, list[int]]]:
    """The runs of `ids` [n, k] as they must be."""
    flat = ids.reshape(-1)
    return [(e, (flat == e).nonzero()[:, 0].tolist()) for e in sorted(set(flat.tolist()) - {EXPERTS})]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_the_choice_equals_a_stable_sort(rows, tied):
    logits = torch.randn(rows, EXPERTS, device=DEVICE)
    logits = (logits * 2).round() if tied else logits
    x = torch.randn(rows, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    picked = router_topk(logits, TOP_K, renormalise=True, x=x, eps=EPS, live=int32(rows), pdl=False)
    ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(picked.ids.long(), ids[:, :TOP_K])
    torch.testing.assert_close(picked.weights, ranked[:, :TOP_K].softmax(-1), rtol=1e-5, atol=1e-7)
    assert picked.rstd is not None
    torch.testing.assert_close(picked.rstd, (x.float().square().mean(-1) + EPS).rsqrt(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_follow_scoring_and_renormalisation(scoring, renormalise):
    logits = torch.randn(17, EXPERTS, device=DEVICE)
    picked = router_topk(logits, 6, renormalise=renormalise, scoring=scoring, pdl=False)
    scores, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    expected = (scores.softmax(-1) if scoring == "softmax" else scores.sigmoid())[:, :6]
    expected = expected / expected.sum(-1, keepdim=True) if renormalise else expected
    assert torch.equal(picked.ids.long(), ids[:, :6])
    assert error(picked.weights, expected) < 1e-6


@pytest.mark.parametrize("rows", [*ROWS, 512, 2048])
def test_alignment_equals_a_stable_sort(rows):
    ids = torch.randint(EXPERTS + 1, (rows, TOP_K), dtype=torch.int32, device=DEVICE)
    ids[ids % 5 == 3] = 4
    assert runs(align(ids, EXPERTS, pdl=False)) == sorted_runs(ids)


@pytest.mark.parametrize("rows", [rows for rows in ROWS if rows * TOP_K <= 1024])
def test_one_kernel_equals_the_choice_and_its_alignment_to_the_bit(rows):
    scratch = Scratch(DEVICE)
    x = torch.randn(rows, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    for attempt in range(20):
        logits = torch.randn(rows, EXPERTS, device=DEVICE)
        logits = (logits * 2).round() if attempt % 2 else logits
        live = int32(rows - attempt % 3 if rows > 2 else rows)
        alone = router_topk(logits, TOP_K, renormalise=True, x=x, eps=EPS, live=live, pdl=False)
        picked, alignment = route_align(
            logits, TOP_K, renormalise=True, x=x, eps=EPS, live=live, scratch=scratch, pdl=attempt % 4 > 1
        )
        assert torch.equal(picked.ids, alone.ids) and torch.equal(picked.weights, alone.weights)
        assert picked.rstd is not None and alone.rstd is not None and torch.equal(picked.rstd, alone.rstd)
        assert runs(alignment) == sorted_runs(alone.ids)
        assert scratch.counters(1).tolist() == [0]


@DTYPES
@pytest.mark.parametrize("rows", ROWS)
def test_experts_pair_by_pair_equal_torch(rows, weights):
    x = torch.randn(rows, WIDTH, device=DEVICE).to(weights.dtype)
    picked = choose(x, live=rows)
    h, y = pairwise(x, weights.norm, picked, weights, pdl=False)
    expected, added = definition(x, picked, weights, normed=True)
    assert error(h, expected) < BOUNDS[weights.dtype]
    assert error(y, x.double() + added) < BOUNDS[weights.dtype]


@DTYPES
@pytest.mark.parametrize("rows", ROWS)
def test_grouped_experts_equal_torch(rows, weights):
    x = torch.randn(rows, WIDTH, device=DEVICE).to(weights.dtype)
    picked = choose(x, live=rows)
    h, y = grouped(x, weights.norm, picked, align(picked.ids, EXPERTS, pdl=False), weights, pdl=False)
    expected, added = definition(x, picked, weights, normed=True)
    assert error(h, expected) < BOUNDS[weights.dtype]
    assert error(y, x.double() + added) < BOUNDS[weights.dtype]


@DTYPES
@pytest.mark.parametrize("rows", [200, 600, 2048])
def test_grouped_experts_of_a_prompt_equal_torch(rows, weights):
    x = torch.randn(rows, WIDTH, device=DEVICE).to(weights.dtype)
    picked = choose(x, live=rows)
    h, y = grouped(x, None, picked, align(picked.ids, EXPERTS, pdl=False), weights, pdl=False)
    expected, added = definition(x, picked, weights, normed=False)
    assert error(h, expected) < BOUNDS[weights.dtype]
    assert error(y, x.double() + added) < BOUNDS[weights.dtype]


@DTYPES
@pytest.mark.parametrize("rows, live", [(4, 3), (16, 9), (64, 0), (128, 100)])
def test_masked_rows_are_their_residual(rows, live, weights):
    x = torch.randn(rows, WIDTH, device=DEVICE).to(weights.dtype)
    picked = choose(x, live)
    _, alone = pairwise(x, weights.norm, picked, weights, pdl=False)
    _, together = grouped(x, weights.norm, picked, align(picked.ids, EXPERTS, pdl=False), weights, pdl=False)
    expected = x.double() + definition(x, picked, weights, normed=True)[1]
    for y in (alone, together):
        assert torch.equal(y[live:], x[live:])
        assert error(y, expected) < BOUNDS[weights.dtype]


def test_an_idle_expert_is_never_read():
    weights = Weights(torch.bfloat16)
    x = torch.randn(33, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    logits = torch.randn(33, EXPERTS, device=DEVICE)
    for idle in (0, 64, EXPERTS - 1):
        logits[:, idle] = -float("inf")
        weights.gate_up[idle] = float("nan")
        weights.down[idle] = float("nan")
    picked = router_topk(logits, TOP_K, renormalise=True, x=x, eps=EPS, live=int32(33), pdl=False)
    _, y = grouped(x, weights.norm, picked, align(picked.ids, EXPERTS, pdl=False), weights, pdl=False)
    assert y.isfinite().all()


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 64, 128])
def test_dependent_launch_changes_no_bit(rows, weights):
    scratch = Scratch(DEVICE)
    rows_of_layers = [torch.randn(rows, WIDTH, device=DEVICE).to(weights.dtype) for _ in range(6)]
    logits = [torch.randn(rows, EXPERTS, device=DEVICE) for _ in range(6)]

    def layers(pdl: bool) -> list[Tensor]:
        """All kernels one after another, with nothing of torch between them."""
        made = []
        for x, scores in zip(rows_of_layers, logits, strict=True):
            how = {"renormalise": True, "x": x, "eps": EPS, "live": None, "pdl": pdl}
            picked = router_topk(scores, TOP_K, **how)
            made += pairwise(x, weights.norm, picked, weights, pdl)
            made += grouped(x, weights.norm, picked, align(picked.ids, EXPERTS, pdl=pdl), weights, pdl)
            picked, alignment = route_align(scores, TOP_K, scratch=scratch, **how)
            made += grouped(x, weights.norm, picked, alignment, weights, pdl)
        return made

    plain, dependent = layers(False), layers(True)
    assert all(torch.equal(one, other) for one, other in zip(plain, dependent, strict=True))


@pytest.mark.parametrize("weights", [torch.bfloat16], indirect=True)
def test_a_captured_layer_follows_its_inputs(weights):
    scratch = Scratch(DEVICE)
    x = torch.randn(16, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    logits, live = torch.randn(16, EXPERTS, device=DEVICE), int32(16)

    def layer() -> Tensor:
        picked, alignment = route_align(
            logits, TOP_K, renormalise=True, x=x, eps=EPS, live=live, scratch=scratch, pdl=True
        )
        return grouped(x, weights.norm, picked, alignment, weights, pdl=True)[1]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = layer()
    torch.cuda.synchronize()
    for count in (16, 5, 11):
        x.copy_(torch.randn(16, WIDTH, device=DEVICE))
        logits.normal_()
        live.fill_(count)
        graph.replay()
        assert torch.equal(y, layer())
        assert torch.equal(y[count:], x[count:])


@pytest.mark.parametrize("weights", [torch.bfloat16], indirect=True)
def test_a_row_has_the_same_bits_in_any_company(weights):
    x = torch.randn(64, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    picked = choose(x, live=64)
    assert picked.rstd is not None

    def run(low: int, high: int) -> Tensor:
        part = Picked(picked.weights[low:high], picked.ids[low:high], picked.rstd[low:high])
        return grouped(x[low:high], weights.norm, part, align(part.ids, EXPERTS, pdl=False), weights, pdl=False)[1]

    everything = run(0, 64)
    for low, high in [(0, 1), (7, 9), (16, 48), (63, 64)]:
        assert torch.equal(run(low, high), everything[low:high])


@DTYPES
def test_one_kernel_routes_a_single_row_with_and_without_dependent_launch(weights: Weights):
    scratch = Scratch(DEVICE)
    router = torch.randn(EXPERTS, WIDTH, device=DEVICE).to(weights.dtype)
    tile = gemv_tile(EXPERTS, WIDTH, weights.dtype)
    for _ in range(20):
        x = torch.randn(1, WIDTH, device=DEVICE).to(weights.dtype)
        logits = gemv(x, router, norm=weights.norm, eps=EPS, out_dtype=torch.float32, tile=tile, pdl=False)
        wanted = router_topk(logits, TOP_K, renormalise=True, x=x, eps=EPS, pdl=False)
        found = [
            route_one(*(x, weights.norm, EPS, router, TOP_K), renormalise=True, scratch=scratch, tile=tile, pdl=pdl)
            for pdl in (False, True)
        ]
        for one in found:
            assert torch.equal(one.ids, wanted.ids)
            torch.testing.assert_close(one.weights, wanted.weights, rtol=1e-5, atol=1e-6)
        assert torch.equal(found[0].weights, found[1].weights)
