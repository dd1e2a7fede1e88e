"""Loading a model folder: every tensor used once, both expert layouts, sharded files, ranks, and faults that are named."""

import json
import math
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.model import weights as weights_module
from engine.model.config import OmniConfig
from engine.model.weights import Shard, expected_tensors, load_weights, weights_digest
from tests.hf import load_hf
from tests.shared import shared


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    return OmniConfig.load(tiny_checkpoint)


@pytest.fixture(scope="module")
def disk(tiny_checkpoint: Path) -> dict[str, Tensor]:
    return load_file(tiny_checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Path, config: OmniConfig) -> dict[str, Tensor]:
    return load_weights(tiny_checkpoint, config).tensors


def folder_with(path: Path, tensors: dict[str, Tensor], config_from: Path) -> Path:
    save_file(tensors, path / "model.safetensors")
    shutil.copy(config_from / "config.json", path / "config.json")
    return path


def fused(disk: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with each layer's experts as two stacked ones, gate rows before up rows."""
    out = {name: tensor for name, tensor in disk.items() if ".experts." not in name}
    for name in disk:
        if name.endswith(".experts.0.gate_proj.weight"):
            stem = name.removesuffix("0.gate_proj.weight")
            experts = sum(n.startswith(stem) and n.endswith("gate_proj.weight") for n in disk)
            each = [{x: disk[f"{stem}{e}.{x}_proj.weight"] for x in ("gate", "up", "down")} for e in range(experts)]
            out[f"{stem}gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in each])
            out[f"{stem}down_proj"] = torch.stack([e["down"] for e in each])
    return out


def test_the_released_config_expects_28010_tensors_with_35259818545_parameters():
    config = OmniConfig.load(shared("data", "qwen3omni", "config.json").parent)
    shapes = expected_tensors(config)
    assert len(shapes) == 28_010
    assert sum(math.prod(shape) for shape in shapes.values()) == 35_259_818_545
    assert shapes["talker.model.layers.19.mlp.shared_expert_gate.weight"] == (1, 1024)
    assert shapes["code2wav.decoder.1.block.1.conv.weight"] == (1536, 768, 16)
    assert shapes["thinker.visual.merger_list.2.ln_q.weight"] == (4608,)


def test_every_tensor_on_disk_is_used_exactly_once(config, disk, loaded):
    shapes = expected_tensors(config)
    assert {name: tuple(tensor.shape) for name, tensor in disk.items()} == shapes
    parts = [part.name for recipe in weights_module._recipes(config) for part in recipe.parts]
    vision = [name for name in shapes if name.startswith("thinker.visual.")]
    assert len(parts) == len(set(parts))
    assert sorted(parts + vision) == sorted(shapes)
    held = sum(tensor.numel() for tensor in loaded.values())
    assert held == sum(math.prod(shape) for name, shape in shapes.items() if name not in vision)


@pytest.mark.hf
def test_hugging_face_saves_exactly_the_expected_names_and_shapes(config, tiny_checkpoint, tmp_path):
    load_hf(tiny_checkpoint).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == expected_tensors(config)
    # Its config is in the newer spelling.
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())["thinker_config"]["text_config"]
    assert OmniConfig.load(tmp_path) == config


def test_fusing_keeps_query_key_value_order_and_gate_before_up(disk, loaded):
    attention = "thinker.model.layers.2.self_attn"
    rows = loaded["thinker.layers.2.qkv"]
    assert torch.equal(rows[:128], disk[f"{attention}.q_proj.weight"])
    assert torch.equal(rows[128:192], disk[f"{attention}.k_proj.weight"])
    assert torch.equal(rows[192:], disk[f"{attention}.v_proj.weight"])
    experts = "talker.model.layers.1.mlp.experts"
    assert loaded["talker.layers.1.gate_up"].shape == (8, 48, 48)
    assert torch.equal(loaded["talker.layers.1.gate_up"][5, :24], disk[f"{experts}.5.gate_proj.weight"])
    assert torch.equal(loaded["talker.layers.1.gate_up"][5, 24:], disk[f"{experts}.5.up_proj.weight"])
    assert torch.equal(loaded["talker.layers.1.down"][7], disk[f"{experts}.7.down_proj.weight"])
    assert torch.equal(
        loaded["talker.layers.0.shared_gate_up"][40:], disk["talker.model.layers.0.mlp.shared_expert.up_proj.weight"]
    )


def test_experts_stacked_on_disk_load_to_the_same_tensors(config, disk, loaded, tiny_checkpoint, tmp_path):
    again = load_weights(folder_with(tmp_path, fused(disk), tiny_checkpoint), config).tensors
    assert len(fused(disk)) == 804 - 6 * 48 - 3 * 24 + 2 * 9
    assert again.keys() == loaded.keys()
    assert [name for name in loaded if not torch.equal(again[name], loaded[name])] == []


def test_several_files_with_an_index_load_to_the_same_tensors(config, disk, loaded, tiny_checkpoint, tmp_path):
    names = sorted(disk)
    index = {}
    for number, part in enumerate((names[:300], names[300:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: disk[name] for name in part}, tmp_path / file)
        index.update(dict.fromkeys(part, file))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    again = load_weights(tmp_path, config).tensors
    assert [name for name in loaded if not torch.equal(again[name], loaded[name])] == []
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors"):
        load_weights(tmp_path, config)


def test_missing_unused_and_misshapen_tensors_are_all_named(config, disk, tiny_checkpoint, tmp_path):
    faulty = dict(disk)
    del faulty["thinker.model.layers.3.mlp.experts.9.up_proj.weight"]
    faulty["thinker.model.layers.6.input_layernorm.weight"] = torch.ones(64)
    faulty["thinker.visual.pos_embed.weight"] = torch.ones(63, 32)
    with pytest.raises(CheckpointError) as error:
        load_weights(folder_with(tmp_path, faulty, tiny_checkpoint), config)
    assert str(error.value) == (
        "the tensors do not fit config.json; "
        "1 missing: thinker.model.layers.3.mlp.experts.9.up_proj.weight; "
        "1 unused: thinker.model.layers.6.input_layernorm.weight; "
        "1 misshapen: thinker.visual.pos_embed.weight (is [63, 32], must be [64, 32])"
    )


def test_at_most_ten_names_of_a_kind_are_listed_and_the_rest_counted(config, disk, tiny_checkpoint, tmp_path):
    kept = {name: tensor for name, tensor in disk.items() if not name.startswith("code2wav.")}
    with pytest.raises(CheckpointError) as error:
        load_weights(folder_with(tmp_path, kept, tiny_checkpoint), config)
    missing = len(disk) - len(kept)
    assert f"{missing} missing: " in str(error.value)
    assert f" and {missing - 10} more" in str(error.value)
    assert str(error.value).count("code2wav.") == 10


@pytest.mark.parametrize(
    ("dtype", "word"),
    [
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.complex64, "C64"),
        (torch.float64, "F64"),
    ],
)
def test_tensors_of_other_dtypes_are_named_and_not_converted(
    config: OmniConfig, disk: dict[str, Tensor], tiny_checkpoint: Path, tmp_path: Path, dtype: torch.dtype, word: str
):
    names = ["thinker.model.norm.weight", "thinker.visual.pos_embed.weight"]
    faulty = disk | {name: disk[name].to(dtype) for name in names}
    with pytest.raises(CheckpointError) as error:
        load_weights(folder_with(tmp_path, faulty, tiny_checkpoint), config)
    assert str(error.value) == (
        "the tensors do not fit config.json; "
        "2 not F32 or BF16 or F16 (quantised checkpoints aren't served; take the original): "
        f"thinker.model.norm.weight (is {word}), thinker.visual.pos_embed.weight (is {word})"
    )


def test_a_folder_may_mix_the_dtypes_that_are_read(config, disk, loaded, tiny_checkpoint, tmp_path):
    head, norm = "thinker.lm_head.weight", "thinker.model.norm.weight"
    mixed = disk | {head: disk[head].bfloat16(), norm: disk[norm].half()}
    again = load_weights(folder_with(tmp_path, mixed, tiny_checkpoint), config).tensors
    assert torch.equal(again["thinker.head"], disk[head].bfloat16().float())
    assert torch.equal(again["thinker.norm"], disk[norm].half().float())
    changed = [name for name in loaded if not torch.equal(again[name], loaded[name])]
    assert set(changed) <= {"thinker.head", "thinker.norm"}


def test_a_folder_without_tensors_says_what_it_should_hold(config, tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_weights(tmp_path, config)


def test_weights_come_in_the_dtype_asked_for(config, tiny_checkpoint, loaded):
    half = load_weights(tiny_checkpoint, config, torch.bfloat16).tensors
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    assert torch.equal(half["thinker.head"], loaded["thinker.head"].bfloat16())


def test_only_on_a_cpu_what_rows_are_multiplied_by_lies_column_by_column(config, tiny_checkpoint, loaded):
    by_columns = {name for name, tensor in loaded.items() if not tensor.is_contiguous()}
    assert all(loaded[name].mT.is_contiguous() for name in by_columns)
    assert {"thinker.head", "thinker.layers.0.qkv", "thinker.layers.0.gate_up", "talker.layers.1.down"} <= by_columns
    assert not any(".embed" in name or "conv1" in name or loaded[name].dim() == 1 for name in by_columns)
    elsewhere = load_weights(tiny_checkpoint, config, device="meta").tensors
    assert all(tensor.is_contiguous() for tensor in elsewhere.values())


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(1, 2)])
def test_what_is_read_goes_to_places_that_fill_each_tensor_exactly_once(config, disk, stacked, shard):
    recipes = weights_module._recipes(config)
    if stacked:
        recipes = weights_module._use_fused(recipes, list(fused(disk)))
    for recipe in recipes:
        ours = torch.zeros(recipe.held(shard))
        for copy in weights_module._copies(recipe, ours, shard):
            copy.into.add_(1)
        assert (ours == 1).all(), recipe.name


