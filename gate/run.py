"""A run: the plan first, then sessions in its order, records kept after every cell, and the report at the end.

Lives here: what a comparison does, step by step (DESIGN section 5). Not here: the files (gate/rundir.py), one server
(gate/session.py), one cell's load (gate/client.py), the recogniser (gate/judge.py), and every judgement (the pure modules).
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from gate import judge, rundir
from gate.arm import Arm, ArmError, Peer, check_model_name, default_model, is_model_name, laid_out
from gate.cell import Cell
from gate.client import Limits, Measured, Target
from gate.frames import build_frames
from gate.host import available_cores, machine_record, pinned
from gate.load import ClientError, Job, LoadClient, load_client
from gate.markdown import plural
from gate.metrics import is_finished, measured, window_s
from gate.record import Item, Lag, Plan, Record, RunData, SessionInfo
from gate.report import render_report, report_json
from gate.rundir import RunDir, RunDirError
from gate.session import (
    Boot,
    Refused,
    Server,
    ServerError,
    UsageError,
    check_identity,
    counter_changes,
    is_ours,
    serving,
)
from gate.spoken import names_to_judge, unheard
from gate.summary import one_arm_exit_code
from gate.verdict import Comparisons, compare, exit_code
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
    price_left,
)
from gate.workload import Workload, ordered, warm_items

EXIT_INVALID = 3
_TOLD_EVERY = 10  # recordings heard
_DEATH_S = 1.0  # a server's port refuses a little before its process is seen to have ended


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
    arms: dict[str, Arm | Peer]
    workloads: dict[str, Workload]
    boot: Boot
    limits: Limits
    stop_at: float = float("inf")  # of time.monotonic()


def prepare(
    wish: Wish, arms: Sequence[Arm | Peer], folder: RunDir, watcher: Watcher, resumed: bool = False
) -> Prepared:
    """Write the plan for arms that are laid out (or hold them against the plan of a resumed run), and say its price."""
    cells, workloads = load_workloads(wish, chosen_cells(wish), folder.path)
    model = _model(wish, arms, folder, watcher)
    plan = make_plan(wish, arms, cells, workloads, model)
    if resumed:
        plan = _same_plan(folder, plan)
    else:
        folder.write_plan(plan, {item.id: item for workload in workloads.values() for item in workload.items})
    boot = Boot(model, wish.device, available_cores(), wish.boot_s)
    watcher.say(
        price_left(plan, [(name, cells) for _, name, cells in _owed(folder.load())]) if resumed else price(plan)
    )
    watcher.say(boot.cores.sentence())
    return Prepared(folder, plan, {arm.info.name: arm for arm in arms}, workloads, boot, wish.limits)


def _model(wish: Wish, arms: Sequence[Arm | Peer], folder: RunDir, watcher: Watcher) -> Path | None:
    """The checkpoint both arms serve: the one named, else the trees' own; None where all are peers.

    A name stays one: what it means is each arm's affair, and that they mean the same their digests must show.
    """
    if wish.model is not None and is_model_name(wish.model):
        for arm in arms:
            if isinstance(arm, Arm):
                check_model_name(arm, wish.model)
        return wish.model
    if wish.model is not None:
        return wish.model.resolve()
    trees = [arm for arm in arms if isinstance(arm, Arm)]
    return default_model(trees, folder.path / "model", watcher.say).resolve() if trees else None


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
    with _new(wish) as folder, _arms(wish, folder, watcher) as arms:
        prepare(wish, arms, folder, watcher)
    return folder


@contextmanager
def _new(wish: Wish) -> Iterator[RunDir]:
    """A new run directory with its wish; emptied of all else when the run fails before its plan, so that it blocks no try."""
    folder = rundir.create(wish.run_dir)
    with rundir.claimed(folder):
        if folder.is_planned:
            raise RunDirError(f"--run {folder.path} holds a run; name another folder")
        folder.clear()
        try:
            folder.write_wish(encode(wish))
            yield folder
        except Exception:  # not an interrupt: that run can be resumed from its wish
            if not folder.is_planned:
                folder.clear()
            raise


def _arms(wish: Wish, folder: RunDir, watcher: Watcher) -> AbstractContextManager[list[Arm | Peer]]:
    return laid_out(wish.choices, wish.repository, folder.path, wish.keep, wish.device, watcher.say)


def carry_out(wish: Wish, watcher: Watcher, stop_after_s: float = float("inf")) -> RunDir:
    """Plan and run every session of a wish; a Refused server ends the run, any other failure is a record of its arm."""
    stop_at = time.monotonic() + stop_after_s
    check(wish)
    with _new(wish) as folder:
        _carry_out(wish, folder, watcher, stop_at, resumed=False)
        _listen(folder, watcher, stop_at)
    return folder


def resume(path: Path, watcher: Watcher, stop_after_s: float = float("inf")) -> RunDir:
    """Go on with an interrupted run: cells that are whole stay, the others are measured in the slots of their sessions."""
    stop_at = time.monotonic() + stop_after_s
    folder = rundir.begun(path)
    try:
        wish = replace(decode(folder.read_wish()), run_dir=folder.path)
    except ValueError as error:
        raise RunDirError(f"{folder.path / 'wish.json'} is not what this gate writes: {error}") from error
    if not folder.is_planned:
        return carry_out(wish, watcher, stop_after_s)
    with rundir.claimed(folder):
        data = folder.load()
        if not _is_over(folder, data):
            wish = pinned_to(wish, data.plan)
            check(wish)
            _carry_out(wish, folder, watcher, stop_at, resumed=True)
        _listen(folder, watcher, stop_at)
    return folder


def _carry_out(wish: Wish, folder: RunDir, watcher: Watcher, stop_at: float, resumed: bool) -> None:
    with _arms(wish, folder, watcher) as arms:
        ready = replace(prepare(wish, arms, folder, watcher, resumed), stop_at=stop_at)
        try:
            _run_sessions(ready, watcher)
        except Stopped:
            watcher.say("stopped by --stop-after")
    if not wish.keep and not _owed(folder.load()):
        _remove_snapshots(arms)


def _remove_snapshots(arms: Sequence[Arm | Peer]) -> None:
    """Take the copies of working trees off disk; until all is measured they stay, as a resumed run goes on with them."""
    for arm in arms:
        if arm.info.kind == "snapshot":
            # Under another name first: a gate that is killed meanwhile leaves no half of a tree to be measured.
            beside = arm.tree.rename(arm.tree.with_name(arm.tree.name + ".part"))
            shutil.rmtree(beside, ignore_errors=True)


def _listen(folder: RunDir, watcher: Watcher, stop_at: float) -> None:
    """Have the recogniser hear what it has not heard yet, once every session is over; what it heard is on disk at once."""
    run = folder.load()
    names, all_names = unheard(run), names_to_judge(run)
    if not names or _owed(run):
        return
    ear = judge.Ear(judge.planned(run.plan.judge))
    heard = dict(run.heard)
    watcher.say(f"judges {plural(len(names), 'recording')} of spoken answers by {run.plan.judge.recogniser}")
    for done, name in enumerate(names, len(all_names) - len(names)):
        if time.monotonic() > stop_at:
            watcher.say("stopped by --stop-after")
            return
        if done % _TOLD_EVERY == 0:
            watcher.advance(done, len(all_names), "judges speech")
        heard[name] = ear.hear(*folder.read_speech(name))
        folder.write_heard(heard)
    watcher.advance(len(all_names), len(all_names), "judged speech")


def _is_over(folder: RunDir, run: RunData) -> bool:
    """Whether a run is measured and its snapshots are gone, which are the last to go: there is nothing left to carry out."""
    gone = any(arm.kind == "snapshot" and not (folder.path / "arms" / arm.name).is_dir() for arm in run.plan.arms)
    return gone and not _owed(run)


def _run_sessions(ready: Prepared, watcher: Watcher) -> None:
    """Every session of the plan's order that is not whole yet, each in its own slot."""
    owed = _owed(ready.folder.load())
    for done, (slot, name, cells) in enumerate(owed):
        began = time.monotonic()
        if began + _least_seconds(ready.folder.load()) > ready.stop_at:
            raise Stopped
        run_session(ready, slot, ready.arms[name], watcher)
        left = sum(len(others) for _, _, others in owed[1:])
        if done == 0 and left:
            took = time.monotonic() - began
            rest = f"{plural(len(owed) - 1, 'session')} left, about {took * left / len(cells):.0f} s"
            watcher.say(f"session {session_id(slot, name)} took {took:.0f} s; {rest}")


