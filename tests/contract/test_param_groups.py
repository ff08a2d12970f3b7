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


def train(opt: Any, *params: Tensor) -> None:
    opt.zero_grad()
    loss = sum(((p.float() - 3.0) ** 2).sum() for p in params)
    if isinstance(opt, MixedPrecisionOptimizer):
        opt.backward(loss)
    else:
        loss.backward()
    opt.step()


def sgd(params: Any, **options: Any) -> SGD:
    return SGD(params, **{"lr": 0.125, "momentum": 0.5, "foreach": False, **options})


class Beside:
    """A wrapper beside torch's optimizer on FP32 copies of the parameters, both treated alike."""

    def __init__(self, *models: nn.Parameter, groups: int = 1, fused_step: Any = "auto", make: Any = sgd) -> None:
        self.models, self.copies = list(models), [nn.Parameter(p.detach().float().clone()) for p in models]
        made = [make(self._parts(params, groups)) for params in (self.models, self.copies)]
        self.opt = MixedPrecisionOptimizer(made[0], loss_scale=64.0, fused_step=fused_step)
        self.plain: Optimizer = made[1]

    def _parts(self, params: list[nn.Parameter], groups: int) -> list[dict[str, Any]]:
        return [{"params": params[k::groups]} for k in range(groups)]

    def both(self, change: Any) -> None:
        """``change(optimizer, parameters)`` on either side."""
        change(self.opt, self.models)
        change(self.plain, self.copies)

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            # The copies get the gradients of the rounded weights, as the wrapper's masters do.
            self.opt.zero_grad()
            self.plain.zero_grad()
            self.opt.backward(sum(((p.float() - 3.0) ** 2).sum() for p in self.models if p.requires_grad))
            for p, c in zip(self.models, self.copies, strict=True):
                c.grad = None if p.grad is None else p.grad.float() / 64.0
            self.opt.step()
            self.plain.step()

    def check(self) -> None:
        masters = list(self.opt.master_params())
        assert len(masters) == len(self.copies)
        ours = [p for g in self.opt.param_groups for p in g["params"]]
        theirs = [p for g in self.plain.param_groups for p in g["params"]]
        for m, c in zip(ours, theirs, strict=True):
            assert m.dtype == torch.float32
            assert torch.allclose(m.detach(), c.detach(), rtol=1e-6, atol=0.0)
        for p, c in zip(self.models, self.copies, strict=True):
            assert torch.equal(p.detach(), c.detach().to(p.dtype)) or torch.allclose(
                p.detach().float(), c.detach(), rtol=2.0**-7
            )
        assert all(p.dtype == torch.float32 for p in ours), "a 16-bit parameter must not be stepped itself"


# -- put in another's place --------------------------------------------------------------------------------------------


@STEPS
@DTYPES
@pytest.mark.parametrize("with_state", [False, True])
def test_a_parameter_put_in_anothers_place_is_trained(fused_step: Any, dtype: torch.dtype, with_state: bool) -> None:
    """What densification of Gaussian splats does: a longer parameter, its state grown with it, in group and module."""
    beside = Beside(weight(4, dtype), weight(3, dtype), groups=2, fused_step=fused_step)
    beside.train()

    def grow(opt: Any, params: list[nn.Parameter]) -> None:
        group = opt.param_groups[0]
        state = opt.state.pop(group["params"][0])
        new = nn.Parameter(torch.cat([params[0].detach(), params[0].detach()[:1]]))
        if with_state:
            buffer = state["momentum_buffer"]
            opt.state[new] = {"momentum_buffer": torch.cat([buffer, torch.zeros_like(buffer[:1])])}
        group["params"][0] = params[0] = new

    grow(beside.opt, beside.models)
    # The copy grows from the weights as they are in the model: the new parameter's master begins there.
    beside.copies[0].data.copy_(beside.models[0].detach()[:4].float())
    grow(beside.plain, beside.copies)
    before = beside.models[0].detach().clone()
    beside.train(3)
    assert not torch.equal(before, beside.models[0].detach())
    beside.check()


