"""States of a training: what is loaded of them, and how one that is damaged is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.tiny import optim
from engine.tiny.optim import Settings, Training, averaged

CPU = torch.device("cpu")
SETTINGS = Settings(minutes=1, warmup=1)


def module(seed: int, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))


def trained(folder: Path) -> tuple[Training, Path]:
    """A training after two steps, and its state in two shards."""
    seconds = iter(range(100))
    training = Training(module(0), SETTINGS, folder, CPU, lambda: next(seconds))
    training.run(lambda moment: {"loss": training.module(torch.ones(1, 4)).square().sum()}, 2 / 60)
    return training, folder / "state-00000002"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "SHARD_BYTES", 150)


def test_averaged_weights_are_those_of_the_training(tmp_path: Path):
    training, state = trained(tmp_path)
    assert len(list(state.glob("*.safetensors"))) == json.loads((state / "meta.json").read_text())["files"] > 1
    got = averaged(module(1), tmp_path)
    assert not got.training
    for (name, value), want in zip(got.named_parameters(), training.averaged().parameters(), strict=True):
        torch.testing.assert_close(value, want, rtol=0.01, atol=0.01, msg=name)
    again = Training(module(1), SETTINGS, tmp_path, CPU).averaged()
    assert all(map(torch.equal, got.parameters(), again.parameters()))


def test_no_state_is_never_taken_for_a_trained_one(tmp_path: Path):
    with pytest.raises(ValueError, match=f"{tmp_path} holds no state-"):
        averaged(module(0), tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "0.safetensors is damaged": ("0.safetensors", cut),
    "0.safetensors is missing": ("0.safetensors", Path.unlink),
    "1.safetensors is damaged": ("1.safetensors", lambda path: path.write_bytes(b"")),
    "meta.json is missing": ("meta.json", Path.unlink),
    r"meta.json is damaged \(Input data was truncated": ("meta.json", lambda path: path.write_bytes(b"")),
    r"meta.json is damaged \(.*seconds": ("meta.json", lambda path: path.write_text('{"step": 2}')),
    r"meta.json is damaged \(.*step": ("meta.json", lambda path: path.write_text('{"step": -1, "seconds": 1}')),
}


@pytest.mark.parametrize("told", DAMAGES)
def test_a_damaged_state_is_named_with_the_way_out(tmp_path: Path, told: str):
    _, state = trained(tmp_path)
    name, damage = DAMAGES[told]
    damage(state / name)
    for read in (lambda: averaged(module(0), tmp_path), lambda: Training(module(0), SETTINGS, tmp_path, CPU)):
        with pytest.raises(ValueError, match=rf"^{state}/{told}.*; fetch it again, or delete {state} to go on from"):
            read()


def test_the_last_shard_is_missed_too(tmp_path: Path):
    _, state = trained(tmp_path)
    last = max(state.glob("*.safetensors"), key=lambda path: int(path.stem))
    last.unlink()
    with pytest.raises(ValueError, match=f"^{last} is missing"):
        Training(module(0), SETTINGS, tmp_path, CPU)


def test_a_state_from_before_shards_were_counted_is_read(tmp_path: Path):
    training, state = trained(tmp_path)
    (state / "meta.json").write_text('{"step": 2, "seconds": 2.0}\n')
    again = Training(module(1), SETTINGS, tmp_path, CPU)
    assert again.step == 2
    assert all(map(torch.equal, again.module.parameters(), training.module.parameters()))
    (state / "0.safetensors").unlink()
    with pytest.raises(ValueError, match=f"^{state}/0.safetensors is missing"):
        averaged(module(0), tmp_path)


def test_a_state_of_another_model_is_named(tmp_path: Path):
    _, state = trained(tmp_path)
    with pytest.raises(ValueError, match=rf"^{state} is of another model: .*0.weight is \[4, 4\], must be \[5, 5\]"):
        Training(module(0, 5), SETTINGS, tmp_path, CPU)
    with pytest.raises(ValueError, match=rf"^{state} has no average\.2\.weight; fetch it again"):
        averaged(nn.Sequential(*module(0), nn.Linear(1, 1)), tmp_path)


def test_a_state_is_not_written_again_where_no_step_was_made(tmp_path: Path):
    _, state = trained(tmp_path)
    (tmp_path / "state-old").mkdir()
    before = state.stat().st_ino
    again = Training(module(1), SETTINGS, tmp_path, CPU)
    again.save()
    assert (state.stat().st_ino, again.step) == (before, 2)


def test_what_was_logged_after_the_last_state_is_dropped(tmp_path: Path):
    trained(tmp_path)
    curve = tmp_path / "curve.jsonl"
    curve.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    Training(module(0), SETTINGS, tmp_path, CPU)
    assert curve.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_what_was_logged_before_the_first_state_is_dropped_without_one(tmp_path: Path):
    (tmp_path / "curve.jsonl").write_text('{"step": 1}\n')
    Training(module(0), SETTINGS, tmp_path, CPU)
    assert (tmp_path / "curve.jsonl").read_text() == ""


def test_attention_is_not_planned_anew_for_each_shape(tmp_path: Path):
    used = []

    def loss(moment: optim.Moment) -> dict[str, torch.Tensor]:
        used.append(torch.backends.cuda.cudnn_sdp_enabled())
        return {"loss": training.module(torch.ones(1, 4)).square().sum()}

    training = Training(module(0), SETTINGS, tmp_path, CPU)
    training.run(loss, 1 / 6000)
    assert used == [False] * training.step != []
