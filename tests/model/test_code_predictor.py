from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels import ops_for
from engine.model.code_predictor import CodePredictor
from engine.model.config import OmniConfig
from engine.model.weights import Weights, load_weights
from tests.hf import load_hf


@pytest.fixture(scope="module")
def weights(tiny_checkpoint: Path) -> Weights:
    return load_weights(tiny_checkpoint, OmniConfig.load(tiny_checkpoint))


@pytest.fixture(scope="module")
def predictor(tiny_checkpoint: Path, weights: Weights) -> CodePredictor:
    config = OmniConfig.load(tiny_checkpoint).predictor
    assert config is not None
    return CodePredictor(config, weights, ops_for("cpu"))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def greedy(logits: Tensor, group: int) -> Tensor:
    return logits.argmax(-1)


def frames_of(rows: int, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """The Talker's rows, layer-0 codes and their embeddings."""
    generator = torch.Generator().manual_seed(4)
    y, c0 = torch.randn(rows, 48, generator=generator), torch.randint(0, 64, (rows,), generator=generator)
    return y, c0, weights["talker.embed"][c0]


def hugging_face(model: Any, y: Tensor, first: Tensor) -> Tensor:
    inputs = torch.stack([y, first])[None]
    return model.talker.code_predictor.generate(inputs_embeds=inputs, max_new_tokens=15, do_sample=False)[0]


@pytest.mark.hf
def test_fifteen_greedy_codes_and_their_summed_embedding_are_hugging_faces(tiny_checkpoint, weights, predictor):
    model = load_hf(tiny_checkpoint)
    y, c0, first = frames_of(6, weights)
    codes, total = predictor.frame(y, c0, first, greedy)
    tables = model.talker.code_predictor.get_input_embeddings()
    for row in range(6):
        want = hugging_face(model, y[row], first[row])
        assert codes[row].tolist() == want.tolist()
        summed = first[row] + sum(table(code) for table, code in zip(tables, want, strict=True))
        torch.testing.assert_close(total[row], summed, rtol=0, atol=1e-5)
    assert len({tuple(row) for row in codes.tolist()}) == 6  # the rows differ, so the comparison says something


def test_a_frame_has_the_same_bits_alone_and_inside_any_batch(weights, predictor):
    y, c0, first = frames_of(9, weights)
    codes, total = predictor.frame(y, c0, first, greedy)
    for low, high in ((0, 1), (3, 4), (8, 9), (0, 4), (2, 7), (1, 9)):
        some_codes, some_total = predictor.frame(y[low:high], c0[low:high], first[low:high], greedy)
        assert torch.equal(some_codes, codes[low:high])
        assert torch.equal(some_total, total[low:high])


def test_the_logits_of_a_frame_have_the_same_bits_alone_and_inside_a_batch(weights, predictor):
    y, c0, first = frames_of(5, weights)
    seen: list[Tensor] = []

    def note(logits: Tensor, group: int) -> Tensor:
        seen.append(logits)
        return logits.argmax(-1)

    predictor.frame(y, c0, first, note)
    together = list(seen)
    for row in range(5):
        seen.clear()
        predictor.frame(y[row : row + 1], c0[row : row + 1], first[row : row + 1], note)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(seen, together, strict=True))


def test_each_group_is_asked_for_once_in_order_and_gets_what_was_chosen(weights, predictor):
    y, c0, first = frames_of(2, weights)
    asked: list[tuple[int, tuple[int, ...], torch.dtype]] = []

    def choose(logits: Tensor, group: int) -> Tensor:
        asked.append((group, tuple(logits.shape), logits.dtype))
        return torch.tensor([group, 63 - group])

    codes, total = predictor.frame(y, c0, first, choose)
    assert asked == [(group, (2, 64), torch.float32) for group in range(1, 16)]
    assert codes.tolist() == [list(range(1, 16)), [63 - group for group in range(1, 16)]]
    summed = first[0] + sum(weights[f"predictor.embed.{group - 1}"][group] for group in range(1, 16))
    torch.testing.assert_close(total[0], summed, rtol=0, atol=1e-5)


def test_an_early_choice_changes_what_follows_and_the_next_frame_starts_afresh(weights, predictor):
    y, c0, first = frames_of(1, weights)
    usual, _ = predictor.frame(y, c0, first, greedy)

    def other(logits: Tensor, group: int) -> Tensor:
        return (usual[:, 0] + 1) % 64 if group == 1 else logits.argmax(-1)

    turned, _ = predictor.frame(y, c0, first, other)
    assert turned[0, 1:].tolist() != usual[0, 1:].tolist()
    again, _ = predictor.frame(y, c0, first, greedy)
    assert again.tolist() == usual.tolist()


def test_bfloat16_rows_are_summed_in_float32_and_rounded_once(tiny_checkpoint):
    config = OmniConfig.load(tiny_checkpoint)
    assert config.predictor is not None
    rounded = load_weights(tiny_checkpoint, config, torch.bfloat16)
    y, c0, first = frames_of(2, rounded)
    codes, total = CodePredictor(config.predictor, rounded, ops_for("cpu")).frame(y.bfloat16(), c0, first, greedy)
    tables = [rounded[f"predictor.embed.{group}"] for group in range(15)]
    exact = first.double() + sum(table[codes[:, group]].double() for group, table in enumerate(tables))
    assert total.dtype == torch.bfloat16
    assert torch.equal(total, exact.to(torch.bfloat16))
