from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.errors import RequestError
from engine.model.config import OmniConfig
from engine.model.omni import OmniModel, load_model
from engine.model.weights import expected_tensors
from engine.request import Sampling, Speech
from engine.tiny.optim import Settings
from engine.tiny.shapes import config as released
from engine.tiny.stack import Weighting
from engine.tiny.talker import (
    IGNORED,
    NONE,
    SCORED,
    Layout,
    Lots,
    Scale,
    Talker,
    Utterance,
    collate,
    corrupted,
    foreseen,
    train,
)
from tests.hf import chat, clip
from tests.naive import TALKER, Past, speak
from tests.tiny.exported import Ticks, scatter, write

CPU = torch.device("cpu")
GROUPS = 16


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    return OmniConfig.load(tiny_checkpoint)


@pytest.fixture(scope="module")
def talker(config: OmniConfig, tiny_checkpoint: Path) -> Talker:
    model = Talker(config, load_model(tiny_checkpoint).thinker.embedding)
    scatter(model)
    # As it is built: one row for every medium.
    nn.init.zeros_(model.hidden_projection.linear_fc2.weight)
    return model.eval()


@pytest.fixture(scope="module")
def served(talker: Talker, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> OmniModel:
    folder = tmp_path_factory.mktemp("exported") / "model"
    write(folder, tiny_checkpoint, talker.tensors())
    return load_model(folder)


def utterance(prompt: list[int], text: list[int], codes: NDArray[np.int64]) -> Utterance:
    """The ids of the text are its sounds, one a frame, again and again."""
    return Utterance(
        prompt, text, codes, [text[place % len(text)] % 28 for place in range(codes.shape[1] if text else 0)]
    )


def frames(count: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 64, (GROUPS, count))


def prompt(config: OmniConfig, *content: int) -> list[int]:
    return chat(config.ids, ("system", [7, 8]), ("user", content))


def test_the_export_is_every_tensor_of_talker_and_predictor_in_its_released_shape():
    config = OmniConfig.parse(released())
    wanted = {name: shape for name, shape in expected_tensors(config).items() if name.startswith("talker.")}
    model = Talker(config, torch.zeros(config.thinker.vocab, config.thinker.hidden))
    assert {name: tuple(value.shape) for name, value in model.tensors().items()} == wanted


def test_rows_are_laid_out_as_the_specification_lists_them(config):
    ids = config.ids
    batch = collate([utterance(prompt(config, 1, 2), [77, 78], frames(4))], config, "Chelsie")
    user = [ids.im_start, ids.user, 10, 1, 2, ids.im_end, 10]
    header = [ids.im_start, ids.assistant, 10, *[ids.tts_pad] * 4, ids.tts_bos]
    assert batch.text[0].tolist() == [*user, *header, 77, 78, ids.tts_eos, ids.tts_pad, ids.tts_pad]
    special = [171, 172, 173, 317, 164, 165]
    assert batch.codes[0, :, 0].tolist() == [*[NONE] * 10, *special, *frames(4)[0]]
    assert (batch.codes[0, :16, 1:] == NONE).all()
    assert batch.codes[0, 16:].tolist() == frames(4).T.tolist() == batch.frames.tolist()
    assert batch.first[0].tolist() == [*[IGNORED] * 15, *frames(4)[0], 166]
    assert batch.spoken.tolist() == [15, 16, 17, 18]
    assert not batch.media.any()


def test_a_text_longer_than_its_frames_is_cut_where_speech_ends(config):
    batch = collate([utterance(prompt(config, 1), [77, 78, 79, 80], frames(2))], config, "ethan")
    assert batch.text[0, -3:].tolist() == [77, 78, 79]


def test_utterances_padded_together_count_only_their_own_rows(config):
    batch = collate(
        [utterance(prompt(config, 1), [7], frames(2)), utterance(prompt(config, 1, 2, 3), [7], frames(5, 1))],
        config,
        "ethan",
    )
    assert batch.lengths.tolist() == [6 + 9 + 2, 8 + 9 + 5]
    assert batch.valid.sum(1).tolist() == batch.lengths.tolist()
    assert (batch.first[0, 17:] == IGNORED).all()
    assert batch.spoken.tolist() == [14, 15, *range(22 + 16, 22 + 21)]
    assert batch.first.flatten()[batch.spoken].tolist() == batch.frames[:, 0].tolist()
    none = IGNORED
    assert batch.sounds.tolist() == [[7, 7, none], [7, none, none], *[[7, 7, 7]] * 3, [7, 7, none], [7, none, none]]


def test_an_utterance_without_text_or_frames_is_an_error(config):
    for text, codes in (([], frames(2)), ([7], frames(0)), ([7], frames(2)[:15])):
        with pytest.raises(ValueError, match="needs text and frames of 16 codes and a sound each"):
            collate([utterance(prompt(config, 1), text, codes)], config, "ethan")
    with pytest.raises(RequestError, match="no voice 'bob'"):
        collate([utterance(prompt(config, 1), [7], frames(2))], config, "bob")


class Greedy:
    """Chooses the likeliest code and keeps the scores it saw."""

    def __init__(self) -> None:
        self.first: list[Tensor] = []
        self.rest: list[Tensor] = []

    def __call__(self, component: str, logits: Tensor, step: int, group: int, past: Past) -> Tensor:
        (self.first if component == TALKER else self.rest).append(logits[0].clone())
        return logits.argmax(-1)


@pytest.mark.parametrize("kind", ["text", "audio"])
@torch.inference_mode()
def test_scores_of_given_frames_are_those_of_the_engine_that_made_them(config, talker, served, kind):
    sound = kind == "audio"
    asked = prompt(config, *clip(config.ids, 5)) if sound else prompt(config, 301, 302)
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) if sound else torch.zeros(0, 64)
    text, greedy = [310, 311, 312], Greedy()
    speech = Speech(voice="ethan", max_frames=9, ignore_eos=True, sampling=Sampling())
    made, _ = speak(served, asked, states, [*text, config.ids.im_end], speech, greedy)
    assert len({tuple(frame) for frame in made}) > 4
    # A longer utterance beside it, so that there is padding.
    other = utterance(prompt(config, *range(300, 330)), text, frames(12))
    batch = collate([utterance(asked, text, np.array(made).T), other], config, "ethan")
    assert bool(batch.media.any()) is sound
    first, rest = talker(batch)
    at = batch.spoken[: len(made)]
    allowed = ~talker.barred
    allowed[config.talker.codec.eos] = False  # the engine was told to go on
    got, want = first.flatten(0, 1)[at][:, allowed], torch.stack(greedy.first)[:, allowed]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)
    assert torch.equal(first.flatten(0, 1)[at].isinf()[0], talker.barred)
    wanted = torch.stack(greedy.rest).view(len(made), GROUPS - 1, -1)
    # Exported without what all codes share.
    torch.testing.assert_close(rest[: len(made)].log_softmax(-1), wanted.log_softmax(-1), rtol=1e-4, atol=2e-4)


