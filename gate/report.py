"""The report: a run and what was derived from it as GitHub markdown and as JSON. Only wording happens here.

Every number comes from the run; what was not measured reads "not traced". The only date is the plan's, so that the same run
gives the same bytes whenever it is rendered. The folded second half is in gate/appendix.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import median

import msgspec

from gate.appendix import appendix, interval_words, peer_words
from gate.cell import AUDIO_IN_TASKS, METRICS
from gate.greedy import Divergence, GreedyPair, TokenMove, is_near_tie
from gate.markdown import DASH, NOT_TRACED, counted, inline, interval, listed, number, plural, ranged, signed, table
from gate.metrics import IDENTITY_LIMIT, SessionMetric, measured
from gate.record import PEER_KINDS, ArmInfo, RunData, SessionInfo
from gate.spoken import NOT_JUDGED
from gate.stats import MOST_SESSIONS, percent
from gate.verdict import (
    BROKEN_BASE,
    BROKEN_HEAD,
    EQUIVALENT,
    EXIT_UNDECIDED,
    IMPROVEMENT,
    INVALID,
    NEW_IN_HEAD,
    NO_VERDICT,
    REGRESSION,
    SPEED_VERDICTS,
    CellComparison,
    Comparisons,
    Fault,
    exit_code,
    throttled_share,
    values,
)
from gate.wer import FEW_BLOCKS, SCORER, WerComparison, WerTotals

_LOUD = frozenset({REGRESSION, IMPROVEMENT, BROKEN_HEAD, BROKEN_BASE, INVALID, NEW_IN_HEAD})
_RARE = (BROKEN_HEAD, BROKEN_BASE, INVALID, NEW_IN_HEAD)  # named in the headline only where there is one
_MOST_MOVES = 20  # rows shown; report.json has them all
_MOST_FAULTS = 30
_FAULT_LOGS = {"failed": "server.log", "server": "server.log", "client": "client.log"}  # which may hold a traceback
_REQUEST_ID = re.compile(r"\b[0-9a-f]{32}\b")
_FOOTNOTES = "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ"
_OUTLIER_LEAST = 0.03  # nearer than this (log) to its siblings, a session is not worth a footnote
_QUIET_CORES = 0.3  # more than this, and others were at work beside a session
_QUIET_SHARE = 0.01  # of the core time that a quota took
LEGEND = (
    "How to read it: a cell is a task (T text, A audio, S speech: A2T is speech to text) at a number of clients; each number "
    "is one boot of a server; ↑ more is better; *change* is head's geometric mean against base's, and the true one lies in the "
    "interval 19 times of 20; verdicts are judged over all cells together (Holm's correction), which is stricter than one "
    "cell's interval; *no verdict*: more sessions are needed, it does not say that nothing changed."
)
_LATENCIES = ("TTFT p50", "TTFA p50", "ITL p50", "e2e p50", "gaps > 150 ms")


def render_report(run: RunData, comparisons: Comparisons) -> str:
    """The report as markdown; ends with a line break."""
    first = (_noise, _what_was_run, _peers, _what_to_do, _faults, _gaps)
    second = (_primary, _latency, _tokens, _words, _time, appendix)
    lines = [f"### ⚖️ {headline(comparisons)}", ""]
    lines += [line for section in (*first, *second) for line in section(run, comparisons)]
    return _without_place("\n".join(lines).rstrip() + "\n", run.plan.model_path)


def report_json(run: RunData, comparisons: Comparisons) -> str:
    """The same facts as JSON, schema gate/1, without the records themselves (records.jsonl holds them)."""
    rates = [
        {"cell": row.cell, "session": row.session, "wer_percent": row.wer}
        for cell in comparisons.wer
        for row in [*cell.base, *cell.head]
    ]
    facts = {
        "schema": run.plan.schema,
        "headline": headline(comparisons),
        "plan": run.plan,
        "sessions": sorted(run.sessions, key=lambda session: session.slot),
        "comparisons": comparisons,
        "wer_rates": rates,
    }
    text = msgspec.json.format(msgspec.json.encode(facts, order="deterministic"), indent=1).decode() + "\n"
    return _without_place(text, run.plan.model_path)


def _without_place(text: str, folder: str) -> str:
    """A report with the model folder by its name alone: where it lies is nobody's business but its owner's."""
    name = folder.rstrip("/").rpartition("/")[2]
    return re.sub(rf"(?<![\w.-]){re.escape(folder)}(?![\w.-])", lambda _: name, text) if name else text


# --- headline -----------------------------------------------------------------------------------------------------------


def headline(found: Comparisons) -> str:
    """What came of a run, in one line; that of a stopped run says so first."""
    parts = [f"unfinished, {_left(found)}"] if found.is_unfinished else []
    if found.single:
        parts += ["one arm measured, nothing to compare it with"]
    else:
        parts += [_verdict_counts(found), f"tokens: {_moved_words(found)}"]
        worse = sum(row.verdict == "WER worse" for row in found.wer)
        parts += [f"WER worse in {plural(worse, 'cell')}"] if worse else []
    parts.append(
        "nothing broken"
        if not found.faults
        else f"faults: {plural(len(_fault_groups(found.faults)), 'entry', 'entries')} below"
    )
    return f"gate: {' · '.join(parts)}"


def _left(found: Comparisons) -> str:
    if found.is_stopped:
        return f"{found.whole} of {found.planned} planned sessions measured"
    return f"{plural(found.unheard, 'recording')} still to be heard"


def _verdict_counts(found: Comparisons) -> str:
    verdicts = [cell.verdict for cell in found.cells]
    words = [
        plural(verdicts.count(REGRESSION), "regression"),
        plural(verdicts.count(IMPROVEMENT), "improvement"),
        f"{verdicts.count(EQUIVALENT)} equivalent",
        f"{plural(verdicts.count(NO_VERDICT), 'cell')} without a verdict",
    ]
    return ", ".join(words + [f"{verdicts.count(v)} {v}" for v in _RARE if v in verdicts])


def _moved_words(found: Comparisons) -> str:
    if found.moves:
        return f"moved at {plural(len({move.item for move in found.moves}), 'prompt')}"
    if _are_tokens_open(found):
        return "not judged yet"
    return "none moved" if any(pair.kind == "head–base" for pair in found.greedy) else "not compared"


def _are_tokens_open(found: Comparisons) -> bool:
    """Whether a run was stopped before base showed what moves between its own boots."""
    return found.is_stopped and not any(pair.kind == "base–base" for pair in found.greedy)


def _noise(run: RunData, found: Comparisons) -> list[str]:
    """Warnings: others used the machine, a quota held it back, the client was late; empty after a quiet run."""
    sessions = sorted(run.sessions, key=lambda session: session.slot)
    busy = {session.id: cores for session in sessions if (cores := _others_cores(session)) > _QUIET_CORES}
    held = {s.id: share for s in sessions if (share := throttled_share(s)) is not None and share >= _QUIET_SHARE}
    parts = []
    if busy:
        used = number(max(busy.values()), 1)
        parts.append(f"other processes used up to {used} cores during sessions {', '.join(busy)}")
    if held:
        parts.append(f"a CPU quota took up to {max(held.values()):.0%} of sessions {', '.join(held)}")
    lines = [f"⚠️ {'; '.join(parts)}: repeat on a quiet machine.", ""] if parts else []
    return lines + _late(found)


def _late(found: Comparisons) -> list[str]:
    if not found.late:
        return []
    worst = max(found.late, key=lambda row: row.p99_ms)
    cells = ", ".join(dict.fromkeys(row.cell for row in found.late))
    return [
        f"⚠️ client was late in {cells}: its own loop by up to {number(worst.p99_ms, 1)} ms (p99, {worst.cell} of "
        f"{worst.session}; limit {number(worst.limit_ms, 1)} ms), so latencies there are partly the client's.",
        "",
    ]


def _others_cores(session: SessionInfo) -> float:
    """The cores that other processes used before or after a session, whichever is more."""
    hosts = (session.host_before, session.host_after)
    return max(sum(float(row.get("percent", 0.0)) for row in host.get("heavy_processes") or []) for host in hosts) / 100


# --- what was run, and what follows ---------------------------------------------------------------------------------------


def arm_label(arm: ArmInfo) -> str:
    """An arm in few words: the commit or folder, and what was added to it."""
    name = arm.commit[:9] if arm.commit else inline(arm.ref)
    extras = ["uncommitted changes"] if arm.dirty else []
    extras += [" ".join(arm.args)] if arm.args else []
    extras += [f"{key}={value}" for key, value in sorted(arm.env.items())]
    return f"`{name}`" + "".join(f" + `{inline(extra)}`" for extra in extras)


def _what_was_run(run: RunData, found: Comparisons) -> list[str]:
    plan, names = run.plan, dict.fromkeys(arm.name for arm in run.plan.arms)
    done = {name: sum(s.arm == name for s in run.sessions) for name in names if name in plan.order}
    arms = [f"{arm_label(arm)} ({arm.name})" for arm in plan.arms]
    counts = "+".join(str(count) for count in done.values())
    asked = "+".join(str(plan.order.count(arm)) for arm in done)
    noun = "session" if counts == "1" else "sessions"
    sessions = f"{counts} {noun}" if counts == asked else f"{counts} {noun} begun of {asked} planned"
    words = [
        arms[0] if found.single else " → ".join(arms),
        machine_words(run.sessions),
        f"set `{plan.set_name}`, {sessions}, order `{' '.join(plan.order)}` (seed {plan.seed})",
    ]
    return [" · ".join(words), ""]


def _peers(run: RunData, found: Comparisons) -> list[str]:
    """What is not checked of arms that are no tree of ours, and what their being asked differently would show as."""
    arms = {arm.name: arm for arm in run.plan.arms if arm.kind in PEER_KINDS}
    lines = [f"- {name}: {peer_words(arm, run)}" for name, arm in arms.items()]
    if run.plan.door == "openai":
        who = "asked" if found.single else "both arms were asked"
        lines.append(f"- {who} at /v1/chat/completions: tokens are counted by usage and compared as text")
    lines += [f"- {name}: URL arm: its server is not pinned by the gate" for name in arms if arms[name].kind == "url"]
    if found.one_boot:
        names = " and ".join(found.one_boot)
        lines.append(
            f"- one boot: every session of {names} met the same running server, so the spread between boots is not in the "
            "intervals and they are too narrow; such verdicts are marked"
        )
    lines += _prompt_words(found) if lines else []
    return ["**Peers**", "", *lines, ""] if lines else []


def _prompt_words(found: Comparisons) -> list[str]:
    """Whether both arms counted the same prompt: another template or another cut of the audio shows here."""
    if not found.prompts:
        return []
    rows = [
        f"{row.cell} {number(row.base)} and {number(row.head)}"
        + ("" if row.equal == row.of else f" (equal in {row.equal} of {row.of} requests)")
        for row in found.prompts
    ]
    differ = any(row.equal < row.of for row in found.prompts)
    says = " **The arms did not read the same prompt.**" if differ else " Equal in every request."
    return [f"- prompt tokens a request, base and head: {'; '.join(rows)}.{says}"]


def machine_words(sessions: Sequence[SessionInfo]) -> str:
    """The machine in a line, from the first session's record."""
    host = next((session.host_before for session in sessions if session.host_before), {})
    gpus = host.get("gpus") or []
    names = sorted({str(gpu.get("name", "GPU")) for gpu in gpus})
    parts = [f"{len(gpus)} × {' and '.join(names)}"] if gpus else []
    parts += [str(host["cpu_model"])] if host.get("cpu_model") else []
    parts += [f"{plural(len(host['cores_allowed']), 'core')}"] if host.get("cores_allowed") else []
    return inline(", ".join(parts)) if parts else f"machine {NOT_TRACED}"


