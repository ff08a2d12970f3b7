"""``param_groups`` and ``state``: what groups hold is trained, by identity and order, however it came there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from fp16opt import MixedPrecisionOptimizer

STEPS = pytest.mark.parametrize("fused_step", ["auto", False])
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


def weight(n: int = 4, dtype: torch.dtype = torch.float16, value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((n,), value, dtype=dtype))


def train(opt: MixedPrecisionOptimizer, *params: Tensor) -> None:
    opt.zero_grad()
    loss = sum(((p.float() - 3.0) ** 2).sum() for p in params)
    opt.backward(loss)
    opt.step()


def sgd(params: Any, **options: Any) -> SGD:
    return SGD(params, **{"lr": 0.125, "momentum": 0.5, "foreach": False, **options})


# -- put in another's place --------------------------------------------------------------------------------------------


def _linear(opt: MixedPrecisionOptimizer, *params: Tensor) -> None:
    """A step with gradients of 1."""
    opt.zero_grad()
    opt.backward(sum(p.float().sum() for p in params))
    opt.step()


@STEPS
@DTYPES
@pytest.mark.parametrize("with_state", [False, True])
def test_a_parameter_put_in_anothers_place_is_trained(fused_step: Any, dtype: torch.dtype, with_state: bool) -> None:
    """What densification of Gaussian splats does: a longer parameter, its state grown with it, in group and module."""
    first, second = weight(4, dtype), weight(3, dtype)
    opt = MixedPrecisionOptimizer(sgd([first, second]), loss_scale=64.0, fused_step=fused_step)
    _linear(opt, first, second)
    group = opt.param_groups[0]
    buffer = opt.state.pop(group["params"][0])["momentum_buffer"]
    new = nn.Parameter(torch.cat([first.detach(), first.detach()[:1]]))
    if with_state:
        opt.state[new] = {"momentum_buffer": torch.cat([buffer, torch.zeros_like(buffer[:1])])}
    group["params"][0] = new
    _linear(opt, new, second)
    assert new.tolist() == [0.875 - 0.125 * (1.5 if with_state else 1.0)] * 4 + [0.875 - 0.125]
    assert second.tolist() == [0.875 - 0.125 * 1.5] * 3
    assert [m.dtype for m in opt.master_params()] == [torch.float32] * 2


# -- between a check and its step --------------------------------------------------------------------------------------

CHECKS: dict[str, Any] = {
    "clip": lambda opt: opt.clip_master_grads(1e6),
    "clip of values": lambda opt: opt.clip_master_values(1e6),
    "the door": lambda opt: opt.update_master_grads(),
    "a read": lambda opt: next(opt.master_params()).grad,
}
SAYS = r"param_groups were changed between a check .*Put them back as they were; or .*opt\.zero_grad\(\)"


@STEPS
@pytest.mark.parametrize("check", CHECKS)
def test_groups_that_are_put_back_are_no_change(fused_step: Any, check: str) -> None:
    first, second = weight(4), weight(2)
    opt = MixedPrecisionOptimizer(sgd([first, second]), loss_scale=64.0, fused_step=fused_step)
    opt.backward(((first.float() - 3.0) ** 2).sum() + ((second.float() - 3.0) ** 2).sum())
    CHECKS[check](opt)
    gone = opt.param_groups[0]["params"].pop()
    for call in (opt.step, opt.state_dict, lambda: opt.scale_loss(torch.ones(()))):
        with pytest.raises(RuntimeError, match=SAYS):
            call()
    opt.param_groups[0]["params"].append(gone)
    opt.step()
    assert first.tolist() + second.tolist() == [1.5] * 6


# -- reading them ------------------------------------------------------------------------------------------------------


@STEPS
@DTYPES
@pytest.mark.parametrize("how", ["unfrozen", "appended", "assigned"])
def test_reading_param_groups_brings_them_up_to_date(fused_step: Any, dtype: torch.dtype, how: str) -> None:
    """torch's ``unscale_`` reads them before any call of the wrapper: it must find masters."""
    first, second = weight(4, dtype), weight(3, dtype)
    second.requires_grad_(how != "unfrozen")
    given = [first] if how == "appended" else [first, second]
    opt = MixedPrecisionOptimizer(sgd(given), fused_step=fused_step)
    if how == "unfrozen":
        second.requires_grad_(True)
    elif how == "appended":
        opt.optimizer.param_groups[0]["params"].append(second)
    else:
        opt.optimizer.param_groups[0]["params"] = [second, first]
    (group,) = opt.param_groups
    assert [p.dtype for p in group["params"]] == [torch.float32] * 2
    assert not {id(p) for p in group["params"]} & {id(first), id(second)}
    assert all(a is b for a, b in zip(group["params"], opt.master_params(), strict=True))
    want = [second, first] if how == "assigned" else [first, second]
    assert all(a is b for a, b in zip(opt.model_params(), want, strict=True))


# -- frozen parameters -------------------------------------------------------------------------------------------------


def test_a_parameter_twice_is_refused_from_every_way_in() -> None:
    first = weight(4)
    opt = MixedPrecisionOptimizer(sgd([first]), loss_scale=64.0)
    with pytest.raises(ValueError, match=r"(?i)twice|more than one|already|duplicate"):
        opt.add_param_group({"params": [first]})
    opt.param_groups[0]["params"].append(first)
    with pytest.raises(ValueError, match=r"(?i)twice|more than one|already|duplicate"):
        train(opt, first)


# -- state by a model's parameter --------------------------------------------------------------------------------------


