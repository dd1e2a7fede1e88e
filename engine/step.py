"""The rows to run now in one component: immutable, declared once, sendable. No torch."""

from __future__ import annotations

import enum

import msgspec


class Component(enum.StrEnum):
    """A part of the model that holds tracks of its own and runs in a lane of its own."""

    AUDIO_ENCODER = "audio_encoder"
    THINKER = "thinker"
    TALKER = "talker"
    CODE2WAV = "code2wav"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One track's share of a step.

    `start` is the first position that is computed, `length` how many (for Code2Wav: frames). `generation` is unique to the
    track for the life of the engine, so that a reused slot never looks like its last tenant. `pages` are the track's KV
    pages, in order of position.
    """

    request_id: str
    generation: int
    slot: int
    walk: str
    start: int
    length: int
    pages: tuple[int, ...] = ()


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that run together in one component; `number` counts the component's steps from 0."""

    number: int
    component: Component
    rows: tuple[Row, ...]
