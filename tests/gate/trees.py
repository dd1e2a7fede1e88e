"""Scratch trees and repositories whose engine is the fake server, and small workloads, for the gate's tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import soundfile

from gate import process

FAKE = Path(__file__).with_name("fake_server.py")


def make_tree(folder: Path, **behaviour: object) -> Path:
    """A folder whose `engine.server.cli` is the fake server, behaving as asked."""
    server = folder / "engine" / "server"
    server.mkdir(parents=True, exist_ok=True)
    shutil.copy(FAKE, server / "cli.py")
    (folder / "engine" / "__init__.py").write_text("")
    (server / "__init__.py").write_text("")
    (folder / "engine" / "behaviour.json").write_text(json.dumps(behaviour))
    return folder


def serve_words(tree: Path) -> str:
    """A command arm that starts a tree's fake server by its file's path."""
    return f"{sys.executable} {tree / 'engine' / 'server' / 'cli.py'} serve {{model}} --port {{port}}"


def run_git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=process.environment())
    return done.stdout.strip()


def state(repository: Path) -> tuple[str, str, bytes, str]:
    """What must stay of a repository that the gate has no business in: its branch, commit, index and worktrees."""
    index = (repository / ".git" / "index").read_bytes()
    branch, commit = (run_git(repository, "rev-parse", *words) for words in (("--abbrev-ref", "HEAD"), ("HEAD",)))
    return branch, commit, index, run_git(repository, "worktree", "list", "--porcelain")


def places_of(repository: Path) -> dict[str, str]:
    """What git tells a hook of its repository, so much as decides where another git reads and writes."""
    git = repository / ".git"
    named = {"GIT_DIR": git, "GIT_INDEX_FILE": git / "index", "GIT_WORK_TREE": repository}
    return {
        "GIT_PREFIX": "",
        "GIT_QUARANTINE_PATH": str(git / "objects"),
        **{name: str(path) for name, path in named.items()},
    }


def make_repository(folder: Path, *behaviours: dict[str, object]) -> Path:
    """A git repository with one commit for each behaviour, oldest first."""
    folder.mkdir(parents=True)
    run_git(folder, "init", "--quiet", "--initial-branch", "main")
    for number, behaviour in enumerate(behaviours):
        make_tree(folder, **behaviour, commit=number)
        (folder / ".gitignore").write_text("__pycache__/\nruns/\n")
        run_git(folder, "add", "--all")
        run_git(folder, "commit", "--quiet", "--message", f"commit {number}")
    return folder


CELLS = """version = 1
[sets.demo]
cells = [
  { task = "T2T", concurrency = 1, requests = 4, warm_waves = 1, max_tokens = 8, ignore_eos = true, greedy = true },
  { task = "A2T", concurrency = 1, requests = 3, max_tokens = 20, greedy = true },
  { task = "T2S", concurrency = 1, requests = 2, max_tokens = 4, max_frames = 4, ignore_eos = true },
  { task = "A2S", concurrency = 1, requests = 2, max_tokens = 4, max_frames = 4, ignore_eos = true },
]
[sets.quick]
cells = [
  { task = "T2T", concurrency = 1, requests = 4, warm_waves = 1, max_tokens = 8, ignore_eos = true, greedy = true },
  { task = "T2T", concurrency = 2, requests = 4, max_tokens = 8, ignore_eos = true },
]
"""


def make_workloads(root: Path, prompts: int = 6, clips: int = 4) -> Path:
    """A workloads folder with prompts p00…, tones c00… as FLAC, and two small cell sets."""
    (root / "clips").mkdir(parents=True)
    (root / "cells.toml").write_text(CELLS)
    rows = [json.dumps({"id": f"p{n:02d}", "text": f"prompt number {n}"}) for n in range(prompts)]
    (root / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    manifest = []
    for n in range(clips):
        write_tone(root / "clips" / f"c{n:02d}.flac", hertz=200 + 50 * n, seconds=0.5)
        row = {"id": f"c{n:02d}", "audio": f"clips/c{n:02d}.flac", "text": "the cat sat", "seconds": 0.5}
        manifest.append(json.dumps({**row, "speaker": f"s{n % 2}"}))
    (root / "clips" / "manifest.jsonl").write_text("\n".join(manifest) + "\n")
    return root


def write_tone(path: Path, hertz: float, seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    wave = 0.2 * numpy.sin(2 * numpy.pi * hertz * numpy.arange(int(16000 * seconds)) / 16000)
    soundfile.write(path, wave.astype(numpy.float32), 16000)


def make_librispeech(folder: Path, clips: int = 3) -> Path:
    """A folder in LibriSpeech's layout with one chapter of tones."""
    chapter = folder / "test-tiny" / "11" / "22"
    lines = []
    for n in range(clips):
        write_tone(chapter / f"11-22-{n:04d}.flac", hertz=300 + 40 * n, seconds=0.25 * (n + 1))
        lines.append(f"11-22-{n:04d} THE WORDS OF CLIP {n}")
    (chapter / "11-22.trans.txt").write_text("\n".join(lines) + "\n")
    return folder / "test-tiny"
