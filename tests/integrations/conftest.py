"""What trainers keep in the process, and what they say of devices and workers, does not reach the next test."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    for name in ("AcceleratorState", "GradientState", "PartialState") if "accelerate.state" in sys.modules else ():
        getattr(sys.modules["accelerate.state"], name)._reset_state()
