"""From the fields of an OpenAI body to what the engine is asked: one Request a choice. Runs off the event loop. No torch."""

from __future__ import annotations

import hashlib
import re
import secrets
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

import msgspec

from engine.errors import RequestError
from engine.model.chat import AUDIO_PART, Message, text_part
from engine.model.generation import Generation
from engine.model.processor import Inputs, Processor
from engine.request import Request, Sampling, Speech
from engine.server import openai
from engine.server.fields import from_base64, is_base64, shown
from engine.server.generate import check_ids, either, talker_sampling

_SEEDS = 2**63
# What is repeated has the tokens of what was asked for, and nobody takes two seconds to speak one. Both bounds get this slack,
# and without them a Talker that finds no end would go on to its last position.
_FRAMES_A_TOKEN = 25
_READING_SLACK = 32
# Nobody speaks more tokens a second than audio takes (13); very short clips get a little more.
_TRANSCRIPT_SLACK = 64
_AS_LONG_AS_FITS = 2**31 - 1
# Each costs an object on its way to a byte; base64 has no such cost.
_MOST_ESCAPES = 1 << 20

Unwanted = Callable[[], bool]


@dataclass(slots=True)
class _Clips:
    """The audio files of a conversation in order, and the field that each came in."""

    data: list[bytes] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def add(self, data: bytes, name: str) -> None:
        self.data.append(data)
        self.names.append(name)


def check_model(asked: str, served: Sequence[str]) -> None:
    """RequestError (404) unless the model asked for is one of the names of the served one."""
    if asked not in served:
        message = f"the model {shown(asked)!r} does not exist; this server has {served[0]!r}"
        raise RequestError(message, field="model", code="model_not_found", status=404)


def chat_requests(processor: Processor, fields: openai.ChatFields, unwanted: Unwanted) -> list[Request]:
    """The engine's requests for a chat, one a choice; RequestError names the field and the fix."""
    if fields.speaks and processor.config.talker is None:
        raise RequestError('this model makes no speech; leave "audio" out', field="modalities", code="no_speech")
    clips = _Clips()
    messages = [_message(message, f"messages[{place}]", clips) for place, message in enumerate(fields.messages)]
    asked = fields.max_completion_tokens or fields.max_tokens
    seed = _seed(fields.seed)
    draft = _draft(processor, fields, "chatcmpl", seed, asked or processor.generation.max_new_tokens)
    voice = fields.audio.voice if fields.audio else None
    draft = msgspec.structs.replace(
        draft,
        speech=_speech(fields.speech, voice, processor.generation, seed) if fields.speaks else None,
        logprobs=fields.top_logprobs if fields.logprobs else None,
    )
    inputs = Inputs(
        messages=messages,
        audio=clips.data,
        clamp_tokens=asked is None,
        clamp_frames=fields.speech is None or fields.speech.max_frames is None,
    )
    names = {"text": "messages", "audio": "messages", "max_tokens": fields.length_field, "speech.voice": "audio.voice"}
    with renamed(names, clips.names):
        return _choices(processor.complete(draft, inputs, unwanted), fields.n)


def completion_requests(processor: Processor, fields: openai.CompletionFields, unwanted: Unwanted) -> list[Request]:
    """The engine's requests for completions: `n` for the first prompt, then for the next one."""
    made: list[Request] = []
    draft = _draft(processor, fields, "cmpl", _seed(fields.seed), fields.max_tokens)
    draft = msgspec.structs.replace(draft, logprobs=fields.logprobs)
    clamp = "max_tokens" not in fields.model_fields_set
    for prompt in fields.prompt:
        with renamed({"prompt_token_ids": "prompt"}):
            if isinstance(prompt, str):
                inputs = Inputs(prompt=prompt, clamp_tokens=clamp)
            else:
                inputs = Inputs(prompt_token_ids=prompt, clamp_tokens=clamp)
            made += _choices(processor.complete(draft, inputs, unwanted), fields.n, len(made))
    return made


