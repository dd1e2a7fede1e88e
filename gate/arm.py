"""Arms: what is judged, as a tree of files on disk (or a peer: a command, a URL) with its server's arguments and environment.

Lives here: resolving a ref, `.`, a folder, a command or a URL, making and removing worktrees and virtual environments, digests
of a tree and of a model folder, the command that starts an arm's server. Not here: starting it (gate/session.py).
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gate import process
from gate.record import ArmInfo

COMMAND_MARK = "cmd:"
SOURCE_SUFFIXES = frozenset({".py", ".json", ".jinja", ".toml"})
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

# The model that a tree's `omni serve` means where none is named.
TRAINED_MODEL = Path("engine/assets/omni-tiny")

# A planted or recorded variable of the caller's shell must not decide which tree an arm imports.
_DROPPED_ENV = ("PYTHONSAFEPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONPATH")

_NO_ROOM = ("No space left on device", "Disk quota exceeded")


class ArmError(ValueError):
    """An arm that cannot be made; the message is one sentence that names what was asked and what to do."""


@dataclass(frozen=True)
class ArmChoice:
    """What the command line asked for one arm, with the server's arguments and environment.

    `ref` is a commit, `.`, a folder, a URL (http://host:port) or a command (cmd:WORDS); `directory` stands instead of it.
    """

    name: str
    ref: str
    directory: Path | None = None
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Resolved:
    """An arm that was found but not yet laid out: its kind, and the commit or the folder to take it from.

    `peer` is the URL or the command of a peer, whose `source` is the folder that its command runs in.
    """

    choice: ArmChoice
    kind: str
    source: Path
    commit: str | None
    dirty: bool
    peer: str = ""


@dataclass(frozen=True)
class Arm:
    """An arm ready to serve: its public description, the tree that holds `engine/`, and its Python."""

    info: ArmInfo
    tree: Path
    python: str
    caches: Path

    def command(self, *words: str) -> list[str]:
        """The command line of the arm's own `omni` tool, without its extra arguments."""
        # `-m` with cwd and PYTHONPATH: a script path, `-P` or an editable install would silently run another tree.
        return [self.python, "-m", "engine.server.cli", *words]

    def environment(self) -> dict[str, str]:
        """The environment of the arm's processes: the caller's, with this tree first and the arm's own variables last."""
        kept = {key: value for key, value in process.environment().items() if key not in _DROPPED_ENV}
        own = {
            "TRITON_CACHE_DIR": str(self.caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.caches / "inductor"),
            "FLASHINFER_WORKSPACE_BASE": str(self.caches / "flashinfer"),
        }
        asked = dict(self.info.env)
        extra = asked.pop("PYTHONPATH", "")
        path = os.pathsep.join([str(self.tree), extra] if extra else [str(self.tree)])
        return {**kept, **own, **asked, "PYTHONPATH": path}


@dataclass(frozen=True)
class Peer:
    """An arm without a tree: a server that runs at `url`, or the command that starts one in the folder `tree`."""

    info: ArmInfo
    tree: Path
    url: str = ""
    words: tuple[str, ...] = ()

    def command(self, port: int, model: Path | None) -> list[str]:
        """The command's words with {port} and {model} filled in."""
        # Not str.format: a command may hold JSON, whose braces are its own.
        return [word.replace("{port}", str(port)).replace("{model}", str(model or "")) for word in self.words]

    def environment(self) -> dict[str, str]:
        """The caller's environment with the arm's own variables."""
        return {**process.environment(), **dict(self.info.env)}

    @property
    def wants_model(self) -> bool:
        """Whether the command names {model}."""
        return any("{model}" in word for word in self.words)


def source_digest(tree: Path) -> str:
    """SHA-256 hex over the `engine` package in `tree`: relative path and bytes of every source file, sorted by path."""
    package = tree / "engine"
    if not package.is_dir():
        raise ArmError(
            f"{tree} holds no engine/ package, so there is no server to start; name a checkout of the engine"
        )
    total = hashlib.sha256()
    files = (path for path in package.rglob("*") if path.suffix in SOURCE_SUFFIXES and path.is_file())
    named = {path.relative_to(package).as_posix(): path for path in files if "__pycache__" not in path.parts}
    for name in sorted(named):
        total.update(name.encode() + b"\0" + named[name].read_bytes() + b"\0")
    return total.hexdigest()


def is_model_name(model: Path) -> bool:
    """Whether a --model may be a name that `omni serve` knows: one word that is no folder here."""
    return model.parts == (str(model),) and str(model)[0] not in "./~" and not model.exists()


def check_model_name(arm: Arm, model: Path, timeout_s: float = 120.0) -> None:
    """Raise ArmError unless an arm's own `omni info` knows a model by this name."""
    try:
        done = process.run(arm.command("info", str(model)), timeout_s, cwd=arm.tree, env=arm.environment())
    except subprocess.TimeoutExpired as error:
        raise ArmError(f"`omni info {model}` of {arm.info.name} took over {timeout_s:.0f} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ArmError(f"--model {model} is not a folder, nor a name that {arm.info.name} knows ({last})")


def weights_digest(folder: Path) -> str:
    """SHA-256 hex over the regular files directly in a model folder: name and file digest, sorted by name."""
    if not folder.is_dir():
        raise ArmError(f"--model {folder} is not a folder; name a checkpoint folder (config.json and safetensors)")
    total = hashlib.sha256()
    for path in sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.name):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        total.update(path.name.encode() + b"\0" + content + b"\0")
    return total.hexdigest()


def git(repository: Path, *words: str, into: Path | None = None) -> str:
    """Run git in `repository` and return its output; a failure is an ArmError with git's last line.

    A full disk, or a git that a signal ended, is an OSError that names the folder it writes `into`, else the repository. As a
    child of the gate it ends with it, and Ctrl-C does not reach it.
    """
    # Hooks of the user's repository have no business in a worktree that is judged.
    command = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(repository), *words]
    done = process.run(command, env={**process.environment(), "LC_ALL": "C"})  # what it says is read here
    if done.returncode:
        what, folder = f"git {_subcommand(words)}", into or repository
        if done.returncode < 0:
            raise OSError(errno.EIO, f"{what} was ended by {signal.Signals(-done.returncode).name}", str(folder))
        _check_room(done.stderr, what, folder)
        told = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no message"]
        # What went wrong stands before what git advises.
        fault = next((line for line in told if line.startswith(("fatal: ", "error: "))), told[-1])
        raise ArmError(f"git {_subcommand(words)} failed in {repository}: {fault}")
    return done.stdout


