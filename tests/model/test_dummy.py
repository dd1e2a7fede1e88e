"""Weights drawn instead of read, and the folder of released shapes that they are drawn for."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine.model.config import OmniConfig
from engine.model.omni import load_model
from engine.model.released import SPECIAL_IDS, write_released
from engine.model.weights import Shard, Weights, dummy_digest, dummy_weights, load_weights
from tests.shared import shared


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    return OmniConfig.load(tiny_checkpoint)


@pytest.fixture(scope="module")
def drawn(config: OmniConfig) -> Weights:
    return dummy_weights(config)


def test_every_tensor_is_drawn_in_the_shape_that_a_checkpoint_gives(
    tiny_checkpoint: Path, config: OmniConfig, drawn: Weights
) -> None:
    read = load_weights(tiny_checkpoint, config)
    assert set(drawn) == set(read)
    for name in read:
        assert drawn[name].shape == read[name].shape, name


def test_a_name_decides_the_values_and_names_differ(config: OmniConfig, drawn: Weights) -> None:
    again = dummy_weights(config)
    for name in drawn:
        assert torch.equal(drawn[name], again[name]), name
    first, second = drawn["thinker.layers.0.qkv"], drawn["thinker.layers.1.qkv"]
    assert not torch.equal(first, second)
    assert first.std().item() == pytest.approx(0.02, rel=0.05) and abs(first.mean().item()) < 1e-3


def test_norms_are_ones(drawn: Weights) -> None:
    norms = [name for name in drawn if "norm" in name and drawn[name].dim() == 1]
    assert len(norms) > 20 and all(bool((drawn[name] == 1).all()) for name in norms)


def test_two_ranks_hold_the_halves_of_what_one_draws(config: OmniConfig, drawn: Weights) -> None:
    ranks = [dummy_weights(config, shard=Shard(rank, 2)) for rank in (0, 1)]
    inner = config.thinker.moe_inter
    whole = drawn["thinker.layers.0.gate_up"]
    gate, up = whole[:, :inner], whole[:, inner:]
    for rank, half in enumerate(ranks):
        part = slice(rank * inner // 2, (rank + 1) * inner // 2)
        assert torch.equal(half["thinker.layers.0.gate_up"], torch.cat([gate[:, part], up[:, part]], dim=1))
        assert torch.equal(half["thinker.layers.0.down"], drawn["thinker.layers.0.down"][:, :, part])
        assert torch.equal(half["thinker.embed"], drawn["thinker.embed"])


@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(1, 2)])
def test_progress_is_told_after_each_tensor_and_ends_at_the_bytes_of_all(config: OmniConfig, shard: Shard) -> None:
    told: list[tuple[int, int]] = []
    drawn = dummy_weights(config, torch.bfloat16, shard=shard, progress=lambda *at: told.append(at))
    sizes = [2 * drawn[name].numel() for name in drawn]
    assert told == [(sum(sizes[: place + 1]), sum(sizes)) for place in range(len(sizes))]


def test_a_model_loads_without_tensors_and_its_digest_is_its_config_s(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_checkpoint / "config.json").read_bytes())
    model = load_model(tmp_path, dummy=True)
    assert model.weights_digest == dummy_digest(tmp_path) != load_model(tiny_checkpoint).weights_digest
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + "\n")
    assert dummy_digest(tmp_path) != model.weights_digest


def test_the_released_folder_says_what_the_released_config_says(tmp_path: Path) -> None:
    write_released(tmp_path)
    released = OmniConfig.load(shared("data", "qwen3omni", "config.json").parent)
    assert OmniConfig.load(tmp_path) == released


def test_its_tokenizer_spells_turns_with_the_released_ids(tmp_path: Path) -> None:
    write_released(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n").ids
    assert ids == [151644, 872, 198, 39, 72, 220, 127, 102, 151645, 198, 151644, 77091, 198]
    assert tokenizer.decode(ids) == "user\nHi é\nassistant\n"
    assert [tokenizer.token_to_id(content) for content in SPECIAL_IDS] == list(SPECIAL_IDS.values())
