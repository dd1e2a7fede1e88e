"""A run: the plan first, then sessions in its order, records kept after every cell, and the report at the end.

Lives here: what a comparison does, step by step (DESIGN section 5). Not here: the files (gate/rundir.py), one server
(gate/session.py), one cell's load (gate/client.py), and every judgement (the pure modules).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from gate import rundir
from gate.arm import Arm, laid_out, make_model
from gate.cell import Cell
from gate.client import Limits, Target, measure
from gate.frames import build_frames
from gate.host import available_cores, machine_record, pinned
from gate.metrics import is_finished, measured
from gate.record import Item, Plan, Record, RunData, SessionInfo
from gate.report import render_report, report_json
from gate.rundir import RunDir, RunDirError
from gate.session import Boot, Refused, Server, ServerError, check_identity, counter_changes, serving
from gate.verdict import compare, exit_code
from gate.wish import (
    EXPECT_FLAG,
    Wish,
    check,
    chosen_cells,
    decode,
    differences,
    encode,
    load_workloads,
    make_plan,
    pinned_to,
    price,
)
from gate.workload import Workload, ordered, warm_items

EXIT_INVALID = 3
EXIT_USAGE = 64


class Stopped(Exception):
    """The time that --stop-after allows is over; every cell measured so far is on disk."""


class Watcher(Protocol):
    """Who is told how a run goes."""

    def say(self, text: str) -> None:
        """Receive one sentence."""

    def advance(self, done: int, total: int, text: str) -> None:
        """Receive that `done` of `total` cells are over, and what runs now."""


@dataclass(frozen=True)
class Prepared:
    """A written plan with what is needed to carry it out."""

    folder: RunDir
    plan: Plan
    arms: dict[str, Arm]
    workloads: dict[str, Workload]
    boot: Boot
    limits: Limits
    stop_at: float = float("inf")  # of time.monotonic()


def prepare(wish: Wish, arms: Sequence[Arm], folder: RunDir, watcher: Watcher, resumed: bool = False) -> Prepared:
    """Write the plan for arms that are laid out (or hold them against the plan of a resumed run), and say its price."""
    cells, workloads = load_workloads(wish, chosen_cells(wish), folder.path)
    if wish.model is None:
        watcher.say("no --model named: the base arm's `omni tiny` makes one")
    model = (wish.model or make_model(arms[0], folder.path / "model")).resolve()
    plan = make_plan(wish, arms, cells, workloads, model)
    if resumed:
        plan = _same_plan(folder, plan)
    else:
        folder.write_plan(plan, {item.id: item for workload in workloads.values() for item in workload.items})
        folder.write_wish(encode(wish))
    boot = Boot(model, wish.device, available_cores(), wish.boot_s)
    watcher.say(price(plan))
    watcher.say(boot.cores.sentence())
    return Prepared(folder, plan, {arm.info.name: arm for arm in arms}, workloads, boot, wish.limits)


def _same_plan(folder: RunDir, now: Plan) -> Plan:
    plan = folder.load().plan
    changed = differences(plan, now)
    if changed:
        raise RunDirError(
            f"{folder.path} cannot be resumed: {', '.join(changed)} changed since its plan; start a new run"
        )
    return plan


def plan_only(wish: Wish, watcher: Watcher) -> RunDir:
    """Write plan.json and say the price; nothing is served."""
    check(wish)
    folder = rundir.create(wish.run_dir)
    with laid_out(wish.choices, wish.repository, folder.path, wish.keep, wish.device, watcher.say) as arms:
        prepare(wish, arms, folder, watcher)
    return folder


def carry_out(wish: Wish, watcher: Watcher, stop_after_s: float = float("inf")) -> RunDir:
    """Plan and run every session of a wish; a Refused server ends the run, any other failure is a record of its arm."""
    stop_at = time.monotonic() + stop_after_s
    check(wish)
    return _carry_out(wish, rundir.create(wish.run_dir), watcher, stop_at, resumed=False)


def resume(path: Path, watcher: Watcher, stop_after_s: float = float("inf")) -> RunDir:
    """Go on with an interrupted run: sessions that are whole stay, the others are run again in their own slots."""
    stop_at = time.monotonic() + stop_after_s
    folder = rundir.existing(path)
    try:
        wish = decode(folder.read_wish())
    except ValueError as error:
        raise RunDirError(f"{folder.path / 'wish.json'} is not what this gate writes: {error}") from error
    wish = replace(pinned_to(wish, folder.load().plan), run_dir=folder.path)
    check(wish)
    return _carry_out(wish, folder, watcher, stop_at, resumed=True)


def _carry_out(wish: Wish, folder: RunDir, watcher: Watcher, stop_at: float, resumed: bool) -> RunDir:
    with laid_out(wish.choices, wish.repository, folder.path, wish.keep, wish.device, watcher.say) as arms:
        ready = replace(prepare(wish, arms, folder, watcher, resumed), stop_at=stop_at)
        try:
            _run_sessions(ready, watcher)
        except Stopped:
            watcher.say(f"stopped by --stop-after; the rest: gate compare --resume {folder.path}")
    return folder


def _run_sessions(ready: Prepared, watcher: Watcher) -> None:
    """Every session of the plan's order that is not whole yet, each in its own slot."""
    whole = _whole_sessions(ready.folder.load())
    owed = [(slot, name) for slot, name in enumerate(ready.plan.order) if session_id(slot, name) not in whole]
    began = time.monotonic()
    for done, (slot, name) in enumerate(owed):
        ready.folder.set_aside(session_id(slot, name))
        run_session(ready, slot, ready.arms[name], watcher)
        if done == 0 and len(owed) > 1:
            took = time.monotonic() - began
            watcher.say(f"the first session took {took:.0f} s; the others need about {took * (len(owed) - 1):.0f} s")