def test_tensors_are_made_on_the_device_asked_for(config, tiny_checkpoint, loaded):
    elsewhere = load_weights(tiny_checkpoint, config, torch.bfloat16, "meta").tensors
    assert {(tensor.device.type, tensor.dtype) for tensor in elsewhere.values()} == {("meta", torch.bfloat16)}
    assert {name: tensor.shape for name, tensor in elsewhere.items()} == {n: t.shape for n, t in loaded.items()}


def test_loading_inside_inference_mode_gives_the_same_tensors(config, tiny_checkpoint, loaded):
    with torch.inference_mode():
        again = load_weights(tiny_checkpoint, config).tensors
        assert [name for name in loaded if not torch.equal(again[name], loaded[name])] == []


@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(1, 2)])
def test_progress_is_told_after_each_tensor_and_ends_at_the_bytes_of_all(config, tiny_checkpoint, disk, shard):
    told: list[tuple[int, int]] = []
    held = load_weights(
        tiny_checkpoint, config, torch.bfloat16, shard=shard, progress=lambda *at: told.append(at)
    ).tensors
    total = sum(2 * tensor.numel() for tensor in held.values())
    assert len(told) == sum(not name.startswith("thinker.visual.") for name in disk)
    assert {whole for _, whole in told} == {total}
    done = [at for at, _ in told]
    assert done[0] > 0 and done[-1] == total
    assert all(before < after for before, after in pairwise(done))


