"""Choosing tokens: the random numbers, the processors against transformers' own, and what company must not change."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.kernels import ops_for
from engine.request import Sampling
from engine.sampler import (
    ADJUSTED,
    CLASSES,
    GREEDY,
    SAMPLED,
    SAMPLED_ADJUSTED,
    TALKER_STREAM,
    THINKER_STREAM,
    Sampler,
    SamplingRows,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    narrow,
    penalise,
    penalise_generated,
    philox,
    step_logprobs,
    uniforms,
)
from tests.naive import Past, choose_one

INF = float("inf")


def opened(
    wishes: Sequence[Sampling], vocab: int, prompts: Sequence[Sequence[int]] = (), *, codebooks: int = 1
) -> Sampler:
    """A sampler whose slot n holds a request that asks for `wishes[n]`, with the prompt `prompts[n]` if there is one."""
    made = Sampler(len(wishes), vocab, stream=THINKER_STREAM, codebooks=codebooks, ops=ops_for("cpu"))
    for slot, wish in enumerate(wishes):
        made.open(slot, wish, np.array(prompts[slot], dtype=np.int32) if prompts else None)
    return made


def rows_of(wishes: Sequence[Sampling], steps: Sequence[int]) -> SamplingRows:
    """The rows of one step, row n in slot n."""
    return opened(wishes, 8).rows(wishes, torch.arange(len(wishes)), steps)


def chosen(wishes: Sequence[Sampling], logits: Tensor, steps: Sequence[int], seen: Tensor | None = None) -> list[int]:
    """The tokens of one step: row n is in slot n, whose prompt holds the ids of `seen[n]` [V] bool."""
    prompts = [] if seen is None else [row.nonzero()[:, 0].tolist() for row in seen]
    sampler = opened(wishes, logits.shape[1], prompts)
    return sampler.choose(logits, sampler.rows(wishes, torch.arange(len(wishes)), steps)).tolist()


def random_logits(rows: int, vocabulary: int, seed: int = 0, *, ties: bool = False) -> Tensor:
    """Logits of a normal distribution, [rows, vocabulary]; with `ties` on a grid so coarse that most values repeat."""
    values = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    return values.round() if ties else values


# --- Random numbers ---


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    """Known answers of Philox4x32-10 from the authors' Random123 library."""
    made = philox(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert tuple(int(word) for word in made[:, 0]) == words


def test_the_first_number_of_seed_zero_is_made_of_the_first_53_known_bits() -> None:
    expected = ((0x6627E8D5 << 21) + (0xE169C58D >> 11) + 0.5) / 2**53
    assert uniforms([0], [0], 1, THINKER_STREAM)[0, 0] == expected


def test_each_part_of_the_key_changes_the_number() -> None:
    one = uniforms([7], [3], 1, THINKER_STREAM)[0, 0]
    assert uniforms([8], [3], 1, THINKER_STREAM)[0, 0] != one
    assert uniforms([7 + 2**32], [3], 1, THINKER_STREAM)[0, 0] != one  # the seed's high word counts too
    assert uniforms([7], [4], 1, THINKER_STREAM)[0, 0] != one
    assert uniforms([7], [3], 2, THINKER_STREAM)[0, 1] != one
    assert uniforms([7], [3], 1, TALKER_STREAM)[0, 0] != one
    assert uniforms([7], [3], 1, THINKER_STREAM)[0, 0] == one


def test_a_number_does_not_depend_on_the_rows_beside_it_nor_on_how_many_codebooks_there_are() -> None:
    seeds, steps = [5, 2**63 + 1, 0, 5, 9], [0, 12, 12, 1, 4000]
    together = uniforms(seeds, steps, 16, TALKER_STREAM)
    assert together.shape == (5, 16)
    for row, (seed, step) in enumerate(zip(seeds, steps, strict=True)):
        alone = uniforms([seed], [step], 16, TALKER_STREAM)
        assert np.array_equal(alone[0], together[row])
        assert uniforms([seed], [step], 1, TALKER_STREAM)[0, 0] == together[row, 0]
    assert len(np.unique(together)) == 5 * 16


def test_numbers_are_spread_evenly_between_zero_and_one() -> None:
    numbers = uniforms([1] * 2000, list(range(2000)), 16, TALKER_STREAM).ravel()
    assert numbers.min() > 0 and numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > 0.01
    neighbours = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(neighbours) < 0.02


# --- Processors equal transformers' own ---


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("penalty", [1.05, 1.3, 2.0])
def test_the_penalty_equals_transformers_over_the_set_of_seen_tokens(penalty: float, ties: bool) -> None:
    logits = random_logits(4, 50, ties=ties)
    ids = torch.randint(0, 50, (4, 20), generator=torch.Generator().manual_seed(1))
    ids[:, 10:] = ids[:, :10]  # twice seen is penalised once
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter(1, ids, True)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    assert torch.equal(penalise(logits, seen, torch.full((4,), penalty)), expected)


def test_the_penalty_pushes_both_signs_down_and_leaves_suppressed_and_unseen_tokens() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -INF, 0.0]])
    seen = torch.tensor([[True, True, False, True, True]])
    assert penalise(logits, seen, torch.tensor([2.0])).tolist() == [[1.0, -4.0, 2.0, -INF, 0.0]]


