"""offload() and onload() on the pretended card: all that the engine keeps leaves it for a while, bit for bit."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pretended
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

from engine.checks import assert_same, parameters
from engine.test_offload import MAKERS, MODES, Run
from fp16opt import MixedPrecisionOptimizer
from fp16opt.kernels import host_memory

WAYS: dict[str, dict[str, Any]] = {
    **MODES,
    "no masters": {"master_weights": "none"},
    "deltas": {"track_changes": True},
    "released": {"gradient_release": True, "loss_scale": 8.0, "master_weights": "split"},
    "own step": {"fused_step": False},
}
by_way = pytest.mark.parametrize("settings", list(WAYS.values()), ids=list(WAYS))


@pytest.fixture(autouse=True)
def card(emulated_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The pretended card, on which no pages are locked when a test is over."""
    yield from pretended.unlocked_after(emulated_cuda, monkeypatch)


def alive() -> list[Tensor]:
    """Tensors with memory that were made in this test: the fixture has the collector forget the others."""
    gc.collect()
    found = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.layout is torch.strided]
    return [t for t in found if t.untyped_storage().nbytes()]


def left_behind(run: Run) -> list[Tensor]:
    """Tensors with memory of the card that are not the model's."""
    theirs = {t.untyped_storage().data_ptr() for t in (*run.params, *run.problem.curvature, *run.problem.target)}
    return [t for t in alive() if t.untyped_storage().data_ptr() not in theirs and not host_memory.is_on_host(t)]


def train(run: Run, steps: int) -> Run:
    run.train(steps)
    run.opt.zero_grad()
    return run


@by_way
@pytest.mark.parametrize("name", ["AdamW", "momentum"])
def test_all_leaves_the_card_and_comes_back_bit_for_bit(name: str, settings: dict[str, Any], card: Any) -> None:
    make = MAKERS[name]
    run = train(Run(make, **settings), 3)
    run.opt.offload()
    assert left_behind(run) == []
    memory = run.opt.memory()
    assert memory.host >= memory.masters + memory.moments > 0 or settings.get("master_weights") == "none"
    assert len(card.locked) == 1
    slab = dict(card.locked)
    run.opt.onload()
    assert run.opt.memory().host == 0
    assert_same(run.snapshot(), train(Run(make, **settings), 3).snapshot())
    train(run, 2)
    locks = card.locks
    run.opt.offload()
    assert (card.locked, card.locks) == (slab, locks), "the same slab again"
    run.opt.onload()
    wanted = train(train(Run(make, **settings), 3), 2)
    assert_same(train(run, 3).all(), train(wanted, 3).all())


