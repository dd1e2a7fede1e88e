"""Verdicts: what a run's numbers allow to be said, cell by cell, and the exit code that follows.

An error is never a speed verdict: a cell whose evidence is faulty on one arm is broken there, on both it is invalid, and the
speed of neither is judged. `no verdict` always carries the largest loss that it does not exclude. A run that was stopped has
no speed verdict before all its planned sessions are measured: which sessions it has by then was nobody's choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from gate.cell import METRICS, SPEECH_TASKS, Cell
from gate.greedy import GreedyPair, PcmPair, TokenMove, greedy_pairs, pcm_pairs, token_moves
from gate.metrics import (
    LateClient,
    PromptTokens,
    SessionMetric,
    better_is_up,
    is_finished,
    late_clients,
    measured,
    prompt_tokens,
    session_metrics,
)
from gate.record import ArmInfo, Record, RunData, SessionInfo, Thresholds
from gate.spoken import NOT_JUDGED, compare_spoken, unheard
from gate.stats import (
    LEAST_DF,
    Contrast,
    contrast,
    holm,
    is_equivalent,
    percent,
    sessions_to_settle,
    smallest_detectable,
)
from gate.wer import WerComparison, compare_wer

REGRESSION, IMPROVEMENT, EQUIVALENT, NO_VERDICT = "regression", "improvement", "equivalent", "no verdict"
BROKEN_HEAD, BROKEN_BASE, INVALID, NEW_IN_HEAD = "broken head", "broken base", "invalid", "new in head"
SPEED_VERDICTS = frozenset({REGRESSION, IMPROVEMENT, EQUIVALENT, NO_VERDICT})
MEASURED = "measured"  # a run of one arm: numbers, and nothing to judge them against
API = "generate/1"
EXIT_OK, EXIT_WORSE, EXIT_UNDECIDED, EXIT_UNUSABLE = 0, 1, 2, 3


class Fault(msgspec.Struct, frozen=True):
    """Something that makes evidence unusable: `count` of `of` requests of a cell, or a whole session (cell None).

    `kind`: failed, short, missing audio, server (of one arm); source, weights, throttled (of the evidence itself); client (of
    the evidence of one cell: the load client ended). `reason` is what `words` say without session, counts and request.
    """

    arm: str
    session: str
    cell: str | None
    kind: str
    count: int
    of: int
    words: str
    reason: str


class CellComparison(msgspec.Struct, frozen=True):
    """One cell's primary metric on both arms: session values by slot, the contrast, and the verdict with its reasons.

    `floor`, `loss_not_excluded` (the interval's worse end, never negative), `detectable` and `best_change` (best session
    against best) are ratios: 0.02 is 2 %.
    """

    cell: str
    task: str
    metric: str
    floor: float
    base: list[SessionMetric]
    head: list[SessionMetric]
    contrast: Contrast | None
    p_holm: float | None
    verdict: str
    reasons: list[str]
    loss_not_excluded: float | None = None
    settle_sessions: int | None = None
    detectable: float | None = None
    best_change: float | None = None


class Comparisons(msgspec.Struct, frozen=True):
    """All that is derived from a run: verdicts per cell, faults, tokens, words, and the long table of metrics.

    `arm_verdict` speaks about whole sessions (a server that died): broken head, broken base, invalid, or None.
    `single` marks a run of one arm. `unfinished` names (session, cell) pairs that a stopped session did not get to; `whole` of
    `planned` sessions are measured, and until all are, only faults and moved tokens are judged. `one_boot` names the arms whose
    sessions all met one boot (URLs): verdicts are marked, since the spread between boots is not in them. `unheard` counts the
    recordings of spoken answers that the recogniser has not heard yet.
    """

    cells: list[CellComparison]
    faults: list[Fault]
    arm_verdict: str | None
    moves: list[TokenMove]
    greedy: list[GreedyPair]
    pcm: list[PcmPair]
    wer: list[WerComparison]
    metrics: list[SessionMetric]
    unfinished: list[tuple[str, str]]
    whole: int
    planned: int
    single: bool
    one_boot: list[str] = []
    late: list[LateClient] = []
    prompts: list[PromptTokens] = []
    unheard: int = 0

    @property
    def is_stopped(self) -> bool:
        """Whether planned sessions are still to be measured."""
        return self.whole < self.planned

    @property
    def is_unfinished(self) -> bool:
        """Whether anything is left to `--resume`: planned sessions, or speech to be judged."""
        return self.is_stopped or self.unheard > 0


def speed_verdict(metric: str, found: Contrast | None, p_holm: float | None, limits: Thresholds) -> str:
    """Regression, improvement, equivalent or no verdict for one metric with a direction."""
    if found is None or p_holm is None:
        return NO_VERDICT
    floor, change = floor_of(metric, limits), math.expm1(found.estimate)
    if p_holm < limits.alpha and abs(change) >= floor:
        return IMPROVEMENT if (change > 0) == better_is_up(metric) else REGRESSION
    return EQUIVALENT if is_equivalent(found, floor) else NO_VERDICT


def floor_of(metric: str, limits: Thresholds) -> float:
    """The practical floor of a metric: the plan's, else the registry's, else nothing."""
    return limits.floor.get(metric, METRICS[metric].floor or 0.0)


def compare(run: RunData) -> Comparisons:
    """Everything that a run's records say; the same run gives an equal value."""
    metrics, faults = session_metrics(run), find_faults(run)
    single = len(set(run.plan.order)) < 2
    unfinished, planned = _unfinished(run), len(run.plan.order)
    whole = _whole_sessions(run, unfinished)
    missing = (
        f"{len(whole)} of {planned} planned sessions measured; finish with --resume" if len(whole) < planned else ""
    )
    contrasts = {cell.name: None if missing else _contrast(run, cell, metrics) for cell in run.plan.cells}
    standing = {cell.name: _standing(run, cell, faults, single) for cell in run.plan.cells}
    tested = {
        name: found.p
        for name, found in contrasts.items()
        if found is not None and found.p is not None and standing[name][0] is None
    }
    adjusted = holm(tested, len(run.plan.cells))
    return Comparisons(
        cells=[
            _cell_comparison(run, cell, metrics, contrasts[cell.name], adjusted, standing[cell.name], missing)
            for cell in run.plan.cells
        ],
        faults=faults,
        arm_verdict=_arm_verdict(faults),
        moves=token_moves(run) if not single and _has_token_floor(run, whole) else [],
        greedy=greedy_pairs(run),
        pcm=pcm_pairs(run),
        wer=[_open(row) if missing and not single else row for row in _words(run)],
        metrics=metrics,
        unfinished=unfinished,
        whole=len(whole),
        planned=planned,
        single=single,
        one_boot=_one_boot(run),
        late=late_clients(run, metrics),
        prompts=prompt_tokens(run),
        unheard=len(unheard(run)),
    )


