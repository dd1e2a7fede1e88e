"""The CPU operations: each against plain torch, and each giving a row the same bits wherever it stands and whoever is near."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import BLOCK, Plan, Segment, make_plan, ops_for, reference
from engine.kernels.reference import PIECE

OPS = ops_for("cpu")
SIZES = [1, 2, 3, 4, 5, 7, 8, 13, 33]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def windows(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Some runs of rows [start, stop) out of `count`, single rows among them."""
    dice = random.Random(seed)
    runs = [(row, row + 1) for row in dice.sample(range(count), 6)]
    for _ in range(12):
        start = dice.randrange(count)
        runs.append((start, dice.randrange(start, count) + 1))
    return runs


def test_only_a_device_with_operations_is_served():
    assert ops_for("cpu").device == torch.device("cpu")
    with pytest.raises(ValueError, match="no operations for device 'meta'"):
        ops_for("meta")


# Each operation against plain torch.


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("biased", [True, False])
def test_linear_equals_torch(count, biased):
    x, weight = normal(count, 48), normal(100, 48, seed=1)
    bias = normal(100, seed=2) if biased else None
    torch.testing.assert_close(OPS.linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_embedding_picks_rows():
    assert OPS.embedding(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0, 2])).tolist() == [[3.0], [1.0], [3.0]]


def test_norms_equal_torch():
    x, weight, bias = normal(5, 48), normal(48, seed=1), normal(48, seed=2)
    close(OPS.rms_norm(x, weight, 1e-6), F.rms_norm(x, (48,), weight, 1e-6))
    close(OPS.layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, (48,), weight, bias, 1e-5))


def test_an_rms_norm_takes_a_weight_for_each_head():
    x, weight = normal(5, 3, 8), normal(3, 8, seed=1)
    each = [OPS.rms_norm(x[:, head], weight[head], 1e-6) for head in range(3)]
    assert torch.equal(OPS.rms_norm(x, weight, 1e-6), torch.stack(each, dim=1))


@pytest.mark.parametrize("shape", [(1, 1), (3, 21), (64,), (5, 7, 9), (2, PIECE // 2), (3, 7001)])
def test_pointwise_functions_equal_torch_at_any_shape(shape):
    x = normal(*shape) * 3
    close(OPS.silu(x), F.silu(x))
    close(OPS.gelu(x), F.gelu(x))
    close(OPS.sigmoid(x), torch.sigmoid(x))


def test_silu_mul_gates_the_second_half_by_the_first():
    x = normal(5, 34)
    close(OPS.silu_mul(x), F.silu(x[:, :17]) * x[:, 17:])


def test_rotation_by_a_quarter_turn_swaps_the_halves():
    angles = torch.tensor([[torch.pi / 2, 0.0]])
    cos, sin = OPS.rope_tables(angles, torch.float32)
    close(cos, torch.tensor([[0.0, 1.0, 0.0, 1.0]]))
    close(sin, torch.tensor([[1.0, 0.0, 1.0, 0.0]]))
    close(OPS.rotate(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), cos, sin), torch.tensor([[[-3.0, 2.0, 1.0, 4.0]]]))


def test_route_takes_the_lowest_expert_of_equals():
    weights, ids = OPS.route(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]]), 4, True)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert weights[1].tolist() == [0.25, 0.25, 0.25, 0.25]


def test_route_without_renormalising_gives_probabilities():
    weights, ids = OPS.route(torch.log(torch.tensor([[0.1, 0.6, 0.3]])), 2, False)
    assert ids.tolist() == [[1, 2]]
    close(weights, torch.tensor([[0.6, 0.3]]))


def expert_tables() -> tuple[Tensor, Tensor]:
    return normal(7, 20, 12, seed=1) / 4, normal(7, 12, 10, seed=2) / 3


