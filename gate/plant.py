"""Planted changes: known faults put into a scratch clone of the engine, to see whether the gate finds them.

Each is a source edit (file, anchor, replacement); the anchor must be there exactly once. Never used on the tree one works in.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from gate.arm import TRAINED_MODEL, ArmError, git

KINDS = ("slow", "flip", "raise", "mute")
FLIP_STEP = 5
LEAST_SLOW = 0.001  # of a step; no run tells less from nothing

# Lines of the engine, whole and unindented text included, that a plant hooks onto.
LAUNCH = "            self._in_flight.append((step, [self.runner.launch(step)], []))"
CHOOSE = "        tokens = self.sampler.choose(logits, wishes)"
ATTENTION_OUTPUT = '        self._o = weights[f"{name}.o"]'


class PlantError(ValueError):
    """A change that cannot be planted; the message names the file and what was looked for."""


@dataclass(frozen=True)
class Plant:
    """One source edit: in `file`, the text `anchor`, found exactly once, becomes `code`; `what` says what that does."""

    kind: str
    file: str
    anchor: str
    code: str
    what: str


def slow(fraction: float) -> Plant:
    """Every step with a decode row takes `fraction` of its own time longer."""
    if not LEAST_SLOW <= fraction <= 10:
        raise PlantError(f"--fraction {fraction} is not between {LEAST_SLOW} and 10 of a step")
    code = f"""            import time

            began = time.perf_counter()
            launched = self.runner.launch(step)
            if any("decode" in row.walk for row in step.rows):
                time.sleep({fraction!r} * (time.perf_counter() - began))
            self._in_flight.append((step, [launched], []))"""
    return Plant("slow", "engine/lane.py", LAUNCH, code, f"decode steps take {100 * fraction:g}% longer")


def flip(prompt_key: str, step: int = FLIP_STEP, name: str = "") -> Plant:
    """The prompt with this key (and id `name`) gets its second best token at `step` (counted from 0) of its text."""
    act = f"""            if steps[index] == {step}:
                tokens[index] = logits[index].topk(2).indices[1]"""
    what = f"{_called(prompt_key, name)} flips at step {step}"
    return Plant("flip", "engine/runner.py", CHOOSE, _at_prompt(prompt_key, act), what)


def raising(prompt_key: str, name: str = "") -> Plant:
    """A step that holds the prompt with this key (and id `name`) raises."""
    act = """            raise RuntimeError("planted: this prompt raises")"""
    what = f"{_called(prompt_key, name)} raises"
    return Plant("raise", "engine/runner.py", CHOOSE, _at_prompt(prompt_key, act), what)


def _called(prompt_key: str, name: str) -> str:
    return f"{name} ({prompt_key})" if name else prompt_key


def mute(layer: int, head: int) -> Plant:
    """The Thinker's attention `head` of `layer`, both counted from 0, adds nothing; a server that has no such head fails."""
    for flag, value in {"--layer": layer, "--attention-head": head}.items():
        if value < 0:
            raise PlantError(f"{flag} {value} is below 0, from where they are counted")
    code = f"""{ATTENTION_OUTPUT}
        if name.startswith("thinker.") and config.layers <= {layer}:
            raise ValueError(f"planted: layer {layer} is to lose a head, and there are {{config.layers}}")
        if name == "thinker.layers.{layer}":
            if config.heads <= {head}:
                raise ValueError(f"planted: head {head} is to be lost, and there are {{config.heads}}")
            self._o = self._o.clone()
            self._o[:, {head} * self._head_dim : {head + 1} * self._head_dim] = 0"""
    return Plant("mute", "engine/model/layers.py", ATTENTION_OUTPUT, code, f"head {head} of layer {layer} is mute")


def check_head(layer: int, head: int, folder: Path) -> None:
    """PlantError where the Thinker of the model in the tree `folder` has no such layer or head; without a model, none."""
    path = folder / TRAINED_MODEL / "config.json"
    try:
        shape = json.loads(path.read_text(encoding="utf-8"))["thinker_config"]["text_config"]
        layers, heads = int(shape["num_hidden_layers"]), int(shape["num_attention_heads"])
    except (OSError, ValueError, KeyError, TypeError):  # a tree of its own kind: its server will tell
        return
    for flag, value, count in (("--layer", layer, layers), ("--attention-head", head, heads)):
        if value >= count:
            raise PlantError(f"{flag} {value} does not exist in the Thinker of {path.parent}; name 0 to {count - 1}")