def speech_request(processor: Processor, fields: openai.SpeechFields, unwanted: Unwanted) -> Request:
    """The engine's request to read `input` aloud: the Thinker repeats it, greedily, and the Talker speaks what it wrote."""
    if processor.config.talker is None:
        raise RequestError("this model makes no speech", field="model", code="no_speech")
    if not fields.input.strip():
        raise RequestError("input has nothing but spaces; send the text to read", field="input", code="empty")
    draft = Request(
        id=f"speech-{uuid.uuid4().hex}",
        prompt_ids=[],
        max_tokens=_AS_LONG_AS_FITS,
        speech=_speech(fields.speech, fields.voice, processor.generation, _seed(None)),
        emit_text=False,
    )
    free = fields.speech is None or fields.speech.max_frames is None
    inputs = Inputs(
        text=f"Read the following text aloud, word for word, and say nothing else:\n{fields.input}",
        clamp_tokens=True,
        clamp_frames=free,
    )
    with renamed({"text": "input", "speech.voice": "voice"}):
        done = processor.complete(draft, inputs, unwanted)
    tokens = len(processor.token_ids(fields.input))
    if done.max_tokens <= tokens:
        raise RequestError(
            f"input has {tokens} tokens, and after reading them {done.max_tokens} are left to repeat them; "
            f"send less than half of the model's {processor.max_model_len} tokens at once",
            field="input",
            code="too_long",
        )
    speech = done.speech
    if free and speech is not None:
        frames = min(speech.max_frames, _FRAMES_A_TOKEN * tokens + _READING_SLACK)
        speech = msgspec.structs.replace(speech, max_frames=frames)
    return msgspec.structs.replace(done, max_tokens=min(done.max_tokens, tokens + _READING_SLACK), speech=speech)


def transcription_request(
    processor: Processor, fields: openai.TranscriptionFields, file: bytes, unwanted: Unwanted
) -> Request:
    """The engine's request to write down what is said in `file`."""
    seed = _seed(None)
    draft = Request(
        id=f"transcription-{uuid.uuid4().hex}",
        prompt_ids=[],
        max_tokens=_AS_LONG_AS_FITS,
        sampling=Sampling(temperature=fields.temperature, seed=seed),
    )
    inputs = Inputs(text=_instruction(fields), audio=[file], clamp_tokens=True)
    with renamed({"text": "prompt"}, ["file"]):
        done = processor.complete(draft, inputs, unwanted)
    return msgspec.structs.replace(done, max_tokens=min(done.max_tokens, done.clips[0].tokens + _TRANSCRIPT_SLACK))


def _instruction(fields: openai.TranscriptionFields) -> str:
    language = f" {openai.LANGUAGES[fields.language]}" if fields.language else ""
    hint = f" It may hold these words: {fields.prompt}" if fields.prompt else ""
    return f"Transcribe the{language} audio into text.{hint}"


def _message(message: openai.Message, name: str, clips: _Clips) -> Message:
    role = "system" if message.role == "developer" else message.role
    if message.content is None:
        assert message.audio is not None
        return {"role": role, "content": message.audio.transcript}
    if len(message.content) == 1 and message.content[0].text is not None:
        return {"role": role, "content": message.content[0].text}
    return {
        "role": role,
        "content": [_part(part, f"{name}.content[{i}]", clips) for i, part in enumerate(message.content)],
    }


def _part(part: openai.Part, name: str, clips: _Clips) -> dict[str, str]:
    if part.text is not None:
        return text_part(part.text)
    if part.input_audio is not None:
        clips.add(from_base64(part.input_audio.data, f"{name}.input_audio.data"), f"{name}.input_audio")
    elif part.audio_url is not None:
        clips.add(_from_url(part.audio_url.url, f"{name}.audio_url.url"), f"{name}.audio_url")
    return AUDIO_PART