def test_a_row_without_penalty_keeps_its_logits_beside_one_with() -> None:
    logits = random_logits(2, 30)
    seen = torch.ones(2, 30, dtype=torch.bool)
    made = penalise(logits, seen, torch.tensor([1.0, 1.5]))
    assert torch.equal(made[0], logits[0])
    assert (made[1] < logits[1]).all()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 7, 50, 99])
def test_top_k_equals_transformers_and_keeps_ties(top_k: int, ties: bool) -> None:
    logits = random_logits(6, 50, ties=ties)
    assert torch.equal(keep_top_k(logits, torch.full((6,), top_k)), TopKLogitsWarper(top_k)(None, logits))


def test_top_k_keeps_all_that_tie_with_the_kth() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    assert keep_top_k(logits, torch.tensor([2])).tolist() == [[-INF, 3.0, 2.0, 2.0, 2.0, -INF]]


def test_top_k_zero_is_off_and_each_row_has_its_own() -> None:
    logits = random_logits(3, 20)
    kept = (keep_top_k(logits, torch.tensor([0, 1, 5])) > -INF).sum(-1)
    assert kept.tolist() == [20, 1, 5]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.8, 0.95])
def test_top_p_equals_transformers(top_p: float) -> None:
    logits = random_logits(16, 50)
    assert torch.equal(keep_top_p(logits, torch.full((16,), top_p)), TopPLogitsWarper(top_p)(None, logits))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.8, 0.95])
def test_top_p_keeps_as_many_of_each_tied_value_as_transformers(top_p: float) -> None:
    """Which of the tied tokens stay is chance there (its sort is not stable), so the values are compared, in order."""
    logits = random_logits(16, 50, ties=True)
    ours, theirs = keep_top_p(logits, torch.full((16,), top_p)), TopPLogitsWarper(top_p)(None, logits)
    assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)


def test_of_tied_tokens_top_p_drops_the_lower_ids() -> None:
    split = 0
    for logits in random_logits(16, 50, ties=True):
        kept = keep_top_p(logits[None], torch.tensor([0.9]))[0] > -INF
        for value in set(logits.tolist()):
            stay, go = (kept & (logits == value)).nonzero()[:, 0], (~kept & (logits == value)).nonzero()[:, 0]
            if len(stay) and len(go):
                split += 1
                assert go.max() < stay.min()
    assert split > 3  # some ties were cut, so this test could fail


