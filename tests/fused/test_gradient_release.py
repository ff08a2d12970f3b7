"""gradient_release=True: the ordinary step's bits, in backward; what it can't serve is refused with the reason."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pretended
import pytest
import torch
from engine.checks import assert_same, snapshot
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from fp16opt import DynamicLossScaler, LossScaleError, MixedPrecisionOptimizer, StaticLossScaler, distributed
from fused.test_registered_classes import PlainLion

MAKERS: dict[str, Any] = {
    "sgd": lambda groups: SGD(groups, lr=0.1),
    "momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda groups: Adam(groups, lr=0.01, amsgrad=True),
    "adamw": lambda groups: AdamW(groups, lr=0.01),
    "lion": lambda groups: PlainLion(groups, decay=0.1),
}


class Net(nn.Module):
    """16-bit and FP32 parameters, channels-last, tied, frozen and unused ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(dtype).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(16, 64).to(dtype)
        self.norm = nn.LayerNorm(64)
        self.tied = nn.Linear(64, 64, bias=False).to(dtype)
        self.frozen = nn.Linear(64, 64).to(dtype).requires_grad_(False)
        self.unused = nn.Linear(3, 3).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x)).flatten(1)
        x = self.norm(self.wide(x).float()).to(self.tied.weight.dtype)
        x = self.frozen(torch.tanh(self.tied(torch.tanh(self.tied(x)))))
        return x.float().square().mean()


def made(name: str = "adamw", dtype: torch.dtype = torch.float16, release: Any = True, **more: Any) -> Any:
    torch.manual_seed(0)
    net = Net(dtype)
    params = [*net.parameters()]
    more.setdefault("loss_scale", 64.0)
    groups = [{"params": params[:3]}, {"params": params[3:], "rate" if name == "lion" else "lr": 0.003}]
    named = net.named_parameters()
    opt = MixedPrecisionOptimizer(
        MAKERS[name](groups), fused_step="auto", gradient_release=release, named_parameters=named, **more
    )  # fmt: skip
    return net, opt


