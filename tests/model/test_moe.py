"""The expert layer against Hugging Face and against a loop over its experts."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import ops_for
from engine.model.config import OmniConfig
from engine.model.moe import ExpertLayer
from engine.model.weights import Weights, load_weights
from tests.hf import load_hf


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    return OmniConfig.load(tiny_checkpoint)


@pytest.fixture(scope="module")
def weights(tiny_checkpoint: Path, config: OmniConfig) -> Weights:
    return load_weights(tiny_checkpoint, config)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def rows(count: int, width: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(7))


@pytest.mark.hf
@pytest.mark.parametrize("count", [1, 2, 33])
def test_the_thinkers_experts_equal_hugging_face(config, weights, tiny_checkpoint, count):
    x = rows(count, 64)
    theirs = load_hf(tiny_checkpoint).thinker.model.language_model.layers[2].mlp(x[None])[0]
    ours = ExpertLayer("thinker.layers.2", config.thinker, weights, ops_for("cpu")).forward(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.hf
@pytest.mark.parametrize("count", [1, 2, 33])
def test_the_talkers_experts_with_the_shared_one_equal_hugging_face(config, weights, tiny_checkpoint, count):
    x = rows(count, 48)
    theirs = load_hf(tiny_checkpoint).talker.model.layers[1].mlp(x[None])[0]
    ours = ExpertLayer("talker.layers.1", config.talker.stack, weights, ops_for("cpu")).forward(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.hf
def test_routing_equals_hugging_face_bit_for_bit_in_bfloat16_given_the_same_logits(config, tiny_checkpoint):
    # A copy: the loaded model is shared with other tests.
    router = copy.deepcopy(load_hf(tiny_checkpoint).thinker.model.language_model.layers[0].mlp.gate)
    logits = rows(200, 16).bfloat16()
    # Equal logits at the boundary may be picked in any order there: keep rows in which all sixteen differ.
    logits = logits[[len(set(row.tolist())) == 16 for row in logits]]
    assert len(logits) > 100
    # With the unit matrix as its weight, the router's input is its logits.
    router.weight = torch.nn.Parameter(torch.eye(16).bfloat16(), requires_grad=False)
    router.hidden_dim = 16
    _, their_weights, their_ids = router(logits)
    ours, ids = ops_for("cpu").route(logits, 4, True)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ids, their_ids)
    assert torch.equal(ours, their_weights)


@pytest.mark.hf
def test_experts_in_bfloat16_equal_hugging_face_but_for_rare_last_bits(config, tiny_checkpoint):
    half = load_weights(tiny_checkpoint, config, torch.bfloat16)
    layer = ExpertLayer("thinker.layers.3", config.thinker, half, ops_for("cpu"))
    x = rows(40, 64).bfloat16()
    experts = copy.deepcopy(load_hf(tiny_checkpoint).thinker.model.language_model.layers[3].mlp.experts).bfloat16()
    routed, ids = layer.route(x)
    theirs = experts(x, ids, routed)
    ours = layer.forward(x)
    assert (ours.float() - theirs.float()).abs().max() <= 2**-6 * theirs.float().abs().max()
    # On the machine at hand every bit is equal; another one's bfloat16 products may sum in another order.
    assert (ours == theirs).float().mean() > 0.99


def test_a_row_gets_the_weighted_sum_of_its_own_experts(config, weights):
    layer = ExpertLayer("thinker.layers.0", config.thinker, weights, ops_for("cpu"))
    x = rows(5, 64)
    shares, ids = layer.route(x)
    torch.testing.assert_close(shares.sum(-1), torch.ones(5))
    gate_up, down = weights["thinker.layers.0.gate_up"], weights["thinker.layers.0.down"]
    expected = torch.zeros(5, 64)
    for row in range(5):
        for share, expert in zip(shares[row], ids[row].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            expected[row] += share * (down[expert] @ (F.silu(gate) * up))
    torch.testing.assert_close(layer.forward(x), expected, rtol=1e-5, atol=1e-5)


def test_the_router_spreads_rows_over_all_experts_of_the_small_model(config, weights):
    for index in range(6):
        _, ids = ExpertLayer(f"thinker.layers.{index}", config.thinker, weights, ops_for("cpu")).route(rows(200, 64))
        assert ids.unique().numel() == 16
        assert max(torch.bincount(ids.flatten()).tolist()) < 200
