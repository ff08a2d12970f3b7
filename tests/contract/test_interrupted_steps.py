"""A step is whole, or known not to be: an exception at any line of ``step()``, and what the next call finds."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import fp16opt
from fp16opt import MixedPrecisionOptimizer

ENGINE = str(Path(fp16opt.__file__).parent)
STRIDE = 29
"""Every so many lines are tried in the default run, and all of them by ``-m slow``."""


@dataclass(frozen=True)
class Kind:
    """One way to step."""

    arguments: dict[str, Any]
    make: Callable[[Any], Optimizer] = lambda params: AdamW(params, lr=2.0**-5)


KINDS = {
    "one pass": Kind({}),
    "own step": Kind({"fused_step": False}),
    "torch's kernel": Kind({"fused_step": False}, lambda params: SGD(params, lr=2.0**-5, momentum=0.5, fused=True)),
    "split": Kind({"master_weights": "split"}),
    "sums": Kind({"grad_accumulation": "fp32"}),
    "none": Kind({"master_weights": "none"}, lambda params: AdamW(params, lr=2.0**-5, eps=2.0**-10)),
    "8 bits": Kind({"optimizer_state": "8bit"}),
}


class Training:
    """Two weights in 16 bits and one in FP32, two groups, a scale that grows after every step."""

    def __init__(self, kind: Kind) -> None:
        bfloat16 = torch.bfloat16
        self.net = nn.ParameterDict(
            {
                "first": nn.Parameter(torch.ones(3, dtype=bfloat16)),
                "second": nn.Parameter(torch.full((2, 2), 2.0, dtype=bfloat16)),
                "wide": nn.Parameter(torch.full((3,), -1.0)),
            }
        )
        params = list(self.net.values())
        scale = {} if "loss_scale" in kind.arguments else {"scaler": fp16opt.DynamicLossScaler(64.0, growth_interval=1)}
        inner = kind.make([{"params": params[:1]}, {"params": params[1:]}])
        named = self.net.named_parameters()
        self.opt = MixedPrecisionOptimizer(inner, named_parameters=named, **scale, **kind.arguments)
        self.stopped: Stop | None = None

    def backward(self, bad: bool = False) -> None:
        self.opt.zero_grad()
        loss = sum(((p.float() - 0.5) ** 2).sum() for p in self.net.values())
        self.opt.backward(loss * (float("inf") if bad else 1.0))

    def iterate(self, bad: bool = False) -> None:
        self.backward(bad)
        self.opt.step()

    def rows(self) -> list[Tensor]:
        """Of each parameter: all that a checkpoint holds, in one tensor: master, moments, count."""
        state = self.opt.state_dict()["optimizer"]["state"]
        masters = self.opt.fp32_state_dict(self.net)
        found = []
        for at, name in enumerate(self.net):
            mine = state.get(at, {})
            parts = [masters[name], *(mine[key] for key in sorted(mine))]
            found.append(torch.cat([part.detach().double().reshape(-1).clone() for part in parts]))
        return found

    def counts(self) -> tuple[Any, ...]:
        saved = self.opt.state_dict()
        return saved["steps"], saved["skipped_steps"], repr(saved["scaler"])

    def check_model(self) -> None:
        """The model is the masters, rounded."""
        for name, value in self.opt.fp32_state_dict(self.net).items():
            assert torch.equal(self.net[name].detach(), value.to(self.net[name].dtype)), name


class Stop(KeyboardInterrupt):
    """As of Ctrl-C, and no other one."""


class Lines:
    """Counts the lines of the library that run within, and raises before one of them.

    Args:
        at: before which; 0 for none.
        again: raises once more, so many lines later; 0 for not.
    """

    def __init__(self, at: int = 0, again: int = 0) -> None:
        self.at = at
        self.again = again
        self.count = 0
        self.where = ""

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        if event == "line":
            self.count += 1
            if 0 < self.at <= self.count and torch._C._is_torch_function_enabled():
                # Else torch would be left as it is within a block that disables it: an exception does not come there.
                self.where += f" {frame.f_code.co_filename}:{frame.f_lineno}"
                self.at, self.again = self.count + self.again if self.again else 0, 0
                raise Stop
        return self._trace

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        before, grads = sys.gettrace(), torch.is_grad_enabled()
        gc.disable()  # what is left of other frames must not be freed, with lines of its own, among these
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)
            gc.enable()
            torch.set_grad_enabled(grads)  # the exception may have come between two lines of torch.no_grad()


@dataclass
class Found:
    """What the next calls find after a second step."""

    rows: list[Tensor]
    counts: tuple[Any, ...]
    said: list[str]


def _second_step(kind: Kind, bad: bool, lines: Lines, caplog: pytest.LogCaptureFixture) -> tuple[Training, Found]:
    training = Training(kind)
    training.iterate()
    training.backward(bad)
    caplog.clear()
    try:
        with lines():
            training.opt.step()
    except Stop as error:
        training.stopped = error  # kept, with the frames that it has left, as by a notebook
    rows, counts = training.rows(), training.counts()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return training, Found(rows, counts, said)


def _are_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def _check_line(kind: Kind, lines: Lines, bad: bool, caplog: pytest.LogCaptureFixture, known: dict[str, Any]) -> bool:
    """Stop a step before a line; whether that was said in the log."""
    training, found = _second_step(kind, bad, lines, caplog)
    training.check_model()
    before, after, third = known["before"], known["after"], known["third"]
    said = [line for line in found.said if "in the middle" in line]
    where = f"{lines.where}: {found.said}"
    if said:
        assert len(said) == 1, where
        assert found.counts[:2] == after.counts[:2], where
    elif found.counts == after.counts:
        assert _are_same(found.rows, after.rows), where
        training.iterate()
        assert _are_same(training.rows(), third.rows), where
        assert training.counts() == third.counts, where
    else:
        assert found.counts == before.counts, where
        assert _are_same(found.rows, before.rows), where
        training.opt.step()  # the gradients wait as they did
        assert _are_same(training.rows(), after.rows), where
        assert training.counts() == after.counts, where
    training.iterate()
    training.check_model()
    assert all(bool(row.isfinite().all()) for row in training.rows()), where
    training.stopped = None  # it holds frames, which hold this
    return bool(said)


def _known(kind: Kind, bad: bool, caplog: pytest.LogCaptureFixture) -> tuple[int, dict[str, Any]]:
    """How many lines a step runs, and what there is before it, after it, and after the one that follows."""
    _second_step(kind, bad, Lines(), caplog)  # what is made once is made
    lines = Lines()
    training, after = _second_step(kind, bad, lines, caplog)
    early = Training(kind)
    early.iterate()
    before = Found(early.rows(), early.counts(), [])
    training.iterate()
    third = Found(training.rows(), training.counts(), [])
    assert bad or not any(map(torch.equal, before.rows, after.rows))
    assert before.counts != after.counts
    return lines.count, {"before": before, "after": after, "third": third}


BAD = pytest.mark.parametrize("bad", [False, True], ids=["a step", "a skip"])
AGAIN = pytest.mark.parametrize("again", [0, 7, 61], ids=["one exception", "two", "two, far apart"])


@BAD
@AGAIN
@pytest.mark.parametrize("stride", [STRIDE, pytest.param(1, marks=pytest.mark.slow)], ids=["some lines", "all lines"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_at_a_line_leaves_all_or_nothing_or_says_so(
    kind: str, stride: int, again: int, bad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    count, known = _known(KINDS[kind], bad, caplog)
    assert count > 100
    said = [_check_line(KINDS[kind], Lines(at, again), bad, caplog, known) for at in range(1, count + 1, stride)]
    assert sum(said) < len(said) / 2


@BAD
def test_an_exception_in_a_step_of_released_gradients_leaves_it_counted_or_to_be_counted(
    bad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Parameters were stepped in backward, whatever happens in ``step``; the next one counts that if it is not yet."""
    kind = Kind({"gradient_release": True, "loss_scale": 64.0})
    count, known = _known_of_released(kind, bad, caplog)
    assert count > 100
    for at in range(1, count + 1, STRIDE):
        lines = Lines(at)
        training, found = _second_step(kind, bad, lines, caplog)
        assert _are_same(found.rows, known["after"].rows), lines.where
        assert found.counts[0] == 2, lines.where
        training.opt.step()
        shown = slice(2 if any("in the middle" in line for line in found.said) else 3)  # the scaler may have missed it
        assert training.counts()[shown] == known["after"].counts[shown], lines.where
        assert training.opt.stats()["steps"] == 2, lines.where
        training.iterate()
        training.check_model()
        assert _are_same(training.rows(), known["third"].rows), lines.where
        assert training.counts()[shown] == known["third"].counts[shown], lines.where
        training.stopped = None  # it holds frames, which hold this