def _least_seconds(run: RunData) -> float:
    """What the next session takes at least: the shortest boot and the shortest cell seen; 0.0 before there is one."""
    boots = [session.boot_seconds for session in run.sessions if session.boot_seconds]
    cells = [
        window_s([record for record in run.records if (record.session, record.cell) == (session.id, name)])
        for session in run.sessions
        for name in _finished(run, session.id)
    ]
    shortest = min(filter(None, cells), default=None)
    return min(boots) + shortest if boots and shortest is not None else 0.0


def session_id(slot: int, arm: str) -> str:
    """The name of a session's folder, such as 01-base for slot 0."""
    return f"{slot + 1:02d}-{arm}"


def _owed(run: RunData) -> list[tuple[int, str, list[Cell]]]:
    """The slot, the arm and the missing cells of every session that is not whole."""
    begun = {session.id for session in run.sessions}
    rows = []
    for slot, name in enumerate(run.plan.order):
        there = session_id(slot, name)
        done = _finished(run, there) if there in begun else []
        rows.append((slot, name, [cell for cell in run.plan.cells if cell.name not in done]))
    return [row for row in rows if row[2]]


def _finished(run: RunData, session: str) -> list[str]:
    """The cells that a session got through, in the plan's order."""
    return [cell.name for cell in run.plan.cells if is_finished(run, cell, measured(run.records, session, cell.name))]