def test_every_parameter_is_learned_but_the_projection_of_states(config, talker):
    batch = collate(
        [utterance(prompt(config, *clip(config.ids, 5), 301), [310, 311], frames(6, seed)) for seed in range(3)],
        config,
        "ethan",
    )
    talker.zero_grad(set_to_none=True)
    talker.loss(batch, Weighting(letters=1.0))["loss"].backward()
    without = {name for name, value in talker.named_parameters() if value.grad is None or not value.grad.any()}
    talker.zero_grad(set_to_none=True)
    assert without == {
        f"hidden_projection.{name}" for name in ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight")
    }


def test_corruption_changes_frames_that_are_given_and_none_that_are_asked(config):
    batch = collate([utterance(prompt(config, 1), [7], frames(200, seed)) for seed in range(100)], config, "ethan")
    got = corrupted(batch, 0.8, 64, torch.Generator().manual_seed(0))
    assert torch.equal(got.frames, batch.frames) and torch.equal(got.first, batch.first)
    assert torch.equal(got.codes[:, :15], batch.codes[:, :15])
    off = (got.codes - batch.codes)[:, 16:].abs().float()
    assert got.codes[:, 16:].min() >= 0 and got.codes[:, 16:].max() < 64
    # A misheard frame is far from the true one, any other by a code or so at most. A few are blurred by next to nothing.
    share = (off.mean(2) > 2).float().mean(1)
    assert share.min() < 0.1 and 0.6 < share.max() < 0.85 and 0.25 < share.mean() < 0.45
    assert 0.1 < (off.amax(2) == 0).float().mean() < 0.4


