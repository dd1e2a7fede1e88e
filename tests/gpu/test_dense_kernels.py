"""The products and the small kernels around them at the released widths, with and without dependent launch."""

import math

import pytest
import torch
from torch import Tensor

from engine.kernels import MEDIA
from engine.kernels.gemv import gemv, gemv_tile, split_gemm, split_tile
from engine.kernels.pointwise import argmax_slots, embed_rows, rms_norm, rope_tables, silu_mul
from engine.kernels.scratch import SMALLEST, Scratch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

EPS = 1e-6
BF16, FLOAT32 = torch.bfloat16, torch.float32
ROWS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 64, 100, 127, 128, 129]
VOCAB = 151936
# Outputs and width of each product, and whether a norm comes before it; where none does, a residual follows.
SHAPES = {"qkv": (5120, 2048, True), "o": (2048, 4096, False), "router": (128, 2048, True)}
# Relative RMS error. In bfloat16 each rounding, of a result and of the normed rows that go into split_gemm, adds about 1e-3.
TOLERANCE = {FLOAT32: 1e-5, BF16: 4e-3}


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda")


@pytest.fixture
def scratch(cuda: torch.device) -> Scratch:
    return Scratch(cuda)


class Case:
    """One product with fresh random inputs: `x` [rows, K], `weight` [N, K], and a norm [K] or a residual [rows, N]."""

    def __init__(self, name: str, rows: int, dtype: torch.dtype) -> None:
        outputs, width, normed = SHAPES[name]
        self.rows, self.outputs, self.width, self.dtype = rows, outputs, width, dtype
        self.x = torch.randn(rows, width, device="cuda").to(dtype)
        self.weight = (torch.randn(outputs, width, device="cuda") * width**-0.5).to(dtype)
        self.norm = (torch.rand(width, device="cuda") + 0.5).to(dtype) if normed else None
        self.residual = None if normed else torch.randn(rows, outputs, device="cuda").to(dtype)
        self.out_dtype = FLOAT32 if name == "router" else dtype

    def gemv(self, pdl: bool) -> Tensor:
        tile = gemv_tile(self.outputs, self.width, self.dtype)
        return gemv(
            *(self.x, self.weight),
            norm=self.norm,
            eps=EPS,
            residual=self.residual,
            out_dtype=self.out_dtype,
            tile=tile,
            pdl=pdl,
        )

    def split_gemm(self, scratch: Scratch, pdl: bool, rows_of_tile: int | None = None) -> Tensor:
        tile = split_tile(rows_of_tile or self.rows, self.outputs, self.width, self.dtype)
        return split_gemm(
            *(self.x, self.weight),
            norm=self.norm,
            eps=EPS,
            residual=self.residual,
            out_dtype=self.out_dtype,
            scratch=scratch,
            tile=tile,
            pdl=pdl,
        )

    def take(self, start: int, stop: int) -> None:
        """Keep rows [start, stop) only."""
        self.x = self.x[start:stop].contiguous()
        self.residual = None if self.residual is None else self.residual[start:stop].contiguous()

    def expected(self) -> Tensor:
        x = self.x.double()
        if self.norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.norm.double()
        product = x @ self.weight.double().t()
        return product if self.residual is None else product + self.residual.double()


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    assert ours.isfinite().all()
    assert ((ours.double() - theirs).norm() / theirs.norm()).item() < tolerance


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_gemv_at_every_number_of_rows(name, dtype):
    for rows in [1, 2, 3, 7, 8] if dtype == BF16 else [1, 3, 8]:
        case = Case(name, rows, dtype)
        assert_near(case.gemv(pdl=True), case.expected(), TOLERANCE[dtype])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_split_gemm_at_every_number_of_rows(name, dtype, scratch):
    for rows in ROWS if dtype == BF16 else [1, 16, 17, 64]:
        case = Case(name, rows, dtype)
        ours = case.split_gemm(scratch, pdl=True)
        assert_near(ours, case.expected(), TOLERANCE[dtype])
        assert torch.equal(case.split_gemm(scratch, pdl=True), ours)
    assert not scratch.counters(SMALLEST).any()