def _check_room(told: str, what: str, folder: Path) -> None:
    """Raise an OSError that names `folder` where a child that writes there told of a full disk."""
    if any(text in told for text in _NO_ROOM):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))
    # git says this without a reason where it writes out a file; with one behind it, it's another fault.
    if found := re.search(r"unable to write file [^:\n]*$", told, re.MULTILINE):
        raise OSError(errno.EIO, f"{what}: {found[0]} (is the disk full?)", str(folder))


def _subcommand(words: Sequence[str]) -> str:
    """Which of git's commands `words` are, behind settings (`-c NAME=VALUE`)."""
    place = 0
    while words[place] == "-c":
        place += 2
    return words[place]


def resolve(choice: ArmChoice, repository: Path) -> Resolved:
    """Find what a choice names, without writing anything; an ArmError says in a sentence why it names nothing."""
    if choice.directory is not None:
        return _folder(choice, choice.directory)
    if not choice.ref.strip():
        raise ArmError(f"{choice.name} is an empty ref; name a commit, `.` or a folder")
    if choice.ref == ".":
        top = _top(repository)
        if top is None:
            return _folder(choice, repository)
        return Resolved(choice, "snapshot", top, _commit(top, "HEAD"), _dirty(top))
    if choice.ref.startswith(COMMAND_MARK):
        return _command(choice, repository)
    if "://" in choice.ref:
        return Resolved(choice, "url", repository, None, False, _url(choice))
    commit = _commit(repository, choice.ref)
    if commit is not None:
        return Resolved(choice, "commit", _top(repository) or repository, commit, False)
    if Path(choice.ref).is_dir():
        return _folder(choice, Path(choice.ref))
    # Of a push nothing is in the repository before its pre-receive hook says yes.
    pushed = " (what is being pushed is no part of it yet: ask in post-receive)"
    hint = pushed if "GIT_QUARANTINE_PATH" in os.environ else _shallow(repository)
    raise ArmError(f"{choice.name} {choice.ref!r} is neither a commit of {repository} nor a folder{hint}")