def test_top_p_after_top_k_counts_only_what_top_k_kept() -> None:
    logits = random_logits(8, 40)
    ours = keep_top_p(keep_top_k(logits, torch.full((8,), 5)), torch.full((8,), 0.7))
    theirs = TopPLogitsWarper(0.7)(None, TopKLogitsWarper(5)(None, logits))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.3])
def test_top_p_keeps_at_least_the_likeliest_token(top_p: float) -> None:
    logits = random_logits(5, 30)
    kept = keep_top_p(logits, torch.full((5,), top_p))
    assert torch.equal(kept.argmax(-1), logits.argmax(-1))
    assert ((kept > -INF).sum(-1) >= 1).all()


def test_top_p_one_is_off_even_where_small_probabilities_round_to_nothing() -> None:
    logits = torch.tensor([[0.0, -200.0, -300.0]])
    assert torch.equal(keep_top_p(logits, torch.tensor([1.0])), logits)


def test_top_p_of_known_probabilities_keeps_the_least_set_that_covers_it() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]] * 3).log()
    kept = keep_top_p(logits, torch.tensor([0.35, 0.65, 0.85])) > -INF
    assert kept.tolist() == [
        [False, True, False, False],
        [False, True, False, True],
        [False, True, True, True],
    ]


@pytest.mark.parametrize("min_p", [0.01, 0.2, 0.9])
def test_min_p_equals_transformers(min_p: float) -> None:
    logits = random_logits(16, 50)
    ours = keep_min_p(logits, torch.full((16,), min_p).log())
    assert torch.equal(ours, MinPLogitsWarper(min_p)(None, logits))
    assert 0 < (ours == -INF).sum() < ours.numel()


def test_min_p_keeps_all_that_tie_with_the_likeliest_and_zero_is_off() -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, -INF], [3.0, -90.0, -INF, 0.0]])
    made = narrow(logits, rows_of([Sampling(temperature=1.0, min_p=1.0), Sampling(temperature=1.0)], [0, 0]))
    assert made.tolist() == [[3.0, -INF, 3.0, -INF], [3.0, -90.0, -INF, 0.0]]


def test_min_p_comes_before_top_p_which_then_covers_less() -> None:
    """Of 0.5, 0.3 and 0.2 min-p drops the last; 0.6 of the rest is the first alone, 0.6 of all would be two."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    both = narrow(logits, rows_of([Sampling(temperature=1.0, min_p=0.5, top_p=0.6)], [0]))
    without = narrow(logits, rows_of([Sampling(temperature=1.0, top_p=0.6)], [0]))
    assert (both > -INF).tolist() == [[True, False, False]]
    assert (without > -INF).tolist() == [[True, True, False]]


def test_frequency_and_presence_are_subtracted_by_count_and_by_occurrence() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, -INF], [1.0, -1.0, 2.0, 0.5]])
    counts = torch.tensor([[0, 1, 3, 2], [5, 0, 1, 0]], dtype=torch.int32)
    made = penalise_generated(logits, counts, torch.tensor([0.5, 0.0]), torch.tensor([0.25, -1.0]))
    assert made.tolist() == [[1.0, -1.75, 0.25, -INF], [2.0, -1.0, 3.0, 0.5]]
    assert penalise_generated(logits, counts, None, torch.tensor([1.0, 0.0]))[0].tolist() == [1.0, -2.0, 1.0, -INF]
    assert penalise_generated(logits, counts, torch.tensor([1.0, 0.0]), None)[0].tolist() == [1.0, -2.0, -1.0, -INF]


def test_everything_runs_in_the_order_that_is_written_down() -> None:
    """Each draw lands where its number falls in the running sum of what transformers' chain and the formulas leave."""
    wish = Sampling(
        temperature=0.7,
        top_k=8,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=-0.3,
        logit_bias={2: 1.5, 9: -2.0},
        seed=11,
    )
    logits, prompt, made = random_logits(1, 40, seed=5) / 3, [3, 9, 9, 21, 30], [7, 7, 9]
    logits[0, [2, 7, 9]] = torch.tensor([0.5, 3.0, 5.0])
    scores = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + made]), logits).clone()
    scores[0, 7] -= 2 * 0.4 - 0.3
    scores[0, 9] -= 0.4 - 0.3 + 2.0
    scores[0, 2] += 1.5
    kept = [scores := TemperatureLogitsWarper(0.7)(None, scores)]
    kept += [
        scores := warper(None, scores) for warper in (MinPLogitsWarper(0.1), TopKLogitsWarper(8), TopPLogitsWarper(0.9))
    ]
    sizes = [int((one > -INF).sum()) for one in kept]
    assert sizes == sorted(set(sizes), reverse=True)  # each of them drops something
    sampler, slots = opened([wish], 40, [prompt]), torch.tensor([0])
    for step, token in enumerate(made):
        sampler.note(sampler.rows([wish], slots, [step]), torch.tensor([token]))
    drawn = torch.cat([sampler.choose(logits, sampler.rows([wish], slots, [step])) for step in range(300)])
    numbers = torch.from_numpy(uniforms([11] * 300, list(range(300)), 1, THINKER_STREAM)[:, 0])
    edges = scores.softmax(-1)[0].double().cumsum(-1)
    assert torch.equal(drawn, torch.searchsorted(edges, numbers * edges[-1]))
    assert {2, 7, 9} < set(drawn.tolist())