def test_products_of_the_head(cuda, scratch):
    weight = (torch.randn(VOCAB, 2048, device=cuda) * 2048**-0.5).to(BF16)
    norm = torch.ones(2048, dtype=BF16, device=cuda)
    for rows in (1, 16, 64):
        x = torch.randn(rows, 2048, device=cuda).to(BF16)
        # In float32: float64 would take 2.5 GB, and the error of interest is that of rounding the normed rows.
        theirs = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)) @ weight.float().t()
        tile = split_tile(rows, VOCAB, 2048, BF16)
        ours = split_gemm(x, weight, norm=norm, eps=EPS, out_dtype=FLOAT32, scratch=scratch, tile=tile, pdl=True)
        assert_near(ours, theirs.double(), TOLERANCE[BF16])
        if rows == 1:
            tile = gemv_tile(VOCAB, 2048, BF16)
            one = gemv(x, weight, norm=norm, eps=EPS, out_dtype=FLOAT32, tile=tile, pdl=True)
            assert_near(one, theirs.double(), 1e-5)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows_of_tile", [16, 64])
def test_a_rows_bits_depend_neither_on_the_number_of_rows_nor_on_the_others(name, rows_of_tile, scratch):
    case = Case(name, 129, BF16)
    together = case.split_gemm(scratch, True, rows_of_tile)
    x, residual = case.x, case.residual
    for start, stop in ((0, 1), (15, 16), (63, 65), (64, 96), (128, 129), (0, 16), (1, 18), (3, 103), (0, 128)):
        case.x, case.residual = x, residual
        case.take(start, stop)
        assert torch.equal(case.split_gemm(scratch, True, rows_of_tile), together[start:stop]), (start, stop)
    case.x, case.residual = x.clone(), residual
    case.x[::2] *= 100
    assert torch.equal(case.split_gemm(scratch, True, rows_of_tile)[1::2], together[1::2])


@pytest.mark.parametrize("name", SHAPES)
def test_dependent_launch_moves_no_bit_of_a_product(name, scratch):
    for rows in (1, 8, 64):
        case = Case(name, rows, BF16)
        assert torch.equal(case.split_gemm(scratch, True), case.split_gemm(scratch, False))
        if rows <= 8:
            assert torch.equal(case.gemv(True), case.gemv(False))


def test_a_captured_chain_of_dependent_launches_equals_the_same_kernels_one_by_one(cuda, scratch):
    rows, layers = 4, 8
    hidden = torch.randn(rows, 2048, device=cuda).to(BF16)
    norm = torch.rand(2048, device=cuda).to(BF16) + 0.5
    up = [(torch.randn(4096, 2048, device=cuda) * 0.02).to(BF16) for _ in range(layers)]
    down = [(torch.randn(2048, 2048, device=cuda) * 0.02).to(BF16) for _ in range(layers)]
    slots = torch.arange(rows, dtype=torch.int32, device=cuda)
    tokens = torch.zeros(rows, dtype=torch.int64, device=cuda)

    def chain(pdl: bool) -> tuple[Tensor, Tensor]:
        x = hidden
        for layer in range(layers):
            tile = split_tile(rows, 4096, 2048, BF16)
            wide = split_gemm(x, up[layer], norm=norm, eps=EPS, out_dtype=BF16, scratch=scratch, tile=tile, pdl=pdl)
            inner = rms_norm(silu_mul(wide, pdl=pdl), norm, EPS, pdl=pdl)
            tile = gemv_tile(2048, 2048, BF16)
            x = gemv(inner, down[layer], residual=x, out_dtype=BF16, tile=tile, pdl=pdl)
        return x, argmax_slots(x.float(), slots, tokens, scratch=scratch, pdl=pdl)

    one_by_one, chosen = chain(False)
    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_choice = chain(True)
    for _ in range(20):
        captured.fill_(math.nan)
        graph.replay()
        assert torch.equal(captured, one_by_one)
        assert torch.equal(captured_choice, chosen)
    hidden.copy_(torch.randn(rows, 2048, device=cuda))
    graph.replay()
    assert torch.equal(captured, chain(False)[0])
    assert not scratch.counters(SMALLEST).any()


