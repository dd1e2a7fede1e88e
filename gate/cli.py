"""The `gate` command: what was asked becomes a Wish, and what came of it becomes text and an exit code.

Exit codes: 0 nothing worse and every primary cell decided, 1 a regression, broken head, worse WER or moved tokens, 2 no verdict
for a primary cell, 3 unusable evidence, 64 usage, 70 the gate itself failed (a full disk, an internal error), 130 interrupted.
Of a run of one arm: 0 every request sound, 1 some were not, 2 stopped before its end, 3 a cell has none; the others as above.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

EXIT_INTERRUPTED = 130

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from typer.core import TyperGroup

    from gate import kernels, plant, run, streams, trace
    from gate.arm import COMMAND_MARK, Arm, ArmChoice, ArmError, default_model, git, laid_out, parse_env, split_words
    from gate.judge import JudgeError
    from gate.kernels import TraceError
    from gate.markdown import plural
    from gate.plant import PlantError
    from gate.record import Item
    from gate.report import settling_sessions
    from gate.run import EXIT_INVALID
    from gate.rundir import RunDir, RunDirError, existing
    from gate.session import EXIT_USAGE, Refused
    from gate.summary import failures, session_table
    from gate.verdict import NO_VERDICT, REGRESSION, Comparisons
    from gate.wish import Wish
    from gate.workload import WorkloadError, default_root, load_cells, load_prompts, load_questions, ordered
except KeyboardInterrupt:  # these take a second or two to load, in which a Ctrl-C is one like any later
    print("gate: interrupted", file=sys.stderr)
    raise SystemExit(EXIT_INTERRUPTED) from None

EXIT_INTERNAL = 70  # of sysexits.h; Python's own 1 would read as a regression
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
DEMO_SLOW = 0.30
DEMO_SESSIONS = 9  # the most that are worth a demo's time; a machine that needs more is too busy
USAGE_ERRORS = (ArmError, WorkloadError, RunDirError, PlantError, TraceError, JudgeError)


class GateGroup(TyperGroup):
    """The command group; a usage error ends with 64, since 2 means "no verdict", any other with 70."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line; with `standalone_mode` the process ends with the exit code."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except Exception as error:
            # Typer 0.26 and later carry their own copy of click, so its classes are known by their `show` alone.
            if hasattr(error, "show"):
                _tell_usage(error)
                code = EXIT_USAGE
            elif isinstance(error, OSError) and error.errno in FULL_DISK:  # of the help, which no command prints
                typer.echo(f"gate: {_fault(error)}", err=True)
                code = EXIT_INTERNAL
            else:
                traceback.print_exception(error)
                typer.echo(f"gate: internal error ({type(error).__name__}); please report the lines above", err=True)
                code = EXIT_INTERNAL
        return sys.exit(code if isinstance(code, int) else 0) if standalone_mode else code

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for; Ctrl-C where it does not see to that itself is said and ends with 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _end("gate: interrupted", EXIT_INTERRUPTED)


def _tell_usage(error: Any) -> None:
    """Say a usage error of click's in one line, as the gate's own are said; no command at all gets the help instead."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    where = f"; see {error.ctx.command_path} --help" if getattr(error, "ctx", None) is not None else ""
    typer.echo(f"gate: {' '.join(error.format_message().split()).rstrip('.')}{where}", err=True)


def _set_names() -> str:
    """The names of the gate's own cell sets, for the help."""
    try:
        return ", ".join(sorted(load_cells(default_root())))
    except WorkloadError:
        return "a wrong name lists them"


app = typer.Typer(
    cls=GateGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Compare two commits of an Omni serving engine, or it and another engine: speed, tokens and words, with a report for "
    "the pull request.",
)


def _run_option(absent: str) -> Any:
    return typer.Option("--run", metavar="DIR", help=f"The run directory; absent: runs/{absent}.")