def _words(run: RunData) -> list[WerComparison]:
    """The WER of transcripts and of spoken answers, in the plan's order of cells."""
    rows = {row.cell: row for row in [*compare_wer(run), *compare_spoken(run)]}
    return [rows[cell.name] for cell in run.plan.cells if cell.name in rows]


def _whole_sessions(run: RunData, unfinished: Sequence[tuple[str, str]]) -> list[SessionInfo]:
    """The sessions that owe nothing: a cell whose load client ended is a fault of the evidence, and not still to come."""
    lost = {(session.id, cell) for session in run.sessions for cell in session.client_failures}
    owing = {session for session, cell in unfinished if (session, cell) not in lost}
    return [session for session in run.sessions if session.id not in owing]


def _has_token_floor(run: RunData, whole: Sequence[SessionInfo]) -> bool:
    """Whether base has shown what moves between its own boots: by two sessions, or the one that is planned."""
    return sum(session.arm == "base" for session in whole) >= min(run.plan.order.count("base"), 2)


def _open(row: WerComparison) -> WerComparison:
    """A row of a stopped run: the errors of its sessions, and no judgement of them yet."""
    if row.verdict == NOT_JUDGED:
        return row
    return msgspec.structs.replace(row, change=None, low=None, high=None, verdict=NO_VERDICT)


