"""Positions of prompts with media: literals, and three hundred random prompts against Hugging Face."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import RequestError
from engine.model.config import OmniConfig
from engine.model.positions import audio_tokens, prompt_positions, prompt_segments
from tests.hf import load_hf

AUDIO_START, AUDIO_END, AUDIO = 490, 491, 496
VISION_START, VISION_END, IMAGE, VIDEO = 483, 484, 486, 487


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    return OmniConfig.load(tiny_checkpoint)


@dataclass
class Prompt:
    """A prompt under construction: ids, and the media that its placeholders stand for."""

    ids: list[int] = field(default_factory=list)
    images: list[tuple[int, int, int]] = field(default_factory=list)
    videos: list[tuple[int, int, int, float]] = field(default_factory=list)
    audios: list[int] = field(default_factory=list)

    def text(self, count: int) -> None:
        self.ids += range(20, 20 + count)

    def audio(self, frames: int) -> None:
        self.ids += [AUDIO_START, *[AUDIO] * audio_tokens(frames), AUDIO_END]
        self.audios.append(frames)

    def image(self, height: int, width: int) -> None:
        self.ids += [VISION_START, *[IMAGE] * (height * width // 4), VISION_END]
        self.images.append((1, height, width))

    def video(self, steps: int, height: int, width: int, seconds: float) -> None:
        self.ids += [VISION_START, *[VIDEO] * (steps * height * width // 4), VISION_END]
        self.videos.append((steps, height, width, seconds))

    def video_with_sound(self, steps: int, height: int, width: int, seconds: float, frames: int) -> None:
        pictures = [step * seconds * 13 for step in range(steps) for _ in range(height * width // 4)]
        sounds = list(range(audio_tokens(frames)))
        mix = []
        while pictures and sounds:
            if pictures[0] <= sounds[0]:
                mix.append(VIDEO)
                pictures.pop(0)
            else:
                mix.append(AUDIO)
                sounds.pop(0)
        mix += [VIDEO] * len(pictures) + [AUDIO] * len(sounds)
        self.ids += [VISION_START, AUDIO_START, *mix, AUDIO_END, VISION_END]
        self.videos.append((steps, height, width, seconds))
        self.audios.append(frames)


def random_prompt(dice: random.Random, mixed: bool) -> Prompt:
    prompt = Prompt()
    for _ in range(dice.randrange(1, 6)):
        kind = dice.choice(["text", "audio", "image", "video"])
        height, width = 2 * dice.randrange(1, 5), 2 * dice.randrange(1, 5)
        if kind == "text":
            prompt.text(dice.randrange(1, 6))
        elif kind == "audio":
            prompt.audio(dice.randrange(1, 350))
        elif kind == "image":
            prompt.image(height, width)
        elif mixed:
            seconds, frames = dice.choice([2.0, 1.0, 0.5, 2 / 3]), dice.randrange(8, 500)
            prompt.video_with_sound(dice.randrange(1, 4), height, width, seconds, frames)
        else:
            prompt.video(dice.randrange(1, 4), height, width, dice.choice([2.0, 1.0, 0.5, 2 / 3]))
    prompt.text(3)
    return prompt


def hf_positions(folder: Path, prompt: Prompt, mixed: bool) -> tuple[np.ndarray, float]:
    ids = torch.tensor([prompt.ids])
    found, delta = load_hf(folder).thinker.get_rope_index(
        ids,
        torch.tensor(prompt.images) if prompt.images else None,
        torch.tensor([video[:3] for video in prompt.videos]) if prompt.videos else None,
        torch.ones_like(ids),
        mixed,
        torch.tensor(prompt.audios) if prompt.audios else None,
        torch.tensor([video[3] for video in prompt.videos]) if prompt.videos else None,
    )
    return found[:, 0].float().numpy(), float(delta)


@pytest.mark.hf
def test_three_hundred_random_prompts_with_media_stand_where_hugging_face_puts_them(config, tiny_checkpoint):
    dice = random.Random(0)
    media = 0
    for _ in range(300):
        mixed = dice.random() < 0.4
        prompt = random_prompt(dice, mixed)
        theirs, delta = hf_positions(tiny_checkpoint, prompt, mixed)
        ours, our_delta = prompt_positions(
            prompt.ids, config, prompt.images, prompt.videos, prompt.audios, audio_in_video=mixed
        )
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4, err_msg=str(prompt))
        if prompt.images or prompt.videos:
            media += 1
            assert abs(our_delta - delta) < 1e-3, prompt
    assert media > 200


@pytest.mark.hf
def test_a_wide_frame_with_a_short_sound_counts_on_from_the_last_run_as_hugging_face_does(config, tiny_checkpoint):
    prompt = Prompt()
    prompt.video_with_sound(1, 2, 40, 1.0, 60)
    prompt.text(2)
    theirs, _ = hf_positions(tiny_checkpoint, prompt, True)
    ours, delta = prompt_positions(prompt.ids, config, [], prompt.videos, prompt.audios, audio_in_video=True)
    np.testing.assert_array_equal(ours, theirs)
    # Markers at 0 and 1, the block from 2: 20 pictures up to 21 in width, then 8 sounds of which the last stands at 9.
    assert ours[:, -4:].tolist() == [[10, 11, 12, 13]] * 3
    assert delta == 22 - 34


def test_text_and_audio_alone_stand_at_their_index_on_every_axis(config):
    positions, delta = prompt_positions([1, AUDIO_START, AUDIO, AUDIO, AUDIO_END, 2], config, [], [], [16])
    assert positions.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert delta == 0


def test_an_image_takes_rows_and_columns_and_the_text_after_it_its_largest_position_plus_one(config):
    ids = [1, VISION_START, *[IMAGE] * 6, VISION_END, 2]
    positions, delta = prompt_positions(ids, config, [(1, 4, 6)], [], [])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert delta == -3


def test_a_video_step_of_two_thirds_of_a_second_is_not_rounded(config):
    ids = [VISION_START, VIDEO, VIDEO, VISION_END]
    positions, delta = prompt_positions(ids, config, [], [(2, 2, 2, 2 / 3)], [])
    np.testing.assert_allclose(positions[0], [0, 1, 9.666667, 10.666667], rtol=1e-6)
    assert positions[1, :3].tolist() == [0, 1, 1]
    assert delta == pytest.approx(11.666667 - 4)


def test_a_video_with_sound_interleaves_by_time_with_pictures_first(config):
    ids = [VISION_START, AUDIO_START, VIDEO, *[AUDIO] * 13, VIDEO, *[AUDIO] * 2, AUDIO_END, VISION_END]
    positions, _ = prompt_positions(ids, config, [], [(2, 2, 2, 1.0)], [115], audio_in_video=True)
    assert positions[0].tolist() == [0, 1, 2, *range(2, 15), 15, 15, 16, 17, 18]


def test_a_placeholder_without_its_medium_names_the_kind(config):
    with pytest.raises(RequestError, match="a place for image beyond those given") as error:
        prompt_positions([VISION_START, IMAGE, VISION_END], config, [], [(1, 2, 2, 1.0)], [])
    assert error.value.field == "image"


def test_media_that_do_not_fill_their_placeholders_are_refused(config):
    with pytest.raises(RequestError, match="the image at token 1 takes 6 tokens, the prompt has 2 there"):
        prompt_positions([VISION_START, IMAGE, IMAGE, VISION_END], config, [(1, 4, 6)], [], [])


def test_a_clip_takes_thirteen_tokens_a_second_and_the_rest_halved_three_times_upwards():
    assert [audio_tokens(t) for t in (0, 1, 8, 9, 99, 100, 101, 330, 1000)] == [0, 1, 1, 2, 13, 13, 14, 43, 130]


@pytest.mark.hf
def test_clips_of_one_to_a_thousand_frames_take_the_tokens_that_hugging_face_says():
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

    frames = torch.arange(1, 1001)
    assert [audio_tokens(int(t)) for t in frames] == _get_feat_extract_output_lengths(frames).tolist()


def test_segments_cut_a_prompt_at_its_media_and_carry_their_digests(config):
    ids = [1, 2, AUDIO_START, AUDIO, AUDIO, AUDIO_END, 3]
    first, clip, last = prompt_segments(ids, config.ids, ["aa"])
    assert [(s.kind.value, s.start, s.length) for s in (first, clip, last)] == [
        ("text", 0, 3),
        ("audio", 3, 2),
        ("text", 5, 2),
    ]
    assert clip.digest == "aa"
    again = prompt_segments([1, 2, AUDIO_START, AUDIO, AUDIO_END, 4], config.ids, ["bb"])
    assert again[0].digest == first.digest and again[2].digest != last.digest


def test_segments_refuse_a_digest_without_a_place_and_a_place_without_a_digest(config):
    with pytest.raises(RequestError, match="1 media more than"):
        prompt_segments([1, 2], config.ids, ["aa"])
    with pytest.raises(RequestError, match="a place for audio beyond"):
        prompt_segments([AUDIO], config.ids, [])