def _what_to_do(run: RunData, found: Comparisons) -> list[str]:
    if found.single:
        return [f"**What you need to do:** {_finish(found)}", ""] if found.is_unfinished else []
    steps = [*_blocking_steps(found), *_undecided_steps(run, found)]
    if not steps:
        return ["**What you need to do:** nothing; every cell is decided and none is worse.", ""]
    if not _blocking_steps(found):
        undecided = " (exit 2: undecided)" if exit_code(found, False) == EXIT_UNDECIDED else ""
        return [f"**What you need to do:** nothing blocks{undecided}. {' '.join(steps)}", ""]
    return ["**What you need to do:**", "", *(f"- {step}" for step in steps), ""]


def _finish(found: Comparisons) -> str:
    return f"*unfinished*: {_left(found)}; finish the run with `gate compare --resume`."


def _names(found: Comparisons, verdict: str) -> str:
    return ", ".join(cell.cell for cell in found.cells if cell.verdict == verdict)


def _blocking_steps(found: Comparisons) -> list[str]:
    steps = []
    if names := _names(found, BROKEN_HEAD):
        steps.append(f"*broken head*: {names} fails on head only; the faults below name the first request.")
    elif found.arm_verdict == BROKEN_HEAD:
        steps.append("*broken head*: a session of head ended badly; its server.log has the reason.")
    if names := _names(found, REGRESSION):
        steps.append(
            f"*regression*: {names} got slower; find the cause, or say in the pull request why it is worth it."
        )
    if found.moves:
        steps.append(f"*tokens moved*: {_move_words(found.moves[0])}; if that is meant, add `--expect-token-changes`.")
    steps += [_wer_step(row) for row in found.wer if row.verdict == "WER worse"]
    if names := _names(found, INVALID):
        steps.append(f"*invalid*: {names} says nothing about either arm; remove the cause and measure again.")
    if names := _names(found, BROKEN_BASE):
        steps.append(f"*broken base*: {names} fails on base only, which is not head's fault; choose another base.")
    elif found.arm_verdict == BROKEN_BASE:
        steps.append("*broken base*: a session of base ended badly, which is not head's fault; measure again.")
    return steps


