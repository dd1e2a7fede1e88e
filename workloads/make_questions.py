"""Writes the questions of the workload: workloads/questions.jsonl, of the kinds that the small trained model learns.

Run from the repository root: `python workloads/make_questions.py`. Training asks none of them: questions and sentences are
withheld by `engine/tiny/`. Fourteen are among those that `engine/tiny/met.txt` lists: no score is made of them here. The
committed file is the workload; another version of that code may give other questions, hence another workload hash.
"""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

from engine.tiny.tasks import KINDS, REPEAT, withheld_questions
from engine.tiny.text import sentences

SEED = 20_000
# Of each kind that one turn can ask, and of texts to repeat.
EACH = 8


def questions() -> list[str]:
    """The kinds in turn, texts to repeat last in each round."""
    # A name is asked for in a later turn than it was given in, and an item has one turn.
    asked = [one.text for one in withheld_questions(SEED, EACH * len(KINDS)) if not one.earlier]
    said = sentences(SEED, EACH, held_out=True)
    repeated = [wording.replace("{text}", text) for wording, text in zip(cycle(REPEAT), said, strict=False)]
    kinds = len(asked) // EACH
    rounds = [(*asked[kinds * number : kinds * (number + 1)], repeated[number]) for number in range(EACH)]
    return [text for one in rounds for text in one]


def main() -> None:
    """Write the file."""
    rows = [json.dumps({"id": f"q{number:02d}", "text": text}) for number, text in enumerate(questions())]
    (Path(__file__).parent / "questions.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
