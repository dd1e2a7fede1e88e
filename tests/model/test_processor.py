"""From what a client sends to prompt ids, clips and limits: the same as Hugging Face's processor, without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.errors import CheckpointError, RequestError
from engine.model.chat import AUDIO_PART, ChatTemplate, load_tokenizer, text_part
from engine.model.clips import decode, log_mel, mel_filters
from engine.model.config import OmniConfig
from engine.model.processor import Inputs, Processor, Unwanted, max_audio_seconds, user_tokens
from engine.request import Request, Sampling, Speech
from tests.server.serving import audio_file, tone
from tests.shared import shared

DRAFT = Request(id="r", prompt_ids=[], max_tokens=256)
SPEECH = Speech(voice="Ethan", max_frames=4096, sampling=Sampling())
PARTS = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def processor(tiny_checkpoint: Path) -> Processor:
    config = OmniConfig.load(tiny_checkpoint)
    return Processor.load(tiny_checkpoint, config, config.thinker.max_positions)


def copied(source: Path, target: Path, *leave_out: str) -> Path:
    """The small files of a model folder, without some."""
    for name in (*PARTS, "tokenizer.json"):
        if name not in leave_out:
            shutil.copy(source / name, target / name)
    return target


@pytest.mark.hf
@pytest.mark.parametrize("samples", [400, 401, 16000, 16001, 16159, 52833])
def test_the_log_mel_is_hugging_faces(samples: int):
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=300)
    noise = (np.random.default_rng(samples).standard_normal(samples) * 0.1).astype(np.float32)
    noise[samples // 2 :] *= 1e-4  # the quiet half stands on the floor of 8 decades below the loudest
    theirs = extractor(noise, sampling_rate=16000, padding=False, truncation=False, return_tensors="np")
    ours = log_mel(noise, 128)
    assert ours.shape == (128, samples // 160) and ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs["input_features"][0], rtol=0, atol=5e-5)


@pytest.mark.hf
def test_the_mel_filters_are_slaneys():
    from transformers import WhisperFeatureExtractor

    np.testing.assert_allclose(mel_filters(128).T, WhisperFeatureExtractor(feature_size=128).mel_filters, atol=1e-12)


def test_a_long_clip_is_the_same_as_its_blocks_make_it():
    sound = tone(60.0)
    whole = log_mel(sound, 128)
    assert whole.shape == (128, 6000)
    # Away from the cut the frames of a part are those of the whole, up to the floor that the loudest frame sets.
    part = log_mel(sound[: 160 * 4200], 128)
    np.testing.assert_allclose(part[:, :4190], whole[:, :4190], atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_a_resampled_tone_keeps_its_length_and_pitch(rate: int):
    at = np.arange(rate) / rate
    data = audio_file(np.sin(2 * np.pi * 1000 * at).astype(np.float32), rate)
    sound = decode(data, 0, 10)
    assert abs(len(sound.samples) - 16000) <= 1
    assert sound.seconds == 1.0
    spectrum = np.abs(np.fft.rfft(sound.samples[:16000] * np.hanning(16000)))
    assert abs(int(spectrum.argmax()) - 1000) <= 1


def test_channels_are_averaged():
    left, right = tone(0.1), tone(0.1)[::-1]
    data = audio_file(np.stack([left, right], axis=1), 16000, "WAV", "FLOAT")
    np.testing.assert_array_equal(decode(data, 0, 1).samples, ((left + right) / 2).astype(np.float32))


def test_a_clip_as_long_as_the_limit_is_taken_and_one_sample_more_is_not():
    assert decode(audio_file(tone(2.0)), 0, 2.0).seconds == 2.0
    with pytest.raises(RequestError, match=r"audio\[3\] lasts 2\.0 s; this server takes at most 2 s"):
        decode(audio_file(np.zeros(32001, np.float32)), 3, 2.0)


def test_text_becomes_a_user_turn_and_an_open_answer(processor: Processor):
    done = processor.complete(DRAFT, Inputs(text="Hi there.", system="Be brief."))
    assert processor.tokenizer.decode(done.prompt_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there.<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = processor.config.ids
    assert done.prompt_ids[:2] == [ids.im_start, ids.system]
    assert done.prompt_ids[-3:-1] == [ids.im_start, ids.assistant]


def test_a_conversation_is_rendered_turn_by_turn_with_audio_in_any_user_turn(processor: Processor):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [text_part("One"), AUDIO_PART]},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": [AUDIO_PART, text_part("Three")]},
    ]
    clips = [audio_file(tone(1.0)), audio_file(tone(2.57))]
    done = processor.complete(DRAFT, Inputs(messages=messages, audio=clips))
    pad = processor.config.ids.audio
    assert [clip.tokens for clip in done.clips] == [13, 34]
    runs = [(token, len(list(same))) for token, same in groupby(done.prompt_ids)]
    assert [length for token, length in runs if token == pad] == [13, 34]
    shown = processor.tokenizer.decode([token for token in done.prompt_ids if token != pad], skip_special_tokens=False)
    audio = "<|audio_start|><|audio_end|>"
    assert shown == (
        f"<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nOne{audio}<|im_end|>\n"
        f"<|im_start|>assistant\nTwo<|im_end|>\n<|im_start|>user\n{audio}Three<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_bare_prompt_gets_no_template(processor: Processor):
    done = processor.complete(DRAFT, Inputs(prompt="The sea"))
    assert done.prompt_ids == processor.tokenizer.encode("The sea").ids
    with pytest.raises(RequestError, match="prompt is empty"):
        processor.complete(DRAFT, Inputs(prompt=""))


@pytest.mark.parametrize(
    "inputs",
    [
        Inputs(messages=[{"role": "user", "content": "x" * 2_000_000}]),
        Inputs(messages=[{"role": "user", "content": [text_part("x"), text_part("x" * 1_999_999)]}]),
        Inputs(prompt="x" * 2_000_000),
    ],
    ids=["a message", "a part", "a prompt"],
)
def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenized(processor: Processor, inputs: Inputs):
    with pytest.raises(RequestError, match="2000000 characters") as refused:
        processor.complete(DRAFT, inputs)
    assert refused.value.field == inputs.prompt_field


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": "x" * 1000}] * 2000, "2000000 characters"),
        ([{"role": "user", "content": ""}] * 4097, "4097 messages and parts"),
        ([{"role": "user", "content": [text_part("")] * 4097}], "4097 messages and parts"),
        ([{"role": "user", "content": ""}] * 4096, r"messages has \d{6} characters"),
    ],
    ids=["texts together", "messages", "parts", "what the template makes of them"],
)
def test_a_conversation_that_can_never_fit_is_refused_before_it_is_tokenized(
    processor: Processor, messages: list, words: str
):
    with pytest.raises(RequestError, match=words) as refused:
        processor.complete(DRAFT, Inputs(messages=messages))
    assert (refused.value.field, refused.value.code) == ("messages", "too_long")


def test_long_texts_are_tokenized_while_other_threads_run(processor: Processor):
    gaps: list[float] = []
    over = threading.Event()

    def beat() -> None:
        last = time.monotonic()
        while not over.wait(0.002):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=beat)
    thread.start()
    began = time.monotonic()
    ids = processor.token_ids("hello world " * 200_000)
    took = time.monotonic() - began
    over.set()
    thread.join()
    assert ids[: len(ids) // 200_000] == processor.tokenizer.encode("hello world ").ids[: len(ids) // 200_000]
    assert max(gaps) < took / 2


def test_white_space_is_a_text_and_nothing_is_not(processor: Processor):
    assert " " in processor.tokenizer.decode(processor.complete(DRAFT, Inputs(text=" ")).prompt_ids)
    with pytest.raises(RequestError, match="text is empty"):
        processor.complete(DRAFT, Inputs(text=""))


@pytest.mark.hf
def test_the_turn_is_what_hugging_face_renders(processor: Processor, tiny_checkpoint: Path):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tiny_checkpoint / "tokenizer.json"))
    template = (tiny_checkpoint / "chat_template.jinja").read_text()
    content = [{"type": "audio", "audio": "x"}, {"type": "text", "text": "Why <b>&amp;</b>?"}]
    for messages, inputs in (
        ([{"role": "user", "content": content}], ("Why <b>&amp;</b>?", None, 1)),
        ([{"role": "system", "content": "S"}, {"role": "user", "content": "  U\n"}], ("  U\n", "S", 0)),
    ):
        want = theirs.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, tokenize=False)
        assert processor.template.user_turn(*inputs) == want


def test_each_clip_gets_its_own_run_of_placeholders(processor: Processor):
    clips = [audio_file(tone(1.0)), audio_file(tone(2.57))]
    done = processor.complete(DRAFT, Inputs(text="Compare.", audio=clips))
    assert [(clip.frames, clip.tokens) for clip in done.clips] == [(100, 13), (257, 34)]
    ids = processor.config.ids
    assert done.prompt_ids.count(ids.audio) == 13 + 34
    first = done.prompt_ids.index(ids.audio_start)
    assert done.prompt_ids[first : first + 15] == [ids.audio_start] + [ids.audio] * 13 + [ids.audio_end]
    mel = np.frombuffer(done.clips[1].mel, "<f4").reshape(done.clips[1].mel_bins, done.clips[1].frames)
    np.testing.assert_array_equal(mel, log_mel(decode(clips[1], 0, 10).samples, 128))


def test_limits_that_were_not_asked_for_shrink_and_others_are_refused(processor: Processor):
    ids = processor.complete(DRAFT, Inputs(text="Speak.")).prompt_ids
    user = user_tokens(ids, processor.config.ids)
    draft = msgspec.structs.replace(DRAFT, speech=SPEECH)
    done = processor.complete(draft, Inputs(text="Speak.", clamp_frames=True))
    assert done.speech is not None
    assert (done.speech.voice, done.speech.max_frames) == ("ethan", 4096 - 9 - user)
    with pytest.raises(RequestError, match="max_frames is 4096") as caught:
        processor.complete(draft, Inputs(text="Speak."))
    assert caught.value.field == "speech.max_frames"
    long = msgspec.structs.replace(DRAFT, max_tokens=4096)
    assert processor.complete(long, Inputs(text="Speak.", clamp_tokens=True)).max_tokens == 4096 - len(ids)
    with pytest.raises(RequestError, match=f"{len(ids)} prompt tokens leave {4096 - len(ids)} of this server's 4096"):
        processor.complete(long, Inputs(text="Speak."))


def test_limits_that_were_not_asked_for_shrink_to_what_the_pages_hold(processor: Processor):
    small = replace(processor, kv_positions=64)
    draft = msgspec.structs.replace(DRAFT, speech=SPEECH)
    done = small.complete(draft, Inputs(text="Speak.", clamp_tokens=True, clamp_frames=True))
    user = user_tokens(done.prompt_ids, processor.config.ids)
    assert done.max_tokens == 64 - len(done.prompt_ids)
    assert done.speech is not None and done.speech.max_frames == 64 - 9 - user
    assert small.complete(DRAFT, Inputs(text="Speak.")).max_tokens == 256  # the engine says why that is too much
    with pytest.raises(RequestError, match=r"the prompt has \d+ tokens; this server takes 64 tokens") as refused:
        small.complete(DRAFT, Inputs(text="word " * 100, clamp_tokens=True))
    assert refused.value.field == "text"


def test_the_talker_reads_user_turns_only(processor: Processor):
    ids = processor.config.ids
    system, user, assistant = ([ids.im_start, role, 65, ids.im_end] for role in (ids.system, ids.user, ids.assistant))
    assert user_tokens(system + user + assistant + user + [ids.im_start, ids.assistant], ids) == 8
    assert user_tokens([65, 66], ids) == 0


def test_the_longest_clip_fits_its_prompt(processor: Processor):
    assert processor.max_audio_seconds == max_audio_seconds(4096) == 313
    data = audio_file(tone(313.0, 8000), 8000, "FLAC")
    done = processor.complete(DRAFT, Inputs(text="a", audio=[data], clamp_tokens=True))
    assert done.clips[0].tokens == 313 * 13
    assert len(done.prompt_ids) + done.max_tokens == 4096


def test_a_model_without_a_talker_refuses_speech(processor: Processor, tiny_checkpoint: Path):
    data = json.loads((tiny_checkpoint / "config.json").read_text()) | {"enable_audio_output": False}
    mute = Processor.load(tiny_checkpoint, OmniConfig.parse(data), 4096)
    with pytest.raises(RequestError, match="makes no speech") as caught:
        mute.complete(msgspec.structs.replace(DRAFT, speech=SPEECH), Inputs(text="a"))
    assert caught.value.field == "output"


def test_vocab_and_merges_make_the_same_tokenizer_as_one_file(tiny_checkpoint: Path, tmp_path: Path):
    whole = load_tokenizer(tiny_checkpoint)
    model = json.loads((tiny_checkpoint / "tokenizer.json").read_text())["model"]
    copied(tiny_checkpoint, tmp_path, "tokenizer.json")
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {
        str(token): {"content": added.content, "special": added.special}
        for token, added in whole.get_added_tokens_decoder().items()
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    parts = load_tokenizer(tmp_path)
    for text in ("Hello, world! It's 2024.", "  two\n\nlines\t", "<|im_start|>user\nnaïve café 🌊<|im_end|>"):
        assert parts.encode(text).ids == whole.encode(text).ids
        assert parts.decode(whole.encode(text).ids) == whole.decode(whole.encode(text).ids)


@pytest.mark.parametrize("place", ["chat_template.json", "tokenizer_config.json"])
def test_the_template_is_found_in_json_too(tiny_checkpoint: Path, tmp_path: Path, place: str):
    copied(tiny_checkpoint, tmp_path, "chat_template.jinja")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="no chat template"):
        ChatTemplate.load(tmp_path)
    source = (tiny_checkpoint / "chat_template.jinja").read_text()
    old = settings if place == "tokenizer_config.json" else {}
    (tmp_path / place).write_text(json.dumps(old | {"chat_template": source}))
    assert ChatTemplate.load(tmp_path).user_turn("a", None, 1) == ChatTemplate.load(tiny_checkpoint).user_turn(
        "a", None, 1
    )


def test_a_template_cannot_reach_out_of_its_sandbox():
    with pytest.raises(RequestError, match="the chat template refuses this"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).user_turn("a", None, 0)
    with pytest.raises(RequestError, match="only short questions"):
        ChatTemplate("{{ raise_exception('only short questions') }}", {}).user_turn("a", None, 0)
    with pytest.raises(CheckpointError, match="can't be compiled"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("'x' + 5", "can only concatenate str"),
        ("range(10 ** 9) | list", "Range too big"),
        ("(2.0 * messages | length) ** 9999", "Numerical result out of range"),
        ("1 // (messages | length - 1)", "division"),
    ],
)
def test_whatever_a_template_raises_is_the_requests_fault_in_words(expression: str, words: str):
    with pytest.raises(RequestError, match=f"the chat template refuses this: .*{words}") as refused:
        ChatTemplate("{{ " + expression + " }}", {}).user_turn("a", None, 0)
    assert refused.value.code == "template"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "the chat template leaves out what the user says; put message.content into it"),
        ("hello", "the chat template leaves out what the user says; put message.content into it"),
        ("{% for message in messages %}{{ message.role }}{% endfor %}", "leaves out what the user says"),
        ("{{ messages[0].content + 5 }}", "the chat template fails on a user's message: can only concatenate str"),
        ("{{ nothing.of_this }}", "the chat template fails on a user's message: 'nothing' is undefined"),
        ("{% for %}", "the chat template can't be compiled"),
        (b"{{ messages[0].content }} \xe9", "is not UTF-8: 'utf-8' codec can't decode"),
        (None, "can't be read: Is a directory"),
    ],
)
def test_a_template_that_makes_no_prompt_is_refused_with_its_file(
    tiny_checkpoint: Path, tmp_path: Path, source: str | bytes | None, words: str
):
    path = copied(tiny_checkpoint, tmp_path, "chat_template.jinja") / "chat_template.jinja"
    put(path, source)
    with pytest.raises(CheckpointError, match=words) as refused:
        Processor.load(tmp_path, OmniConfig.load(tiny_checkpoint), 4096)
    message = str(refused.value)
    assert message.startswith(str(path)) and "\n" not in message


def test_a_template_that_refuses_a_message_by_a_rule_of_its_own_is_taken(tiny_checkpoint: Path, tmp_path: Path):
    copied(tiny_checkpoint, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only long\nquestions') }}")
    template = ChatTemplate.load(tmp_path)
    with pytest.raises(RequestError, match="the chat template refuses this: only long questions"):
        template.user_turn("a", None, 0)


def test_a_prompt_of_no_tokens_is_refused(processor: Processor):
    bare = replace(processor, template=ChatTemplate("{{ messages[0].content }}", {}))
    with pytest.raises(RequestError, match="messages makes a prompt of no tokens; give some text") as refused:
        bare.complete(DRAFT, Inputs(messages=[{"role": "user", "content": ""}]))
    assert (refused.value.field, refused.value.code) == ("messages", "empty")


def settings_with(folder: Path, changes: dict[str, object]) -> None:
    """Change keys of a folder's `tokenizer_config.json`."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("key", ["bos_token", "eos_token", "pad_token"])
