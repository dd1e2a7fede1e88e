"""Paged attention at the released widths on a GPU, against float64, against itself and against FlashInfer."""

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from engine.kernels import attention
from engine.kernels.attention import (
    decode_attention,
    default_paged_tile,
    default_tile,
    norm_rope_write,
    paged_attention,
    query_blocks,
)
from engine.kernels.flash import FlashPrefill, available
from engine.kernels.scratch import Scratch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS, KV_HEADS, DIM, PAGE, EPS = 32, 4, 128, 16, 1e-6
DEVICE = torch.device("cuda")
# Relative RMS error: bfloat16 keeps 8 bits, and tf32 in place of float32 would give 5e-4.
BOUND = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 5e-6}
ROWS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 64, 100, 127, 128, 129]
Run = tuple[int, int]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def scratch():
    return Scratch(DEVICE)


class Case:
    """Runs (start, length) of token rows over scrambled pages, whose earlier positions are cached already."""

    def __init__(self, runs: list[Run], dtype: torch.dtype, seed: int = 0):
        draw = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, generator=draw)

        starts, lengths = (np.array(column) for column in zip(*runs, strict=True))
        counts = -(-(starts + lengths) // PAGE)
        total, rows = int(counts.sum()), int(lengths.sum())
        self.runs, self.starts, self.lengths = runs, starts, lengths
        self.pages = np.zeros((len(runs), counts.max()), dtype=np.int64)
        self.pages[np.arange(counts.max()) < counts[:, None]] = np.random.default_rng(seed).permutation(total) + 1
        self.table = torch.from_numpy(self.pages.astype(np.int32)).to(DEVICE)
        places = [np.arange(start, start + length) for start, length in runs]
        where = [self.pages[run, at // PAGE] * PAGE + at % PAGE for run, at in enumerate(places)]
        self.where = torch.from_numpy(np.concatenate(where)).to(DEVICE)
        self.qkv = normal(rows, (HEADS + 2 * KV_HEADS) * DIM).to(dtype)
        self.qk_norm = (1 + normal(HEADS + KV_HEADS, DIM) / 4).to(dtype)
        angles = (normal(rows, DIM // 2) * 3).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.caches = [normal(total + 1, PAGE, KV_HEADS, DIM).to(dtype) for _ in range(2)]
        self.dtype = dtype

    def inputs(self) -> tuple[Tensor, Tensor, float, int, Tensor, Tensor]:
        return self.qkv, self.qk_norm, EPS, HEADS, self.cos, self.sin

    def fresh(self) -> list[Tensor]:
        return [cache.clone() for cache in self.caches]

    def blocks(self) -> Tensor:
        return torch.from_numpy(query_blocks(self.starts, self.lengths, default_paged_tile(self.dtype)["BQ"])).to(
            DEVICE
        )

    def row_starts(self) -> Tensor:
        return torch.from_numpy(self.starts.astype(np.int32)).to(DEVICE)

    def truth(self) -> tuple[Tensor, Tensor, Tensor]:
        """Attention [n, Hq * d] and the caches afterwards, in float64 throughout."""
        rows = self.qkv.double().view(len(self.qkv), -1, DIM)
        qk = rows[:, : HEADS + KV_HEADS]
        qk = qk * (qk.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.qk_norm.double()
        left, right = qk.chunk(2, -1)
        qk = qk * self.cos.double()[:, None] + torch.cat([-right, left], -1) * self.sin.double()[:, None]
        k_cache, v_cache = (cache.double() for cache in self.caches)
        k_cache.view(-1, KV_HEADS, DIM)[self.where] = qk[:, HEADS:]
        v_cache.view(-1, KV_HEADS, DIM)[self.where] = rows[:, HEADS + KV_HEADS :]
        outs, offset = [], 0
        for run, (start, length) in enumerate(self.runs):
            q = qk[offset : offset + length, :HEADS].transpose(0, 1)
            offset += length
            k, v = (cache[self.table[run].long()].flatten(0, 1) for cache in (k_cache, v_cache))
            k, v = (x[: start + length].repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (k, v))
            ahead = (
                torch.arange(start + length, device=DEVICE)
                > torch.arange(start, start + length, device=DEVICE)[:, None]
            )
            scores = (q @ k.transpose(1, 2) * DIM**-0.5).masked_fill(ahead, -torch.inf)
            outs.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return torch.cat(outs), k_cache, v_cache


def decode(case: Case, scratch: Scratch, pdl: bool, tile=None) -> tuple[Tensor, ...]:
    caches = case.fresh()
    tile = tile or default_tile(len(case.runs))
    out = decode_attention(*case.inputs(), *caches, case.table, case.row_starts(), scratch=scratch, tile=tile, pdl=pdl)
    return out, *caches


def prefill(case: Case, pdl: bool) -> tuple[Tensor, ...]:
    caches = case.fresh()
    q = norm_rope_write(*case.inputs(), *caches, case.where, pdl=pdl)
    tile = default_paged_tile(case.dtype)
    return paged_attention(q, *caches, case.table, case.blocks(), tile=tile, pdl=pdl), *caches


def check(ours: tuple[Tensor, ...], truth: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for mine, exact in zip(ours, truth, strict=True):
        assert mine.isfinite().all()
        assert (mine.double() - exact).norm() / exact.norm() < BOUND[dtype]


def contexts(rows: int) -> list[Run]:
    dice = np.random.default_rng(rows)
    return [(int(start), 1) for start in dice.integers(0, 320, rows)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode_attention_is_close_to_float64(rows, dtype, scratch):
    case = Case(contexts(rows), dtype, seed=rows)
    check(decode(case, scratch, pdl=False), case.truth(), dtype)


@pytest.mark.parametrize("context", [1, 2, 64, 65, 512, 513, 4000])
def test_decode_attention_takes_long_contexts(context, scratch):
    case = Case([(context - 1, 1), (context // 2, 1)], torch.bfloat16)
    check(decode(case, scratch, pdl=False), case.truth(), torch.bfloat16)


@pytest.mark.parametrize("runs", [contexts(1), contexts(16), contexts(64), [(3000, 1), (0, 1)]])
def test_dependent_launch_changes_no_bit_of_decode(runs, scratch):
    case = Case(runs, torch.bfloat16)
    for plain, dependent in zip(decode(case, scratch, False), decode(case, scratch, True), strict=True):
        assert torch.equal(plain, dependent)


def test_a_captured_chain_of_dependent_layers_gives_the_same_bits_at_each_replay(scratch):
    # The layers share work space and counters, and each may start before the one before it has ended.
    layers = [Case(contexts(16), torch.bfloat16, seed=seed) for seed in range(8)]
    expected = [decode(case, scratch, pdl=False)[0] for case in layers]
    caches, starts = [case.fresh() for case in layers], [case.row_starts() for case in layers]
    tile = default_tile(16)

    def chain() -> list[Tensor]:
        return [
            decode_attention(*case.inputs(), *cache, case.table, start, scratch=scratch, tile=tile, pdl=True)
            for case, cache, start in zip(layers, caches, starts, strict=True)
        ]

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = chain()
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out, want in zip(outs, expected, strict=True))
    assert scratch.counters(1024).abs().sum() == 0


def test_a_decode_row_has_the_same_bits_alone_and_in_company(scratch):
    case, tile = Case(contexts(64), torch.bfloat16), default_tile(64)
    together = decode(case, scratch, False, tile)[0]
    for row in (0, 1, 31, 63):
        only = slice(row, row + 1)
        inputs = (case.qkv[only], case.qk_norm, EPS, HEADS, case.cos[only], case.sin[only], *case.fresh())
        starts = case.row_starts()[only]
        alone = decode_attention(*inputs, case.table[only], starts, scratch=scratch, tile=tile, pdl=False)
        assert torch.equal(alone, together[only])


@pytest.mark.parametrize("dependent", [False, True])
def test_padded_decode_rows_store_nothing_and_give_zeros(dependent, scratch):
    case = Case(contexts(16), torch.bfloat16)
    starts, caches = case.row_starts(), case.fresh()
    starts[10:] = -1
    tile = default_tile(16)
    out = decode_attention(*case.inputs(), *caches, case.table, starts, scratch=scratch, tile=tile, pdl=dependent)
    whole, k_cache, v_cache = decode(case, scratch, False)
    assert torch.equal(out[:10], whole[:10])
    assert out[10:].abs().sum() == 0
    for ours, stored, before in zip(caches, (k_cache, v_cache), case.caches, strict=True):
        flat, stored, before = (x.view(-1, KV_HEADS * DIM) for x in (ours, stored, before))
        assert torch.equal(flat[case.where[:10]], stored[case.where[:10]])
        assert torch.equal(flat[case.where[10:]], before[case.where[10:]])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_prompt_is_close_to_float64(rows, dtype):
    case = Case([(0, rows)], dtype, seed=rows)
    check(prefill(case, pdl=False), case.truth(), dtype)


MIXED: list[Run] = [(0, 100), (299, 1), (512, 33), (0, 1), (64, 8), (1500, 300), (7, 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_prompts_and_decode_rows_of_one_step_are_close_to_float64(dtype):
    case = Case(MIXED, dtype)
    check(prefill(case, pdl=False), case.truth(), dtype)


def test_dependent_launch_changes_no_bit_of_a_prompt():
    case = Case(MIXED, torch.bfloat16)
    for plain, dependent in zip(prefill(case, False), prefill(case, True), strict=True):
        assert torch.equal(plain, dependent)


@pytest.mark.parametrize("cuts", [[100], [64, 128, 192], [1, 2, 150, 299]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(cuts, dtype):
    whole = Case([(0, 300)], dtype)
    expected, _, _ = prefill(whole, pdl=False)
    caches, tile = whole.fresh(), default_paged_tile(dtype)
    for low, high in zip([0, *cuts], [*cuts, 300], strict=True):
        rows = slice(low, high)
        inputs = (whole.qkv[rows], whole.qk_norm, EPS, HEADS, whole.cos[rows], whole.sin[rows], *caches)
        q = norm_rope_write(*inputs, whole.where[rows], pdl=False)
        blocks = torch.from_numpy(query_blocks([low], [high - low], tile["BQ"])).to(DEVICE)
        part = paged_attention(q, *caches, whole.table, blocks, tile=tile, pdl=False)
        assert torch.equal(part, expected[rows])


def test_padding_blocks_leave_zeros():
    case = Case(MIXED, torch.bfloat16)
    expected, *caches = prefill(case, pdl=False)
    q = norm_rope_write(*case.inputs(), *case.fresh(), case.where, pdl=False)
    blocks = torch.cat([case.blocks(), torch.zeros(9, 4, dtype=torch.int32, device=DEVICE)])
    padded = torch.cat([q, torch.full((5, HEADS, DIM), torch.nan, dtype=q.dtype, device=DEVICE)])
    out = paged_attention(padded, *caches, case.table, blocks, tile=default_paged_tile(q.dtype), pdl=True)
    assert torch.equal(out[: len(q)], expected)
    assert out[len(q) :].abs().sum() == 0


def test_decode_rows_are_close_by_either_way(scratch):
    case = Case(contexts(33), torch.bfloat16)
    (one, k_one, v_one), (two, k_two, v_two) = decode(case, scratch, False), prefill(case, False)
    assert (one.float() - two.float()).norm() / two.float().norm() < BOUND[torch.bfloat16]
    assert (k_one.float() - k_two.float()).abs().max() < 0.05
    assert torch.equal(v_one, v_two)


def test_nothing_compiles_again_when_a_step_is_packed_otherwise(scratch, monkeypatch):
    case = Case(MIXED, torch.bfloat16)
    expected, *caches = prefill(case, pdl=False)
    q = norm_rope_write(*case.inputs(), *case.fresh(), case.where, pdl=False)
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **given: compiled.append(given))
    blocks, wide = case.blocks(), case.table.shape[1] + 3
    packed = torch.zeros(3 + blocks.numel(), dtype=torch.int32, device=DEVICE)
    packed[3:] = blocks.flatten()
    table = torch.zeros(1 + len(case.table) * wide, dtype=torch.int32, device=DEVICE)[1:].view(-1, wide)
    table[:, : case.table.shape[1]] = case.table
    tile = default_paged_tile(q.dtype)
    again = paged_attention(q, *caches, table, packed[3:].view(-1, 4), tile=tile, pdl=False)
    assert torch.equal(again, expected)
    assert compiled == []
    # The hook does see a compilation: of a tile that nobody has used.
    decode(Case([(3, 1)], torch.bfloat16), scratch, False, {"S": 1, "BT": 16, "warps": 1, "stages": 1})
    assert compiled


REASON = available(torch.device("cuda"), torch.bfloat16, DIM)


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_flashinfer_gives_the_same_within_rounding():
    flash = FlashPrefill(DEVICE)
    for seed, runs in enumerate([MIXED, [(0, 64)], contexts(16), MIXED[::-1]]):
        case = Case(runs, torch.bfloat16, seed)
        ours, *caches = prefill(case, pdl=False)
        q = norm_rope_write(*case.inputs(), *case.fresh(), case.where, pdl=False)
        flash.plan(case.starts, case.lengths, case.pages, PAGE, HEADS, KV_HEADS, DIM, torch.bfloat16)
        theirs = flash.run(q, *caches)
        assert theirs.shape == ours.shape
        assert (theirs.float() - ours.float()).norm() / ours.float().norm() < BOUND[torch.bfloat16]
        more = flash.run(torch.cat([q, q[:3]]), *caches)
        assert torch.equal(more[: len(q)], theirs)
        assert more[len(q) :].abs().sum() == 0


def test_the_kernels_are_compiled_and_not_interpreted():
    assert type(attention._decode_kernel).__name__ == "JITFunction"