def test_scratch_does_not_grow_inside_a_capture(cuda):
    scratch = Scratch(cuda)
    held = scratch.floats(8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert scratch.floats(8).data_ptr() == held.data_ptr()
        for grow in (scratch.floats, scratch.counters):
            with pytest.raises(
                RuntimeError, match="inside a capture: run the same kernels at the same sizes once before"
            ):
                grow(SMALLEST + 1)


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_rms_norm_and_silu_mul_at_every_number_of_rows(dtype, cuda):
    for rows in ROWS:
        x, weight = torch.randn(rows, 2048, device=cuda).to(dtype), torch.rand(2048, device=cuda).to(dtype)
        wide = x.double()
        theirs = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()
        ours = rms_norm(x, weight, EPS, pdl=True)
        assert_near(ours, theirs, TOLERANCE[dtype])
        assert torch.equal(rms_norm(x, weight, EPS, pdl=False), ours)
        gate_up = torch.randn(rows, 2 * 768, device=cuda).to(dtype)
        gate, up = gate_up.double().chunk(2, dim=-1)
        ours = silu_mul(gate_up, pdl=True)
        assert_near(ours, gate * torch.sigmoid(gate) * up, TOLERANCE[dtype])
        assert torch.equal(silu_mul(gate_up, pdl=False), ours)


def test_rope_tables_are_exact_at_every_position(cuda):
    half = 64
    positions = torch.arange(32769, device=cuda, dtype=FLOAT32).expand(3, -1).contiguous()
    positions[1] = positions[0].flip(0)
    axes = torch.arange(half, device=cuda) % 3
    frequencies = 1e6 ** (-torch.arange(half, device=cuda, dtype=FLOAT32) / half)
    angles = (positions[axes].t() * frequencies).double()
    cos, sin = rope_tables(positions, axes, frequencies, FLOAT32, pdl=True)
    for ours, theirs in ((cos, angles.cos()), (sin, angles.sin())):
        assert (ours.double() - torch.cat([theirs, theirs], -1)).abs().max().item() < 1.5e-7
    rounded = rope_tables(positions, axes, frequencies, BF16, pdl=False)
    assert torch.equal(rounded[0], cos.to(BF16))
    assert torch.equal(rounded[1], sin.to(BF16))


@pytest.mark.parametrize("rows", [1, 16, 64, 129])
def test_embedding_rows_come_from_the_table_the_slots_and_the_media(rows, cuda):
    table, media = torch.randn(VOCAB, 2048, device=cuda).to(BF16), torch.randn(rows, 2048, device=cuda).to(BF16)
    slots = torch.randint(0, VOCAB, (64,), device=cuda)
    kind = torch.arange(rows, device=cuda) % 3
    token, slot = torch.randint(0, VOCAB, (rows,), device=cuda), torch.randint(0, 64, (rows,), device=cuda)
    ids = torch.where(kind == 0, token, torch.where(kind == 1, -1 - slot, torch.tensor(MEDIA, device=cuda))).int()
    looked_up = table[torch.where(kind == 1, slots[slot], token)]
    theirs = torch.where((kind == 2)[:, None], media, looked_up)
    for pdl in (True, False):
        assert torch.equal(embed_rows(table, ids, slots, media, pdl=pdl), theirs)


@pytest.mark.parametrize("rows", [1, 3, 16, 64, 129])
def test_the_greedy_choice_over_the_whole_vocabulary(rows, cuda, scratch):
    logits = torch.randn(rows, VOCAB, device=cuda)
    best = torch.randint(0, VOCAB - 1, (rows,), device=cuda)
    at = torch.arange(rows, device=cuda)
    logits[at, best] = 9.0
    logits[at, VOCAB - 1] = 9.0
    logits[at, (best + 1) % (VOCAB - 1)] = math.nan
    slots = torch.randperm(rows, device=cuda).int()
    slots[rows // 2] = -1
    for pdl in (True, False):
        tokens = torch.full((rows,), -7, dtype=torch.int64, device=cuda)
        chosen = argmax_slots(logits, slots, tokens, scratch=scratch, pdl=pdl)
        assert torch.equal(chosen, best)
        kept = slots >= 0
        theirs = torch.full_like(tokens, -7).index_copy_(0, slots[kept].long(), best[kept])
        assert torch.equal(tokens, theirs)
    assert not scratch.counters(SMALLEST).any()
