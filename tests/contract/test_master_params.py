"""``master_params()`` with the gradients that masters show: reading, editing and setting them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from contract.worlds import (
    ALL,
    FUSED,
    INF,
    MIXED_FUSED,
    MIXED_WRAPPED,
    NAN,
    WRAPPED,
    Mode,
    World,
    by,
    every_mode_that_keeps_gradients,
    every_scale_but_one,
    instead,
    times,
    values,
)
from fp16opt import MixedPrecisionOptimizer

GRADS, MORE = values(0.5, 1.0, -0.5), values(1.0, -0.25, 2.0)
HAVE_MASTERS = [mode for mode in ALL if mode.has_masters]
with_masters = by(HAVE_MASTERS)
# -- handing them out --------------------------------------------------------------------------------------------------


def test_they_are_fp32_in_the_order_of_the_groups() -> None:
    world = World(MIXED_WRAPPED)
    assert [m.dtype for m in world.masters] == [torch.float32] * 3
    assert [m.shape for m in world.masters] == [p.shape for p in world.params]
    assert all(a is b for a, b in zip(world.opt.model_params(), world.params, strict=True))
    assert not {id(m) for m in world.masters} & {id(p) for p in world.params}
    lies_on = [m.data_ptr() == p.data_ptr() for m, p in zip(world.masters, world.params, strict=True)]
    assert lies_on == [p.dtype is torch.float32 for p in world.params]
    assert all(a is b for a, b in zip(world.opt.param_groups[0]["params"], world.masters, strict=True))


# -- reading -----------------------------------------------------------------------------------------------------------


@by(ALL)
def test_those_that_were_made_stay_readable_after_the_step(mode: Mode) -> None:
    """Until zero_grad."""
    world = World(mode)
    world.backward(GRADS)
    world.check_master_grads(GRADS)
    world.expect_step(GRADS)
    world.check_master_grads(GRADS)
    world.opt.zero_grad()
    assert [m.grad for m in world.masters] == [None] * 3


@every_mode_that_keeps_gradients
@pytest.mark.parametrize("i", [0, 1])
def test_a_gradient_of_the_step_before_the_last_is_not_shown(mode: Mode, i: int) -> None:
    world = World(mode)
    for grads in (GRADS, instead(GRADS, i, None)):
        world.model_zero_grad()
        world.backward(grads)
        if grads[i] is not None:
            assert torch.equal(world.masters[i].grad, grads[i])
        world.expect_step(grads)
    assert world.masters[i].grad is None


@every_mode_that_keeps_gradients
def test_after_a_plain_backward_and_a_step_those_of_an_earlier_step_are_gone(mode: Mode) -> None:
    """The step of a kernel makes none, so that there are none to see; other steps show their own."""
    world = World(mode, "one")
    world.loss(GRADS).backward()
    world.check_master_grads(GRADS)
    world.expect_step(GRADS)
    world.model_zero_grad()
    world.loss(MORE).backward()
    world.expect_step(MORE)
    if mode is WRAPPED:
        world.check_master_grads(MORE)
    else:
        assert [m.grad for m in world.masters] == [None] * 3


def test_reading_inside_of_a_hook_does_nothing() -> None:
    world = World(WRAPPED)
    seen: list[Any] = []
    handle = world.params[0].register_post_accumulate_grad_hook(lambda p: seen.append(world.masters[0].grad))
    world.backward(GRADS)
    handle.remove()
    assert seen == [None]
    world.backward(GRADS)
    world.expect_step(times(GRADS, 2))


# -- editing -----------------------------------------------------------------------------------------------------------


@with_masters
@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("i", [0, 1])
def test_an_edit_that_is_not_finite_skips_and_one_that_mends_does_not(mode: Mode, value: float, i: int) -> None:
    world = World(mode, "dynamic")
    world.backward(GRADS)
    world.masters[i].grad[-1] = value
    world.expect_skip()
    world.opt.zero_grad()
    world.backward(instead(GRADS, i, torch.full_like(GRADS[i], value)))
    world.masters[i].grad = torch.ones_like(GRADS[i])
    world.expect_step(instead(GRADS, i, torch.ones_like(GRADS[i])))


# -- setting -----------------------------------------------------------------------------------------------------------


@by([WRAPPED, FUSED])
def test_at_a_scale_of_one_they_may_be_set_without_a_backward(mode: Mode) -> None:
    world = World(mode, "one")
    for master, g in zip(world.masters, GRADS, strict=True):
        master.grad = g.clone()
    world.expect_step(GRADS)


@by([WRAPPED, FUSED])
@every_scale_but_one
def test_at_another_scale_setting_one_without_a_backward_is_refused(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    with pytest.raises(RuntimeError, match=r"update_master_grads\(\)"):
        world.masters[0].grad = GRADS[0].clone()
    world.masters[0].grad = None
    world.opt.step()
    world.check()


@by([WRAPPED, FUSED])
def test_a_tensor_that_does_not_fit_is_torchs_error(mode: Mode) -> None:
    world = World(mode)
    world.backward(GRADS)
    with pytest.raises(RuntimeError, match=r"size|shape"):
        world.masters[0].grad = torch.ones(17)
    with pytest.raises(TypeError, match="grad"):
        world.masters[0].grad = 3.0
    world.expect_step(GRADS)


# -- those of FP32 and FP64 parameters, which lie on the weights' memory -----------------------------------------------

STEPS: dict[str, dict[str, Any]] = {
    "one pass": {},
    "wrapped": {"fused_step": False},
    "sums": {"grad_accumulation": "fp32"},
    "split": {"master_weights": "split"},
    "none": {"master_weights": "none"},
}
WIDE = [
    pytest.param(dtype, arguments, id=f"{name}-{dtype}")
    for dtype in (torch.float32, torch.float64)
    for name, arguments in STEPS.items()
    if (name, dtype) != ("split", torch.float64)  # which is refused
]
EVERY_WIDE = pytest.mark.parametrize(("dtype", "arguments"), WIDE)


def _wide(dtype: torch.dtype, **arguments: Any) -> tuple[nn.Parameter, MixedPrecisionOptimizer]:
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    return weight, MixedPrecisionOptimizer(SGD([weight], lr=0.5, momentum=0.5), loss_scale=8.0, **arguments)


def _train(weight: Tensor, opt: MixedPrecisionOptimizer) -> None:
    opt.zero_grad()
    opt.backward(weight.sum())
    opt.step()


@EVERY_WIDE
def test_on_the_weights_memory_a_write_of_either_is_a_write_of_both(
    dtype: torch.dtype, arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """No copy, no rounding, one version counter: and so no write behind the optimizer's back."""
    weight, opt = _wide(dtype, **arguments)
    (master,) = opt.master_params()
    assert master is not weight
    assert (master.dtype, master.data_ptr()) == (dtype, weight.data_ptr())
    with torch.no_grad():
        weight.fill_(2.0 + 2.0**-20)
        assert master.tolist() == [2.0 + 2.0**-20] * 4
        assert master._version == weight._version
        if "split" not in arguments.values():
            master.fill_(3.0)
            assert weight.tolist() == [3.0] * 4
            assert master._version == weight._version
        weight.data.fill_(1.0)
    caplog.clear()  # of what is said of a static scale
    _train(weight, opt)
    assert weight.tolist() == master.tolist() == [0.5] * 4
    assert caplog.records == []
    assert opt.stats()["model_writes_taken"] == 0


