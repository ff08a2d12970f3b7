"""``step(closure)``, ``closure="once" | "reevaluate" | None``; and ``train()`` with ``eval()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.checks import assert_model_is_rounded_masters
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contract.worlds import (
    FOLDING,
    FUSED,
    FUSED_ADAMW,
    INF,
    MIXED_WRAPPED,
    SPLIT,
    WRAPPED,
    Mode,
    World,
    by,
    every_mode,
    every_scale,
    values,
)
from fp16opt import MixedPrecisionOptimizer, register_fused_step

GRADS = values(0.5, 1.0, -0.5)


class Closure:
    """A closure as users write it; counts its calls and keeps the scales and the model that it saw."""

    def __init__(self, world: World, grads: Callable[[int], Any] = lambda n: GRADS) -> None:
        self.world, self.grads = world, grads
        self.scales: list[float] = []
        self.losses: list[float] = []

    def __call__(self) -> Tensor:
        number = len(self.scales)
        self.scales.append(float(self.world.opt.loss_scale))
        self.world.opt.zero_grad()
        loss = self.world.loss(self.grads(number))
        self.world.opt.backward(loss)
        self.losses.append(float(loss))
        return loss.detach()


# -- classes that evaluate once ------------------------------------------------------------------------------------


@every_scale
@every_mode
@pytest.mark.parametrize("value", [None, 2.5, "a word"], ids=repr)
def test_a_closure_that_makes_no_new_gradients_steps_those_that_are_there(
    mode: Mode, scale: str, value: object
) -> None:
    """Trainers always pass one; whatever it returns is returned, also on a skip."""
    world = World(mode, scale)
    world.backward(GRADS)
    assert world.opt.step(lambda: value) is value
    world.expect_stepped(GRADS)
    world.opt.zero_grad()
    world.backward([INF, 1.0, 1.0])
    assert world.opt.step(lambda: value) is value
    world.expect_skipped()


@every_mode
def test_it_runs_with_gradients_enabled_under_no_grad(mode: Mode) -> None:
    world = World(mode)
    closure = Closure(world)
    with torch.no_grad():
        world.opt.step(closure)
    world.expect_stepped(GRADS)


class Asks(SGD):
    """Evaluates once and keeps what its closure returned."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.values: list[Any] = []

    def step(self, closure: Any = None) -> Any:
        self.values.append(None if closure is None else closure())
        super().step()
        return self.values[-1]


@by([WRAPPED, FOLDING, MIXED_WRAPPED])
def test_the_wrapped_optimizer_gets_a_closure_that_returns_the_loss(mode: Mode) -> None:
    world = World(mode, "dynamic", make=lambda params: Asks(params, lr=0.25, foreach=False))
    closure = Closure(world)
    loss = world.opt.step(closure)
    assert len(closure.scales) == 1
    assert [float(v) for v in world.opt.optimizer.values] == [float(loss)] == closure.losses
    world.expect_stepped(GRADS)


class Allocations(TorchDispatchMode):
    """Bytes of new tensors that torch's operators return. A clone, an empty_like: what a copy begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.layout is torch.strided and t.untyped_storage().data_ptr() not in there:
                self.total += t.untyped_storage().nbytes()
        return out


@by([WRAPPED, FUSED, FUSED_ADAMW, SPLIT, FOLDING])
def test_nothing_is_copied(mode: Mode) -> None:
    """A step with a closure allocates what the step without one does; a copy of one of three masters would show."""
    shapes = ((2000,), (20, 100), (3000,))
    totals = []
    for with_closure in (False, True):
        world = World(mode, "static", shapes=shapes)
        for _ in range(3):
            world.opt.zero_grad()
            world.backward([0.5, 1.0, -0.5])
            with Allocations() as seen:
                world.opt.step((lambda: None) if with_closure else None)
        totals.append(seen.total)
    assert totals[1] - totals[0] < 4 * 2000 / 2, totals


# -- classes that evaluate more often ------------------------------------------------------------------------------


def reevaluating(mode: Mode, make: Any, scale: str = "static", **options: Any) -> World:
    """What evaluates more often says so, LBFGS aside."""
    arguments = {} if make is lbfgs else {"closure": "reevaluate"}
    return World(mode, scale, make=make, arguments=arguments, **options)


def lbfgs(params: Any) -> LBFGS:
    return LBFGS(params, lr=0.5, max_iter=4, history_size=3, tolerance_change=0.0, tolerance_grad=0.0)


class TwoSteps(Optimizer):
    """As SAM: up along the gradient, evaluated there, back and down. It evaluates twice."""

    def __init__(self, params: Any, lr: float = 0.25, rho: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        old = []
        for group in self.param_groups:
            for p in group["params"]:
                old.append(p.detach().clone())
                if p.grad is not None:
                    p.add_(p.grad, alpha=group["rho"])
                self.state[p]["first"] = p.detach().clone()
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for p, was in zip(group["params"], old, strict=True):
                p.copy_(was)
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
        return loss


class SeesMasters(Closure):
    """Before each evaluation the model is the rounding of the masters' values at that time."""

    def __call__(self) -> Tensor:
        assert_model_is_rounded_masters(self.world.opt)
        self.models.append([p.detach().clone() for p in self.world.params])
        return self.quadratic()

    def __init__(self, world: World, *args: Any) -> None:
        super().__init__(world, *args)
        self.models: list[list[Tensor]] = []

    def quadratic(self) -> Tensor:
        self.scales.append(float(self.world.opt.loss_scale))
        self.world.opt.zero_grad()
        loss = sum(((p.float() - 0.5) ** 2).sum() for p in self.world.params)
        self.world.opt.backward(loss)
        return loss.detach()


