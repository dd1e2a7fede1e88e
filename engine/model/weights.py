"""Tensors of a model folder: their names on disk, how they fuse, and the names that the model uses.

On disk the names are those of the released checkpoint. `Weights` maps OUR names, listed here, to tensors (w and b stand
for `.weight` and `.bias`; shapes as [out, in]; G = code groups):

    thinker.embed  thinker.head  thinker.norm                                 [V, H] [V, H] [H]
    thinker.layers.{l}.input_norm  .post_norm  .q_norm  .k_norm               [H] [H] [d] [d]
    thinker.layers.{l}.qkv  .o                                                [(Hq + 2 Hkv) d, H] rows q, k, v; [H, Hq d]
    thinker.layers.{l}.router  .gate_up  .down                                [E, H] [E, 2I, H] [E, H, I]
    talker.embed  talker.head  talker.norm  talker.layers.{l}.*               as the Thinker's, and
    talker.layers.{l}.shared_gate_up  .shared_down  .shared_gate              [2S, H] [H, S] [1, H]
    talker.{text,hidden}_projection.fc{1,2}.{w,b}
    predictor.embed.{0..G-2}  predictor.head.{0..G-2}  predictor.norm         [V, H] [V, H] [H]
    predictor.layers.{l}.input_norm  .post_norm  .q_norm  .k_norm  .qkv  .o
    predictor.layers.{l}.gate_up  .down                                       [2I, H] [H, I]
    audio.conv{1,2,3}.{w,b}  audio.conv_out                                   [D, C, 3, 3] [D]; [H, F]
    audio.layers.{l}.attn_norm.{w,b}  .mlp_norm.{w,b}                         [H]
    audio.layers.{l}.qkv.{w,b}  .o.{w,b}  .fc1.{w,b}  .fc2.{w,b}              [3H, H] [H, H] [I, H] [H, I]
    audio.ln_post.{w,b}  audio.proj1.{w,b}  audio.proj2.{w,b}
    code2wav.embed  code2wav.norm                                             [quantizers * codebook, H] [H]
    code2wav.layers.{l}.input_norm  .post_norm  .attn_scale  .mlp_scale       [H]
    code2wav.layers.{l}.qkv  .o  .gate_up  .down
    code2wav.upsample.{i}.conv.{w,b}                                          [H, H, ratio] (in, out, k)
    code2wav.upsample.{i}.dwconv.{w,b}  .norm.{w,b}  .fc1.{w,b}  .fc2.{w,b}  .gamma
    code2wav.conv_in.{w,b}                                                    [D, H, 7]
    code2wav.blocks.{b}.act.{alpha,beta}  .up.{w,b}                           [C]; [C, C/2, 2 rate] (in, out, k)
    code2wav.blocks.{b}.units.{0,1,2}.act{1,2}.{alpha,beta}  .conv{1,2}.{w,b} [C/2]; [C/2, C/2, 7 or 1]
    code2wav.act_out.{alpha,beta}  code2wav.conv_out.{w,b}                    [D/2^n]; [1, D/2^n, 7]

The vision tower is checked by name and shape, and not loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.config import (
    AudioConfig,
    Code2WavConfig,
    OmniConfig,
    PredictorConfig,
    StackConfig,
    TalkerConfig,
    VisionConfig,
)

NAMED = 10
# The dtypes that are read, as safetensors calls them.
DISK_DTYPES = ("F32", "BF16", "F16")
# A longer name can't be a file's on any usual file system.
MOST_NAME_BYTES = 255
DUMMY_DEVIATION = 0.02
# One reader of a mapped file is held up by page faults: from the page cache it read 0.6 to 1.1 GB/s, eight read 2.5 to 2.7
# (two shared cores, 3 MB tensors).
READERS = 8

# Told how many bytes of a rank's weights are in place, and how many there will be.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Shard:
    """This process's part of a model that `world` ranks share; rank 0 of 1 holds everything."""

    rank: int
    world: int

    def part(self, size: int) -> slice:
        """Return this rank's part of an axis of `size`; ValueError when the ranks can't share it evenly."""
        if size % self.world:
            raise ValueError(f"an axis of {size} can't be shared by {self.world} ranks")
        share = size // self.world
        return slice(self.rank * share, (self.rank + 1) * share)