def _one_boot(run: RunData) -> list[str]:
    return [arm.name for arm in run.plan.arms if arm.kind == "url" and run.plan.order.count(arm.name) > 1]


def values(metrics: Sequence[SessionMetric], cell: str, metric: str, arm: str) -> list[SessionMetric]:
    """One arm's session values of a metric in a cell, by slot."""
    return [row for row in metrics if row.cell == cell and row.metric == metric and row.arm == arm]


def _contrast(run: RunData, cell: Cell, metrics: Sequence[SessionMetric]) -> Contrast | None:
    base, head = ([row.value for row in rows] for rows in _sides(run, cell, metrics))
    return contrast(base, head, run.plan.thresholds.s_min, run.plan.thresholds.alpha)


def _sides(
    run: RunData, cell: Cell, metrics: Sequence[SessionMetric]
) -> tuple[list[SessionMetric], list[SessionMetric]]:
    """The session values of a cell's primary metric on base and head; those of a run of one arm stand in base's place."""
    names = dict.fromkeys(run.plan.order)
    base, head = ("base", "head") if len(names) != 1 else (next(iter(names)), "")
    return values(metrics, cell.name, cell.primary, base), values(metrics, cell.name, cell.primary, head)


def _unfinished(run: RunData) -> list[tuple[str, str]]:
    return [
        (session.id, cell.name)
        for session in _by_slot(run)
        for cell in run.plan.cells
        if not is_finished(run, cell, measured(run.records, session.id, cell.name))
    ]


def _cell_comparison(
    run: RunData,
    cell: Cell,
    metrics: Sequence[SessionMetric],
    found: Contrast | None,
    adjusted: Mapping[str, float],
    standing: tuple[str | None, list[str]],
    missing: str,
) -> CellComparison:
    limits = run.plan.thresholds
    base, head = _sides(run, cell, metrics)
    verdict, reasons = standing
    if verdict is None:
        verdict = speed_verdict(cell.primary, found, adjusted.get(cell.name), limits)
        reasons = [missing] if missing else reasons or _too_few(cell.primary, base, head)
    plain = CellComparison(
        cell=cell.name,
        task=cell.task,
        metric=cell.primary,
        floor=floor_of(cell.primary, limits),
        base=base,
        head=head,
        contrast=found,
        p_holm=adjusted.get(cell.name),
        verdict=verdict,
        reasons=reasons,
        best_change=None if missing else _best_change(cell.primary, base, head),
    )
    if found is None or verdict not in SPEED_VERDICTS:
        return plain
    return _with_outlook(plain, found, limits, len(run.plan.cells))


def _with_outlook(plain: CellComparison, found: Contrast, limits: Thresholds, cells: int) -> CellComparison:
    """Add what the interval leaves open, and what more sessions would give at the strictest of Holm's levels."""
    alpha = limits.alpha / max(cells, 1)
    undecided = plain.verdict == NO_VERDICT and found.p is not None
    return msgspec.structs.replace(
        plain,
        loss_not_excluded=_worst(plain.metric, found),
        settle_sessions=sessions_to_settle(found, plain.floor, alpha) if undecided else None,
        detectable=smallest_detectable(found, plain.floor, alpha),
    )


def _worst(metric: str, found: Contrast) -> float | None:
    if found.low is None or found.high is None:
        return None
    loss = -math.expm1(found.low) if better_is_up(metric) else math.expm1(found.high)
    return max(loss, 0.0)


def _best_change(metric: str, base: Sequence[SessionMetric], head: Sequence[SessionMetric]) -> float | None:
    best = max if better_is_up(metric) else min
    if not base or not head or best(row.value for row in base) <= 0:
        return None
    return best(row.value for row in head) / best(row.value for row in base) - 1


def _too_few(metric: str, base: Sequence[SessionMetric], head: Sequence[SessionMetric]) -> list[str]:
    missing = [arm for arm, rows in (("base", base), ("head", head)) if not rows]
    if missing:
        return [f"{metric} has no value on {' and '.join(missing)}"]
    if len(base) + len(head) - 2 < LEAST_DF:
        return ["fewer than two sessions an arm have no spread to judge by"]
    return []


