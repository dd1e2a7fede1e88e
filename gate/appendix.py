"""The report's second half: folded tables of how verdicts came about, counters, all metrics, and the provenance block."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

from gate.cell import METRICS, TASKS, Cell
from gate.markdown import DASH, NOT_TRACED, fold, inline, interval, number, plural, ranged, signed, table
from gate.record import PEER_KINDS, ArmInfo, Plan, RunData, SessionInfo
from gate.stats import percent
from gate.verdict import SPEED_VERDICTS, CellComparison, Comparisons, throttled_share
from gate.wer import RESAMPLES

_ALL_TASKS = (*TASKS, "I2T", "V2T")
_MOST_COUNTERS = 60
_WIDEST = math.log(10)
_EXACT_METRICS = ("issued", "failed", "tokens out", "audio in")


def appendix(run: RunData, found: Comparisons) -> list[str]:
    """All folds, the list of what was not run, and the provenance, as lines."""
    return [
        *_explanations(run, found),
        *_counters(run, found),
        *_all_metrics(run, found),
        *_sessions(run),
        *_not_run(run, found),
        *_provenance(run),
    ]


def _explanations(run: RunData, found: Comparisons) -> list[str]:
    if found.single:
        return []
    head = (
        "cell",
        "spread s",
        "df",
        "95 %",
        "90 %",
        "p",
        "Holm p",
        "best/best",
        "loss not excluded",
        "would find",
    )
    limits = run.plan.thresholds
    rule = (
        f"Differences of mean logarithms of session values; s is the spread of a session, at least {_hundred(limits.s_min)} %: "
        "pooled within arms, and from 4 sessions an arm on that of the differences within neighbouring slots. "
        f"Regression or improvement: Holm p < {limits.alpha:g} over all planned cells, and a change beyond the floor. "
        "Equivalent: the 90 % interval lies inside ± the floor. No session is ever dropped. "
        f"WER: bootstrap over speaker blocks, {RESAMPLES:,} resamples, seed {run.plan.seed}; worse from "
        f"{limits.wer_points:g} points. *Would find*: a true change of this size is found with 80 % chance."
    )
    rows = [_explanation(cell) for cell in found.cells]
    reasons = [
        f"- {cell.cell}, {cell.verdict}: {inline(reason)}" for cell in found.cells for reason in cell.reasons[:5]
    ]
    extra = [*reasons, ""] if reasons else []
    return fold("How each verdict came about", [rule, "", *table(head, rows), *extra, *_wer_details(found)])


def _hundred(ratio: float | None, digits: int = 1) -> str:
    return DASH if ratio is None else number(100 * ratio, digits)


def _explanation(cell: CellComparison) -> list[str]:
    found = cell.contrast
    if found is None or cell.verdict not in SPEED_VERDICTS:
        return [cell.cell, *[DASH] * 9]
    bounds = [interval_words(low, high) for low, high in ((found.low, found.high), (found.low90, found.high90))]
    chances = [DASH if p is None else number(p, 4) for p in (found.p, cell.p_holm)]
    best = DASH if cell.best_change is None else f"{signed(100 * cell.best_change)} %"
    loss = DASH if cell.loss_not_excluded is None else f"{_hundred(cell.loss_not_excluded)} %"
    finds = DASH if cell.detectable is None else _at_most_double(cell.detectable)
    return [cell.cell, f"{_hundred(found.s, 2)} %", str(found.df), *bounds, *chances, best, loss, finds]


def _at_most_double(ratio: float) -> str:
    return f"{_hundred(ratio)} %" if ratio <= 1 else "only over 100 %"


def interval_words(low: float | None, high: float | None) -> str:
    """An interval of log values in percent, or why there is none: one that spans a factor of ten says nothing."""
    if low is None or high is None or max(abs(low), abs(high)) > _WIDEST:
        return "too few sessions for an interval"
    return interval(percent(low), percent(high))


def _wer_details(found: Comparisons) -> list[str]:
    rows = [
        [
            t.cell,
            t.session,
            number(t.wer, 2),
            *(str(n) for n in (t.s, t.d, t.i, t.n, t.clips, t.over_half, t.empty, t.truncated)),
        ]
        for cell in found.wer
        for t in [*cell.base, *cell.head]
    ]
    head = ("cell", "session", "WER %", "S", "D", "I", "N", "clips", "over 50 %", "empty", "cut at the limit")
    return table(head, rows, right=range(2, 11)) if rows else []


def _counter_values(run: RunData, found: Comparisons) -> dict[str, dict[str, list[float]]]:
    """{counter: {arm: values by slot}} of the servers' counters and of what the gate counted itself."""
    gathered: dict[str, dict[str, list[float]]] = {}
    for session in sorted(run.sessions, key=lambda session: session.slot):
        for name, value in session.counters.items():
            gathered.setdefault(name, {}).setdefault(session.arm, []).append(value)
    for row in found.metrics:
        if row.metric in _EXACT_METRICS:
            gathered.setdefault(f"{row.cell} {row.metric}", {}).setdefault(row.arm, []).append(row.value)
    return gathered


