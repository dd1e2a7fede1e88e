"""The command line: exit codes, one-sentence errors, interruption, and what is printed."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from gate import cli
from gate.arm import TRAINED_MODEL
from gate.cli import _asked, _first_question, app, called, first_part, found_plants
from gate.plant import ATTENTION_OUTPUT, CHOOSE, LAUNCH, PlantError
from gate.record import RunData
from gate.rundir import RunDir, existing
from gate.verdict import compare
from gate.workload import default_root, load_cells, load_prompts, load_questions
from tests.gate.runs import make_run
from tests.gate.test_report import planted_run
from tests.gate.trees import make_repository, make_tree, make_workloads, run_git
from tests.server.serving import heed_interrupts

ROOT = Path(__file__).resolve().parents[2]
GATE = [sys.executable, "-m", "gate"]
OURS = {**os.environ, "PYTHONPATH": str(ROOT)}


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two equal commits as working folder, with `../workloads` beside it."""
    make_workloads(tmp_path / "workloads")
    monkeypatch.chdir(make_repository(tmp_path / "repo", {}, {}))
    return tmp_path


def quick(*words: str) -> list[str]:
    return [*words, "--workloads", "../workloads", "--sessions", "1", "--cells", "T2T@2"]


def test_compare_prints_the_reports_path_headline_and_first_table_and_report_says_the_same(place: Path) -> None:
    done = call("compare", "HEAD~1", "HEAD", *quick("--run", "../run"))
    assert done.exit_code in (0, 2), done.output
    report = place / "run" / "report.md"
    assert f"report: {report}" in done.stdout
    assert first_part(report.read_text()) in done.stdout
    assert "| T2T@2" in done.stdout
    assert "price: 2 sessions" in done.stderr
    before = report.read_bytes()
    report.unlink()
    again = call("report", "../run")
    assert (again.exit_code, report.read_bytes()) == (done.exit_code, before)


def test_the_run_directory_is_named_by_time_and_arms(place: Path) -> None:
    assert call("plan", "HEAD~1", ".", *quick()).exit_code == 0
    (folder,) = (place / "repo" / "runs").iterdir()
    assert folder.name[8] == "T" and folder.name.endswith("Z-plan-HEAD~1-tree")


def test_commands_are_printed_as_the_gate_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "some where" / "bin" / "gate"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert called(str(tool), tmp_path) == "'some where/bin/gate'"
    assert called("some where/bin/gate", tmp_path) == "'some where/bin/gate'"
    assert called(str(tool), tool.parent) == "./gate"
    assert called(str(tool), Path("/usr")) == f"'{tool}'"
    monkeypatch.setenv("PATH", str(tool.parent))
    assert called(str(tool), tmp_path) == "gate"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert called("/somewhere/gate/__main__.py", tmp_path) == "./python -m gate"
    assert called("/somewhere/gate/cli.py", tmp_path) == "./python -m gate"  # `make demo`