def _wer_step(row: WerComparison) -> str:
    where = f"{row.cell}, round trip," if row.spoken else row.cell
    what = "answers that changed, in the run's folder `speech`" if row.spoken else "clips that changed"
    return f"*WER worse*: {where} by {signed(row.change, 2)} points; listen to the {what}."


def _move_words(move: TokenMove) -> str:
    return f"{move.cell}, prompt `{inline(move.item)}`, step {move.step}"


def _undecided_steps(run: RunData, found: Comparisons) -> list[str]:
    if found.is_stopped:
        return [_finish(found)]
    unheard = [_finish(found)] if found.unheard else []
    open_cells = [cell for cell in found.cells if cell.verdict == NO_VERDICT]
    if not open_cells:
        return unheard
    losses = [cell.loss_not_excluded for cell in open_cells if cell.loss_not_excluded is not None]
    hides = f"could still hide a loss of up to {number(100 * max(losses), 1)} %" if losses else "can't be judged"
    text = f"{plural(len(open_cells), 'cell')} {hides}"
    wanted = settling_sessions(found)
    if wanted:
        text += f"; about {max(wanted)} sessions an arm would settle {len(wanted)} of {len(open_cells)}"
        text += _price(run, max(wanted))
    elif losses:
        text += f"; even {MOST_SESSIONS} sessions an arm would settle none: lower the spread first"
    return [f"*no verdict*: {text}.", *unheard]