MANY = pytest.mark.parametrize("make", [lbfgs, TwoSteps])
MODES = by([WRAPPED, FOLDING, MIXED_WRAPPED])


@MODES
@MANY
@every_scale
def test_each_evaluation_sees_the_masters_current_values(mode: Mode, make: Any, scale: str) -> None:
    world = reevaluating(mode, make, scale)
    closure = SeesMasters(world)
    for _ in range(2):
        world.opt.step(closure)
    assert len(closure.scales) >= 4
    first, second = closure.models[:2]
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert_model_is_rounded_masters(world.opt)
    assert int(world.opt.skipped_steps) == 0


def _copies(world: World) -> list[Any]:
    state = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in world.opt.state[m].items()}
             for g in world.opt.param_groups for m in g["params"]]  # fmt: skip
    return [[m.detach().tolist() for m in world.masters], [p.detach().tolist() for p in world.params], repr(state)]


@MODES
@MANY
@pytest.mark.parametrize("at", [0, 1])
def test_an_evaluation_that_overflows_lowers_the_scale_and_is_evaluated_again(mode: Mode, make: Any, at: int) -> None:
    world = reevaluating(mode, make, "dynamic", scaler_settings={"growth_interval": 1000})
    closure = Closure(world, lambda n: [INF, 1.0, 1.0] if n in (at, at + 1) else GRADS)
    world.opt.step(closure)
    assert closure.scales[: at + 3] == [64.0] * (at + 1) + [32.0, 16.0]
    assert set(closure.scales[at + 2 :]) == {16.0}
    assert float(world.opt.loss_scale) == 16.0
    assert int(world.opt.skipped_steps) == 0
    assert not world.opt.step_was_skipped
    assert all(torch.isfinite(m).all() for m in world.masters)


@MODES
@MANY
def test_without_new_gradients_an_overflow_is_not_evaluated_again(mode: Mode, make: Any) -> None:
    """One skip, one lowering: the scale is not driven to its floor."""
    world = reevaluating(mode, make, "dynamic")
    world.opt.step(Closure(world))
    before, scale = _copies(world), float(world.opt.loss_scale)
    world.opt.zero_grad()
    world.backward([INF, 1.0, 1.0])
    calls = []
    world.opt.step(lambda: calls.append(1) or torch.zeros(()))
    assert len(calls) == 1
    assert float(world.opt.loss_scale) == scale / 2
    assert int(world.opt.skipped_steps) == 1
    assert _copies(world) == before


@MODES
@MANY
@pytest.mark.parametrize("at", [0, 1])
def test_at_the_floor_everything_is_restored_and_one_skip_is_counted(mode: Mode, make: Any, at: int) -> None:
    """The floor is 1, from 64 on six halvings; ``step`` returns."""
    world = reevaluating(mode, make, "dynamic")
    world.opt.step(Closure(world))
    before = _copies(world)
    scale = float(world.opt.loss_scale)
    closure = Closure(world, lambda n: GRADS if n < at else [INF, 1.0, 1.0])
    world.opt.step(closure)
    assert closure.scales[at:] == [scale / 2**k for k in range(7)]
    assert float(world.opt.loss_scale) == 1.0
    assert int(world.opt.skipped_steps) == 1
    assert bool(world.opt.step_was_skipped)
    assert [found.name for found in world.opt.overflow_report()] == ["first.weight"]
    assert _copies(world) == before
    world.opt.step(Closure(world))
    assert not world.opt.step_was_skipped


@MODES
@MANY
@pytest.mark.parametrize("scale", ["one", "static"])
def test_a_static_scale_cannot_go_lower(mode: Mode, make: Any, scale: str) -> None:
    world = reevaluating(mode, make, scale)
    before = _copies(world)
    closure = Closure(world, lambda n: [INF, 1.0, 1.0])
    world.opt.step(closure)
    assert len(closure.scales) == 1
    assert int(world.opt.skipped_steps) == 1
    assert _copies(world)[:2] == before[:2]


@MODES
@pytest.mark.parametrize(("make", "closure"), [(TwoSteps, None), (TwoSteps, "once"), (lbfgs, "once")])
def test_a_class_that_evaluates_again_without_saying_so_is_told_the_argument(
    mode: Mode, make: Any, closure: str | None
) -> None:
    """It would be evaluated at weights that are not the masters' rounded."""
    world = World(mode, "dynamic", make=make, arguments={"closure": closure})
    with pytest.raises(RuntimeError, match=r'closure="reevaluate"'):
        world.opt.step(Closure(world))
    assert int(world.opt.skipped_steps) == 0