def _counters(run: RunData, found: Comparisons) -> list[str]:
    """Counters that repeat on every base session are compared exactly; the others can't be, and are only counted."""
    gathered = _counter_values(run, found)
    if found.single or not gathered:
        return []
    exact = {name: arms for name, arms in gathered.items() if len(set(arms.get("base", []))) == 1}
    changed = {name: arms for name, arms in exact.items() if set(arms.get("head", [])) != set(arms["base"])}
    summary = (
        f"{plural(len(exact) - len(changed), 'counter')} equal on every session, {len(changed)} changed, "
        f"{len(gathered) - len(exact)} that base does not repeat between its own sessions."
    )
    rows = [
        [f"`{inline(name)}`", ranged(arms["base"]), ranged(arms.get("head", []))]
        for name, arms in sorted(changed.items())
    ]
    more = len(rows) - _MOST_COUNTERS
    tail = [f"{plural(more, 'more counter')} in report.json.", ""] if more > 0 else []
    body = [*table(("counter", "base", "head"), rows[:_MOST_COUNTERS], right=(1, 2)), *tail] if rows else []
    return [f"**Counters**, compared exactly: {summary}", "", *(fold("Counters that changed", body) if body else [])]


def _all_metrics(run: RunData, found: Comparisons) -> list[str]:
    lines: list[str] = []
    for cell in run.plan.cells:
        rows = [_metric_row(found, run.sessions, cell, name) for name in METRICS]
        shown = [row for row in rows if any(word != DASH for word in row[2:])]
        if shown:
            ids = [session.id for session in _by_slot(run.sessions)]
            lines += [f"**{cell.name}**", "", *table(("metric", "unit", *ids), shown, right=range(2, 2 + len(ids)))]
    return fold("Every metric of every session", lines) if lines else []


def _by_slot(sessions: Sequence[SessionInfo]) -> list[SessionInfo]:
    return sorted(sessions, key=lambda session: session.slot)


def _metric_row(found: Comparisons, sessions: Sequence[SessionInfo], cell: Cell, name: str) -> list[str]:
    rows = {row.session: row.value for row in found.metrics if (row.cell, row.metric) == (cell.name, name)}
    return [name, METRICS[name].unit, *(number(rows.get(session.id)) for session in _by_slot(sessions))]


def _sessions(run: RunData) -> list[str]:
    rows = [_session_row(session) for session in _by_slot(run.sessions)]
    head = (
        "session",
        "boot s",
        "load before",
        "held back by quota",
        "others on the machine",
        "client lag ms: p50, p99, longest",
        "problems",
    )
    late = (
        "Client lag is how late a 10 ms timer of the load client fired while it measured, the worst cell of each session: "
        "what is well below a latency did not make it."
    )
    return fold("Sessions and the machine under them", [*table(head, rows, right=(1, 2)), late, ""]) if rows else []