def settling_sessions(found: Comparisons) -> list[int]:
    """How many sessions an arm would settle each cell without a verdict, of those that any number would."""
    cells = [cell for cell in found.cells if cell.verdict == NO_VERDICT]
    return [cell.settle_sessions for cell in cells if cell.settle_sessions is not None]


def _price(run: RunData, wanted: int) -> str:
    """The minutes that more sessions cost at this run's own pace; empty when the pace is unknown."""
    times = [
        session.host_after["monotonic_s"] - session.host_before["monotonic_s"]
        for session in run.sessions
        if "monotonic_s" in session.host_before and "monotonic_s" in session.host_after
    ]
    more = max(2 * wanted - len(run.plan.order), 0)
    return f" ({more} more sessions, about {number(math.ceil(median(times) * more / 60))} min)" if times else ""


# --- faults and the primary table -----------------------------------------------------------------------------------------


def _faults(run: RunData, found: Comparisons) -> list[str]:
    if not found.faults:
        return []
    rows = [_fault_row(run, same) for same in _fault_groups(found.faults)]
    more = len(rows) - _MOST_FAULTS
    tail = [f"- {plural(more, 'more fault')} in report.json"] if more > 0 else []
    return ["**Faults**", "", *rows[:_MOST_FAULTS], *tail, ""]


def _fault_groups(faults: Sequence[Fault]) -> list[list[Fault]]:
    """Faults of one arm with one reason, whichever sessions, cells and requests they are of."""
    groups: dict[tuple[str, str, str], list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.arm, fault.kind, _REQUEST_ID.sub("", fault.reason)), []).append(fault)
    return list(groups.values())


