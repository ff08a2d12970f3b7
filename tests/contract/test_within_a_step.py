"""Within a step what would see a mixture of before and after is refused; what only reads or clears is not."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW

import fp16opt
from fp16opt import MixedPrecisionOptimizer, distributed

REFUSED = r"was called within a step .* Call it after step\(\): set a flag in the handler"


class Training:
    """Two weights, and what calls need."""

    def __init__(self, **arguments: Any) -> None:
        self.net = nn.ParameterDict({name: nn.Parameter(torch.ones(3).half()) for name in ("first", "second")})
        self.inner = AdamW(self.net.parameters(), lr=2.0**-5)
        self.opt = MixedPrecisionOptimizer(self.inner, loss_scale=64.0, track_changes=True, **arguments)
        self.saved = copy.deepcopy(self.opt.state_dict())
        self.sharded = copy.deepcopy(distributed.state_dict(self.net, self.opt))  # type: ignore[arg-type]
        self.averages = fp16opt.AveragedMasters(self.net, self.opt, fp16opt.ema(0.5))

    def loss(self) -> torch.Tensor:
        return sum(((p.float() - 0.5) ** 2).sum() for p in self.net.values())  # type: ignore[return-value]

    def iterate(self) -> None:
        self.opt.zero_grad()
        self.opt.backward(self.loss())
        self.opt.step()

    def masters(self) -> list[list[float]]:
        return [master.tolist() for master in self.opt.fp32_state_dict(self.net).values()]

    def set_scale(self) -> None:
        self.opt.loss_scale = 2.0

    def swap(self) -> None:
        with self.averages.swap():
            pass


Call = Callable[[Training], Any]
REFUSED_CALLS: dict[str, Call] = {
    "state_dict": lambda one: one.opt.state_dict(),
    "fp32_state_dict": lambda one: one.opt.fp32_state_dict(one.net),
    "take_delta": lambda one: one.opt.take_delta(one.net),
    "load_state_dict": lambda one: one.opt.load_state_dict(one.saved),
    "step": lambda one: one.opt.step(),
    "backward": lambda one: one.opt.backward(one.loss()),
    "scale_loss": lambda one: one.opt.scale_loss(one.loss()),
    "clip_master_grads": lambda one: one.opt.clip_master_grads(1.0),
    "clip_master_values": lambda one: one.opt.clip_master_values(1.0),
    "update_master_grads": lambda one: one.opt.update_master_grads(),
    "refresh_masters": lambda one: one.opt.refresh_masters(),
    "add_param_group": lambda one: one.opt.add_param_group({"params": [nn.Parameter(torch.ones(2).half())]}),
    "loss_scale": Training.set_scale,
    "deepcopy": lambda one: copy.deepcopy(one.opt),
    "pickle": lambda one: pickle.dumps(one.opt),
    "distributed.state_dict": lambda one: distributed.state_dict(one.net, one.opt),  # type: ignore[arg-type]
    "distributed.fp32_state_dict": lambda one: distributed.fp32_state_dict(one.net, one.opt),  # type: ignore[arg-type]
    "distributed.load_state_dict": lambda one: distributed.load_state_dict(one.net, one.opt, one.sharded),  # type: ignore[arg-type]
    "distributed.save": lambda one: distributed.save("never", one.net, one.opt),  # type: ignore[arg-type]
    "distributed.save_async": lambda one: distributed.save_async("never", one.net, one.opt),  # type: ignore[arg-type]
    "distributed.load": lambda one: distributed.load("never", one.net, one.opt),  # type: ignore[arg-type]
    "AveragedMasters.update": lambda one: one.averages.update(),
    "AveragedMasters.swap": Training.swap,
}
ALLOWED: dict[str, Call] = {
    "param_groups": lambda one: [group["lr"] for group in one.opt.param_groups],
    "state": lambda one: [dict(one.opt.state[p]) for p in one.net.values() if p in one.opt.state],
    "master_params": lambda one: [master.tolist() for master in one.opt.master_params()],
    "write_masters": lambda one: one.opt.write_masters(),
    "zero_grad": lambda one: one.opt.zero_grad(),
    "stats": lambda one: (one.opt.stats(), one.opt.loss_scale, one.opt.memory(), repr(one.opt)),
}
KINDS = {"one pass": {}, "own step": {"fused_step": False}}


def _iterated(kind: str, call: Call, whens: Sequence[str], is_refused: bool) -> tuple[list[list[float]], list[str]]:
    """Masters after three steps, in the second and third of which hooks call something; and which hooks did."""
    one, called = Training(**KINDS[kind]), []

    def hook(when: str) -> None:
        called.append(when)
        with pytest.raises(RuntimeError, match=REFUSED) if is_refused else contextlib.nullcontext():
            call(one)

    one.iterate()
    for when in whens:
        getattr(one.inner, f"register_step_{when}_hook")(lambda *_, when=when: hook(when))
    one.iterate()
    one.iterate()
    assert one.opt.stats()["steps_taken"] == 3
    return one.masters(), called


@functools.cache
def _undisturbed(kind: str) -> list[list[float]]:
    return _iterated(kind, lambda one: None, [], is_refused=False)[0]


@pytest.mark.cells("every")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_call_of_a_hook_is_refused_and_changes_nothing(name: str, kind: str) -> None:
    called = ["pre", "post"] * 2
    assert _iterated(kind, REFUSED_CALLS[name], called[:2], is_refused=True) == (_undisturbed(kind), called)


@pytest.mark.cells("every")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALLOWED)
def test_a_hook_may_read_and_clear(name: str, kind: str) -> None:
    called = ["post"] * 2 if name == "zero_grad" else ["pre", "post"] * 2  # as in torch, nothing is left to step else
    assert _iterated(kind, ALLOWED[name], called[: len(called) // 2], is_refused=False) == (_undisturbed(kind), called)


class Waiting(SGD):
    """Calls something between two parameters."""

    between: Callable[[], None] = staticmethod(lambda: None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, param in enumerate(self.param_groups[0]["params"]):
            param.sub_(param.grad, alpha=0.25)
            if not number:
                self.between()


def _waiting() -> tuple[MixedPrecisionOptimizer, Waiting]:
    weights = [nn.Parameter(torch.ones(2).half()) for _ in range(2)]
    inner = Waiting(weights, lr=1.0)
    opt = MixedPrecisionOptimizer(inner, loss_scale=2.0)
    opt.backward(sum(weight.float().sum() for weight in weights))  # type: ignore[arg-type]
    return opt, inner


@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_handler_that_saves_stops_the_step_and_one_that_sets_a_flag_does_not(saves: bool) -> None:
    opt, inner = _waiting()
    flags: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: opt.state_dict() if saves else flags.append(1))
    inner.between = lambda: signal.raise_signal(signal.SIGUSR1)
    try:
        if saves:
            with pytest.raises(RuntimeError, match=REFUSED):
                opt.step()
        else:
            opt.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    masters = [master[0].item() for master in opt.state_dict()["masters"]]
    assert masters == ([0.75, 1.0] if saves else [0.75, 0.75])
    assert len(flags) == (not saves)


def test_another_thread_is_refused_while_a_step_runs_and_served_after_it() -> None:
    opt, inner = _waiting()
    found: list[Any] = []

    def save() -> None:
        try:
            found.append(opt.state_dict()["steps"])
        except RuntimeError as error:
            found.append(str(error))

    def run() -> None:
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()

    inner.between = run
    opt.step()
    run()
    assert "state_dict was called within a step" in found[0]
    assert found[1] == 1


def test_what_a_closure_calls_is_its_own_and_what_a_hook_calls_is_not() -> None:
    weight = nn.Parameter(torch.ones(2).half())
    inner = LBFGS([weight], lr=0.25, max_iter=2)
    opt = MixedPrecisionOptimizer(inner, loss_scale=4.0)
    refused = []

    def hook(*_: Any) -> None:
        with pytest.raises(RuntimeError, match=REFUSED):
            opt.state_dict()
        refused.append(True)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = (weight.float() ** 2).sum()
        opt.backward(loss)
        opt.clip_master_grads(100.0)
        assert opt.state_dict()["steps"] == 0
        return loss

    inner.register_step_post_hook(hook)
    opt.step(closure)
    assert refused
    assert opt.state_dict()["steps"] == 1


def test_a_save_on_ranks_is_refused_before_it_writes(tmp_path: Path) -> None:
    one = Training()
    one.inner.register_step_post_hook(lambda *_: distributed.save(str(tmp_path / "there"), one.net, one.opt))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=REFUSED):
        one.iterate()
    assert not list(tmp_path.iterdir())
    assert one.opt.stats()["steps_taken"] == 1
