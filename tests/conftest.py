"""What every test has: one thread a process, no hub, and the small checkpoint."""

import os
from pathlib import Path

# Set before torch or transformers is imported anywhere. Servers that tests start inherit them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from filelock import FileLock

torch.set_num_threads(1)
# Triton reads it when it is imported, which transformers does too: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of the small checkpoint, seed 0. Tests only read it: all xdist workers share one."""
    from engine.model.tiny import write_tiny

    base = tmp_path_factory.getbasetemp()
    root = base if worker_id == "master" else base.parent
    folder, done = root / "tiny-checkpoint", root / "tiny-checkpoint.done"
    with FileLock(root / "tiny-checkpoint.lock"):
        if not done.exists():
            write_tiny(folder)
            done.touch()
    return folder
