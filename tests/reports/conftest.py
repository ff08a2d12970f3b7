"""Random numbers of reports' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def seeded() -> Iterator[None]:
    """The same numbers in each test."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
