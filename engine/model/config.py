"""What `config.json` says about a model, as frozen values. Reads and checks it; no torch, no tensors, no defaults.

Every key that decides a shape or a result must be present: the classes of other libraries carry defaults that are not the
released values, so an absent key is an error that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine.errors import CheckpointError

DTYPES = ("float32", "bfloat16", "float16")
# Half a chunk's mel frames: a prompt has 13 placeholders for each 100 frames, and only this width gives as many rows.
AUDIO_WINDOW = 50
# Every layer, expert and code group has tensors of its own, all of which are listed before the first is read.
MOST_LAYERS, MOST_EXPERTS, MOST_GROUPS = 512, 1024, 256
# Frames that every stream keeps in each layer of the vocoder; positions that KV pages and tables are made for.
MOST_FRAMES, MOST_POSITIONS = 4096, 2**24
MOST = 2**31 - 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StackConfig:
    """A stack of attention and expert layers. `shared_inter` is 0 without a shared expert; `eps` is that of every norm."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    norm_topk: bool
    moe_inter: int
    shared_inter: int
    eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    max_positions: int


@dataclass(frozen=True, slots=True)
class AudioConfig:
    """The audio encoder. A chunk is 2 * `window` mel frames; attention windows are `window_infer` mel frames long."""

    mel_bins: int
    hidden: int
    layers: int
    heads: int
    inter: int
    channels: int
    out: int
    window: int
    window_infer: int
    max_positions: int


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision encoder, for shapes and positions only. `table` counts learned positions, `deepstack` names blocks."""

    depth: int
    hidden: int
    inter: int
    heads: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int
    out: int
    table: int
    deepstack: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """The code predictor: dense layers that fill `groups` - 1 code groups of `vocab` codes each."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    groups: int
    eps: float
    rope_theta: float


@dataclass(frozen=True, slots=True)
class CodecIds:
    """Special ids of the Talker's own vocabulary."""

    pad: int
    bos: int
    eos: int
    nothink: int
    think_bos: int
    think_eos: int


@dataclass(frozen=True, slots=True)
class TalkerConfig:
    """The Talker: its stack, its projections from the Thinker (inner width `proj_inter`) and its special ids.

    `accept_layer` k means the Thinker's output after layer index k - 1; `speakers` maps lower-case names to codec ids.
    """

    stack: StackConfig
    predictor: PredictorConfig
    codec: CodecIds
    speakers: Mapping[str, int]
    accept_layer: int
    thinker_hidden: int
    proj_inter: int
    groups: int


@dataclass(frozen=True, slots=True)
class Code2WavConfig:
    """The vocoder. One frame of `quantizers` codes becomes prod(ratios) * prod(rates) samples; `window` counts frames."""

    codebook: int
    quantizers: int
    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    decoder_dim: int
    rates: tuple[int, ...]
    ratios: tuple[int, ...]
    eps: float
    rope_theta: float


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Special ids of the Thinker's vocabulary; `audio`, `image` and `video` are the placeholders of media rows."""

    im_start: int
    im_end: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    system: int
    user: int
    assistant: int
    audio: int
    audio_start: int
    audio_end: int
    image: int
    video: int
    vision_start: int
    vision_end: int


