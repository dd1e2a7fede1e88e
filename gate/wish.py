"""A Wish: what the command line asked of a run, and the plan it becomes once the arms are laid out.

Not here: writing the plan (gate/rundir.py) and carrying it out (gate/run.py).
"""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gate.arm import Arm, ArmChoice, ArmError, Peer, is_model_name, resolve, weights_digest
from gate.cell import IDS, SPEECH_TASKS, Cell
from gate.client import Limits
from gate.host import available_cores
from gate.judge import plan_judge
from gate.markdown import plural
from gate.order import session_order
from gate.record import Plan, Thresholds
from gate.session import is_healthy_within, is_ours, peer_info
from gate.workload import (
    Workload,
    WorkloadError,
    default_root,
    librispeech_from_hub,
    load_cells,
    load_clips,
    load_librispeech,
    load_prompts,
    load_questions,
    make_ids,
    workload_hash,
)

EXPECT_FLAG = "--expect-token-changes"
URL_PATIENCE_S = 10.0
DOORS = ("auto", "generate", "openai")


@dataclass(frozen=True)
class Wish:
    """What the command line asked of a run; one arm only for `gate run`."""

    choices: tuple[ArmChoice, ...]
    repository: Path
    run_dir: Path
    set_name: str = "quick"
    cells: tuple[str, ...] = ()
    sessions: int = 3
    seed: int = 0
    model: Path | None = None
    librispeech: str | None = None
    keep: bool = False
    device: str = "cpu"
    expect_token_changes: bool = False
    workloads: Path = field(default_factory=default_root)
    limits: Limits = field(default_factory=Limits)
    boot_s: float = 300.0
    door: str = "auto"
    judge: bool | None = None  # None: if a recogniser is installed
    command: str = ""  # what to type for this run again; empty: made from the rest


def check(wish: Wish) -> None:
    """Find everything a wish names before anything is written; the errors are those of making it."""
    resolved = [resolve(choice, wish.repository) for choice in wish.choices]
    cells = chosen_cells(wish)
    plan_judge(wish.judge, cells)
    if wish.door not in DOORS:
        raise ArmError(f"--door {wish.door!r} does not exist; there are {', '.join(DOORS)}")
    if wish.model is not None and not (is_model_name(wish.model) and any(not one.peer for one in resolved)):
        weights_digest(wish.model)
    elif wish.model is None and all(one.peer for one in resolved) and any("{model}" in one.peer for one in resolved):
        raise ArmError("a command names {model}, but there is none: name a checkpoint with --model")
    for one in resolved:
        if one.kind == "url" and not is_healthy_within(one.peer, URL_PATIENCE_S):
            raise ArmError(
                f"{one.choice.name} {one.peer} answers neither /health nor /v1/models in {URL_PATIENCE_S:.0f} s; start it first"
            )
    if wish.librispeech != "hub":  # a download goes into the run directory, which is not there yet
        load_workloads(wish, cells, wish.run_dir)


def chosen_cells(wish: Wish) -> list[Cell]:
    """The cells of the set, or those named by --cells; a WorkloadError names what does not exist and what does."""
    sets = load_cells(wish.workloads)
    if wish.set_name not in sets:
        raise WorkloadError(f"--set {wish.set_name!r} does not exist; there are {', '.join(sorted(sets))}")
    known = {cell.name: cell for cell in sets[wish.set_name].cells}
    elsewhere = {cell.name: cell for cells in sets.values() for cell in cells.cells}
    for name in wish.cells:
        if name not in elsewhere:
            raise WorkloadError(f"--cells {name!r} does not exist; there are {', '.join(sorted(elsewhere))}")
        if wish.cells.count(name) > 1:  # each copy would count the same sessions again
            raise WorkloadError(f"--cells names {name} {wish.cells.count(name)} times; name each cell once")
    return [known.get(name, elsewhere[name]) for name in wish.cells] or list(known.values())


def load_workloads(wish: Wish, cells: Sequence[Cell], target: Path) -> tuple[list[Cell], dict[str, Workload]]:
    """The workloads the cells need, and the cells bent to LibriSpeech where that was asked for; `target` takes downloads."""
    speech = _librispeech(wish, cells, target)
    bent = [_on_librispeech(cell, len(speech.items)) for cell in cells] if speech is not None else list(cells)
    found: dict[str, Workload] = {}
    for cell in bent:
        if cell.source not in found:
            found[cell.source] = speech if speech and cell.workload == speech.name else _workload(wish, cell)
    return bent, found