@pytest.mark.parametrize("count", SIZES)
def test_experts_equal_a_loop_over_rows_and_ranks(count):
    gate_up, down = expert_tables()
    x = normal(count, 12)
    weights, ids = OPS.route(normal(count, 7, seed=3), 3, True)
    expected = torch.zeros(count, 12)
    for row in range(count):
        for share, expert in zip(weights[row], ids[row].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            expected[row] += share * (down[expert] @ (F.silu(gate) * up))
    close(OPS.experts(x, weights, ids, gate_up, down), expected)


def test_experts_of_other_weights_are_not_taken_for_those_before():
    for seed in range(4):
        gate_up, down = normal(3, 8, 12, seed=seed), normal(3, 12, 4, seed=seed + 9)
        x = normal(1, 12)
        ours = OPS.experts(x, torch.ones(1, 1), torch.tensor([[2]]), gate_up, down)
        gate, up = (gate_up[2] @ x[0]).chunk(2)
        close(ours[0], down[2] @ (F.silu(gate) * up))
        del gate_up, down


def test_write_kv_fills_flat_places_only():
    cache = torch.zeros(3, 4, 2, 5)
    rows = normal(2, 2, 5)
    OPS.write_kv(cache, rows, torch.tensor([9, 3]))
    assert torch.equal(cache[2, 1], rows[0])
    assert torch.equal(cache[0, 3], rows[1])
    assert int((cache != 0).any(-1).any(-1).sum()) == 2


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Torch's own attention over [B, T, heads, d] with fewer key heads."""
    share = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(share, dim=2).transpose(1, 2) for x in (k, v))
    if mask is not None and mask.dim() == 3:
        mask = mask[:, None]
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def added(visible: Tensor) -> Tensor:
    """What is added to the scores so that only what is `visible` counts."""
    return torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))


@pytest.mark.parametrize("kind", ["everything", "one mask", "a mask for each"])
def test_attention_equals_torch(kind):
    q, k, v = normal(3, 5, 4, 8), normal(3, 9, 2, 8, seed=1), normal(3, 9, 2, 8, seed=2)
    shape = {"everything": None, "one mask": (5, 9), "a mask for each": (3, 5, 9)}[kind]
    visible = None if shape is None else normal(*shape, seed=3) > -0.5
    if visible is not None:
        visible[..., 0] = True
    close(OPS.attention(q, k, v, None if visible is None else added(visible)), dense(q, k, v, visible))


def test_attention_in_bfloat16_equals_torch_but_for_rounding():
    q, k, v = (normal(3, 5, 4, 8, seed=seed).bfloat16() for seed in range(3))
    visible = torch.ones(5, 5).tril().bool()
    ours = OPS.attention(q, k, v, added(visible))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), dense(q.float(), k.float(), v.float(), visible), rtol=0.02, atol=0.02)


def test_convolutions_and_snake_equal_torch():
    x, weight, bias = normal(1, 6, 30), normal(8, 6, 3, seed=1), normal(8, seed=2)
    close(OPS.conv1d(x, weight, bias, dilation=3), F.conv1d(x, weight, bias, dilation=3))
    close(OPS.conv1d(x, normal(6, 1, 7), bias[:6], groups=6), F.conv1d(x, normal(6, 1, 7), bias[:6], groups=6))
    upward = normal(6, 4, 10, seed=3)
    close(OPS.conv_transpose1d(x, upward, bias[:4], 5), F.conv_transpose1d(x, upward, bias[:4], stride=5))
    image, square = normal(1, 2, 9, 7), normal(8, 2, 3, 3, seed=4)
    close(OPS.conv2d(image, square, bias, 2, 1), F.conv2d(image, square, bias, stride=2, padding=1))
    alpha, beta = normal(6, seed=5) / 10, normal(6, seed=6) / 10
    expected = x + torch.sin(x * alpha.exp()[:, None]) ** 2 / (beta.exp()[:, None] + 1e-9)
    close(OPS.snake(x, alpha, beta), expected)


def test_with_one_rank_all_reduce_changes_nothing():
    x = normal(3, 4)
    assert OPS.all_reduce(x) is x


# A row's bits depend on nothing but the row.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "out"), [(64, 256), (64, 16), (48, 1), (128, 1), (128, 3), (48, 1088), (100, 33), (2048, 512)]
)
def test_a_row_has_the_same_bits_in_any_linear(width, out, dtype):
    x, weight = normal(61, width).to(dtype), normal(out, width, seed=1).to(dtype)
    whole = OPS.linear(x, weight)
    for start, stop in windows(61):
        assert torch.equal(OPS.linear(x[start:stop], weight), whole[start:stop]), (start, stop)


