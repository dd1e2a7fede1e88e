"""Kernels run on a GPU where there is one, and otherwise in Triton's interpreter."""

import os

import pytest
import torch

# Read by Triton when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    """Where the kernels of a test run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