# --- What a slot remembers ---


def greedy_run(sampler: Sampler, wish: Sampling, slot: int, logits: Tensor, steps: int) -> list[int]:
    """The tokens that `logits` [1, V], the same at each step, give one after the other."""
    made = []
    for step in range(steps):
        rows = sampler.rows([wish], torch.tensor([slot]), [step])
        token = sampler.choose(logits, rows)
        sampler.note(rows, token)
        made += token.tolist()
    return made


def test_the_prompt_counts_for_repetition_but_not_for_frequency_nor_presence() -> None:
    logits = torch.tensor([[3.0, 2.9, 0.0]])
    assert chosen([Sampling(repetition_penalty=1.2)], logits, [0], torch.tensor([[True, False, False]])) == [1]
    wish = Sampling(frequency_penalty=2.0, presence_penalty=2.0)
    assert chosen([wish], logits, [0], torch.tensor([[True, False, False]])) == [0]


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (Sampling(), [0, 0, 0, 0, 0]),
        (Sampling(frequency_penalty=0.3), [0, 1, 0, 1, 2]),  # 3.0 2.8 2.5 sink by 0.3 each time
        (Sampling(presence_penalty=0.3), [0, 1, 0, 0, 0]),  # … and once only
        (Sampling(presence_penalty=1.0), [0, 1, 2, 0, 0]),
        (Sampling(frequency_penalty=-1.0), [0, 0, 0, 0, 0]),
        (Sampling(repetition_penalty=1.5), [0, 1, 2, 0, 0]),
        (Sampling(logit_bias={2: 0.4}), [0, 0, 0, 0, 0]),
        (Sampling(logit_bias={2: 0.4}, presence_penalty=0.3), [0, 2, 1, 0, 0]),
        (Sampling(logit_bias={0: -100.0, 1: -100.0}), [2, 2, 2, 2, 2]),
        (Sampling(logit_bias={3: 100.0}), [3, 3, 3, 3, 3]),
    ],
)
def test_what_was_generated_weighs_on_what_comes_next(wish: Sampling, expected: list[int]) -> None:
    assert greedy_run(opened([wish], 4), wish, 0, torch.tensor([[3.0, 2.8, 2.5, -5.0]]), 5) == expected


EVERYTHING = Sampling(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, logit_bias={1: 5.0, 4: -5.0})


