from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engine.tiny.batches import Alike, Conversation, Mixture, collate, cost
from engine.tiny.optim import Moment, Settings, Training, rate, shards
from engine.tiny.stack import STACKED, imbalance, initialise, tensors
from tests.tiny.exported import Ticks

CPU = torch.device("cpu")


def test_experts_that_share_the_rows_evenly_are_balanced_and_one_that_takes_all_is_not():
    even = torch.full((1, 4, 4), 0.25)
    chosen = torch.eye(4)[None]
    valid = torch.ones(1, 4, dtype=torch.bool)
    assert imbalance(even, chosen, valid).item() == pytest.approx(1.0)
    one = torch.tensor([1.0, 0, 0, 0]).expand(1, 4, 4)
    assert imbalance(one, one, valid).item() == pytest.approx(4.0)


def test_padding_does_not_count_as_rows_of_an_expert():
    probabilities = torch.tensor([[[0.9, 0.1], [0.1, 0.9], [0.9, 0.1]]])
    chosen = torch.tensor([[[1.0, 0], [0, 1.0], [1.0, 0]]])
    short = imbalance(probabilities[:, :2], chosen[:, :2], torch.tensor([[True, True]]))
    assert torch.equal(imbalance(probabilities, chosen, torch.tensor([[True, True, False]])), short)


def test_a_parameter_of_many_tensors_is_exported_one_by_one():
    bank = torch.arange(12.0).view(3, 2, 2)
    found = tensors({"model.layers.0.mlp.experts.up_proj": bank, "lm_head.weight": torch.ones(1)}, "thinker.")
    assert sorted(found) == [
        "thinker.lm_head.weight",
        *(f"thinker.model.layers.0.mlp.experts.{index}.up_proj.weight" for index in range(3)),
    ]
    assert found["thinker.model.layers.0.mlp.experts.1.up_proj.weight"].tolist() == [[4, 5], [6, 7]]


def test_only_parameters_of_whole_names_hold_many_tensors():
    assert not any(ending.endswith((".weight", ".bias")) for ending in STACKED)


def test_initial_weights_depend_on_the_seed_alone():
    def drawn(seed: int) -> Tensor:
        layer = nn.Linear(4, 4)
        initialise(layer, 1, seed)
        assert layer.bias.tolist() == [0, 0, 0, 0]
        return layer.weight.detach()

    assert torch.equal(drawn(3), drawn(3))
    assert not torch.equal(drawn(3), drawn(4))


def test_the_rate_warms_up_then_falls_along_a_cosine_to_its_floor():
    settings = Settings(minutes=1, peak=1.0, floor=0.1, warmup=10)
    assert rate(settings, Moment(0, 0.0)) == pytest.approx(0.1)
    assert rate(settings, Moment(9, 0.0)) == pytest.approx(1.0)
    assert rate(settings, Moment(100, 0.5)) == pytest.approx(0.55)
    assert rate(settings, Moment(100, 1.0)) == rate(settings, Moment(100, 1.2)) == pytest.approx(0.1)


