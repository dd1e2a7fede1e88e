"""The checkpoint's tokenizer and chat template: messages to text, text to token ids. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.errors import CheckpointError, RequestError
from engine.model.config import read_object

# What a word is to Qwen2's tokenizers; needed only for folders that come as vocab.json and merges.txt.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A message as templates know it: `role`, and `content` as a string or as a list of parts.
Message = Mapping[str, object]
# Templates tell audio by its type and by the key; what the key holds, they don't show.
AUDIO_PART = {"type": "audio", "audio": "clip"}
# What a user says to a template that is read, to see that it gets into the prompt.
_PROBE = "walkgateprobe"
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


def _json(path: Path) -> dict[str, Any]:
    """The object of a file, empty without the file; CheckpointError when it can't be read."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}


def _text(path: Path) -> str | None:
    """The text of a file, None without the file; CheckpointError when it can't be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from None


def _special_tokens(path: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """Those of `settings`, read from `path`, that templates may name; each is text, or an object that holds it."""
    found: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "pad_token"):
        token = settings.get(key)
        if not token:
            continue
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            raise CheckpointError(f"{path}: {key} must be text, or an object with its text as content, is {token!r}")
        found[key] = text
    return found


class _Refusal(jinja2.TemplateError):
    """What a template raises on purpose."""


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
        except Exception as error:  # Jinja's own, and what a nesting too deep for Python's compiler raises
            raise CheckpointError(f"the chat template can't be compiled: {_words(error)}") from None

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """Read `chat_template.jinja`, `chat_template.json`, or the entry of `tokenizer_config.json`, in this order.

        CheckpointError names a file that can't be read, or whose template fails or leaves out what a user says.
        """
        plain, boxed, rest = (
            folder / name for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
        )
        settings = _json(rest)
        tokens = _special_tokens(rest, settings)
        source = _text(plain)
        if source is not None:
            return cls._checked(plain, source, tokens)
        for path, found in ((boxed, _json(boxed)), (rest, settings)):
            source = found.get("chat_template")
            if isinstance(source, str):
                return cls._checked(path, source, tokens)
        raise CheckpointError(f"{folder} has no chat template: chat_template.jinja, or chat_template.json")

    @classmethod
    def _checked(cls, path: Path, source: str, tokens: Mapping[str, str]) -> ChatTemplate:
        """The template of `path`, once it has shown that it renders a user's message."""
        try:
            template = cls(source, tokens)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        try:
            shown = template._rendered([{"role": "user", "content": _PROBE}])
        except _Refusal:  # by a rule of its own, which it tells who sends a message that it does not take
            return template
        except Exception as error:
            raise CheckpointError(f"{path}: the chat template fails on a user's message: {_words(error)}") from None
        if _PROBE not in shown:
            raise CheckpointError(
                f"{path}: the chat template leaves out what the user says; put message.content into it"
            )
        return template

    def user_turn(self, text: str, system: str | None, clips: int) -> str:
        """Render one user turn (`clips` audio parts, then the text) and the start of the answer; RequestError if it refuses."""
        audio: list[dict[str, str]] = [AUDIO_PART for _ in range(clips)]
        messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": [*audio, text_part(text)] if clips else text})
        return self.render(messages)

    def render(self, messages: Sequence[Message]) -> str:
        """Render a conversation and the start of the answer; RequestError if the template refuses it."""
        try:
            return self._rendered(messages)
        except Exception as error:  # Jinja's own, and whatever the template's expressions raise
            message = f"the chat template refuses this: {_words(error)}"
            raise RequestError(message, field="text", code="template") from None

    def _rendered(self, messages: Sequence[Message]) -> str:
        return self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._tokens)


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


def _words(error: Exception) -> str:
    """What an error says, on one line; its name if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def _raise(message: str) -> None:
    raise _Refusal(message)
