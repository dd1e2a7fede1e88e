"""Time by phase: phases never overlap, add up to what passed, and cost nothing when nobody asks."""

import time

import pytest

from engine.phases import PHASES, Phases


class Clocks:
    """Wall and CPU clocks that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.cpu = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(time, "thread_time", lambda: self.cpu)

    def pass_by(self, wall: float, cpu: float) -> None:
        self.wall += wall
        self.cpu += cpu


def test_a_phase_inside_another_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, phases = Clocks(monkeypatch), Phases(enabled=True)
    with phases("launch"):
        clocks.pass_by(3.0, 2.0)
        with phases("plan"):
            clocks.pass_by(1.0, 1.0)
        clocks.pass_by(0.5, 0.25)
    clocks.pass_by(50.0, 9.0)  # between phases: nobody's
    with phases("read"):
        clocks.pass_by(0.25, 0.125)
    assert {name: seconds for name, seconds in phases.wall.items() if seconds} == {
        "launch": 3.5,
        "plan": 1.0,
        "read": 0.25,
    }
    assert {name: seconds for name, seconds in phases.cpu.items() if seconds} == {
        "launch": 2.25,
        "plan": 1.0,
        "read": 0.125,
    }


def test_a_phase_that_raises_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, phases = Clocks(monkeypatch), Phases(enabled=True)
    with pytest.raises(KeyError), phases("launch"):
        clocks.pass_by(2.0, 1.0)
        raise KeyError
    clocks.pass_by(7.0, 7.0)
    with phases("emit"):
        clocks.pass_by(1.0, 1.0)
    assert (phases.wall["launch"], phases.wall["emit"]) == (2.0, 1.0)


def test_counters_hold_seconds_and_milliseconds_a_step_of_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, phases = Clocks(monkeypatch), Phases(enabled=True)
    with phases("wait"):
        clocks.pass_by(0.5, 0.25)
    found = phases.counters(steps=100)
    assert found["phase_wait_wall_seconds_total"] == 0.5
    assert found["phase_wait_wall_ms_per_step"] == 5.0
    assert found["phase_wait_cpu_ms_per_step"] == 2.5
    assert len(found) == 4 * len(PHASES)


def test_switched_off_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, phases = Clocks(monkeypatch), Phases(enabled=False)
    with phases("launch"):
        clocks.pass_by(3.0, 2.0)
    assert phases.counters(steps=1) == {} and not any(phases.wall.values())
