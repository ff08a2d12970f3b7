"""A CUDA device with the compiled kernels; where there is none a pretended one, for all tests not marked ``card``."""

from __future__ import annotations

import sys
from pathlib import Path

import card
import pytest
import torch

from fp16opt import kernels
from fp16opt.kernels import cuda_devices

KERNELS = str(Path(__file__).parents[1] / "kernels")
if KERNELS not in sys.path:  # the cases of the kernel tests serve here too
    sys.path.insert(0, KERNELS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where the card is pretended, one cell of each test shows that it asks rightly: tests/kernels and tests/engine say
    whether the emulated kernels' bits are right."""
    seen: set[str] = set()
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            name = item.nodeid.partition("[")[0]
            if name in seen and not card.IS_THERE:
                item.add_marker(pytest.mark.all)
            seen.add(name)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The first device, served by the compiled kernels."""
    if not card.IS_THERE:
        return card.pretend(request.getfixturevalue("emulated_cuda"), monkeypatch)
    first = torch.device("cuda", 0)
    assert kernels.backend(first) == "cuda", cuda_devices.served(0).words
    return first