def batch(dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def train(net: nn.Module, opt: MixedPrecisionOptimizer, steps: range, dtype: torch.dtype = torch.float16) -> None:
    for step in steps:
        opt.zero_grad()
        opt.backward(net(batch(dtype, step)))
        opt.step()


MODES: list[dict[str, str]] = [
    {},
    {"master_weights": "split"},
    {"master_weights": "split24", "optimizer_state": "8bit"},
]


@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_it_has_the_ordinary_steps_bits(name: str, dtype: torch.dtype, modes: dict[str, str]) -> None:
    if "optimizer_state" in modes and name in ("adam", "lion"):
        pytest.skip("it has no codes")
    net, opt = made(name, dtype, **modes)
    other, plain = made(name, dtype, release=False, **modes)
    assert "step: fused, in backward" in repr(opt)
    assert "gradient_release: True" in repr(opt)
    train(net, opt, range(3), dtype)
    train(other, plain, range(3), dtype)
    assert all(p.grad is None for p in net.parameters())
    assert any(p.grad is not None for p in other.parameters())
    assert_same(opt.state_dict(), plain.state_dict())
    assert_same([*net.parameters()], [*other.parameters()])


def test_parameters_are_stepped_and_freed_while_backward_runs() -> None:
    net, opt = made()
    before = net.tied.weight.detach().clone()
    seen: list[bool] = []

    def look(grad: Tensor) -> None:
        assert all(p.grad is None for p in net.parameters())
        seen.append(torch.equal(net.tied.weight, before))

    net.conv.weight.register_hook(look)  # the last one to come
    opt.backward(net(batch(torch.float16, 0)))
    assert seen == [False]
    assert not opt.step_was_skipped
    opt.step()
    assert opt.skipped_steps == 0


def test_one_that_is_not_finite_is_left_alone_reported_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    net, opt = made()
    other, plain = made(release=False)
    train(net, opt, range(1))
    train(other, plain, range(1))

    def spoil_one(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[0, 0] = math.nan
        return grad

    handle = net.wide.weight.register_hook(spoil_one)
    kept = net.wide.weight.detach().clone()
    state = copy.deepcopy(opt.state[opt.param_groups[0]["params"][2]])
    train(net, opt, range(1, 2))
    train(other, plain, range(1, 2))
    handle.remove()
    assert torch.equal(net.wide.weight, kept)
    assert_same(opt.state[opt.param_groups[0]["params"][2]], state)
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q) != (name == "wide.weight"), name
    assert (opt.step_was_skipped, opt.skipped_steps) == (True, 1)
    assert [(o.name, o.inf, o.nan) for o in opt.overflow_report()] == [("wide.weight", False, True)]
    assert "parameters left alone while the others were stepped" in caplog.text
    assert "wide.weight (nan)" in caplog.text
    caplog.clear()
    train(net, opt, range(2, 4))
    assert (opt.step_was_skipped, opt.skipped_steps) == (False, 1)
    assert not torch.equal(net.wide.weight, kept)
    assert not caplog.records


def spoil(grad: Tensor) -> Tensor:
    return grad * math.nan


def test_what_an_interrupted_backward_found_is_forgotten_with_it() -> None:
    """Of its parameters one was left alone, others stepped; the step after it is the first that counts."""
    net, opt = made()
    before = net.tied.weight.detach().clone()
    handle = net.conv.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opt.backward(net(batch(torch.float16, 0)) + math.nan * net.unused(torch.ones(3).half()).sum())
    handle.remove()
    assert not torch.equal(net.tied.weight, before), "it was stepped"
    with pytest.raises(RuntimeError, match="a backward was interrupted"):
        opt.backward(net(batch(torch.float16, 0)))
    opt.zero_grad()
    assert opt.state_dict()["steps"] == 0
    train(net, opt, range(1))
    assert (opt.step_was_skipped, opt.overflow_report()) == (False, [])
    assert opt.state_dict()["steps"] == opt.stats()["steps"] == 1


def test_a_backward_that_fails_before_a_gradient_came_leaves_nothing() -> None:
    weight, frozen = (nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(2))
    opt = MixedPrecisionOptimizer(SGD([weight, frozen.requires_grad_(False)], lr=0.5), gradient_release=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        opt.backward(frozen.float().sum())
    opt.step()
    assert weight.tolist() == [1.0, 1.0]
    opt.backward(weight.float().sum())
    opt.step()
    assert weight.tolist() == [0.5, 0.5]


def test_a_checkpoint_ends_an_interruption() -> None:
    net, opt = made()
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(net.state_dict())
    handle = net.conv.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opt.backward(net(batch(torch.float16, 0)))
    handle.remove()
    net.load_state_dict(weights)
    opt.load_state_dict(saved)
    opt.backward(net(batch(torch.float16, 0)))
    opt.step()
    other, plain = made(release=False)
    other.load_state_dict(weights)
    train(other, plain, range(1))
    assert_same([*net.parameters()], [*other.parameters()])


def test_the_scale_is_that_of_backward_until_the_step() -> None:
    net, opt = made()
    opt.backward(net(batch(torch.float16, 0)))
    with pytest.raises(RuntimeError, match="loss_scale was set between backward and step"):
        opt.loss_scale = 8.0
    opt.step()
    assert opt.stats()["steps"] == 1
    opt.loss_scale = 8.0
    train(net, opt, range(1, 2))


class Noting(StaticLossScaler):
    """A user's own, that keeps the norms it is told."""

    follows_norms = True
    seen = 0.0

    def see(self, norm: Tensor) -> None:
        self.seen = float(norm)


def test_a_scaler_that_follows_norms_is_told_the_largest() -> None:
    scaler = Noting(64.0)
    first, second = half(), half()
    opt = MixedPrecisionOptimizer(SGD([first, second], lr=0.0), scaler=scaler, gradient_release=True)
    opt.backward((first.float() * torch.tensor([3.0, 0.0, 4.0])).sum() + second.float().sum())
    opt.step()
    assert scaler.seen == 5.0


def test_what_was_found_stays_with_its_parameter_where_groups_change_before_the_step() -> None:
    net, opt = made()
    handle = net.wide.weight.register_hook(spoil)
    opt.backward(net(batch(torch.float16, 0)))
    handle.remove()
    added = nn.Linear(4, 4).half()
    opt.param_groups.insert(0, {**opt.param_groups[0], "params": [*added.parameters()]})
    assert opt.state_dict()["steps"] == 1
    with pytest.raises(RuntimeError, match="a further backward in one step"):
        opt.backward(net(batch(torch.float16, 0)))
    opt.step()
    assert [o.name for o in opt.overflow_report()] == ["wide.weight"]
    train(net, opt, range(1, 2))
    assert (opt.skipped_steps, opt.state_dict()["steps"]) == (1, 2)


def test_an_error_of_a_step_hook_leaves_the_step_to_be_counted_or_counted() -> None:
    net, opt = made()
    calls: list[str] = []

    def fail(*_: Any) -> None:
        calls.append("hook")
        raise KeyError("a hook")

    for number, register in enumerate(
        (opt.optimizer.register_step_pre_hook, opt.optimizer.register_step_post_hook), start=1
    ):
        opt.backward(net(batch(torch.float16, number)))
        handle = register(fail)
        with pytest.raises(KeyError):
            opt.step()
        handle.remove()
        assert opt.state_dict()["steps"] == number
        assert opt.stats()["steps"] == 2 * (number - 1), "one that a pre hook stops is still to be counted"
        with pytest.raises(RuntimeError, match=r"came that neither opt\.backward"):
            net.unused(torch.ones(3).half()).sum().backward()
        net.unused.zero_grad()
        opt.step()
        assert opt.stats()["steps"] == opt.state_dict()["steps"] == number
    train(net, opt, range(1))
    assert opt.stats()["steps"] == 3
    assert calls == ["hook", "hook"]


def test_the_rate_is_that_of_backward() -> None:
    net, opt = made("sgd")
    other, plain = made("sgd", release=False)
    opt.backward(net(batch(torch.float16, 0)))
    for group in opt.param_groups:
        group["lr"] = 7.0
    opt.step()
    train(other, plain, range(1))
    assert_same([*net.parameters()], [*other.parameters()])


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_settings_that_change_between_steps_count_from_the_next_backward_on(name: str) -> None:
    """A schedule's rate, and a decay."""
    net, opt = made(name)
    other, plain = made(name, release=False)
    for step in range(3):
        for model, one in ((net, opt), (other, plain)):
            for group in one.param_groups:
                group.update(lr=0.125 * 4.0**-step, weight_decay=0.25 * step)
            train(model, one, range(step, step + 1))
        assert_same([*net.parameters()], [*other.parameters()])


def test_resuming_copies_and_pickles_go_on_bit_for_bit() -> None:
    net, opt = made(master_weights="split")
    train(net, opt, range(2))
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(net.state_dict())
    fresh, again = made(master_weights="split")
    again.load_state_dict(saved)
    fresh.load_state_dict(weights)
    twin, twins = copy.deepcopy((net, opt))
    third, thirds = pickle.loads(pickle.dumps((net, opt)))
    for model, one in ((net, opt), (fresh, again), (twin, twins), (third, thirds)):
        train(model, one, range(2, 4))
    for model in (fresh, twin, third):
        assert_same([*model.parameters()], [*net.parameters()])


def test_checkpoints_move_between_release_and_the_ordinary_step() -> None:
    net, opt = made()
    train(net, opt, range(2))
    other, plain = made(release=False)
    plain.load_state_dict(copy.deepcopy(opt.state_dict()))
    other.load_state_dict(net.state_dict())
    train(net, opt, range(2, 4))
    train(other, plain, range(2, 4))
    assert_same([*net.parameters()], [*other.parameters()])


def test_groups_and_parameters_that_come_later_are_released_too() -> None:
    net, opt = made()
    other, plain = made(release=False)
    for model, one in ((net, opt), (other, plain)):
        train(model, one, range(1))
        model.frozen.requires_grad_(True)
        added = nn.Linear(64, 64).half()
        added.load_state_dict(model.frozen.state_dict())
        one.add_param_group({"params": [*added.parameters()]})
        for step in range(2):
            one.zero_grad()
            one.backward(added(model.tied.weight).float().square().mean() + model(batch(torch.float16, step)))
            one.step()
    assert all(p.grad is None for p in net.parameters())
    assert_same(snapshot(opt), snapshot(plain))


def test_fp32_parameters_that_are_unfrozen_are_stepped() -> None:
    net, opt = made()
    net.norm.requires_grad_(False)
    _, opt = net, MixedPrecisionOptimizer(SGD(net.parameters(), lr=0.1), gradient_release=True)
    net.norm.requires_grad_(True)
    before = net.norm.weight.detach().clone()
    train(net, opt, range(1))
    assert net.norm.weight.grad is None
    assert not torch.equal(net.norm.weight, before)
    net.norm.requires_grad_(False)  # which has a master by now
    opt.add_param_group({"params": [half()]})
    net.norm.requires_grad_(True)
    before = net.norm.weight.detach().clone()
    train(net, opt, range(1, 2))
    assert not torch.equal(net.norm.weight, before)


def test_hooks_closures_and_schedulers_work() -> None:
    net, opt = made("sgd")
    calls: list[str] = []
    opt.optimizer.register_step_post_hook(lambda *_: calls.append("inner"))
    opt.register_step_post_hook(lambda *_: calls.append("outer"))
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = net(batch(torch.float16, 0))
        opt.backward(loss)
        return loss

    assert float(opt.step(closure).detach()) > 0
    scheduler.step()
    assert calls == ["inner", "outer"]
    opt.step()
    assert calls == ["inner", "outer", "outer"], "nothing to step"
    calls.clear()
    opt.backward(net(batch(torch.float16, 0)) * math.inf)
    opt.step()
    assert (calls, opt.step_was_skipped) == (["inner", "outer"], True), "also where parameters were left alone"


def test_weights_that_were_written_are_noticed_before_they_are_stepped(caplog: pytest.LogCaptureFixture) -> None:
    net, opt = made("sgd")
    train(net, opt, range(2))
    assert not caplog.records, "our own steps are no writes"
    with torch.no_grad():
        net.wide.weight.fill_(0.5)
    train(net, opt, range(2, 3))
    assert "model weights were written by something else" in caplog.text
    masters = {id(p): m for m, p in zip(opt.master_params(), opt.model_params(), strict=True)}
    assert (masters[id(net.wide.weight)] - 0.5).abs().max() < 0.2


def test_it_leaves_no_cycle_and_its_hooks_go_with_it() -> None:
    net, opt = made()
    train(net, opt, range(1))
    gone = weakref.ref(opt)
    gc.disable()
    try:
        del opt
        assert gone() is None
    finally:
        gc.enable()
    net(batch(torch.float16, 1)).backward()
    assert net.wide.weight.grad is not None


@pytest.mark.parametrize("masters", ["full", "split"])
def test_on_a_device_nobody_waits_and_the_bits_are_those_of_the_host(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, masters: str
) -> None:
    """Pretended on the CPU, with the emulated CUDA kernels; the second of four backwards overflows in one parameter."""

    def run(net: nn.Module, opt: MixedPrecisionOptimizer, steps: range) -> None:
        for step in steps:
            handle = net.wide.weight.register_hook(lambda grad: grad * math.inf) if step == 1 else None
            train(net, opt, range(step, step + 1))
            if handle is not None:
                handle.remove()

    wanted = made(master_weights=masters)
    run(*wanted, range(4))
    pretended.pretend(emulated_cuda, monkeypatch)
    got = made(master_weights=masters)
    run(*got, range(3))
    with pretended.watching(monkeypatch) as seen:
        run(*got, range(3, 4))
    assert seen.looks == []
    assert got[1].skipped_steps == wanted[1].skipped_steps == 1
    assert_same(snapshot(got[1]), snapshot(wanted[1]))
    assert_same([*got[0].parameters()], [*wanted[0].parameters()])


def test_too_many_skips_in_a_row_raise_where_a_device_decides_too(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    scaler = StaticLossScaler(64.0)
    scaler.max_consecutive_skips = 2
    net, opt = made(loss_scale=None, scaler=scaler)
    net.wide.weight.register_hook(spoil)
    train(net, opt, range(1))
    with pytest.raises(LossScaleError, match=r"wide\.weight"):
        train(net, opt, range(1, 2))
    assert opt.skipped_steps == 2


# -- refusals ----------------------------------------------------------------------------------------------------------


def half() -> Tensor:
    return nn.Parameter(torch.ones(3, dtype=torch.float16))


WHEN_WRAPPED: dict[str, tuple[dict[str, Any], str]] = {
    "value": ({"gradient_release": "yes"}, "gradient_release: expected one of False, True, got 'yes'"),
    "held": ({"gradient_release": "held"}, r"gradient_release: expected one of False, True, got 'held'"),
    "number": ({"gradient_release": 1}, "gradient_release: expected one of False, True, got 1"),
    "general": (
        {"fused_step": False},
        "gradient_release=True needs the one-pass step, .*: fused_step=False",
    ),
    "sums": ({"grad_accumulation": "fp32"}, "gradient_release=True frees each gradient.*grad_accumulation='fp32'"),
    "dynamic": ({"dynamic": True}, r"gradient_release=True does not go with .* \(dynamic=True, .*Use loss_scale"),
    "scaler": ({"scaler": DynamicLossScaler()}, "gradient_release=True does not go with a dynamic loss scale"),
    "closure": ({"closure": "reevaluate"}, 'with closure="reevaluate" the wrapped optimizer steps itself'),
    "none": ({"master_weights": "none"}, "gradient_release=True needs the one-pass step.*: there are no FP32 masters"),
}


@pytest.mark.parametrize("case", WHEN_WRAPPED)
def test_what_is_refused_when_it_is_wrapped(case: str) -> None:
    given, message = WHEN_WRAPPED[case]
    inner = AdamW([half()])
    before = inner.param_groups[0]["params"][0]
    with pytest.raises(ValueError, match=message):
        MixedPrecisionOptimizer(inner, **{"gradient_release": True, **given})
    assert inner.param_groups[0]["params"][0] is before


@pytest.mark.parametrize("cls", [torch.optim.Adagrad, torch.optim.LBFGS])
def test_classes_without_a_one_pass_step_are_refused_by_name(cls: type[Optimizer]) -> None:
    with pytest.raises(ValueError, match=f"gradient_release=True needs the one-pass step.*: {cls.__name__} is not"):
        MixedPrecisionOptimizer(cls([half()]), gradient_release=True)


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net, opt = made()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="before DDP's reducer averages them over the 2 ranks"):
        opt.backward(net(batch(torch.float16, 0)))
    with pytest.raises(ValueError, match="before DDP's reducer averages them over the 2 ranks"):
        made()


def test_ddp_on_one_rank_is_named_and_can_be_left(tmp_path: Path) -> None:
    """Its reducer writes gradients back after they were taken, though there is nothing to average."""
    net = nn.Linear(8, 8).half()
    opt = MixedPrecisionOptimizer(AdamW(net.parameters()), gradient_release=True)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        reduced = nn.parallel.DistributedDataParallel(net)
        with pytest.raises(RuntimeError, match="it can't be attached to a DDP module"):
            distributed.attach(opt, reduced)
        opt.backward(reduced(torch.ones(1, 8).half()).float().sum())
        with pytest.raises(
            RuntimeError, match=r"If the model is in DDP, its reducer .*Call zero_grad\(\), then step\(\)"
        ):
            opt.step()
        opt.zero_grad()
        opt.step()
    finally:
        # A reducer that is freed last waits for gloo's thread with the interpreter's lock held, which the thread wants.
        reduced = None
        gc.collect()
        torch.distributed.destroy_process_group()


def test_clipping_and_true_gradients_are_refused_when_they_are_called() -> None:
    net, opt = made()
    opt.backward(net(batch(torch.float16, 0)))
    with pytest.raises(RuntimeError, match="clip_master_grads: with gradient_release=True parameters are stepped"):
        opt.clip_master_grads(1.0)
    with pytest.raises(RuntimeError, match="update_master_grads: with gradient_release=True"):
        opt.update_master_grads()
    assert all(master.grad is None for master in opt.master_params())
    opt.step()


def test_a_second_backward_is_refused_before_it_begins() -> None:
    net, opt = made()
    opt.backward(net(batch(torch.float16, 0)))
    weights = copy.deepcopy([*net.parameters()])
    with pytest.raises(RuntimeError, match=r"a further backward in one step: .* Call step\(\) after each backward"):
        opt.backward(net(batch(torch.float16, 1)))
    opt.zero_grad()  # which can't take back what was stepped
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) was called in place of step\(\): .*Call step\(\)"):
        opt.scale_loss(torch.ones(()))
    assert_same([*net.parameters()], weights)
    opt.step()
    train(net, opt, range(1, 2))


def test_another_optimizers_backward_is_no_step_of_this() -> None:
    """As a trainer announces each loss to all of its optimizers; what came to this one can't be added to."""
    net, opt = made()
    want, alone = made()
    train(want, alone, range(2))
    for step in range(2):
        opt.scale_loss(torch.full((), torch.inf))
        opt.backward(net(batch(torch.float16, step)))
        opt.step()
    assert_same([*net.parameters()], [*want.parameters()])
    assert opt.skipped_steps == 0
    opt.backward(net(batch(torch.float16, 2)))
    with pytest.raises(RuntimeError, match="If the one before was of another optimizer's loss, switch requires_grad"):
        opt.scale_loss(torch.ones(()))


def test_gradients_of_another_backward_are_refused() -> None:
    net, opt = made()
    with pytest.raises(RuntimeError, match=r"a gradient of parameter '.*' came that neither opt.backward"):
        net(batch(torch.float16, 0)).backward()
    opt.zero_grad()
    net.wide.weight.grad = torch.ones_like(net.wide.weight)
    for call in (opt.step, lambda: opt.backward(net(batch(torch.float16, 0)))):
        with pytest.raises(RuntimeError, match=r"gradients are there that no backward made: wide.weight"):
            call()
    opt.zero_grad()
    train(net, opt, range(1))


def test_a_dynamic_scaler_of_one_backward_is_refused() -> None:
    net, opt = made()
    with pytest.raises(RuntimeError, match="backward with a dynamic scaler"):
        opt.backward(net(batch(torch.float16, 0)), scaler=DynamicLossScaler())
    opt.backward(net(batch(torch.float16, 0)), scaler=StaticLossScaler(8.0))
    opt.step()


def test_graphs_of_gradients_and_sparse_ones_are_refused() -> None:
    net, opt = made()
    with pytest.raises(RuntimeError, match="its gradient is part of a graph"):
        opt.backward(net(batch(torch.float16, 0)), create_graph=True)
    with pytest.raises(RuntimeError, match=r"a backward was interrupted, .* Call zero_grad\(\)"):
        opt.step()
    opt.zero_grad()
    train(net, opt, range(1))
    table = nn.Embedding(5, 3, sparse=True).half()
    opt = MixedPrecisionOptimizer(SGD(table.parameters(), lr=0.1), gradient_release=True)
    with pytest.raises(RuntimeError, match=r"parameter 'group 0, param 0': expected a dense gradient, got torch"):
        opt.backward(table(torch.tensor([1])).float().sum())


def test_reentrant_checkpointing_of_shared_weights_is_refused() -> None:
    shared = nn.Linear(4, 4).half()
    opt = MixedPrecisionOptimizer(SGD(shared.parameters(), lr=0.1), gradient_release=True)
    x = torch.ones(2, 4, dtype=torch.float16, requires_grad=True)

    def loss(reentrant: bool) -> Tensor:
        y = checkpoint(shared, x, use_reentrant=reentrant)
        return checkpoint(shared, y, use_reentrant=reentrant).float().sum()

    with pytest.raises(RuntimeError, match=r"a second gradient of parameter '.*' came in one backward"):
        opt.backward(loss(True))
    opt.zero_grad()
    opt.backward(loss(False))
    opt.step()
    assert opt.skipped_steps == 0


def test_what_stands_in_the_way_later_is_said() -> None:
    net, opt = made()
    train(net, opt, range(1))
    opt.param_groups[0]["lr"] = torch.tensor([0.1, 0.2])
    with pytest.raises(RuntimeError, match="can't be stepped in one pass any more: group 0 has an lr that is a tensor"):
        opt.backward(net(batch(torch.float16, 1)))


def test_what_is_saved_or_copied_between_backward_and_step_has_the_step() -> None:
    """Parameters have taken it by then: codes of the next one are rounded by the next number."""
    modes = {"master_weights": "split24", "optimizer_state": "8bit"}
    net, opt = made(dtype=torch.bfloat16, **modes)
    train(net, opt, range(1), torch.bfloat16)
    opt.backward(net(batch(torch.bfloat16, 1)))
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(net.state_dict())
    assert saved["steps"] == 2
    assert distributed.state_dict(net, opt)["counts"]["steps"] == 2
    fresh, again = made(dtype=torch.bfloat16, **modes)
    again.load_state_dict(saved)
    fresh.load_state_dict(weights)
    twin, twins = copy.deepcopy((net, opt))
    opt.step()
    for model, one in ((net, opt), (fresh, again), (twin, twins)):
        train(model, one, range(2, 5), torch.bfloat16)
        assert one.state_dict()["steps"] == 5
    for model in (fresh, twin):
        assert_same([*model.parameters()], [*net.parameters()])


def test_a_step_that_left_a_parameter_alone_is_one_step_after_a_resume_too() -> None:
    net, opt = made()
    opt.backward(net(batch(torch.float16, 0)).float() * math.inf)
    opt.step()
    train(net, opt, range(1, 3))
    before = opt.stats()
    _, again = made()
    again.load_state_dict(opt.state_dict())
    counts = ("steps", "skipped_steps", "steps_taken", "steps_since_calibration")
    assert [before[key] for key in counts] == [3, 1, 3, 2], "the skip has stepped the others"
    assert [again.stats()[key] for key in counts] == [3, 1, 3, 2]
    assert opt.state_dict()["steps"] == before["steps_taken"]


def test_memory_and_work_grow_with_the_number_of_tensors_and_not_with_its_square() -> None:
    """Objects that the collector knows and calls, of 100 and of 400 tensors: four times as many, and some that stay."""

    def grown(count: int) -> tuple[int, int]:
        params = [nn.Parameter(torch.ones(2).half()) for _ in range(count)]
        opt = MixedPrecisionOptimizer(AdamW(params), gradient_release=True)
        gc.collect()
        before = sum(len(o) for o in gc.get_objects() if type(o) is list)
        for _ in range(2):
            opt.backward(torch.stack(list(params)).float().sum())
            opt.step()
        gc.collect()
        items = sum(len(o) for o in gc.get_objects() if type(o) is list) - before
        calls = 0

        def count_calls(frame: Any, event: str, _: Any) -> None:
            nonlocal calls
            calls += event == "c_call"

        loss = torch.stack(list(params)).float().sum()
        sys.setprofile(count_calls)
        opt.backward(loss)
        sys.setprofile(None)
        opt.step()
        return items, calls

    few, many = grown(100), grown(400)
    assert many[0] <= 4.5 * few[0] + 200
    assert many[1] <= 4.5 * few[1] + 200
