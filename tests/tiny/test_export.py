"""The exported folder: what the engine and Hugging Face load from it, and what is refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.config import OmniConfig
from engine.model.generation import Generation
from engine.model.omni import load_model
from engine.model.weights import expected_tensors
from engine.request import Sampling
from engine.tiny import tokenizer
from engine.tiny.export import VISION, write_trained
from engine.tiny.shapes import MAX_BYTES, config


@pytest.fixture(scope="module")
def spelled() -> dict[str, object]:
    return tokenizer.train(tokenizer.training_texts(0, []))


@pytest.fixture(scope="module")
def trained() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = expected_tensors(OmniConfig.parse(config()))
    return {
        name: torch.randn(shape, generator=draw) * 0.1 for name, shape in shapes.items() if not name.startswith(VISION)
    }


def test_the_engine_loads_what_was_written_rounded_to_bfloat16(tmp_path: Path, trained, spelled):
    size = write_trained(tmp_path, trained, spelled)
    assert size == sum(path.stat().st_size for path in tmp_path.iterdir()) <= MAX_BYTES
    model = load_model(tmp_path)
    wanted = trained["thinker.model.embed_tokens.weight"]
    assert torch.equal(model.thinker.embedding, wanted.bfloat16().float())
    assert model.talker is not None and model.code2wav is not None
    generation = Generation.load(tmp_path)
    assert generation.text_temperature == 0 and generation.speech(0) == Sampling(top_k=50)


@pytest.mark.hf
def test_hugging_face_loads_the_same_folder(tmp_path: Path, trained, spelled):
    from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

    write_trained(tmp_path, trained, spelled)
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    wanted = trained["thinker.model.embed_tokens.weight"]
    assert torch.equal(model.thinker.get_input_embeddings().weight, wanted.bfloat16().float())
    assert AutoTokenizer.from_pretrained(tmp_path).decode([72, 105]) == "Hi"


def test_what_does_not_fit_is_named(tmp_path: Path, trained, spelled):
    name = "thinker.model.norm.weight"
    without = {key: value for key, value in trained.items() if key != name}
    with pytest.raises(ValueError, match=f"missing or unknown, such as {name}"):
        write_trained(tmp_path, without, spelled)
    with pytest.raises(ValueError, match=rf"{name} is \[3\], must be \[192\]"):
        write_trained(tmp_path, {**trained, name: torch.ones(3)}, spelled)
    with pytest.raises(ValueError, match=r"such as thinker\.nothing"):
        write_trained(tmp_path, {**trained, "thinker.nothing": torch.ones(1)}, spelled)
    assert not any(tmp_path.iterdir())