@STEPS
def test_a_list_reassigned_to_the_models_parameters_goes_on_training(fused_step: Any) -> None:
    """Between tasks: state is cleared and the group is given the model's parameters again."""
    beside = Beside(weight(4), weight(3), fused_step=fused_step)
    beside.train(3)

    def again(opt: Any, params: list[nn.Parameter]) -> None:
        opt.state.clear()
        opt.param_groups[0]["params"] = list(params)

    for m, c in zip(beside.opt.master_params(), beside.copies, strict=True):
        assert torch.allclose(m.detach(), c.detach(), rtol=1e-6)
    beside.both(again)
    beside.train(3)
    beside.check()


# -- added, removed, unfrozen ------------------------------------------------------------------------------------------


@STEPS
@pytest.mark.parametrize("how", ["add_param_group", "inner add_param_group", "append", "new group"])
def test_a_parameter_that_is_added_gets_a_master(fused_step: Any, how: str) -> None:
    beside = Beside(weight(4), fused_step=fused_step)
    beside.train()

    def add(opt: Any, params: list[nn.Parameter]) -> None:
        new = weight(3, params[0].dtype)
        params.append(new)
        if how == "add_param_group":
            opt.add_param_group({"params": [new], "lr": 0.25})
        elif how == "inner add_param_group":
            getattr(opt, "optimizer", opt).add_param_group({"params": [new], "lr": 0.25})
        elif how == "append":
            opt.param_groups[0]["params"].append(new)
        else:
            opt.param_groups.append({**opt.param_groups[0], "params": [new]})

    beside.both(add)
    beside.train(3)
    beside.check()
    assert not torch.equal(beside.models[1].detach(), torch.ones(3).half())


@STEPS
def test_a_parameter_that_is_removed_is_let_go(fused_step: Any) -> None:
    first, second = weight(4), weight(3)
    opt = MixedPrecisionOptimizer(sgd([first, second]), loss_scale=64.0, fused_step=fused_step)
    train(opt, first, second)
    del opt.param_groups[0]["params"][1]
    was = second.detach().clone()
    train(opt, first, second)
    assert torch.equal(second.detach(), was)
    assert len(list(opt.master_params())) == len(list(opt.model_params())) == 1
    assert len(opt.state_dict()["masters"]) == 1
    train(opt, first)


@STEPS
@pytest.mark.parametrize("accumulation", ["model", "fp32"])
def test_a_parameter_that_is_unfrozen_gets_a_master(fused_step: Any, accumulation: str) -> None:
    first, frozen = weight(4), weight(3)
    frozen.requires_grad_(False)
    opt = MixedPrecisionOptimizer(
        sgd([first, frozen]), loss_scale=64.0, fused_step=fused_step, grad_accumulation=accumulation
    )
    train(opt, first)
    assert frozen.tolist() == [1.0] * 3
    frozen.requires_grad_(True)
    train(opt, first, frozen)
    assert frozen.tolist() == [1.5] * 3
    assert [m.dtype for m in opt.master_params()] == [torch.float32] * 2


# -- between a check and its step --------------------------------------------------------------------------------------

CHECKS: dict[str, Any] = {
    "clip": lambda opt: opt.clip_master_grads(1e6),
    "clip of values": lambda opt: opt.clip_master_values(1e6),
    "the door": lambda opt: opt.update_master_grads(),
    "a read": lambda opt: next(opt.master_params()).grad,
}
CHANGES: dict[str, Any] = {
    "one is added": lambda groups: groups[0]["params"].append(weight(3)),
    "a group is added": lambda groups: groups.append({**groups[0], "params": [weight(3)]}),
    "one is gone": lambda groups: groups[0]["params"].pop(),
    "another order": lambda groups: groups[0]["params"].reverse(),
    "one in another's place": lambda groups: groups[0]["params"].__setitem__(0, weight(4)),
}
CALLS: dict[str, Any] = {
    "step": lambda opt: opt.step(),
    "clip": lambda opt: opt.clip_master_grads(1.0),
    "the door": lambda opt: opt.update_master_grads(),
    "state_dict": lambda opt: opt.state_dict(),
    "scale_loss": lambda opt: opt.scale_loss(torch.ones(())),
}
SAYS = r"param_groups were changed between a check .*Put them back as they were; or .*opt\.zero_grad\(\)"


