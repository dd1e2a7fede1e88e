"""Serve prompts and clips of many lengths in a fresh process and print the engine's counters: what was compiled only then?

`python -m tests.gpu.late FOLDER DEVICE`. A process that has run other tests has their kernels, and would compile nothing.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from engine.config import EngineSettings
from engine.engine import Engine, kernel_options
from engine.model.omni import load_model
from engine.request import Request
from tests.engine.test_engine import clip, prompt, run, sampling_of_any_kind

LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 63, 65, 100, 127, 129, 200, 300, 600)


def counters(folder: Path, device: str) -> dict[str, float]:
    """The counters of an engine that has answered texts and clips of every length, alone and in company."""
    settings = EngineSettings(device=device, max_batch=16, prefill_chunk=512, max_model_len=2048)
    model = load_model(folder, device=device, options=kernel_options(settings))
    rng, engine = random.Random(2), Engine(model, settings)
    for number, words in enumerate(LENGTHS):
        clips = [clip(rng) for _ in range(number % 3)]
        sampling = sampling_of_any_kind(rng, number)
        ids = prompt(model, rng, clips, words)
        run(engine, [Request(id=f"alone{number}", prompt_ids=ids, max_tokens=3, clips=clips, sampling=sampling)])
    company = [
        Request(id=f"r{number}", prompt_ids=prompt(model, rng, [], words), max_tokens=4 + number, ignore_eos=True)
        for number, words in enumerate(LENGTHS)
    ]
    run(engine, company, rng)
    return engine.counters()


if __name__ == "__main__":
    print(json.dumps(counters(Path(sys.argv[1]), sys.argv[2])))