@EVERY_WIDE
@pytest.mark.parametrize("when", ["at first", "after a step", "after backward"])
def test_a_master_follows_where_the_weights_memory_was_replaced(
    dtype: torch.dtype, arguments: dict[str, Any], when: str
) -> None:
    """``weight.data = other``: that memory is the only truth, and the old one is left as it is."""
    weight, opt = _wide(dtype, **arguments)
    if when == "after a step":
        _train(weight, opt)
        opt.state[weight]["momentum_buffer"].zero_()
    if when == "after backward":
        opt.backward(weight.sum())
    old = weight.data
    before = old.clone()
    weight.data = torch.full((4,), 4.0, dtype=dtype)
    if when == "after backward":
        opt.step()
    else:
        _train(weight, opt)
    (master,) = opt.master_params()
    assert master.data_ptr() == weight.data_ptr() != old.data_ptr()
    assert weight.tolist() == master.tolist() == [3.5] * 4
    assert torch.equal(old, before)
    _train(weight, opt)
    assert weight.tolist() == [3.5 - 0.5 * 1.5] * 4
    with torch.no_grad():
        weight.add_(1.0)
    assert master._version == weight._version


@by([WRAPPED, FUSED, MIXED_FUSED])
def test_a_wrapped_optimizer_that_reads_them_in_its_step_gets_what_is_there(mode: Mode) -> None:
    """No master's ``.grad`` computes anything while the engine itself is at work."""
    seen: list[list[Tensor | None]] = []

    class Reads(SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append([None if p.grad is None else p.grad.clone() for p in self.param_groups[0]["params"]])
            return super().step(closure)

    world = World(mode, make=lambda params, **options: Reads(params, lr=0.25, foreach=False, **options))
    seen.clear()
    world.backward(instead(GRADS, 2, None))
    world.expect_step(instead(GRADS, 2, None))
    of_the_engine, of_the_reference = seen
    assert str(of_the_engine) == str(of_the_reference)
    for got, want in zip(of_the_engine, instead(GRADS, 2, None), strict=True):
        assert (got is None) if want is None else torch.equal(got, want)


@pytest.mark.parametrize("master_weights", ["full", "split", "split24", "none"])
def test_what_master_params_gives_finds_its_state(master_weights: str) -> None:
    """Split masters are made anew when they are asked for, and each stands for the one that is stepped."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    inner = SGD([weight], lr=0.5, momentum=0.5)
    opt = MixedPrecisionOptimizer(inner, master_weights=master_weights)
    (early,) = opt.master_params()
    _train(weight, opt)
    for master in (early, *opt.master_params()):
        assert master in opt.state
        assert opt.state[master] is opt.state[weight] is opt.state.get(master)
        assert opt.state[master]["momentum_buffer"].tolist() == [1.0] * 4
    gone = MixedPrecisionOptimizer(SGD([nn.Parameter(torch.ones(3).half())], lr=0.5), master_weights="split")
    with pytest.raises(KeyError, match="no parameter of this optimizer"):
        opt.state[next(gone.master_params())]
