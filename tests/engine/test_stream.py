"""Queues between components, and chunks that depend on the frame's index alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.stream import DeviceQueue, chunk_length

CPU = torch.device("cpu")


def test_values_are_found_under_their_slot_and_number() -> None:
    queue = DeviceQueue(3, 4, 2, CPU)
    queue.push(torch.tensor([2, 0]), torch.tensor([0, 3]), torch.tensor([[1, 2], [3, 4]]))
    queue.push(torch.tensor([2]), torch.tensor([1]), torch.tensor([[5, 6]]))
    assert queue.at(torch.tensor([0, 2, 2]), torch.tensor([3, 1, 0])).tolist() == [[3, 4], [5, 6], [1, 2]]


def test_a_span_is_the_values_of_one_slot_in_order_of_their_number() -> None:
    queue = DeviceQueue(2, 5, 1, CPU)
    for number in (2, 0, 1, 3):
        queue.push(torch.tensor([1]), torch.tensor([number]), torch.tensor([[10 + number]]))
        queue.push(torch.tensor([0]), torch.tensor([number]), torch.tensor([[99]]))
    assert queue.span(1, 1, 3).tolist() == [[11], [12], [13]]
    assert queue.span(1, 0, 0).shape == (0, 1)


def test_a_reused_slot_gives_the_new_tenant_s_values() -> None:
    queue = DeviceQueue(1, 3, 1, CPU)
    slot = torch.tensor([0])
    for tenant in (100, 200):
        for number in range(2):
            queue.push(slot, torch.tensor([number]), torch.tensor([[tenant + number]]))
    assert queue.span(0, 0, 2).tolist() == [[200], [201]]


@pytest.mark.parametrize(
    ("done", "arrived", "ended", "length"),
    [
        (0, 0, False, 0),
        (0, 3, False, 0),
        (0, 4, False, 4),
        (0, 11, False, 4),
        (8, 11, False, 0),
        (8, 11, True, 3),
        (8, 12, True, 4),
        (8, 13, True, 4),
        (12, 12, True, 0),
        (0, 0, True, 0),
    ],
)
def test_a_chunk_is_four_frames_and_only_the_last_one_is_shorter(
    done: int, arrived: int, ended: bool, length: int
) -> None:
    assert chunk_length(done, arrived, ended, 4) == length


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12),
    chunk=st.integers(1, 6),
    late_end=st.booleans(),
)
def test_any_pattern_of_arrival_gives_the_same_chunk_boundaries(
    arrivals: list[tuple[int, int]], chunk: int, late_end: bool
) -> None:
    """Frames come in bursts; between bursts the consumer gets 0 to 3 turns; the end is told with the last burst or later."""
    done = arrived = 0
    boundaries: list[int] = []

    def turns(count: int, ended: bool) -> None:
        nonlocal done
        for _ in range(count):
            length = chunk_length(done, arrived, ended, chunk)
            if length:
                done += length
                boundaries.append(done)

    for number, (burst, pauses) in enumerate(arrivals):
        arrived += burst
        turns(pauses, ended=number == len(arrivals) - 1 and not late_end)
    turns(arrived + 1, ended=True)
    last = [arrived] if arrived % chunk else []
    assert boundaries == [*range(chunk, arrived + 1, chunk), *last]
