"""What benchmarks/cuda.py takes for a kernel's time: not the host's, whatever that takes to queue it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import torch

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


class Clock:
    """A device that works behind the host, in milliseconds."""

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def queue(self, takes: float) -> float:
        self.device = max(self.device, self.host) + takes
        return self.device


class Event:
    clock: ClassVar[Clock]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = self.clock.queue(0.0)

    def query(self) -> bool:
        return self.at <= self.clock.host

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


class Contender:
    """1 ms of the device, which the host takes 30 ms to queue."""

    name = "it"

    def __init__(self, clock: Clock) -> None:
        self.clock, self.calls = clock, 0

    def prepare(self) -> None:
        self.clock.host += 1.0

    def run(self) -> None:
        self.calls += 1
        self.clock.host += 30.0
        self.clock.queue(1.0)


def test_an_empty_stream_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setitem(sys.modules, "common", MagicMock())  # which has to come before torch
    monkeypatch.delitem(sys.modules, "routes", raising=False)
    timed: Any = runpy.run_path(f"{BENCHMARKS}/cuda.py")["timed"]
    clock = Clock()

    def wait() -> None:
        clock.host = max(clock.host, clock.device)

    monkeypatch.setattr(torch.cuda, "Event", type("OfThisClock", (Event,), {"clock": clock}))
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: clock.queue(cycles / 1e6))
    contender = Contender(clock)
    seconds, _, cycles = timed(contender, 1 << 20)
    assert seconds == pytest.approx(1e-3)
    assert contender.calls == 6, "behind a sleep of 1, 2, 4 ... ms, until one was long enough"
    assert timed(contender, cycles)[2] == cycles, "which the next round begins with"