@dataclass(frozen=True, slots=True)
class OmniConfig:
    """A whole model. `talker` and `code2wav` are None when the checkpoint makes text only.

    `positions_per_second` places video frames in time; `dtype` is the dtype that the checkpoint was saved in, as a word.
    """

    thinker: StackConfig
    audio: AudioConfig
    vision: VisionConfig
    talker: TalkerConfig | None
    code2wav: Code2WavConfig | None
    ids: SpecialIds
    positions_per_second: int
    dtype: str

    @property
    def has_talker(self) -> bool:
        """Whether the model can speak."""
        return self.talker is not None

    @property
    def predictor(self) -> PredictorConfig | None:
        """The code predictor, None when the model can't speak."""
        return None if self.talker is None else self.talker.predictor

    @property
    def speakers(self) -> Mapping[str, int]:
        """Codec ids by lower-case voice name; empty when the model can't speak."""
        return {} if self.talker is None else self.talker.speakers

    @classmethod
    def load(cls, folder: Path) -> OmniConfig:
        """Read `config.json` of a model folder; CheckpointError when it is missing, not JSON, or incomplete."""
        path = folder / "config.json"
        try:
            data = read_object(path)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} has no config.json; name a model folder") from None
        try:
            return cls.parse(data)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(path.name, str(path), 1)) from None

    @classmethod
    def parse(cls, data: Mapping[str, object]) -> OmniConfig:
        """Check a parsed `config.json`; CheckpointError names the dotted key that is absent or can't be served."""
        root = _Section(data, "")
        root.only("model_type", "qwen3_omni_moe")
        thinker = root.section("thinker_config")
        speech = root.section("talker_config") if root.flag("enable_audio_output") else None
        stack = _stack(thinker.section("text_config"))
        talker = None if speech is None else _talker(speech, stack.layers)
        wave = None if speech is None else _code2wav(root.section("code2wav_config"))
        if talker is not None and wave is not None:
            _check_groups(talker, wave)
        return cls(
            thinker=stack,
            audio=_audio(thinker.section("audio_config")),
            vision=_vision(thinker.section("vision_config")),
            talker=talker,
            code2wav=wave,
            ids=_ids(root, thinker, stack.vocab),
            positions_per_second=thinker.positive("position_id_per_seconds"),
            dtype=_dtype(root, thinker),
        )


def read_object(path: Path) -> dict[str, object]:
    """Read a JSON file that holds an object; CheckpointError names what it is instead, FileNotFoundError when it is missing."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path} can't be read: its brackets are nested too deep") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold an object, holds a {type(data).__name__}")
    return data


class _Section:
    """One object of the file and its dotted place in it."""

    def __init__(self, data: Mapping[str, object], place: str) -> None:
        self.data = data
        self.place = place

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def dotted(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def _get(self, key: str, accept: Callable[[object], bool], convert: Callable[[object], T], kind: str) -> T:
        if key not in self:
            raise CheckpointError(f"config.json lacks {self.dotted(key)}; there is no default for it, add it")
        value = self.data[key]
        if not accept(value):
            raise CheckpointError(f"config.json: {self.dotted(key)} must be {kind}, is {value!r}")
        return convert(value)

    def _integer(self, key: str) -> int:
        return self._get(key, _is_whole, lambda value: int(str(value)), "a whole number")

    def whole(self, key: str) -> int:
        return self.between(key, -MOST, MOST)

    def at_least(self, key: str, least: int, most: int = MOST) -> int:
        value = self._integer(key)
        for wrong, bound in ((value < least, f"at least {least}"), (value > most, f"at most {most}")):
            if wrong:
                raise CheckpointError(f"config.json: {self.dotted(key)} must be {bound}, is {value}")
        return value

    def positive(self, key: str, most: int = MOST) -> int:
        """A size or a count, of which there can't be none."""
        return self.at_least(key, 1, most)

    def between(self, key: str, least: int, most: int) -> int:
        value = self._integer(key)
        if not least <= value <= most:
            raise CheckpointError(f"config.json: {self.dotted(key)} must be from {least} to {most}, is {value}")
        return value

    def divisor(self, key: str, total: int, what: str) -> int:
        """A count that shares `total`, which is called `what`, out evenly."""
        value = self.positive(key)
        if total % value:
            raise CheckpointError(f"config.json: {self.dotted(key)} must divide {what} ({total}), is {value}")
        return value

    def token(self, key: str, vocab: int) -> int:
        """An id of a vocabulary of `vocab`."""
        return self.between(key, 0, vocab - 1)

    def number(self, key: str) -> float:
        """A finite number: Python's JSON reads NaN and Infinity too."""
        value = self._get(key, _is_number, lambda value: float(str(value)), "a number")
        if not math.isfinite(value):
            raise CheckpointError(f"config.json: {self.dotted(key)} must be a finite number, is {value}")
        return value

    def base(self, key: str) -> float:
        """The base of rotary positions."""
        value = self.number(key)
        if value <= 0:
            raise CheckpointError(f"config.json: {self.dotted(key)} must be above 0, is {value}")
        return value

    def epsilon(self, key: str) -> float:
        """What a norm adds to a mean of squares."""
        value = self.number(key)
        if value < 0:
            raise CheckpointError(f"config.json: {self.dotted(key)} must be at least 0, is {value}")
        return value

    def flag(self, key: str) -> bool:
        return self._get(key, lambda value: isinstance(value, bool), bool, "true or false")

    def wholes(self, key: str) -> tuple[int, ...]:
        return self._get(key, _is_wholes, _as_wholes, "a list of whole numbers")

    def positives(self, key: str) -> tuple[int, ...]:
        values, place = self.wholes(key), self.dotted(key)
        if not values or min(values) < 1:
            raise CheckpointError(f"config.json: {place} must be whole numbers of at least 1, is {list(values)}")
        if max(values) > MOST:
            raise CheckpointError(f"config.json: {place} must be whole numbers of at most {MOST}, is {list(values)}")
        return values

    def tokens(self, key: str, vocab: int) -> dict[str, int]:
        """An object of such ids, at least one."""
        section = self.section(key)
        if not section.data:
            raise CheckpointError(f"config.json: {self.dotted(key)} is empty; name at least one")
        return {name: section.token(name, vocab) for name in section.data}

    def section(self, key: str) -> _Section:
        data = self._get(key, lambda value: isinstance(value, dict), _as_object, "an object")
        return _Section(data, self.dotted(key))

    def only(self, key: str, *served: object) -> None:
        """Refuse a value that the engine can't serve. An absent key means the first of `served`."""
        if key in self and self.data[key] not in served:
            *rest, last = map(repr, served)
            which = f"{', '.join(rest)} and {last} are" if rest else f"{last} is"
            raise CheckpointError(f"config.json: {self.dotted(key)} is {self.data[key]!r}; only {which} served")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_wholes(value: object) -> bool:
    return isinstance(value, list | tuple) and all(_is_whole(item) for item in value)