def _at_prompt(prompt_key: str, act: str) -> str:
    return f"""{CHOOSE}
        for index, one in enumerate(some):
            import hashlib

            prompt = b"".join(token.to_bytes(4, "little") for token in one.request.prompt_ids)
            if hashlib.sha256(prompt).hexdigest()[:12] != {_key(prompt_key)!r}:
                continue
{act}"""


def _key(prompt_key: str) -> str:
    if len(prompt_key) != 12 or set(prompt_key) - set("0123456789abcdef"):
        raise PlantError(f"--prompt-key {prompt_key!r} is not 12 lower-case hex digits")
    return prompt_key


def prompt_key(model: Path, text: str) -> str:
    """The key of a text prompt: 12 hex of SHA-256 over its ids as little-endian int32, with the folder's tokenizer."""
    path = model / "tokenizer.json"
    if not path.is_file():
        raise PlantError(f"{path} does not exist, so the key of a prompt cannot be found; give --prompt-key")
    tokenizer = Tokenizer.from_file(str(path))
    turn = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(turn, add_special_tokens=False).ids
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()[:12]


def apply(plant: Plant, folder: Path) -> None:
    """Edit the plant's file under `folder`; PlantError unless its anchor is there exactly once."""
    path = folder / plant.file
    if not path.is_file():
        raise PlantError(f"{path} does not exist; name a clone of the engine")
    lines = path.read_text(encoding="utf-8").split("\n")
    count = lines.count(plant.anchor)
    if count != 1:
        raise PlantError(f"{path} holds the line {plant.anchor.strip()!r} {count} times; it must be there exactly once")
    lines[lines.index(plant.anchor)] = plant.code
    path.write_text("\n".join(lines), encoding="utf-8")


def plant(changes: Sequence[Plant], folder: Path, message: str) -> str:
    """Make `changes` a commit in the scratch clone `folder`, without hooks or signing; returns the commit's id.

    PlantError unless `folder` is the top of a clone without changes of its own, or for a change that doesn't fit; ArmError
    where git fails. Either leaves the files as they were.
    """
    check_clone(folder)
    files = [folder / name for name in dict.fromkeys(change.file for change in changes)]
    before = {path: path.read_bytes() for path in files if path.is_file()}
    name = ("-c", "user.name=gate plant", "-c", "user.email=plant@localhost", "-c", "commit.gpgsign=false")
    try:
        for change in changes:
            apply(change, folder)
        git(folder, *name, "commit", "--all", "--quiet", "--no-verify", "--message", message)
    except BaseException:
        for path, content in before.items():
            path.write_bytes(content)
        raise
    return git(folder, "rev-parse", "HEAD").strip()


def check_clone(folder: Path) -> None:
    """PlantError unless `folder` is the top of a git repository whose files are as they were committed."""
    advice = f"name a fresh scratch clone: git clone . {_beside(folder)}"
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise PlantError(f"{folder} {what}; {advice}")
    if shutil.which("git") is None:
        raise PlantError("git is not on PATH; install it, or mend PATH")
    try:
        is_bare = git(folder, "rev-parse", "--is-bare-repository").strip() == "true"
        top = folder if is_bare else Path(git(folder, "rev-parse", "--show-toplevel").strip())
    except ArmError:
        raise PlantError(f"{folder} is no git repository; {advice}") from None
    if is_bare:
        raise PlantError(f"{folder} is a bare repository, which has no files to change; {advice}")
    if top.resolve() != folder.resolve():
        raise PlantError(
            f"{folder} is a folder inside the repository {top}; name {top} where that is a scratch clone, else a fresh one: "
            f"git clone . {_beside(top)}"
        )
    if changed := git(folder, "status", "--porcelain", "--untracked-files=no").splitlines():
        raise PlantError(f"{folder} has changes that are not committed, such as {changed[0][3:]}; {advice}")


def _beside(folder: Path) -> str:
    """A place for a scratch clone that lies in no repository for being beside `folder`, as one types it here."""
    return shlex.quote(os.path.relpath(folder.resolve().parent / "scratch"))


def scratch_clone(repository: Path, target: Path) -> str:
    """Clone the committed state of `repository` to `target` (one commit deep is enough) and return its commit."""
    head = git(repository, "rev-parse", "HEAD").strip()
    git(repository, "clone", "--quiet", "--no-hardlinks", str(repository), str(target), into=target)
    git(target, "checkout", "--quiet", "--detach", head)
    return head