def _fault_row(run: RunData, same: Sequence[Fault]) -> str:
    """One line for equal faults: their cells, their sessions, all their requests, and the first one's words and log."""
    first = same[0]
    cells = ", ".join(dict.fromkeys(fault.cell or "whole session" for fault in same))
    sessions = ", ".join(dict.fromkeys(fault.session for fault in same))
    count, of = sum(fault.count for fault in same), sum(fault.of for fault in same)
    words = first.words.removeprefix(first.session).replace(f": {first.count} of {first.of} ", f": {count} of {of} ", 1)
    log = _FAULT_LOGS.get(first.kind)
    is_ours = any(arm.name == first.arm and arm.kind != "url" for arm in run.plan.arms)  # a URL's server logs elsewhere
    where = f"; see `sessions/{first.session}/{log}`" if log and is_ours else ""
    return f"- {first.arm}, {cells}, {first.kind}: {sessions}{inline(words)}{where}"


def _gaps(run: RunData, found: Comparisons) -> list[str]:
    """Every cell of a session with fewer records than it has requests: it counts for nothing, and that must be seen."""
    if not found.unfinished:
        return []
    requests = {cell.name: cell.requests for cell in run.plan.cells}
    rows = [
        f"- {session}: {cell} has {len(measured(run.records, session, cell))} of {requests[cell]} records"
        for session, cell in found.unfinished
    ]
    return ["**Incomplete** (a session's cell without all its records is left out)", "", *rows, ""]


def metric_label(metric: str) -> str:
    """A metric with the side it speaks of and the arrow of its better direction."""
    arrow = {"up": " ↑", "down": " ↓", "none": ""}[METRICS[metric].better]
    return f"{metric} (input audio){arrow}" if metric == "RTFx" else f"{metric}{arrow}"


def verdict_words(cell: CellComparison, one_boot: bool = False) -> str:
    """The verdict as printed: loud ones bold, equivalence with its width, a reason where there is no number.

    `one_boot` marks a decided speed verdict on an arm whose sessions all met one boot.
    """
    if one_boot and cell.verdict in SPEED_VERDICTS - {NO_VERDICT}:
        return f"{verdict_words(cell)} (one boot)"
    if cell.verdict == EQUIVALENT:
        return f"equivalent within {number(100 * cell.floor)} %"
    if cell.verdict in _LOUD:
        return f"**{cell.verdict}**"
    return f"{cell.verdict}: {inline(cell.reasons[0])}" if cell.reasons else cell.verdict


def _primary(run: RunData, found: Comparisons) -> list[str]:
    notes: list[str] = []
    if found.single:
        rows = [
            [f"{c.cell} {metric_label(c.metric)}", listed(_raw(c.base or c.head)), verdict_words(c)]
            for c in found.cells
        ]
        return [*table(("cell", "sessions", "state"), rows), *_checks(run, found)]
    rows = [_primary_row(cell, notes, bool(found.one_boot)) for cell in found.cells]
    head = ("cell", "base sessions", "head sessions", "change", "95 % interval", "verdict")
    footnotes = [*(f"{note}  " for note in notes), ""] if notes else []
    return [*table(head, rows, right=(3,)), *footnotes, LEGEND, "", *_checks(run, found)]


def _raw(rows: Sequence[SessionMetric]) -> list[float]:
    return [row.value for row in rows]


def _primary_row(cell: CellComparison, notes: list[str], one_boot: bool) -> list[str]:
    # An error is never a speed verdict: a broken or invalid cell shows its raw values and no change.
    contrast = cell.contrast if cell.verdict in SPEED_VERDICTS else None
    change = f"{signed(percent(contrast.estimate))} %" if contrast else DASH
    bounds = interval_words(contrast.low, contrast.high) if contrast else DASH
    sides = [_with_footnotes(cell, rows, notes) for rows in (cell.base, cell.head)]
    return [f"{cell.cell} {metric_label(cell.metric)}", *sides, change, bounds, verdict_words(cell, one_boot)]


