"""What benchmarks/cuda.py takes for a kernel's time: not the host's, whatever that takes to queue it."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import ClassVar
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

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


class Contender:
    """1 ms of the device, which the host takes 30 ms to queue."""

    name = "it"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def prepare(self) -> None:
        self.clock.host += 1.0

    def run(self) -> None:
        self.clock.host += 30.0
        self.clock.queue(1.0)


def test_an_empty_stream_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setitem(sys.modules, "common", MagicMock())  # which has to come before torch
    monkeypatch.delitem(sys.modules, "routes", raising=False)
    benchmark = runpy.run_path(f"{BENCHMARKS}/cuda.py")
    clock = Clock()

    def wait() -> None:
        clock.host = max(clock.host, clock.device)

    monkeypatch.setattr(torch.cuda, "Event", type("OfThisClock", (Event,), {"clock": clock}))
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: clock.queue(cycles / 1e6))
    monkeypatch.setattr(time, "perf_counter", lambda: clock.host / 1e3)
    seconds, host = benchmark["timed"](Contender(clock), 0)
    assert (seconds, host) == pytest.approx((31e-3, 30e-3)), "a device that has nothing else to do waits for the host"
    seconds, host = benchmark["timed"](Contender(clock), int(benchmark["CYCLES"] * host))
    assert (seconds, host) == pytest.approx((1e-3, 30e-3)), "one that is busy meanwhile does not"
    times = benchmark["on_device"]([Contender(clock)], rounds=3, warmup=1)
    assert [each == pytest.approx([value] * 3) for each, value in zip(times["it"], (1e-3, 30e-3), strict=True)] == [
        True
    ] * 2
