"""The machine record and the split of cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gate.host import Cores, available_cores, heavy_processes, machine_record, pinned, split_cores, throttled_from


@pytest.mark.parametrize(
    ("allowed", "siblings", "server", "client", "shared"),
    [
        ([3], {}, (3,), (3,), True),
        ([0, 1], {}, (0,), (1,), False),
        ([0, 1], {0: {0, 1}, 1: {0, 1}}, (0,), (1,), False),
        ([0, 1, 2, 3], {}, (0, 1, 2), (3,), False),
        ([0, 1, 2, 3], {3: {1, 3}, 1: {1, 3}, 0: {0, 2}, 2: {0, 2}}, (0, 2), (1, 3), False),
        ([2, 3, 5], {5: {4, 5}}, (2, 3), (5,), False),
    ],
)
def test_server_and_client_get_disjoint_cores_and_whole_physical_ones_where_there_are_enough(
    allowed: list[int], siblings: dict[int, set[int]], server: tuple[int, ...], client: tuple[int, ...], shared: bool
) -> None:
    frozen = {core: frozenset(threads) for core, threads in siblings.items()}
    assert split_cores(allowed, frozen) == Cores(server, client, shared)


def test_sixteen_cores_give_the_client_two() -> None:
    assert split_cores(range(16), {}).client == (14, 15)


def test_one_core_for_both_is_said() -> None:
    assert (
        Cores((3,), (3,), True).sentence() == "server and client share core 3: its times include the client's own work"
    )
    assert Cores((0,), (1,), False).sentence() == "server on cores 0, client on 1"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity call on this platform")
def test_a_process_started_while_pinned_stays_on_those_cores_and_the_caller_is_restored() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    with pinned([core]):
        show = "import os; print(os.sched_getaffinity(0))"
        child = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == f"{{{core}}}"
    assert os.sched_getaffinity(0) == before


def test_throttled_time_is_seconds_in_both_versions_of_the_file() -> None:
    assert throttled_from("usage_usec 5\nnr_throttled 2\nthrottled_usec 1500000\n") == 1.5
    assert throttled_from("nr_periods 3\nthrottled_time 2500000000\n") == 2.5
    assert throttled_from("") == 0.0


# Only the busiest are named: four threads, as hashing holds no lock, get the largest share of a machine that others use too.
BUSY = """
import hashlib, threading
def work(block=bytes(1 << 20)):
    while True:
        hashlib.sha256(block)
for _ in range(4):
    threading.Thread(target=work).start()
"""


def test_a_busy_process_of_somebody_else_is_named_and_our_own_child_is_not() -> None:
    def is_named(own: int) -> bool:
        return busy.pid in [row["pid"] for row in heavy_processes(own, window_s=0.5)]

    busy = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        assert any(is_named(own=-1) for _ in range(3))  # where others have the cores, it may get none in one window
        assert not is_named(own=os.getpid())
    finally:
        busy.kill()
        busy.wait()


def test_the_record_states_the_machine() -> None:
    record = machine_record()
    assert record["cores_logical"] == os.cpu_count()
    assert record["cpu_model"]
    assert isinstance(record["throttled_s"], float)
    assert set(available_cores().server) <= set(record["cores_allowed"])  # type: ignore[call-overload]