@pytest.mark.parametrize("layout", ["per expert", "stacked"])
def test_the_parts_of_two_ranks_make_up_the_whole(config, disk, loaded, tiny_checkpoint, tmp_path, layout):
    tensors = disk if layout == "per expert" else fused(disk)
    folder = folder_with(tmp_path, tensors, tiny_checkpoint)
    left, right = (load_weights(folder, config, shard=Shard(rank, 2)).tensors for rank in (0, 1))
    q, k, v = (slice(0, 64), slice(64, 96), slice(96, 128))
    together = [
        part for rows in (q, k, v) for part in (left["thinker.layers.0.qkv"][rows], right["thinker.layers.0.qkv"][rows])
    ]
    assert torch.equal(torch.cat(together), loaded["thinker.layers.0.qkv"])
    for name, axis in (("thinker.layers.0.o", 1), ("thinker.layers.0.down", 2), ("talker.layers.0.shared_down", 1)):
        assert torch.equal(torch.cat([left[name], right[name]], axis), loaded[name])
    gate_up = [half["talker.layers.2.gate_up"].view(8, 2, 12, 48) for half in (left, right)]
    assert torch.equal(torch.cat(gate_up, 2).reshape(8, 48, 48), loaded["talker.layers.2.gate_up"])
    assert torch.equal(left["thinker.head"], loaded["thinker.head"])
    assert torch.equal(left["predictor.layers.0.qkv"], loaded["predictor.layers.0.qkv"])


