"""Arms: found, laid out, digested, and cleaned up."""

from __future__ import annotations

import errno
import hashlib
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gate.arm import (
    TRAINED_MODEL,
    Arm,
    ArmChoice,
    ArmError,
    default_model,
    dependency_table,
    git,
    laid_out,
    make_model,
    parse_env,
    resolve,
    source_digest,
    weights_digest,
)
from tests.gate.trees import make_repository, make_tree, places_of, run_git, serve_words, state


def test_the_source_digest_covers_source_files_by_path_and_nothing_else(tmp_path: Path) -> None:
    package = tmp_path / "engine"
    (package / "kernels" / "__pycache__").mkdir(parents=True)
    (package / "b.py").write_bytes(b"two")
    (package / "kernels" / "a.json").write_bytes(b"one")
    (package / "notes.txt").write_bytes(b"not source")
    (package / "kernels" / "__pycache__" / "a.py").write_bytes(b"cached")
    assert source_digest(tmp_path) == hashlib.sha256(b"b.py\0two\0kernels/a.json\0one\0").hexdigest()


def test_the_weights_digest_covers_the_files_directly_in_the_folder_by_name(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"weights")
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "ignored").write_bytes(b"x")
    parts = (
        b"config.json\0" + hashlib.sha256(b"{}").digest() + b"\0w.bin\0" + hashlib.sha256(b"weights").digest() + b"\0"
    )
    assert weights_digest(tmp_path) == hashlib.sha256(parts).hexdigest()


def test_two_refs_of_one_commit_become_two_clean_worktrees_that_go_again(tmp_path: Path) -> None:
    repo = make_repository(tmp_path / "repo", {})
    (repo / "engine" / "behaviour.json").write_text("dirty")
    choices = (ArmChoice("base", "HEAD"), ArmChoice("head", "main"))
    with laid_out(choices, repo, tmp_path / "run", keep=False) as (base, head):
        assert (base.tree, head.tree) == (tmp_path / "run/arms/base", tmp_path / "run/arms/head")
        assert base.info.source_digest == head.info.source_digest != source_digest(repo)
        assert base.info.kind == "commit" and not base.info.dirty
        assert base.info.commit == run_git(repo, "rev-parse", "HEAD")
    assert run_git(repo, "worktree", "list").count("\n") == 0
    assert not (tmp_path / "run/arms/base").exists()


@pytest.mark.parametrize("names", [("GIT_DIR",), ("GIT_INDEX_FILE",), tuple(places_of(Path()))], ids="+".join)
@pytest.mark.parametrize("ref", ["HEAD", "."])
def test_where_git_starts_the_gate_arms_come_from_the_repository_that_is_named_and_no_other_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], ref: str
) -> None:
    mine = make_repository(tmp_path / "mine", {"tokens": 1})
    repo = make_repository(tmp_path / "repo", {"tokens": 2}, {"tokens": 3})
    before = state(mine)
    for name in names:
        monkeypatch.setenv(name, places_of(mine)[name])
    with laid_out((ArmChoice("base", ref),), repo, tmp_path / "run", keep=False) as (arm,):
        assert arm.info.commit == run_git(repo, "rev-parse", "HEAD")
        assert arm.info.source_digest == source_digest(repo)
    assert state(mine) == before


def test_what_an_arm_starts_is_not_told_of_a_repository_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(tmp_path / "tree")
    monkeypatch.setenv("GIT_DIR", "/elsewhere/.git")
    choices = (ArmChoice("base", str(tree)), ArmChoice("head", f"cmd:{serve_words(tree)}"))
    with laid_out(choices, tmp_path, tmp_path / "run", keep=False) as arms:
        assert ["GIT_DIR" in arm.environment() for arm in arms] == [False, False]