WHOLE = Shard(0, 1)


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by our name (the module's docstring lists names and shapes), cut to `shard` along heads and inner widths."""

    tensors: dict[str, Tensor]
    shard: Shard

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)


class _Join(Enum):
    ROWS = "parts one below the other"
    EXPERT_GATE_UP = "gate and up of each expert in turn, as [E, 2I, H]"
    EXPERT_DOWN = "down of each expert in turn, as [E, H, I]"


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How one of our tensors is made of `parts` on disk. Ranks split axis `split` of every part.

    `fused` is one tensor that may stand on disk in place of all the parts.
    """

    name: str
    parts: tuple[_Part, ...]
    split: int | None = None
    join: _Join = _Join.ROWS
    fused: _Part | None = None

    def shape(self) -> tuple[int, ...]:
        """The shape of our tensor, before ranks split it."""
        if self.fused is not None:
            return self.fused.shape
        first = self.parts[0].shape
        return (sum(part.shape[0] for part in self.parts), *first[1:])

    def held(self, shard: Shard) -> tuple[int, ...]:
        """The shape of our tensor on one rank."""
        # A tensor of experts has one axis more than its parts.
        axis = None if self.split is None else self.split + (self.join is not _Join.ROWS)
        return _share(self.shape(), axis, shard)


def _one(name: str, disk: str, *shape: int, split: int | None = None) -> _Recipe:
    return _Recipe(name, (_Part(disk, shape),), split)


def _pair(name: str, disk: str, *shape: int, bias: int | None = None) -> list[_Recipe]:
    """Weight and bias of one module; `bias` is the bias's length where it is not the weight's first axis."""
    return [
        _one(f"{name}.weight", f"{disk}.weight", *shape),
        _one(f"{name}.bias", f"{disk}.bias", shape[0] if bias is None else bias),
    ]


def _rows(name: str, disk: Mapping[str, tuple[int, ...]], split: int | None = None) -> _Recipe:
    return _Recipe(name, tuple(_Part(part, shape) for part, shape in disk.items()), split)


@dataclass(frozen=True, slots=True)
class _AttentionSizes:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


def _attention(name: str, disk: str, sizes: _AttentionSizes, *, shared: bool) -> list[_Recipe]:
    """Norms, qkv and output of one decoder layer; `shared` lets ranks split the heads."""
    hidden, rows, kv_rows = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    attn = f"{disk}.self_attn"
    qkv = {
        f"{attn}.q_proj.weight": (rows, hidden),
        f"{attn}.k_proj.weight": (kv_rows, hidden),
        f"{attn}.v_proj.weight": (kv_rows, hidden),
    }
    return [
        _one(f"{name}.input_norm", f"{disk}.input_layernorm.weight", hidden),
        _one(f"{name}.post_norm", f"{disk}.post_attention_layernorm.weight", hidden),
        _rows(f"{name}.qkv", qkv, 0 if shared else None),
        _one(f"{name}.o", f"{attn}.o_proj.weight", hidden, rows, split=1 if shared else None),
    ]


def _head_norms(name: str, disk: str, head_dim: int) -> list[_Recipe]:
    return [_one(f"{name}.{x}_norm", f"{disk}.self_attn.{x}_norm.weight", head_dim) for x in "qk"]


def _dense(name: str, disk: str, hidden: int, inter: int, *, prefix: str = "", shared: bool = False) -> list[_Recipe]:
    gate_up = {f"{disk}.{x}_proj.weight": (inter, hidden) for x in ("gate", "up")}
    return [
        _rows(f"{name}.{prefix}gate_up", gate_up, 0 if shared else None),
        _one(f"{name}.{prefix}down", f"{disk}.down_proj.weight", hidden, inter, split=1 if shared else None),
    ]


def _experts(name: str, disk: str, c: StackConfig) -> list[_Recipe]:
    each = [f"{disk}.mlp.experts.{e}" for e in range(c.experts)]
    gate_up = tuple(_Part(f"{e}.{x}_proj.weight", (c.moe_inter, c.hidden)) for e in each for x in ("gate", "up"))
    down = tuple(_Part(f"{e}.down_proj.weight", (c.hidden, c.moe_inter)) for e in each)
    fused_gate_up = _Part(f"{disk}.mlp.experts.gate_up_proj", (c.experts, 2 * c.moe_inter, c.hidden))
    fused_down = _Part(f"{disk}.mlp.experts.down_proj", (c.experts, c.hidden, c.moe_inter))
    return [
        _one(f"{name}.router", f"{disk}.mlp.gate.weight", c.experts, c.hidden),
        _Recipe(f"{name}.gate_up", gate_up, 0, _Join.EXPERT_GATE_UP, fused_gate_up),
        _Recipe(f"{name}.down", down, 1, _Join.EXPERT_DOWN, fused_down),
    ]


def _stack(name: str, disk: str, embed: str, head: str, c: StackConfig) -> list[_Recipe]:
    recipes = [
        _one(f"{name}.embed", embed, c.vocab, c.hidden),
        _one(f"{name}.head", head, c.vocab, c.hidden),
        _one(f"{name}.norm", f"{disk}.norm.weight", c.hidden),
    ]
    sizes = _AttentionSizes(c.hidden, c.heads, c.kv_heads, c.head_dim)
    for index in range(c.layers):
        ours, theirs = f"{name}.layers.{index}", f"{disk}.layers.{index}"
        recipes += _attention(ours, theirs, sizes, shared=True)
        recipes += _head_norms(ours, theirs, c.head_dim)
        recipes += _experts(ours, theirs, c)
        if c.shared_inter:
            shared = f"{theirs}.mlp.shared_expert"
            recipes += _dense(ours, shared, c.hidden, c.shared_inter, prefix="shared_", shared=True)
            recipes.append(_one(f"{ours}.shared_gate", f"{theirs}.mlp.shared_expert_gate.weight", 1, c.hidden))
    return recipes


def _audio(c: AudioConfig) -> list[_Recipe]:
    disk = "thinker.audio_tower"
    bins = c.mel_bins
    recipes: list[_Recipe] = []
    for index in (1, 2, 3):
        depth = 1 if index == 1 else c.channels
        recipes += _pair(f"audio.conv{index}", f"{disk}.conv2d{index}", c.channels, depth, 3, 3)
        bins = (bins + 1) // 2
    recipes.append(_one("audio.conv_out", f"{disk}.conv_out.weight", c.hidden, c.channels * bins))
    for index in range(c.layers):
        ours, theirs = f"audio.layers.{index}", f"{disk}.layers.{index}"
        for kind, axes in (("weight", (c.hidden, c.hidden)), ("bias", (c.hidden,))):
            qkv = {f"{theirs}.self_attn.{x}_proj.{kind}": axes for x in "qkv"}
            recipes.append(_rows(f"{ours}.qkv.{kind}", qkv))
        recipes += _pair(f"{ours}.attn_norm", f"{theirs}.self_attn_layer_norm", c.hidden)
        recipes += _pair(f"{ours}.o", f"{theirs}.self_attn.out_proj", c.hidden, c.hidden)
        recipes += _pair(f"{ours}.mlp_norm", f"{theirs}.final_layer_norm", c.hidden)
        recipes += _pair(f"{ours}.fc1", f"{theirs}.fc1", c.inter, c.hidden)
        recipes += _pair(f"{ours}.fc2", f"{theirs}.fc2", c.hidden, c.inter)
    recipes += _pair("audio.ln_post", f"{disk}.ln_post", c.hidden)
    recipes += _pair("audio.proj1", f"{disk}.proj1", c.hidden, c.hidden)
    recipes += _pair("audio.proj2", f"{disk}.proj2", c.out, c.hidden)
    return recipes


def _talker(c: TalkerConfig) -> list[_Recipe]:
    recipes = _stack(
        "talker", "talker.model", "talker.model.codec_embedding.weight", "talker.codec_head.weight", c.stack
    )
    for kind in ("text", "hidden"):
        ours, theirs = f"talker.{kind}_projection", f"talker.{kind}_projection"
        recipes += _pair(f"{ours}.fc1", f"{theirs}.linear_fc1", c.proj_inter, c.thinker_hidden)
        recipes += _pair(f"{ours}.fc2", f"{theirs}.linear_fc2", c.stack.hidden, c.proj_inter)
    return recipes + _predictor(c.predictor)


def _predictor(c: PredictorConfig) -> list[_Recipe]:
    disk = "talker.code_predictor"
    recipes = [_one("predictor.norm", f"{disk}.model.norm.weight", c.hidden)]
    for group in range(c.groups - 1):
        recipes += [
            _one(f"predictor.embed.{group}", f"{disk}.model.codec_embedding.{group}.weight", c.vocab, c.hidden),
            _one(f"predictor.head.{group}", f"{disk}.lm_head.{group}.weight", c.vocab, c.hidden),
        ]
    sizes = _AttentionSizes(c.hidden, c.heads, c.kv_heads, c.head_dim)
    for index in range(c.layers):
        ours, theirs = f"predictor.layers.{index}", f"{disk}.model.layers.{index}"
        recipes += _attention(ours, theirs, sizes, shared=False)
        recipes += _head_norms(ours, theirs, c.head_dim)
        recipes += _dense(ours, f"{theirs}.mlp", c.hidden, c.inter)
    return recipes


def _code2wav(c: Code2WavConfig) -> list[_Recipe]:
    disk = "code2wav"
    recipes = [
        _one("code2wav.embed", f"{disk}.code_embedding.weight", c.quantizers * c.codebook, c.hidden),
        _one("code2wav.norm", f"{disk}.pre_transformer.norm.weight", c.hidden),
    ]
    sizes = _AttentionSizes(c.hidden, c.heads, c.kv_heads, c.head_dim)
    for index in range(c.layers):
        ours, theirs = f"code2wav.layers.{index}", f"{disk}.pre_transformer.layers.{index}"
        recipes += _attention(ours, theirs, sizes, shared=False)
        recipes += _dense(ours, f"{theirs}.mlp", c.hidden, c.inter)
        recipes.append(_one(f"{ours}.attn_scale", f"{theirs}.self_attn_layer_scale.scale", c.hidden))
        recipes.append(_one(f"{ours}.mlp_scale", f"{theirs}.mlp_layer_scale.scale", c.hidden))
    for index, ratio in enumerate(c.ratios):
        ours, theirs = f"code2wav.upsample.{index}", f"{disk}.upsample.{index}"
        recipes += _pair(f"{ours}.conv", f"{theirs}.0.conv", c.hidden, c.hidden, ratio)
        recipes += _pair(f"{ours}.dwconv", f"{theirs}.1.dwconv.conv", c.hidden, 1, 7)
        recipes += _pair(f"{ours}.norm", f"{theirs}.1.norm", c.hidden)
        recipes += _pair(f"{ours}.fc1", f"{theirs}.1.pwconv1", 4 * c.hidden, c.hidden)
        recipes += _pair(f"{ours}.fc2", f"{theirs}.1.pwconv2", c.hidden, 4 * c.hidden)
        recipes.append(_one(f"{ours}.gamma", f"{theirs}.1.gamma", c.hidden))
    return recipes + _wave_decoder(c)


def _snake(name: str, disk: str, channels: int) -> list[_Recipe]:
    return [_one(f"{name}.{x}", f"{disk}.{x}", channels) for x in ("alpha", "beta")]


def _wave_decoder(c: Code2WavConfig) -> list[_Recipe]:
    disk = "code2wav.decoder"
    recipes = _pair("code2wav.conv_in", f"{disk}.0.conv", c.decoder_dim, c.hidden, 7)
    wide = c.decoder_dim
    for index, rate in enumerate(c.rates):
        ours, theirs = f"code2wav.blocks.{index}", f"{disk}.{index + 1}.block"
        narrow = wide // 2
        recipes += _snake(f"{ours}.act", f"{theirs}.0", wide)
        recipes += _pair(f"{ours}.up", f"{theirs}.1.conv", wide, narrow, 2 * rate, bias=narrow)
        for unit in range(3):
            mine, other = f"{ours}.units.{unit}", f"{theirs}.{unit + 2}"
            for half, width in ((1, 7), (2, 1)):
                recipes += _snake(f"{mine}.act{half}", f"{other}.act{half}", narrow)
                recipes += _pair(f"{mine}.conv{half}", f"{other}.conv{half}.conv", narrow, narrow, width)
        wide = narrow
    last = len(c.rates) + 1
    recipes += _snake("code2wav.act_out", f"{disk}.{last}", wide)
    return recipes + _pair("code2wav.conv_out", f"{disk}.{last + 1}.conv", 1, wide, 7)


def _vision(c: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the vision tower, which is checked but not loaded."""
    disk = "thinker.visual"
    merged = c.hidden * c.merge**2
    shapes: dict[str, tuple[int, ...]] = {f"{disk}.pos_embed.weight": (c.table, c.hidden)}

    def pair(name: str, *shape: int) -> None:
        shapes[f"{disk}.{name}.weight"] = shape
        shapes[f"{disk}.{name}.bias"] = (shape[0],)

    pair("patch_embed.proj", c.hidden, c.channels, c.temporal_patch, c.patch, c.patch)
    for index in range(c.depth):
        pair(f"blocks.{index}.norm1", c.hidden)
        pair(f"blocks.{index}.norm2", c.hidden)
        pair(f"blocks.{index}.attn.qkv", 3 * c.hidden, c.hidden)
        pair(f"blocks.{index}.attn.proj", c.hidden, c.hidden)
        pair(f"blocks.{index}.mlp.linear_fc1", c.inter, c.hidden)
        pair(f"blocks.{index}.mlp.linear_fc2", c.hidden, c.inter)
    mergers = {"merger": c.hidden} | {f"merger_list.{i}": merged for i in range(len(c.deepstack))}
    for name, norm in mergers.items():
        pair(f"{name}.ln_q", norm)
        pair(f"{name}.mlp.0", merged, merged)
        pair(f"{name}.mlp.2", c.out, merged)
    return shapes