@STEPS
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("change", CHANGES)
def test_between_a_check_and_its_step_groups_may_not_change(fused_step: Any, check: str, change: str) -> None:
    """Neither the norm nor the check has seen it: the next call raises before it does anything."""
    first, second = weight(4), weight(2)
    opt = MixedPrecisionOptimizer(sgd([first, second]), loss_scale=64.0, fused_step=fused_step)
    opt.backward(first.float().sum() + second.float().sum())
    CHECKS[check](opt)
    CHANGES[change](opt.param_groups)
    for call in CALLS.values():
        with pytest.raises(RuntimeError, match=SAYS):
            call(opt)
    assert first.tolist() + second.tolist() == [1.0] * 6
    assert opt.stats()["steps"] == 0
    opt.zero_grad()
    held = list(opt.model_params())
    assert all(p.grad is None for p in held)
    assert [p.dtype for p in opt.master_params()] == [torch.float32] * len(held)
    train(opt, *held)
    assert all(p.tolist() == [1.5] * len(p) for p in held)


@STEPS
@pytest.mark.parametrize("check", CHECKS)
def test_groups_that_are_put_back_are_no_change(fused_step: Any, check: str) -> None:
    first, second = weight(4), weight(2)
    opt = MixedPrecisionOptimizer(sgd([first, second]), loss_scale=64.0, fused_step=fused_step)
    opt.backward(((first.float() - 3.0) ** 2).sum() + ((second.float() - 3.0) ** 2).sum())
    CHECKS[check](opt)
    gone = opt.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match=SAYS):
        opt.step()
    opt.param_groups[0]["params"].append(gone)
    opt.step()
    assert first.tolist() + second.tolist() == [1.5] * 6


@STEPS
@pytest.mark.parametrize("check", CHECKS)
def test_between_a_check_and_its_step_add_param_group_raises_before_it_adds(fused_step: Any, check: str) -> None:
    first, late = weight(4), weight(3)
    opt = MixedPrecisionOptimizer(sgd([first]), loss_scale=64.0, fused_step=fused_step)
    opt.backward(((first.float() - 3.0) ** 2).sum())
    CHECKS[check](opt)
    with pytest.raises(RuntimeError, match=SAYS):
        opt.add_param_group({"params": [late]})
    assert len(opt.param_groups) == 1
    opt.step()
    assert first.tolist() == [1.5] * 4
    opt.add_param_group({"params": [late]})
    opt.zero_grad()
    opt.backward(((late.float() - 3.0) ** 2).sum())
    opt.step()
    assert (first.tolist(), late.tolist()) == ([1.5] * 4, [1.5] * 3)


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

EVERY_STEP = pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"fused_step": False},
        {"grad_accumulation": "fp32"},
        {"master_weights": "split"},
        {"master_weights": "split24"},
        {"master_weights": "none"},
    ],
    ids=lambda arguments: "-".join(map(str, arguments.values())) or "one pass",
)


def _plain_sgd(params: Any) -> SGD:
    return SGD(params, lr=0.25, foreach=False)


@EVERY_STEP
@DTYPES
@pytest.mark.parametrize("look", ["nothing", *CHECKS])
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
def test_a_frozen_parameter_with_a_gradient_is_stepped(
    arguments: dict[str, Any], dtype: torch.dtype, look: str, when: str
) -> None:
    """As in torch: its gradient came from the user, who sets it by hand. It gets a master for that."""
    first, frozen = weight(4, dtype), weight(3, dtype).requires_grad_(False)
    if when == "before wrapping":
        frozen.grad = torch.ones_like(frozen)
    opt = MixedPrecisionOptimizer(_plain_sgd([first, frozen]), **arguments)
    first.grad, frozen.grad = torch.ones_like(first), torch.ones_like(frozen)
    if look != "nothing":
        CHECKS[look](opt)
    opt.step()
    assert (first.tolist(), frozen.tolist()) == ([0.75] * 4, [0.75] * 3)
    assert [id(m) for m in opt.param_groups[0]["params"]] != [id(first), id(frozen)]
    assert not any(m is frozen for m in opt.param_groups[0]["params"])


@EVERY_STEP
def test_a_frozen_parameter_that_never_had_a_gradient_has_no_master_and_stays(arguments: dict[str, Any]) -> None:
    first, frozen = weight(4), weight(3).requires_grad_(False)
    opt = MixedPrecisionOptimizer(_plain_sgd([first, frozen]), loss_scale=64.0, **arguments)
    opt.backward(first.float().sum())
    opt.step()
    assert (first.tolist(), frozen.tolist()) == ([0.75] * 4, [1.0] * 3)
    assert opt.param_groups[0]["params"][1] is frozen


