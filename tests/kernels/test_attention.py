"""Paged attention kernels against the CPU's definition, in float32 and, where only the bits matter, against themselves."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import Attend, Segment, make_plan, ops_for
from engine.kernels.attention import (
    decode_attention,
    default_paged_tile,
    default_tile,
    norm_rope_write,
    paged_attention,
    query_blocks,
)
from engine.kernels.flash import available, page_lists
from engine.kernels.scratch import Scratch

REFERENCE = ops_for("cpu")
EPS = 1e-6
TILE = {"S": 4, "BT": 16, "warps": 4, "stages": 2}
PAGED_TILE = {"BQ": 8, "BT": 16, "warps": 4, "stages": 2}
Run = tuple[int, int]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture
def scratch(device):
    return Scratch(device)


class Case:
    """Runs (start, length) of token rows over pages in scrambled order, whose earlier positions are cached already."""

    def __init__(self, runs: list[Run], *, page_size=16, heads=4, kv_heads=2, dim=32, device="cpu", seed=0):
        draw = torch.Generator().manual_seed(seed)
        counts = [-(-(start + length) // page_size) for start, length in runs]
        # Page 0 belongs to nobody, so that a read or write at a wrong place shows.
        free = (torch.randperm(sum(counts), generator=draw) + 1).tolist()
        self.pages = [tuple(free.pop() for _ in range(count)) for count in counts]
        self.runs, self.page_size, self.heads, self.device = runs, page_size, heads, device
        rows = sum(length for _, length in runs)
        shape = (sum(counts) + 1, page_size, kv_heads, dim)
        self.qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=draw)
        self.qk_norm = 1 + torch.randn(heads + kv_heads, dim, generator=draw) / 4
        angles = torch.rand(rows, dim // 2, generator=draw) * 6
        self.cos, self.sin = REFERENCE.rope_tables(angles, torch.float32)
        self.k_cache, self.v_cache = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
        offsets = np.cumsum([0, *(length for _, length in runs)])
        segments = [
            Segment(offset=int(offset), length=length, start=start, pages=pages)
            for offset, (start, length), pages in zip(offsets, runs, self.pages, strict=False)
        ]
        self.plan = make_plan(segments, torch.zeros(3, rows), page_size, "cpu")

    def caches(self) -> tuple[Tensor, Tensor]:
        """Fresh copies of the caches, on the kernels' device."""
        return self.k_cache.to(self.device, copy=True), self.v_cache.to(self.device, copy=True)

    def table(self, spare=0) -> Tensor:
        """The page table with `spare` unused columns; page ids past a run's last are out of every bound."""
        most = max(len(pages) for pages in self.pages)
        lines = [[*pages, *[1 << 30] * (most - len(pages) + spare)] for pages in self.pages]
        return torch.tensor(lines, dtype=torch.int32, device=self.device)

    def inputs(self) -> tuple[Tensor, Tensor, float, int, Tensor, Tensor]:
        qkv, qk_norm, cos, sin = (x.to(self.device) for x in (self.qkv, self.qk_norm, self.cos, self.sin))
        return qkv, qk_norm, EPS, self.heads, cos, sin

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the CPU's operations give: attention and the caches afterwards."""
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        at = Attend(self.qk_norm, EPS, self.heads, self.cos, self.sin)
        return REFERENCE.self_attention(self.qkv, at, k_cache, v_cache, self.plan), k_cache, v_cache

    def starts(self) -> Tensor:
        return torch.tensor([start for start, _ in self.runs], dtype=torch.int32, device=self.device)

    def blocks(self, size: int) -> Tensor:
        starts, lengths = zip(*self.runs, strict=True)
        return torch.from_numpy(query_blocks(starts, lengths, size)).to(self.device)


def decode_case(contexts: list[int], **options) -> Case:
    """One row at the end of each of `contexts` positions."""
    return Case([(context - 1, 1) for context in contexts], **options)