def _librispeech(wish: Wish, cells: Sequence[Cell], target: Path) -> Workload | None:
    """The clips that --librispeech names; None where it names none and no cell needs any."""
    if wish.librispeech == "hub":
        return librispeech_from_hub(target / "librispeech")
    if wish.librispeech is not None:
        return load_librispeech(Path(wish.librispeech))
    absent = next((cell for cell in cells if cell.workload == "librispeech"), None)
    if absent is not None:
        raise WorkloadError(
            f"{absent.name} of --set {wish.set_name} runs on LibriSpeech: add --librispeech PATH or hub"
        )
    return None


def _workload(wish: Wish, cell: Cell) -> Workload:
    if cell.workload == IDS:
        return make_ids(cell, wish.seed, wish.workloads)
    load = {"prompts": load_prompts, "questions": load_questions, "clips": load_clips}[cell.workload]
    return load(wish.workloads)


def _on_librispeech(cell: Cell, clips: int) -> Cell:
    if (
        cell.task == "A2T"
    ):  # every clip, so that the WER is that of the whole set; a cell made for LibriSpeech may ask more
        requests = max(cell.requests, clips) if cell.workload == "librispeech" else clips
        return msgspec.structs.replace(cell, workload="librispeech", requests=requests)
    return msgspec.structs.replace(cell, workload="librispeech") if cell.task == "A2S" else cell


def choose_door(asked: str, arms: Sequence[Arm | Peer]) -> str:
    """The door for both arms: ours where each is a tree or a URL whose /info lists it, else OpenAI's, unless one is asked for.

    A command is asked at OpenAI's: what it starts is not known before it runs.
    """
    if asked != "auto":
        return asked
    ours = all(isinstance(arm, Arm) or (arm.url and is_ours(peer_info(arm.url))) for arm in arms)
    return "generate" if ours else "openai"


def make_plan(
    wish: Wish, arms: Sequence[Arm | Peer], cells: list[Cell], workloads: dict[str, Workload], model: Path | None
) -> Plan:
    """The plan of a run; with one arm, both places of `arms` hold it and the order names it alone."""
    infos = (arms[0].info, arms[-1].info)
    names = [arm.info.name for arm in arms]
    order = session_order(wish.sessions, wish.seed) if len(names) == 2 else names * wish.sessions
    return Plan(
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        arms=infos,
        cells=cells,
        set_name=wish.set_name,
        sessions_per_arm=wish.sessions,
        order=order,
        seed=wish.seed,
        thresholds=Thresholds(),
        model_path=str(model) if model is not None else "",
        model_digest="" if model is None or is_model_name(model) else weights_digest(model),
        workload_hash=workload_hash(workloads.values()),
        workload_counts={workload.name: len(workload.items) for workload in workloads.values()},
        workload_labels={workload.name: workload.label for workload in workloads.values()},
        device=wish.device,
        command=command_line(wish),
        cores=available_cores().sentence(),
        gate_version=gate_version(),
        door=choose_door(wish.door, arms),
        judge=plan_judge(wish.judge, cells),
    )


def gate_version() -> str:
    """The version of the gate that runs, or "checkout" where the distribution is not installed."""
    try:
        return importlib.metadata.version("walkgate")
    except importlib.metadata.PackageNotFoundError:
        return "checkout"


def command_line(wish: Wish) -> str:
    """The `gate` command that asks for this run again."""
    if wish.command:
        return wish.command
    words = ["gate", "compare" if len(wish.choices) == 2 else "run"]
    prefix = "--{}-" if len(wish.choices) == 2 else "--"
    for choice in wish.choices:
        option = prefix.format(choice.name)
        words += [f"{option}dir", str(choice.directory)] if choice.directory is not None else [choice.ref]
        words += [f"{option}args", shlex.join(choice.args)] if choice.args else []
        words += [word for key, value in choice.env for word in (f"{option}env", f"{key}={value}")]
    words += ["--set", wish.set_name, "--sessions", str(wish.sessions), "--seed", str(wish.seed)]
    words += ["--cells", ",".join(wish.cells)] if wish.cells else []
    words += ["--model", str(wish.model)] if wish.model is not None else []
    words += ["--librispeech", wish.librispeech] if wish.librispeech is not None else []
    words += ["--workloads", str(wish.workloads)] if wish.workloads != default_root() else []
    words += ["--door", wish.door] if wish.door != "auto" else []
    words += ["--device", wish.device] if wish.device != "cpu" else []
    words += [] if wish.judge is None else ["--judge" if wish.judge else "--no-judge"]
    words += [EXPECT_FLAG] if wish.expect_token_changes else []
    return shlex.join(words)