def _command(choice: ArmChoice, repository: Path) -> Resolved:
    command = choice.ref.removeprefix(COMMAND_MARK).strip()
    words = split_words(command, f"{choice.name}'s command")
    if "{port}" not in command:
        raise ArmError(f"{choice.name}'s command {command!r} does not say where its port goes; put {{port}} there")
    if shutil.which(words[0]) is None:
        raise ArmError(f"{choice.name}'s command starts with {words[0]!r}, which is no program on PATH")
    return Resolved(choice, "command", repository, None, False, command)


def split_words(text: str, what: str) -> list[str]:
    """Split as a shell does; ArmError where a quote is left open."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ArmError(f"{what} {text!r} is not quoted as a shell wants it ({error})") from error


def _url(choice: ArmChoice) -> str:
    """The server's address without a trailing slash or /v1, which a habit of OpenAI clients adds."""
    found = urllib.parse.urlsplit(choice.ref)
    if found.scheme not in ("http", "https") or not found.hostname or found.query or found.fragment:
        raise ArmError(f"{choice.name} {choice.ref!r} is no server's address; write http://host:port")
    if found.username or found.password:
        raise ArmError(f"{choice.name}'s URL holds a password, which the report would show; use WALKGATE_GATE_API_KEY")
    if choice.args or choice.env:
        raise ArmError(
            f"{choice.name} is a URL, so --{choice.name}-args and --{choice.name}-env reach nobody; drop them"
        )
    return choice.ref.rstrip("/").removesuffix("/v1").rstrip("/")


def _folder(choice: ArmChoice, folder: Path) -> Resolved:
    folder = folder.resolve()
    if not folder.is_dir():
        raise ArmError(f"{choice.name} folder {folder} does not exist; name a folder that holds engine/")
    if not (folder / "engine").is_dir():
        raise ArmError(f"{choice.name} folder {folder} holds no engine/ package; name a checkout of the engine")
    commit = _commit(folder, "HEAD")
    return Resolved(choice, "directory", folder, commit, commit is not None and _dirty(folder))


def _top(repository: Path) -> Path | None:
    try:
        return Path(git(repository, "rev-parse", "--show-toplevel").strip())
    except ArmError:
        return None


def _commit(repository: Path, ref: str) -> str | None:
    if ref.startswith("-"):
        return None
    try:
        return git(repository, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").strip() or None
    except ArmError:
        return None


def _dirty(tree: Path) -> bool:
    # Of the files that an arm runs: a note beside the package changes nothing that is measured.
    return bool(git(tree, "status", "--porcelain", "--", "engine", "pyproject.toml").strip())


def _shallow(repository: Path) -> str:
    try:
        shallow = git(repository, "rev-parse", "--is-shallow-repository").strip() == "true"
    except ArmError:
        return f" ({repository} is not a git repository)" if shutil.which("git") else " (git is not on PATH)"
    return " (the clone is shallow: `git fetch --unshallow` brings older commits)" if shallow else ""


@contextmanager
def laid_out(
    choices: tuple[ArmChoice, ...],
    repository: Path,
    run_dir: Path,
    keep: bool,
    device: str = "cpu",
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Arm | Peer]]:
    """Lay the arms out under `run_dir`/arms and yield them; worktrees go again at the end, however it ends.

    `keep` leaves the trees of commits registered and on disk. `say` receives progress sentences.
    """
    with ExitStack() as stack:
        arms: list[Arm | Peer] = []
        for resolved in [resolve(choice, repository) for choice in choices]:
            if resolved.peer:
                arms.append(_peer(resolved))
                continue
            tree = _tree(resolved, run_dir, keep, stack)
            python = _python(resolved.choice.name, tree, run_dir, device, say)
            arms.append(
                Arm(_info(resolved, source_digest(tree)), tree, python, run_dir / "caches" / resolved.choice.name)
            )
        yield arms