def test_the_first_part_of_a_report_is_its_headline_and_first_table() -> None:
    text = "### all well\n\nwords\n\n| a |\n|---|\n| 1 |\n\n| second |\n"
    assert first_part(text) == "### all well\n\n| a |\n|---|\n| 1 |"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["compare", "no-such", "HEAD"], "gate: base 'no-such' is neither a commit of"),
        (["compare", "HEAD"], "1 arms are named by BASE and HEAD where 2 are wanted"),
        (["compare", "HEAD", "HEAD", "--base-dir", "."], "2 arms are named by BASE and HEAD where 1 are wanted"),
        (["compare", "HEAD", "HEAD", "--set", "fast"], "--set 'fast' does not exist; there are demo, quick"),
        (["compare", "HEAD", "HEAD", "--cells", "X@1"], "--cells 'X@1' does not exist"),
        (["compare", "HEAD", "HEAD", "--cells", "T2T@1,T2T@2,T2T@1"], "--cells names T2T@1 2 times"),
        (["compare", "", "HEAD"], "base is an empty ref; name a commit"),
        (["compare", "HEAD", "HEAD", "--model", "no/where"], "no/where is not a folder"),
        (
            ["compare", "HEAD", "HEAD", "--set", "demo", "--librispeech", "/no/where"],
            "--librispeech /no/where is not a folder",
        ),
        (["compare", "HEAD", "HEAD", "--head-dir", "engine/server"], "2 arms are named"),
        (["compare", "HEAD", "--head-dir", "engine/server"], "holds no engine/ package"),
        (["compare", "HEAD", "HEAD", "--base-env", "X"], "--base-env 'X' is not of the form NAME=VALUE"),
        (["compare", "HEAD", "HEAD", "--head-args", "'"], "is not quoted as a shell wants it"),
        (["compare", "HEAD", "HEAD", "--run", "."], "exists and is not an empty folder"),
        (["compare", "HEAD", "HEAD", "--sessions", "0"], "Invalid value for '--sessions'"),
        (["compare", "HEAD", "HEAD", "--colour", "red"], "No such option"),
        (["compare", "HEAD", "ftp://x"], "head 'ftp://x' is no server's address"),
        (["compare", "HEAD", "--head-command", "serve"], "head's command 'serve' does not say where its port goes"),
        (
            ["compare", "HEAD", "--head-command", "x", "--head-dir", "."],
            "--head-dir and --head-command name head twice",
        ),
        (
            ["compare", "HEAD", "HEAD", "--door", "front"],
            "--door 'front' does not exist; there are auto, generate, openai",
        ),
        (["run", "HEAD", "--args", "'"], '--args "\'" is not quoted as a shell wants it'),
        (["compere"], "No such command"),
        (["report", "nowhere"], "holds no plan.json"),
        (["run", "no-such"], "arm 'no-such' is neither a commit"),
        (["plant", "melt", "."], "KIND 'melt' does not exist; there are slow, flip, raise, mute"),
        (["plant", "slow", "."], "engine/lane.py does not exist"),
        (["plant", "flip", "nowhere"], "gate: nowhere does not exist; name a fresh scratch clone"),
        (
            ["plant", "flip", ".", "--prompt", "q31", "--prompt-key", "000000000000"],
            "--prompt-key and --prompt name the prompt twice; leave one out",
        ),
        (["plant", "raise", ".", "--prompt-key", ""], "--prompt-key '' is not 12 lower-case hex digits"),
        (
            ["plant", "mute", ".", "--prompt", "p00"],
            "--prompt p00 is not read by mute, which reads --layer, --attention-head",
        ),
        (["plant", "flip", ".", "--layer", "0"], "--layer 0 is not read by flip, which reads --prompt-key, --prompt"),
    ],
)
def test_a_usage_error_is_a_sentence_and_64(place: Path, words: list[str], told: str) -> None:
    own = ["--workloads", "../workloads"] if words[0] == "compare" else []
    done = call(*words, *own)
    assert done.exit_code == 64, done.output
    assert told in done.output
    assert done.output.startswith("gate: ") and done.output.count("\n") == 1
    assert not (place / "repo" / "runs").exists()