def _from_url(url: str, name: str) -> bytes:
    """The data of a `data:` URL; a server that fetched other addresses could be sent anywhere."""
    head, comma, rest = url.partition(",")
    if not (head[:5].lower() == "data:" and comma):
        raise RequestError(f"{name} must be a data: URL, with the audio in it; this server fetches nothing", field=name)
    kind = head[5:].partition(";")[0].lower()
    if kind and not kind.startswith("audio/") and kind != "application/octet-stream":
        raise RequestError(f"{name} says that it is {shown(kind)}; audio/… is served", field=name)
    if is_base64(head):
        return from_base64(url, name)
    if (escapes := rest.count("%")) > _MOST_ESCAPES:
        message = f"{name} has {escapes} bytes as %XX, of which this server reads {_MOST_ESCAPES}; send base64"
        raise RequestError(message, field=name, code="too_large")
    return unquote_to_bytes(rest)


def _draft(processor: Processor, fields: openai.TextFields, kind: str, seed: int, max_tokens: int) -> Request:
    vocab = processor.config.thinker.vocab
    bias = {int(token): value for token, value in fields.logit_bias.items()}
    check_ids("logit_bias", bias, vocab)
    check_ids("stop_token_ids", fields.stop_token_ids, vocab)
    return Request(
        id=f"{kind}-{uuid.uuid4().hex}",
        prompt_ids=[],
        max_tokens=max_tokens,
        sampling=_sampling(fields, processor.generation, bias, seed),
        ignore_eos=fields.ignore_eos,
        stop=fields.stop,
        stop_ids=fields.stop_token_ids,
    )


def _sampling(fields: openai.TextFields, default: Generation, bias: dict[int, float], seed: int) -> Sampling:
    return Sampling(
        temperature=either(fields.temperature, default.text_temperature),
        top_k=max(either(fields.top_k, default.top_k), 0),
        top_p=either(fields.top_p, default.top_p),
        min_p=either(fields.min_p, default.min_p),
        repetition_penalty=either(fields.repetition_penalty, default.repetition_penalty),
        frequency_penalty=fields.frequency_penalty,
        presence_penalty=fields.presence_penalty,
        logit_bias=bias,
        seed=seed,
    )


def _speech(fields: openai.TalkerFields | None, voice: str | None, default: Generation, seed: int) -> Speech:
    fields = fields or openai.TalkerFields()
    return Speech(
        voice=either(voice, openai.DEFAULT_VOICE),
        max_frames=either(fields.max_frames, default.talker_max_new_tokens),
        sampling=talker_sampling(fields, default.speech(either(fields.seed, seed))),
        ignore_eos=fields.ignore_eos,
    )


def _seed(asked: int | None) -> int:
    """A seed of the engine's: of 63 bits, and another one each time if none was asked for."""
    return secrets.randbelow(_SEEDS) if asked is None else asked % _SEEDS


def choice_seed(seed: int, place: int) -> int:
    """The seed of choice number `place`: the first one is what a request for a single choice gives."""
    if place == 0:
        return seed
    digest = hashlib.sha256(f"{seed} {place}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _SEEDS


def _choices(request: Request, n: int, first: int = 0) -> list[Request]:
    return [_choice(request, place, first + place) for place in range(n)]


def _choice(request: Request, place: int, number: int) -> Request:
    def seeded(sampling: Sampling) -> Sampling:
        return msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, place))

    speech = request.speech
    if speech is not None:
        speech = msgspec.structs.replace(speech, sampling=seeded(speech.sampling))
    return msgspec.structs.replace(
        request, id=f"{request.id}-{number}", sampling=seeded(request.sampling), speech=speech
    )


@contextmanager
def renamed(names: Mapping[str, str], clips: Sequence[str] = ()) -> Iterator[None]:
    """Let a RequestError name fields as the client does: `names` by the processor's names, `clips` by their place."""
    try:
        yield
    except RequestError as error:
        raise _renamed(error, names, clips) from None


def _renamed(error: RequestError, names: Mapping[str, str], clips: Sequence[str]) -> RequestError:
    message, name = error.message, error.field or ""
    found = re.match(r"audio\[(\d+)\]", message)
    if found and clips:
        name = clips[int(found[1])]
        message = re.sub(r"audio\[(\d+)\]", lambda match: clips[int(match[1])], message)
    elif name in names:
        name, old = names[name], name
        message = re.sub(rf"^{re.escape(old)}\b", name, message)
    return RequestError(message, field=name or None, code=error.code, status=error.status)