def by_columns(weight: Tensor) -> Tensor:
    """`weight` [..., M, K] as `load_weights` lays it on a CPU."""
    return weight.mT.contiguous().mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "out"), [(64, 256), (192, 320), (192, 8), (128, 1), (48, 1088), (2048, 512)])
def test_a_row_has_the_same_bits_in_any_linear_over_a_weight_that_lies_by_columns(width, out, dtype):
    x, weight = normal(140, width).to(dtype), by_columns(normal(out, width, seed=1).to(dtype))
    whole = OPS.linear(x, weight)
    for start, stop in [*windows(140), (0, 64), (0, 65), (3, 131)]:
        assert torch.equal(OPS.linear(x[start:stop], weight), whole[start:stop]), (start, stop)


@pytest.mark.parametrize("lies", [Tensor.contiguous, by_columns])
@pytest.mark.parametrize(("width", "out"), [(64, 256), (192, 8), (128, 1), (48, 1088)])
def test_products_of_many_rows_give_the_bits_of_products_of_a_block(monkeypatch, width, out, lies):
    x, weight = normal(140, width), lies(normal(out, width, seed=1))
    many = OPS.linear(x, weight)
    monkeypatch.setattr(reference, "_exact", lambda *shape: False)
    assert torch.equal(OPS.linear(x, weight), many)


def test_experts_of_many_rows_give_the_bits_of_products_of_a_block(monkeypatch):
    gate_up, down = expert_tables()
    x = normal(61, 12)
    weights, ids = OPS.route(normal(61, 7, seed=3), 3, True)
    many = OPS.experts(x, weights, ids, gate_up, down)
    monkeypatch.setattr(reference, "_exact", lambda *shape: False)
    assert torch.equal(OPS.experts(x, weights, ids, gate_up, down), many)


def test_a_library_whose_bits_follow_the_number_of_rows_is_noticed(monkeypatch):
    real = F.linear
    monkeypatch.setattr(reference.F, "linear", lambda x, weight: real(x, weight) * (1 + 1e-6 * (len(x) > 32)))
    exact = reference._exact.__wrapped__  # as if asked for the first time
    assert exact(32, (64, 48), (48, 1), 1)
    assert not exact(36, (64, 48), (48, 1), 1)


@pytest.mark.parametrize(("width", "out"), [(128, 4), (64, 16)])
def test_bfloat16_rows_have_the_same_bits_alone_in_many_draws(width, out):
    for seed in range(200):
        x, weight = normal(64, width, seed=seed).bfloat16(), normal(out, width, seed=seed + 1000).bfloat16()
        alone = torch.cat([OPS.linear(row, weight) for row in x.split(1)])
        assert torch.equal(OPS.linear(x, weight), alone), seed


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_sequence_has_the_same_bits_in_any_company_with_two_threads(count):
    torch.set_num_threads(2)
    try:
        for seed in range(50):
            q, k, v = (normal(3, n, h, 32, seed=seed + n * h) for n, h in ((count, 4), (16, 2), (16, 2)))
            mask = torch.zeros(count, 16)
            whole = OPS.attention(q, k, v, mask)
            for place in range(3):
                own = slice(place, place + 1)
                assert torch.equal(OPS.attention(q[own], k[own], v[own], mask), whole[own]), (seed, place)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("experts", "inter", "width", "top_k"), [(16, 48, 64, 4), (8, 24, 48, 3), (7, 10, 12, 1)])
def test_a_row_has_the_same_bits_in_any_company_of_experts(experts, inter, width, top_k):
    gate_up, down = normal(experts, 2 * inter, width, seed=1) / 8, normal(experts, width, inter, seed=2) / 6
    x = normal(61, width)
    # One expert is everyone's favourite, so that blocks fill and overflow.
    logits = normal(61, experts, seed=3) + 3 * F.one_hot(torch.tensor(experts - 1), experts)
    weights, ids = OPS.route(logits, top_k, True)
    whole = OPS.experts(x, weights, ids, gate_up, down)
    for start, stop in [*windows(61), (0, 4), (0, 5)]:
        some = OPS.experts(x[start:stop], weights[start:stop], ids[start:stop], gate_up, down)
        assert torch.equal(some, whole[start:stop]), (start, stop)