def test_a_slot_forgets_its_last_request() -> None:
    logits = random_logits(1, 30)
    used = opened([EVERYTHING, EVERYTHING], 30, [list(range(20))] * 2)
    greedy_run(used, EVERYTHING, 0, logits, 6)
    for wish in (Sampling(repetition_penalty=1.2), Sampling(frequency_penalty=1.0), Sampling(logit_bias={5: 1.0})):
        used.open(0, wish, np.array([2, 3], dtype=np.int32))
        # The neighbour's wishes make all states count for this row too.
        rows = used.rows([wish, EVERYTHING], torch.tensor([0, 1]), [0, 0])
        alone = chosen([wish], logits, [0], torch.arange(30)[None] // 2 == 1)
        assert used.choose(logits.expand(2, 30), rows)[0].item() == alone[0]
        assert greedy_run(used, wish, 0, logits, 6) == greedy_run(opened([wish], 30, [[2, 3]]), wish, 0, logits, 6)


def test_only_what_is_asked_for_takes_memory() -> None:
    sampler = opened([Sampling(), Sampling(temperature=1.0)], 30)
    assert (sampler._seen, sampler._counts, sampler._bias) == (None, None, None)
    sampler.open(0, Sampling(logit_bias={1: 1.0}), None)
    assert sampler._bias is not None and sampler._bias.shape == (2, 30)
    assert (sampler._seen, sampler._counts) == (None, None)


# --- Drawing ---


def test_a_number_picks_the_token_whose_share_it_falls_in() -> None:
    logits = torch.tensor([[0.25, 0.25, 0.5]]).log().expand(6, 3)
    numbers = torch.tensor([1e-12, 0.2, 0.3, 0.499, 0.501, 1 - 1e-12], dtype=torch.float64)
    assert draw(logits, numbers).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_number_on_the_edge_of_two_shares_belongs_to_the_lower_one() -> None:
    edges = torch.tensor([0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    assert draw(torch.zeros(4, 4), edges).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [2.0**-54, 0.1, 0.5, 0.9, 1 - 2.0**-53, 1.0])
def test_a_dropped_token_is_never_drawn_whatever_the_number(number: float) -> None:
    logits = random_logits(64, 33, seed=3)
    dropped = random_logits(64, 33, seed=4) < 0
    dropped[:, 0] = True  # nothing may fall to the first …
    dropped[:, -1] = True  # … nor to the last for lack of another
    dropped[:, 16] = False
    picked = draw(logits.masked_fill(dropped, -INF), torch.full((64,), number, dtype=torch.float64))
    assert not dropped.gather(1, picked[:, None]).any()


def chi_square(counts: Tensor, share: Tensor) -> float:
    """The p value of `counts` [V] under the probabilities `share` [V]; a count where the share is 0 gives 0."""
    possible = share > 0
    if counts[~possible].sum() > 0:
        return 0.0
    expected = share[possible].double()
    expected = expected / expected.sum() * counts.sum()
    return float(stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue)


def test_the_chi_square_of_these_tests_notices_a_wrong_distribution() -> None:
    share = torch.tensor([0.5, 0.3, 0.2])
    assert chi_square(torch.tensor([10_000, 6_000, 4_000]), share) > 0.9
    assert chi_square(torch.tensor([9_600, 6_200, 4_200]), share) < 1e-4


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.0, 4, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.3),
        (0.9, 6, 0.7, 0.1),
        (1.7, 5, 0.95, 0.4),
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    draws = 20_000
    logits = random_logits(1, 12, seed=8) / 3
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    scores = MinPLogitsWarper(min_p)(None, scores) if min_p else scores
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    wish = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=42)
    sampler = opened([wish], 12)
    rows = sampler.rows([wish] * draws, torch.zeros(draws, dtype=torch.int64), range(draws))
    counts = sampler.choose(logits.expand(draws, 12), rows).bincount(minlength=12)
    assert (counts > 0).sum() > 1
    assert chi_square(counts, scores.softmax(-1)[0]) > 0.001


