"""The Thinker against Hugging Face and against itself: one pass, many passes, company."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels import Segment, make_plan, ops_for
from engine.model.config import OmniConfig
from engine.model.positions import prompt_positions
from engine.model.thinker import Thinker
from engine.model.weights import load_weights
from tests.hf import load_hf

PAGE_SIZE = 16
PROMPT = [481, 263, 10, 87, 104, 289, 356, 276, 355, 361, 44, 63, 32, 195, 169, 482, 10, 481, 271, 10, 300, 301, 302]


@pytest.fixture(scope="module")
def thinker(tiny_checkpoint: Path) -> Thinker:
    config = OmniConfig.load(tiny_checkpoint)
    return Thinker(config, load_weights(tiny_checkpoint, config), ops_for("cpu"))


class Cache:
    """Pages of zeros and the positions 0… of one text sequence, which lies on the pages named."""

    def __init__(self, thinker: Thinker, pages: tuple[int, ...]) -> None:
        shape = (thinker.layers, max(pages) + 1, PAGE_SIZE, thinker.kv_heads, thinker.head_dim)
        self.thinker, self.pages = thinker, pages
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    @torch.inference_mode()
    def run(self, ids: list[int], start: int = 0) -> tuple[Tensor, Tensor]:
        at = torch.arange(start, start + len(ids)).float().expand(3, -1)
        plan = make_plan([Segment(0, len(ids), start, self.pages)], at, PAGE_SIZE, "cpu")
        x = self.thinker.embed(torch.tensor(ids))
        hidden, states = self.thinker.forward(x, plan, self.keys, self.values, states=True)
        assert states is not None
        return hidden, states


@torch.inference_mode()
def hf_states(folder: Path, ids: list[int]):
    model = load_hf(folder).thinker
    model.model.rope_deltas = None
    tokens = torch.tensor([ids])
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True, use_cache=False)


@pytest.mark.hf
def test_a_prefill_equals_hugging_face_at_the_accepted_layer_after_the_norm_and_in_the_logits(thinker, tiny_checkpoint):
    theirs = hf_states(tiny_checkpoint, PROMPT)
    hidden, states = Cache(thinker, (0, 1)).run(PROMPT)
    # hidden_states[k] is what layer index k - 1 put out; the tiny Talker accepts k = 4.
    assert len(theirs.hidden_states) == 7
    torch.testing.assert_close(states, theirs.hidden_states[4][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden, theirs.hidden_states[6][0], rtol=1e-4, atol=1e-4)
    logits = thinker.logits(hidden)
    torch.testing.assert_close(logits, theirs.logits[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(logits.argmax(-1), theirs.logits[0].argmax(-1))


@pytest.mark.hf
def test_every_layer_of_a_prefill_equals_hugging_face(thinker, tiny_checkpoint):
    theirs = hf_states(tiny_checkpoint, PROMPT)
    cache = Cache(thinker, (0, 1))
    at = torch.arange(len(PROMPT)).float().expand(3, -1)
    plan = make_plan([Segment(0, len(PROMPT), 0, (0, 1))], at, PAGE_SIZE, "cpu")
    x = thinker.embed(torch.tensor(PROMPT))
    for tap in range(6):
        _, tapped = thinker.stack.forward(x, plan, cache.keys, cache.values, tap=tap)
        torch.testing.assert_close(tapped, theirs.hidden_states[tap][0], rtol=1e-4, atol=1e-4)


@pytest.mark.hf
def test_twelve_greedy_steps_with_paged_caches_equal_hugging_face_recomputing_everything(thinker, tiny_checkpoint):
    cache = Cache(thinker, (5, 2, 9))
    ours, theirs = [], []
    hidden, _ = cache.run(PROMPT)
    for step in range(12):
        ours.append(int(thinker.logits(hidden[-1:]).argmax()))
        theirs.append(int(hf_states(tiny_checkpoint, PROMPT + theirs).logits[0, -1].argmax()))
        hidden, _ = cache.run(ours[-1:], len(PROMPT) + step)
    assert ours == theirs
    assert len(set(ours)) > 6


def test_decoding_token_by_token_on_scattered_pages_gives_the_bits_of_one_prefill(thinker):
    whole, whole_states = Cache(thinker, (0, 1)).run(PROMPT)
    cache = Cache(thinker, (7, 3))
    rows = [cache.run(PROMPT[i : i + 1], i) for i in range(len(PROMPT))]
    assert torch.equal(torch.cat([hidden for hidden, _ in rows]), whole)
    assert torch.equal(torch.cat([states for _, states in rows]), whole_states)


@pytest.mark.parametrize("cut", [4, 8, 12, 16, 20])
def test_a_prefill_cut_at_a_multiple_of_a_block_gives_the_bits_of_an_uncut_one(thinker, cut):
    whole, _ = Cache(thinker, (0, 1)).run(PROMPT)
    cache = Cache(thinker, (1, 0))
    parts = [cache.run(PROMPT[:cut])[0], cache.run(PROMPT[cut:], cut)[0]]
    assert torch.equal(torch.cat(parts), whole)


@torch.inference_mode()
def test_a_decode_row_beside_a_prefill_and_another_decode_row_has_the_bits_it_has_alone(thinker):
    alone = Cache(thinker, (0, 1))
    alone.run(PROMPT[:20])
    expected, _ = alone.run(PROMPT[20:21], 20)
    shared = Cache(thinker, (4, 2, 1, 0, 3, 5))
    for pages, count in (((4, 2), 20), ((1,), 9)):
        at = torch.arange(count).float().expand(3, -1)
        plan = make_plan([Segment(0, count, 0, pages)], at, PAGE_SIZE, "cpu")
        x = thinker.embed(torch.tensor(PROMPT[:count]))
        thinker.forward(x, plan, shared.keys, shared.values, states=False)
    # Three segments in one step: 7 new positions of a third sequence, one of the second, one of ours.
    segments = [Segment(0, 7, 0, (0,)), Segment(7, 1, 9, (1,)), Segment(8, 1, 20, (4, 2))]
    at = torch.tensor([0, 1, 2, 3, 4, 5, 6, 9, 20]).float().expand(3, -1)
    plan = make_plan(segments, at, PAGE_SIZE, "cpu")
    ids = torch.tensor([300, 301, 302, 303, 304, 305, 306, 307, PROMPT[20]])
    hidden, states = thinker.forward(thinker.embed(ids), plan, shared.keys, shared.values, states=False)
    assert states is None
    assert torch.equal(hidden[8:], expected)
    assert torch.equal(thinker.logits(hidden)[8:], thinker.logits(expected))
    assert plan.last.tolist() == [6, 7, 8]


@pytest.mark.hf
@torch.inference_mode()
def test_a_prompt_with_a_picture_equals_hugging_face_with_its_deepstack_rows(thinker, tiny_checkpoint):
    model = load_hf(tiny_checkpoint).thinker
    model.model.rope_deltas = None
    config = OmniConfig.load(tiny_checkpoint)
    ids = [481, 263, 10, 483, *[486] * 6, 484, 300, 301, 482, 10, 481, 271, 10]
    pixels = torch.randn(24, 1536, generator=torch.Generator().manual_seed(3))
    grid = torch.tensor([[1, 4, 6]])
    tokens = torch.tensor([ids])
    theirs = model(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        pixel_values=pixels,
        image_grid_thw=grid,
        output_hidden_states=True,
        use_cache=False,
    )
    picture = model.model.visual(pixels, grid_thw=grid)
    rows = tokens[0] == config.ids.image
    x = thinker.embed(tokens[0])
    x[rows] = picture.pooler_output
    at, _ = prompt_positions(ids, config, [(1, 4, 6)])
    plan = make_plan([Segment(0, len(ids), 0, (0, 1))], torch.from_numpy(at), PAGE_SIZE, "cpu")
    cache = Cache(thinker, (0, 1))
    extra = (rows, picture.deepstack_features)
    hidden, states = thinker.forward(x, plan, cache.keys, cache.values, states=True, deepstack=extra)
    torch.testing.assert_close(states, theirs.hidden_states[4][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden, theirs.hidden_states[6][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(thinker.logits(hidden), theirs.logits[0], rtol=1e-4, atol=2e-4)


def test_a_forward_without_states_gives_none_for_them(thinker):
    cache = Cache(thinker, (0,))
    plan = make_plan([Segment(0, 1, 0, (0,))], torch.zeros(3, 1), PAGE_SIZE, "cpu")
    hidden, states = thinker.forward(thinker.embed(torch.tensor([300])), plan, cache.keys, cache.values, states=False)
    assert states is None
    assert (thinker.layers, thinker.kv_heads, thinker.head_dim, thinker.hidden, thinker.vocab) == (6, 2, 32, 64, 512)
    assert thinker.logits(hidden).shape == (1, 512) and thinker.logits(hidden).dtype == torch.float32