def _recipes(config: OmniConfig) -> list[_Recipe]:
    recipes = _stack(
        "thinker", "thinker.model", "thinker.model.embed_tokens.weight", "thinker.lm_head.weight", config.thinker
    )
    recipes += _audio(config.audio)
    if config.talker is not None:
        recipes += _talker(config.talker)
    if config.code2wav is not None:
        recipes += _code2wav(config.code2wav)
    return recipes


def expected_tensors(config: OmniConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the released layout (one tensor per expert) by its name on disk."""
    shapes = {part.name: part.shape for recipe in _recipes(config) for part in recipe.parts}
    return shapes | _vision(config.vision)


class _File(Protocol):
    """What is used of an open safetensors file."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> _Slice: ...


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class _Folder:
    """The open safetensors files of a model folder."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._files: dict[str, _File] = {}
        for path in _tensor_files(folder):
            file: _File = stack.enter_context(_opened(path))
            twice = sorted(self._files.keys() & file.keys())
            if twice:
                raise CheckpointError(
                    f"{path} holds tensors that another file of the folder holds too: {_listed(twice)}; "
                    "fetch the checkpoint into an empty folder"
                )
            self._files.update(dict.fromkeys(file.keys(), file))

    def names(self) -> list[str]:
        """Every tensor's name: file by file, and as they lie in it."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """A tensor's dtype as safetensors calls it."""
        return self._files[name].get_slice(name).get_dtype()

    def read(self, name: str) -> Tensor:
        """A tensor that lies in the mapped file: whoever copies it reads it."""
        return self._files[name].get_tensor(name)


def _opened(path: Path) -> safe_open:
    """The open file; CheckpointError says whether it can't be read at all or is no safetensors."""
    try:
        path.open("rb").close()  # safe_open calls a file without permission absent
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be read: {error.strerror}; it must be a file with read permission"
        ) from None
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can't be read as safetensors: {error}; fetch it again") from None