def decode(case: Case, scratch: Scratch, tile=TILE, spare=0):
    caches = case.caches()
    out = decode_attention(
        *case.inputs(), *caches, case.table(spare), case.starts(), scratch=scratch, tile=tile, pdl=False
    )
    return out, *caches


def prefill(case: Case, tile=PAGED_TILE):
    caches = case.caches()
    q = norm_rope_write(*case.inputs(), *caches, case.plan.write.to(case.device), pdl=False)
    out = paged_attention(q, *caches, case.table(spare=2), case.blocks(tile["BQ"]), tile=tile, pdl=False)
    return out, *caches


def agree(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.cpu(), their, rtol=2e-5, atol=2e-5)


# Decode.


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize(
    "contexts", [[1], [2], [16], [17], [64], [65, 1], [300], [31, 32, 33], [5, 300, 1, 129, 48, 90, 7]]
)
def test_decode_attention_equals_the_reference(contexts, page_size, scratch, device):
    case = decode_case(contexts, page_size=page_size, device=device)
    agree(decode(case, scratch), case.expected())


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 15, 16, 17, 33])
def test_decode_attention_takes_any_number_of_rows(rows, scratch, device):
    case = decode_case([1 + 37 * row % 60 for row in range(rows)], heads=2, kv_heads=1, dim=16, device=device)
    tile = {"S": 2, "BT": 32, "warps": 4, "stages": 2}
    agree(decode(case, scratch, tile), case.expected())


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("positions", [16, 64])
def test_decode_attention_gives_the_same_whatever_the_tile(splits, positions, scratch, device):
    case = decode_case([1, 40, 200], device=device)
    tile = {"S": splits, "BT": positions, "warps": 4, "stages": 2}
    agree(decode(case, scratch, tile), case.expected())


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1), (16, 1), (20, 1)])
def test_decode_attention_takes_any_group_of_heads(heads, kv_heads, scratch, device):
    case = decode_case([50, 3, 120], heads=heads, kv_heads=kv_heads, dim=16, device=device)
    agree(decode(case, scratch), case.expected())


def test_decode_attention_uses_a_table_wider_than_what_is_read(scratch, device):
    case = decode_case([50, 3, 120], device=device)
    agree(decode(case, scratch, spare=9), case.expected())


def test_a_padded_row_stores_nothing_and_gives_zeros(scratch, device):
    case = decode_case([50, 3, 120], device=device)
    starts = case.starts()
    starts[1] = -1
    k_cache, v_cache = case.caches()
    out = decode_attention(
        *case.inputs(), k_cache, v_cache, case.table(), starts, scratch=scratch, tile=TILE, pdl=False
    )
    expected, k_expected, v_expected = case.expected()
    expected[1] = 0
    page = case.pages[1][0]
    k_expected[page], v_expected[page] = case.k_cache[page], case.v_cache[page]
    agree((out, k_cache, v_cache), (expected, k_expected, v_expected))


def test_decode_attention_leaves_its_counters_at_zero(scratch, device):
    decode(decode_case([300, 1, 64], device=device), scratch)
    assert scratch.counters(64).abs().sum() == 0


def test_decode_attention_reads_no_position_that_is_not_written_yet(scratch, device):
    # Not even with weight 0: what lies there may be no number.
    case = decode_case([50, 3, 120], device=device)
    for (start, _), pages in zip(case.runs, case.pages, strict=True):
        for cache in (case.k_cache, case.v_cache):
            cache[pages[-1], start % case.page_size :] = torch.nan
    out, _, _ = decode(case, scratch)
    assert out.isfinite().all()


def test_a_decode_row_has_the_same_bits_alone_and_in_company(scratch, device):
    case = decode_case([50, 3, 120], device=device)
    together, _, _ = decode(case, scratch)
    qkv, qk_norm, eps, heads, cos, sin = case.inputs()
    for row in range(3):
        only = slice(row, row + 1)
        inputs = (qkv[only], qk_norm, eps, heads, cos[only], sin[only], *case.caches(), case.table()[only])
        alone = decode_attention(*inputs, case.starts()[only], scratch=scratch, tile=TILE, pdl=False)
        assert torch.equal(alone, together[only])


