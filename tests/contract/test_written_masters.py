"""A master that the user wrote wins, whatever else was written or noticed meanwhile; nobody keeps what is let go."""

from __future__ import annotations

import copy
import gc
import importlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine.checks import assert_model_is_rounded_masters
from torch import Tensor
from torch.optim import LBFGS

from contract.worlds import ALL, HALF, INF, Mode, World, by, every_mode, every_scale, sgd, values
from fp16opt import MixedPrecisionOptimizer

WRITABLE = by([mode for mode in ALL if mode.has_masters and not mode.is_mixed])
SHAPES = ((4,), (4,), (4,))


def _world(mode: Mode, **arguments: Any) -> World:
    world = World(mode, "one", shapes=SHAPES, arguments=arguments)
    world.backward(values(0.0, 0.0, 0.0)[:1] + [torch.zeros(4)] * 2)
    world.opt.step()
    return world


def _write_master(opt: MixedPrecisionOptimizer, i: int, value: float) -> None:
    with torch.no_grad():
        list(opt.master_params())[i].fill_(value)


def _copy_(p: Tensor, value: float) -> None:
    with torch.no_grad():
        p.copy_(torch.full_like(p, value))


def _data(p: Tensor, value: float) -> None:
    p.data.fill_(value)


WRITES = pytest.mark.parametrize("write", [_copy_, _data], ids=["copy_", "data"])
LOOKS: dict[str, Callable[[World], object]] = {
    "nobody": lambda world: None,
    "state_dict": lambda world: world.opt.state_dict(),
    "zero_grad": lambda world: world.opt.zero_grad(),
}


def _zero_step(opt: MixedPrecisionOptimizer, params: list[Any]) -> None:
    """A step that moves nothing: zeros and no weight decay."""
    opt.zero_grad()
    opt.backward(sum((p.float() * 0.0).sum() for p in params))
    opt.step()


TOUCHES = pytest.mark.parametrize("touched", ["nothing", "same bits", "other bits"])


def _touch(p: Tensor, how: str) -> None:
    """Its own model weight is written after all, as by ``model.load_state_dict``."""
    if how != "nothing":
        _copy_(p, p.detach()[0].item() + 3.0 * (how == "other bits"))