@MODES
def test_a_class_that_evaluates_once_may_be_reevaluated(mode: Mode) -> None:
    """An overflow then lowers the scale and is evaluated again within the step."""
    world = World(mode, "dynamic", arguments={"closure": "reevaluate"})
    closure = Closure(world, lambda n: [INF, 1.0, 1.0] if n == 0 else GRADS)
    world.opt.step(closure)
    assert closure.scales == [64.0, 32.0]
    assert int(world.opt.skipped_steps) == 0
    assert world.opt.loss_scale == 32.0
    world.reference.scale.write(32.0)
    world.reference.step(GRADS)
    world.check_weights()


@pytest.mark.parametrize("value", ["twice", True, 2], ids=repr)
def test_the_argument_is_one_of_three(value: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    with pytest.raises((TypeError, ValueError), match="closure"):
        MixedPrecisionOptimizer(SGD([weight], lr=0.1), closure=value)


@pytest.mark.parametrize("value", [3, "closure"], ids=repr)
def test_what_cannot_be_called_is_refused_and_gradients_stay(value: Any) -> None:
    world = World(WRAPPED)
    world.backward(GRADS)
    with pytest.raises(TypeError, match="closure"):
        world.opt.step(value)
    world.expect_step(GRADS)


# -- train() and eval() --------------------------------------------------------------------------------------------


class ScheduleFree(SGD):
    """Its ``eval()`` moves the parameters, its ``train()`` moves them back."""

    in_training = True

    @torch.no_grad()
    def _move(self, by: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(by)

    def eval(self) -> None:
        if self.in_training:
            self._move(0.3)
        self.in_training = False

    def train(self) -> None:
        if not self.in_training:
            self._move(-0.3)
        self.in_training = True


@MODES
@every_scale
def test_train_and_eval_reach_the_wrapped_optimizer_and_masters_are_copied_down(mode: Mode, scale: str) -> None:
    world = World(mode, scale, make=lambda params: ScheduleFree(params, lr=0.25, foreach=False))
    world.backward(GRADS)
    world.expect_step(GRADS)
    trained = [p.detach().clone() for p in world.params]
    for _ in range(2):
        world.opt.eval()
        assert not world.opt.optimizer.in_training
        assert_model_is_rounded_masters(world.opt)
        assert all(not torch.equal(p, t) for p, t in zip(world.params, trained, strict=True))
    world.opt.train()
    assert world.opt.optimizer.in_training
    assert_model_is_rounded_masters(world.opt)
    for p, t in zip(world.params, trained, strict=True):
        assert torch.allclose(p.detach().float(), t.float(), atol=1e-3)  # an ulp of FP16 is 2**-10 there
    with torch.no_grad():
        for mine, m in zip(world.reference.masters, world.masters, strict=True):
            mine.copy_(m)
    world.opt.zero_grad()
    world.backward(GRADS)
    world.expect_step(GRADS)


@every_mode
def test_train_and_eval_do_nothing_where_the_wrapped_optimizer_has_none(mode: Mode) -> None:
    world = World(mode)
    world.backward(GRADS)
    assert world.opt.eval() is None
    assert world.opt.train() is None
    world.expect_step(GRADS)


@pytest.mark.parametrize("weights", ["split", "split24"])
def test_eval_that_would_write_split_masters_is_refused(weights: str) -> None:
    class Free(torch.optim.SGD):
        """Its ``eval()`` moves the parameters."""

        @torch.no_grad()
        def eval(self) -> None:
            for p in self.param_groups[0]["params"]:
                p.add_(2.0**-13)

    register_fused_step(Free, "sgd", {"lr": "lr"})
    param = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(Free([param], lr=2.0**-10), master_weights=weights)
    with pytest.raises(RuntimeError, match="add_: a split master was to be written"):
        opt.eval()
    opt.train()
    assert [m.tolist() for m in opt.master_params()] == [[[1.0] * 2] * 3] == [param.tolist()]


class Switched(torch.optim.SGD):
    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize("name", ["train", "eval"])
def test_its_own_train_and_eval_raise_and_name_the_object_to_call(name: str) -> None:
    """They would move masters while the model stays where it is."""
    inner = Switched([torch.nn.Parameter(torch.ones(4, dtype=torch.float16))], lr=0.5)
    opt = MixedPrecisionOptimizer(inner)
    with pytest.raises(RuntimeError, match=rf"Switched.{name}\(\) was called.*Call opt.{name}\(\) of the Mixed"):
        getattr(inner, name)()
    assert getattr(opt, name)() is None


def test_lbfgs_returns_the_first_loss() -> None:
    weight = torch.nn.Parameter(torch.full((2,), 2.0, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(torch.optim.LBFGS([weight], line_search_fn="strong_wolfe"))

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = weight.float().square().sum()
        opt.backward(loss)
        return loss

    assert float(opt.step(closure)) == 8.0
    assert float(weight.detach().float().abs().max()) < 1e-3