@pytest.mark.parametrize("width", [1, 3, 21, 48, 100])
def test_a_row_has_the_same_bits_in_any_pointwise_function_or_norm(width):
    x = normal(61, width) * 3
    weight, bias = normal(width, seed=1), normal(width, seed=2)
    functions = {
        "silu": OPS.silu,
        "gelu": OPS.gelu,
        "sigmoid": OPS.sigmoid,
        "silu_mul": lambda rows: OPS.silu_mul(torch.cat([rows, rows], dim=-1)),
        "cos": lambda rows: OPS.rope_tables(rows * 100, torch.float32)[0],
        "sin": lambda rows: OPS.rope_tables(rows * 100, torch.float32)[1],
        "rms_norm": lambda rows: OPS.rms_norm(rows, weight, 1e-6),
        "layer_norm": lambda rows: OPS.layer_norm(rows, weight, bias, 1e-5),
    }
    for name, function in functions.items():
        whole = function(x)
        for start, stop in windows(61):
            assert torch.equal(function(x[start:stop]), whole[start:stop]), (name, start, stop)


def test_a_value_has_the_same_bits_in_a_large_tensor_whatever_the_number_of_threads():
    x = normal(3 * PIECE + 77)
    whole = OPS.silu(x)
    assert torch.equal(OPS.silu(x[PIECE - 5 : PIECE + 5]), whole[PIECE - 5 : PIECE + 5])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(OPS.silu(x), whole)
    finally:
        torch.set_num_threads(threads)


def test_a_row_of_a_batch_has_the_same_bits_in_any_dense_attention():
    q, k, v = normal(9, 2, 4, 32), normal(9, 16, 2, 32, seed=1), normal(9, 16, 2, 32, seed=2)
    mask = added(torch.arange(16) <= torch.tensor([[3], [4]]))
    whole = OPS.attention(q, k, v, mask)
    for start, stop in [(0, 1), (8, 9), (2, 5), (1, 9)]:
        assert torch.equal(OPS.attention(q[start:stop], k[start:stop], v[start:stop], mask), whole[start:stop])


def test_routing_a_row_alone_gives_the_bits_it_gets_in_company():
    logits = normal(61, 16)
    weights, ids = OPS.route(logits, 4, True)
    for start, stop in windows(61):
        some, their_ids = OPS.route(logits[start:stop], 4, True)
        assert torch.equal(some, weights[start:stop]) and torch.equal(their_ids, ids[start:stop])


# Paged attention: a position's bits depend on nothing but its sequence.

PAGE_SIZE = 8
HEADS, KV_HEADS, DIM = 4, 2, 16


class Sequence:
    """Random queries, keys and values of one sequence."""

    def __init__(self, length: int, seed: int) -> None:
        self.q = normal(length, HEADS, DIM, seed=seed)
        self.k = normal(length, KV_HEADS, DIM, seed=seed + 100)
        self.v = normal(length, KV_HEADS, DIM, seed=seed + 200)


class Caches:
    """Keys and values on pages full of rubbish, as a pool that has been in use."""

    def __init__(self, pages: int) -> None:
        self.k = normal(pages, PAGE_SIZE, KV_HEADS, DIM, seed=900)
        self.v = normal(pages, PAGE_SIZE, KV_HEADS, DIM, seed=901)

    def step(self, rows: list[tuple[Sequence, int, int, tuple[int, ...]]]) -> list[Tensor]:
        """Run positions [start, stop) of each sequence on its pages in one step; returns [stop - start, heads * d] each."""
        segments, offset = [], 0
        for _, start, stop, pages in rows:
            segments.append(Segment(offset, stop - start, start, pages))
            offset += stop - start
        plan = make_plan(segments, torch.zeros(3, offset), PAGE_SIZE, "cpu")
        q, k, v = (
            torch.cat([getattr(sequence, name)[start:stop] for sequence, start, stop, _ in rows]) for name in "qkv"
        )
        OPS.write_kv(self.k, k, plan.write)
        OPS.write_kv(self.v, v, plan.write)
        return list(OPS.paged_attention(q, self.k, self.v, plan).split([stop - start for _, start, stop, _ in rows]))


LENGTH = 43
PAGES = (0, 1, 2, 3, 4, 5)


def whole(sequence: Sequence) -> Tensor:
    return Caches(6).step([(sequence, 0, LENGTH, PAGES)])[0]