def test_a_special_token_that_is_an_object_reads_as_its_text(tiny_checkpoint: Path, tmp_path: Path, key: str):
    copied(tiny_checkpoint, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ " + key + " }}")
    token = {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False, "normalized": False}
    settings_with(tmp_path, {key: token})
    assert ChatTemplate.load(tmp_path).user_turn("a", None, 0) == "a<|im_end|>"


@pytest.mark.parametrize("token", [5, ["<|im_end|>"], {"lstrip": False}, {"content": 5}])
def test_a_special_token_without_text_is_named(tiny_checkpoint: Path, tmp_path: Path, token: object):
    settings_with(copied(tiny_checkpoint, tmp_path), {"eos_token": token})
    with pytest.raises(CheckpointError) as refused:
        ChatTemplate.load(tmp_path)
    place = f"{tmp_path / 'tokenizer_config.json'}: eos_token"
    assert str(refused.value) == f"{place} must be text, or an object with its text as content, is {token!r}"


def put(path: Path, content: str | bytes | None) -> None:
    """Write a file anew, or make a folder in its place."""
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "preprocessor_config.json", "chat_template.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON: Expecting value"),
        (b'{"a": "\xe9"}', "is not JSON: 'utf-8' codec"),
        ("[" * 100_000, "can't be read: its brackets are nested too deep"),
        ("[]", "must hold an object, holds a list"),
        ('"x"', "must hold an object, holds a str"),
        (None, "can't be read: Is a directory"),
    ],
    ids=["empty", "latin-1", "nested", "a list", "a string", "a folder"],
)
def test_settings_that_cannot_be_read_are_named(
    tiny_checkpoint: Path, tmp_path: Path, name: str, content: str | bytes | None, words: str
):
    leave_out = ["chat_template.jinja"] if name == "chat_template.json" else []
    copied(tiny_checkpoint, tmp_path, *leave_out)
    put(tmp_path / name, content)
    with pytest.raises(CheckpointError) as refused:
        Processor.load(tmp_path, OmniConfig.load(tmp_path), 4096)
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / name} {words}") and "\n" not in message


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("preprocessor_config.json", None, "preprocessor_config.json can't be read"),
        ("preprocessor_config.json", {"feature_size": 80}, "feature_size is 80; only 128 is served"),
        ("preprocessor_config.json", {"feature_size": 128, "dither": 0.1}, "dither is 0.1; only 0.0 is served"),
        ("tokenizer.json", None, "neither tokenizer.json nor vocab.json with merges.txt"),
        ("tokenizer.json", {"model": 5}, "the tokenizer can't be read"),
    ],
)
def test_a_folder_that_does_not_fit_is_told_by_file(
    tiny_checkpoint: Path, tmp_path: Path, name: str, content: dict | None, words: str
):
    copied(tiny_checkpoint, tmp_path, name)
    if content is not None:
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=words):
        Processor.load(tmp_path, OmniConfig.load(tiny_checkpoint), 4096)


