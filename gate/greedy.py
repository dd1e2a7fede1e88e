"""Greedy comparison: what every pair of sessions decoded for the same prompts, and where they first part.

Base–base pairs are the floor: a token has moved only where head differs from base while all base sessions agree. At the
OpenAI door no token ids come: there the steps are the characters of the text, and "token" reads "character".
Only cells with `greedy` are compared, only measured requests that succeeded in both sessions of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import msgspec

from gate.record import Record, RunData, SessionInfo

# Two bf16 units of a logit between 8 and 16: a choice closer than that falls either way by rounding alone.
NEAR_TIE_NATS = 0.125


class Divergence(msgspec.Struct, frozen=True):
    """Where two sequences part: the step counts from 0; a token is None past its sequence's end (reason `length`).

    `margin` is the smaller log-probability lead (nats) of first over second choice at that step in either session.
    """

    item: str
    index: int
    step: int
    reason: str
    token_a: int | None
    token_b: int | None
    margin: float | None


class GreedyPair(msgspec.Struct, frozen=True):
    """Two sessions compared in one cell: prompts equal of all compared, and steps matched of Σ min(length)."""

    cell: str
    kind: str
    a: str
    b: str
    exact: int
    of: int
    matched: int
    of_steps: int
    steps_a: int
    steps_b: int
    left_out: int
    divergences: list[Divergence]

    @property
    def first(self) -> Divergence | None:
        """The earliest divergence by step, then by request."""
        return min(self.divergences, key=lambda found: (found.step, found.index), default=None)


class TokenMove(msgspec.Struct, frozen=True):
    """A prompt and step where head differs from base although all base sessions agree there.

    `base_token` or `head_token` is None where that sequence had ended (reason `length`). `floor_pairs` counts the base–base
    pairs that agree at this step.
    """

    cell: str
    item: str
    index: int
    step: int
    reason: str
    base_token: int | None
    head_token: int | None
    margin: float | None
    sessions: list[str]
    of_sessions: int
    floor_pairs: int


class PcmPair(msgspec.Struct, frozen=True):
    """Two sessions' speech in one cell: requests whose PCM bytes are equal, of those compared. Information, no verdict."""

    cell: str
    kind: str
    a: str
    b: str
    equal: int
    of: int


def is_near_tie(margin: float | None) -> bool | None:
    """Whether a margin (nats) is so small that rounding may decide; None when it was not recorded."""
    return None if margin is None else margin < NEAR_TIE_NATS


def first_divergence(a: Sequence[int], b: Sequence[int]) -> tuple[int, str] | None:
    """The first step at which two sequences differ, with `token` or `length`; None when they are identical."""
    for step, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return step, "token"
    return None if len(a) == len(b) else (min(len(a), len(b)), "length")


def margin_at(record: Record, step: int) -> float | None:
    """The lead (nats) of the best over the second best token at a step; None where it was not recorded."""
    if not 0 <= step < len(record.top2):
        return None
    _, _, best, second = record.top2[step]
    return abs(best - second)


def _token(record: Record, step: int) -> int | None:
    return record.steps[step] if step < len(record.steps) else None


def _margin(a: Record, b: Record, step: int) -> float | None:
    return min((margin for record in (a, b) if (margin := margin_at(record, step)) is not None), default=None)


Answers = Mapping[int, Record]


def answers(records: Sequence[Record], session: str, cell: str) -> dict[int, Record]:
    """A session's measured records of a cell by request index, failed ones included."""
    return {r.index: r for r in records if r.session == session and r.cell == cell and not r.warm}


def kind_of(a: SessionInfo, b: SessionInfo) -> str:
    """The kind of a pair: base–base, head–base or head–head."""
    return f"{a.arm}–{b.arm}" if a.arm == b.arm else "head–base"


def compare_pair(cell: str, kind: str, a: tuple[str, Answers], b: tuple[str, Answers]) -> GreedyPair:
    """Compare two sessions, given as (id, answers), request by request."""
    shared = sorted(set(a[1]) & set(b[1]))
    pairs = [(a[1][index], b[1][index]) for index in shared]
    good = [(left, right) for left, right in pairs if left.ok and right.ok and left.item == right.item]
    found = [divergence for left, right in good if (divergence := _divergence(left, right)) is not None]
    shorter = sum(min(len(left.steps), len(right.steps)) for left, right in good)
    cut = {divergence.index: divergence.step for divergence in found}
    matched = sum(cut.get(left.index, len(left.steps)) for left, _ in good)
    return GreedyPair(
        cell=cell,
        kind=kind,
        a=a[0],
        b=b[0],
        exact=len(good) - len(found),
        of=len(good),
        matched=matched,
        of_steps=shorter,
        steps_a=sum(len(left.steps) for left, _ in good),
        steps_b=sum(len(right.steps) for _, right in good),
        left_out=len(set(a[1]) | set(b[1])) - len(good),
        divergences=found,
    )


