from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.kernels import ops_for
from engine.model.code2wav import Code2Wav
from engine.model.config import Code2WavConfig, OmniConfig
from engine.model.weights import load_weights
from engine.tiny import shapes, shards
from engine.tiny.codec import Axes, Codec, Decoder, LogMel, ResidualQuantizer, magnitudes, mel_filters
from engine.tiny.codec_train import (
    Critics,
    Pool,
    Settings,
    SpectralLoss,
    Trainer,
    distance,
    load,
    seconds,
    train,
    utterances,
)
from engine.tiny.speech import Clip
from engine.tiny.voices import Line

CPU = torch.device("cpu")
SECOND = 24000
# Small enough for seconds of a CPU, and every kind of part is there.
SMALL = Code2WavConfig(
    codebook=16,
    quantizers=4,
    hidden=32,
    inter=48,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=16,
    window=5,
    decoder_dim=48,
    rates=(8, 5, 4, 3),
    ratios=(2, 2),
    eps=1e-5,
    rope_theta=10000.0,
)
QUICK = Settings(width=24, batch=2, frames=5, warm_up_steps=5, critics_from=1.0, memory=0.9, log_steps=2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sentence(seconds: float = 0.8, seed: int = 0) -> np.ndarray:
    """Something like speech: a gliding voice of many harmonics under moving formants, between hisses, as int16."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * SECOND)) / SECOND
    phase = 2 * np.pi * np.cumsum(130 + 40 * np.sin(2 * np.pi * 1.7 * time + rng.uniform(0, 6))) / SECOND
    formant = 900 + 500 * np.sin(2 * np.pi * 2.3 * time)
    voice = sum(np.exp(-(((130 * k - formant) / 500) ** 2)) * np.sin(k * phase) for k in range(1, 24))
    hiss = rng.standard_normal(len(time)) * (np.sin(2 * np.pi * 3.1 * time) > 0.6)
    wave = 0.12 * voice + 0.04 * hiss
    return (np.clip(wave, -1, 1) * 32767).astype(np.int16)


def stirred(config: Code2WavConfig = SMALL) -> Decoder:
    """A decoder none of whose parameters are what they are made as (ones, zeros)."""
    torch.manual_seed(0)
    decoder = Decoder(config).requires_grad_(False)
    for index, parameter in enumerate(decoder.parameters()):
        parameter.add_(torch.randn(parameter.shape, generator=generator(index)) * 0.03)
    last = decoder.decoder[-1].conv
    last.weight.mul_(0.3)  # keeps the wave off the clamp
    return decoder


def served(tiny_checkpoint: Path, folder: Path, decoder: Decoder, chunk_frames: int) -> Code2Wav:
    """The engine's own vocoder, from a folder in the released layout that holds the decoder's tensors."""
    others = load_file(tiny_checkpoint / "model.safetensors")
    tensors = {name: tensor for name, tensor in others.items() if not name.startswith("code2wav.")} | decoder.tensors()
    save_file(tensors, folder / "model.safetensors")
    config = replace(OmniConfig.load(tiny_checkpoint), code2wav=decoder.config)
    return Code2Wav(config, load_weights(folder, config), ops_for("cpu"), chunk_frames)


def test_the_engines_vocoder_says_what_the_decoder_says_whole_and_streamed(tiny_checkpoint: Path, tmp_path: Path):
    decoder = stirred()
    code2wav = served(tiny_checkpoint, tmp_path, decoder, 4)
    codes = torch.randint(0, SMALL.codebook, (2, SMALL.quantizers, 13), generator=generator())
    with torch.inference_mode():
        want = decoder(codes)
        assert want.shape == (2, 13 * 1920 - 555)
        assert want.abs().mean() > 0.01  # neither silence
        assert (want.abs() == 1.0).float().mean() < 0.1  # nor clipped
        for clip in range(2):
            torch.testing.assert_close(code2wav.decode(codes[clip]), want[clip], rtol=0, atol=1e-5)
            state = code2wav.new_state()
            parts = [code2wav.step(part, state) for part in torch.split(codes[clip], 1, dim=1)]
            torch.testing.assert_close(torch.cat(parts), want[clip], rtol=0, atol=1e-5)


def test_the_decoder_of_a_longer_utterance_begins_with_the_same_samples():
    decoder = stirred()
    codes = torch.randint(0, SMALL.codebook, (1, SMALL.quantizers, 9), generator=generator())
    torch.testing.assert_close(decoder(codes[..., :6])[0], decoder(codes)[0, : 6 * 1920 - 555], rtol=0, atol=1e-5)


def test_what_the_quantizer_picks_is_what_the_decoder_hears():
    codec = Codec(SMALL, 24)
    latents = torch.randn(2, 40, SMALL.hidden, generator=generator())
    codec.quantizer.start(latents, codec.table, generator(1))
    everything = torch.full((2,), SMALL.quantizers)
    seen = codec.quantizer(latents, codec.table, everything)
    codes = seen.codes.view(SMALL.quantizers, 2, 40).transpose(0, 1)
    torch.testing.assert_close(codec.decoder.embed(codes), seen.latents, rtol=0, atol=1e-5)


def spread(rows: int) -> torch.Tensor:
    """Latents [rows, H] that mostly lie along a few directions, around a middle of their own."""
    lengths = 0.5 ** torch.arange(SMALL.hidden)
    turned = torch.linalg.qr(torch.randn(SMALL.hidden, SMALL.hidden, generator=generator(3))).Q
    return torch.randn(rows, SMALL.hidden, generator=generator(4)) * lengths @ turned.t() + 2.0


def test_codes_of_axes_are_near_what_they_stand_for_in_the_decoders_table():
    latents, decoder = spread(4000), Decoder(SMALL).requires_grad_(False)
    axes = Axes.fit(latents, SMALL.quantizers, SMALL.codebook)
    codes = axes.encode(latents)
    assert codes.shape == (4000, SMALL.quantizers) and codes.min() >= 0 and codes.max() < SMALL.codebook
    # The longest axis first, with all of the codes; a step is the same on all.
    extents = codes.float().std(0)
    assert (extents[1:] <= extents[:-1] + 0.5).all() and extents[0] == pytest.approx(SMALL.codebook / 6, rel=0.1)
    decoder.code_embedding.weight.copy_(axes.table())
    heard = decoder.embed(codes.t()[None])[0]
    off = (heard - latents) @ axes.directions / axes.step
    within = (codes > 0) & (codes < SMALL.codebook - 1)
    assert off[within].abs().max() < 0.501 and within.float().mean() > 0.9
    # A code that is one off means a latent that is one step off.
    beside = decoder.embed((codes + within.long()).t()[None])[0]
    moved = ((beside - heard) @ axes.directions / axes.step)[within]
    torch.testing.assert_close(moved, torch.ones_like(moved), rtol=0, atol=1e-3)


def test_axes_are_the_same_for_the_same_latents_in_any_order_and_latents_all_alike_have_none():
    latents = spread(500)
    one, other = Axes.fit(latents, 4, 16), Axes.fit(latents.flip(0), 4, 16)
    torch.testing.assert_close(other.directions, one.directions, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="500 latents are all alike"):
        Axes.fit(torch.ones(500, 8), 4, 16)


def test_each_book_leaves_less_than_the_one_before_it():
    quantizer, table = ResidualQuantizer(4, 16, 32), torch.zeros(64, 32)
    latents = torch.randn(8, 50, 32, generator=generator())
    quantizer.start(latents, table, generator(1))
    seen = quantizer(latents, table, torch.full((8,), 4))
    left = [float(rest.square().mean()) for rest in seen.residuals]
    assert left[0] == pytest.approx(float(latents.square().mean()))
    assert all(after < 0.95 * before for before, after in itertools.pairwise(left))


def test_the_first_books_say_all_parts_roughly_and_the_others_say_them_better():
    quantizer, table = ResidualQuantizer(4, 16, 8, parts=2), torch.zeros(64, 8)
    latents = torch.randn(8, 50, 8, generator=generator())
    quantizer.start(latents, table, generator(1))
    quantizer.learn(quantizer(latents, table, torch.full((8,), 4)), table, generator(2))
    words = table.view(4, 16, 2, 4)
    assert [(book[:, 0] != 0).any() for book in words] == [True, False, True, False]
    assert [(book[:, 1] != 0).any() for book in words] == [False, True, False, True]
    off = [
        (quantizer(latents, table, torch.full((8,), heard)).latents - latents).square().mean((0, 1)).view(2, 4).mean(1)
        for heard in range(5)
    ]
    assert off[1][0] < 0.7 * off[0][0] and off[1][1] == off[0][1]
    assert off[2][1] < 0.7 * off[1][1] and off[3][0] < 0.7 * off[2][0] and off[4][1] < 0.7 * off[3][1]


def test_each_part_is_quantized_as_if_it_were_alone():
    whole, alone = ResidualQuantizer(6, 16, 8, parts=2), ResidualQuantizer(3, 16, 4)
    latents = torch.randn(4, 50, 8, generator=generator())
    table = torch.zeros(96, 8)
    whole.start(latents, table, generator(1))
    everything = torch.full((4,), 6)
    for step in range(3):
        whole.learn(whole(latents, table, everything), table, generator(step))
    seen = whole(latents, table, everything)
    for part, own in enumerate((slice(0, 4), slice(4, 8))):
        # What a table of three books holds is three times what it subtracts, of six books six times.
        words = table.view(6, 16, 8)[part::2, :, own].flatten(0, 1) / 2
        want = alone(latents[..., own].contiguous(), words, torch.full((4,), 3))
        assert torch.equal(seen.codes[part::2], want.codes)
        torch.testing.assert_close(seen.latents[..., own], want.latents)
    with pytest.raises(ValueError, match="6 codebooks and latents of 8 values can't be parted into 4"):
        ResidualQuantizer(6, 16, 8, parts=4)


def test_commitment_of_a_book_is_that_of_its_part():
    quantizer, table = ResidualQuantizer(2, 2, 2, parts=2), torch.zeros(4, 2)
    latents = torch.tensor([[[0.5, 2.0]]], requires_grad=True)
    quantizer(latents, table, torch.tensor([2])).commitment.backward()
    # Each book is off by the whole of its part.
    torch.testing.assert_close(latents.grad, torch.tensor([[[0.5, 2.0]]]))


def test_a_clip_that_hears_fewer_books_gets_the_sum_of_those_alone():
    quantizer, table = ResidualQuantizer(4, 16, 8), torch.randn(64, 8, generator=generator())
    latents = torch.randn(2, 5, 8, generator=generator(1))
    seen = quantizer(latents, table, torch.tensor([2, 4]))
    words, codes = table.view(4, 16, 8) / 4, seen.codes.view(4, 2, 5)
    want = words[0][codes[0, 0]] + words[1][codes[1, 0]]
    torch.testing.assert_close(seen.latents[0], want, rtol=0, atol=1e-6)


def test_the_gradient_passes_the_quantizer_as_if_it_were_not_there():
    quantizer, table = ResidualQuantizer(4, 16, 8), torch.randn(64, 8, generator=generator())
    latents = torch.randn(1, 5, 8, generator=generator(1), requires_grad=True)
    wanted = torch.randn(1, 5, 8, generator=generator(2))
    (quantizer(latents, table, torch.tensor([4])).latents * wanted).sum().backward()
    torch.testing.assert_close(latents.grad, wanted)


def test_commitment_pulls_latents_to_what_was_chosen():
    quantizer, table = ResidualQuantizer(1, 2, 1), torch.tensor([[0.0], [1.0]])
    latents = torch.tensor([[[0.8]]], requires_grad=True)
    quantizer(latents, table, torch.tensor([1])).commitment.backward()
    assert float(latents.grad) == pytest.approx(2 * (0.8 - 1.0))


def test_codes_that_nothing_chooses_are_put_to_use():
    quantizer = ResidualQuantizer(2, 16, 4)
    table = torch.full((32, 4), 100.0) * torch.arange(1, 33)[:, None]
    latents = torch.randn(4, 64, 4, generator=generator())
    everything = torch.full((4,), 2)
    assert len(quantizer(latents, table, everything).codes[0].unique()) == 1
    for step in range(100):
        quantizer.learn(quantizer(latents, table, everything), table, generator(step))
    codes = quantizer(latents, table, everything).codes
    assert min(len(book.unique()) for book in codes) >= 14


def test_a_book_moves_to_the_middle_of_what_chooses_it():
    quantizer, table = ResidualQuantizer(1, 2, 1), torch.tensor([[-1.0], [1.0]])
    quantizer.counts.fill_(2.0)
    quantizer.sums.copy_(torch.tensor([[[-2.0], [2.0]]]))
    latents = torch.tensor([[[-3.0], [-2.0], [2.0], [4.0]]])
    for _ in range(1000):
        quantizer.learn(quantizer(latents, table, torch.tensor([1])), table, generator())
    torch.testing.assert_close(table, torch.tensor([[-2.5], [3.0]]), rtol=0, atol=1e-3)


def test_a_wave_has_one_latent_for_each_1920_samples_begun():
    codec = Codec(SMALL, 24)
    for samples, frames in ((1, 1), (1920, 1), (1921, 2), (SECOND, 13)):
        latents = codec.latents(torch.zeros(samples))
        assert latents.shape == (frames, SMALL.hidden)
        assert codec.decoder.speak(latents[None]).shape == (1, 1920 * frames - 555)


def test_frames_of_another_length_are_refused():
    with pytest.raises(ValueError, match="a frame must be 1920 samples, is 3840"):
        Codec(dataclasses.replace(SMALL, ratios=(2, 4)), 24)


def test_a_tone_reads_as_half_its_amplitude_in_its_own_line_and_column():
    wave = torch.zeros(1, 4800)
    wave[0, 2400:] = 0.5 * torch.sin(2 * math.pi * 3000 * torch.arange(2400) / SECOND)
    spectrum = magnitudes(wave, torch.hann_window(480), 120)[0]
    assert spectrum.shape == (241, 40)
    assert int(spectrum[:, 30].argmax()) == 60
    assert float(spectrum[60, 30]) == pytest.approx(0.25, abs=1e-3)
    assert float(spectrum[:, 10].max()) < 1e-5


def test_mel_triangles_cover_the_spectrum_and_weigh_the_same():
    filters = mel_filters(100, 1024)
    assert filters.shape == (100, 513)
    torch.testing.assert_close(filters.sum(1), torch.ones(100))
    middles = filters.argmax(1)
    assert bool((middles[1:] >= middles[:-1]).all())
    assert float(LogMel(100, 1024, 240)(torch.zeros(1, 4800)).max()) == pytest.approx(math.log(1e-4))


def test_the_spectral_loss_is_nothing_for_the_same_wave_and_ranks_damage():
    wave = torch.from_numpy(sentence()).float()[None] / 32768
    noise = torch.randn(wave.shape, generator=generator())
    loss = SpectralLoss()
    same, little, much, silence = (
        float(loss(got, wave)) for got in (wave, wave + 0.003 * noise, wave + 0.03 * noise, torch.zeros_like(wave))
    )
    assert same == 0.0
    assert 0.0 < little < much < silence


def test_ten_decibels_less_is_a_distance_of_ten_decibels():
    # Noise, since silence is as quiet as it can be at any volume.
    noise = torch.randn(1, SECOND, generator=generator())
    assert distance(0.2 * noise, 0.2 * noise) == 0.0
    assert distance(0.2 * 10**-0.5 * noise, 0.2 * noise) == pytest.approx(10.0, abs=0.01)


def test_segments_are_cuts_of_utterances_with_silence_around():
    waves = [np.arange(1, 5001, dtype=np.int16), np.arange(6001, 6101, dtype=np.int16)]
    cuts = Pool(waves, CPU).segments(400, 800, generator())
    again = Pool(waves, CPU).segments(400, 800, generator())
    assert torch.equal(cuts, again)
    short = 0
    for cut in (cuts * 32768).round().long():
        sounding = cut[cut > 0]
        assert torch.equal(sounding, torch.arange(len(sounding)) + (sounding[0] if len(sounding) else 0))
        short += int(len(sounding) > 0 and int(sounding[0]) > 6000)
        assert set((sounding > 6000).tolist()) != {True, False}
    assert 0 < short < 40  # the short one is a fiftieth of all samples
    begun = {int(cut[0]) for cut in (Pool(waves[:1], CPU).segments(200, 800, generator(), 480) * 32768).round()}
    assert begun == {0, *range(1, 5001, 480)}


def test_waves_without_samples_are_refused():
    with pytest.raises(ValueError, match="no speech to train on"):
        Pool([np.zeros(0, np.int16)], CPU)


def test_of_a_corpus_the_main_voice_at_its_own_pitch_is_taken(tmp_path: Path):
    lines = [
        Line("one", "hibari", 1, 1.1, 1.0),
        Line("two", "flite-slt", 1, 1.0, 1.0),
        Line("three", "hibari", 1, 1.0, 1.1),
        Line("four", "hibari", 1, 1.0, 1.0),
    ]
    waves = [np.full(10 + place, place, np.int16) for place in range(4)]
    starts = shards.save(tmp_path, "00000", waves)
    clips = [Clip(line, "00000.npy", start, len(wave)) for line, start, wave in zip(lines, starts, waves, strict=True)]
    shards.write_list(tmp_path / shards.MANIFEST, clips)
    assert [wave.tolist() for wave in utterances(tmp_path)] == [[0] * 10, [3] * 13]


def test_critics_learn_to_tell_and_their_judgement_moves_what_was_made():
    torch.manual_seed(0)
    real = torch.from_numpy(np.stack([sentence(0.2, seed) for seed in range(2)])).float() / 32768
    made = (torch.randn(real.shape, generator=generator()) * 0.1).requires_grad_(True)
    critics = Critics()
    optimizer = torch.optim.Adam(critics.parameters(), 2e-3)
    first = float(critics.mistakes(real, made).detach())
    for _ in range(10):
        optimizer.zero_grad()
        critics.mistakes(real, made).backward()
        optimizer.step()
    assert float(critics.mistakes(real, made).detach()) < 0.7 * first
    assert made.grad is None  # the critics' own lesson leaves what they judge alone
    passing, matching = critics.against(real, made)
    (passing + matching).backward()
    assert float(made.grad.abs().sum()) > 0
    alike, same = critics.against(real, real)
    assert float(same.detach()) == 0.0
    assert float(alike.detach()) < float(passing.detach())


def trainer(settings: Settings = QUICK) -> Trainer:
    torch.manual_seed(0)
    return Trainer(Codec(SMALL, settings.width), settings, CPU)


def test_a_short_overfit_brings_the_loss_down_and_the_spectrum_nearer():
    pool = Pool([sentence()], CPU)
    run = trainer(dataclasses.replace(QUICK, rate=4e-3))
    first = float(run.step(pool, 0.0)["spectral"])
    before = run.judge(pool)
    for _ in range(50):
        last = run.step(pool, 0.0)["spectral"]
    assert float(last) < 0.6 * first
    assert run.judge(pool) < 0.6 * before


def test_critics_join_when_their_share_of_the_time_has_come():
    run, pool = trainer(dataclasses.replace(QUICK, critics_from=0.5)), Pool([sentence()], CPU)
    before = [parameter.clone() for parameter in run.critics.parameters()]
    assert set(run.step(pool, 0.49)) == {"spectral", "commitment"}
    assert all(map(torch.equal, before, run.critics.parameters()))
    assert set(run.step(pool, 0.5)) == {"spectral", "commitment", "critics", "passing", "matching"}
    assert not any(map(torch.equal, before, run.critics.parameters()))


def test_the_learning_rate_warms_up_and_falls_to_its_last_value():
    run, pool = trainer(), Pool([sentence()], CPU)
    rates = []
    for share in (0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 1.0):
        run.step(pool, share)
        rates.append(run.optimizer.param_groups[0]["lr"])
    assert rates[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
    assert rates[5:] == pytest.approx([(1e-3 + 2e-5) / 2, 2e-5])


def flat(codec: Codec) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in codec.state_dict().values()])


def test_a_resumed_run_goes_on_as_the_uninterrupted_one_but_for_rounded_moments(tmp_path: Path):
    pool = Pool([sentence()], CPU)
    whole, other = trainer(dataclasses.replace(QUICK, critics_from=0.5)), None
    for step in range(6):
        if step == 3:
            whole.progress.seconds = 12.5
            whole.save(tmp_path)
            other = trainer(whole.settings)
            assert other.resume(tmp_path)
            assert (other.progress.step, other.progress.seconds) == (3, 12.5)
            assert torch.equal(flat(other.codec), flat(whole.codec))
            assert all(map(torch.equal, other.average.parameters(), whole.average.parameters()))
        losses = whole.step(pool, step / 6)
    assert other is not None
    for step in range(3, 6):
        resumed = other.step(pool, step / 6)
    assert list(resumed) == list(losses)
    assert [float(x) for x in resumed.values()] == pytest.approx([float(x) for x in losses.values()], rel=0.01)


def test_each_file_of_the_shipped_models_state_has_at_most_16_mb(tmp_path: Path):
    config = OmniConfig.parse(shapes.config()).code2wav
    assert config is not None
    settings = Settings(batch=1, frames=2, critics_from=0.0)
    run = Trainer(Codec(config, settings.width), settings, CPU)
    run.step(Pool([sentence()], CPU), 0.0)
    run.save(tmp_path)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 16_000_000


def test_a_state_of_other_shapes_is_refused(tmp_path: Path):
    trainer().save(tmp_path)
    with pytest.raises(ValueError, match="is of another model"):
        trainer(dataclasses.replace(QUICK, width=32)).resume(tmp_path)


def test_a_run_in_two_sittings_leaves_one_state_a_log_and_a_codec(tmp_path: Path):
    waves, out = [sentence(), sentence(0.5, 1)], tmp_path / "run"
    whole = 6 / 60
    train(waves, out, whole, "cpu", config=SMALL, settings=QUICK, held_out=waves, sitting=whole / 2)
    [first] = [name.stem for name in out.glob("codec-*")]
    codec = train(waves, out, whole, "cpu", config=SMALL, settings=QUICK, held_out=waves)
    [second] = [name.stem for name in out.glob("codec-*")]
    assert second > first
    assert sorted(name.name for name in out.iterdir()) == sorted(
        [f"{second}.safetensors", f"{second.replace('codec', 'moments')}.safetensors", "log.jsonl"]
    )
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)
    judged = [line for line in lines if "held_out_db" in line]
    assert [line["seconds"] for line in judged] == pytest.approx([3.0, 6.0], abs=1.5)
    kept = load(out, SMALL, QUICK.width)
    wave = torch.from_numpy(sentence()).float() / 32768
    assert torch.equal(kept.latents(wave), codec.latents(wave))
    assert all(torch.equal(kept.decoder.tensors()[name], value) for name, value in codec.decoder.tensors().items())


def test_a_loss_that_is_no_number_ends_a_run_before_its_state_is_saved(tmp_path: Path):
    broken = dataclasses.replace(QUICK, rate=1e30, warm_up_steps=1)
    with pytest.raises(ValueError, match=r"spectral.* is no number at step \d+; lower Settings.rate"):
        train([sentence()], tmp_path, 5 / 60, "cpu", config=SMALL, settings=broken)
    assert not list(tmp_path.glob("codec-*"))


def test_no_state_to_load_is_an_error_that_says_what_to_do(tmp_path: Path):
    with pytest.raises(ValueError, match="train into it first"):
        load(tmp_path, SMALL, 24)


def saved(folder: Path) -> tuple[Path, Path]:
    """A state in `folder`: its weights and its moments."""
    run = trainer()
    run.step(Pool([sentence()], CPU), 0.0)
    run.progress.seconds = 2.5
    run.save(folder)
    return folder / "codec-0000001.safetensors", folder / "moments-0000001.safetensors"


def test_a_codec_needs_no_moments_to_be_loaded_but_to_be_trained_on(tmp_path: Path):
    _, moments = saved(tmp_path)
    before = load(tmp_path, SMALL, QUICK.width)
    moments.unlink()
    assert torch.equal(flat(load(tmp_path, SMALL, QUICK.width)), flat(before))
    assert seconds(tmp_path) == 2.5
    told = f"{moments} is missing; fetch it again, or delete all of step 1 in {tmp_path} to begin from nothing"
    with pytest.raises(ValueError, match=f"^{told}$"):
        trainer().resume(tmp_path)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("length", [0, 5, 2000])
def test_a_state_that_is_cut_off_is_named(tmp_path: Path, place: int, length: int):
    path = saved(tmp_path)[place]
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=rf"^{path} is damaged \(.*; fetch it again"):
        trainer().resume(tmp_path)


def test_a_state_that_says_nothing_of_its_time_is_named(tmp_path: Path):
    path, _ = saved(tmp_path)
    save_file(load_file(path), path)
    for read in (lambda: load(tmp_path, SMALL, QUICK.width), lambda: seconds(tmp_path)):
        with pytest.raises(ValueError, match=rf"^{path} is damaged"):
            read()


def test_a_folder_without_a_state_was_trained_for_no_time(tmp_path: Path):
    assert seconds(tmp_path) == 0.0
