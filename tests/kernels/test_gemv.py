"""`gemv`, `split_gemm` and the scratch memory that the second works in, at small sizes."""

import pytest
import torch
from torch import Tensor

from engine.kernels.gemv import gemv, gemv_tile, split_gemm, split_tile
from engine.kernels.scratch import SMALLEST, Scratch

EPS = 1e-6
FLOAT32 = torch.float32
SIZES = [(64, 32), (96, 35), (40, 7)]
DTYPES = [(torch.float32, 1e-5), (torch.float16, 2e-3)]


def normal(*shape: int, device: torch.device, dtype: torch.dtype = FLOAT32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def expected(x: Tensor, weight: Tensor, norm: Tensor | None, residual: Tensor | None) -> Tensor:
    rows = x.double()
    if norm is not None:
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS) * norm.double()
    product = rows @ weight.double().t()
    return product if residual is None else product + residual.double()


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    assert ours.isfinite().all()
    assert ((ours.double() - theirs).norm() / theirs.norm()).item() < tolerance


def tile(**changes: int) -> dict[str, int]:
    return {"RP": 16, "BN": 16, "BK": 16, "SK": 2, "warps": 4, "stages": 2} | changes


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8])
@pytest.mark.parametrize(("width", "outputs"), SIZES)
def test_gemv_multiplies_the_normalised_rows_and_adds_the_residual(rows, width, outputs, device):
    x, weight = normal(rows, width, device=device), normal(outputs, width, device=device, seed=1)
    norm, residual = normal(width, device=device, seed=2), normal(rows, outputs, device=device, seed=3)
    for given_norm in (norm, None):
        for given_residual in (residual, None):
            ours = gemv(
                *(x, weight),
                norm=given_norm,
                eps=EPS,
                residual=given_residual,
                out_dtype=FLOAT32,
                tile={"BN": 8, "warps": 4, "stages": 1},
                pdl=False,
            )
            assert_near(ours, expected(x, weight, given_norm, given_residual), 1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 15, 16, 17, 33])
@pytest.mark.parametrize(("width", "outputs"), SIZES)
def test_split_gemm_multiplies_the_normalised_rows_and_adds_the_residual(rows, width, outputs, device):
    x, weight = normal(rows, width, device=device), normal(outputs, width, device=device, seed=1)
    norm, residual = normal(width, device=device, seed=2), normal(rows, outputs, device=device, seed=3)
    scratch = Scratch(device)
    for given_norm, given_residual, slices in (
        (norm, residual, 2),
        (None, residual, 1),
        (norm, None, 1),
        (None, None, 4),
    ):
        ours = split_gemm(
            *(x, weight),
            norm=given_norm,
            eps=EPS,
            residual=given_residual,
            out_dtype=FLOAT32,
            scratch=scratch,
            tile=tile(SK=slices),
            pdl=False,
        )
        assert_near(ours, expected(x, weight, given_norm, given_residual), 1e-5)
        assert not scratch.counters(SMALLEST).any(), "the next kernel counts from zero"


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_both_round_once_to_the_type_asked_for(dtype, tolerance, device):
    x, weight = normal(3, 64, device=device, dtype=dtype), normal(32, 64, device=device, dtype=dtype, seed=1)
    theirs = expected(x, weight, None, None)
    for wanted in (FLOAT32, dtype):
        ours = gemv(x, weight, out_dtype=wanted, tile=gemv_tile(32, 64, dtype), pdl=False)
        split = split_gemm(x, weight, out_dtype=wanted, scratch=Scratch(device), tile=tile(), pdl=False)
        assert ours.dtype == split.dtype == wanted
        assert_near(ours, theirs, 1e-5 if wanted == FLOAT32 else tolerance)
        assert_near(split, theirs, 1e-5 if wanted == FLOAT32 else tolerance)


def test_gemv_refuses_more_rows_than_it_has_registers_for(device):
    x, weight = normal(9, 64, device=device), normal(32, 64, device=device)
    with pytest.raises(ValueError, match="up to 8 rows, got 9: use split_gemm"):
        gemv(x, weight, out_dtype=FLOAT32, tile=gemv_tile(32, 64, FLOAT32), pdl=False)