@pytest.mark.parametrize("folding", ["model", "fp32"])
def test_a_group_that_comes_between_backward_and_step_keeps_flags_and_sums(folding: str) -> None:
    first = weight(4)
    opt = MixedPrecisionOptimizer(SGD([first], lr=1.0), loss_scale=2.0, grad_accumulation=folding)
    for late, bad in ((weight(4), float("inf")), (weight(4), 0.0)):
        opt.zero_grad()
        opt.backward(first.float().sum())
        opt.add_param_group({"params": [late]})
        if bad:
            opt.backward((first.float() + late.float() * bad).sum())
        opt.step()
        assert opt.step_was_skipped == bool(bad)
        assert [o.name for o in opt.overflow_report()] == ["group 1, param 0"] * bool(bad)
    assert first.tolist() == [0.0] * 4


def test_a_parameter_twice_is_refused_from_every_way_in() -> None:
    first = weight(4)
    opt = MixedPrecisionOptimizer(sgd([first]), loss_scale=64.0)
    with pytest.raises(ValueError, match=r"(?i)twice|more than one|already|duplicate"):
        opt.add_param_group({"params": [first]})
    opt.param_groups[0]["params"].append(first)
    with pytest.raises(ValueError, match=r"(?i)twice|more than one|already|duplicate"):
        train(opt, first)


@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_a_parameter_that_changes_is_refused_by_name(what: str) -> None:
    first = weight(4)
    opt = MixedPrecisionOptimizer(sgd([first]), loss_scale=64.0, named_parameters=[("layer.weight", first)])
    train(opt, first)
    first.data = first.data.bfloat16() if what == "dtype" else torch.ones(7).half()
    first.grad = None
    with pytest.raises((RuntimeError, ValueError, TypeError), match=r"layer\.weight"):
        train(opt, first)


# -- state by a model's parameter --------------------------------------------------------------------------------------


@STEPS
@DTYPES
def test_state_of_a_model_parameter_is_its_masters(fused_step: Any, dtype: torch.dtype) -> None:
    first = weight(4, dtype)
    opt = MixedPrecisionOptimizer(Adam([first], lr=0.1), loss_scale=64.0, fused_step=fused_step)
    train(opt, first)
    (master,) = opt.master_params()
    assert opt.state[first] is opt.state[master]
    assert first in opt.state
    assert opt.state.get(first) is opt.state[master]
    assert len(opt.state) == 1


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


def test_state_given_before_the_first_step_is_what_the_step_reads() -> None:
    first = weight(4)
    opt = MixedPrecisionOptimizer(sgd([first]), loss_scale=64.0, fused_step=False)
    (master,) = opt.master_params()
    opt.state[first]["momentum_buffer"] = torch.ones(4)
    assert opt.state[first] is opt.state[master]
    train(opt, first)  # the gradient is -4: buffer 0.5 - 4, times 0.125
    assert first.tolist() == [1.4375] * 4


@STEPS
def test_cleared_state_begins_anew(fused_step: Any) -> None:
    beside = Beside(weight(4), fused_step=fused_step)
    beside.train()
    beside.both(lambda opt, params: opt.state.clear())
    beside.train()
    beside.check()


# -- torch's own swapping ----------------------------------------------------------------------------------------------


@STEPS
@pytest.mark.parametrize("call", ["load_state_dict", "to"])
def test_torch_may_swap_a_modules_parameters(fused_step: Any, call: str) -> None:
    """torch.__future__.set_swap_module_params_on_conversion: a weak reference to a parameter would forbid it."""
    net = nn.Linear(4, 3).half()
    opt = MixedPrecisionOptimizer(sgd(net.parameters()), fused_step=fused_step)
    net(torch.ones(2, 4).half()).float().sum().backward()
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


def test_an_edited_master_is_in_the_model_after_a_step_that_a_hook_has_stopped() -> None:
    weight = torch.nn.Parameter(torch.ones(2).half())
    opt = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.1), loss_scale=2.0)
    opt.backward(weight.float().sum())
    with torch.no_grad():
        next(opt.master_params()).mul_(0.5)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    handle = opt.optimizer.register_step_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    handle.remove()
    assert weight.tolist() == [0.5, 0.5]
    opt.step()
    assert weight.tolist() == [torch.tensor(0.4).half().item()] * 2