def _with_footnotes(cell: CellComparison, rows: Sequence[SessionMetric], notes: list[str]) -> str:
    """Raw values; one far from its siblings gets a letter, and `notes` its sentence. Nothing is left out."""
    words = [number(row.value) for row in rows]
    apart = outliers(_raw(rows)) if cell.verdict in SPEED_VERDICTS else []
    for place, distance in enumerate(apart):
        if distance is None or len(notes) >= len(_FOOTNOTES):
            continue
        letter = _FOOTNOTES[len(notes)]
        words[place] += letter
        side = f"{number(abs(percent(distance)), 1)} % {'under' if distance < 0 else 'over'} its siblings"
        best = f" Best against best: {signed(100 * cell.best_change)} %." if cell.best_change is not None else ""
        notes.append(f"{letter} {cell.cell}: session {rows[place].session} lies {side}. Kept.{best}")
    return " ".join(words) or DASH


def outliers(raw: Sequence[float]) -> list[float | None]:
    """For each value its log distance from its siblings' median where it stands out, else None; needs three values.

    It stands out when that distance is over 3 % and over three times the siblings' own range.
    """
    if len(raw) < 3 or min(raw) <= 0:
        return [None] * len(raw)
    logs = [math.log(value) for value in raw]
    found: list[float | None] = []
    for place, log in enumerate(logs):
        others = logs[:place] + logs[place + 1 :]
        distance = log - median(others)
        limit = max(_OUTLIER_LEAST, 3 * (max(others) - min(others)))
        found.append(distance if abs(distance) > limit else None)
    return found


def _checks(run: RunData, found: Comparisons) -> list[str]:
    """The lines under the table: requests, the identity, and how far the verdicts may be believed."""
    issued, failed = (
        int(sum(row.value for row in found.metrics if row.metric == name)) for name in ("issued", "failed")
    )
    measured = [row.session for row in found.metrics if row.metric == "gaps > 150 ms"]
    gapped = {row.session for row in found.metrics if row.metric == "gaps > 150 ms" and row.value > 0}
    words = [
        f"Requests issued {number(issued)}, ok {number(issued - failed)}, failed {number(failed)}",
        f"gaps over 150 ms in {len(gapped)} of {plural(len(set(measured)), 'session')}" if measured else "",
        _identity(found.metrics),
    ]
    lines = [" · ".join(filter(None, words)) + "  "]
    if not found.single:
        lines.append(
            "Expect one false alarm in 20 such reports. How much sessions differ by themselves is learnt from this run alone."
        )
    return [*lines, ""]


def _identity(metrics: Sequence[SessionMetric]) -> str:
    rows = [row for row in metrics if row.metric == "identity residual"]
    if not rows:
        return f"closed-loop identity: {NOT_TRACED}"
    worst = max(rows, key=lambda row: abs(row.value))
    size = f"{number(100 * abs(worst.value), 1)} %"
    if abs(worst.value) <= IDENTITY_LIMIT:
        return f"closed-loop identity within {size} on every row"
    over = sum(abs(row.value) > IDENTITY_LIMIT for row in rows)
    where = f"{worst.cell} in {worst.session}"
    return f"closed-loop identity off by over {number(100 * IDENTITY_LIMIT)} % on {over} of {len(rows)} rows ({where}: {size})"


# --- latency ----------------------------------------------------------------------------------------------------------------


def _latency(run: RunData, found: Comparisons) -> list[str]:
    names = [name for name in _LATENCIES if any(row.metric == name for row in found.metrics)]
    if not names:
        return []
    arms = list(dict.fromkeys(run.plan.order)) if found.single else ["base", "head"]
    head = ["cell", *(f"{name} {arm}" for name in names for arm in arms)]
    rows = [
        [cell.name, *(_latency_values(found, cell.name, name, arm) for name in names for arm in arms)]
        for cell in run.plan.cells
    ]
    return ["**Latency** per session, ms (information, no verdicts)", "", *table(head, rows)]


def _latency_values(found: Comparisons, cell: str, metric: str, arm: str) -> str:
    raw = _raw(values(found.metrics, cell, metric, arm))
    whole = metric.startswith("gaps")
    return " ".join(number(value, 0 if whole or value >= 100 else 1 if value >= 10 else 2) for value in raw) or DASH


# --- tokens -----------------------------------------------------------------------------------------------------------------