def _standing(run: RunData, cell: Cell, faults: Sequence[Fault], single: bool) -> tuple[str | None, list[str]]:
    """The verdict that stands before any statistics, with its reasons; None when the speed may be judged."""
    evidence = [fault.words for fault in faults if fault.kind in _EVIDENCE_KINDS]
    if evidence:
        return INVALID, evidence
    if _serves(run, cell, "base") is False and _serves(run, cell, "head"):
        return NEW_IN_HEAD, ["base's /info does not list it"]
    here = [fault for fault in faults if fault.cell == cell.name]
    lost = [fault.words for fault in here if fault.kind == "client"]
    if lost:
        return INVALID, lost
    arms = {fault.arm for fault in here}
    reasons = [fault.words for fault in here]
    if _serves(run, cell, "head") is False and _serves(run, cell, "base"):
        return BROKEN_HEAD, [f"head's /info no longer lists {cell.task}", *reasons]
    if single:
        return (INVALID if arms else MEASURED), reasons
    if not arms:
        return None, []
    if len(arms) > 1:
        return INVALID, ["both arms failed", *reasons]
    return (BROKEN_HEAD if arms == {"head"} else BROKEN_BASE), reasons


def _serves(run: RunData, cell: Cell, arm: str) -> bool | None:
    """Whether an arm's /info lists the cell's task and our interface; None when no session of it told."""
    infos = [session.info for session in run.sessions if session.arm == arm and "tasks" in session.info]
    if not infos:
        return None
    ours = run.plan.door == "generate"
    return all(cell.task in info["tasks"] and (API in info.get("api", [API]) or not ours) for info in infos)


_EVIDENCE_KINDS = frozenset({"source", "weights", "throttled"})


def _arm_verdict(faults: Sequence[Fault]) -> str | None:
    if any(fault.kind in _EVIDENCE_KINDS for fault in faults):
        return INVALID
    arms = {fault.arm for fault in faults if fault.kind == "server"}
    if not arms:
        return None
    return INVALID if len(arms) > 1 else BROKEN_HEAD if arms == {"head"} else BROKEN_BASE


def find_faults(run: RunData) -> list[Fault]:
    """Every fault of a run, by slot and cell."""
    faults: list[Fault] = []
    for session in _by_slot(run):
        faults += _session_faults(run, session)
        for cell in run.plan.cells:
            faults += _client_faults(session, cell)
            faults += _cell_faults(session, cell, measured(run.records, session.id, cell.name))
    return faults


def _session_faults(run: RunData, session: SessionInfo) -> list[Fault]:
    def fault(kind: str, reason: str, mark: str = "") -> Fault:
        return Fault(session.arm, session.id, None, kind, 1, 1, f"{session.id}{mark} {reason}", reason)

    arm = next((arm for arm in run.plan.arms if arm.name == session.arm), run.plan.arms[0])
    found = []
    source, whose = _expected_source(run, arm)
    if session.source_digest and session.source_digest != source:
        found.append(fault("source", f"served source {session.source_digest[:12]}, {whose} is {source[:12]}"))
    weights, whose = _expected_weights(run)
    if session.weights_digest and session.weights_digest != weights:
        found.append(fault("weights", f"loaded weights {session.weights_digest[:12]}, {whose} {weights[:12]}"))
    share = throttled_share(session)
    if share is not None and share > run.plan.thresholds.throttled:
        limit = percent(math.log1p(run.plan.thresholds.throttled))
        found.append(
            fault(
                "throttled",
                f"was held back by its CPU quota {share:.0%} of the time (limit {limit:.0f} %)",
            )
        )
    found += [fault("server", (problem.splitlines() or [""])[0], ":") for problem in session.problems]
    return found