def price(plan: Plan) -> str:
    """What carrying out a plan will cost, in counts that are known beforehand."""
    sessions = len(plan.order)
    measured = sum(cell.requests for cell in plan.cells)
    warm = sum(cell.warm_waves * cell.concurrency for cell in plan.cells)
    tokens = _most_tokens(plan.cells)
    return (
        f"price: {plural(sessions, 'session')} ({' '.join(plan.order)}), each with {plural(len(plan.cells), 'cell')}, "
        f"{plural(measured, 'request')} measured and {warm} in warm waves, at most {plural(tokens, 'token')}; "
        f"{plural(sessions * measured, 'measured request')} in all{_judge_price(plan)}"
    )


def _judge_price(plan: Plan) -> str:
    answers = sum(min(cell.requests, plan.judge.requests) for cell in plan.cells if cell.task in SPEECH_TASKS)
    return f", and then {plural(len(plan.order) * answers, 'spoken answer')} to judge" if answers else ""


def price_left(plan: Plan, owed: Sequence[tuple[str, Sequence[Cell]]]) -> str:
    """The same for what is left of a run: the arm and the cells of each session that is not whole."""
    cells = [cell for _, mine in owed for cell in mine]
    arms = f" ({' '.join(arm for arm, _ in owed)})" if owed else ""
    requests = plural(sum(cell.requests for cell in cells), "measured request")
    return (
        f"left: {len(owed)} of {plural(len(plan.order), 'session')}{arms}, with {plural(len(cells), 'cell')} and {requests} in "
        f"all, at most {plural(_most_tokens(cells), 'token')}"
    )


def _most_tokens(cells: Sequence[Cell]) -> int:
    return sum((cell.requests + cell.warm_waves * cell.concurrency) * cell.max_tokens for cell in cells)


def encode(wish: Wish) -> bytes:
    """A wish as JSON, its paths absolute: a run may be resumed from another folder."""
    choices = tuple(
        replace(choice, directory=choice.directory and choice.directory.resolve()) for choice in wish.choices
    )
    spoken = wish.librispeech
    if spoken not in (None, "hub"):
        spoken = str(Path(str(spoken)).resolve())
    whole = replace(
        wish,
        choices=choices,
        repository=wish.repository.resolve(),
        model=wish.model if wish.model is None or is_model_name(wish.model) else wish.model.resolve(),
        librispeech=spoken,
        workloads=wish.workloads.resolve(),
    )
    return msgspec.json.format(msgspec.json.encode(whole, enc_hook=str), indent=1) + b"\n"


def decode(content: bytes) -> Wish:
    """The wish that `encode` wrote; ValueError otherwise."""
    return msgspec.json.decode(content, type=Wish, dec_hook=lambda kind, value: kind(value))


def pinned_to(wish: Wish, plan: Plan) -> Wish:
    """A wish whose commits, model and judge are those of its plan: `HEAD` may have moved since."""
    arms = {arm.name: arm for arm in plan.arms}
    choices = tuple(
        replace(choice, ref=arms[choice.name].commit or choice.ref) if arms[choice.name].kind == "commit" else choice
        for choice in wish.choices
    )
    model = Path(plan.model_path) if plan.model_path else None
    return replace(wish, choices=choices, model=model, judge=plan.judge.requests > 0)


def differences(plan: Plan, other: Plan) -> list[str]:
    """What of a plan's evidence is another in `other`: sources, weights, workload, cells or order."""
    found = [
        f"the source of {arm.name}"
        for arm, now in zip(plan.arms, other.arms, strict=True)
        if arm.source_digest != now.source_digest
    ]
    parts = {
        "model_digest": "the weights",
        "workload_hash": "the workload",
        "cells": "the cells",
        "order": "the order",
        "door": "the door",
    }
    # Both places hold the one arm of a run without a comparison.
    found = list(dict.fromkeys(found)) + [
        words for name, words in parts.items() if getattr(plan, name) != getattr(other, name)
    ]
    judge = (plan.judge.requests, plan.judge.recogniser) != (other.judge.requests, other.judge.recogniser)
    return [*found, "the recogniser"] if judge else found