def _divergence(left: Record, right: Record) -> Divergence | None:
    where = first_divergence(left.steps, right.steps)
    if where is None:
        return None
    step, reason = where
    tokens = _token(left, step), _token(right, step)
    return Divergence(left.item, left.index, step, reason, *tokens, _margin(left, right, step))


def _session_pairs(run: RunData) -> list[tuple[SessionInfo, SessionInfo]]:
    """Every pair of sessions, base–base first; in a mixed pair head is the first of the two."""
    ordered = sorted(run.sessions, key=lambda session: session.slot)
    mixed = [(b, a) if (a.arm, b.arm) == ("base", "head") else (a, b) for a, b in combinations(ordered, 2)]
    kinds = ("base–base", "head–base", "head–head")
    return sorted(mixed, key=lambda pair: kinds.index(kind_of(*pair)) if kind_of(*pair) in kinds else len(kinds))


def greedy_pairs(run: RunData) -> list[GreedyPair]:
    """Every pair of sessions that both have answers, for each greedy cell in the plan's order."""
    pairs = []
    for cell in (cell.name for cell in run.plan.cells if cell.greedy):
        found = {session.id: answers(run.records, session.id, cell) for session in run.sessions}
        pairs += [
            compare_pair(cell, kind_of(a, b), (a.id, found[a.id]), (b.id, found[b.id]))
            for a, b in _session_pairs(run)
            if found[a.id] and found[b.id]
        ]
    return pairs


def agreed_steps(records: Sequence[Record]) -> int | None:
    """How many steps all records share before any two differ; None when all are identical."""
    cuts = [where[0] for a, b in combinations(records, 2) if (where := first_divergence(a.steps, b.steps))]
    return min(cuts, default=None)


def token_moves(run: RunData) -> list[TokenMove]:
    """All moves of a run, in the order of cells and requests; one per prompt, at the earliest step of any head session."""
    moves = []
    for cell in (cell.name for cell in run.plan.cells if cell.greedy):
        arms: dict[str, list[Answers]] = {"base": [], "head": []}
        for session in sorted(run.sessions, key=lambda session: session.slot):
            arms.setdefault(session.arm, []).append(answers(run.records, session.id, cell))
        for index in sorted({index for found in arms["base"] for index in found}):
            base, head = (_good(arms[arm], index) for arm in ("base", "head"))
            move = _move(cell, base, head)
            if move is not None:
                moves.append(move)
    return moves


def _good(sessions: Sequence[Answers], index: int) -> list[Record]:
    return [found[index] for found in sessions if index in found and found[index].ok]


def _move(cell: str, base: Sequence[Record], head: Sequence[Record]) -> TokenMove | None:
    if not base or not head:
        return None
    agreed = agreed_steps(base)
    # Up to `agreed` every base session reads the same, so any one of them stands for all.
    longest = max(base, key=lambda record: len(record.steps))
    apart = [(found, record) for record in head if (found := _divergence(longest, record)) is not None]
    apart = [(found, record) for found, record in apart if agreed is None or found.step < agreed]
    if not apart:
        return None
    first, _ = min(apart, key=lambda pair: pair[0].step)
    return TokenMove(
        cell=cell,
        item=first.item,
        index=first.index,
        step=first.step,
        reason=first.reason,
        base_token=first.token_a,
        head_token=first.token_b,
        margin=first.margin,
        sessions=[record.session for _, record in apart],
        of_sessions=len(head),
        floor_pairs=len(base) * (len(base) - 1) // 2,
    )


def pcm_pairs(run: RunData) -> list[PcmPair]:
    """For each pair of sessions and each cell with speech: how many requests gave equal PCM bytes."""
    pairs = []
    for cell in run.plan.cells:
        found = {session.id: answers(run.records, session.id, cell.name) for session in run.sessions}
        for a, b in _session_pairs(run):
            both = [(found[a.id][i], found[b.id][i]) for i in sorted(set(found[a.id]) & set(found[b.id]))]
            hashes = [(x.pcm_sha256, y.pcm_sha256) for x, y in both if x.ok and y.ok and x.pcm_sha256 and y.pcm_sha256]
            if hashes:
                equal = sum(x == y for x, y in hashes)
                pairs.append(PcmPair(cell.name, kind_of(a, b), a.id, b.id, equal, len(hashes)))
    return pairs
