"""Choosing tokens: the random numbers, the processors against transformers' own, and what company must not change."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.request import Sampling
from engine.sampler import (
    GREEDY,
    PENALISED,
    SAMPLED,
    TALKER_STREAM,
    THINKER_STREAM,
    SamplingRows,
    choose,
    draw,
    keep_top_k,
    keep_top_p,
    penalise,
    philox,
    sampling_class,
    sampling_rows,
    top_two,
    uniforms,
)

CPU = torch.device("cpu")
INF = float("inf")


def one_row(wish: Sampling, step: int) -> SamplingRows:
    """The sampling tensors of a step with one row."""
    return sampling_rows([wish], [step], codebooks=1, stream=THINKER_STREAM, device=CPU)


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


def test_temperature_penalty_and_filters_run_in_transformers_order() -> None:
    """Each draw lands where its number falls in the running sum of what transformers' chain leaves."""
    logits, ids = random_logits(1, 40, seed=5), torch.tensor([[3, 9, 9, 21, 30]])
    seen = torch.zeros(1, 40, dtype=torch.bool).scatter(1, ids, True)
    scores = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits)
    scores = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(8)(None, TemperatureLogitsWarper(0.7)(None, scores)))
    wish = Sampling(temperature=0.7, top_k=8, top_p=0.9, repetition_penalty=1.3, seed=11)
    drawn = torch.cat([choose(logits, one_row(wish, step), seen) for step in range(300)])
    numbers = torch.from_numpy(uniforms([11] * 300, list(range(300)), 1, THINKER_STREAM)[:, 0])
    edges = scores.softmax(-1)[0].double().cumsum(-1)
    assert torch.equal(drawn, torch.searchsorted(edges, numbers * edges[-1]))
    assert 1 < len(set(drawn.tolist())) <= 8


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
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.8), (0.9, 6, 0.7), (1.7, 5, 0.95)],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature: float, top_k: int, top_p: float) -> None:
    draws = 20_000
    logits = random_logits(1, 12, seed=8) / 3
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    wish = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=42)
    rows = sampling_rows([wish] * draws, list(range(draws)), codebooks=1, stream=THINKER_STREAM, device=CPU)
    counts = choose(logits.expand(draws, 12), rows, None).bincount(minlength=12)
    assert (counts > 0).sum() > 1
    assert chi_square(counts, scores.softmax(-1)[0]) > 0.001


def test_the_codebooks_of_a_frame_are_drawn_independently() -> None:
    logits = torch.zeros(2000, 4)
    rows = sampling_rows(
        [Sampling(temperature=1.0)] * 2000, list(range(2000)), codebooks=2, stream=TALKER_STREAM, device=CPU
    )
    first, second = choose(logits, rows, None, 0), choose(logits, rows, None, 1)
    assert chi_square((first * 4 + second).bincount(minlength=16), torch.full((16,), 1 / 16)) > 0.001


# --- Classes and company ---


@pytest.mark.parametrize(
    ("wishes", "least"),
    [
        ([Sampling()], GREEDY),
        ([Sampling(top_k=5, top_p=0.5, seed=9)], GREEDY),
        ([Sampling(), Sampling(repetition_penalty=1.05)], PENALISED),
        ([Sampling(), Sampling(temperature=0.1)], SAMPLED),
        ([Sampling(repetition_penalty=1.05), Sampling(temperature=0.1)], SAMPLED),
    ],
)
def test_a_step_takes_the_least_class_that_covers_its_rows(wishes: list[Sampling], least: str) -> None:
    assert sampling_class(wishes) == least
    assert sampling_rows(wishes, [0] * len(wishes), codebooks=1, stream=THINKER_STREAM, device=CPU).kind == least


PENALTY = Sampling(repetition_penalty=1.4)
HOT = Sampling(temperature=1.3, top_k=7, top_p=0.9, repetition_penalty=1.2, seed=77)


def chosen(wishes: list[Sampling], logits: Tensor, seen: Tensor, steps: list[int]) -> list[int]:
    rows = sampling_rows(wishes, steps, codebooks=1, stream=THINKER_STREAM, device=CPU)
    return choose(logits, rows, seen if rows.kind != GREEDY else None).tolist()


@pytest.mark.parametrize("company", [[], [PENALTY], [HOT], [HOT, PENALTY, Sampling(temperature=0.2)]])
@pytest.mark.parametrize("ties", [False, True])
def test_a_greedy_row_gets_the_largest_logit_in_every_class(company: list[Sampling], ties: bool) -> None:
    rows = 1 + len(company)
    for seed in range(20):
        logits = random_logits(rows, 60, seed, ties=ties)
        seen = torch.ones(rows, 60, dtype=torch.bool)
        lowest_of_the_largest = logits[0].tolist().index(max(logits[0].tolist()))
        assert chosen([Sampling(), *company], logits, seen, [seed] * rows)[0] == lowest_of_the_largest


