"""Who holds which page and slot, and what lies in them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.pages import KVCache, PagePool, pages_for
from engine.loopback import SlotPool, Slots

CPU = torch.device("cpu")


def test_pages_are_handed_out_once_and_come_back() -> None:
    pool = PagePool(4)
    first, second = pool.take(3), pool.take(1)
    assert sorted([*first, *second]) == [0, 1, 2, 3]
    assert pool.free == 0
    pool.release(first)
    assert pool.free == 3
    assert sorted(pool.take(3)) == sorted(first)


def test_a_fresh_pool_hands_out_the_lowest_pages_in_order() -> None:
    assert PagePool(5).take(3) == (0, 1, 2)


def test_taking_no_pages_takes_none() -> None:
    pool = PagePool(2)
    assert pool.take(0) == ()
    assert pool.free == 2


def test_more_pages_than_are_free_are_refused_with_both_numbers() -> None:
    pool = PagePool(3)
    pool.take(1)
    with pytest.raises(AssertionError, match="3 pages asked for, 2 free"):
        pool.take(3)
    assert pool.free == 2


def test_a_shared_page_is_free_only_after_its_last_holder_lets_go() -> None:
    pool = PagePool(2)
    pages = pool.take(2)
    pool.share(pages[:1])
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.free == 1
    pool.release(pages[:1])
    assert pool.free == 1
    pool.release(pages[:1])
    assert pool.free == 2


def test_a_page_released_too_often_is_an_error_that_names_it() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    pool.release(pages)
    with pytest.raises(AssertionError, match="page 0 was released too often"):
        pool.release(pages[:1])
    assert pool.free == 3


def test_a_free_page_can_not_be_shared() -> None:
    with pytest.raises(AssertionError, match="page 1 is free"):
        PagePool(3).share([1])


def test_a_page_taken_again_forgets_its_former_holders() -> None:
    pool = PagePool(1)
    page = pool.take(1)
    pool.share(page)
    pool.release(page)
    pool.release(page)
    assert pool.take(1) == page
    pool.release(page)
    assert pool.free == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 3)), max_size=40))
def test_any_order_of_taking_sharing_and_releasing_keeps_the_count(calls: list[tuple[str, int]]) -> None:
    pool = PagePool(6)
    held: list[tuple[int, ...]] = []
    for what, number in calls:
        if what == "take" and number <= pool.free:
            taken = pool.take(number)
            assert not set(taken) & {page for pages in held for page in pages}
            held.append(taken)
        elif what == "share" and held:
            pool.share(held[number % len(held)])
            held.append(held[number % len(held)])
        elif what == "release" and held:
            pool.release(held.pop(number % len(held)))
        assert pool.free == 6 - len({page for pages in held for page in pages})


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_positions_take_whole_pages_of_sixteen(positions: int, pages: int) -> None:
    assert pages_for(positions, 16) == pages


def test_a_new_cache_holds_zeros_of_the_asked_shape() -> None:
    cache = KVCache.allocate(2, 3, 4, 5, 6, dtype=torch.bfloat16, device=CPU)
    for part in (cache.keys, cache.values):
        assert part.shape == (2, 3, 4, 5, 6)
        assert part.dtype == torch.bfloat16
        assert not part.any()
    cache.keys.fill_(1)
    assert not cache.values.any()


def test_slots_are_handed_out_once_and_come_back() -> None:
    pool = SlotPool(3)
    assert (pool.total, pool.free) == (3, 3)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    assert pool.free == 0
    pool.release(1)
    assert pool.free == 1
    assert pool.take() == 1


def test_a_slot_released_twice_is_an_error_that_names_it() -> None:
    pool = SlotPool(3)
    slot = pool.take()
    pool.release(slot)
    with pytest.raises(AssertionError, match="slot 0 was released twice"):
        pool.release(slot)


def test_a_slot_keeps_its_value_until_the_same_slot_is_written() -> None:
    slots = Slots(4, (), torch.int64, CPU)
    slots.write(torch.tensor([2, 0]), torch.tensor([20, 10]))
    slots.write(torch.tensor([3]), torch.tensor([30]))
    assert slots.read(torch.tensor([3, 2, 1, 0, 2])).tolist() == [30, 20, 0, 10, 20]
    slots.write(torch.tensor([2]), torch.tensor([21]))
    assert slots.read(torch.tensor([0, 2])).tolist() == [10, 21]


def test_what_was_read_does_not_change_when_the_slot_is_written_again() -> None:
    slots = Slots(2, (3,), torch.float32, CPU)
    slots.write(torch.tensor([1]), torch.tensor([[1.0, 2.0, 3.0]]))
    read = slots.read(torch.tensor([1]))
    slots.write(torch.tensor([1]), torch.zeros(1, 3))
    assert read.tolist() == [[1.0, 2.0, 3.0]]


def test_slots_hold_rows_of_any_shape() -> None:
    slots = Slots(2, (2, 2), torch.float32, CPU)
    slots.write(torch.tensor([1]), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    assert slots.read(torch.tensor([0, 1])).tolist() == [[[0.0, 0.0], [0.0, 0.0]], [[1.0, 2.0], [3.0, 4.0]]]