Words = Annotated[str, typer.Option(metavar="WORDS", help="Extra arguments of its server, quoted as in a shell.")]
Pairs = Annotated[
    list[str] | None, typer.Option(metavar="K=V", help="An environment variable of its server; repeatable.")
]
Command = Annotated[
    str,
    typer.Option(
        metavar="WORDS", help="A command that starts its server, with {port} and, if it likes, {model} in it."
    ),
]
Door = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="generate: ours, with token ids; openai: /v1/chat/completions; auto: ours where both arms are known to have it.",
    ),
]
Folder = Annotated[Path | None, typer.Option(metavar="DIR", help="Its tree as a folder; needs no history.")]
SetName = Annotated[
    str, typer.Option("--set", metavar="NAME", help=f"The cell set of workloads/cells.toml: {_set_names()}.")
]
Cells = Annotated[str, typer.Option(metavar="A,B", help="Only these cells, such as T2T@1,A2T@4.")]
Sessions = Annotated[int, typer.Option(min=1, metavar="N", help="Server boots per arm; the session is the sample.")]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Decides the order of sessions and of prompts.")]
Model = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="The checkpoint both arms serve, or its name at `omni serve`; absent: omni-tiny of base."
    ),
]
Run = Annotated[Path | None, _run_option("TIME-BASE-HEAD")]
Libri = Annotated[
    str | None,
    typer.Option(metavar="PATH|hub", help="A2T and A2S on a folder in LibriSpeech's layout, or from the hub."),
]
Workloads = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A folder with cells.toml, prompts and clips; absent: the gate's own."),
]
Keep = Annotated[bool, typer.Option("--keep", help="Leave the arms' trees, which else go once all is measured.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="What --device its server gets.")]
Moves = Annotated[bool, typer.Option("--expect-token-changes", help="Moved tokens are no failure.")]
Judge = Annotated[
    bool | None,
    typer.Option(
        "--judge/--no-judge",
        help="A recogniser hears the spoken answers once all is measured; absent: if it is installed (the extra judge).",
    ),
]
Resume = Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with an interrupted run, as it was asked for.")]
StopAfter = Annotated[str, typer.Option(metavar="TIME", help="End at the next cell boundary after 90s, 9m or 1h.")]
Timeout = Annotated[float, typer.Option(min=1, metavar="S", help="Seconds a server may take to become healthy.")]


ARMS = "Refs, `.`, folders, URLs of servers that run, or cmd:WORDS."


class Screen:
    """A run's progress: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self.bar = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("plans", total=None)

    def say(self, text: str) -> None:
        """Print a sentence."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, done: int, total: int, text: str) -> None:
        """Move the bar, or print a line where there is none."""
        if self.console.is_terminal:
            self.bar.update(self.task, completed=done, total=total, description=text)
        else:
            self.say(f"[{done}/{total}] {text}")


def called(argv0: str, here: Path) -> str:
    """How this gate was called, for the commands that it prints; `here` is the working folder."""
    path = Path(argv0)
    if path.parts[-2:] in (("gate", "__main__.py"), ("gate", "cli.py")):
        return f"{_program(Path(sys.executable), here)} -m gate"
    return _program(path, here) if path.name == "gate" else "gate"


def _program(path: Path, here: Path) -> str:
    """A program by its name where that finds it, else by its path as seen from `here`."""
    found = shutil.which(path.name)
    if found is not None and Path(found).absolute() == (here / path):
        return path.name
    shown = _shown(here / path, here)
    return shlex.quote(shown if "/" in shown else f"./{shown}")


def _shown(path: Path, here: Path) -> str:
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _again(*words: str) -> str:
    """A command line of this gate, as it was called."""
    return f"{called(sys.argv[0], Path.cwd())} {shlex.join(words)}"


def _resume_words(run_dir: Path) -> str:
    return _again("compare", "--resume", _shown(run_dir, Path.cwd()))


def _end(text: str, code: int) -> NoReturn:
    typer.echo(text, err=True)
    raise typer.Exit(code)


def _fault(error: OSError, otherwise: object = None) -> str:
    """What the machine refused, and where; `otherwise` is the place where the error names none."""
    if error.errno in FULL_DISK:
        # Of a copy the second name is the file that was written.
        return f"the disk is full: {error.filename2 or error.filename or otherwise or 'no file named'}"
    return f"{error.strerror or error}: {error.filename or otherwise or 'no file named'}"


def _kept(run_dir: Path | None, over: str) -> str:
    """What there is of a run that ended early and how to go on, as the end of a sentence; empty where there is nothing."""
    if run_dir is None:
        return ""
    onward = f"begin again: {over}" if over else f"go on: {_resume_words(run_dir)}"
    if (run_dir / "plan.json").is_file():
        return f"; what was measured is kept: {_again('report', str(run_dir))}, or {onward}"
    return f"; {onward}" if over or (run_dir / "wish.json").is_file() else ""


@contextmanager
def _reported(run_dir: Path | None = None, over: str = "") -> Iterator[None]:
    """Turn the failures a user can cause into one sentence and an exit code; what was measured stays on disk.

    `over` is what to type for such a run again where this one can't go on.
    """
    try:
        with _terminated_politely():
            yield
    except USAGE_ERRORS as error:
        _end(f"gate: {error}", EXIT_USAGE)
    except Refused as error:
        _end(f"gate: refused: {error}", EXIT_INVALID)
    except KeyboardInterrupt:
        _end(f"gate: interrupted{_kept(run_dir, over)}", EXIT_INTERRUPTED)
    except OSError as error:
        _end(f"gate: {_fault(error, run_dir)}{_kept(run_dir, over)}", EXIT_INTERNAL)


@contextmanager
def _terminated_politely() -> Iterator[None]:
    """While inside, SIGTERM and SIGHUP end the gate as Ctrl-C does: servers stopped, worktrees gone."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # A signal that the caller ignores (nohup) stays ignored.
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    try:
        before = [signal.signal(number, interrupt) for number in numbers]
    except ValueError:  # not the main thread: the caller's program owns the signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _choices(
    refs: Sequence[str],
    folders: tuple[Path | None, Path | None],
    commands: tuple[str, str],
    args: tuple[str, str],
    env: tuple[Any, Any],
) -> tuple[ArmChoice, ArmChoice]:
    named = [folder is not None or bool(command) for folder, command in zip(folders, commands, strict=True)]
    wanted = named.count(False)
    if len(refs) != wanted:
        raise ArmError(
            f"{len(refs)} arms are named by BASE and HEAD where {wanted} are wanted: give each arm a ref, `.`, a folder or a "
            f"URL, or --base-dir, --head-dir, --base-command, --head-command"
        )
    left = iter(refs)
    base, head = (
        _choice(name, "" if given else next(left), folder, command, words, pairs)
        for name, given, folder, command, words, pairs in zip(
            ("base", "head"), named, folders, commands, args, env, strict=True
        )
    )
    return base, head


def _choice(
    name: str, ref: str, folder: Path | None, command: str, words: str, pairs: list[str] | None, prefix: str = ""
) -> ArmChoice:
    option = prefix or f"--{name}-"
    if folder is not None and command:
        raise ArmError(f"{option}dir and {option}command name {name} twice; leave one out")
    arguments = tuple(split_words(words, f"{option}args"))
    return ArmChoice(
        name, COMMAND_MARK + command if command else ref, folder, arguments, parse_env(pairs or [], f"{option}env")
    )


def _run_dir(asked: Path | None, *names: str) -> Path:
    if asked is not None:
        return asked
    time = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("runs") / "-".join([time, *(re.sub(r"[^A-Za-z0-9._~-]+", "_", name)[-40:] for name in names)])


def _label(choice: ArmChoice) -> str:
    if choice.ref.startswith(COMMAND_MARK):
        return Path((choice.ref.removeprefix(COMMAND_MARK).split() or ["command"])[0]).name
    name = choice.directory.resolve().name if choice.directory is not None else choice.ref
    return "tree" if name == "." else name.strip("/").rpartition("/")[2]


def _split(cells: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in cells.split(",") if word.strip())


def _with_screen(work: Callable[[Screen], RunDir]) -> RunDir:
    screen = Screen(Console(stderr=True))
    with screen.bar:
        return work(screen)


def _judge(folder: RunDir, expect: bool = False) -> run.Outcome:
    """Write the report of a run directory and print its path, headline and first table."""
    outcome = run.write_report(folder, expect)
    typer.echo(f"report: {folder.report}\n")
    typer.echo(first_part(folder.report.read_text(encoding="utf-8")))
    if outcome.comparisons.is_unfinished:
        typer.echo(f"\nfinish it: {_resume_words(folder.path)}")
    return outcome


def first_part(report: str) -> str:
    """The headline and the first table of a report."""
    lines = report.splitlines()
    headline = next((line for line in lines if line.strip()), "")
    start = next((index for index, line in enumerate(lines) if line.startswith("|")), len(lines))
    table = lines[start:]
    end = next((index for index, line in enumerate(table) if not line.startswith("|")), len(table))
    return "\n".join([headline, "", *table[:end]])


@app.command()
def compare(
    refs: Annotated[list[str] | None, typer.Argument(metavar="BASE HEAD", help=ARMS)] = None,
    set_name: SetName = "quick",
    sessions: Sessions = 3,
    seed: Seed = 0,
    model: Model = None,
    run_dir: Run = None,
    cells: Cells = "",
    librispeech: Libri = None,
    workloads: Workloads = None,
    base_args: Words = "",
    head_args: Words = "",
    base_env: Pairs = None,
    head_env: Pairs = None,
    base_dir: Folder = None,
    head_dir: Folder = None,
    base_command: Command = "",
    head_command: Command = "",
    door: Door = "auto",
    judge: Judge = None,
    expect_token_changes: Moves = False,
    keep: Keep = False,
    device: Device = "cpu",
    boot_timeout: Timeout = 300.0,
    resume: Resume = None,
    stop_after: StopAfter = "",
) -> None:
    """Plan, run and report a comparison of two arms.

    Examples:

    `gate compare main HEAD`

    `gate compare HEAD . --set demo --sessions 2`

    `gate compare HEAD HEAD --head-args '--disable device_loopback'`

    `gate compare main HEAD --cells A2T@1,A2T@4 --librispeech data/test-other`

    `gate compare HEAD --head-command 'vllm serve {model} --omni --port {port}' --model DIR --set pr`

    `gate compare http://127.0.0.1:8000 http://127.0.0.1:9000 --cells T2T@1`

    `gate compare --resume runs/20260101T120000Z-main-HEAD`
    """
    with _reported():
        limit_s = _seconds(stop_after)
    if resume is not None:
        raise typer.Exit(_resume(resume, refs, limit_s))
    with _reported():
        folders, commands = (base_dir, head_dir), (base_command, head_command)
        choices = _choices(refs or [], folders, commands, (base_args, head_args), (base_env, head_env))
        target = _run_dir(run_dir, *map(_label, choices))
    wish = Wish(
        choices,
        Path.cwd(),
        target,
        set_name,
        _split(cells),
        sessions,
        seed,
        model,
        librispeech,
        keep,
        device,
        expect_token_changes,
        workloads=workloads or default_root(),
        boot_s=boot_timeout,
        door=door,
        judge=judge,
    )
    raise typer.Exit(_compare(wish, limit_s).code)


def _compare(wish: Wish, stop_after_s: float = float("inf"), over: str = "") -> run.Outcome:
    with _reported(wish.run_dir, over):
        folder = _with_screen(lambda screen: run.carry_out(wish, screen, stop_after_s))
        return _judge(folder)


def _resume(path: Path, refs: list[str] | None, stop_after_s: float) -> int:
    with _reported(path):
        if refs:
            raise ArmError("--resume takes its arms from the run; leave BASE and HEAD out")
        return _judge(_with_screen(lambda screen: run.resume(path, screen, stop_after_s))).code


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if text and found is None:
        raise RunDirError(f"--stop-after {text!r} is not a time such as 90s, 9m or 1h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]] if found else float("inf")


@app.command()
def plan(
    refs: Annotated[list[str] | None, typer.Argument(metavar="BASE HEAD", help=ARMS)] = None,
    set_name: SetName = "quick",
    sessions: Sessions = 3,
    seed: Seed = 0,
    model: Model = None,
    run_dir: Annotated[Path | None, _run_option("TIME-plan-BASE-HEAD")] = None,
    cells: Cells = "",
    librispeech: Libri = None,
    workloads: Workloads = None,
    base_args: Words = "",
    head_args: Words = "",
    base_env: Pairs = None,
    head_env: Pairs = None,
    base_dir: Folder = None,
    head_dir: Folder = None,
    base_command: Command = "",
    head_command: Command = "",
    door: Door = "auto",
    judge: Judge = None,
) -> None:
    """Write the plan of a comparison and print its price; nothing is served.

    Example: `gate plan main HEAD --set pr`
    """
    with _reported():
        folders, commands = (base_dir, head_dir), (base_command, head_command)
        choices = _choices(refs or [], folders, commands, (base_args, head_args), (base_env, head_env))
        target = _run_dir(run_dir, "plan", *map(_label, choices))
        wish = Wish(choices, Path.cwd(), target, set_name, _split(cells), sessions, seed, model, librispeech)
        wish = replace(wish, workloads=workloads or default_root(), door=door, judge=judge)
        folder = _with_screen(lambda screen: run.plan_only(wish, screen))
        typer.echo(f"plan: {folder.path / 'plan.json'}")
        typer.echo(f"carry it out: {_resume_words(folder.path)}")


@app.command(
    name="run",
    epilog="Exit codes, the first that holds: 64 wrong usage, 70 the gate failed, 130 interrupted, 3 a refused server, invalid "
    "evidence or a cell without a sound request, 1 some requests or a server failed, 2 stopped by --stop-after, 0 all sound.",
)
def run_one(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A ref, `.`, a folder, a URL or cmd:WORDS.")],
    set_name: SetName = "quick",
    sessions: Sessions = 1,
    seed: Seed = 0,
    model: Model = None,
    run_dir: Annotated[Path | None, _run_option("TIME-run-REF")] = None,
    cells: Cells = "",
    librispeech: Libri = None,
    workloads: Workloads = None,
    args: Words = "",
    env: Pairs = None,
    keep: Keep = False,
    device: Device = "cpu",
    door: Door = "auto",
    judge: Judge = None,
    boot_timeout: Timeout = 300.0,
    stop_after: StopAfter = "",
) -> None:
    """Measure one arm and print its metrics, session by session, and why requests failed.

    Example: `gate run HEAD --set demo`
    """
    with _reported():
        limit_s = _seconds(stop_after)
        choice = _choice("arm", ref, None, "", args, env, prefix="--")
        target = _run_dir(run_dir, "run", _label(choice))
    wish = Wish(
        (choice,),
        Path.cwd(),
        target,
        set_name,
        _split(cells),
        sessions,
        seed,
        model,
        librispeech,
        keep,
        device,
        workloads=workloads or default_root(),
        boot_s=boot_timeout,
        door=door,
        judge=judge,
    )
    with _reported(target):
        code = _show(_with_screen(lambda screen: run.carry_out(wish, screen, limit_s)))
    raise typer.Exit(code)


def _show(folder: RunDir) -> int:
    """Print what a run of one arm measured, what went wrong and how to go on; its exit code."""
    data = folder.load()
    outcome = run.judged(data)
    typer.echo(f"run: {folder.path}\n")
    typer.echo(session_table(data))
    if wrong := failures(data, outcome.comparisons):
        typer.echo(f"\nwhat went wrong:\n{wrong}")
    if outcome.comparisons.is_unfinished:
        typer.echo(f"\nfinish it: {_resume_words(folder.path)}")
    typer.echo(f"\nmake its report, with the word error rates: {_again('report', _shown(folder.path, Path.cwd()))}")
    return outcome.code


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    expect_token_changes: Moves = False,
) -> None:
    """Rebuild the report of a run directory, byte for byte, with the exit code that `gate compare` or `gate run` gave.

    Example: `gate report runs/20260101T120000Z-main-HEAD`
    """
    with _reported():
        code = _judge(existing(run_dir), expect_token_changes).code
    raise typer.Exit(code)


@app.command(name="plant")
def plant_change(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="slow, flip, raise or mute.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A scratch clone; it gets one commit more.")],
    fraction: Annotated[
        float | None, typer.Option(metavar="F", help="slow: this much of each decode step is slept. (default: 0.3)")
    ] = None,
    prompt_key: Annotated[str | None, typer.Option(metavar="HEX", help="flip, raise: the prompt's key.")] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="ID", help="flip, raise: the prompt of this id; absent: one that seed 0 asks.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(metavar="N", help="mute: the Thinker's layer, counted from 0. (default: 0)")
    ] = None,
    attention_head: Annotated[
        int | None, typer.Option(metavar="N", help="mute: the attention head that adds nothing. (default: 0)")
    ] = None,
) -> None:
    """Put a known fault into a scratch clone and commit it, to see whether the gate finds it.

    Examples:

    `gate plant slow ../scratch --fraction 0.1`

    `gate plant flip ../scratch --prompt p00`

    `gate plant mute ../scratch --layer 4 --attention-head 5`
    """
    with _reported():
        if kind not in plant.KINDS:
            raise PlantError(f"KIND {kind!r} does not exist; there are {', '.join(plant.KINDS)}")
        of_slow: dict[str, object] = {"--fraction": fraction}
        of_prompts: dict[str, object] = {"--prompt-key": prompt_key, "--prompt": prompt}
        of_mute: dict[str, object] = {"--layer": layer, "--attention-head": attention_head}
        read = {"slow": of_slow, "mute": of_mute}.get(kind, of_prompts)
        for flag, value in (of_slow | of_prompts | of_mute).items():
            if value is not None and flag not in read:
                raise PlantError(f"{flag} {value} is not read by {kind}, which reads {', '.join(read)}; leave it out")
        if prompt is not None and prompt_key is not None:
            raise PlantError("--prompt-key and --prompt name the prompt twice; leave one out")
        plant.check_clone(folder)
        if kind == "slow":
            change = plant.slow(0.3 if fraction is None else fraction)
        elif kind == "mute":
            place = layer or 0, attention_head or 0
            change = plant.mute(*place)
            plant.check_head(*place, folder)
        else:
            change = _at_prompt(kind, folder, prompt_key, prompt)
        commit = plant.plant([change], folder, f"planted: {change.what}")
        branch = git(folder, "rev-parse", "--abbrev-ref", "HEAD").strip()
        where = "detached" if branch == "HEAD" else f"branch {branch}"
        typer.echo(f"planted {kind}: {change.what}; committed {commit[:12]} to {folder.resolve()} ({where})")


def _at_prompt(kind: str, folder: Path, prompt_key: str | None, prompt: str | None) -> plant.Plant:
    if prompt_key is None:
        asked = _asked(prompt)
        key, name = _key_of(folder, asked.text or ""), asked.id
    else:
        key, name = prompt_key, ""
    return plant.flip(key, name=name) if kind == "flip" else plant.raising(key, name)


def _asked(name: str | None) -> Item:
    """The prompt or question with this id; without one, the question that cells of seed 0 ask first."""
    if name is None:
        return _first_question(seed=0)
    both = (*load_questions(default_root()).items, *load_prompts(default_root()).items)
    found = next((item for item in both if item.id == name), None)
    if found is None:
        raise PlantError(f"--prompt {name!r} is no id of workloads/questions.jsonl or workloads/prompts.jsonl")
    return found


def _first_question(seed: int) -> Item:
    """The question that the cells of a run with this seed ask first."""
    questions = load_questions(default_root())
    return ordered(questions.items, 1, seed, questions.name)[0]


def _key_of(folder: Path, text: str) -> str:
    """The key of a prompt with the tokenizer of the model that the tree serves where none is named."""
    with (
        tempfile.TemporaryDirectory(prefix="gate-key-") as place,
        laid_out((ArmChoice("base", "", folder),), folder, Path(place), keep=False) as (arm,),
    ):
        assert isinstance(arm, Arm)  # a folder is one
        return plant.prompt_key(default_model([arm], Path(place) / "model", lambda _: None), text)


@app.command(name="kernels")
def kernel_tables(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A torch-profiler trace (.json, .json.gz) or an Nsight export (.sqlite).",
        ),
    ],
    base: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file to show the change from."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Rows by name; the others are one row.")] = 30,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write all rows here as JSON.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The whole file is N steps; no ranges are looked for.")
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option("--range", metavar="REGEX", help="What a step's range begins with; what follows is its kind."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The kind of step to count; absent: the most frequent.")
    ] = None,
) -> None:
    """Show where a step's GPU time goes: kernel, count × µs = µs a step, and what is left.

    Examples:

    `gate kernels trace.json.gz`

    `gate kernels head.sqlite --base base.sqlite --kind 'thinker_text_decode rows=1 bucket=1'`
    """
    with _reported():
        if steps is not None and (pattern is not None or kind is not None):
            raise TraceError("--steps takes the whole file; leave --range and --kind out")
        paths = [file] if base is None else [file, base]
        for path in paths:
            _check_file(path)
        if json_file is not None and os.path.exists(json_file) and any(json_file.samefile(path) for path in paths):
            raise TraceError(f"--json {json_file} is a file that is read; name another")
        head_tables, *others = [_tables_of(path, steps, pattern, kind) for path in paths]
        typer.echo("\n".join(kernels.text(head_tables, others[0] if others else None, top)))
        if json_file is not None:
            _write_json(json_file, kernels.encoded(head_tables, others[0] if others else None))


def _check_file(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror}; name a file of a profiler") from error


def _tables_of(path: Path, steps: int | None, pattern: str | None, kind: str | None) -> tuple[kernels.KernelTable, ...]:
    timeline = trace.read(path)
    try:
        return kernels.tables(timeline, steps, pattern, kind)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def _write_json(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise
        raise TraceError(f"--json {path} can't be written: {error.strerror}; name another") from error


@app.command()
def demo(
    run_dir: Annotated[Path | None, _run_option("demo-TIME")] = None,
    sessions: Sessions = 3,
    seed: Seed = 0,
) -> None:
    """Compare HEAD with a scratch clone of it that decodes 30 % slower and flips one token, and show what the gate says.

    Succeeds when the gate could judge (0, 1 or 2) and the report exists.
    """
    with _reported(), tempfile.TemporaryDirectory(prefix="gate-demo-") as place:
        clone = Path(place) / "clone"
        base = _planted_clone(Path.cwd(), clone, seed)
        target = (run_dir or _demo_dir()).resolve()
        typer.echo(f"base is {base[:12]}; head decodes {DEMO_SLOW:.0%} slower and flips one token of one prompt")
        choices = (ArmChoice("base", "HEAD~1"), ArmChoice("head", "HEAD"))
        again = ("demo", "--sessions", str(sessions), "--seed", str(seed))  # the clone will be gone
        wish = Wish(choices, clone, target, "demo", sessions=sessions, seed=seed, command=shlex.join(["gate", *again]))
        outcome = _compare(wish, over=_again(*again))
        typer.echo(found_plants(outcome.comparisons))
        code = outcome.code
    raise typer.Exit(0 if code in (0, 1, 2) and (target / "report.md").is_file() else code or EXIT_INVALID)


def found_plants(found: Comparisons) -> str:
    """Say which of the demo's two faults the gate found."""
    slower = sum(cell.verdict == REGRESSION for cell in found.cells)
    slow = (
        f"found in {slower} of {len(found.cells)} cells"
        if slower
        else "not proven; this machine was too busy for so few sessions"
    )
    flip = "found" if found.moves else "not found"
    return f"planted: slower decoding: {slow}; flipped token: {flip}.{_onward(found, slower)}"


def _onward(found: Comparisons, slower: int) -> str:
    """What to do about cells of the demo that are still open, as a sentence; empty where none is."""
    open_cells = sum(cell.verdict == NO_VERDICT for cell in found.cells)
    if slower and not open_cells:
        return ""
    wanted = settling_sessions(found)
    if not wanted or max(wanted) > DEMO_SESSIONS:
        return f" Repeat it on a quiet machine: {_again('demo')}"
    again = _again("demo", "--sessions", str(max(wanted)))
    return (
        f" About {max(wanted)} sessions an arm would settle {len(wanted)} of {plural(open_cells, 'open cell')}: {again}"
    )


def _demo_dir() -> Path:
    return Path("runs") / f"demo-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}"


def _planted_clone(repository: Path, clone: Path, seed: int) -> str:
    if git(repository, "status", "--porcelain").strip():
        typer.echo("the working tree has changes that are not committed; the demo uses HEAD without them")
    base = plant.scratch_clone(repository, clone)
    first = _first_question(seed)
    key = _key_of(clone, first.text or "")
    changes = (plant.slow(DEMO_SLOW), plant.flip(key))
    plant.plant(changes, clone, f"planted: decode {DEMO_SLOW:.0%} slower, {first.id} flipped at step {plant.FLIP_STEP}")
    return base


def main() -> None:
    """Entry point of the `gate` command."""
    streams.guard()
    app()


if __name__ == "__main__":
    main()
