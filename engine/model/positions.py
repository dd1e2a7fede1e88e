"""Where each prompt token stands: three-axis positions, media lengths, and the segments of a prompt. No torch."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import RequestError
from engine.model.config import OmniConfig, SpecialIds

T = TypeVar("T")
FRAMES_PER_CHUNK = 100
TOKENS_PER_CHUNK = 13

Positions = NDArray[np.float32]
ImageGrid = tuple[int, int, int]
VideoGrid = tuple[int, int, int, float]


class SegmentKind(StrEnum):
    """What a run of prompt tokens stands for."""

    TEXT = "text"
    AUDIO = "audio"
    IMAGE = "image"
    VIDEO = "video"


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Tokens [start, start + length) of one kind; `digest` (hex) names their content: ids for text, the medium otherwise."""

    kind: SegmentKind
    start: int
    length: int
    digest: str


def audio_tokens(frames: int) -> int:
    """Tokens that a clip of `frames` mel frames takes: 13 a second, the last second rounded up three times by half."""
    whole, rest = divmod(frames, FRAMES_PER_CHUNK)
    for _ in range(3):
        rest = (rest + 1) // 2
    return TOKENS_PER_CHUNK * whole + rest


def prompt_segments(ids: Sequence[int], special: SpecialIds, digests: Sequence[str]) -> tuple[PromptSegment, ...]:
    """Cut prompt `ids` into runs of text and of media; `digests` name the media in order of appearance.

    RequestError when there are more or fewer digests than runs of media tokens.
    """
    kinds = {special.audio: SegmentKind.AUDIO, special.image: SegmentKind.IMAGE, special.video: SegmentKind.VIDEO}
    media = deque(digests)
    segments = []
    start = 0
    for kind, run in groupby(ids, key=lambda token: kinds.get(token, SegmentKind.TEXT)):
        tokens = list(run)
        if kind is SegmentKind.TEXT:
            digest = hashlib.sha256(np.array(tokens, dtype="<i4").tobytes()).hexdigest()
        else:
            digest = _next(media, kind)
        segments.append(PromptSegment(kind, start, len(tokens), digest))
        start += len(tokens)
    if media:
        raise RequestError(f"{len(media)} media more than the prompt has places for", field="prompt_token_ids")
    return tuple(segments)


@dataclass(slots=True)
class _Walk:
    """Positions written so far and the next one; the media still to come, in order of appearance."""

    images: deque[ImageGrid]
    videos: deque[VideoGrid]
    audios: deque[int]
    pieces: list[Positions] = field(default_factory=list)
    next: float = 0.0

    def put(self, block: Positions) -> None:
        """Append a block [3, m] that counts from 0; the next position follows its largest."""
        self.pieces.append(block + np.float32(self.next))
        self.next = float(self.pieces[-1].max()) + 1


def _next(queue: deque[T], kind: SegmentKind) -> T:
    if not queue:
        raise RequestError(f"the prompt has a place for {kind} beyond those given", field=kind.value)
    return queue.popleft()


def _tokens(count: int) -> Positions:
    return np.broadcast_to(np.arange(count, dtype=np.float32), (3, count))


def _grid(steps: int, rows: int, columns: int, stride: float) -> Positions:
    """Positions [3, steps * rows * columns] of one image or video; `stride` is the distance of two steps in time."""
    times = np.arange(steps, dtype=np.float32) * np.float32(stride)
    axes = (times, np.arange(rows, dtype=np.float32), np.arange(columns, dtype=np.float32))
    return np.stack(np.meshgrid(*axes, indexing="ij")).reshape(3, -1)


def prompt_positions(
    ids: Sequence[int],
    config: OmniConfig,
    images: Iterable[ImageGrid] = (),
    videos: Iterable[VideoGrid] = (),
    audios: Iterable[int] = (),
    audio_in_video: bool = False,
) -> tuple[Positions, float]:
    """Positions [3, L] float32 (time, height, width) of prompt `ids` with expanded media, and what decoding adds.

    `images` are grids (t, h, w) in patches, `videos` (t, h, w, seconds per grid step), `audios` mel frame counts, each in
    order of appearance. A token generated at index i stands at i + the second value. RequestError when the media and their
    placeholders do not match.
    """
    walk = _Walk(deque(images), deque(videos), deque(audios))
    if not walk.images and not walk.videos:
        return _tokens(len(ids)).copy(), 0.0
    at = 0
    while at < len(ids):
        at += _item(walk, ids, at, config, audio_in_video)
    positions = np.concatenate(walk.pieces, axis=1)
    return positions, float(positions.max()) + 1 - len(ids)


def _item(walk: _Walk, ids: Sequence[int], at: int, config: OmniConfig, audio_in_video: bool) -> int:
    """Place what starts at `ids[at]`: a start marker with its media, or one token. Returns how many tokens that was."""
    special, merge = config.ids, config.vision.merge
    token, following = ids[at], ids[at + 1] if at + 1 < len(ids) else -1
    walk.put(_tokens(1))
    if token == special.vision_start and following == special.image:
        steps, height, width = _next(walk.images, SegmentKind.IMAGE)
        block = _grid(steps, height // merge, width // merge, config.positions_per_second)
        walk.put(block)
        return 1 + _filled(ids, at + 1, {special.image}, block, SegmentKind.IMAGE)
    if token == special.vision_start and following == special.video:
        block = _video(walk, config)
        walk.put(block)
        return 1 + _filled(ids, at + 1, {special.video}, block, SegmentKind.VIDEO)
    if token == special.vision_start and following == special.audio_start and audio_in_video:
        walk.put(_tokens(1))
        return 2 + _filled(ids, at + 2, {special.video, special.audio}, _mixed(walk, config), SegmentKind.VIDEO)
    if token == special.audio_start and walk.audios:
        walk.audios.popleft()
    return 1


def _filled(ids: Sequence[int], at: int, placeholders: set[int], block: Positions, kind: SegmentKind) -> int:
    """Count the tokens of `block`; RequestError unless the run of placeholders at `ids[at]` is as long."""
    size = int(block.shape[1])
    found = next((i for i, token in enumerate(ids[at:]) if token not in placeholders), len(ids) - at)
    if found != size:
        raise RequestError(
            f"the {kind} at token {at} takes {size} tokens, the prompt has {found} there", field=kind.value
        )
    return size


def _video(walk: _Walk, config: OmniConfig) -> Positions:
    steps, height, width, seconds = _next(walk.videos, SegmentKind.VIDEO)
    merge = config.vision.merge
    return _grid(steps, height // merge, width // merge, seconds * config.positions_per_second)


def _mixed(walk: _Walk, config: OmniConfig) -> Positions:
    """Place a video and its sound, which start together and are merged by time, pictures first where times are equal.

    What follows counts on from the last run of one kind, not from the largest position of the whole block.
    """
    video = _video(walk, config)
    sound = _tokens(audio_tokens(_next(walk.audios, SegmentKind.AUDIO)))
    order = np.argsort(np.concatenate([video[0], sound[0]]), kind="stable")
    is_sound = order >= video.shape[1]
    block = np.concatenate([video, sound], axis=1)[:, order] + np.float32(walk.next)
    changes = np.flatnonzero(is_sound[1:] != is_sound[:-1])
    tail = block[:, changes[-1] + 1 :] if changes.size else block
    walk.pieces.append(block)
    walk.next = float(tail.max()) + 1
    return block