def _peer(resolved: Resolved) -> Peer:
    info = _info(resolved, "")
    if resolved.kind == "url":
        return Peer(info, resolved.source, url=resolved.peer)
    return Peer(info, resolved.source, words=tuple(shlex.split(resolved.peer)))


def _tree(resolved: Resolved, run_dir: Path, keep: bool, stack: ExitStack) -> Path:
    if resolved.kind == "directory":
        return resolved.source
    target = run_dir / "arms" / resolved.choice.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if resolved.kind == "snapshot":
        if target.is_dir():  # a resumed run goes on with what it copied when it began
            return target
        # Through a neighbour and a rename: a gate that is killed meanwhile leaves no half of a tree to be measured.
        beside = target.with_name(target.name + ".part")
        shutil.rmtree(beside, ignore_errors=True)
        copy_snapshot(resolved.source, beside, run_dir)
        beside.rename(target)
        return target
    if not keep:
        # Registered before the tree is made: a Ctrl-C in between must find it.
        stack.callback(remove_worktree, resolved.source, target)
    if target.exists():  # left by a run that was killed
        remove_worktree(resolved.source, target)
    # Twice forced: a gate that was killed while git made this worktree left it locked.
    words = ("worktree", "add", "--detach", "--force", "--force", str(target), str(resolved.commit))
    git(resolved.source, *words, into=target)
    return target


def copy_snapshot(repository: Path, target: Path, run_dir: Path) -> None:
    """Copy the working tree (tracked and untracked files that git does not ignore) to `target`, without `run_dir`."""
    listed = git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    skipped = run_dir.resolve()
    for name in sorted(set(filter(None, listed.split("\0")))):
        source = repository / name
        # A file deleted but still in the index is listed too; a nested repository is listed as a folder.
        if not (source.is_file() or source.is_symlink()) or source.absolute().is_relative_to(skipped):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target / name, follow_symlinks=False)


def remove_worktree(repository: Path, target: Path) -> None:
    """Take a worktree off disk and out of the repository's list; a worktree that was never made is no error."""
    try:
        git(repository, "worktree", "remove", "--force", "--force", str(target))
    except (ArmError, OSError):
        shutil.rmtree(target, ignore_errors=True)
        _deregister(repository, target)


def _deregister(repository: Path, target: Path) -> None:
    """Take a worktree whose folder is gone out of the repository's list.

    `git worktree prune` would drop the user's own too, staged work included, where their disk isn't mounted just now.
    """
    common = repository / git(repository, "rev-parse", "--git-common-dir").strip()
    gone = target.resolve() / ".git"
    for named in (common / "worktrees").glob("*/gitdir"):
        # It may be relative (worktree.useRelativePaths).
        place = named.parent / named.read_text(encoding="utf-8", errors="surrogateescape").strip()
        if place.resolve() == gone:
            shutil.rmtree(named.parent, ignore_errors=True)


def _info(resolved: Resolved, digest: str) -> ArmInfo:
    choice = resolved.choice
    return ArmInfo(
        name=choice.name,
        ref=str(choice.directory) if choice.directory is not None else resolved.peer or choice.ref,
        commit=resolved.commit,
        dirty=resolved.dirty,
        source_digest=digest,
        args=list(choice.args),
        env=dict(choice.env),
        kind=resolved.kind,
    )


def parse_env(values: list[str], option: str) -> tuple[tuple[str, str], ...]:
    """Split K=V words of `option` into pairs; a word without a name or `=` is an ArmError."""
    pairs = []
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise ArmError(f"{option} {value!r} is not of the form NAME=VALUE")
        pairs.append((key, text))
    return tuple(pairs)


def dependency_table(tree: Path) -> tuple[str, ...] | None:
    """The `project.dependencies` of a tree's pyproject.toml, sorted and without spaces; None without that file."""
    path = tree / "pyproject.toml"
    if not path.is_file():
        return None
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ArmError(f"{path} is not TOML ({error}); mend it, or name another arm") from error
    return _normal(table.get("project", {}).get("dependencies", []))


