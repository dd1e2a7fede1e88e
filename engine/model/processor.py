"""What a client sends to what the engine runs: text or ids, and audio files, to prompt ids, clips and checked limits.

Runs in the front process, off its event loop. No torch. Every fault is a RequestError that names the field and the fix.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from engine.detokenize import TokenBytes
from engine.errors import CheckpointError, RequestError
from engine.model.chat import ChatTemplate, Message, load_tokenizer, message_parts, message_texts
from engine.model.clips import HOP, SAMPLE_RATE, WINDOW, Sound, decode, log_mel
from engine.model.config import OmniConfig, SpecialIds, read_object
from engine.model.generation import Generation
from engine.model.positions import TOKENS_PER_CHUNK, audio_tokens
from engine.request import Clip, Request, Speech

# What a prompt of the shortest kind holds beside its audio: markers of the turns, and one token to generate.
PROMPT_OVERHEAD = 16
# Rows that open the Talker's answer, after the user turns that it reads.
TALKER_OPENING = 9


class Unwanted(Exception):
    """Nobody waits for the request any more, so the work on it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The prompt as it was sent, in one of four forms, and its audio files in order.

    `text` is one user turn, after `system` if that is given; `messages` is a whole conversation; `prompt` is text, and
    `prompt_token_ids` are ids, that no chat template is put around. `clamp_tokens` and `clamp_frames` say that a limit was not
    asked for, so it may shrink.
    """

    text: str | None = None
    system: str | None = None
    messages: Sequence[Message] | None = None
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    audio: Sequence[bytes] = ()
    clamp_tokens: bool = False
    clamp_frames: bool = False

    @property
    def prompt_field(self) -> str:
        """The name of the field that the prompt came in."""
        forms = {"text": self.text, "messages": self.messages, "prompt": self.prompt}
        return next((name for name, value in forms.items() if value is not None), "prompt_token_ids")

    def texts(self) -> Iterator[tuple[str, str]]:
        """Every text of the prompt, with the name of its field."""
        given = {"text": self.text, "system": self.system, "prompt": self.prompt}
        yield from ((name, text) for name, text in given.items() if text is not None)
        for message in self.messages or ():
            yield from (("messages", text) for text in message_texts(message))


@dataclass(frozen=True, slots=True)
class Processor:
    """A model's tokenizer, chat template, sampling defaults and limits.

    `max_model_len` counts prompt and generated tokens of one request. `audio_limit` are the most seconds of audio of one
    request, where fewer than fit are wanted, and `kv_positions` what the engine's KV pages hold of each component, once known.
    """

    config: OmniConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    token_bytes: TokenBytes
    max_model_len: int
    longest_token: int
    audio_limit: int | None = None
    generation: Generation = field(default_factory=Generation)
    kv_positions: int = sys.maxsize

    @classmethod
    def load(cls, folder: Path, config: OmniConfig, max_model_len: int, audio_limit: int | None = None) -> Processor:
        """Read tokenizer, template and audio settings of a model folder; CheckpointError names what doesn't fit."""
        _check_mel(folder / "preprocessor_config.json", config.audio.mel_bins)
        tokenizer = load_tokenizer(folder)
        _check_ids(folder / "config.json", tokenizer, config)
        longest = max(map(len, tokenizer.get_vocab()))
        template, token_bytes = ChatTemplate.load(folder), TokenBytes(tokenizer)
        generation = Generation.load(folder)
        return cls(config, tokenizer, template, token_bytes, max_model_len, longest, audio_limit, generation)

    @property
    def max_audio_seconds(self) -> int:
        """The most audio of one request, in whole seconds: what can fit a prompt, or less where less is wanted."""
        return min(max_audio_seconds(self.max_model_len), self.audio_limit or sys.maxsize)

    def complete(self, draft: Request, inputs: Inputs, unwanted: Callable[[], bool] = lambda: False) -> Request:
        """Return `draft` with its prompt ids, clips and limits filled in; RequestError when it can't be served.

        `unwanted` is asked before each clip; once it says True, Unwanted is raised.
        """
        clips = self._clips(inputs.audio, unwanted)
        ids = self._expand(self._prompt(inputs), clips, inputs.prompt_field)
        tokens = self._max_tokens(len(ids), draft.max_tokens, inputs)
        speech = None if draft.speech is None else self._speech(draft.speech, ids, inputs.clamp_frames)
        return msgspec.structs.replace(draft, prompt_ids=ids, clips=clips, max_tokens=tokens, speech=speech)

    def _clips(self, files: Sequence[bytes], unwanted: Callable[[], bool]) -> list[Clip]:
        """Decode clips for as long as they fit the model together: a small body can unpack to any amount of sound."""
        clips: list[Clip] = []
        seconds, tokens = 0.0, 0
        for place, data in enumerate(files):
            if unwanted():
                raise Unwanted
            sound = decode(data, place, self.max_audio_seconds, seconds)
            seconds += sound.seconds
            tokens += audio_tokens(len(sound.samples) // HOP)
            if tokens >= self.max_model_len:
                what = (
                    f"audio[0] to audio[{place}] take {tokens} tokens" if place else f"audio[0] takes {tokens} tokens"
                )
                raise _too_long("audio", what, self.max_model_len)
            clips.append(self._clip(sound))
        return clips

    def _clip(self, sound: Sound) -> Clip:
        mel = log_mel(sound.samples, self.config.audio.mel_bins)
        frames = mel.shape[1]
        return Clip(
            mel=mel.astype("<f4").tobytes(),
            mel_bins=mel.shape[0],
            frames=frames,
            tokens=audio_tokens(frames),
            seconds=sound.seconds,
        )

    def _prompt(self, inputs: Inputs) -> list[int]:
        """Token ids with one placeholder run a clip."""
        if inputs.prompt_field == "prompt_token_ids":
            return self._given(inputs.prompt_token_ids or ())
        self._check_size(inputs)
        rendered = self._rendered(inputs)
        name = inputs.prompt_field
        self._check_characters(name, len(rendered))
        ids = self.token_ids(rendered)
        if not ids:  # a template may render nothing of a conversation
            raise RequestError(f"{name} makes a prompt of no tokens; give some text", field=name, code="empty")
        return ids

    def token_ids(self, text: str) -> list[int]:
        """The ids of `text`, special tokens in it included."""
        # Only the batch call lets other threads run meanwhile.
        return list(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _check_size(self, inputs: Inputs) -> None:
        """Refuse what is so long that neither template nor tokenizer need be asked."""
        lengths: dict[str, int] = {}
        for name, text in inputs.texts():
            lengths[name] = lengths.get(name, 0) + len(text)
        for name, length in lengths.items():
            self._check_characters(name, length)
        # A message costs its markers, and a part that is worth sending a token.
        parts = sum(map(message_parts, inputs.messages or ()))
        if parts > self.max_model_len:
            raise _too_long("messages", f"messages has {parts} messages and parts", self.max_model_len)

    def _check_characters(self, name: str, length: int) -> None:
        if length > self.max_model_len * self.longest_token:
            raise _too_long(name, f"{name} has {length} characters", self.max_model_len)

    def _rendered(self, inputs: Inputs) -> str:
        if inputs.messages is not None:
            return self.template.render(inputs.messages)
        if inputs.prompt is not None:
            if not inputs.prompt:
                raise RequestError("prompt is empty; give at least one character", field="prompt", code="empty")
            return inputs.prompt
        text = inputs.text or ""
        if not (text or inputs.audio):
            raise RequestError("text is empty; write what the user says, or send audio", field="text", code="empty")
        return self.template.user_turn(text, inputs.system, len(inputs.audio))

    def _given(self, ids: Sequence[int]) -> list[int]:
        if not ids:
            raise RequestError(
                "prompt_token_ids is empty; give at least one id", field="prompt_token_ids", code="empty"
            )
        vocab = self.config.thinker.vocab
        for place, token in enumerate(ids):
            if not 0 <= token < vocab:
                message = f"prompt_token_ids[{place}] is {token}; ids of this model are 0 to {vocab - 1}"
                raise RequestError(message, field="prompt_token_ids", code="out_of_vocabulary")
        return list(ids)

    def _expand(self, ids: list[int], clips: Sequence[Clip], name: str) -> list[int]:
        """Give each clip its run of placeholders: a run of one grows, a run of the clip's own length stays."""
        special = self.config.ids
        if any(token in (special.image, special.video) for token in ids):
            raise RequestError(
                f"{name} holds an image or video placeholder; image and video input is not served yet",
                field=name,
                code="not_served",
            )
        runs = [(token, len(list(same))) for token, same in groupby(ids)]
        found = sum(token == special.audio for token, _ in runs)
        if found != len(clips):
            message = f"{name} has {_count(found, 'run')} of the audio placeholder (id {special.audio}), "
            raise RequestError(
                f"{message}and {_count(len(clips), 'clip')} came; send as many", field=name, code="audio_count"
            )
        waiting = iter(enumerate(clips))
        expanded: list[int] = []
        for token, length in runs:
            expanded += [token] * (_run_length(length, *next(waiting), name) if token == special.audio else length)
        return expanded

    def _max_tokens(self, prompt: int, wanted: int, inputs: Inputs) -> int:
        longest = min(self.max_model_len, self.kv_positions)
        if prompt >= longest:
            name = "audio" if inputs.audio else inputs.prompt_field
            raise _too_long(name, f"the prompt has {prompt} tokens", longest)
        if inputs.clamp_tokens:
            return min(wanted, longest - prompt)
        room = self.max_model_len - prompt
        if wanted > room:
            raise RequestError(
                f"max_tokens is {wanted}, but {prompt} prompt tokens leave {room} of this server's {self.max_model_len}",
                field="max_tokens",
                code="too_long",
            )
        return wanted

    def _speech(self, speech: Speech, ids: Sequence[int], clamp: bool) -> Speech:
        talker = self.config.talker
        if talker is None:
            raise RequestError(
                'this model makes no speech; leave "audio" out of output', field="output", code="no_speech"
            )
        voice = speech.voice.lower()
        if voice not in talker.speakers:
            known = ", ".join(sorted(talker.speakers))
            raise RequestError(
                f"voice {speech.voice!r} is not one of {known}", field="speech.voice", code="unknown_voice"
            )
        positions = talker.stack.max_positions
        rows = TALKER_OPENING + user_tokens(ids, self.config.ids)
        room = positions - rows
        if room < 1 or (speech.max_frames > room and not clamp):
            raise RequestError(
                f"max_frames is {speech.max_frames}, but the prompt leaves {max(room, 0)} of the Talker's "
                f"{positions} positions",
                field="speech.max_frames",
                code="too_long",
            )
        most = min(room, max(self.kv_positions - rows, 1)) if clamp else room
        return msgspec.structs.replace(speech, voice=voice, max_frames=min(speech.max_frames, most))


def max_audio_seconds(max_model_len: int) -> int:
    """The longest clip, in whole seconds, that fits a request of `max_model_len` tokens."""
    return max(1, (max_model_len - PROMPT_OVERHEAD) // TOKENS_PER_CHUNK)


def user_tokens(ids: Sequence[int], special: SpecialIds) -> int:
    """Count the tokens of user turns, markers included: the part of a prompt that the Talker reads."""
    count, inside = 0, False
    for place, token in enumerate(ids):
        if token == special.im_start:
            inside = place + 1 < len(ids) and ids[place + 1] == special.user
        count += inside
    return count


def _run_length(length: int, place: int, clip: Clip, name: str) -> int:
    if length not in (1, clip.tokens):
        raise RequestError(
            f"{name}: run {place} of the audio placeholder has {length} tokens; audio[{place}] takes {clip.tokens} (send 1, "
            f"or exactly that many)",
            field=name,
            code="audio_count",
        )
    return clip.tokens


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _too_long(name: str, what: str, limit: int) -> RequestError:
    return RequestError(
        f"{what}; this server takes {limit} tokens a request, generated ones included", field=name, code="too_long"
    )


def _check_ids(path: Path, tokenizer: Tokenizer, config: OmniConfig) -> None:
    """Refuse ids that the tokenizer gives to other tokens: turns would not end, clips and speech not be found in a prompt.

    A token that the tokenizer lacks by its released name may have another one here.
    """
    ids = config.ids
    named = {
        "im_start_token_id": (ids.im_start, "<|im_start|>"),
        "im_end_token_id": (ids.im_end, "<|im_end|>"),
        "thinker_config.audio_token_id": (ids.audio, "<|audio_pad|>"),
        "thinker_config.audio_start_token_id": (ids.audio_start, "<|audio_start|>"),
        "thinker_config.image_token_id": (ids.image, "<|image_pad|>"),
        "thinker_config.video_token_id": (ids.video, "<|video_pad|>"),
    }
    if config.talker is not None:
        named |= {
            "tts_pad_token_id": (ids.tts_pad, "<tts_pad>"),
            "tts_bos_token_id": (ids.tts_bos, "<tts_text_bos>"),
            "tts_eos_token_id": (ids.tts_eos, "<tts_text_eod>"),
            "user_token_id": (ids.user, "user"),
            "assistant_token_id": (ids.assistant, "assistant"),
        }
    for key, (token, text) in named.items():
        # As a turn begins; a role that takes several tokens has no id of its own.
        found = tokenizer.encode(f"{text}\n", add_special_tokens=False).ids[:-1]
        if len(found) == 1 and found[0] != token:
            raise CheckpointError(
                f"{path}: {key} is {token}, but the tokenizer's {text} is {found[0]}; make them equal"
            )


def _check_mel(path: Path, mel_bins: int) -> None:
    """Refuse a checkpoint whose audio was prepared in another way than `log_mel` does it."""
    try:
        found = read_object(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from None
    wanted = {"feature_size": mel_bins, "sampling_rate": SAMPLE_RATE, "n_fft": WINDOW, "hop_length": HOP, "dither": 0.0}
    for key, value in wanted.items():
        if found.get(key, value) != value:
            raise CheckpointError(f"{path}: {key} is {found[key]!r}; only {value!r} is served")