def run_session(ready: Prepared, slot: int, arm: Arm | Peer, watcher: Watcher) -> None:
    """One boot of an arm with every cell it still owes; what it measured is on disk when this returns or raises."""
    session = _Session(ready, slot, arm, watcher)
    try:
        session.run()
    except UsageError as error:
        if not session.has_served():
            raise ArmError(f"{arm.info.name}'s server refused its command line: {error.words}") from error
        session.fail(str(error))
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

    def __init__(self, ready: Prepared, slot: int, arm: Arm | Peer, watcher: Watcher) -> None:
        self.ready, self.slot, self.arm, self.watcher = ready, slot, arm, watcher
        self.id = session_id(slot, arm.info.name)
        self.origin_ns = time.perf_counter_ns()
        self.owed = list(ready.plan.cells)
        self.info: dict[str, object] = {}
        self.counters: dict[str, float] = {}
        self.client_lag: dict[str, Lag] = {}
        self.client_failures: dict[str, str] = {}
        self.problems: list[str] = []
        self.boot_seconds, self.boots = 0.0, 1
        self.before = self.after = machine_record()
        self.folder = ready.folder.session(self.id)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._go_on()

    def _go_on(self) -> None:
        """Take over what the same session had finished when its gate ended."""
        begun, run = self.ready.folder.begun(self.id), self.ready.folder.load()
        kept = _finished(run, self.id)
        self.owed_by_others = sum(len(cells) for slot, _, cells in _owed(run) if slot != self.slot)
        self.ready.folder.keep_records(self.id, kept)
        if begun is None or not kept:
            return
        self.owed = [cell for cell in self.owed if cell.name not in kept]
        self.boots = begun.boots + 1
        self.counters = {name: value for name, value in begun.counters.items() if name.partition(" ")[0] in kept}
        self.client_lag = {cell: lag for cell, lag in begun.client_lag.items() if cell in kept}

    def has_served(self) -> bool:
        """Whether any session of this arm has measured something."""
        return any(record.arm == self.arm.info.name for record in self.ready.folder.load().records)

    def run(self) -> None:
        """Boot, check, and measure every cell; ServerError when the server goes away."""
        self._progress("boots")
        boot = self.ready.boot
        with (
            pinned(boot.cores.client),  # what the gate itself does meanwhile must not take the server's cores
            load_client(boot.cores.client, self.folder / "client.log") as client,
        ):
            client.start()  # its imports take as long as a small server's boot
            with serving(self.arm, boot, self.folder / "server.log") as server:
                self.boot_seconds = round(server.boot_seconds, 3)
                self.info = server.info()
                self.write()
                check_identity(self.info, self.arm, self.ready.plan.model_digest, self.ready.plan.door)
                self._cells(server, client, self._target(server))

    def _cells(self, server: Server, client: LoadClient, target: Target) -> None:
        while self.owed:
            if time.monotonic() > self.ready.stop_at:
                raise Stopped
            self._progress(self.owed[0].name)
            failed = self._measure(server, client, target, self.owed[0])
            self.owed.pop(0)
            death = server.death(_DEATH_S if failed else 0.0)
            if death is not None:
                raise ServerError(death)

    def _target(self, server: Server) -> Target:
        door = self.ready.plan.door
        model = server.model_name() if door == "openai" else ""
        name, limits = self.arm.info.name, self.ready.limits
        return Target(server.url, self.id, name, self.origin_ns, limits, door, model, is_ours(self.info))

    def _measure(self, server: Server, client: LoadClient, target: Target, cell: Cell) -> bool:
        """Measure a cell and keep its records; whether any request failed."""
        workload, seed = self.ready.workloads[cell.source], self.ready.plan.seed
        warm = warm_items(workload.items, cell.warm_waves * cell.concurrency, seed, workload.name)
        before = server.counters()
        try:
            plan, root = self.ready.plan, str(workload.root)
            job = Job(target, cell, warm, self.items(cell), root, server.keyed, plan.judge)
            found = client.measure(job)
        except ClientError as error:
            self.client_failures[cell.name] = str(error)
            self.watcher.say(f"{self.id} {cell.name}: {error}")
            self.write()
            return False
        self._keep(cell, found, counter_changes(before, server.counters()))
        return not all(record.ok for record in found.records)

    def _keep(self, cell: Cell, found: Measured, counters: dict[str, float]) -> None:
        self.counters |= {f"{cell.name} {name}": change for name, change in counters.items()}
        self.client_lag[cell.name] = found.lag
        # Before the records: a cell counts as measured by its records, and then everything about it is on disk.
        self.write()
        self.ready.folder.keep_speech(found.speech)
        self.ready.folder.append_records(self.id, found.records)

    def items(self, cell: Cell) -> list[Item]:
        """The items of a cell in the plan's order, equal for both arms."""
        workload = self.ready.workloads[cell.source]
        return ordered(workload.items, cell.requests, self.ready.plan.seed, workload.name)

    def fail(self, problem: str) -> None:
        """Note why the session ended early, and count the requests of the cells still owed as failed."""
        self.problems.append(problem)
        self.watcher.say(f"{self.id}: {problem}")
        self.write()
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
                client_lag=self.client_lag,
                client_failures=self.client_failures,
                boots=self.boots,
            )
        )

    def _progress(self, what: str) -> None:
        total = len(self.ready.plan.cells) * len(self.ready.plan.order)
        self.watcher.advance(total - self.owed_by_others - len(self.owed), total, f"{self.id} {what}")


def load_run(path: Path) -> RunData:
    """Everything a run directory holds; RunDirError when it is none."""
    return rundir.existing(path).load()


@dataclass(frozen=True)
class Outcome:
    """What a run came to: everything derived from it, and the exit code that follows."""

    comparisons: Comparisons
    code: int


def write_report(folder: RunDir, expect_token_changes: bool = False) -> Outcome:
    """Derive tables and reports from a run directory, write them, and return what they say.

    Token changes are expected when the plan's own command said so, or when this call does.
    """
    run = folder.load()
    outcome = judged(run, expect_token_changes)
    folder.write_tables(build_frames(run, outcome.comparisons))
    folder.write_reports(render_report(run, outcome.comparisons), report_json(run, outcome.comparisons))
    return outcome


def judged(run: RunData, expect_token_changes: bool = False) -> Outcome:
    """What a run says, and its exit code; writes nothing."""
    comparisons = compare(run)
    if comparisons.single:
        return Outcome(comparisons, one_arm_exit_code(comparisons))
    expected = expect_token_changes or EXPECT_FLAG in shlex.split(run.plan.command)
    return Outcome(comparisons, exit_code(comparisons, expected))