def _tokens(run: RunData, found: Comparisons) -> list[str]:
    if not found.greedy:
        return []
    groups = dict.fromkeys((pair.cell, pair.kind) for pair in found.greedy)
    rows = [_pair_row(*group, [pair for pair in found.greedy if (pair.cell, pair.kind) == group]) for group in groups]
    head = ("cell", "pair", "prompts exact", "steps matched", "first difference")
    what = "as text, a step is a character" if run.plan.door == "openai" else "equal prompts"
    lines = [f"**Tokens** (greedy, {what}; matched up to the first difference)", "", *table(head, rows)]
    return lines + _moves(run, found) + _pcm(found)


def _pair_row(cell: str, kind: str, pairs: Sequence[GreedyPair]) -> list[str]:
    firsts = [pair.first for pair in pairs if pair.first is not None]
    first = min(firsts, key=lambda divergence: (divergence.step, divergence.index), default=None)
    return [
        cell,
        f"{kind} ({plural(len(pairs), 'pair')})",
        f"{counted([pair.exact for pair in pairs])} of {ranged([pair.of for pair in pairs])}",
        f"{ranged([pair.matched for pair in pairs])} of {ranged([pair.of_steps for pair in pairs])}",
        _difference(first) if first else "none",
    ]


def _difference(first: Divergence) -> str:
    why = ", one ends" if first.reason == "length" else ""
    return f"step {first.step} of prompt `{inline(first.item)}`: {_tie(first.margin)}{why}"


def _tie(margin: float | None) -> str:
    if margin is None:
        return f"margin {NOT_TRACED}"
    return f"{'near-tie' if is_near_tie(margin) else 'hard'} (margin {number(margin, 3)})"


def _moves(run: RunData, found: Comparisons) -> list[str]:
    if found.single:
        return []
    floor = ""
    if sum(session.arm == "base" for session in run.sessions) < 2:
        floor = " Base ran once, so no base–base pair says what moves between its own boots."
    if not found.moves:
        if _are_tokens_open(found):
            return ["Moved tokens are not judged before base has run twice.", ""]
        if not any(pair.kind == "head–base" for pair in found.greedy):
            return ["No prompt was answered by both arms, so tokens are not compared.", ""]
        return [f"No token moved that base does not move between its own boots.{floor}", ""]
    rows = [_move_row(move, run.plan.door == "openai") for move in found.moves[:_MOST_MOVES]]
    head = ("cell", "prompt", "step", "base token", "head token", "base's choice was", "head sessions")
    more = len(found.moves) - _MOST_MOVES
    tail = [f"{plural(more, 'more prompt')} in report.json.", ""] if more > 0 else []
    prompts = plural(len({move.item for move in found.moves}), "prompt")
    title = f"**tokens moved** at {prompts} where all base–base pairs agree.{floor}"
    return [title, "", *table(head, rows, right=(2, 3, 4)), *tail]


def _move_row(move: TokenMove, as_text: bool) -> list[str]:
    tokens = [_token_words(token, as_text) for token in (move.base_token, move.head_token)]
    sessions = f"{len(move.sessions)} of {move.of_sessions}"
    return [move.cell, f"`{inline(move.item)}`", str(move.step), *tokens, _tie(move.margin), sessions]


def _token_words(token: int | None, as_text: bool) -> str:
    if token is None:
        return "(end)"
    return f"`{inline(repr(chr(token)))}`" if as_text else str(token)


def _pcm(found: Comparisons) -> list[str]:
    lines = []
    for cell in dict.fromkeys(pair.cell for pair in found.pcm):
        here = [pair for pair in found.pcm if pair.cell == cell]
        kinds = {
            kind: [pair for pair in here if pair.kind == kind] for kind in dict.fromkeys(pair.kind for pair in here)
        }
        words = [
            f"{kind} {counted([pair.equal for pair in pairs])} of {ranged([pair.of for pair in pairs])}"
            for kind, pairs in kinds.items()
        ]
        floor = [pair for pair in here if pair.kind == "base–base"]
        informs = bool(floor) and all(pair.equal == pair.of for pair in floor)
        says = "" if informs else "; base does not repeat its own bytes, so this says nothing here" if floor else ""
        lines.append(f"PCM bytes equal, {cell}: {', '.join(words)}{says}.  ")
    return [*lines, ""] if lines else []


# --- words and time -----------------------------------------------------------------------------------------------------------


