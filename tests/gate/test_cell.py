from __future__ import annotations

from pathlib import Path

import pytest

from gate.cell import AUDIO_IN_TASKS, METRICS, SPEECH_TASKS, Cell, parse_cells

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
        (
            toml('{ task = "A2T", concurrency = 1, requests = 2, workload = "ids", prompt_tokens = 4 }'),
            "does not fit A2T",
        ),
        (
            toml('{ task = "T2S", concurrency = 1, requests = 2, workload = "ids", prompt_tokens = 4 }'),
            "does not fit T2S",
        ),
        (toml('{ task = "T2T", concurrency = 1, requests = 2, workload = "ids" }'), "prompt_tokens is missing"),
        (
            toml('{ task = "T2T", concurrency = 1, requests = 2, workload = "ids", prompt_tokens = 0 }'),
            "prompt_tokens = 0 in [sets.small], cell 1 must be at least 1",
        ),
        (
            toml('{ task = "T2T", concurrency = 1, requests = 2, workload = "ids", prompt_tokens = 131073 }'),
            "prompt_tokens = 131073 in [sets.small], cell 1 must be at most 131072",
        ),
        (
            toml(
                '{ task = "T2T", concurrency = 1, requests = 2, workload = "ids", prompt_tokens = 4, ids_below = 1048577 }'
            ),
            "ids_below = 1048577 in [sets.small], cell 1 must be at most 1048576",
        ),
        (toml(defaults="[defaults.T2T]\nprompt_tokens = 1000000000"), "[defaults.T2T] must be at most 131072"),
        (
            toml('{ task = "T2T", concurrency = 1, requests = 2, prompt_tokens = 4 }'),
            "prompt_tokens in [sets.small], cell 1 is for workload = 'ids', and this is 'prompts'",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_table(text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_cells(text)

    assert words in str(error.value)


def test_a_cell_of_random_ids_stays_below_256_unless_it_says_more_and_has_a_workload_of_its_own() -> None:
    row = 'task = "T2T", concurrency = 1, requests = 2, workload = "ids", prompt_tokens = 64'
    (few,) = parse_cells(toml(f"{{ {row} }}"))["small"].cells
    (many,) = parse_cells(toml(f"{{ {row}, ids_below = 151643 }}"))["small"].cells
    assert (few.prompt_tokens, few.ids_below, few.source) == (64, 256, "ids T2T@1")
    assert many.ids_below == 151643
    assert parse_cells(toml())["small"].cells[0].source == "prompts"


def test_a_cell_of_random_ids_may_be_as_long_and_as_wide_as_the_limits() -> None:
    row = 'task = "T2T", concurrency = 1, requests = 2, workload = "ids", prompt_tokens = 131072, ids_below = 1048576'
    (cell,) = parse_cells(toml(f"{{ {row} }}"))["small"].cells
    assert (cell.prompt_tokens, cell.ids_below) == (131072, 1048576)


def test_the_sets_of_the_repository_are_those_that_are_promised() -> None:
    text = (Path(__file__).parents[2] / "workloads" / "cells.toml").read_text(encoding="utf-8")

    sets = parse_cells(text)

    assert {name: [cell.name for cell in found.cells] for name, found in sets.items()} == {
        "demo": ["T2T@1", "A2T@1", "T2S@1", "A2S@1"],
        "quick": ["T2T@1", "T2T@4", "A2T@1", "A2T@4", "T2S@1", "A2S@1"],
        "pr": ["T2T@1", "T2T@16", "T2T@64", "A2T@1", "A2T@16", "T2S@1", "A2S@1"],
        "h200": ["T2T@1", "T2T@4", "T2T@8", "T2T@16", "T2T@64"],
        "h200-audio": ["A2T@1", "A2T@16", "A2T@64"],
    }
    text_cells, audio_cells = sets["h200"].cells, sets["h200-audio"].cells
    assert {(cell.workload, cell.prompt_tokens, cell.ids_below) for cell in text_cells} == {("ids", 64, 151643)}
    assert {(cell.max_tokens, cell.ignore_eos, cell.warm_waves) for cell in text_cells} == {(257, True, 1)}
    assert {(cell.workload, cell.requests, cell.max_tokens, cell.ignore_eos) for cell in audio_cells} == {
        ("librispeech", 320, 28, True)
    }
    # Whole waves, of 8 to 12 s at the speeds that must be reached.
    must = {1: 400, 4: 750, 8: 950, 16: 1300, 64: 3600}
    for cell in text_cells:
        assert cell.requests % cell.concurrency == 0
        assert 8 <= cell.requests * cell.max_tokens / must[cell.concurrency] <= 12, cell.name
    assert [(cell.requests, cell.warm_waves) for cell in sets["demo"].cells] == [(8, 1), (32, 1), (8, 1), (8, 1)]
    spoken = [cell for name in ("demo", "quick", "pr") for cell in sets[name].cells if cell.task in SPEECH_TASKS]
    assert all(not cell.ignore_eos and (cell.max_frames or 0) >= 160 for cell in spoken)  # a cut answer has no fair WER
    small = [cell for name in ("demo", "quick") for cell in sets[name].cells if cell.task not in AUDIO_IN_TASKS]
    assert {cell.workload for cell in small} == {"questions"}
    assert [cell.requests for cell in sets["pr"].cells] == [64, 160, 640, 200, 200, 32, 32]
    assert {cell.max_tokens for cell in sets["pr"].cells if cell.task == "T2T"} == {257}
    assert {cell.warm_waves for cell in sets["pr"].cells} == {5}


def test_every_metric_has_a_direction_and_every_floor_belongs_to_one_that_can_get_worse() -> None:
    assert {metric.better for metric in METRICS.values()} == {"up", "down", "none"}
    assert not [name for name, metric in METRICS.items() if metric.floor is not None and metric.better == "none"]
    assert METRICS["tok/s"].floor == METRICS["RTFx"].floor == METRICS["audio-s/s"].floor == 0.02