@torch.no_grad()
def test_frames_are_told_again_as_they_are_foreseen(config, talker):
    batch = collate([utterance(prompt(config, 1), [7], frames(30, seed)) for seed in range(40)], config, "ethan")
    got = talker.retold(batch)
    assert torch.equal(got.frames, batch.frames) and torch.equal(got.codes[:, :15], batch.codes[:, :15])
    changed = (got.codes != batch.codes).any(2)[:, 15:]
    assert 0.35 < changed.float().mean() < 0.65
    assert changed.float().mean(1).min() < 0.2 and changed.float().mean(1).max() > 0.8
    first = talker(batch)[0][:, 14:-1, :64].argmax(-1)
    assert torch.equal(got.codes[:, 15:, 0][changed], first[changed])


def test_a_group_is_learned_without_the_groups_before_it(config, talker):
    batch = collate([utterance(prompt(config, 1), [7], frames(20, seed)) for seed in range(4)], config, "ethan")

    def lost() -> set[float]:
        with torch.no_grad():
            return {talker.loss(batch, Weighting())["rest"].item() for _ in range(3)}

    assert len(lost()) == 1
    talker.train()
    try:
        assert len(lost()) == 3
    finally:
        talker.eval()


def test_a_score_by_powers_is_a_normal_distribution_whose_likeliest_code_is_the_mean():
    head = Scale(64, SCORED, 3, special=2)
    with torch.no_grad():
        # Rows of values, of their squares and of ones: -(value - 1)^2 / 2 for the row that is given.
        head.powers.copy_(torch.eye(3))
        head.special.copy_(torch.tensor([[200.0, 0.0, 0.0]]).expand(2, 3))
    scores = head() @ torch.tensor([-0.5, 1.0, -0.5])
    assert scores.shape == (66,) and (scores[64:] < scores[:64].min()).all()
    values = torch.linspace(-3, 3, 64)
    torch.testing.assert_close(scores[:64], -((values - 1) ** 2) / 2)
    assert scores.argmax() == (values - 1).abs().argmin()


def test_tables_of_codes_are_exported_whole(config, talker):
    exported = talker.tensors()
    own = exported["talker.model.codec_embedding.weight"]
    assert torch.equal(own, talker.model.codec_embedding().detach())
    # Third differences of cubes are all alike.
    thirds = own[:64].double().diff(n=3, dim=0)
    torch.testing.assert_close(thirds, thirds[:1].expand_as(thirds), rtol=0, atol=1e-5)
    first = exported["talker.codec_head.weight"]
    assert torch.equal(first, talker.codec_head().detach())


def test_scores_of_the_predictor_are_exported_without_what_all_codes_share(talker):
    head = talker.code_predictor.lm_head
    with torch.no_grad():
        head.powers[:, 0] += 100.0
    try:
        trained, exported = head()[14].detach(), talker.tensors()["talker.code_predictor.lm_head.14.weight"]
        rows = torch.randn(32, trained.shape[1], generator=torch.Generator().manual_seed(0))
        scores, wanted = rows.double() @ exported.double().t(), rows.double() @ trained.double().t()
        torch.testing.assert_close(scores.softmax(-1), wanted.softmax(-1), rtol=0, atol=1e-4)
        assert wanted.abs().min(dim=-1).values.median() > 100 * scores.abs().min(dim=-1).values.median()
    finally:
        with torch.no_grad():
            head.powers[:, 0] -= 100.0


def test_what_is_foreseen_is_greedy_group_by_group_and_told_of_what_was_foreseen_before(config, talker):
    one = utterance(prompt(config, 301, 302), [310, 311], frames(5))
    # Beside a longer one, so that there is padding.
    made, _ = foreseen(talker, [one, utterance(prompt(config, 5), [310], frames(9, 1))], "ethan")
    assert made.shape == one.codes.shape
    told = one
    for _ in range(2):
        batch = collate([told], config, "ethan")
        with torch.inference_mode():
            y = talker.model(talker.embed(batch), batch.valid)[0].flatten(0, 1)[batch.spoken]
            scores = y @ talker.codec_head()[:64].t()
            want = [scores.argmax(-1)]
            while len(want) < GROUPS:
                known = torch.stack([*want, *[want[0] * 0] * (GROUPS - len(want))], dim=1)
                first = talker.model.codec_embedding()[want[0]]
                want.append(talker.code_predictor(y, first, known)[:, len(want) - 1].argmax(-1))
        told = utterance(one.prompt, one.text, torch.stack(want).numpy())
    assert np.array_equal(made, told.codes)