def test_the_codebooks_of_a_frame_are_drawn_independently() -> None:
    logits, wish = torch.zeros(2000, 4), Sampling(temperature=1.0)
    sampler = opened([wish], 4, codebooks=2)
    rows = sampler.rows([wish] * 2000, torch.zeros(2000, dtype=torch.int64), range(2000))
    first, second = sampler.choose(logits, rows, 0), sampler.choose(logits, rows, 1)
    assert chi_square((first * 4 + second).bincount(minlength=16), torch.full((16,), 1 / 16)) > 0.001


# --- Classes and company ---

PENALTY = Sampling(repetition_penalty=1.4)
BIAS = Sampling(logit_bias={3: 2.5})
WARM = Sampling(temperature=0.2, seed=5)
HOT = Sampling(temperature=1.3, top_k=7, top_p=0.9, repetition_penalty=1.2, seed=77)


@pytest.mark.parametrize(
    ("wishes", "least"),
    [
        ([Sampling()], GREEDY),
        ([Sampling(top_k=5, top_p=0.5, min_p=0.3, seed=9)], GREEDY),
        ([Sampling(), PENALTY], ADJUSTED),
        ([Sampling(), Sampling(frequency_penalty=-0.1)], ADJUSTED),
        ([Sampling(), Sampling(presence_penalty=0.1)], ADJUSTED),
        ([Sampling(), BIAS], ADJUSTED),
        ([Sampling(), WARM], SAMPLED),
        ([PENALTY, WARM], SAMPLED_ADJUSTED),
        ([Sampling(), HOT], SAMPLED_ADJUSTED),
    ],
)
def test_a_step_takes_the_least_class_that_covers_its_rows_and_counts_it(wishes: list[Sampling], least: str) -> None:
    sampler = opened(wishes, 10)
    rows = sampler.rows(wishes, torch.arange(len(wishes)), [0] * len(wishes))
    assert rows.kind == least
    counted = {f"{least}_steps": 1, f"{least}_rows": len(wishes)}
    assert sampler.counters == {f"{kind}_{what}": 0 for kind in CLASSES for what in ("steps", "rows")} | counted


@pytest.mark.parametrize("company", [[], [PENALTY], [BIAS], [WARM], [HOT], [HOT, PENALTY, WARM, EVERYTHING]])
@pytest.mark.parametrize("ties", [False, True])
def test_a_greedy_row_gets_the_largest_logit_in_every_class(company: list[Sampling], ties: bool) -> None:
    rows = 1 + len(company)
    for seed in range(20):
        logits = random_logits(rows, 60, seed, ties=ties)
        seen = torch.ones(rows, 60, dtype=torch.bool)
        lowest_of_the_largest = logits[0].tolist().index(max(logits[0].tolist()))
        assert chosen([Sampling(), *company], logits, [seed] * rows, seen)[0] == lowest_of_the_largest


@pytest.mark.parametrize("company", [[], [Sampling()], [HOT], [WARM], [EVERYTHING]])
def test_a_greedy_row_with_penalty_gets_the_same_token_in_every_class_that_covers_it(company: list[Sampling]) -> None:
    rows = 1 + len(company)
    moved = 0
    for seed in range(20):
        logits = random_logits(rows, 30, seed)
        seen = random_logits(rows, 30, seed + 100) > 0
        expected = RepetitionPenaltyLogitsProcessor(1.4)(seen[:1].nonzero()[:, 1][None], logits[:1]).argmax(-1).item()
        assert chosen([PENALTY, *company], logits, [seed] * rows, seen)[0] == expected
        moved += expected != logits[0].argmax().item()
    assert moved > 0  # the penalty changed at least one choice, so this test could fail