@WRITABLE
@WRITES
@TOUCHES
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("first", ["master", "model"])
def test_a_written_master_wins_though_another_weight_was_written(
    mode: Mode,
    write: Callable[[Tensor, float], None],
    touched: str,
    look: str,
    first: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = _world(mode)
    if first == "model":
        write(world.params[1], 3.0)
    _write_master(world.opt, 0, 2.0)
    if first == "master":
        write(world.params[1], 3.0)
    with caplog.at_level(logging.WARNING):
        LOOKS[look](world)
        _touch(world.params[0], touched)
        _zero_step(world.opt, world.params)
    masters = world.masters
    # A call has copied the written master down: a write of its weight after that is a new one.
    first_one = 5.0 if look != "nobody" and touched == "other bits" else 2.0
    assert masters[0].detach().tolist() == pytest.approx([first_one] * 4, rel=2e-2)  # AdamW's decay is less than 1%
    assert masters[1].detach().tolist() == pytest.approx([3.0] * 4, rel=2e-2)
    assert_model_is_rounded_masters(world.opt)
    assert "second.weight" in caplog.text
    assert ("first.weight" in caplog.text) == (first_one == 5.0)


@WRITABLE
def test_a_written_master_wins_over_its_own_weight_that_was_written_too(mode: Mode) -> None:
    world = _world(mode)
    _copy_(world.params[0], 5.0)
    _write_master(world.opt, 0, 2.0)
    _zero_step(world.opt, world.params)
    assert world.masters[0].detach().tolist() == pytest.approx([2.0] * 4, rel=2e-2)
    assert_model_is_rounded_masters(world.opt)


# -- freed without the garbage collector ---------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    importlib.import_module("torch._dynamo")  # else a first call does: errors caught on the way hold frames they met
    gc.disable()
    yield
    gc.enable()


def _backward(world: World) -> None:
    world.backward(values(0.5, 1.0, -0.5))


def _read(world: World) -> None:
    _backward(world)
    assert world.masters[0].grad is not None


def _skip(world: World) -> None:
    world.backward([INF, 1.0, 1.0])
    world.opt.step()


def _closure(world: World) -> None:
    def closure() -> Tensor:
        world.opt.zero_grad()
        loss = world.loss(values(0.5, 1.0, -0.5))
        world.opt.backward(loss)
        return loss.detach()

    world.opt.step(closure)


def _saved(world: World) -> None:
    world.opt.load_state_dict(copy.deepcopy(world.opt.state_dict()))


def _refused(world: World) -> None:
    _backward(world)
    with pytest.raises((TypeError, ValueError)):
        world.opt.clip_master_grads(-1.0)


LAST = [_backward, _read, _skip, _closure, _saved, _refused]


@every_mode
@pytest.mark.parametrize("last", LAST, ids=lambda f: f.__name__.strip("_"))
def test_masters_and_state_go_with_the_last_reference(mode: Mode, last: Any, no_collector: None) -> None:
    """The model and its gradients live on."""
    world = World(mode, "dynamic", **({"momentum": 0.5} if mode.make is sgd else {}))
    for _ in range(2):
        world.opt.zero_grad()
        world.backward(values(0.5, 1.0, -0.5))
        world.opt.step()
    world.opt.zero_grad()
    last(world)
    kept = _references(world)
    assert len(kept) >= 4
    params = world.params
    del world
    left = [name for name, reference in kept.items() if reference() is not None]
    assert not left, f"{left} live on"
    assert len(params) == 3


def _references(world: World) -> dict[str, weakref.ref[Any]]:
    """Of what costs memory: masters in 16-bit models, moments, and the two optimizers."""
    found: dict[str, weakref.ref[Any]] = {
        "optimizer": weakref.ref(world.opt),
        "wrapped optimizer": weakref.ref(world.opt.optimizer),
    }
    stepped = [p for group in world.opt.param_groups for p in group["params"]]
    for i, (p, master) in enumerate(zip(world.params, stepped, strict=True)):
        if p.dtype is HALF:
            found[f"master {i}"] = weakref.ref(master)
        for key, value in world.opt.state[master].items():
            if isinstance(value, Tensor):
                found[f"{key} {i}"] = weakref.ref(value)
    return found


def test_lbfgs_goes_with_the_last_reference(no_collector: None) -> None:
    (mode, *_) = ALL
    world = World(mode, "dynamic", make=lambda params: LBFGS(params, lr=0.5, max_iter=3))
    _closure(world)
    kept = {"optimizer": weakref.ref(world.opt), "master": weakref.ref(world.masters[0])}
    del world
    assert [name for name, reference in kept.items() if reference() is not None] == []


@every_scale
def test_a_world_without_the_optimizer_is_freed_so_the_test_can_fail(scale: str, no_collector: None) -> None:
    """The check sees what somebody keeps."""
    world = World(ALL[0], scale)
    kept = _references(world)
    held = world.masters
    del world
    assert [name for name, reference in kept.items() if reference() is not None] == ["master 0", "master 1", "master 2"]
    assert len(held) == 3


# -- written by hooks and by other code around a step ------------------------------------------------------------------

CALLS: dict[str, Callable[[World], object]] = {
    "zero_grad": lambda world: world.opt.zero_grad(),
    "state_dict": lambda world: world.opt.state_dict(),
    "fp32_state_dict": lambda world: world.opt.fp32_state_dict(torch.nn.ParameterList(world.params)),
    "write_masters": lambda world: world.opt.write_masters(),
    "update_master_grads": lambda world: world.opt.update_master_grads(),
    "clip_master_values": lambda world: world.opt.clip_master_values(1.0),
    "step": lambda world: world.opt.step(),
}


@WRITABLE
@pytest.mark.parametrize("call", CALLS)
def test_a_written_master_reaches_a_parameter_that_leaves_the_group(mode: Mode, call: str) -> None:
    world = _world(mode)
    world.opt.zero_grad()
    _write_master(world.opt, 0, 2.0)
    del world.opt.param_groups[0]["params"][0]
    CALLS[call](world)
    assert world.params[0].tolist() == [2.0] * 4
    assert_model_is_rounded_masters(world.opt)