def test_paged_attention_equals_torch():
    sequence = Sequence(LENGTH, 0)
    mask = torch.ones(LENGTH, LENGTH).tril().bool()
    close(whole(sequence), dense(sequence.q[None], sequence.k[None], sequence.v[None], mask)[0])


def test_decoding_one_position_at_a_time_has_the_bits_of_one_prefill():
    sequence, caches = Sequence(LENGTH, 0), Caches(9)
    pages = (8, 3, 5, 1, 7, 2)
    rows = [caches.step([(sequence, at, at + 1, pages)])[0] for at in range(LENGTH)]
    assert torch.equal(torch.cat(rows), whole(sequence))


@pytest.mark.parametrize("seed", range(8))
def test_any_split_at_multiples_of_a_block_in_any_company_on_any_pages_has_the_bits_of_one_prefill(seed):
    dice = random.Random(seed)
    sequences = [Sequence(LENGTH, index) for index in range(3)]
    expected = [whole(sequence) for sequence in sequences]
    pool = list(range(20))
    dice.shuffle(pool)
    pages = [tuple(pool[6 * index : 6 * index + 6]) for index in range(3)]
    caches, done = Caches(20), [0, 0, 0]
    parts: list[list[Tensor]] = [[], [], []]
    while min(done) < LENGTH:
        waiting = [index for index in range(3) if done[index] < LENGTH]
        chosen = dice.sample(waiting, dice.randrange(1, len(waiting) + 1))
        stops = {i: min(LENGTH, done[i] // BLOCK * BLOCK + BLOCK * dice.randrange(1, 5)) for i in chosen}
        made = caches.step([(sequences[i], done[i], stops[i], pages[i]) for i in chosen])
        for index, part in zip(chosen, made, strict=True):
            parts[index].append(part)
            done[index] = stops[index]
    for index in range(3):
        assert torch.equal(torch.cat(parts[index]), expected[index])


# The plan itself.


def test_a_plan_places_rows_on_pages_and_marks_the_last_row_of_each_segment():
    segments = [Segment(0, 3, 6, (4, 9)), Segment(3, 1, 0, (2,))]
    plan = make_plan(segments, torch.arange(12).float().view(3, 4), 8, "cpu")
    assert isinstance(plan, Plan)
    assert plan.write.tolist() == [4 * 8 + 6, 4 * 8 + 7, 9 * 8, 2 * 8]
    assert plan.last.tolist() == [2, 3]
    assert plan.page_size == 8
    assert plan.positions.tolist()[2] == [8, 9, 10, 11]


def test_a_plan_groups_blocks_by_the_pages_they_see():
    plan = make_plan([Segment(0, 3, 6, (4, 9)), Segment(3, 1, 0, (2,))], torch.zeros(3, 4), 8, "cpu")
    one_page, two_pages = plan.layout.groups
    # Positions 6 and 7 of the first and position 0 of the second see one page; position 8 of the first sees two.
    assert (one_page.blocks, one_page.rows.tolist(), one_page.pages.tolist()) == (2, [0, 0, 0, 1, 3, 3, 3, 3], [4, 2])
    assert (two_pages.blocks, two_pages.rows.tolist(), two_pages.pages.tolist()) == (1, [2, 0, 0, 0], [4, 9])
    assert plan.layout.places.tolist() == [2, 3, 8, 4]
    assert one_page.mask.shape == (2, BLOCK, 8)
    assert one_page.mask.dtype == torch.float32
    assert (one_page.mask[0] == 0).sum(-1).tolist() == [5, 6, 7, 8]
    assert two_pages.mask[0, 0].tolist() == [0.0] * 9 + [float("-inf")] * 7


def test_a_plan_refuses_too_few_pages_gaps_between_segments_and_pages_that_cut_a_block():
    with pytest.raises(ValueError, match="1 pages of 8 can't hold 9 rows"):
        make_plan([Segment(0, 1, 8, (3,))], torch.zeros(3, 1), 8, "cpu")
    with pytest.raises(ValueError, match="a segment starts at row 2, must start at 1"):
        make_plan([Segment(0, 1, 0, (3,)), Segment(2, 1, 0, (4,))], torch.zeros(3, 2), 8, "cpu")
    with pytest.raises(ValueError, match="page_size must be a multiple of 4, is 6"):
        make_plan([Segment(0, 1, 0, (3,))], torch.zeros(3, 1), 6, "cpu")
