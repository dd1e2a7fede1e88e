"""Without a GPU the tests here are skipped; what they import must not spoil the interpreter for other tests."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