def _tensor_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise CheckpointError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
        return [single]
    names = _indexed(index)
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise CheckpointError(f"{folder} lacks {_listed(absent)}, which model.safetensors.index.json names")
    return [folder / name for name in names]


def _indexed(index: Path) -> list[str]:
    """The file names that an index gives."""
    try:
        files = list(json.loads(index.read_text(encoding="utf-8"))["weight_map"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} can't be read as an index: {type(error).__name__}: {error}; fetch it again"
        ) from None
    for tensor, name in files:
        if not _is_file_name(name):
            raise CheckpointError(
                f"{index} gives {tensor!r:.100} the file {name!r:.100}, which is no name of a file beside it; fetch it again"
            )
    return sorted({name for _, name in files})


def _is_file_name(name: object) -> bool:
    """Whether `name` can be a file directly in a folder: the digest of a checkpoint covers no others."""
    if not isinstance(name, str) or not name.isprintable() or name in ("", ".."):
        return False
    return Path(name).name == name and len(name.encode()) <= MOST_NAME_BYTES


def _listed(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _use_fused(recipes: list[_Recipe], present: list[str]) -> list[_Recipe]:
    """Put the fused tensor in place of a recipe's parts wherever the folder holds it."""
    held = set(present)
    return [
        _Recipe(r.name, (r.fused,), r.split, r.join, r.fused) if r.fused and r.fused.name in held else r
        for r in recipes
    ]


def _check(folder: _Folder, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the folder holds exactly the tensors of `shapes`."""
    present = set(folder.names())
    faults = []
    missing = sorted(shapes.keys() - present)
    unused = sorted(present - shapes.keys())
    misshapen = [
        f"{name} (is {list(folder.shape(name))}, must be {list(shapes[name])})"
        for name in sorted(shapes.keys() & present)
        if folder.shape(name) != shapes[name]
    ]
    unread = [
        f"{name} (is {folder.dtype(name)})"
        for name in sorted(shapes.keys() & present)
        if folder.dtype(name) not in DISK_DTYPES
    ]
    kinds = {
        "missing": missing,
        "unused": unused,
        "misshapen": misshapen,
        f"not {' or '.join(DISK_DTYPES)} (quantised checkpoints aren't served; take the original)": unread,
    }
    for word, names in kinds.items():
        if names:
            faults.append(f"{len(names)} {word}: {_listed(names)}")
    if faults:
        raise CheckpointError("the tensors do not fit config.json; " + "; ".join(faults))


def _share(shape: tuple[int, ...], axis: int | None, shard: Shard) -> tuple[int, ...]:
    """The part of `shape` that one rank holds."""
    if axis is None:
        return shape
    part = shard.part(shape[axis])
    return (*shape[:axis], part.stop - part.start, *shape[axis + 1 :])


def _split(tensor: Tensor, axis: int | None, shard: Shard) -> Tensor:
    if axis is None or shard.world == 1:
        return tensor
    part = shard.part(tensor.shape[axis])
    return tensor.narrow(axis, part.start, part.stop - part.start)


@dataclass(frozen=True, slots=True)
class _Copy:
    """The tensor `name` on disk, seen as `shape` and split along `axis`, goes to `into`, a part of one of ours."""

    name: str
    into: Tensor
    shape: tuple[int, ...]
    axis: int | None


def _copies(recipe: _Recipe, ours: Tensor, shard: Shard) -> list[_Copy]:
    """Where each of a recipe's parts goes in `ours`, our tensor on this rank."""
    parts, split = recipe.parts, recipe.split
    if recipe.join is _Join.ROWS:
        places = torch.split(ours, [_share(part.shape, split, shard)[0] for part in parts])
        return [_Copy(part.name, place, part.shape, split) for part, place in zip(parts, places, strict=True)]
    assert recipe.fused is not None and split is not None
    experts, rows, columns = recipe.fused.shape
    matrices = 2 if recipe.join is _Join.EXPERT_GATE_UP else 1
    each = ours.view(experts, matrices, -1, ours.shape[2])
    if len(parts) == 1:
        return [_Copy(parts[0].name, each, (experts, matrices, rows // matrices, columns), split + 2)]
    return [
        _Copy(part.name, each[index // matrices, index % matrices], part.shape, split)
        for index, part in enumerate(parts)
    ]


def load_weights(
    folder: Path,
    config: OmniConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    shard: Shard = WHOLE,
    progress: Progress | None = None,
) -> Weights:
    """Read a model folder into our names and shapes (see the module's docstring), in `dtype` on `device`.

    Each tensor on disk goes straight to its place on the device: nothing there is held twice, and the host holds no more
    than one tensor a reader, and that only where the dtype changes or a rank takes columns. `progress` is told after each.

    Raises CheckpointError that names every missing, unused and misshapen tensor and those of a dtype other than float32,
    bfloat16 and float16, up to ten of each kind; and one that names a file that is absent, unreadable or of no use.
    """
    with ExitStack() as stack:
        files = _Folder(folder, stack)
        recipes = _use_fused(_recipes(config), files.names())
        shapes = {part.name: part.shape for recipe in recipes for part in recipe.parts}
        _check(files, shapes | _vision(config.vision))
        tensors = {recipe.name: _empty(recipe, dtype, device, shard) for recipe in recipes}
        copies = [copy for recipe in recipes for copy in _copies(recipe, tensors[recipe.name], shard)]
        _fill(files, copies, shard, progress)
    return Weights(tensors, shard)


def _empty(recipe: _Recipe, dtype: torch.dtype, device: str | torch.device, shard: Shard) -> Tensor:
    """Room for our tensor on this rank. What rows are multiplied by lies column by column on a CPU.

    A few rows are then multiplied in a tenth less time where the weights don't fit into a core's cache (measured).
    """
    shape = recipe.held(shard)
    multiplied = recipe.join is not _Join.ROWS or (len(shape) == 2 and ".embed" not in recipe.name)
    if not multiplied or torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype, device=device).transpose(-1, -2)


def _fill(folder: _Folder, copies: list[_Copy], shard: Shard, progress: Progress | None) -> None:
    """Make `copies` in the order of the files, several at a time."""

    @torch.inference_mode()  # a mode of the thread: `into` may come from a caller in that mode
    def fill(copy: _Copy) -> int:
        copy.into.copy_(_split(folder.read(copy.name).view(copy.shape), copy.axis, shard))
        return copy.into.nbytes

    by_name = {copy.name: copy for copy in copies}
    total, done = sum(copy.into.nbytes for copy in copies), 0
    with ThreadPoolExecutor(READERS) as readers:
        for nbytes in readers.map(fill, [by_name[name] for name in folder.names() if name in by_name]):
            done += nbytes
            if progress is not None:
                progress(done, total)


def dummy_weights(
    config: OmniConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    shard: Shard = WHOLE,
    progress: Progress | None = None,
) -> Weights:
    """Draw every tensor on `device`: normal with deviation 0.02 from a generator seeded by its name; norms are ones.

    The same name gives the same values on every boot of the same kind of device. Names and shapes as in the module's
    docstring. `progress` is told after each; a GPU may still be drawing then.
    """
    recipes = _recipes(config)
    total, done = sum(math.prod(recipe.held(shard)) for recipe in recipes) * dtype.itemsize, 0
    tensors = {}
    for recipe in recipes:
        tensors[recipe.name] = _drawn(recipe, dtype, device, shard)
        done += tensors[recipe.name].nbytes
        if progress is not None:
            progress(done, total)
    return Weights(tensors, shard)


def _drawn(recipe: _Recipe, dtype: torch.dtype, device: str | torch.device, shard: Shard) -> Tensor:
    whole = torch.ones(recipe.shape(), dtype=dtype, device=device)
    if len(whole.shape) > 1 or "norm" not in recipe.name:
        key = hashlib.sha256(recipe.name.encode()).digest()[:8]
        generator = torch.Generator(device).manual_seed(int.from_bytes(key, "little") >> 1)
        whole.normal_(0.0, DUMMY_DEVIATION, generator=generator)
    if recipe.split is None or shard.world == 1:
        return whole
    # Parts (q, k, v; gate and up) are split each by itself.
    if recipe.join is _Join.ROWS:
        parts = torch.split(whole, [part.shape[0] for part in recipe.parts])
        return torch.cat([_split(part, recipe.split, shard) for part in parts])
    experts, rows, columns = whole.shape
    matrices = 2 if recipe.join is _Join.EXPERT_GATE_UP else 1
    stacked = whole.view(experts, matrices, rows // matrices, columns)
    return _split(stacked, recipe.split + 2, shard).flatten(1, 2)


def dummy_digest(folder: Path) -> str:
    """SHA-256 (hex) that names the weights that `dummy_weights` draws for a folder: its config decides them all."""
    return hashlib.sha256(b"dummy\0" + (folder / "config.json").read_bytes()).hexdigest()


def weights_digest(folder: Path) -> str:
    """SHA-256 (hex) over name and content digest of every regular file directly in `folder`, in order of name."""
    paths = sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.name)
    total = hashlib.sha256()
    with ThreadPoolExecutor() as pool:  # one thread hashes half a GB a second (shared core)
        for path, content in zip(paths, pool.map(_content_digest, paths), strict=True):
            total.update(path.name.encode() + b"\0" + content + b"\0")
    return total.hexdigest()


def _content_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
