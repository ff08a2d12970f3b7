"""Everything in this folder needs a CUDA device that the CUDA kernels serve."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fp16opt import kernels
from fp16opt.kernels import cuda_devices

KERNELS = str(Path(__file__).parents[1] / "kernels")
if KERNELS not in sys.path:  # the cases of the kernel tests serve here too
    sys.path.insert(0, KERNELS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    """The first device, served by the compiled kernels."""
    first = torch.device("cuda", 0)
    assert kernels.backend(first) == "cuda", cuda_devices.served(0).words
    return first
