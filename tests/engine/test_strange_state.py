"""state_dict after the user read ``state`` by the model's parameter; and resuming over a change of requires_grad."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.overrides import TorchFunctionMode

from engine.checks import assert_same, by_step, linear_loss, one_step, ones
from fp16opt import MixedPrecisionOptimizer

pytestmark = by_step


def test_reading_state_by_the_models_parameter_leaves_nothing_to_save() -> None:
    params = [ones(), ones(3, torch.float32), ones()]
    opt = MixedPrecisionOptimizer(Adam(params))
    one_step(opt, params[:2] + params[2:], [1.0, 1.0, None])
    want = copy.deepcopy(opt.state_dict())
    unused = list(opt.master_params())[2]
    for param in params:
        opt.state[param]
    opt.state[unused]  # of a master: stays, as in torch
    got = opt.state_dict()
    assert got["optimizer"]["state"].pop(2) == {}
    assert_same(got, want)
    assert unused in opt.state
    other = MixedPrecisionOptimizer(Adam([nn.Parameter(p.detach().clone()) for p in params]))
    other.load_state_dict(want)


def _two(frozen: bool) -> tuple[list[nn.Parameter], MixedPrecisionOptimizer]:
    params = [ones(), ones()]
    params[0].requires_grad_(not frozen)
    return params, MixedPrecisionOptimizer(Adam(params))


def _step(params: list[Any], opt: MixedPrecisionOptimizer) -> None:
    opt.zero_grad()
    opt.backward(linear_loss(params, [1.0 if p.requires_grad else None for p in params]))
    opt.step()


def test_resuming_in_frozen_parameters_what_was_saved_after_unfreezing_goes_on() -> None:
    """The checkpoint's masters decide, not today's requires_grad."""
    params, opt = _two(frozen=True)
    _step(params, opt)
    params[0].requires_grad_(True)
    _step(params, opt)
    saved = copy.deepcopy(opt.state_dict())
    fresh, other = _two(frozen=True)
    other.load_state_dict(saved)
    assert_same(other.state_dict(), saved)
    fresh[0].requires_grad_(True)
    _step(params, opt)
    _step(fresh, other)
    assert_same(other.state_dict(), opt.state_dict())


def test_resuming_in_unfrozen_parameters_what_was_saved_before_says_how() -> None:
    params, opt = _two(frozen=True)
    _step(params, opt)
    saved = copy.deepcopy(opt.state_dict())
    _, other = _two(frozen=False)
    with pytest.raises(ValueError, match=r"needs a master.*was frozen.*set requires_grad=False before wrapping"):
        other.load_state_dict(saved)
    fresh, other = _two(frozen=True)
    other.load_state_dict(saved)
    for some in (params, fresh):
        some[0].requires_grad_(True)
    _step(params, opt)
    _step(fresh, other)
    assert_same(other.state_dict(), opt.state_dict())


# -- state of a class that has few operations, as torchao's 8-bit and 4-bit optimizers keep it -----------------------


class Coded(torch.Tensor):
    """Numbers as halves of an inner tensor. Like torchao's it shows a dtype, and has no ``clone``."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, dtype: torch.dtype) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["inner"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Any:
        return cls(parts["inner"], dtype)

    def numbers(self) -> torch.Tensor:
        return self.inner * 2

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:  # what it shows, over the same memory
            return cls(args[0].inner, (kwargs or {}).get("dtype", args[0].dtype))
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner, args[0].dtype)
        if func is torch.ops.aten.copy_.default:
            args[0].inner.copy_(args[1].inner)
            return args[0]
        raise NotImplementedError(f"{func} of Coded")


class CodedMomentum(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 2.0**-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p]["average"] = Coded(torch.zeros(p.shape), p.dtype)
                average = self.state[p]["average"]
                average.inner.mul_(0.5).add_(p.grad.float() / 2)
                p.sub_(average.numbers().to(p.dtype) * group["lr"])


def _layouts() -> list[nn.Parameter]:
    laid_out = torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last)
    return [nn.Parameter(value.to(torch.bfloat16)) for value in (torch.ones(5), laid_out)]


