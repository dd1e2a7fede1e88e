"""Decoder layers: rope axes, norms and rotation bit for bit in bfloat16, ranks that share a layer."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels import Segment, make_plan, ops_for
from engine.model.config import OmniConfig
from engine.model.layers import DecoderLayer, Rope, Stack, inverse_frequencies, rope_axes
from engine.model.weights import Shard, load_weights
from tests.hf import load_hf

CPU = torch.device("cpu")
PAGE_SIZE = 16


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    return OmniConfig.load(tiny_checkpoint)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def axes_at_odds(count: int) -> Tensor:
    """Positions whose three axes differ, as in a picture, and are not whole, as in a video of an odd frame rate."""
    return torch.stack([torch.arange(count) * 8.666667, torch.arange(count) % 7 + 3.0, torch.arange(count) % 5 + 40.0])


def test_released_sections_turn_every_third_channel_by_height_and_width_and_the_last_four_by_time():
    axes = rope_axes((24, 20, 20), CPU).tolist()
    assert axes[:6] == [0, 1, 2, 0, 1, 2]
    assert axes[57:] == [0, 1, 2, 0, 0, 0, 0]
    assert [axes.count(axis) for axis in (0, 1, 2)] == [24, 20, 20]


def test_frequencies_fall_from_one_to_the_inverse_of_the_base():
    frequencies = inverse_frequencies(10000.0, 4, CPU)
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.01]))


@pytest.mark.hf
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, 64])
def test_rope_tables_and_rotation_equal_hugging_face_bit_for_bit_in_bfloat16(config, tiny_checkpoint, dtype, count):
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import apply_rotary_pos_emb

    at = axes_at_odds(count)
    theirs = load_hf(tiny_checkpoint).thinker.model.language_model.rotary_emb(torch.zeros(1, dtype=dtype), at[:, None])
    ops = ops_for("cpu")
    cos, sin = Rope(config.thinker, ops).tables(at, dtype)
    q = normal(count, 4, 32, dtype=dtype)
    turned, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], *theirs)
    ours = ops.rotate(q, cos, sin)
    tolerance = {"rtol": 0, "atol": 0} if dtype is torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(cos, theirs[0][0], **tolerance)
    torch.testing.assert_close(sin, theirs[1][0], **tolerance)
    torch.testing.assert_close(ours, turned[0].transpose(0, 1), **tolerance)


@pytest.mark.hf
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_hugging_face_bit_for_bit(dtype):
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextRMSNorm

    x, weight = normal(9, 48, dtype=dtype) * 3, normal(48, seed=1, dtype=dtype)
    theirs = Qwen3OmniMoeThinkerTextRMSNorm(48, eps=1e-6)
    theirs.weight = torch.nn.Parameter(weight)
    assert torch.equal(ops_for("cpu").rms_norm(x, weight, 1e-6), theirs(x))


@pytest.mark.hf
def test_a_layer_in_bfloat16_equals_hugging_face_but_for_rare_last_bits(config, tiny_checkpoint):
    weights = load_weights(tiny_checkpoint, config, torch.bfloat16)
    layer = DecoderLayer("thinker.layers.0", config.thinker, weights, ops_for("cpu"))
    # A copy: the loaded model is shared with other tests.
    reference = copy.deepcopy(load_hf(tiny_checkpoint).thinker.model.language_model.layers[0]).bfloat16()
    x, at = normal(12, 64, dtype=torch.bfloat16), axes_at_odds(12)
    rope = Rope(config.thinker, ops_for("cpu")).tables(at, torch.bfloat16)
    plan = make_plan([Segment(0, 12, 0, (0,))], at, PAGE_SIZE, "cpu")
    keys, values = torch.zeros(2, 1, PAGE_SIZE, 2, 32, dtype=torch.bfloat16)
    ours = layer.forward(x, rope, plan, keys, values)
    mask = torch.full((12, 12), float("-inf"), dtype=torch.bfloat16).triu(1)[None, None]
    theirs = reference(x[None], attention_mask=mask, position_embeddings=(rope[0][None], rope[1][None]))
    theirs = (theirs if isinstance(theirs, Tensor) else theirs[0])[0]
    assert (ours.float() - theirs.float()).abs().max() <= 2**-5 * theirs.float().abs().max()
    # On the machine at hand every bit is equal; another one's bfloat16 products may sum in another order.
    assert (ours == theirs).float().mean() > 0.99


def test_keys_are_cached_after_their_norm_and_rotation_and_values_as_they_are(config, tiny_checkpoint):
    weights, ops = load_weights(tiny_checkpoint, config), ops_for("cpu")
    layer = DecoderLayer("thinker.layers.1", config.thinker, weights, ops)
    x, at = normal(3, 64), torch.tensor([16.0, 17.0, 18.0]).expand(3, -1)
    rope = Rope(config.thinker, ops).tables(at, torch.float32)
    plan = make_plan([Segment(0, 3, 16, (4, 2))], at, PAGE_SIZE, "cpu")
    keys, values = torch.zeros(2, 5, PAGE_SIZE, 2, 32)
    layer.forward(x, rope, plan, keys, values)
    qkv = ops.linear(ops.rms_norm(x, weights["thinker.layers.1.input_norm"], 1e-6), weights["thinker.layers.1.qkv"])
    k, v = qkv[:, 128:192].view(3, 2, 32), qkv[:, 192:].view(3, 2, 32)
    normed = ops.rms_norm(k, weights["thinker.layers.1.k_norm"], 1e-6)
    assert torch.equal(keys[2, :3], ops.rotate(normed, *rope))
    assert torch.equal(values[2, :3], v)
    # Nothing else was touched.
    assert int((keys != 0).any(-1).any(-1).sum()) == 3


def test_a_tap_gives_the_rows_after_that_many_layers(config, tiny_checkpoint):
    weights, ops = load_weights(tiny_checkpoint, config), ops_for("cpu")
    stack = Stack("thinker", config.thinker, weights, ops)
    x, at = normal(5, 64), torch.arange(5).float().expand(3, -1)
    plan = make_plan([Segment(0, 5, 0, (0,))], at, PAGE_SIZE, "cpu")
    keys, values = torch.zeros(2, 6, 1, PAGE_SIZE, 2, 32)
    rope = Rope(config.thinker, ops).tables(at, torch.float32)
    expected = x
    for index in range(2):
        expected = stack.layers[index].forward(expected, rope, plan, keys[index].clone(), values[index].clone())
    assert torch.equal(stack.forward(x, plan, keys, values, tap=2)[1], expected)
    assert torch.equal(stack.forward(x, plan, keys, values, tap=0)[1], x)
    assert stack.forward(x, plan, keys, values, tap=None)[1] is None


@pytest.mark.parametrize("component", ["thinker", "talker"])
def test_two_ranks_that_share_a_layer_sum_to_the_whole_layer(config, tiny_checkpoint, component):
    stack = config.thinker if component == "thinker" else config.talker.stack
    x, at = normal(6, stack.hidden), torch.arange(6).float().expand(3, -1)
    plan = make_plan([Segment(0, 6, 0, (0,))], at, PAGE_SIZE, "cpu")
    rope = Rope(stack, ops_for("cpu")).tables(at, torch.float32)

    def halves(shard: Shard) -> tuple[Tensor, Tensor]:
        """What a rank adds in attention, and in the experts."""
        weights, ops = load_weights(tiny_checkpoint, config, shard=shard), ops_for("cpu")
        layer = DecoderLayer(f"{component}.layers.0", stack, weights, ops)
        keys, values = torch.zeros(2, 1, PAGE_SIZE, stack.kv_heads // shard.world, 32)
        attended = ops.linear(layer._attended(x, rope, plan, keys, values), weights[f"{component}.layers.0.o"])
        return attended, layer.experts.forward(x)

    whole = halves(Shard(0, 1))
    parts = [halves(Shard(rank, 2)) for rank in (0, 1)]
    for index in (0, 1):
        torch.testing.assert_close(parts[0][index] + parts[1][index], whole[index], rtol=1e-4, atol=1e-5)
