"""The checkpoint's tokenizer and chat template: messages to text, text to token ids. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.errors import CheckpointError, RequestError

# What a word is to Qwen2's tokenizers; needed only for folders that come as vocab.json and merges.txt.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A message as templates know it: `role`, and `content` as a string or as a list of parts.
Message = Mapping[str, object]
# Templates tell audio by its type and by the key; what the key holds, they don't show.
AUDIO_PART = {"type": "audio", "audio": "clip"}
_ADDED_KEYS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read `tokenizer.json`, or `vocab.json` and `merges.txt`; CheckpointError without either, or if it isn't byte-level."""
    whole = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(whole)) if whole.is_file() else _from_parts(folder)
    except Exception as error:  # tokenizers raises bare Exception for a file it can't read
        raise CheckpointError(f"{folder}: the tokenizer can't be read: {error}") from None
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise CheckpointError(f"{folder}: only byte-level tokenizers are served")
    return tokenizer


def _from_parts(folder: Path) -> Tokenizer:
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocab.is_file() and merges.is_file()):
        raise CheckpointError("it has neither tokenizer.json nor vocab.json with merges.txt")
    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    # The split above decides where words end, so the byte-level step must not split or pad again.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = _json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    for token, entry in sorted(added.items(), key=lambda item: int(item[0])):
        content = str(entry["content"])
        flags = {key: bool(entry[key]) for key in _ADDED_KEYS if key in entry}
        tokenizer.add_tokens([AddedToken(content, **flags)])
        if tokenizer.token_to_id(content) != int(token):
            found = tokenizer.token_to_id(content)
            raise CheckpointError(f"added token {content!r} gets id {found}, the file says {token}")
    return tokenizer


def _json(path: Path) -> dict[str, dict[str, dict[str, object]]]:
    if not path.is_file():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    return data if isinstance(data, dict) else {}


class ChatTemplate:
    """The checkpoint's own template, run in Jinja's sandbox."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._tokens = dict(tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template can't be compiled: {error}") from None

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """Read `chat_template.jinja`, `chat_template.json`, or the entry of `tokenizer_config.json`, in this order."""
        settings = _json(folder / "tokenizer_config.json")
        tokens = {key: str(settings[key]) for key in ("bos_token", "eos_token", "pad_token") if settings.get(key)}
        plain = folder / "chat_template.jinja"
        if plain.is_file():
            return cls(plain.read_text(encoding="utf-8"), tokens)
        for found in (_json(folder / "chat_template.json"), settings):
            source = found.get("chat_template")
            if isinstance(source, str):
                return cls(source, tokens)
        raise CheckpointError(f"{folder} has no chat template: chat_template.jinja, or chat_template.json")

    def user_turn(self, text: str, system: str | None, clips: int) -> str:
        """Render one user turn (`clips` audio parts, then the text) and the start of the answer; RequestError if it refuses."""
        audio: list[dict[str, str]] = [AUDIO_PART for _ in range(clips)]
        messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": [*audio, text_part(text)] if clips else text})
        return self.render(messages)

    def render(self, messages: Sequence[Message]) -> str:
        """Render a conversation and the start of the answer; RequestError if the template refuses it."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._tokens)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses this: {error}", field="text", code="template") from None


def message_texts(message: Message) -> Iterator[str]:
    """The texts that a message holds."""
    content = message["content"]
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content if "text" in part)


def message_parts(message: Message) -> int:
    """How many parts a message holds; a plain string is one."""
    content = message["content"]
    return max(len(content), 1) if isinstance(content, list) else 1


def text_part(text: str) -> dict[str, str]:
    """A content part that holds text."""
    return {"type": "text", "text": text}


def _to_json(value: object, indent: int | None = None) -> str:
    """As Hugging Face's templates expect it: not escaped for HTML, which Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