@by_way
def test_weights_that_their_framework_moves_meanwhile_are_no_writes(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run, wanted = train(Run(**settings), 3), train(Run(**settings), 3)
    run.opt.offload()
    before = [param.data for param in run.params if param.numel()]
    for param in run.params:
        away = param.data.clone()
        param.data = torch.empty(0, dtype=param.dtype)
        param.data = away
    addresses = {weight.data_ptr() for weight in before}
    held = {id(t) for t in alive() if t.untyped_storage().data_ptr() in addresses}
    assert held == {id(weight) for weight in before}, "nothing of the engine keeps them on the card"
    assert "memory" in repr(run.opt)
    run.opt.zero_grad()
    run.opt.onload()
    assert_same(train(run, 2).all(), train(wanted, 2).all())
    assert "wrote" not in caplog.text


CALLS: dict[str, Callable[[Run], object]] = {
    "step": lambda run: run.opt.step(),
    "backward": lambda run: run.opt.backward(torch.zeros((), requires_grad=True)),
    "scale_loss": lambda run: run.opt.scale_loss(torch.zeros(())),
    "clip_master_grads": lambda run: run.opt.clip_master_grads(1.0),
    "update_master_grads": lambda run: run.opt.update_master_grads(),
    "state_dict": lambda run: run.opt.state_dict(),
    "load_state_dict": lambda run: run.opt.load_state_dict({}),
    "master_params": lambda run: run.opt.master_params(),
    "refresh_masters": lambda run: run.opt.refresh_masters(),
    "write_masters": lambda run: run.opt.write_masters(),
    "add_param_group": lambda run: run.opt.add_param_group({"params": [Parameter(torch.ones(2))]}),
    "copy.deepcopy or pickle": lambda run: pickle.dumps(run.opt),
}


def test_calls_in_between_say_onload() -> None:
    run = train(Run(), 2)
    run.opt.offload()
    for name, call in CALLS.items():
        with pytest.raises(
            RuntimeError, match=rf"^{name} needs what opt.offload\(\) has brought to the host. Call opt.onload"
        ):
            call(run)
    run.opt.zero_grad()
    run.opt.offload()  # there is nothing to do
    assert run.opt.stats()["steps"] == 2
    assert "on the host" in repr(run.opt)
    run.opt.onload()
    run.opt.onload()  # there is nothing to do
    assert_same(train(run, 2).all(), train(train(Run(), 2), 2).all())


@pytest.mark.parametrize("accumulation", ["model", "fp32"])
def test_between_backward_and_step_it_is_refused(accumulation: str, card: Any) -> None:
    run = Run(grad_accumulation=accumulation)
    run.opt.backward(run.problem.loss(run.params))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="between a backward and its step"):
            run.opt.offload()
        run.opt.clip_master_grads(0.5)
    assert card.locked == {}
    run.opt.step()
    run.opt.offload()
    run.opt.onload()


@pytest.mark.parametrize("settings", list(MODES.values()), ids=list(MODES))
def test_with_state_on_the_host_the_rest_goes_there_too(settings: dict[str, Any], card: Any) -> None:
    run = train(Run(offload="cpu", **settings), 2)
    kept, locked = run.opt.memory().host, dict(card.locked)
    run.opt.offload()
    assert left_behind(run) == []
    assert len(card.locked) == len(locked) + 1
    run.opt.onload()
    assert run.opt.memory().host == kept
    assert_same(train(run, 2).all(), train(train(Run(**settings), 2), 2).all())


def test_too_little_memory_leaves_all_on_the_card(monkeypatch: pytest.MonkeyPatch, card: Any) -> None:
    run = train(Run(), 2)
    with monkeypatch.context() as small:
        small.setattr(host_memory, "available", lambda: 1000)
        with pytest.raises(RuntimeError, match="of page-locked host memory can't be had"):
            run.opt.offload()
    assert run.opt.memory().host == 0
    assert_same(train(run, 2).all(), train(train(Run(), 2), 2).all())


def test_an_interrupted_move_is_finished_by_onload(monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(Run(), 2)
    whole, moved = host_memory.on_host, []

    def cut(tensor: Tensor) -> Tensor:
        moved.append(tensor)
        if len(moved) == 5:
            raise KeyboardInterrupt
        return whole(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "on_host", cut)
        with pytest.raises(KeyboardInterrupt):
            run.opt.offload()
    moved.clear()
    with pytest.raises(RuntimeError, match=r"Call opt\.onload\(\)"):
        run.opt.step()
    run.opt.onload()
    assert run.opt.memory().host == 0
    assert_same(train(run, 2).all(), train(train(Run(), 2), 2).all())


def test_a_scaler_of_two_optimizers_serves_the_other_one() -> None:
    first, second = parameters(((64, 66),)), parameters(((64, 66),), seed=1)
    one = MixedPrecisionOptimizer(AdamW(first), dynamic=True)
    other = MixedPrecisionOptimizer(AdamW(second), scaler=one.scaler)
    one.offload()
    other.backward(second[0].float().sum() * 1e-3)
    other.step()
    one.onload()
    assert other.stats()["steps"] == 1