def test_utterances_are_drawn_by_the_step_alone_and_neighbours_in_length_together():
    counts = np.arange(2, 200)
    draw = Lots(counts, 300, seed=4).draw
    again = Lots(counts, 300, seed=4).draw
    for step in range(20):
        drawn = draw(step, 1.0)
        assert drawn == again(step, 1.0)
        lengths = [counts[place] for place in drawn]
        assert max(lengths) - min(lengths) < 8 * len(lengths)
    assert len({len(draw(step, 1.0)) for step in range(20)}) > 3
    assert max(counts[place] for step in range(20) for place in draw(step, 0.2)) < 2 + 198 // 5
    with pytest.raises(ValueError, match="nothing to draw from"):
        Lots(counts[:0], 300, seed=0)


def test_a_batch_of_a_layout_is_what_its_utterances_are_alone(config):
    every = [utterance(prompt(config, *range(seed)), [7] * (1 + seed), frames(9 - seed, seed)) for seed in range(8)]
    batch = Layout(every, config, "ethan").batch([5, 2])
    for row, place in enumerate((5, 2)):
        alone, length = collate([every[place]], config, "ethan"), int(batch.lengths[row])
        for name in ("text", "media", "codes", "first"):
            assert torch.equal(getattr(batch, name)[row, :length], getattr(alone, name)[0])
    assert torch.equal(batch.sounds[4:], collate([every[2]], config, "ethan").sounds)
    assert torch.equal(batch.frames, torch.from_numpy(np.concatenate([every[5].codes, every[2].codes], axis=1).T))


def spelt(word: int) -> NDArray[np.int64]:
    """Three frames of a word, told apart by every group."""
    turn = np.arange(GROUPS)[:, None] * 1.3 + word * 2.1 + np.arange(3) * 0.7
    return np.rint(31.5 + 28 * np.sin(turn)).astype(np.int64)


def said(config: OmniConfig, seed: int) -> Utterance:
    words = np.random.default_rng(seed).integers(0, 12, 2 + seed % 3)
    codes = np.concatenate([spelt(int(word)) for word in words], axis=1)
    return utterance(prompt(config, 301), [300 + int(word) for word in words], codes)


def test_a_talker_learns_to_speak_its_texts_and_to_end_and_does_so_when_served(config, tiny_checkpoint, tmp_path):
    every = [said(config, seed) for seed in range(16)]
    model, over = train(
        config,
        load_model(tiny_checkpoint).thinker.embedding,
        every,
        tmp_path / "training",
        voice="ethan",
        frames=60,
        settings=Settings(minutes=4, peak=8e-3, warmup=10, average=0.95, log_every=10, save_s=600),
        minutes=4,
        device=CPU,
        corrupt=0.0,
        own=0.0,
        dropout=0.0,
        clock=Ticks(),
    )
    assert over
    curve = [json.loads(line) for line in (tmp_path / "training" / "curve.jsonl").read_text().splitlines()]
    assert curve[0]["first"] > 2 and curve[0]["sounds"] > 2
    assert curve[-1]["first"] < 2.6 and curve[-1]["rest"] < 2.6 and curve[-1]["sounds"] < 1.5
    write(tmp_path / "model", tiny_checkpoint, model.tensors())
    served = load_model(tmp_path / "model")
    speech = Speech(voice="ethan", max_frames=20, sampling=Sampling())
    right = 0
    for one in every:
        made, reason = speak(served, one.prompt, torch.zeros(0, 64), [*one.text, config.ids.im_end], speech, Greedy())
        whole = reason == "stop" and len(made) == one.codes.shape[1]
        right += whole and float(np.abs(np.array(made) - one.codes.T).mean()) < 4
    assert right >= 12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
def test_a_talker_trains_on_a_gpu(config, tmp_path):
    train(
        config,
        torch.randn(config.thinker.vocab, config.thinker.hidden),
        [said(config, seed) for seed in range(16)],
        tmp_path,
        voice="ethan",
        frames=60,
        settings=Settings(minutes=1, peak=8e-3, warmup=10, log_every=10, save_s=600),
        minutes=1,
        device=torch.device("cuda"),
        clock=Ticks(),
    )
    curve = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert len(curve) == 6 and curve[-1]["loss"] < curve[0]["loss"]