def _expected_source(run: RunData, arm: ArmInfo) -> tuple[str, str]:
    """The source that an arm's sessions must serve, and whose it is: the plan's tree, or for a peer its own first session."""
    if arm.source_digest:
        return arm.source_digest, "the plan's tree"
    stated = (s.source_digest for s in _by_slot(run) if s.arm == arm.name and s.source_digest)
    return next(stated, ""), "the arm's first session"


def _expected_weights(run: RunData) -> tuple[str, str]:
    """The weights of every session that states any: the plan's, or where it has none those of the first session."""
    if run.plan.model_digest:
        return run.plan.model_digest, "the plan names"
    return next((s.weights_digest for s in _by_slot(run) if s.weights_digest), ""), "the first session"


def _by_slot(run: RunData) -> list[SessionInfo]:
    return sorted(run.sessions, key=lambda session: session.slot)


def throttled_share(session: SessionInfo) -> float | None:
    """The share of a session's core time that a CPU quota took; None when the machine records don't tell."""
    before, after = session.host_before, session.host_after
    keys = ("throttled_s", "monotonic_s")
    if not all(isinstance(host.get(key), int | float) for host in (before, after) for key in keys):
        return None
    elapsed = after["monotonic_s"] - before["monotonic_s"]
    cores = len(before.get("cores_allowed") or [0])  # the count adds up over cores
    return float(after["throttled_s"] - before["throttled_s"]) / (elapsed * cores) if elapsed > 0 else None


def _client_faults(session: SessionInfo, cell: Cell) -> list[Fault]:
    words = session.client_failures.get(cell.name)
    if words is None:
        return []
    said = (words.splitlines() or [""])[0]
    return [Fault(session.arm, session.id, cell.name, "client", 1, 1, f"{session.id}: {said}", said)]


def _cell_faults(session: SessionInfo, cell: Cell, records: Sequence[Record]) -> list[Fault]:
    kinds: dict[str, list[tuple[Record, str]]] = {}
    for record in records:
        wrong = _wrong(cell, record)
        if wrong is not None:
            kinds.setdefault(wrong[0], []).append((record, wrong[1]))
    return [
        Fault(
            arm=session.arm,
            session=session.id,
            cell=cell.name,
            kind=kind,
            count=len(found),
            of=len(records),
            words=f"{session.id}: {len(found)} of {len(records)} requests {_SAYS[kind]} "
            f"(first: request {found[0][0].index}, {found[0][0].item}: {found[0][1]})",
            reason=found[0][1],
        )
        for kind, found in kinds.items()
    ]


_SAYS = {"failed": "failed", "short": "gave short output", "missing audio": "gave no audio"}


def _wrong(cell: Cell, record: Record) -> tuple[str, str] | None:
    """What makes a measured record unusable: its kind and a phrase; None for a sound one."""
    if not record.ok:
        return "failed", (record.error or "no reason given").splitlines()[0]
    if cell.task in SPEECH_TASKS and record.pcm_samples == 0:
        return "missing audio", "no PCM sample arrived"
    if record.completion_tokens < 1:
        return "short", "no token"
    if cell.ignore_eos and record.completion_tokens < cell.max_tokens:
        return "short", f"{record.completion_tokens} of {cell.max_tokens} tokens with ignore_eos"
    if cell.ignore_eos and cell.max_frames is not None and record.audio_finish_reason == "stop":
        return "short", "speech ended by itself under ignore_eos"
    return None


def exit_code(comparisons: Comparisons, expect_token_changes: bool) -> int:
    """0 nothing against it · 1 worse, broken head or tokens moved · 3 unusable evidence · 2 undecided, or stopped."""
    verdicts = {cell.verdict for cell in comparisons.cells} | {comparisons.arm_verdict}
    worse = bool(verdicts & {REGRESSION, BROKEN_HEAD}) or any(row.verdict == "WER worse" for row in comparisons.wer)
    if worse or (comparisons.moves and not expect_token_changes):
        return EXIT_WORSE
    if verdicts & {INVALID, BROKEN_BASE}:
        return EXIT_UNUSABLE
    return EXIT_UNDECIDED if NO_VERDICT in verdicts or comparisons.is_unfinished else EXIT_OK