def test_caches_may_lie_apart_page_by_page(scratch, device):
    case = decode_case([50, 3, 120], device=device)
    apart = [torch.stack([cache, cache + 9], dim=1)[:, 0] for cache in case.caches()]
    assert not apart[0].is_contiguous()
    out = decode_attention(*case.inputs(), *apart, case.table(), case.starts(), scratch=scratch, tile=TILE, pdl=False)
    q_cache = [torch.stack([cache, cache + 9], dim=1)[:, 0] for cache in case.caches()]
    norm_rope_write(*case.inputs(), *q_cache, case.plan.write.to(device), pdl=False)
    agree((out, *apart), case.expected())
    agree(tuple(q_cache), case.expected()[1:])


# Prompts and mixed steps.

MIXED: list[Run] = [(0, 17), (299, 1), (16, 5), (0, 1), (64, 8)]


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("runs", [[(0, 1)], [(0, 8)], [(0, 9)], [(0, 35)], [(7, 11)], [(0, 16), (16, 9)], MIXED])
def test_prompts_and_decode_rows_equal_the_reference(runs, page_size, device):
    case = Case(runs, page_size=page_size, device=device)
    agree(prefill(case), case.expected())


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 2, 16), (5, 1, 16), (16, 2, 128)])
def test_prompts_take_any_group_of_heads(heads, kv_heads, dim, device):
    case = Case([(0, 20), (30, 1)], heads=heads, kv_heads=kv_heads, dim=dim, device=device)
    agree(prefill(case), case.expected())


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 15, 16, 17, 33])
def test_a_prompt_may_have_any_number_of_rows(rows, device):
    case = Case([(0, rows)], heads=2, kv_heads=1, dim=16, device=device)
    agree(prefill(case, default_paged_tile(torch.float32)), case.expected())


def test_decode_rows_give_the_same_by_either_way(scratch, device):
    case = decode_case([1, 40, 17, 300], device=device)
    one, two = decode(case, scratch), prefill(case)
    agree(one, tuple(x.cpu() for x in two))


@pytest.mark.parametrize("cuts", [[5], [16], [1, 2, 30]])
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(cuts, device):
    whole = Case([(0, 36)], heads=2, kv_heads=1, dim=16, device=device)
    expected, _, _ = prefill(whole)
    caches = whole.caches()
    for low, high in zip([0, *cuts], [*cuts, 36], strict=True):
        qkv, qk_norm, eps, heads, cos, sin = whole.inputs()
        rows = slice(low, high)
        where = whole.plan.write[rows].to(device)
        q = norm_rope_write(qkv[rows], qk_norm, eps, heads, cos[rows], sin[rows], *caches, where, pdl=False)
        blocks = torch.from_numpy(query_blocks([low], [high - low], PAGED_TILE["BQ"])).to(device)
        part = paged_attention(q, *caches, whole.table(), blocks, tile=PAGED_TILE, pdl=False)
        assert torch.equal(part, expected[rows])


def test_a_row_has_the_same_bits_alone_and_in_company(device):
    case = Case(MIXED, heads=2, kv_heads=1, dim=16, device=device)
    together, k_cache, v_cache = prefill(case)
    q = norm_rope_write(*case.inputs(), *case.caches(), case.plan.write.to(device), pdl=False)
    offset = 0
    for number, (start, length) in enumerate(MIXED):
        rows, offset = slice(offset, offset + length), offset + length
        blocks = torch.from_numpy(query_blocks([start], [length], PAGED_TILE["BQ"])).to(device)
        table = case.table()[number : number + 1]
        alone = paged_attention(q[rows], k_cache, v_cache, table, blocks, tile=PAGED_TILE, pdl=False)
        assert torch.equal(alone, together[rows])


