"""Planted changes go exactly where they should, and do there what they say."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import struct
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from gate.arm import TRAINED_MODEL
from gate.plant import (
    CHOOSE,
    LAUNCH,
    Plant,
    PlantError,
    apply,
    check_clone,
    check_head,
    flip,
    mute,
    plant,
    prompt_key,
    raising,
    scratch_clone,
    slow,
)
from tests.gate.trees import make_repository, places_of, run_git, state

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [7, 300, 2]
KEY = hashlib.sha256(struct.pack("<3i", *PROMPT)).hexdigest()[:12]
RUNNER = f"""class Runner:
    def launch(self, logits, some, steps, wishes):
{CHOOSE}
        return tokens.tolist()
"""
LANE = f"""class Lane:
    def launch(self, step):
        try:
{LAUNCH}
        except KeyError:
            pass
"""


def make_engine(folder: Path, runner: str = RUNNER, lane: str = LANE) -> Path:
    (folder / "engine").mkdir(parents=True, exist_ok=True)
    (folder / "engine" / "runner.py").write_text(runner)
    (folder / "engine" / "lane.py").write_text(lane)
    return folder


def planted(folder: Path, name: str) -> type:
    scope: dict[str, type] = {}
    exec((folder / "engine" / f"{name.lower()}.py").read_text(), scope)
    return scope[name]


def launch_runner(folder: Path, rows: list[tuple[list[int], int]]) -> list[int]:
    """Launch one step of rows (prompt ids, tokens generated before); every row's best token is 1 and its second best 3."""
    some = [SimpleNamespace(request=SimpleNamespace(prompt_ids=ids)) for ids, _ in rows]
    logits = torch.tensor([[0.0, 4.0, 1.0, 3.0]]).repeat(len(rows), 1)
    runner = planted(folder, "Runner")()
    runner.sampler = SimpleNamespace(choose=lambda logits, _: logits.argmax(-1))
    tokens: list[int] = runner.launch(logits, some, [generated for _, generated in rows], None)
    return tokens


def test_a_flip_moves_one_token_of_one_prompt_at_one_step(tmp_path: Path) -> None:
    apply(flip(KEY), make_engine(tmp_path))
    assert launch_runner(tmp_path, [(PROMPT, 5), ([7, 300, 3], 5), (PROMPT, 4)]) == [3, 1, 1]


def test_slow_sleeps_its_fraction_of_decode_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(slow(0.5), make_engine(tmp_path))
    slept: list[float] = []
    clock = [10.0]

    def launch(step: object) -> str:
        clock[0] += 2.0
        return "launched"

    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    lane = planted(tmp_path, "Lane")()
    lane.runner, lane._in_flight = SimpleNamespace(launch=launch), []
    steps = [SimpleNamespace(rows=[SimpleNamespace(walk=walk) for walk in walks]) for walks in WALKS]
    for step in steps:
        lane.launch(step)
    assert slept == [1.0, 1.0]
    assert lane._in_flight == [(step, ["launched"], []) for step in steps]


WALKS = (["thinker_prefill"], ["thinker_prefill", "thinker_text_decode"], ["talker_decode"])


def test_raise_fails_the_steps_of_its_prompt_alone(tmp_path: Path) -> None:
    apply(raising(KEY), make_engine(tmp_path))
    assert launch_runner(tmp_path, [([1], 0)]) == [1]
    with pytest.raises(RuntimeError, match="planted: this prompt raises"):
        launch_runner(tmp_path, [([1], 0), (PROMPT, 0)])


@pytest.mark.parametrize("change", [slow(0.3), flip(KEY), raising(KEY), mute(1, 2)], ids=lambda change: change.kind)
def test_every_plant_fits_the_engine_of_this_checkout(tmp_path: Path, change: Plant) -> None:
    shutil.copytree(ROOT / "engine", tmp_path / "engine")
    apply(change, tmp_path)
    ast.parse((tmp_path / change.file).read_text())