class Curve(nn.Module):
    """Learns the weight 3."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def loss(self, moment: Moment) -> dict[str, Tensor]:
        return {"loss": (self.weight - 3).square().mean(), "seen": torch.tensor(float(moment.step))}


SETTINGS = Settings(minutes=2, peak=0.3, warmup=5, average=0.9, weight_decay=0.0, log_every=10, save_s=25)


def trained(folder: Path, *pieces: float) -> tuple[Training, list[bool]]:
    over = []
    for minutes in pieces:
        module = Curve()
        training = Training(module, SETTINGS, folder, CPU, Ticks())
        over.append(training.run(module.loss, minutes))
    return training, over


def test_training_ends_with_its_time_and_logs_its_curve(tmp_path):
    training, over = trained(tmp_path, 5)
    assert over == [True]
    assert training.step == 120
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(10, 121, 10))
    assert [line["seen"] for line in lines] == list(range(9, 120, 10))
    assert lines[0]["loss"] > 0.5 and lines[-1]["loss"] < 0.01
    weight = dict(training.averaged().named_parameters())["weight"]
    torch.testing.assert_close(weight, torch.full((2, 2), 3.0), rtol=0, atol=0.1)


def test_training_in_pieces_is_training_in_one_but_for_the_rounding_of_what_is_kept(tmp_path):
    whole, _ = trained(tmp_path / "whole", 2)
    pieces, over = trained(tmp_path / "pieces", 0.5, 0.5, 1)
    assert over == [False, False, True]
    assert (pieces.step, pieces.seconds) == (whole.step, whole.seconds)
    for got, want in ((pieces.module, whole.module), (pieces.averaged(), whole.averaged())):
        torch.testing.assert_close(dict(got.named_parameters()), dict(want.named_parameters()), rtol=0.01, atol=0.01)


def test_one_state_is_left_and_it_holds_only_what_is_learned(tmp_path):
    trained(tmp_path, 1)
    assert [path.name for path in tmp_path.glob("state*")] == ["state-00000060"]


def test_a_training_that_diverges_says_so(tmp_path):
    training = Training(Curve(), SETTINGS, tmp_path, CPU, Ticks())
    module = training.module
    assert isinstance(module, Curve)
    with pytest.raises(FloatingPointError, match="diverged before step 10"):
        training.run(lambda moment: {"loss": module.weight.sum() * math.nan}, 1)


def test_shards_hold_no_more_than_they_may_and_everything_once():
    held = {name: torch.zeros(size, dtype=torch.uint8) for name, size in {"a": 4, "b": 5, "c": 9, "d": 1}.items()}
    assert [list(shard) for shard in shards(held, 10)] == [["a", "b"], ["c", "d"]]
    with pytest.raises(ValueError, match="c has 9 bytes, a shard holds 8"):
        list(shards(held, 8))


AUDIO = 9


def spoken(frames: int, rows: int) -> Conversation:
    return Conversation([1, *[AUDIO] * rows, 2, 3], rows + 1, torch.ones(4, frames), [2, 3])


def test_a_batch_says_where_the_clips_rows_go_and_which_rows_predict_what():
    text = Conversation([5, 6, 7], 2)
    batch = collate([text, spoken(17, 3), spoken(150, 20)], AUDIO)
    assert batch.ids.shape == (3, 23)
    assert batch.ids[1].tolist() == [1, 9, 9, 9, 2, 3, *[0] * 17]
    assert batch.lengths.tolist() == [3, 6, 23]
    assert batch.valid.sum(1).tolist() == [3, 6, 23]
    # Both clips lie 26 encoder rows apart: two chunks of 13.
    assert batch.rows.tolist() == [0, 1, 2, *range(26, 46)]
    assert batch.places.tolist() == [24, 25, 26, *range(47, 67)]
    assert batch.asked.tolist() == [1, 23 + 3, 23 + 4, 46 + 20, 46 + 21]
    assert batch.labels.tolist() == [7, 2, 3, 2, 3]
    assert batch.mels is not None and batch.mels.shape == (2, 4, 150)
    assert batch.mels.sum((1, 2)).tolist() == [68, 600]
    assert (batch.frames.tolist(), batch.heard.tolist()) == ([17, 150], [3, 20])
    assert (batch.transcripts.tolist(), batch.spoken.tolist()) == ([[2, 3], [2, 3]], [2, 2])


def test_a_batch_of_text_alone_has_no_clips():
    batch = collate([Conversation([5, 6], 1)], AUDIO)
    assert batch.mels is None
    assert batch.rows.tolist() == batch.places.tolist() == []


def test_placeholders_that_do_not_match_the_clip_are_an_error():
    with pytest.raises(ValueError, match="conversation 1 has 2 audio placeholders, its clip makes 3 rows"):
        collate([spoken(17, 3), spoken(17, 2)], AUDIO)


def test_a_mixture_draws_each_kind_by_its_share_and_the_same_for_the_same_step():
    text = [Conversation([1] * size, 1) for size in range(4, 40)]
    clips = [spoken(100 * size, 13 * size) for size in range(1, 9)]
    mixture = Mixture([(1, text), (3, clips)], budget=2000, seed=7)
    again = Mixture([(1, text), (3, clips)], budget=2000, seed=7)
    drawn = [mixture.draw(step, 1.0) for step in range(50)]
    assert [[id(one) for one in again.draw(step, 1.0)] for step in range(50)] == [[id(one) for one in d] for d in drawn]
    spent = [0.0, 0.0]
    for one in (one for conversations in drawn for one in conversations):
        spent[one.mel is not None] += cost(one) / 50
    assert 350 < spent[0] < 600
    assert 900 < spent[1] < 1800  # whole clips: what is left of a batch is too little for another
    short = {len(one.ids) for step in range(20) for one in mixture.draw(step, 0.25) if one.mel is None}
    assert max(short) < 4 + 36 // 4


def test_large_items_are_drawn_as_often_as_small_ones():
    alike = Alike(list(range(1, 101)), lambda size: size)
    generator = np.random.default_rng(0)
    drawn = [item for _ in range(3000) for item in alike.draw(100, 1.0, generator)]
    often = np.bincount(drawn, minlength=101)[1:].reshape(10, 10).sum(1) / len(drawn)
    assert often.min() > 0.05 and often.max() < 0.2


def test_nothing_to_draw_from_is_an_error():
    with pytest.raises(ValueError, match="nothing to draw from"):
        Mixture([(1.0, [])], budget=10, seed=0)