def test_state_of_a_class_without_clone_is_saved_and_resumed() -> None:
    params, fresh = _layouts(), _layouts()
    opt, other = (MixedPrecisionOptimizer(CodedMomentum(some)) for some in (params, fresh))
    _step(params, opt)
    saved = opt.state_dict()
    other.load_state_dict(saved)
    kept = [state["average"].inner.clone() for state in saved["optimizer"]["state"].values()]
    _step(params, opt)
    _step(fresh, other)
    for mine, theirs in zip(opt.master_params(), other.master_params(), strict=True):
        assert torch.equal(mine, theirs)
        assert type(other.state[theirs]["average"]) is Coded
        assert torch.equal(opt.state[mine]["average"].inner, other.state[theirs]["average"].inner)
    before = [state["average"].inner for state in other.state_dict()["optimizer"]["state"].values()]
    assert not any(map(torch.equal, before, kept))  # they were stepped, in memory of their own


def test_state_of_a_class_without_clone_is_carried_over_by_copies() -> None:
    """What such a class answers to ``.to(float32)`` may share its memory."""
    params = _layouts()
    used = CodedMomentum(params)
    for p in params:
        p.grad = torch.ones_like(p)
    used.step()
    held = [used.state[p]["average"] for p in params]
    kept = [one.inner.clone() for one in held]
    opt = MixedPrecisionOptimizer(used)
    for p in params:
        p.grad = None
    _step(params, opt)
    for one, before in zip(held, kept, strict=True):
        assert torch.equal(one.inner, before)
    for master, before in zip(opt.master_params(), kept, strict=True):
        assert opt.state[master]["average"].dtype == torch.float32
        assert torch.equal(opt.state[master]["average"].inner, before * 0.5 + 0.5)


def test_a_refused_load_puts_state_of_a_class_without_clone_back() -> None:
    params = _layouts()
    opt = MixedPrecisionOptimizer(CodedMomentum(params))
    _step(params, opt)
    saved = copy.copy(opt.state_dict())
    kept = [state["average"].inner.clone() for state in saved["optimizer"]["state"].values()]

    def refuse(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["average"].inner.zero_()
        raise ValueError("a hook's refusal")

    opt.optimizer.register_load_state_dict_post_hook(refuse)
    with pytest.raises(ValueError, match="a hook's refusal"):
        opt.load_state_dict(saved)
    for master, before in zip(opt.master_params(), kept, strict=True):
        assert torch.equal(opt.state[master]["average"].inner, before)


class _Counting(Optimizer):
    """Gradient descent that counts its steps beside the entries of parameters, in a number of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})
        self.state["all"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["all"] += 1
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=self.param_groups[0]["lr"])


def test_an_optimizer_may_keep_a_number_of_its_own_in_its_state() -> None:
    param = ones()
    opt = MixedPrecisionOptimizer(_Counting([param]), loss_scale=4.0)
    for _ in range(2):
        one_step(opt, [param], [0.25])
    assert param.tolist() == [1.0 - 2 * 0.125] * len(param)
    assert opt.optimizer.state["all"] == 2


class _Stop(KeyboardInterrupt):
    """As of Ctrl-C, and no other one."""


class _StopAtMoments(TorchFunctionMode):
    """Raises where Adam has counted the step, and is about to write the first moment."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.lerp_:
            raise _Stop
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("turned", [False, True], ids=["as torch makes it", "turned around"])
def test_a_step_is_known_to_be_cut_whatever_the_order_of_a_loaded_state(turned: bool) -> None:
    """A file may hold an entry in another order than torch makes it."""
    param = ones()
    opt = MixedPrecisionOptimizer(Adam([param], foreach=False), fused_step=False, loss_scale=4.0)
    one_step(opt, [param], [0.25])
    saved = copy.deepcopy(opt.state_dict())
    if turned:
        state = saved["optimizer"]["state"]
        saved["optimizer"]["state"] = {at: dict(reversed(entry.items())) for at, entry in state.items()}
    opt.load_state_dict(saved)
    opt.zero_grad()
    opt.backward(linear_loss([param], [0.25]))
    with pytest.raises(_Stop), _StopAtMoments():
        opt.step()
    saved = opt.state_dict()
    assert [saved["steps"], int(saved["optimizer"]["state"][0]["step"])] == [2, 2]