def session_id(slot: int, arm: str) -> str:
    """The name of a session's folder, such as 01-base for slot 0."""
    return f"{slot + 1:02d}-{arm}"


def _whole_sessions(run: RunData) -> set[str]:
    return {
        session.id
        for session in run.sessions
        if all(is_finished(run, cell, measured(run.records, session.id, cell.name)) for cell in run.plan.cells)
    }


def run_session(ready: Prepared, slot: int, arm: Arm, watcher: Watcher) -> None:
    """One boot of an arm with every cell; what it measured is on disk when this returns or raises."""
    session = _Session(ready, slot, arm, watcher)
    try:
        session.run()
    except ServerError as error:
        session.fail(str(error))
    except Refused as error:
        session.problems.append(str(error))
        raise
    finally:
        session.after = machine_record()
        session.write()


class _Session:
    """The state of a session while it runs: what is known about it so far, and which cells are still owed."""

    def __init__(self, ready: Prepared, slot: int, arm: Arm, watcher: Watcher) -> None:
        self.ready, self.slot, self.arm, self.watcher = ready, slot, arm, watcher
        self.id = session_id(slot, arm.info.name)
        self.origin_ns = time.perf_counter_ns()
        self.owed = list(ready.plan.cells)
        self.info: dict[str, object] = {}
        self.counters: dict[str, float] = {}
        self.client_lag_ms: dict[str, float] = {}
        self.problems: list[str] = []
        self.boot_seconds = 0.0
        self.before = self.after = machine_record()
        ready.folder.session(self.id).mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Boot, check, and measure every cell; ServerError when the server goes away."""
        self._progress("boots")
        boot, log = self.ready.boot, self.ready.folder.session(self.id) / "server.log"
        with pinned(boot.cores.client), serving(self.arm, boot, log) as server:
            self.boot_seconds = round(server.boot_seconds, 3)
            self.info = server.info()
            self.write()
            check_identity(self.info, self.arm, self.ready.plan.model_digest)
            while self.owed:
                if time.monotonic() > self.ready.stop_at:
                    raise Stopped
                self._progress(self.owed[0].name)
                self._measure(server, self.owed[0])
                self.owed.pop(0)
                death = server.death()
                if death is not None:
                    raise ServerError(death)

    def _measure(self, server: Server, cell: Cell) -> None:
        target = Target(server.url, self.id, self.arm.info.name, self.origin_ns, self.ready.limits)
        workload, seed = self.ready.workloads[cell.workload], self.ready.plan.seed
        warm = warm_items(workload.items, cell.warm_waves * cell.concurrency, seed, workload.name)
        items = self.items(cell)
        before = server.counters()
        result = measure(target, cell, warm, items, workload.root)
        changes = counter_changes(before, server.counters())
        self.counters |= {f"{cell.name} {name}": change for name, change in changes.items()}
        self.client_lag_ms[cell.name] = round(result.client_lag_ms, 3)
        self.ready.folder.append_records(self.id, result.records)

    def items(self, cell: Cell) -> list[Item]:
        """The items of a cell in the plan's order, equal for both arms."""
        workload = self.ready.workloads[cell.workload]
        return ordered(workload.items, cell.requests, self.ready.plan.seed, workload.name)

    def fail(self, problem: str) -> None:
        """Note why the session ended early, and count the requests of the cells still owed as failed."""
        self.problems.append(problem)
        self.watcher.say(f"{self.id}: {problem}")
        for cell in self.owed:
            reason = f"not sent: {problem.splitlines()[0]}"
            failed = [self._failed(cell, index, item, reason) for index, item in enumerate(self.items(cell))]
            self.ready.folder.append_records(self.id, failed)
        self.owed = []

    def _failed(self, cell: Cell, index: int, item: Item, reason: str) -> Record:
        return Record(
            session=self.id,
            arm=self.arm.info.name,
            cell=cell.name,
            index=index,
            warm=False,
            item=item.id,
            task=cell.task,
            t0_ns=time.perf_counter_ns() - self.origin_ns,
            client=index % cell.concurrency,
            events=[],
            e2e_us=0,
            ok=False,
            error=reason,
            finish_reason=None,
            audio_finish_reason=None,
            token_ids=[],
            top2=[],
            trace=[],
            text="",
            pcm_samples=0,
            pcm_sha256=None,
            audio_in_s=item.audio_seconds,
            completion_tokens=0,
            prompt_tokens=0,
        )

    def write(self) -> None:
        """Write session.json as far as the session is known."""
        arm = self.arm.info
        self.ready.folder.write_session(
            SessionInfo(
                id=self.id,
                arm=arm.name,
                slot=self.slot,
                commit=arm.commit,
                dirty=arm.dirty,
                source_digest=str(self.info.get("source_digest", "")),
                weights_digest=str(self.info.get("weights_digest", "")),
                boot_seconds=self.boot_seconds,
                info=self.info,
                host_before=self.before,
                host_after=self.after,
                counters=self.counters,
                problems=self.problems,
                client_lag_ms=self.client_lag_ms,
            )
        )

    def _progress(self, what: str) -> None:
        per, order = len(self.ready.plan.cells), self.ready.plan.order
        self.watcher.advance(self.slot * per + per - len(self.owed), len(order) * per, f"{self.id} {what}")


def load_run(path: Path) -> RunData:
    """Everything a run directory holds; RunDirError when it is none."""
    return rundir.existing(path).load()


def write_report(folder: RunDir, expect_token_changes: bool = False) -> int:
    """Derive tables and reports from a run directory, write them, and return the exit code.

    Token changes are expected when the plan's own command said so, or when this call does.
    """
    run = folder.load()
    comparisons = compare(run)
    folder.write_tables(build_frames(run))
    folder.write_reports(render_report(run, comparisons), report_json(run, comparisons))
    return exit_code(comparisons, expect_token_changes or EXPECT_FLAG in shlex.split(run.plan.command))
