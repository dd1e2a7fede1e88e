from __future__ import annotations

from pathlib import Path

import pytest

from gate.cell import METRICS, Cell, parse_cells

ROW = '{ task = "T2T", concurrency = 4, requests = 8 }'


def toml(row: str = ROW, defaults: str = "") -> str:
    return f"version = 1\n{defaults}\n[sets.small]\ncells = [ {row} ]\n"


def test_a_row_gets_its_name_and_the_usual_values() -> None:
    (cell,) = parse_cells(toml())["small"].cells

    assert cell == Cell("T2T@4", "T2T", 4, 8, 0, 256, False, None, "tok/s", "prompts", False)


def test_a_row_overrides_its_tasks_defaults() -> None:
    defaults = "[defaults.T2T]\nmax_tokens = 64\nignore_eos = true\n[defaults.A2T]\nmax_tokens = 5"

    (cell,) = parse_cells(toml('{ task = "T2T", concurrency = 1, requests = 2, max_tokens = 9 }', defaults))[
        "small"
    ].cells

    assert (cell.max_tokens, cell.ignore_eos) == (9, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            toml('{ task = "T2T", concurrency = 1, requests = 2, ignore_oes = true }'),
            "'ignore_oes' in [sets.small], cell 1",
        ),
        (toml(defaults="[defaults.T2T]\nwarm = 1"), "'warm' in [defaults.T2T]"),
        (toml(defaults="[defaults.T3T]\nmax_tokens = 1"), "'T3T' in [defaults]"),
        ("version = 1\nset = 3\n", "'set' in the file"),
        ("version = 1\n[sets.a]\nnote = 1\ncells = []\n", "'note' in [sets.a]"),
        ("version = 2\n", "version is 2"),
        ("version = 1\n", "no [sets.NAME]"),
        ("version = ", "not TOML"),
        ("version = 1\n[sets.a]\n", "[sets.a] needs cells"),
        (toml('{ task = "X2T", concurrency = 1, requests = 2 }'), "task = 'X2T'"),
        (toml('{ task = "T2T", requests = 2 }'), "concurrency is missing in [sets.small], cell 1"),
        (
            toml('{ task = "T2T", concurrency = 0, requests = 2 }'),
            "concurrency = 0 in [sets.small], cell 1 must be at least 1",
        ),
        (toml('{ task = "T2T", concurrency = true, requests = 2 }'), "concurrency = True"),
        (toml(f"{ROW}, {ROW}"), "T2T@4 twice"),
        (toml('{ task = "T2T", concurrency = 1, requests = 2, primary = "tokens" }'), "primary = 'tokens'"),
        (toml('{ task = "T2T", concurrency = 1, requests = 2, primary = "window" }'), "plain fact"),
        (toml('{ task = "T2T", concurrency = 1, requests = 2, primary = "RTFx" }'), "needs input audio"),
        (toml('{ task = "A2T", concurrency = 1, requests = 2, primary = "audio-s/s" }'), "needs output audio"),
        (toml('{ task = "T2T", concurrency = 1, requests = 2, max_frames = 9 }'), "max_frames"),
        (toml('{ task = "T2T", concurrency = 1, requests = 2, workload = "clips" }'), "does not fit T2T"),
        (toml('{ task = "A2T", concurrency = 1, requests = 2, workload = "songs" }'), "workload = 'songs'"),
    ],
)
def test_what_is_wrong_is_named_with_its_table(text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_cells(text)

    assert words in str(error.value)


def test_the_sets_of_the_repository_are_those_that_are_promised() -> None:
    text = (Path(__file__).parents[2] / "workloads" / "cells.toml").read_text(encoding="utf-8")

    sets = parse_cells(text)

    assert {name: [cell.name for cell in found.cells] for name, found in sets.items()} == {
        "demo": ["T2T@1", "A2T@1", "T2S@1", "A2S@1"],
        "quick": ["T2T@1", "T2T@4", "A2T@1", "A2T@4", "T2S@1", "A2S@1"],
        "pr": ["T2T@1", "T2T@16", "T2T@64", "A2T@1", "A2T@16", "T2S@1", "A2S@1"],
    }
    assert {(cell.requests, cell.warm_waves) for cell in sets["demo"].cells} == {(8, 1)}
    assert [cell.requests for cell in sets["pr"].cells] == [64, 160, 640, 200, 200, 32, 32]
    assert {cell.max_tokens for cell in sets["pr"].cells if cell.task == "T2T"} == {257}
    assert {cell.warm_waves for cell in sets["pr"].cells} == {5}


def test_every_metric_has_a_direction_and_every_floor_belongs_to_one_that_can_get_worse() -> None:
    assert {metric.better for metric in METRICS.values()} == {"up", "down", "none"}
    assert not [name for name, metric in METRICS.items() if metric.floor is not None and metric.better == "none"]
    assert METRICS["tok/s"].floor == METRICS["RTFx"].floor == METRICS["audio-s/s"].floor == 0.02