def test_rows_of_no_block_are_zeros_and_padding_blocks_do_nothing(device):
    case = Case([(0, 20), (30, 4)], device=device)
    expected, k_cache, v_cache = prefill(case)
    q = norm_rope_write(*case.inputs(), *case.caches(), case.plan.write.to(device), pdl=False)
    blocks = case.blocks(8)
    blocks[1:3] = 0
    out = paged_attention(q, k_cache, v_cache, case.table(), blocks, tile=PAGED_TILE, pdl=False)
    assert torch.equal(out[:8], expected[:8])
    assert torch.equal(out[20:], expected[20:])
    assert out[8:20].abs().sum() == 0


def test_a_padded_row_is_not_stored(device):
    case = Case([(0, 4)], device=device)
    where = case.plan.write.to(device, copy=True)
    kept = int(where[2])
    where[2] = -1
    k_cache, v_cache = case.caches()
    q = norm_rope_write(*case.inputs(), k_cache, v_cache, where.int(), pdl=False)
    _, k_expected, v_expected = case.expected()
    for expected, before in ((k_expected, case.k_cache), (v_expected, case.v_cache)):
        expected.view(-1, 2, 32)[kept] = before.view(-1, 2, 32)[kept]
    assert q.isfinite().all()
    agree((k_cache, v_cache), (k_expected, v_expected))


def test_half_precision_stays_close(scratch, device):
    case = Case([(0, 20), (90, 1), (40, 9)], device=device)
    exact, _, _ = case.expected()
    for name in ("qkv", "qk_norm", "cos", "sin", "k_cache", "v_cache"):
        setattr(case, name, getattr(case, name).half())
    out, _, _ = prefill(case)
    assert out.dtype == torch.float16
    assert (out.cpu().float() - exact).norm() / exact.norm() < 2e-3
    single = decode_case([50, 3, 120], device=device)
    exact, _, _ = single.expected()
    for name in ("qkv", "qk_norm", "cos", "sin", "k_cache", "v_cache"):
        setattr(single, name, getattr(single, name).half())
    out, _, _ = decode(single, scratch)
    assert (out.cpu().float() - exact).norm() / exact.norm() < 2e-3


# The host's side.


def test_query_blocks_cut_each_run_on_its_own():
    blocks = query_blocks([0, 40, 7, 9], [9, 1, 8, 0], 4)
    assert blocks.dtype == np.int32
    assert blocks.tolist() == [
        [0, 0, 4, 0],
        [0, 4, 4, 4],
        [0, 8, 1, 8],
        [1, 9, 1, 40],
        [2, 10, 4, 7],
        [2, 14, 4, 11],
    ]


def test_no_runs_give_no_blocks():
    assert query_blocks([], [], 4).shape == (0, 4)


def test_few_rows_are_split_more_than_many():
    assert [default_tile(rows)["S"] for rows in (1, 8, 16, 32, 64)] == [8, 8, 4, 4, 2]


def test_page_lists_name_the_pages_in_use_and_how_full_the_last_is():
    pages = np.array([[7, 3, 0], [5, 0, 0], [2, 9, 4]])
    lists = page_lists(np.array([0, 3, 40]), np.array([17, 1, 8]), pages, 16)
    assert all(each.dtype == torch.int32 for each in lists)
    assert [each.tolist() for each in lists] == [[0, 17, 18, 26], [0, 2, 3, 6], [7, 3, 5, 2, 9, 4], [1, 4, 16]]


@pytest.mark.parametrize(
    ("device_type", "dtype", "dim", "reason"),
    [
        ("cpu", torch.bfloat16, 128, "runs on a CUDA device, not on 'cpu'"),
        ("cuda", torch.float32, 128, "in bfloat16 or float16, not in torch.float32"),
        ("cuda", torch.bfloat16, 32, "heads of 64, 128 or 256, not of 32"),
    ],
)
def test_flashinfer_says_why_it_cannot_be_used(device_type, dtype, dim, reason):
    assert reason in (available(torch.device(device_type), dtype, dim) or "")
