from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.config import OmniConfig
from engine.model.omni import OmniModel, load_model
from engine.model.positions import audio_tokens
from engine.model.weights import expected_tensors
from engine.tiny.audio import AudioEncoder, clip_rows, spec_augment
from engine.tiny.batches import Conversation, Mixture, collate, growing
from engine.tiny.optim import Settings, Training
from engine.tiny.shapes import config as released
from engine.tiny.stack import Weighting
from engine.tiny.thinker import Thinker, misled, train
from tests.hf import chat, clip
from tests.naive import Alone, generate
from tests.tiny.exported import Ticks, scatter, write

CPU = torch.device("cpu")
# Shorter than a chunk, whole chunks, a window of the small checkpoint (200 frames), and parts of them.
LENGTHS = (1, 45, 99, 100, 130, 200, 330, 555)


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    return OmniConfig.load(tiny_checkpoint)


def table(config: OmniConfig) -> Tensor:
    """Embeddings drawn at random."""
    text = config.thinker
    return 0.3 * torch.randn(text.vocab, text.hidden, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def thinker(config: OmniConfig) -> Thinker:
    model = Thinker(config, table(config))
    scatter(model)
    return model.eval()


@pytest.fixture(scope="module")
def served(thinker: Thinker, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> OmniModel:
    folder = tmp_path_factory.mktemp("exported") / "model"
    write(folder, tiny_checkpoint, thinker.tensors())
    return load_model(folder)


def mel(frames: int) -> Tensor:
    return torch.randn(128, frames, generator=torch.Generator().manual_seed(frames))


def heard(config: OmniConfig, frames: int, answer: list[int]) -> Conversation:
    """A clip of noise in which each of the answer's ids is said as a letter."""
    prompt = chat(config.ids, ("user", clip(config.ids, audio_tokens(frames))))
    ids = [*prompt, *answer, config.ids.im_end]
    return Conversation(ids, len(prompt), mel(frames), [token % 28 for token in answer])


def read(config: OmniConfig, question: list[int], answer: list[int]) -> Conversation:
    prompt = chat(config.ids, ("user", question))
    ids = [*prompt, *answer, config.ids.im_end]
    return Conversation(ids, len(prompt))


def test_the_export_is_every_tensor_of_text_model_and_encoder_in_its_released_shape():
    config = OmniConfig.parse(released())
    wanted = expected_tensors(config)
    wanted = {name: shape for name, shape in wanted.items() if name.startswith("thinker.") and ".visual." not in name}
    assert {name: tuple(value.shape) for name, value in Thinker(config, table(config)).tensors().items()} == wanted


@torch.inference_mode()
def test_clips_padded_together_encode_as_the_engine_encodes_each_alone(thinker, served):
    padded = torch.zeros(len(LENGTHS), 128, max(LENGTHS))
    for index, frames in enumerate(LENGTHS):
        padded[index, :, :frames] = mel(frames)
    rows = thinker.audio_tower(padded, torch.tensor(LENGTHS))
    for index, frames in enumerate(LENGTHS):
        (want,) = served.audio_encoder.forward([mel(frames)])
        assert want.abs().mean() > 0.1
        torch.testing.assert_close(rows[index, : len(want)], want, rtol=1e-4, atol=1e-4)


def test_a_clips_rows_are_counted_as_the_prompt_counts_them():
    frames = torch.arange(1, 1000)
    assert clip_rows(frames, 100).tolist() == [audio_tokens(count) for count in range(1, 1000)]


@torch.inference_mode()
def test_hidden_rows_and_logits_of_a_mixed_batch_are_the_engines_of_each_conversation(config, thinker, served):
    conversations = [
        read(config, [301, 302, 303], [310, 311]),
        heard(config, 330, [320]),
        heard(config, 45, [330, 331]),
    ]
    batch = collate(conversations, config.ids.audio)
    x, _ = thinker.embed(batch)
    hidden, _ = thinker.model(x, batch.valid)
    wanted = []
    for index, one in enumerate(conversations):
        count = len(one.ids)
        ids = torch.tensor(one.ids)
        rows = served.thinker.embed(ids)
        if one.mel is not None:
            rows[ids == config.ids.audio] = served.audio_encoder.forward([one.mel])[0]
        alone = Alone(served.thinker, torch.arange(count).float().expand(3, -1).numpy(), count, rows.dtype)
        want, _ = served.thinker.forward(rows, alone.plan(count), alone.keys, alone.values, states=False)
        torch.testing.assert_close(hidden[index, :count], want, rtol=1e-4, atol=1e-4)
        wanted.append(served.thinker.logits(want[one.prompt - 1 : -1]))
    assert len(batch.asked) == 3 + 2 + 3
    torch.testing.assert_close(thinker(batch), torch.cat(wanted), rtol=1e-4, atol=2e-4)


def test_greedy_answers_of_a_batch_are_the_engines_of_each_prompt(config, thinker, served):
    prompts = [chat(config.ids, ("user", [300 + seed, 301])) for seed in range(3)]
    prompts.append(chat(config.ids, ("user", clip(config.ids, 43))))
    clips = [None, None, None, mel(330)]
    conversations = [Conversation(ids, len(ids), sound) for ids, sound in zip(prompts, clips, strict=True)]
    got = thinker.generate(collate(conversations, config.ids.audio), 12)
    want = [
        generate(served, ids, [] if sound is None else [sound], 12).token_ids
        for ids, sound in zip(prompts, clips, strict=True)
    ]
    assert got == want
    assert len({token for answer in got for token in answer}) > 10


def test_an_answer_ends_with_the_end_of_the_turn(config):
    model = Thinker(config, table(config))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    prompt = chat(config.ids, ("user", [300]))
    batch = collate([Conversation(prompt, len(prompt))], config.ids.audio)
    # All scores are equal, so the lowest id is chosen; it is not the end at first.
    assert model.generate(batch, 3) == [[0, 0, 0]]
    model.config = replace(config, ids=replace(config.ids, im_end=0))
    assert model.generate(batch, 3) == [[0]]


def test_the_loss_is_the_mean_over_what_is_learned_and_counts_its_parts(config, thinker):
    conversations = [read(config, [301], [310, 311]), heard(config, 130, [320])]
    batch = collate(conversations, config.ids.audio)
    with torch.inference_mode():
        plain = thinker.loss(batch, Weighting(letters=0.0, balance=0.0))
        full = thinker.loss(batch, Weighting(letters=0.5, balance=0.25))
        scores = thinker(batch).log_softmax(-1)
    want = -scores[torch.arange(len(batch.labels)), batch.labels].mean()
    torch.testing.assert_close(plain["loss"], want)
    torch.testing.assert_close(full["loss"], want + 0.5 * full["letters"] + 0.25 * full["balance"])


def test_every_parameter_but_the_table_is_learned_from_a_mixed_batch(config, thinker):
    batch = collate([read(config, [301], [310, 311]), heard(config, 330, [320])], config.ids.audio)
    thinker.zero_grad(set_to_none=True)
    thinker.loss(batch, Weighting(letters=1.0))["loss"].backward()
    without = [name for name, value in thinker.named_parameters() if value.grad is None or not value.grad.any()]
    thinker.zero_grad(set_to_none=True)
    # A bias on all keys alike moves every score of a row by the same, so nothing depends on it.
    assert [name for name in without if not name.endswith("k_proj.bias")] == ["model.embed_tokens.weight"]


def test_a_state_of_the_real_sizes_is_files_of_less_than_16_mb_and_comes_back(tmp_path):
    config = OmniConfig.parse(released())
    settings = Settings(minutes=1, peak=1e-3)
    training = Training(Thinker(config, table(config)), settings, tmp_path, CPU, Ticks())
    prompt = [config.ids.im_start, config.ids.user]
    batch = collate([Conversation([*prompt, 300, 301], 2)], config.ids.audio)
    training.run(lambda moment: training.module.loss(batch, Weighting()), 1 / 60)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.safetensors")]
    assert max(sizes) < 16_000_000 and sum(sizes) < 50_000_000
    again = Training(Thinker(config, table(config), seed=1), settings, tmp_path, CPU, Ticks())
    assert again.step == 1
    for (name, got), want in zip(again.module.named_parameters(), training.module.parameters(), strict=True):
        assert torch.equal(got, want), name


def test_augmentation_blanks_bands_and_stretches_and_nothing_else():
    mels = torch.ones(50, 128, 400)
    frames = torch.full((50,), 400)
    got = spec_augment(mels, frames, torch.Generator().manual_seed(0))
    assert set(got.unique().tolist()) == {0.0, 1.0}
    bands, stretches = (got.amax(2) == 0).sum(1), (got.amax(1) == 0).sum(1)
    assert bands.max() <= 48 and stretches.max() <= 80
    assert 12 < bands.float().mean() < 30 and 20 < stretches.float().mean() < 50
    # What is left is the product of the rows and the columns that are left.
    kept = (128 - bands) * (400 - stretches)
    assert got.sum((1, 2)).tolist() == kept.tolist()
    assert torch.equal(got, spec_augment(mels, frames, torch.Generator().manual_seed(0)))


def test_training_starts_with_what_is_short():
    assert [round(growing(at, short=0.2), 3) for at in (0, 0.1, 0.2, 1)] == [0.2, 0.6, 1.0, 1.0]


def test_answers_are_read_with_others_words_in_half_of_the_conversations_and_asked_for_as_they_are(config):
    conversations = [read(config, [301], [*range(300, 350)] * 2) for _ in range(200)]
    batch = collate(conversations, config.ids.audio)
    got = misled(batch, 0.5, torch.Generator().manual_seed(0))
    assert torch.equal(got.labels, batch.labels) and torch.equal(got.asked, batch.asked)
    changed = got.ids != batch.ids
    prompt = conversations[0].prompt
    assert not changed[:, :prompt].any() and not changed[:, -1].any()
    assert set(got.ids[changed].tolist()) <= set(batch.labels.tolist())
    share = changed[:, prompt:-1].float().mean(1)
    assert 70 <= int((share == 0).sum()) <= 130
    assert share.max() < 0.65 and 0.2 < share[share > 0].mean() < 0.3
    assert torch.equal(misled(batch, 0.0, torch.Generator()).ids, batch.ids)


def tone(word: int, frames: int = 12) -> Tensor:
    """A made-up word: a band of the spectrum of its own."""
    sound = torch.zeros(128, frames)
    sound[6 * word : 6 * word + 6] = 1.0
    return sound


def spoken_words(config: OmniConfig, words: list[int]) -> Conversation:
    sound = torch.cat([tone(word) for word in words], dim=1)
    answer = [300 + word for word in words]
    prompt = chat(config.ids, ("user", clip(config.ids, audio_tokens(sound.shape[1]))))
    ids = [*prompt, *answer, config.ids.im_end]
    return Conversation(ids, len(prompt), sound, words)


def toy(config: OmniConfig) -> OmniConfig:
    """The small checkpoint's sizes, smaller."""
    text = replace(config.thinker, layers=2, experts=4, top_k=2)
    return replace(config, thinker=text, audio=replace(config.audio, layers=1, channels=8))


def test_a_toy_model_learns_to_write_down_what_it_hears_and_to_repeat_what_it_reads(config, tmp_path):
    generator = torch.Generator().manual_seed(1)

    def words() -> list[int]:
        return torch.randint(0, 20, (int(torch.randint(2, 5, (), generator=generator)),), generator=generator).tolist()

    clips = [spoken_words(config, words()) for _ in range(10)]
    texts = [read(config, answer, answer) for answer in ([300 + word for word in words()] for _ in range(10))]
    mixture = Mixture([(1, texts), (2, clips)], budget=400, seed=0)
    settings = Settings(minutes=2, peak=5e-3, warmup=10, average=0.95, log_every=10, save_s=600)
    model, over = train(
        toy(config),
        mixture,
        tmp_path,
        settings=settings,
        minutes=2,
        device=CPU,
        text_embedding=table(config),
        mislead=0.0,
        dropout=0.0,
        augment=False,
        clock=Ticks(),
    )
    assert over
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert lines[0]["text"] > 3 and lines[-1]["text"] < 0.1
    told = [*clips, *texts]
    prompts = [replace(one, ids=one.ids[: one.prompt]) for one in told]
    answers = model.generate(collate(prompts, config.ids.audio), 8)
    wanted = [one.ids[one.prompt :] for one in told]
    assert sum(got == want for got, want in zip(answers, wanted, strict=True)) >= 19


def test_an_encoder_of_one_clip_gives_whole_chunks_of_rows(config):
    assert AudioEncoder(config.audio)(torch.zeros(1, 128, 101), torch.tensor([101])).shape == (1, 26, 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
def test_training_goes_on_where_it_was_on_a_gpu(config, tmp_path):
    conversations = [spoken_words(config, [word, word + 1]) for word in range(8)]
    mixture = Mixture([(1, conversations), (1, [read(config, [301], [302])])], budget=400, seed=0)
    settings = Settings(minutes=1, peak=5e-3, warmup=10, log_every=10, save_s=600)
    pieces = [
        train(
            config,
            mixture,
            tmp_path,
            settings=settings,
            minutes=0.5,
            device=torch.device("cuda"),
            text_embedding=table(config),
            clock=Ticks(),
        )
        for _ in range(2)
    ]
    assert [over for _, over in pieces] == [False, True]
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30, 40, 50, 60]
    assert lines[-1]["text"] < lines[0]["text"]
    batch = collate([replace(one, ids=one.ids[: one.prompt]) for one in conversations], config.ids.audio)
    assert len(pieces[1][0].generate(batch.to(torch.device("cuda")), 4)) == 8