VOCAB = 67  # no multiple of a vector's width, so that a row's numbers lie at another place in it in company
WISHES = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.8, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.7, 0.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -0.2, 1.1]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.3, 0.7, 4.0]), max_size=3),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=150, deadline=None)
@given(
    wishes=st.lists(WISHES, min_size=1, max_size=6), order=st.randoms(use_true_random=False), number=st.integers(0, 99)
)
def test_a_row_gets_the_same_tokens_alone_and_at_any_place_in_company(wishes, order, number) -> None:
    """Each request runs some steps alone, then all run together, each from another slot and another place a step."""
    steps = 4
    logits = torch.stack(
        [random_logits(len(wishes), VOCAB, 1000 * number + step, ties=step == 2) for step in range(steps)]
    )
    prompts = [[place, 7, 7, 20 + place] for place in range(len(wishes))]
    alone = []
    for place, wish in enumerate(wishes):
        sampler, tokens = opened([wish], VOCAB, [prompts[place]]), []
        for step in range(steps):
            rows = sampler.rows([wish], torch.tensor([0]), [step])
            token = sampler.choose(logits[step, place : place + 1], rows)
            sampler.note(rows, token)
            tokens.append(int(token))
        alone.append(tokens)
    sampler, together = opened(wishes, VOCAB, prompts), [[0] * steps for _ in wishes]
    for step in range(steps):
        places = order.sample(range(len(wishes)), len(wishes))
        rows = sampler.rows([wishes[place] for place in places], torch.tensor(places), [step] * len(places))
        made = sampler.choose(logits[step, places], rows)
        sampler.note(rows, made)
        for place, token in zip(places, made.tolist(), strict=True):
            together[place][step] = token
    assert together == alone


@settings(max_examples=200, deadline=None)
@given(wish=WISHES, number=st.integers(0, 999))
def test_a_row_gets_what_the_naive_loop_chooses(wish: Sampling, number: int) -> None:
    prompt, made = [1, 2, 3, 2], []
    sampler, slots = opened([wish], VOCAB, [prompt]), torch.tensor([0])
    for step in range(5):
        logits = random_logits(1, VOCAB, number * 10 + step, ties=step == 3)
        rows = sampler.rows([wish], slots, [step])
        token = sampler.choose(logits, rows)
        uniform = float(uniforms([wish.seed], [step], 1, THINKER_STREAM)[0, 0])
        assert token.item() == choose_one(logits[0], wish, Past(prompt, made), uniform).item()
        sampler.note(rows, token)
        made.append(int(token))


def test_the_code_predictor_draws_by_its_own_wishes_where_the_talker_draws_and_adjusts_nothing() -> None:
    wishes = [EVERYTHING, Sampling(temperature=0.3, top_k=1, min_p=0.9, frequency_penalty=2.0, seed=4)]
    sampler = opened(wishes, 40, codebooks=16)
    rows = sampler.rows(wishes, torch.tensor([0, 1]), [3, 9])
    sampler.note(rows, torch.tensor([1, 1]))
    ours = rows.predictor(top_k=5, top_p=0.8)
    assert (rows.kind, ours.kind) == (SAMPLED_ADJUSTED, SAMPLED)
    plain = [Sampling(), Sampling(temperature=1.0, top_k=5, top_p=0.8, seed=4)]
    same = opened(plain, 40, codebooks=16)
    for group in range(1, 16):
        logits = random_logits(2, 40, group)
        expected = same.choose(logits, same.rows(plain, torch.tensor([0, 1]), [3, 9]), group)
        assert torch.equal(sampler.choose(logits, ours, group), expected)
    assert opened([PENALTY], 40).rows([PENALTY], torch.tensor([0]), [0]).predictor(5, 0.8).kind == GREEDY


def test_a_seed_repeats_itself_and_another_seed_goes_elsewhere() -> None:
    logits = torch.zeros(1, 1000)
    runs = {
        seed: [chosen([Sampling(temperature=1.0, seed=seed)], logits, [step])[0] for step in range(8)]
        for seed in (1, 2)
    }
    assert runs[1] == [chosen([Sampling(temperature=1.0, seed=1)], logits, [step])[0] for step in range(8)]
    assert runs[1] != runs[2]
    assert len(set(runs[1])) > 4


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    assert chosen([Sampling(), Sampling()], logits, [0, 0]) == [1, 0]