def _as_wholes(value: object) -> tuple[int, ...]:
    assert isinstance(value, list | tuple)
    return tuple(value)


def _as_object(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value


def _dtype(root: _Section, thinker: _Section) -> str:
    for section in (root, thinker):
        for key in ("dtype", "torch_dtype"):
            if key in section:
                section.only(key, *DTYPES)
                return str(section.data[key])
    raise CheckpointError(f"config.json lacks dtype; add one of {', '.join(DTYPES)}")


def _rope(section: _Section) -> tuple[float, _Section]:
    """Base and rope object, from `rope_parameters` or from `rope_theta` with `rope_scaling` (which may be absent)."""
    if "rope_parameters" in section:
        rope = section.section("rope_parameters")
        theta = rope.base("rope_theta")
    else:
        theta = section.base("rope_theta")
        rope = section.section("rope_scaling") if "rope_scaling" in section else _Section({}, section.place)
    rope.only("rope_type", "default")
    return theta, rope


def _mrope(section: _Section) -> tuple[float, tuple[int, int, int]]:
    theta, rope = _rope(section)
    rope.only("interleaved", True)
    sections = rope.wholes("mrope_section")
    if len(sections) != 3 or min(sections) < 0 or 2 * sum(sections) != section.whole("head_dim"):
        half = section.whole("head_dim") // 2
        raise CheckpointError(
            f"config.json: {rope.dotted('mrope_section')} must be three numbers that sum to {half}, is {list(sections)}"
        )
    return theta, (sections[0], sections[1], sections[2])


def _experts(section: _Section) -> int:
    """Experts under either name; both may stand there if they agree."""
    found = {key: section.positive(key, MOST_EXPERTS) for key in ("num_experts", "num_local_experts") if key in section}
    if len(set(found.values())) > 1:
        raise CheckpointError(f"config.json: {section.place} says both {found}; make them equal")
    return next(iter(found.values())) if found else section.positive("num_experts")


def _plain_layers(section: _Section) -> None:
    """Refuse layer variants that no released model has."""
    section.only("hidden_act", "silu")
    section.only("attention_bias", False)
    section.only("tie_word_embeddings", False)


def _heads(section: _Section) -> tuple[int, int]:
    """Heads of queries, and of the keys and values that these share out evenly."""
    heads = section.positive("num_attention_heads")
    return heads, section.divisor("num_key_value_heads", heads, "num_attention_heads")


def _stack(section: _Section) -> StackConfig:
    _plain_layers(section)
    section.only("decoder_sparse_step", 1)
    section.only("mlp_only_layers", [])
    section.only("use_qk_norm", True)
    section.only("use_sliding_window", False)
    theta, sections = _mrope(section)
    (heads, kv_heads), experts = _heads(section), _experts(section)
    return StackConfig(
        vocab=section.positive("vocab_size"),
        hidden=section.positive("hidden_size"),
        layers=section.positive("num_hidden_layers", MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=section.positive("head_dim"),
        experts=experts,
        top_k=section.between("num_experts_per_tok", 1, experts),
        norm_topk=section.flag("norm_topk_prob"),
        moe_inter=section.positive("moe_intermediate_size"),
        shared_inter=section.at_least("shared_expert_intermediate_size", 0),
        eps=section.epsilon("rms_norm_eps"),
        rope_theta=theta,
        mrope_section=sections,
        max_positions=section.positive("max_position_embeddings", MOST_POSITIONS),
    )


def _audio(section: _Section) -> AudioConfig:
    section.only("activation_function", "gelu")
    section.only("scale_embedding", False)
    section.only("n_window", AUDIO_WINDOW)
    hidden, window = section.positive("d_model"), section.whole("n_window")
    return AudioConfig(
        mel_bins=section.positive("num_mel_bins"),
        hidden=hidden,
        layers=section.positive("encoder_layers", MOST_LAYERS),
        heads=section.divisor("encoder_attention_heads", hidden, "d_model"),
        inter=section.positive("encoder_ffn_dim"),
        channels=section.positive("downsample_hidden_size"),
        out=section.positive("output_dim"),
        window=window,
        # Attention sees whole chunks, so a window holds one or more.
        window_infer=section.at_least("n_window_infer", 2 * window),
        max_positions=section.positive("max_source_positions"),
    )


def _vision(section: _Section) -> VisionConfig:
    return VisionConfig(
        depth=section.at_least("depth", 0, MOST_LAYERS),
        hidden=section.whole("hidden_size"),
        inter=section.whole("intermediate_size"),
        heads=section.whole("num_heads"),
        channels=section.whole("in_channels"),
        patch=section.whole("patch_size"),
        temporal_patch=section.whole("temporal_patch_size"),
        merge=section.whole("spatial_merge_size"),
        out=section.whole("out_hidden_size"),
        table=section.whole("num_position_embeddings"),
        deepstack=section.wholes("deepstack_visual_indexes"),
    )


def _predictor(section: _Section) -> PredictorConfig:
    _plain_layers(section)
    section.only("use_sliding_window", False)
    theta, _ = _rope(section)
    heads, kv_heads = _heads(section)
    return PredictorConfig(
        vocab=section.positive("vocab_size"),
        hidden=section.positive("hidden_size"),
        layers=section.positive("num_hidden_layers", MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=section.positive("head_dim"),
        inter=section.positive("intermediate_size"),
        groups=section.at_least("num_code_groups", 2, MOST_GROUPS),  # the first is the Talker's own
        eps=section.epsilon("rms_norm_eps"),
        rope_theta=theta,
    )


def _accept_layer(section: _Section, thinker_layers: int) -> int:
    # After the last layer there is a norm too, so its output is no state to accept.
    layer = section.whole("accept_hidden_layer")
    if thinker_layers < 2:
        place = "thinker_config.text_config.num_hidden_layers"
        raise CheckpointError(f"config.json: {place} must be at least 2 where there is a talker, is {thinker_layers}")
    if not 1 <= layer < thinker_layers:
        place = section.dotted("accept_hidden_layer")
        raise CheckpointError(f"config.json: {place} must be between 1 and {thinker_layers - 1}, is {layer}")
    return layer


def _talker(section: _Section, thinker_layers: int) -> TalkerConfig:
    text = section.section("text_config")
    stack = _stack(text)
    return TalkerConfig(
        stack=stack,
        predictor=_predictor(section.section("code_predictor_config")),
        codec=CodecIds(
            pad=section.token("codec_pad_id", stack.vocab),
            bos=section.token("codec_bos_id", stack.vocab),
            eos=section.token("codec_eos_token_id", stack.vocab),
            nothink=section.token("codec_nothink_id", stack.vocab),
            think_bos=section.token("codec_think_bos_id", stack.vocab),
            think_eos=section.token("codec_think_eos_id", stack.vocab),
        ),
        speakers=_speakers(section, stack.vocab),
        accept_layer=_accept_layer(section, thinker_layers),
        thinker_hidden=section.positive("thinker_hidden_size"),
        proj_inter=text.positive("intermediate_size"),
        groups=section.positive("num_code_groups"),
    )


def _speakers(section: _Section, vocab: int) -> dict[str, int]:
    """Codec ids by lower-case name, as requests may write names in any case."""
    speakers = section.tokens("speaker_id", vocab)
    names: dict[str, str] = {}
    for name in speakers:
        other = names.setdefault(name.lower(), name)
        if other != name:
            place = section.dotted("speaker_id")
            raise CheckpointError(
                f"config.json: {place} has {other!r} and {name!r}; names must differ in lower case too"
            )
    return {name.lower(): codec for name, codec in speakers.items()}


def _check_groups(talker: TalkerConfig, wave: Code2WavConfig) -> None:
    """Refuse a vocoder that takes frames of another size than the code predictor makes."""
    found = {
        "talker_config.num_code_groups": talker.groups,
        "talker_config.code_predictor_config.num_code_groups": talker.predictor.groups,
        "code2wav_config.num_quantizers": wave.quantizers,
    }
    if len(set(found.values())) > 1:
        said = ", ".join(f"{key} is {count}" for key, count in found.items())
        raise CheckpointError(f"config.json: {said}; make them equal")


def _code2wav(section: _Section) -> Code2WavConfig:
    _plain_layers(section)
    theta, _ = _rope(section)
    hidden, heads = section.positive("hidden_size"), section.positive("num_attention_heads")
    return Code2WavConfig(
        codebook=section.positive("codebook_size"),
        quantizers=section.positive("num_quantizers"),
        hidden=hidden,
        inter=section.positive("intermediate_size"),
        layers=section.positive("num_hidden_layers", MOST_LAYERS),
        heads=heads,
        kv_heads=section.positive("num_key_value_heads"),
        # The released file names no head_dim here: the heads share the width out among themselves.
        head_dim=section.positive("head_dim") if "head_dim" in section else _head_dim(section, hidden),
        window=section.positive("sliding_window", MOST_FRAMES),
        decoder_dim=section.positive("decoder_dim"),
        rates=section.positives("upsample_rates"),
        ratios=section.positives("upsampling_ratios"),
        eps=section.epsilon("rms_norm_eps"),
        rope_theta=theta,
    )


def _head_dim(section: _Section, hidden: int) -> int:
    """The width of each head where they share `hidden`: an even one, as positions turn pairs."""
    return 2 * (hidden // 2 // section.divisor("num_attention_heads", hidden // 2, "half of hidden_size"))


def _ids(root: _Section, thinker: _Section, vocab: int) -> SpecialIds:
    return SpecialIds(
        im_start=root.token("im_start_token_id", vocab),
        im_end=root.token("im_end_token_id", vocab),
        tts_pad=root.token("tts_pad_token_id", vocab),
        tts_bos=root.token("tts_bos_token_id", vocab),
        tts_eos=root.token("tts_eos_token_id", vocab),
        system=root.token("system_token_id", vocab),
        user=root.token("user_token_id", vocab),
        assistant=root.token("assistant_token_id", vocab),
        audio=thinker.token("audio_token_id", vocab),
        audio_start=thinker.token("audio_start_token_id", vocab),
        audio_end=thinker.token("audio_end_token_id", vocab),
        image=thinker.token("image_token_id", vocab),
        video=thinker.token("video_token_id", vocab),
        vision_start=thinker.token("vision_start_token_id", vocab),
        vision_end=thinker.token("vision_end_token_id", vocab),
    )