def _words(run: RunData, found: Comparisons) -> list[str]:
    if not found.wer:
        return []
    notes = [f"Scorer: {SCORER}."]
    prompts = {cell.name for cell in run.plan.cells if cell.task not in AUDIO_IN_TASKS}
    few = [
        f"{plural(row.blocks, 'prompt' if row.cell in prompts else 'speaker block')} in {row.cell}"
        for row in found.wer
        if row.low is not None and row.blocks < FEW_BLOCKS
    ]
    if few:
        notes.append(f"Only {', '.join(few)}: the intervals are narrower than they should be.")
    return ["**Words**", "", *_wer_table(found), " ".join(notes), "", *_round_trip(run, found)]


def _wer_table(found: Comparisons) -> list[str]:
    if found.single:
        rows = [[_wer_label(row), _wer_raw([*row.base, *row.head]), _wer_state(row)] for row in found.wer]
        return table(("cell", "sessions", "state"), rows)
    head = ("cell", "base sessions", "head sessions", "change, points", "paired 95 % interval", "verdict")
    return table(head, [_wer_row(row) for row in found.wer], right=(3,))


def _wer_label(row: WerComparison) -> str:
    if row.verdict == NOT_JUDGED:
        return f"{row.cell} round-trip WER % ↓"
    kind, clips = ("round-trip WER", "answer") if row.spoken else ("WER", "clip")
    return f"{row.cell} {kind} % ↓ ({plural(row.clips, clips)})"


def _wer_raw(totals: Sequence[WerTotals]) -> str:
    return " ".join(number(total.wer, 2) for total in totals) or DASH


def _wer_state(row: WerComparison) -> str:
    return f"not judged: {inline(row.reason)}" if row.verdict == NOT_JUDGED else row.verdict


def _wer_row(row: WerComparison) -> list[str]:
    name, sides = _wer_label(row), [_wer_raw(totals) for totals in (row.base, row.head)]
    if row.verdict == NOT_JUDGED:
        return [name, *sides, DASH, DASH, _wer_state(row)]
    if row.verdict == "identical":
        same = "identical text and speech" if row.spoken else "identical text"
        return [name, *sides, "0.00", DASH, f"{same}, WER equal by construction"]
    verdict = f"**{row.verdict}**" if row.verdict == "WER worse" else row.verdict
    return [name, *sides, signed(row.change, 2), interval(row.low, row.high, 2), verdict]


def _round_trip(run: RunData, found: Comparisons) -> list[str]:
    """What the round-trip rates stand on: answers, words, and whether speech ended by itself or was cut."""
    rows = [
        _arm_speech(run, cell.cell, arm, [total for total in (*cell.base, *cell.head) if total.arm == arm])
        for cell in found.wer
        if cell.spoken and cell.verdict != NOT_JUDGED
        for arm in dict.fromkeys(arm.name for arm in run.plan.arms)
    ]
    if not rows:
        return []
    says = (
        "*Round trip*: a recogniser hears the speech of an answer, and its words are scored against the answer's own text, "
        "which is what the server was to say. Its own mistakes count too, on both arms alike; speech that is cut before its "
        f"text ends counts what is not said as errors. Recogniser: {run.plan.judge.recogniser}; the first "
        f"{plural(run.plan.judge.requests, 'answer')} of each cell and session."
    )
    head = ("cell", "arm", "answers judged", "words", "WER %", "ended by themselves", "nothing heard")
    return ["**Spoken answers**, all sessions of an arm together", "", *table(head, rows, right=range(2, 7)), says, ""]


def _arm_speech(run: RunData, cell: str, arm: str, totals: Sequence[WerTotals]) -> list[str]:
    requests = next(min(one.requests, run.plan.judge.requests) for one in run.plan.cells if one.name == cell)
    answers, words = sum(total.clips for total in totals), sum(total.n for total in totals)
    known = [total.ended for total in totals if total.ended is not None]
    errors = sum(total.s + total.d + total.i for total in totals)
    return [
        cell,
        arm,
        f"{answers} of {requests * sum(session.arm == arm for session in run.sessions)}",
        number(words),
        number(100 * errors / words, 2) if words else DASH,
        f"{sum(known)} of {answers}" if totals and len(known) == len(totals) else "not stated",
        str(sum(total.empty for total in totals)),
    ]


def _time(run: RunData, found: Comparisons) -> list[str]:
    return [f"**Where the time went**: kernels {NOT_TRACED} in this run; host phases {NOT_TRACED}.", ""]
