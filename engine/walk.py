"""Declarations: what a walk runs in, emits, loops back and stops on. Data only, checked at boot; no torch."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import DeclarationError
from engine.step import Component


class Destination(enum.StrEnum):
    """Where an emitted value goes: to the client, back into the same track, or into another component."""

    CLIENT = "client"
    DEVICE = "device"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Emit:
    """A value that a walk makes, and every place it goes to. `stream_to` is named exactly when STREAM is among them."""

    signal: str
    to: frozenset[Destination]
    stream_to: Component | None = None


@dataclass(frozen=True, slots=True)
class Walk:
    """A declared kind of pass through one component. `decode` walks compute one position a row from what was looped back."""

    name: str
    component: Component
    emits: tuple[Emit, ...]
    decode: bool = False
    needs_audio_output: bool = False


@dataclass(frozen=True, slots=True)
class DeviceLoopback:
    """The signal that the next pass of these walks reads from its slot on the device instead of from the host."""

    component: Component
    signal: str
    written_by: frozenset[str]
    read_by: frozenset[str]


@dataclass(frozen=True, slots=True)
class TokenStop:
    """The token ids that end a track, and the set of walks whose rows may end it. Other walks name no stop."""

    component: Component
    signal: str
    stop_ids: frozenset[int]
    walks: frozenset[str]

    def stops_on(self, walk: str, token: int) -> bool:
        """Say whether `token`, made by a row of `walk`, ends the row's track. The one reader of `walks`."""
        return walk in self.walks and token in self.stop_ids


@dataclass(frozen=True, slots=True)
class WalkTable:
    """Every walk, loop-back and stop of a model, and the component (hence lane) that owns each walk."""

    walks: tuple[Walk, ...]
    loopbacks: tuple[DeviceLoopback, ...]
    stops: tuple[TokenStop, ...]

    def walk(self, name: str) -> Walk:
        """Return the walk called `name`; DeclarationError if there is none."""
        for walk in self.walks:
            if walk.name == name:
                return walk
        raise DeclarationError(f"no walk is called {name!r}; the table has {[walk.name for walk in self.walks]}")

    def of(self, component: Component) -> tuple[Walk, ...]:
        """Return the walks that `component` owns."""
        return tuple(walk for walk in self.walks if walk.component == component)


def _check_emit(walk: Walk, emit: Emit) -> None:
    if not emit.to:
        raise DeclarationError(f"walk {walk.name}: {emit.signal} is emitted nowhere; drop it or name a destination")
    if (Destination.STREAM in emit.to) != (emit.stream_to is not None):
        raise DeclarationError(f"walk {walk.name}: {emit.signal} needs stream_to exactly when it goes to STREAM")
    if emit.stream_to == walk.component:
        raise DeclarationError(f"walk {walk.name}: {emit.signal} streams into its own component; use DEVICE")


def _check_loopback(table: WalkTable, loop: DeviceLoopback) -> None:
    if not loop.written_by or not loop.read_by:
        raise DeclarationError(f"loop-back {loop.signal}: name a walk that writes it and a walk that reads it")
    for name in loop.written_by | loop.read_by:
        if table.walk(name).component != loop.component:
            raise DeclarationError(f"loop-back {loop.signal}: walk {name} is not in {loop.component}")
    for name in loop.written_by:
        emits = {emit.signal: emit.to for emit in table.walk(name).emits}
        if Destination.DEVICE not in emits.get(loop.signal, frozenset()):
            raise DeclarationError(f"loop-back {loop.signal}: walk {name} does not emit it to DEVICE")
    for name in loop.read_by:
        if not table.walk(name).decode:
            raise DeclarationError(f"loop-back {loop.signal}: walk {name} reads it but is no decode walk")


def _check_stop(table: WalkTable, stop: TokenStop) -> None:
    if not stop.walks or not stop.stop_ids:
        raise DeclarationError(f"stop on {stop.signal}: name at least one walk and one stop id")
    for name in stop.walks:
        walk = table.walk(name)
        if walk.component != stop.component:
            raise DeclarationError(f"stop on {stop.signal}: walk {name} is not in {stop.component}")
        if stop.signal not in {emit.signal for emit in walk.emits}:
            raise DeclarationError(f"stop on {stop.signal}: walk {name} does not emit it")


def check(table: WalkTable, components: Iterable[Component]) -> None:
    """Raise DeclarationError unless the table is sound: unique names, one owning lane a walk, loops and stops that match.

    `components` are those that have a lane. Every decode walk must read exactly one loop-back.
    """
    owners = list(components)
    lanes = set(owners)
    if len(lanes) != len(owners):
        raise DeclarationError(f"two lanes run the same component, so its walks have two owners: {owners}")
    names = [walk.name for walk in table.walks]
    if len(set(names)) != len(names):
        raise DeclarationError(f"walk names must be unique, got {names}")
    for walk in table.walks:
        if walk.component not in lanes:
            raise DeclarationError(f"walk {walk.name}: no lane runs {walk.component}")
        for emit in walk.emits:
            _check_emit(walk, emit)
            if emit.stream_to is not None and emit.stream_to not in lanes:
                raise DeclarationError(
                    f"walk {walk.name}: {emit.signal} streams to {emit.stream_to}, which has no lane"
                )
    for loop in table.loopbacks:
        _check_loopback(table, loop)
    for walk in table.walks:
        readers = [loop.signal for loop in table.loopbacks if walk.name in loop.read_by]
        if walk.decode and len(readers) != 1:
            raise DeclarationError(f"decode walk {walk.name} must read one loop-back, reads {readers}")
    for stop in table.stops:
        _check_stop(table, stop)