def _known_of_released(kind: Kind, bad: bool, caplog: pytest.LogCaptureFixture) -> tuple[int, dict[str, Any]]:
    """As :func:`_known`, without what there is before."""
    _second_step(kind, bad, Lines(), caplog)  # what is made once is made
    lines = Lines()
    training, after = _second_step(kind, bad, lines, caplog)
    assert after.counts[:2] == (2, int(bad))
    training.iterate()
    return lines.count, {"after": after, "third": Found(training.rows(), training.counts(), [])}


def _stopped_backward(kind: Kind, lines: Lines) -> Training:
    training = Training(kind)
    training.iterate()
    training.opt.zero_grad()
    loss = sum(((p.float() - 0.5) ** 2).sum() for p in training.net.values())
    try:
        with lines():
            training.opt.backward(loss)
    except Stop as error:
        training.stopped = error
    return training


@pytest.mark.parametrize("masters", ["full", pytest.param("split", marks=pytest.mark.all), "split24"])
def test_an_exception_in_a_backward_that_steps_leaves_each_parameter_stepped_or_not(masters: str) -> None:
    """What was stepped is no write of others. ``zero_grad`` ends it, and nothing was counted."""
    kind = Kind({"gradient_release": True, "loss_scale": 64.0, "master_weights": masters, "on_model_write": "error"})
    lines, before = Lines(), Training(kind)
    before.iterate()
    after = _stopped_backward(kind, lines)
    assert not any(map(torch.equal, before.rows(), after.rows()))
    assert lines.count > 100
    for at in range(1, lines.count + 1, STRIDE):
        cut = Lines(at)
        training = _stopped_backward(kind, cut)
        training.opt.zero_grad()
        is_whole = training.counts()[0] == 2  # the exception came when autograd had called all hooks
        rows = zip(training.rows(), before.rows(), after.rows(), strict=True)
        assert all(torch.equal(row, b) or torch.equal(row, a) for row, b, a in rows), cut.where
        training.check_model()
        if is_whole:
            training.opt.step()
        training.iterate()
        assert training.opt.stats()["steps"] == 2 + is_whole, cut.where
        training.check_model()
        training.stopped = None  # it holds frames, which hold this