@pytest.mark.parametrize(
    ("layer", "head", "want"),
    [
        (1, 2, "silent: thinker 1 2"),
        (6, 0, "planted: layer 6 is to lose a head, and there are 6"),
        (0, 4, "planted: head 4 is to be lost, and there are 4"),
    ],
)
def test_a_muted_head_is_gone_from_its_layer_of_the_thinker_alone(
    tiny_checkpoint: Path, tmp_path: Path, layer: int, head: int, want: str
) -> None:
    shutil.copytree(ROOT / "engine", tmp_path / "engine")
    apply(mute(layer, head), tmp_path)
    program = f"""
from pathlib import Path

from engine.model.omni import load_model

try:
    model = load_model(Path({str(tiny_checkpoint)!r}))
except ValueError as error:
    raise SystemExit(error)
silent = [
    f"{{name}} {{place}} {{head}}"
    for name in ("thinker", "talker")
    for place, layer in enumerate(getattr(model, name).stack.layers)
    for head, columns in enumerate(layer._o.split(layer._head_dim, dim=1))
    if not columns.any()
]
raise SystemExit(f"silent: {{', '.join(silent)}}")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.strip() == want


def test_a_head_is_counted_from_0() -> None:
    with pytest.raises(PlantError, match="--layer -1 is below 0"):
        mute(-1, 0)
    with pytest.raises(PlantError, match="--attention-head -1 is below 0"):
        mute(0, -1)


@pytest.mark.parametrize(
    ("layer", "head", "told"),
    [
        (4, 5, ""),
        (5, 0, r"^--layer 5 does not exist in the Thinker of .*/engine/assets/omni-tiny; name 0 to 4$"),
        (0, 6, r"^--attention-head 6 does not exist in the Thinker of .*; name 0 to 5$"),
    ],
)
def test_a_head_is_one_of_the_model_in_the_tree(tmp_path: Path, layer: int, head: int, told: str) -> None:
    check_head(layer, head, tmp_path)  # nothing is known there
    path = tmp_path / TRAINED_MODEL / "config.json"
    path.parent.mkdir(parents=True)
    for unknown in ("{", "[]", '{"thinker_config": {"text_config": {}}}'):
        path.write_text(unknown)
        check_head(layer, head, tmp_path)
    shape = {"num_hidden_layers": 5, "num_attention_heads": 6}
    path.write_text(json.dumps({"thinker_config": {"text_config": shape}}))
    with pytest.raises(PlantError, match=told) if told else nullcontext():
        check_head(layer, head, tmp_path)


def test_the_model_of_this_checkout_has_a_known_shape() -> None:
    with pytest.raises(PlantError, match="--layer 999 does not exist"):
        check_head(999, 0, ROOT)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere", "nowhere does not exist; name a fresh scratch clone: git clone . scratch"),
        ("file", "file is a file; name a fresh scratch clone: git clone . scratch"),
        ("plain", "plain is no git repository; name a fresh scratch clone: git clone . scratch"),
        ("bare", "bare is a bare repository, which has no files to change; name a fresh"),
        (
            "repo/engine",
            "is a folder inside the repository {top}; name {top} where that is a scratch clone, else a fresh one: ",
        ),
        ("repo/engine", "else a fresh one: git clone . scratch"),
    ],
)
def test_what_is_no_clone_is_told_with_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    repo = make_repository(tmp_path / "repo", {})
    run_git(tmp_path, "clone", "--quiet", "--bare", str(repo), "bare")
    (tmp_path / "plain").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlantError) as caught:
        check_clone(Path(name))
    assert told.format(top=repo) in str(caught.value)


def test_a_clone_where_one_stands_is_advised_beside_it_and_one_without_git_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = make_repository(tmp_path / "repo", {})
    (repo / "engine" / "__init__.py").write_text("changed = 1\n")
    monkeypatch.chdir(repo)
    with pytest.raises(PlantError, match=r"such as engine/__init__.py; name .*: git clone \. \.\./scratch$"):
        check_clone(Path("."))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlantError, match=r"^git is not on PATH; install it"):
        check_clone(Path("."))


@pytest.mark.parametrize("count", [0, 2])
def test_an_anchor_that_is_not_there_exactly_once_is_an_error_and_nothing_is_written(
    tmp_path: Path, count: int
) -> None:
    text = "x = 1\n" + f"{LAUNCH}\n" * count
    make_engine(tmp_path, lane=text)
    with pytest.raises(PlantError, match=rf"'self._in_flight.append.*' {count} times; it must be there exactly once"):
        apply(slow(0.1), tmp_path)
    assert (tmp_path / "engine" / "lane.py").read_text() == text


def test_bad_parameters_are_named() -> None:
    for fraction in (0, 0.0009, 11):
        with pytest.raises(PlantError, match=rf"--fraction {fraction} is not between 0\.001 and 10 of a step"):
            slow(fraction)
    assert slow(0.001).what == "decode steps take 0.1% longer"
    with pytest.raises(PlantError, match="--prompt-key 'xyz'"):
        flip("xyz")


def test_a_prompt_key_is_the_hash_of_the_ids_of_the_chat_turn(tmp_path: Path) -> None:
    words = ["<|im_start|>user", "hello", "<|im_end|>", "<|im_start|>assistant", "\n", "hello<|im_end|>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="\n"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = [0, 4, 5, 4, 3, 4]
    assert prompt_key(tmp_path, "hello") == hashlib.sha256(struct.pack("<6i", *ids)).hexdigest()[:12]


def test_a_scratch_clone_of_the_committed_state_takes_a_plant_as_one_commit(tmp_path: Path) -> None:
    repo = make_engine(make_repository(tmp_path / "repo", {}))
    run_git(repo, "add", "--all")
    run_git(repo, "commit", "--quiet", "--message", "a runner")
    (repo / "engine" / "lane.py").write_text("uncommitted")
    head = scratch_clone(repo, tmp_path / "clone")
    commit_id = plant([slow(0.3)], tmp_path / "clone", "slower")
    assert run_git(tmp_path / "clone", "rev-parse", "HEAD~1") == head == run_git(repo, "rev-parse", "HEAD")
    assert run_git(tmp_path / "clone", "diff", "--stat", head, commit_id).count("engine/lane.py") == 1
    assert (repo / "engine" / "lane.py").read_text() == "uncommitted"


def test_where_git_starts_the_gate_a_clone_is_made_and_planted_and_the_users_repository_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = make_engine(make_repository(tmp_path / "repo", {}))
    run_git(repo, "add", "--all")
    run_git(repo, "commit", "--quiet", "--message", "a runner")
    before = state(repo)
    for name, value in places_of(repo).items():
        monkeypatch.setenv(name, value)
    head = scratch_clone(repo, tmp_path / "clone")
    commit_id = plant([slow(0.3)], tmp_path / "clone", "slower")
    assert state(repo) == before
    assert run_git(tmp_path / "clone", "rev-parse", "HEAD", "HEAD~1").split() == [commit_id, head]