def test_ranks_that_cannot_share_an_axis_evenly_are_refused():
    with pytest.raises(ValueError, match="an axis of 32 can't be shared by 3 ranks"):
        Shard(0, 3).part(32)
    assert Shard(1, 4).part(32) == slice(8, 16)


def test_the_digest_covers_names_and_contents_of_the_files_in_the_folder(tmp_path):
    (tmp_path / "b.bin").write_bytes(b"two")
    (tmp_path / "a.json").write_bytes(b"one")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "c").write_bytes(b"three")
    first = weights_digest(tmp_path)
    # SHA-256 over "a.json\0" + SHA-256("one") + "\0" + "b.bin\0" + SHA-256("two") + "\0".
    assert first == "ec32ea88f6e230a3a61d628212336c74f94ccf0b8dc522aa57f13607a1bae027"
    (tmp_path / "b.bin").rename(tmp_path / "c.bin")
    assert weights_digest(tmp_path) != first


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 4096, (100).to_bytes(8, "little") + b"{"])
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, config: OmniConfig, content: bytes):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors can't be read as safetensors: "):
        load_weights(tmp_path, config)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": ' + '{"a": ' * 100_000])
def test_an_index_that_names_no_files_is_named(tmp_path: Path, config: OmniConfig, content: str):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json can't be read as an index: "):
        load_weights(tmp_path, config)


@pytest.mark.parametrize(
    "name",
    [1, None, True, {}, [], "", "..", "../a.safetensors", "/a.safetensors", "b/c", "a\0", "a\n", "\ud800", "é" * 128],
)
def test_an_index_that_gives_a_tensor_no_name_of_a_file_beside_it_is_named(
    tmp_path: Path, config: OmniConfig, name: object
):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(CheckpointError) as error:
        load_weights(tmp_path, config)
    assert str(error.value) == (
        f"{tmp_path}/model.safetensors.index.json gives 'a.weight' the file {name!r:.100}, "
        "which is no name of a file beside it; fetch it again"
    )


def test_a_long_name_in_an_index_is_cut_short_in_the_error(tmp_path: Path, config: OmniConfig):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b" * 5000}}))
    with pytest.raises(CheckpointError, match="no name of a file beside it") as error:
        load_weights(tmp_path, config)
    assert len(str(error.value)) < 300 + len(str(tmp_path))


def test_a_tensor_that_lies_in_two_files_is_named(tmp_path: Path, config: OmniConfig, disk: dict[str, Tensor]):
    files = ("one.safetensors", "two.safetensors")
    save_file(disk, tmp_path / "one.safetensors")
    save_file({"thinker.lm_head.weight": disk["thinker.lm_head.weight"]}, tmp_path / "two.safetensors")
    index = {"weight_map": dict(zip(("a", "b"), files, strict=True))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        load_weights(tmp_path, config)
    assert str(error.value) == (
        f"{tmp_path}/two.safetensors holds tensors that another file of the folder holds too: thinker.lm_head.weight; "
        "fetch the checkpoint into an empty folder"
    )


def test_a_folder_in_place_of_a_file_of_tensors_is_said_to_be_one(tmp_path: Path, config: OmniConfig):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors can't be read: Is a directory; it must be a file"):
        load_weights(tmp_path, config)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_said_to_be_that_and_not_absent(tmp_path: Path, config: OmniConfig):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    path.chmod(0)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors can't be read: Permission denied; it must be a file"
    ):
        load_weights(tmp_path, config)