@pytest.mark.parametrize("company", [[], [Sampling()], [HOT], [Sampling(temperature=0.2)]])
def test_a_greedy_row_with_penalty_gets_the_same_token_in_every_class_that_covers_it(company: list[Sampling]) -> None:
    rows = 1 + len(company)
    moved = 0
    for seed in range(20):
        logits = random_logits(rows, 30, seed)
        seen = random_logits(rows, 30, seed + 100) > 0
        expected = RepetitionPenaltyLogitsProcessor(1.4)(seen[:1].nonzero()[:, 1][None], logits[:1]).argmax(-1).item()
        assert chosen([PENALTY, *company], logits, seen, [seed] * rows)[0] == expected
        moved += expected != logits[0].argmax().item()
    assert moved > 0  # the penalty changed at least one choice, so this test could fail


def test_a_sampled_row_gets_the_same_token_alone_and_at_any_place_in_company() -> None:
    others = [Sampling(), Sampling(temperature=0.4, seed=3), PENALTY, Sampling(temperature=2.0, top_p=0.3)]
    logits, seen = random_logits(5, 64, seed=2), random_logits(5, 64, seed=9) > 0
    for step in range(25):
        alone = chosen([HOT], logits[:1], seen[:1], [step])[0]
        for place in range(5):
            order = [*range(1, place + 1), 0, *range(place + 1, 5)]
            wishes = [*others[:place], HOT, *others[place:]]
            steps = [1000 + other for other in range(5)]
            steps[place] = step
            assert chosen(wishes, logits[order], seen[order], steps)[place] == alone


def test_a_seed_repeats_itself_and_another_seed_goes_elsewhere() -> None:
    logits = torch.zeros(1, 1000)
    runs = {
        seed: [chosen([Sampling(temperature=1.0, seed=seed)], logits, logits > 1, [step])[0] for step in range(8)]
        for seed in (1, 2)
    }
    assert runs[1] == [chosen([Sampling(temperature=1.0, seed=1)], logits, logits > 1, [step])[0] for step in range(8)]
    assert runs[1] != runs[2]
    assert len(set(runs[1])) > 4


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    assert chosen([Sampling(), Sampling()], logits, logits > 9, [0, 0]) == [1, 0]


def test_a_suppressed_token_is_never_chosen_greedy_or_sampled() -> None:
    logits = torch.full((2, 6), -INF)
    logits[:, 4], logits[:, 2] = -3.0, -80.0
    for step in range(50):
        wishes = [Sampling(repetition_penalty=2.0), Sampling(temperature=5.0, repetition_penalty=2.0, seed=step)]
        assert set(chosen(wishes, logits, torch.ones(2, 6, dtype=torch.bool), [step, step])) <= {2, 4}


# --- Top two ---


def test_the_top_two_come_with_their_natural_log_probabilities() -> None:
    ids, logprobs = top_two(torch.tensor([[0.2, 0.5, 0.3], [0.7, 0.1, 0.2]]).log() + 4)
    assert ids.tolist() == [[1, 2], [0, 2]]
    assert logprobs.exp().tolist() == [pytest.approx([0.5, 0.3]), pytest.approx([0.7, 0.2])]
    assert logprobs.dtype == torch.float32 and ids.dtype == torch.int64


@pytest.mark.parametrize(
    ("logits", "expected"),
    [([1.0, 3.0, 3.0, 0.0], [1, 2]), ([2.0, 2.0, 2.0, 2.0], [0, 1]), ([0.0, 1.0, 0.0, 0.0], [1, 0])],
)
def test_ties_among_the_top_two_go_to_the_lowest_ids(logits: list[float], expected: list[int]) -> None:
    assert top_two(torch.tensor([logits]))[0].tolist() == [expected]


def test_the_top_two_are_told_apart_even_where_their_log_probabilities_round_to_one() -> None:
    above = torch.tensor(2.0)
    near = torch.nextafter(torch.tensor(1.0), above)
    logits = torch.full((1, 200_000), 0.9)
    logits[0, :3] = torch.stack([torch.tensor(1.0), near, torch.nextafter(near, above)])
    ids, logprobs = top_two(logits)
    assert logits.argmax(-1).tolist() == [2]
    assert len(set(logits.log_softmax(-1)[0, :3].tolist())) == 1
    assert ids.tolist() == [[2, 1]]
    assert logprobs[0, 0] == logprobs[0, 1]


def test_the_top_two_look_at_logits_before_any_sampling() -> None:
    logits = random_logits(10, 100, seed=6)
    ids, logprobs = top_two(logits)
    expected = logits.log_softmax(-1).topk(2)
    assert torch.equal(ids, expected.indices)
    assert torch.equal(logprobs, expected.values)


@pytest.mark.parametrize("temperature", [1e-38, 1e-44, 1e-7])
def test_a_tiny_temperature_takes_the_largest_logit(temperature: float) -> None:
    logits = torch.tensor([[0.5, 11.0, 80.0, 79.5]])
    rows = sampling_rows([Sampling(temperature=temperature)], [0], codebooks=1, stream=0, device=torch.device("cpu"))
    assert choose(logits, rows, None).tolist() == [2]