@pytest.mark.parametrize("slices", [1, 3])
def test_a_rows_bits_depend_neither_on_the_number_of_rows_nor_on_the_others(slices, device):
    x, weight, norm = (normal(*shape, device=device, seed=len(shape)) for shape in ((33, 96), (20, 96), (96,)))
    scratch = Scratch(device)

    def run(rows: Tensor) -> Tensor:
        return split_gemm(
            rows, weight, norm=norm, eps=EPS, out_dtype=FLOAT32, scratch=scratch, tile=tile(SK=slices), pdl=False
        )

    together = run(x)
    assert torch.equal(run(x), together)
    for start, stop in ((0, 1), (5, 6), (32, 33), (3, 20), (14, 31), (0, 32)):
        assert torch.equal(run(x[start:stop].contiguous()), together[start:stop])
    others = x.clone()
    others[::2] = 1e4
    assert torch.equal(run(others)[1::2], together[1::2])


def test_slices_that_do_not_divide_the_width_leave_nothing_out(device):
    x, weight = normal(2, 80, device=device), normal(16, 80, device=device, seed=1)
    for slices in (1, 2, 3, 4, 5, 16):
        ours = split_gemm(x, weight, out_dtype=FLOAT32, scratch=Scratch(device), tile=tile(SK=slices), pdl=False)
        assert_near(ours, expected(x, weight, None, None), 1e-5)


class NoScratch(Scratch):
    """Refuses to be used."""

    def floats(self, count: int) -> Tensor:
        raise AssertionError("work space is not needed")

    def counters(self, count: int) -> Tensor:
        raise AssertionError("counters are not needed")


def test_one_slice_needs_no_scratch(device):
    x, weight = normal(3, 64, device=device), normal(32, 64, device=device, seed=1)
    ours = split_gemm(x, weight, out_dtype=FLOAT32, scratch=NoScratch(device), tile=tile(SK=1), pdl=False)
    assert_near(ours, expected(x, weight, None, None), 1e-5)


def test_the_tiles_of_the_released_shapes_are_the_measured_ones():
    bf16 = torch.bfloat16
    shapes = {"qkv": (5120, 2048), "o": (2048, 4096), "router": (128, 2048), "head": (151936, 2048)}
    assert {name: gemv_tile(*shape, bf16)["BN"] for name, shape in shapes.items()} == {
        "qkv": 8,
        "o": 4,
        "router": 2,
        "head": 8,
    }
    split = {name: split_tile(16, *shape, bf16) for name, shape in shapes.items()}
    assert {name: (t["BN"], t["BK"], t["SK"]) for name, t in split.items()} == {
        "qkv": (64, 256, 8),
        "o": (64, 256, 16),
        "router": (16, 256, 8),
        "head": (64, 128, 1),
    }
    assert split_tile(2048, 5120, 2048, bf16)["SK"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("width", "outputs"), [(8, 1), (64, 24), (300, 1040)])
def test_the_tile_of_any_size_gives_the_product(dtype, width, outputs, device):
    x, weight = normal(2, width, device=device, dtype=dtype), normal(outputs, width, device=device, dtype=dtype, seed=1)
    theirs = expected(x, weight, None, None)
    assert_near(gemv(x, weight, out_dtype=FLOAT32, tile=gemv_tile(outputs, width, dtype), pdl=False), theirs, 1e-5)
    chosen = split_tile(2, outputs, width, dtype)
    ours = split_gemm(x, weight, out_dtype=FLOAT32, scratch=Scratch(device), tile=chosen, pdl=False)
    assert_near(ours, theirs, 1e-5)


def test_scratch_gives_the_same_memory_and_keeps_what_it_outgrew(device):
    scratch = Scratch(device)
    small = scratch.floats(10)
    assert small.shape == (10,) and small.dtype == torch.float32
    assert scratch.floats(SMALLEST).data_ptr() == small.data_ptr()
    place = small.data_ptr()
    del small
    large = scratch.floats(SMALLEST + 1)
    others = [torch.empty(SMALLEST, device=device).data_ptr() for _ in range(8)]
    assert place not in [large.data_ptr(), *others], "a graph captured with it still writes there"


def test_counters_start_at_zero_however_many(device):
    scratch = Scratch(device)
    assert scratch.counters(5).tolist() == [0] * 5
    assert scratch.counters(5).dtype == torch.int32
    assert not scratch.counters(3 * SMALLEST).any()