@STEPS
@DTYPES
def test_state_of_a_frozen_parameter_is_its_masters_once_it_trains(fused_step: Any, dtype: torch.dtype) -> None:
    """What was written there before is what is stepped: no dict that the optimizer does not read."""
    first, frozen = weight(4, dtype), weight(3, dtype).requires_grad_(False)
    opt = MixedPrecisionOptimizer(sgd([first, frozen]), loss_scale=64.0, fused_step=fused_step)
    opt.state[frozen]["momentum_buffer"] = torch.ones(3)
    frozen.requires_grad_(True)
    train(opt, first, frozen)  # the gradient is -4: buffer 0.5 - 4, times 0.125
    assert frozen.tolist() == [1.4375] * 3
    assert opt.state[frozen] is opt.state[list(opt.master_params())[1]]


@STEPS
def test_moments_that_are_reset_by_the_models_parameter_are_reset(fused_step: Any) -> None:
    """The end of a ReLoRA cycle; the next state_dict has them too."""
    first = weight(4)
    opt = MixedPrecisionOptimizer(Adam([first], lr=0.1), loss_scale=64.0, fused_step=fused_step)
    train(opt, first)
    for key in ("exp_avg", "exp_avg_sq"):
        opt.state[first][key] = torch.zeros_like(first, dtype=torch.float32)
    saved = opt.state_dict()["optimizer"]["state"][0]
    assert saved["exp_avg"].tolist() == [0.0] * 4
    train(opt, first)
    gradient = opt.state[first]["exp_avg"] / 0.1  # the first moment began at zero again
    assert gradient.tolist() == pytest.approx([2 * (1.1 - 3.0)] * 4, rel=1e-3)


@STEPS
def test_state_of_an_unknown_parameter_is_a_key_error(fused_step: Any) -> None:
    first, other = weight(4), weight(3)
    opt = MixedPrecisionOptimizer(
        Adam([first], lr=0.1),
        loss_scale=64.0,
        fused_step=fused_step,
        named_parameters=[("first.weight", first), ("other.weight", other)],
    )
    train(opt, first)
    assert other not in opt.state
    with pytest.raises(KeyError, match=r"other\.weight|no parameter of this optimizer"):
        opt.state[other]
    assert len(opt.state) == 1
    opt.state_dict()


@STEPS
def test_cleared_state_begins_anew(fused_step: Any) -> None:
    first = weight(4)
    opt = MixedPrecisionOptimizer(sgd([first]), loss_scale=64.0, fused_step=fused_step)
    _linear(opt, first)
    opt.state.clear()
    _linear(opt, first)
    assert first.tolist() == [0.75] * 4


# -- torch's own swapping ----------------------------------------------------------------------------------------------


@STEPS
@pytest.mark.parametrize("call", ["load_state_dict", "to"])
def test_torch_may_swap_a_modules_parameters(fused_step: Any, call: str) -> None:
    """torch.__future__.set_swap_module_params_on_conversion: a weak reference to a parameter would forbid it."""
    net = nn.Linear(4, 3).half()
    opt = MixedPrecisionOptimizer(sgd(net.parameters()), fused_step=fused_step)
    opt.backward(net(torch.ones(2, 4).half()).float().sum())
    opt.step()
    opt.zero_grad()
    with torch.no_grad():
        saved = {key: value.clone() + 1.0 for key, value in net.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if call == "to":
            net.to(torch.float16)
            net.load_state_dict(saved)
        else:
            net.load_state_dict(saved)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    opt.backward(net(torch.ones(2, 4).half()).float().sum() * 0.0)
    opt.step()
    # SGD goes on with half of the momentum of the first step, whose gradient was 2.
    for p, m in zip(net.parameters(), opt.master_params(), strict=True):
        assert torch.equal(p.detach(), m.detach().half())
    assert torch.allclose(net.bias.detach().float(), saved["bias"].float() - 0.125, atol=2e-3)


# -- what the groups are -----------------------------------------------------------------------------------------------


def test_groups_state_and_defaults_are_the_wrapped_optimizers() -> None:
    first = weight(4)
    inner = sgd([first])
    opt = MixedPrecisionOptimizer(inner, loss_scale=64.0)
    assert opt.param_groups is inner.param_groups
    assert opt.defaults is inner.defaults
    train(opt, first)
    assert list(opt.state) == list(inner.state)
    opt.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    assert isinstance(opt, Optimizer)


@STEPS
def test_a_group_may_hold_its_parameters_in_a_tuple(fused_step: Any) -> None:
    first = weight(4)
    opt = MixedPrecisionOptimizer(sgd([first]), loss_scale=64.0, fused_step=fused_step)
    opt.param_groups[0]["params"] = tuple(opt.param_groups[0]["params"])
    train(opt, first)
    train(opt, first)
    assert first.tolist() == [2.125] * 4


def test_a_batch_is_given_up_as_a_skip_also_where_groups_were_changed_before() -> None:
    model = [torch.nn.Parameter(torch.ones(2).half()) for _ in range(2)]
    opt = MixedPrecisionOptimizer(torch.optim.SGD(model[:1], lr=0.1), dynamic=True)
    opt.backward(model[0].float().sum() * float("inf"))
    opt.clip_master_grads(1.0)
    opt.param_groups.append({**opt.param_groups[0], "params": [model[1]]})
    scale = opt.loss_scale
    opt.zero_grad()
    assert (opt.skipped_steps, opt.loss_scale) == (1, scale / 2)