def _session_row(session: SessionInfo) -> list[str]:
    share = throttled_share(session)
    busy = [*_heavy(session.host_before), *_heavy(session.host_after)]
    worst = max(session.client_lag.values(), key=lambda lag: lag.p99, default=None)
    return [
        session.id if session.boots == 1 else f"{session.id} ({session.boots} boots)",
        number(session.boot_seconds, 1),
        number(session.host_before.get("load_1m"), 2),
        NOT_TRACED if share is None else f"{number(100 * share, 1)} %",
        inline(", ".join(sorted(set(busy)))) or "none seen",
        f"{number(worst.p50, 1)}, {number(worst.p99, 1)}, {number(worst.max, 1)}" if worst else NOT_TRACED,
        str(len(session.problems)),
    ]


def _heavy(host: Mapping[str, object]) -> list[str]:
    found = host.get("heavy_processes")
    rows = found if isinstance(found, list) else []
    return [f"{row.get('name')} {row.get('percent')} %" for row in rows if isinstance(row, dict)]


def _not_run(run: RunData, found: Comparisons) -> list[str]:
    served = {cell.task for cell in run.plan.cells}
    names = [f"{task}@*" for task in _ALL_TASKS if task not in served]
    names += [f"{cell} in {session}" for session, cell in found.unfinished]
    missing = len(run.plan.order) - len(run.sessions)
    names += [plural(missing, "planned session")] if missing > 0 else []
    return [f"**Not run:** {', '.join([*names, 'kernel traces'])}.", ""]


def _provenance(run: RunData) -> list[str]:
    plan = run.plan
    arms = dict.fromkeys(arm.name for arm in plan.arms)
    rows = [
        ["plan", f"{plan.schema}, created {plan.created}, set {plan.set_name}, seed {plan.seed}"],
        *(row for name in arms for row in _arm_rows(next(arm for arm in plan.arms if arm.name == name), run)),
        ["model", _model_words(plan)],
        ["door", _door_words(run)],
        ["workload", f"hash {plan.workload_hash}; " + (_pairs(plan.workload_counts) or "no counts")],
        ["cells", "; ".join(_cell_words(cell) for cell in plan.cells)],
        ["judge", inline(plan.judge.recogniser or f"none: {plan.judge.why_not}")],
        ["machine", _machine(run.sessions)],
        ["gate", inline(plan.gate_version) or NOT_TRACED],
        ["again", f"`{inline(plan.command or _again(run), None)}`{_movable(plan)}"],
    ]
    return ["**Provenance**", "", *table(("what", "value"), rows)]


def _model_words(plan: Plan) -> str:
    if not plan.model_path:
        return "each arm its own; the gate named none"
    if not plan.model_digest:
        return f"{inline(plan.model_path)}, by this name; the weights are those that each server states"
    return f"{inline(plan.model_path)}, weights {plan.model_digest}"


def _door_words(run: RunData) -> str:
    if run.plan.door == "generate":
        return "POST /generate, tokens by their ids"
    return "POST /v1/chat/completions, tokens counted by usage and compared as text"


def _pairs(found: Mapping[str, object]) -> str:
    return ", ".join(f"{inline(str(key))} {inline(str(value))}" for key, value in sorted(found.items()))


def _arm_rows(arm: ArmInfo, run: RunData) -> list[list[str]]:
    commit = arm.commit or "no commit"
    state = "with uncommitted changes" if arm.dirty else "clean"
    extras = f", arguments `{inline(' '.join(arm.args))}`" if arm.args else ""
    extras += f", environment {_pairs(arm.env)}" if arm.env else ""
    info = next((s.info for s in _by_slot(run.sessions) if s.arm == arm.name and s.info), {})
    if arm.kind in PEER_KINDS:
        return [[arm.name, f"{peer_words(arm, run)}{extras}"], *_server_row(arm.name, info)]
    return [
        [arm.name, f"{inline(arm.ref)} ({arm.kind}), {commit}, {state}, source {arm.source_digest}{extras}"],
        *_server_row(arm.name, info),
    ]