def fake_git(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a shell script in the place of git."""
    folder.mkdir()
    (folder / "git").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("script", "number", "told"),
    [
        ("echo 'fatal: sha1 file write error: No space left on device' >&2; exit 128", errno.ENOSPC, "No space left"),
        ("echo 'fatal: write error: Disk quota exceeded' >&2; exit 128", errno.ENOSPC, "No space left"),
        (
            "echo 'error: unable to write file engine/a.py' >&2; echo 'fatal: Could not reset index' >&2; exit 128",
            errno.EIO,
            r"git worktree: unable to write file engine/a\.py \(is the disk full\?\)",
        ),
        ("kill -KILL $$", errno.EIO, "git worktree was ended by SIGKILL"),
        ("test $LC_ALL = C && kill -SEGV $$", errno.EIO, "git worktree was ended by SIGSEGV"),
    ],
)
def test_what_the_machine_refuses_git_is_no_wrong_usage_and_names_the_folder_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, number: int, told: str
) -> None:
    fake_git(tmp_path / "bin", script, monkeypatch)
    with pytest.raises(OSError, match=told) as caught:
        git(tmp_path, "worktree", "add", str(tmp_path / "tree"), into=tmp_path / "tree")
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "tree"))
    with pytest.raises(OSError) as caught:
        git(tmp_path, "worktree", "add")
    assert caught.value.filename == str(tmp_path)


def test_a_file_that_git_may_not_write_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_git(tmp_path / "bin", "echo 'error: unable to write file .git/a: Permission denied' >&2; exit 1", monkeypatch)
    with pytest.raises(ArmError, match=r"git commit failed in .*: error: unable to write file .*: Permission denied"):
        git(tmp_path, "-c", "a=b", "commit")


def test_worktrees_go_also_when_the_run_is_interrupted(tmp_path: Path) -> None:
    repo = make_repository(tmp_path / "repo", {})
    with pytest.raises(KeyboardInterrupt), laid_out((ArmChoice("base", "HEAD"),), repo, tmp_path / "run", keep=False):
        raise KeyboardInterrupt
    assert run_git(repo, "worktree", "list").count("\n") == 0


def test_half_a_snapshot_that_a_killed_gate_left_is_made_again_and_a_whole_one_kept(tmp_path: Path) -> None:
    repo, half = make_repository(tmp_path / "repo", {}), tmp_path / "run" / "arms" / "base.part"
    half.mkdir(parents=True)
    (half / "leftover.py").write_text("half")
    choices = (ArmChoice("base", "."),)
    with laid_out(choices, repo, tmp_path / "run", keep=False) as (arm,):
        assert not (arm.tree / "leftover.py").exists() and (arm.tree / "engine" / "behaviour.json").is_file()
        digest = arm.info.source_digest
    (repo / "engine" / "behaviour.json").write_text("changed since")
    with laid_out(choices, repo, tmp_path / "run", keep=False) as (arm,):
        assert arm.info.source_digest == digest


def test_a_worktree_that_a_killed_git_left_locked_is_made_again(tmp_path: Path) -> None:
    repo, target = make_repository(tmp_path / "repo", {}), tmp_path / "run" / "arms" / "base"
    run_git(repo, "worktree", "add", "--detach", "--lock", "--reason", "initializing", str(target), "HEAD")
    (target / "engine" / "__init__.py").unlink()
    for left in (True, False):
        with laid_out((ArmChoice("base", "HEAD"),), repo, tmp_path / "run", keep=False) as (arm,):
            assert (arm.tree / "engine" / "__init__.py").is_file()
        assert run_git(repo, "worktree", "list").count("\n") == 0
        if left:
            run_git(repo, "worktree", "add", "--detach", "--lock", str(target), "HEAD")
            shutil.rmtree(target)


@pytest.mark.parametrize("broken", [False, True])
def test_a_worktree_of_the_user_that_is_out_of_reach_stays_registered_with_what_is_staged_there(
    tmp_path: Path, broken: bool
) -> None:
    repo = make_repository(tmp_path / "repo", {})
    mine = tmp_path / "disk" / "mine"
    run_git(repo, "worktree", "add", "--detach", str(mine))
    (mine / "staged.txt").write_text("work")
    run_git(mine, "add", "staged.txt")
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    choices = (ArmChoice("base", "HEAD"), ArmChoice("head", "HEAD"))
    with laid_out(choices, repo, tmp_path / "run", keep=False) as arms:
        if broken:  # so that git itself does not remove it
            (arms[0].tree / ".git").unlink()
    (tmp_path / "unmounted").rename(tmp_path / "disk")
    assert run_git(mine, "diff", "--cached", "--name-only") == "staged.txt"
    assert run_git(repo, "worktree", "list").splitlines()[1:] == [
        f"{mine}  {run_git(repo, 'rev-parse', '--short', 'HEAD')} (detached HEAD)"
    ]
    assert not list((tmp_path / "run" / "arms").iterdir())


def test_keep_leaves_the_worktree(tmp_path: Path) -> None:
    repo = make_repository(tmp_path / "repo", {})
    with laid_out((ArmChoice("base", "HEAD"),), repo, tmp_path / "run", keep=True):
        pass
    assert (tmp_path / "run/arms/base/engine").is_dir()
    assert str(tmp_path / "run/arms/base") in run_git(repo, "worktree", "list")


def test_a_worktree_works_in_a_clone_of_depth_one(tmp_path: Path) -> None:
    repo = make_repository(tmp_path / "repo", {"tokens": 1}, {"tokens": 2})
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{repo}", str(tmp_path / "shallow")], check=True)
    with laid_out((ArmChoice("head", "HEAD"),), tmp_path / "shallow", tmp_path / "run", keep=False) as (arm,):
        assert arm.info.source_digest == source_digest(repo)
    with pytest.raises(ArmError, match=r"base 'HEAD~1' is neither a commit .* nor a folder \(the clone is shallow"):
        resolve(ArmChoice("base", "HEAD~1"), tmp_path / "shallow")


def test_a_dot_is_a_copy_of_tracked_and_untracked_files_without_ignored_ones_and_without_the_run(
    tmp_path: Path,
) -> None:
    repo = make_repository(tmp_path / "repo", {})
    (repo / "engine" / "new.py").write_text("untracked = 1\n")
    (repo / "engine" / "__init__.py").unlink()
    (repo / "runs").mkdir()
    (repo / "runs" / "ignored").write_text("x")
    run_dir = repo / "here"
    with laid_out((ArmChoice("head", "."),), repo, run_dir, keep=False) as (arm,):
        copied = {path.relative_to(arm.tree).as_posix() for path in arm.tree.rglob("*") if path.is_file()}
        info = arm.info
    assert copied == {
        ".gitignore",
        "engine/behaviour.json",
        "engine/new.py",
        "engine/server/__init__.py",
        "engine/server/cli.py",
    }
    assert (info.kind, info.dirty, info.commit) == ("snapshot", True, run_git(repo, "rev-parse", "HEAD"))


@pytest.mark.parametrize("ref", [".", "folder"])
def test_files_beside_the_package_are_no_uncommitted_changes_and_those_in_it_are(tmp_path: Path, ref: str) -> None:
    repo = make_repository(tmp_path / "repo", {})
    choice = ArmChoice("head", "." if ref == "." else str(repo))
    (repo / "speech.wav").write_bytes(b"left by an example")
    assert not resolve(choice, repo).dirty
    (repo / "pyproject.toml").write_text("[project]\n")
    assert resolve(choice, repo).dirty
    (repo / "pyproject.toml").unlink()
    (repo / "engine" / "new.py").write_text("")
    assert resolve(choice, repo).dirty


def test_a_folder_needs_no_history_and_is_used_in_place(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    by_option = ArmChoice("base", "", directory=tree, args=("--disable", "plan_cache"), env=(("A", "1"),))
    by_name = ArmChoice("head", str(tree))
    with laid_out((by_option, by_name), tmp_path, tmp_path / "run", keep=False) as arms:
        assert [arm.tree for arm in arms] == [tree, tree]
        assert [arm.info.kind for arm in arms] == ["directory", "directory"]
        assert arms[0].info.commit is None
        assert (arms[0].info.args, arms[0].info.env) == (["--disable", "plan_cache"], {"A": "1"})
    assert tree.is_dir()


def test_the_environment_puts_the_tree_first_and_drops_what_would_import_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    tree = make_tree(tmp_path / "tree")
    choice = ArmChoice("base", str(tree), env=(("PYTHONPATH", "/extra"), ("B", "2")))
    with laid_out((choice,), tmp_path, tmp_path / "run", keep=False) as (arm,):
        environment = arm.environment()
        command = arm.command("serve", "model")
    assert environment["PYTHONPATH"] == f"{tree}:/extra"
    assert "PYTHONSAFEPATH" not in environment
    assert environment["B"] == "2"
    assert environment["TRITON_CACHE_DIR"] == str(tmp_path / "run/caches/base/triton")
    assert command[1:] == ["-m", "engine.server.cli", "serve", "model"]


@pytest.mark.parametrize("ref", ["no-such-branch", "--help", "-C", "/no/such/folder"])
def test_a_ref_that_names_nothing_is_one_sentence(tmp_path: Path, ref: str) -> None:
    repo = make_repository(tmp_path / "repo", {})
    with pytest.raises(ArmError) as caught:
        resolve(ArmChoice("base", ref), repo)
    assert str(caught.value) == f"base {ref!r} is neither a commit of {repo} nor a folder"


def test_a_commit_that_is_being_pushed_is_none_yet_and_the_message_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = make_repository(tmp_path / "repo", {})
    monkeypatch.setenv("GIT_QUARANTINE_PATH", str(tmp_path))
    with pytest.raises(
        ArmError, match=r"nor a folder \(what is being pushed is no part of it yet: ask in post-receive\)"
    ):
        resolve(ArmChoice("base", "0" * 40), repo)
    assert resolve(ArmChoice("base", "HEAD"), repo).kind == "commit"


def test_a_ref_where_there_is_no_git_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = make_repository(tmp_path / "repo", {})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArmError, match=r"base 'HEAD' is neither a commit .* nor a folder \(git is not on PATH\)"):
        resolve(ArmChoice("base", "HEAD"), repo)


def test_a_folder_without_an_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArmError, match=r"head folder .* holds no engine/ package"):
        resolve(ArmChoice("head", "", directory=tmp_path), tmp_path)


def test_environment_words_are_name_and_value() -> None:
    assert parse_env(["A=1", "B=x=y", "C="], "--base-env") == (("A", "1"), ("B", "x=y"), ("C", ""))
    with pytest.raises(ArmError, match="--base-env 'A' is not of the form NAME=VALUE"):
        parse_env(["A"], "--base-env")


def test_dependency_tables_are_equal_whatever_their_order_and_spacing(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["Torch >=2.11, <2.15", "aiohttp"]\n')
    assert dependency_table(tmp_path) == ("aiohttp", "torch<2.15,>=2.11")
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["aiohttp", "torch<2.15,>=2.11"]\n')
    assert dependency_table(tmp_path) == ("aiohttp", "torch<2.15,>=2.11")


def test_an_arm_that_declares_other_dependencies_gets_an_environment_of_its_own_and_says_so(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    (tree / "pyproject.toml").write_text("[project]\ndependencies = []\n")
    said: list[str] = []
    with laid_out((ArmChoice("head", str(tree)),), tmp_path, tmp_path / "run", keep=False, say=said.append) as (arm,):
        assert arm.python == str(tmp_path / "run/venvs/head/bin/python")
        where = subprocess.run([arm.python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True)
    assert where.stdout.strip() == str(tmp_path / "run/venvs/head")
    told = "head declares other dependencies than this gate's own; installing 0 packages into "
    assert said == [f"{told}{tmp_path / 'run/venvs/head'}"]


def test_the_model_is_made_by_the_arms_own_tiny_command(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    with laid_out((ArmChoice("base", str(tree)),), tmp_path, tmp_path / "run", keep=False) as (arm,):
        folder = make_model(arm, tmp_path / "model")
        assert (folder / "model.safetensors").read_bytes() == bytes(range(256))
        with pytest.raises(ArmError, match=r"`omni tiny` of base failed .*FileExistsError"):
            make_model(arm, tmp_path / "model")
        full = (
            tmp_path / "bin" / "python",
            "#!/bin/sh\necho 'OSError: [Errno 28] No space left on device' >&2; exit 1\n",
        )
        full[0].parent.mkdir()
        full[0].write_text(full[1])
        full[0].chmod(0o755)
        with pytest.raises(OSError, match=r"No space left on device: .*other"):
            make_model(replace(arm, python=str(full[0])), tmp_path / "other")


@pytest.mark.parametrize(
    ("with_model", "taken", "told"),
    [
        (("base", "head"), b"base", "no --model named: engine/assets/omni-tiny of base"),
        (("head",), b"head", "no --model named: engine/assets/omni-tiny of head"),
        (
            (),
            bytes(range(256)),
            "no --model named, and no tree with engine/assets/omni-tiny: `omni tiny` of base makes one",
        ),
    ],
    ids=["both", "head alone", "neither"],
)
def test_without_a_model_all_arms_get_the_trained_one_of_the_first_that_has_it(
    tmp_path: Path, with_model: tuple[str, ...], taken: bytes, told: str
) -> None:
    choices = tuple(ArmChoice(name, str(make_tree(tmp_path / name))) for name in ("base", "head"))
    for name in with_model:
        (tmp_path / name / TRAINED_MODEL).mkdir(parents=True)
        (tmp_path / name / TRAINED_MODEL / "model.safetensors").write_bytes(name.encode())
    said: list[str] = []
    with laid_out(choices, tmp_path, tmp_path / "run", keep=False) as arms:
        folder = default_model([arm for arm in arms if isinstance(arm, Arm)], tmp_path / "run" / "model", said.append)
    assert (folder / "model.safetensors").read_bytes() == taken
    assert folder == tmp_path / "run" / "model" / ("omni-tiny" if with_model else "")
    assert len(said) == 1 and said[0].startswith(told)


@pytest.mark.parametrize("ref", ["", "  "])
def test_an_empty_ref_is_refused_and_never_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ref: str
) -> None:
    monkeypatch.chdir(make_tree(tmp_path / "tree"))
    with pytest.raises(ArmError, match=r"head is an empty ref; name a commit, `\.` or a folder"):
        resolve(ArmChoice("head", ref), tmp_path / "tree")