SPOKEN_IDS = ["tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id", "user_token_id", "assistant_token_id"]
THINKER_IDS = [f"thinker_config.{name}_token_id" for name in ("audio", "audio_start", "image", "video")]


@pytest.mark.parametrize("key", ["im_start_token_id", "im_end_token_id", *THINKER_IDS, *SPOKEN_IDS])
def test_a_special_id_that_the_tokenizer_gives_to_another_token_is_named(
    tiny_checkpoint: Path, tmp_path: Path, key: str
):
    copied(tiny_checkpoint, tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    *path, name = key.split(".")
    section = data[path[0]] if path else data
    right, section[name] = section[name], 0
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError) as refused:
        Processor.load(tmp_path, OmniConfig.load(tmp_path), 4096)
    start, end = f"{tmp_path / 'config.json'}: {key} is 0, but the tokenizer's ", f" is {right}; make them equal"
    assert str(refused.value).startswith(start) and str(refused.value).endswith(end)
    # A model that never speaks reads none of these.
    silent = OmniConfig.parse(data | {"enable_audio_output": False})
    if key in SPOKEN_IDS:
        Processor.load(tmp_path, silent, 4096)


def test_a_tokenizer_with_other_names_for_its_special_tokens_is_taken(tiny_checkpoint: Path, tmp_path: Path):
    copied(tiny_checkpoint, tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<|audio_pad|>", "<|AUDIO|>"))
    assert Processor.load(tmp_path, OmniConfig.load(tmp_path), 4096).tokenizer.token_to_id("<|AUDIO|>") is not None


def test_the_released_tokenizer_and_settings_are_understood_in_both_layouts(tmp_path: Path):
    source = shared("data", "qwen3omni")
    built = tmp_path / "built"
    script = [sys.executable, str(source / "build_tokenizer.py"), str(source / "qwen.tiktoken"), str(built)]
    subprocess.run(script, check=True, timeout=120)
    for name in ("config.json", "preprocessor_config.json", "chat_template.jinja"):
        shutil.copy(source / name, built / name)
    config = OmniConfig.load(built)
    made = []
    for whole in (True, False):
        if not whole:
            (built / "tokenizer.json").unlink()
        processor = Processor.load(built, config, config.thinker.max_positions)
        done = processor.complete(DRAFT, Inputs(text="Hello world", audio=[audio_file(tone(1.0))]))
        made.append(done.prompt_ids)
    assert made[0] == made[1]
    # <|im_start|> user \n <|audio_start|> 13 x <|audio_pad|> <|audio_end|> Hello world <|im_end|> \n <|im_start|> assistant \n
    pads = [151675] * 13
    assert made[0] == [151644, 872, 198, 151669, *pads, 151670, 9707, 1879, 151645, 198, 151644, 77091, 198]


def test_clips_share_the_seconds_of_one_request_and_no_more_than_those_are_decoded(tiny_checkpoint: Path):
    small = Processor.load(tiny_checkpoint, OmniConfig.load(tiny_checkpoint), 1024)
    minute = audio_file(np.zeros(60 * 16000, np.float32), kind="FLAC")
    asked: list[bool] = []
    with pytest.raises(RequestError) as caught:
        small.complete(DRAFT, Inputs(text="a", audio=[minute] * 50), lambda: bool(asked.append(True)))
    assert (caught.value.field, caught.value.status) == ("audio", 400)
    assert caught.value.message == (
        "audio[1] lasts 60.0 s and the clips before it 60.0 s; this server takes at most 77 s of audio in all"
    )
    assert len(asked) == 2


def test_clips_of_few_milliseconds_share_the_tokens_of_one_request(tiny_checkpoint: Path):
    small = Processor.load(tiny_checkpoint, OmniConfig.load(tiny_checkpoint), 64)
    with pytest.raises(RequestError) as caught:
        small.complete(DRAFT, Inputs(text="a", audio=[audio_file(tone(0.03))] * 1000))
    assert caught.value.message == (
        "audio[0] to audio[63] take 64 tokens; this server takes 64 tokens a request, generated ones included"
    )


def test_work_that_nobody_wants_ends_at_the_next_clip(processor: Processor):
    answers = iter([False, False, True])
    with pytest.raises(Unwanted):
        processor.complete(DRAFT, Inputs(text="a", audio=[audio_file(tone(0.1))] * 9), lambda: next(answers))


def test_audio_settings_that_are_no_object_are_refused(tiny_checkpoint: Path, tmp_path: Path):
    copied(tiny_checkpoint, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"preprocessor_config.json must hold an object, holds a list"):
        Processor.load(tmp_path, OmniConfig.load(tmp_path), 64)