def peer_words(arm: ArmInfo, run: RunData) -> str:
    """What a peer is and what could not be checked of it."""
    here = [session for session in _by_slot(run.sessions) if session.arm == arm.name and session.info]
    what = {"url": "URL", "command": "command"}[arm.kind]
    known = f"`{inline(arm.ref)}` ({what}), "
    if not here:
        return known + f"a peer: no /info, source not checked ({what} arm)"
    source = here[0].source_digest or "not stated"
    weights = here[0].weights_digest or "not stated"
    return known + f"source {source}, not checked ({what} arm), weights {weights}"


def _server_row(name: str, info: Mapping[str, object]) -> list[list[str]]:
    versions = info.get("versions")
    switches = info.get("switches")
    known = _pairs(versions) if isinstance(versions, dict) else NOT_TRACED
    off = sorted(key for key, on in switches.items() if not on) if isinstance(switches, dict) else None
    disabled = NOT_TRACED if off is None else ", ".join(off) or "none"
    return [[f"{name} server", f"versions: {known}; switched off: {inline(disabled)}"]]


def _cell_words(cell: Cell) -> str:
    words = [
        f"{cell.name}: {cell.requests} requests after {plural(cell.warm_waves, 'warm wave')}, {cell.max_tokens} tokens"
    ]
    words += ["ignore-eos"] if cell.ignore_eos else []
    words += [f"{cell.max_frames} frames"] if cell.max_frames is not None else []
    return ", ".join([*words, cell.workload, *(["greedy compared"] if cell.greedy else [])])


def _machine(sessions: Sequence[SessionInfo]) -> str:
    host = next((session.host_before for session in _by_slot(sessions) if session.host_before), {})
    memory = host.get("memory_total_bytes")
    parts = [
        str(host.get("cpu_model") or ""),
        f"cores {' '.join(str(core) for core in host['cores_allowed'])}" if host.get("cores_allowed") else "",
        f"{number(memory / 2**30, 1)} GiB" if isinstance(memory, int) else "",
        str(host.get("platform") or ""),
        f"Python {host['python']}" if host.get("python") else "",
        *(_pairs(gpu) for gpu in host.get("gpus") or [] if isinstance(gpu, dict)),
    ]
    return inline("; ".join(filter(None, parts)), 1000) or NOT_TRACED


def _movable(plan: Plan) -> str:
    """What the command's refs were that mean something else later, as the end of a sentence."""
    typed = shlex.split(plan.command)
    found = {inline(arm.ref): _meant(arm) for arm in plan.arms if arm.ref in typed}
    words = [f"`{ref}` was {meant}" for ref, meant in found.items() if meant]
    return f", where {' and '.join(words)}" if words else ""


def _meant(arm: ArmInfo) -> str:
    commit = (arm.commit or "no commit")[:12]
    if arm.kind == "snapshot":
        return (
            f"a working tree with changes on {commit}, which is not kept"
            if arm.dirty
            else f"a working tree as in {commit}"
        )
    return commit if arm.kind == "commit" and not commit.startswith(arm.ref[:12]) else ""


def _again(run: RunData) -> str:
    plan = run.plan
    arms = list({arm.name: arm for arm in plan.arms}.values())
    marks = {"command": "cmd:"}
    words = ["gate compare", *(marks.get(a.kind, "") + (a.commit or a.ref) for a in arms if a.kind != "directory")]
    words += [f"--{arm.name}-dir {arm.ref}" for arm in arms if arm.kind == "directory"]
    words += [f"--{arm.name}-args '{' '.join(arm.args)}'" for arm in arms if arm.args]
    words += [f"--{arm.name}-env {key}={value}" for arm in arms for key, value in sorted(arm.env.items())]
    return " ".join([*words, f"--set {plan.set_name} --sessions {plan.sessions_per_arm} --seed {plan.seed}"])