def test_a_suppressed_token_is_never_chosen_greedy_or_sampled() -> None:
    logits = torch.full((2, 6), -INF)
    logits[:, 4], logits[:, 2] = -3.0, -80.0
    seen = torch.ones(2, 6, dtype=torch.bool)
    all_kinds = {"repetition_penalty": 2.0, "presence_penalty": -2.0, "logit_bias": {0: 100.0, 2: 1.0}}
    for step in range(50):
        wishes = [Sampling(**all_kinds), Sampling(temperature=5.0, min_p=1e-9, seed=step, **all_kinds)]
        assert set(chosen(wishes, logits, [step, step], seen)) <= {2, 4}


@pytest.mark.parametrize("temperature", [1e-38, 1e-44, 1e-7])
def test_a_tiny_temperature_takes_the_largest_logit(temperature: float) -> None:
    logits = torch.tensor([[0.5, 11.0, 80.0, 79.5]])
    assert chosen([Sampling(temperature=temperature, min_p=0.1)], logits, [0]) == [2]


# --- Log-probabilities ---


def test_the_likeliest_and_the_chosen_come_with_their_natural_log_probabilities() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3], [0.7, 0.1, 0.2]]).log() + 4
    chosen_logprobs, ids, logprobs = step_logprobs(logits, torch.tensor([0, 0]), 2)
    assert chosen_logprobs.exp().tolist() == pytest.approx([0.2, 0.7])
    assert ids.tolist() == [[1, 2], [0, 2]]
    assert logprobs.exp().tolist() == [pytest.approx([0.5, 0.3]), pytest.approx([0.7, 0.2])]
    assert logprobs.dtype == chosen_logprobs.dtype == torch.float32 and ids.dtype == torch.int64


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_as_many_come_as_are_asked_for_and_equal_the_stable_order_of_raw_logits(count: int) -> None:
    logits = random_logits(10, 100, seed=6, ties=True)
    before = logits.clone()
    chosen_logprobs, ids, logprobs = step_logprobs(logits, torch.arange(10), count)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(ids, order)
    assert torch.equal(logprobs, logits.log_softmax(-1).gather(1, order))
    assert torch.equal(chosen_logprobs, logits.log_softmax(-1)[range(10), range(10)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [([1.0, 3.0, 3.0, 0.0], [1, 2, 0]), ([2.0, 2.0, 2.0, 2.0], [0, 1, 2]), ([0.0, 1.0, 0.0, 0.0], [1, 0, 2])],
)
def test_ties_among_the_likeliest_go_to_the_lowest_ids(logits: list[float], expected: list[int]) -> None:
    assert step_logprobs(torch.tensor([logits]), torch.tensor([0]), 3)[1].tolist() == [expected]


def test_the_likeliest_are_told_apart_even_where_their_log_probabilities_round_to_one() -> None:
    above = torch.tensor(2.0)
    near = torch.nextafter(torch.tensor(1.0), above)
    logits = torch.full((1, 200_000), 0.9)
    logits[0, :3] = torch.stack([torch.tensor(1.0), near, torch.nextafter(near, above)])
    best = logits.argmax(-1)
    assert best.tolist() == [2]
    assert len(set(logits.log_softmax(-1)[0, :3].tolist())) == 1
    chosen_logprobs, ids, logprobs = step_logprobs(logits, best, 3)
    assert ids.tolist() == [[2, 1, 0]]
    assert logprobs[0, 0] == logprobs[0, 1] == chosen_logprobs[0]


def test_log_probabilities_do_not_depend_on_the_rows_beside() -> None:
    logits = random_logits(7, VOCAB, seed=12)
    together = step_logprobs(logits, torch.arange(7), 4)
    for place in range(7):
        alone = step_logprobs(logits[place : place + 1], torch.tensor([place]), 4)
        assert all(torch.equal(one[0], all_[place]) for one, all_ in zip(alone, together, strict=True))