def running_dependencies() -> tuple[str, ...] | None:
    """The dependency table of the gate that runs: its checkout's, or the installed distribution's."""
    table = dependency_table(Path(__file__).resolve().parent.parent)
    if table is not None:
        return table
    try:
        required = importlib.metadata.requires("walkgate") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return _normal([word for word in required if "extra ==" not in word])


def _normal(words: list[str]) -> tuple[str, ...]:
    return tuple(sorted(_one_requirement(word) for word in words))


def _one_requirement(word: str) -> str:
    # The limits of a requirement are a set: an installed wheel's metadata lists them in another order than its pyproject.
    spec, _, marker = re.sub(r"\s+", "", word).lower().partition(";")
    name = re.match(r"[a-z0-9._-]+(\[[^\]]*\])?", spec)
    cut = name.end() if name else 0
    limits = ",".join(sorted(spec[cut:].strip("()").split(",")))
    return spec[:cut].replace("_", "-") + limits + (f";{marker}" if marker else "")


def _python(name: str, tree: Path, run_dir: Path, device: str, say: Callable[[str], None]) -> str:
    table, running = dependency_table(tree), running_dependencies()
    if table is None or running is None or table == running:
        return sys.executable
    own = run_dir / "venvs" / name
    say(f"{name} declares other dependencies than this gate's own; installing {len(table)} packages into {own}")
    _make_venv(own, table, device)
    return str(own / "bin" / "python")


def _make_venv(folder: Path, table: tuple[str, ...], device: str) -> None:
    python = folder / "bin" / "python"
    if not python.exists():
        _install([sys.executable, "-m", "venv", str(folder)], folder)
    torch = [word for word in table if re.match(r"torch\b(?![-_.])", word)]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if torch and device == "cpu":
        # PyPI's torch brings gigabytes of CUDA; the CPU build is tried first and is no condition.
        process.run([*pip, "--index-url", CPU_TORCH_INDEX, *torch])
    if table:
        _install([*pip, *table], folder)


def _install(command: list[str], folder: Path) -> None:
    done = process.run(command)
    if done.returncode:
        _check_room(done.stderr, "pip", folder)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ArmError(f"the arm's own environment {folder} could not be made: {last}")


def default_model(arms: Sequence[Arm], folder: Path, say: Callable[[str], object]) -> Path:
    """Put the model that all arms serve into `folder` where none was named, and return its folder; `say` is told which.

    It is the trained model of the first arm whose tree has one: each tree may hold another, and an arm from before there was
    one serves it as any checkpoint. Where no tree has one, the first arm's `omni tiny` makes one with random weights.
    """
    owner = next((arm for arm in arms if (arm.tree / TRAINED_MODEL).is_dir()), None)
    if owner is None:
        say(
            f"no --model named, and no tree with {TRAINED_MODEL}: `omni tiny` of {arms[0].info.name} makes one, untrained"
        )
        return make_model(arms[0], folder)
    say(f"no --model named: {TRAINED_MODEL} of {owner.info.name}")
    copy = folder / TRAINED_MODEL.name  # by which name the report calls it
    copy.mkdir(parents=True)
    for path in (owner.tree / TRAINED_MODEL).iterdir():
        if path.is_file():
            shutil.copyfile(path, copy / path.name)
    return copy


def make_model(arm: Arm, folder: Path, timeout_s: float = 300.0) -> Path:
    """Let an arm's own `omni tiny` write a checkpoint to `folder`, and return it; a failure is an ArmError."""
    command = arm.command("tiny", "--out", str(folder))
    try:
        done = process.run(command, timeout_s, cwd=arm.tree, env=arm.environment())
    except subprocess.TimeoutExpired as error:
        raise ArmError(f"`omni tiny` of {arm.info.name} took over {timeout_s:.0f} s; name a --model folder") from error
    if done.returncode:
        _check_room(done.stderr, "omni tiny", folder)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ArmError(f"`omni tiny` of {arm.info.name} failed ({last}); name a --model folder")
    return folder