def test_the_process_itself_ends_with_64_on_a_usage_error() -> None:
    done = subprocess.run([sys.executable, "-m", "gate", "compare", "--what"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 64 and done.stderr.startswith("gate: No such option: --what")
    assert done.stderr.endswith("; see python -m gate compare --help\n")


def test_a_failure_of_the_gate_itself_is_a_traceback_and_70_and_never_the_1_of_a_regression(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        return str({}["absent"])

    monkeypatch.setattr(cli, "first_part", broken)
    assert call("compare", "HEAD~1", "HEAD", *quick("--run", "../run")).exit_code == 70
    done = call("report", "../run")
    assert done.exit_code == 70
    assert "KeyError: 'absent'" in done.stderr and "in broken" in done.stderr
    assert done.stderr.splitlines()[-1] == "gate: internal error (KeyError); please report the lines above"


def keep(run: RunData, path: Path) -> RunDir:
    """Put a run that was made by hand on disk."""
    folder = RunDir(path)
    path.mkdir()
    folder.write_plan(run.plan, run.items)
    for session in run.sessions:
        folder.write_session(session)
        folder.append_records(session.id, [record for record in run.records if record.session == session.id])
    return folder


@pytest.mark.parametrize(
    ("words", "code"),
    [(["report", "run"], 1), (["--help"], 0), (["report", "--help"], 0), (["report", "nowhere"], 64)],
)
def test_a_reader_that_goes_away_changes_no_exit_code(tmp_path: Path, words: list[str], code: int) -> None:
    keep(planted_run(), tmp_path / "run")
    for errors in (subprocess.PIPE, subprocess.STDOUT):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            GATE + words, cwd=tmp_path, env=OURS, stdout=writer, stderr=errors, text=True, check=False
        )
        os.close(writer)
        assert done.returncode == code, done.stderr
        assert "ipe" not in (done.stderr or "") and "Traceback" not in (done.stderr or "")
    assert (tmp_path / "run" / "report.md").is_file() == (words == ["report", "run"])


@pytest.mark.parametrize("words", [["report", "run"], ["--help"]], ids=" ".join)
def test_an_output_that_is_full_is_a_sentence_and_70(tmp_path: Path, words: list[str]) -> None:
    keep(planted_run(), tmp_path / "run")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            GATE + words, cwd=tmp_path, env=OURS, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (70, "gate: the disk is full: standard output\n")


@pytest.mark.parametrize("module", ["typer", "gate.run", "no longer"])
def test_ctrl_c_is_a_line_and_130_also_while_the_gate_still_loads(module: str) -> None:
    program = f"""
import sys

class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
from gate import cli

def interrupted():
    raise KeyboardInterrupt

cli.default_root = cli.Path.cwd = interrupted
sys.argv[1:] = ["compare", "HEAD", "HEAD", "--run", "x"]
cli.main()
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=ROOT, env=OURS, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "gate: interrupted\n")


@pytest.mark.parametrize(
    ("base", "head", "told"),
    [
        ([2000, 2101], [2091, 2200], " About 8 sessions an arm would settle 1 of 1 open cell: gate demo --sessions 8"),
        ([2000, 2901], [2491, 3300], " Repeat it on a quiet machine: gate demo"),  # 17 would
        ([2000, 2001], [2001, 2000], " Repeat it on a quiet machine: gate demo"),  # none is open, and nothing was found
    ],
)
def test_the_demo_says_what_was_found_and_what_would_settle_the_rest(
    base: list[int], head: list[int], told: str
) -> None:
    assert found_plants(compare(planted_run())) == (
        "planted: slower decoding: found in 2 of 4 cells; flipped token: found."
    )
    assert found_plants(compare(make_run({"base": base, "head": head}))) == (
        "planted: slower decoding: not proven; this machine was too busy for so few sessions; "
        f"flipped token: not found.{told}"
    )


def test_every_command_has_help_with_what_it_does() -> None:
    for name in ("compare", "plan", "run", "report", "plant", "demo"):
        done = call(name, "--help")
        assert done.exit_code == 0 and "Usage" in done.output
    assert "gate compare main HEAD" in call("compare", "--help").output


@pytest.mark.parametrize("command", ["compare", "plan", "run"])
def test_help_lists_the_sets_that_there_are(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no name is cut in two
    told = " ".join(call(command, "--help").output.replace("│", " ").split())
    assert f"workloads/cells.toml: {', '.join(sorted(load_cells(default_root())))}." in told
    monkeypatch.setattr(cli, "default_root", lambda: Path("/no/where"))
    assert cli._set_names() == "a wrong name lists them"


@pytest.mark.parametrize(
    ("command", "folder"),
    [("compare", "TIME-BASE-HEAD"), ("plan", "TIME-plan-BASE-HEAD"), ("run", "TIME-run-REF"), ("demo", "demo-TIME")],
)
def test_help_says_what_the_run_directory_is_called(command: str, folder: str) -> None:
    assert f"runs/{folder}." in call(command, "--help").output


def test_a_refused_server_is_a_sentence_and_3(place: Path) -> None:
    other = make_tree(place / "other", source_digest="f" * 64)
    done = call("compare", "HEAD", *quick("--head-dir", str(other), "--seed", "1"))
    assert done.exit_code == 3
    assert "gate: refused: head: the server runs source ffffffffffff" in done.stderr


def test_moved_tokens_are_1_and_expected_ones_are_not_also_for_report(place: Path) -> None:
    flipped = make_tree(place / "flipped", flip={"marker": "number", "step": 5})
    words = [
        "compare",
        "HEAD",
        "--head-dir",
        str(flipped),
        "--workloads",
        "../workloads",
        "--sessions",
        "2",
        "--cells",
        "T2T@1",
    ]
    assert call(*words, "--run", "../one").exit_code == 1
    expected = call(*words, "--run", "../two", "--expect-token-changes")
    assert expected.exit_code in (0, 2), expected.output
    assert call("report", "../two").exit_code == expected.exit_code
    assert call("report", "../one").exit_code == 1


def test_run_measures_one_arm_and_prints_its_metrics_and_what_makes_the_report(place: Path) -> None:
    done = call("run", "HEAD", *quick("--run", "../one"))
    assert done.exit_code == 0, done.output
    assert "| cell | metric | 01-arm |" in done.stdout
    assert "| T2T@2 | failed (requests) | 0 |" in done.stdout
    assert "what went wrong" not in done.stdout
    assert done.stdout.endswith(f"\n\nmake its report, with the word error rates: gate report {place / 'one'}\n")
    assert call("report", str(place / "one")).exit_code == 0
    assert (place / "one" / "report.md").is_file()


@pytest.mark.parametrize(
    ("behaviour", "code", "told"),
    [
        (
            {"refuse_on": "number 1"},
            1,
            [
                "| T2T@2 | failed (requests) | 1 |",
                "\nT2T@2: 1 request failed: HTTP 400: refused (text): this prompt is refused\n",
            ],
        ),
        ({"short_by": 3}, 3, ["\nT2T@2: 01-arm: 4 of 4 requests gave short output (first: request 0,"]),
        (
            {"refuse_on": "number"},
            3,
            [
                "| T2T@2 | failed (requests) | 4 |",
                "\nT2T@2: 4 requests failed: HTTP 400: refused (text): this prompt is refused\n",
            ],
        ),
        (
            {"exit_at_start": 9},
            3,
            [
                "\n01-arm: the server ended with exit code 9 while starting\n",
                "\nT2T@2: 4 requests failed: not sent: the server ended with exit code 9 while starting\n",
            ],
        ),
    ],
)
def test_a_run_says_why_requests_failed_and_ends_with_1_or_with_3_where_a_cell_has_no_sound_one(
    place: Path, behaviour: dict[str, object], code: int, told: list[str]
) -> None:
    tree = make_tree(place / "faulty", **behaviour)
    done = call("run", str(tree), *quick("--run", "../one"))
    assert done.exit_code == code, done.output
    assert "\nwhat went wrong:\n" in done.stdout
    assert [words for words in told if words not in done.stdout] == []
    assert call("report", "../one").exit_code == code


def test_a_stopped_run_of_one_arm_is_2_and_names_what_finishes_it(place: Path) -> None:
    done = call("run", "HEAD", *quick("--run", "../one", "--stop-after", "0s"))
    assert done.exit_code == 2, done.output
    assert "| T2T@2 | not finished |" in done.stdout
    assert f"\nfinish it: gate compare --resume {place / 'one'}\n" in done.stdout
    assert call("compare", "--resume", "../one").exit_code == 0
    assert "Exit codes, the first that holds" in call("run", "--help").output


def test_a_run_stopped_in_time_goes_on_with_resume(place: Path) -> None:
    stopped = call("compare", "HEAD~1", "HEAD", *quick("--run", "../run", "--stop-after", "0s"))
    assert "stopped by --stop-after" in stopped.stderr
    assert stopped.exit_code == 2, stopped.output
    assert "### ⚖️ gate: unfinished, 0 of 2 planned sessions measured" in stopped.stdout
    assert stopped.stdout.endswith(f"\nfinish it: gate compare --resume {place / 'run'}\n")
    assert call("report", "../run").stdout == stopped.stdout
    resumed = call("compare", "--resume", "../run")
    assert resumed.exit_code in (0, 2), resumed.output
    assert "Requests issued 8, ok 8" in (place / "run" / "report.md").read_text()
    both = call("compare", "HEAD", "--resume", "../run")
    assert both.exit_code == 64 and "--resume takes its arms from the run" in both.output
    assert call("compare", "HEAD", "HEAD", "--stop-after", "soon").exit_code == 64


def test_a_full_disk_is_a_sentence_that_says_what_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "records.jsonl")

    monkeypatch.setattr(RunDir, "append_records", full)
    done = call("compare", "HEAD", "HEAD", *quick("--run", "../run"))
    assert done.exit_code == 70
    assert "gate: the disk is full: records.jsonl; what was measured is kept: gate report ../run" in done.stderr
    assert run_git(place / "repo", "worktree", "list").count("\n") == 0


def test_a_full_disk_is_where_a_copy_was_written_and_not_where_it_was_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "read.safetensors", None, "written.safetensors")

    monkeypatch.setattr("shutil.copyfile", full)
    monkeypatch.setattr(RunDir, "append_records", full)
    done = call("compare", "HEAD", "HEAD", *quick("--run", "../run"))
    assert done.exit_code == 70
    assert "gate: the disk is full: written.safetensors; " in done.stderr


def test_a_disk_that_is_full_for_git_is_70_and_names_the_tree(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = shutil.which("git")
    wrapper = place / "bin" / "git"
    wrapper.parent.mkdir()
    full = "*worktree*add*) echo 'fatal: write error: No space left on device' >&2; exit 128;;"
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in {full} esac\nexec {git} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    done = call("compare", "HEAD", "HEAD", *quick("--run", "../run"))
    assert done.exit_code == 70, done.output
    tree = place / "run" / "arms" / "base"
    assert f"gate: the disk is full: {tree}; go on: gate compare --resume ../run\n" in done.stderr


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        ("check", ""),
        ("prepare", "; go on: gate compare --resume ../run"),
        ("_run_sessions", "; what was measured is kept: gate report ../run, or go on: gate compare --resume ../run"),
    ],
)
def test_an_interrupted_run_names_what_works_with_what_is_there(
    place: Path, monkeypatch: pytest.MonkeyPatch, step: str, kept: str
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"gate.run.{step}", interrupted)
        done = call("compare", "HEAD", "HEAD", *quick("--run", "../run"))
    assert done.exit_code == 130 and done.stderr.endswith(f"gate: interrupted{kept}\n")
    if "report" in kept:
        assert call("report", "../run").exit_code == 2
    if kept:
        assert call("compare", "--resume", "../run").exit_code in (0, 2)


@pytest.mark.parametrize("step", ["prepare", "_run_sessions"])
def test_an_interrupted_demo_is_begun_again_as_the_gate_was_called(
    place: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    add_anchors(place / "repo")
    monkeypatch.setattr(f"gate.run.{step}", interrupted)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "gate" / "__main__.py")])
    done = call("demo", "--run", "../demo", "--sessions", "2", "--seed", "7")
    assert done.exit_code == 130
    again = called(sys.argv[0], Path.cwd())
    assert done.stderr.endswith(f" begin again: {again} demo --sessions 2 --seed 7\n") and again.endswith("-m gate")
    assert (" gate report " in done.stderr.replace("-m gate", "gate")) == (step == "_run_sessions")


@pytest.mark.parametrize("hook", ["pre-commit", "post-commit"])
def test_a_hook_may_plan_a_comparison_and_the_commit_that_runs_it_is_what_it_was(place: Path, hook: str) -> None:
    repo, script = place / "repo", place / "repo" / ".git" / "hooks" / hook
    add_anchors(repo)
    run_git(place, "clone", "--quiet", "repo", "clone")
    planted = shlex.join([*GATE, "plant", "slow", "../clone"])
    command = shlex.join([*GATE, "plan", "HEAD~1", "HEAD", *quick("--run", "../run")])
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!/bin/sh\nexport PYTHONPATH={ROOT}\n{command} && {planted}\n")
    script.chmod(0o755)
    before = run_git(repo, "rev-parse", "HEAD")
    (repo / ".gitignore").write_text("__pycache__/\nruns/\nother/\n")
    run_git(repo, "commit", "--quiet", "--all", "--message", "mine")
    assert run_git(repo, "log", "--format=%s", f"{before}..") == "mine"
    assert run_git(repo, "show", "--format=", "--name-only", "HEAD") == ".gitignore"
    assert run_git(repo, "status", "--porcelain") == ""
    assert run_git(place / "clone", "log", "-1", "--format=%s").startswith("planted: ")
    commits = [arm.commit for arm in existing(place / "run").load().plan.arms]
    last = before if hook == "pre-commit" else run_git(repo, "rev-parse", "HEAD")
    assert commits == [run_git(repo, "rev-parse", f"{last}~1"), last]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_server_and_no_worktree_and_keeps_its_records(
    place: Path, number: signal.Signals
) -> None:
    repo, log = place / "repo", place / "log"
    words = [
        "compare",
        "HEAD",
        "HEAD",
        "--workloads",
        "../workloads",
        "--sessions",
        "3",
        "--cells",
        "T2T@2",
        "--run",
        "../run",
    ]
    environment = {**os.environ, "FAKE_LOG": str(log), "PYTHONPATH": str(ROOT)}
    gate = subprocess.Popen(
        [sys.executable, "-m", "gate", *words],
        cwd=repo,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    wait_for(lambda: log.exists() and log.read_text().count("boot") == 2)
    gate.send_signal(number)
    _, said = gate.communicate(timeout=30)
    assert gate.returncode == 130, said
    again = called(str(ROOT / "gate" / "__main__.py"), repo)
    told = f"{again} report ../run, or go on: {again} compare --resume ../run"
    assert f"gate: interrupted; what was measured is kept: {told}" in said
    assert run_git(repo, "worktree", "list").count("\n") == 0
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(place / "run" / "model") in (p.info["cmdline"] or [])
    ]
    assert (
        len((place / "run" / "sessions").glob("01-*").__next__().joinpath("records.jsonl").read_text().splitlines())
        == 4
    )
    assert call("report", "../run").exit_code in (0, 2, 3)


def wait_for(ready: object, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def add_anchors(repo: Path) -> None:
    """Give a fake repository the lines that plants hook onto; the fake server never runs them."""
    (repo / "engine" / "lane.py").write_text(f"class Lane:\n    def launch(self, step):\n        if step:\n{LAUNCH}\n")
    (repo / "engine" / "runner.py").write_text(f"class Runner:\n    def launch(self, step):\n{CHOOSE}\n")
    (repo / "engine" / "model").mkdir()
    (repo / "engine" / "model" / "layers.py").write_text(f"class Layer:\n    def __init__(self):\n{ATTENTION_OUTPUT}\n")
    run_git(repo, "add", "--all")
    run_git(repo, "commit", "--quiet", "--message", "anchors")


def test_plant_commits_its_change_to_a_clone(place: Path) -> None:
    repo = place / "repo"
    add_anchors(repo)
    slow = call("plant", "slow", str(repo), "--fraction", "0.1")
    assert slow.exit_code == 0, slow.output
    assert "time.sleep(0.1 *" in (repo / "engine" / "lane.py").read_text()
    assert run_git(repo, "log", "-1", "--format=%s") == "planted: decode steps take 10% longer"
    commit = run_git(repo, "rev-parse", "HEAD")[:12]
    told = f"planted slow: decode steps take 10% longer; committed {commit} to {repo} (branch main)\n"
    assert slow.output == told
    run_git(repo, "checkout", "--quiet", "--detach")
    flip = call("plant", "flip", str(repo), "--prompt-key", "0123456789ab")
    assert flip.exit_code == 0 and "!= '0123456789ab'" in (repo / "engine" / "runner.py").read_text()
    assert f" 0123456789ab flips at step 5; committed {run_git(repo, 'rev-parse', 'HEAD')[:12]} to " in flip.output
    assert flip.output.endswith(f"{repo} (detached)\n")
    mute = call("plant", "mute", str(repo), "--layer", "1", "--attention-head", "2")
    assert mute.exit_code == 0 and 'name == "thinker.layers.1"' in (repo / "engine" / "model" / "layers.py").read_text()
    (repo / TRAINED_MODEL).mkdir(parents=True)
    shape = '{"thinker_config": {"text_config": {"num_hidden_layers": 5, "num_attention_heads": 6}}}'
    (repo / TRAINED_MODEL / "config.json").write_text(shape)
    far = call("plant", "mute", str(repo), "--layer", "999")
    assert far.exit_code == 64 and "--layer 999 does not exist in the Thinker of" in far.output
    again = call("plant", "slow", str(repo))
    assert again.exit_code == 64 and "0 times; it must be there exactly once" in again.output


def test_a_plant_at_a_prompt_is_told_by_its_id_and_its_key(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_anchors(place / "repo")
    monkeypatch.setattr(cli, "_key_of", lambda folder, text: "0123456789ab")
    flip = call("plant", "flip", str(place / "repo"), "--prompt", "q03")
    assert flip.output.startswith("planted flip: q03 (0123456789ab) flips at step 5; committed ")


def test_a_plant_commits_nothing_but_itself(place: Path) -> None:
    repo = place / "repo"
    add_anchors(repo)
    before = run_git(repo, "rev-parse", "HEAD")
    outside = call("plant", "slow", str(place))
    assert (
        outside.exit_code == 64 and "is no git repository; name a fresh scratch clone: git clone . " in outside.output
    )
    inside = call("plant", "slow", str(repo / "engine"))
    assert inside.exit_code == 64 and "is a folder inside the repository" in inside.output
    (repo / "engine" / "runner.py").write_text("# half done")
    dirty = call("plant", "slow", str(repo))
    assert dirty.exit_code == 64 and "changes that are not committed, such as engine/runner.py" in dirty.output
    run_git(repo, "checkout", "--", "engine/runner.py")
    (repo / ".git" / "index.lock").touch()
    locked = call("plant", "slow", str(repo))
    assert locked.exit_code == 64 and "git commit failed" in locked.output and "index.lock" in locked.output
    (repo / ".git" / "index.lock").unlink()
    assert run_git(repo, "rev-parse", "HEAD") == before
    assert run_git(repo, "status", "--porcelain", "--untracked-files=no") == ""


def test_a_plant_may_name_a_prompt_or_a_question_and_takes_the_first_question_otherwise() -> None:
    assert _asked("p00").text == load_prompts(default_root()).items[0].text
    assert _asked("q00").text == load_questions(default_root()).items[0].text
    assert _asked(None) == _first_question(0)
    with pytest.raises(PlantError, match=r"--prompt 'r00' is no id of workloads/questions.jsonl or"):
        _asked("r00")


def test_the_demo_compares_a_planted_clone_of_a_depth_one_clone_and_leaves_the_tree_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = make_repository(tmp_path / "origin", {}, {"token_ms": 0.1})
    add_anchors(origin)
    run_git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{origin}", "shallow")
    monkeypatch.chdir(tmp_path / "shallow")
    (tmp_path / "shallow" / "note.txt").write_text("not committed")
    done = call("demo", "--run", "runs/demo", "--sessions", "1")
    assert done.exit_code == 0, done.output
    assert "has changes that are not committed" in done.stdout
    assert f"report: {tmp_path / 'shallow' / 'runs' / 'demo' / 'report.md'}" in done.stdout
    assert "| A2S@1" in done.stdout
    plan = (tmp_path / "shallow" / "runs" / "demo" / "plan.json").read_text()
    assert run_git(origin, "rev-parse", "HEAD") in plan
    assert run_git(tmp_path / "shallow", "status", "--porcelain") == "?? note.txt"
    assert run_git(tmp_path / "shallow", "worktree", "list").count("\n") == 0
