"""What docs/old-lines.md says of lines that are left in older scripts, row by row."""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fp16opt.distributed
from fp16opt import AveragedMasters, GradScaler, MixedPrecisionOptimizer, amp, ema, optimizer_state
from fp16opt.engine.modes import sums
from fp16opt.fp16_utils import FP16_Optimizer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "old-lines.md"


def make(**options: object) -> tuple[nn.Linear, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).half()
    return model, MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1), **options)


def loss_of(model: nn.Linear) -> torch.Tensor:
    return (model(torch.ones(3, 4).half()).float() - 1.0).square().mean()


def plain_backward() -> None:
    model, opt = make(loss_scale=8.0)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"gradients were found that opt\.backward"):
        opt.step()


def clears_between() -> None:
    model, opt = make(loss_scale=8.0)
    scaled = opt.scale_loss(loss_of(model))
    opt.zero_grad()
    scaled.backward()
    with pytest.raises(RuntimeError, match=r"gradients were found that opt\.backward"):
        opt.step()
    opt.zero_grad()
    opt.scale_loss(loss_of(model)).backward()
    opt.step()


def two_scales() -> None:
    model, opt = make(dynamic=True)
    scaler = GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(RuntimeError, match="this optimizer has a loss scale of 65536"):
        scaler.step(opt)
    for unscales in (False, True):
        model, opt = make(dynamic=True)
        torchs = torch.amp.GradScaler("cpu")
        torchs.scale(loss_of(model)).backward()
        if unscales:
            torchs.unscale_(opt)
        with pytest.raises(RuntimeError, match="this optimizer has a loss scale of 65536"):
            torchs.step(opt)


def never_wrapped() -> None:
    model, _ = make()
    model = nn.Linear(4, 2).half()
    scaler = GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(
        ValueError, match=r"Attempting to unscale FP16 gradients\..*MixedPrecisionOptimizer\(optimizer\)"
    ):
        scaler.step(SGD(model.parameters(), lr=0.1))


def clips_the_model() -> None:
    for scale in (1.0, 1024.0):
        for dtype in (torch.float16, torch.float32):
            model = nn.Linear(4, 2).to(dtype)
            opt = MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1), loss_scale=scale)
            for takes in (False, True):
                opt.zero_grad()
                opt.backward(model(torch.ones(3, 4, dtype=dtype)).float().square().mean())
                clip_grad_norm_(model.parameters(), 1e-3)
                if takes:
                    opt.update_master_grads()
                    opt.step()
                else:
                    with pytest.raises(RuntimeError, match=r"group 0, param 0.*update_master_grads\(\)"):
                        opt.step()


def _clip(params: list[nn.Parameter]) -> None:
    clip_grad_norm_(params, 1.0)


def _clip_values(params: list[nn.Parameter]) -> None:
    clip_grad_value_(params, 1.0)


def _divide(params: list[nn.Parameter]) -> None:
    for p in params:
        if p.grad is not None:
            p.grad *= 0.25


def _clamp_data(params: list[nn.Parameter]) -> None:
    for p in params:
        if p.grad is not None:
            p.grad.data.clamp_(-1, 1)


def _read_norms(params: list[nn.Parameter]) -> None:
    assert all(p.grad.norm() for p in params if p.grad is not None)


def touches_folded_gradients() -> None:
    for line in (_clip, _clip_values, _divide, _clamp_data, _read_norms):
        for dtype, options in itertools.product(
            (torch.float16, torch.bfloat16, torch.float32),
            ({"loss_scale": 8.0}, {"master_weights": "split"}, {"fused_step": False, "loss_scale": 1.0}),
        ):
            weight, used_once = [nn.Parameter(torch.zeros(2, dtype=dtype)) for _ in range(2)]
            opt = MixedPrecisionOptimizer(SGD([weight, used_once], lr=1.0), grad_accumulation="fp32", **options)
            opt.backward(weight.float().sum() + used_once.float().sum())
            opt.backward(weight.float().sum())
            with pytest.raises(RuntimeError, match=r"folded into FP32 sums.*: group 0, param 0\. .*clip_master_grads"):
                line([weight])
            assert weight.grad is not None
            assert weight.grad.untyped_storage().nbytes() == 0
            opt.step()
            assert (weight.tolist(), used_once.tolist()) == ([-2.0] * 2, [-1.0] * 2), "the line has changed nothing"
            assert weight.grad is None


def reads_the_model_s() -> None:
    half, wide = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2))
    opt = MixedPrecisionOptimizer(SGD([half, wide], lr=0.1), loss_scale=8.0)
    opt.backward(half.float().sum() + wide.sum())
    for call in (opt.update_master_grads, lambda: opt.clip_master_grads(1.0)):
        assert [master.grad.tolist() for master in opt.master_params() if master.grad is not None] == [[1.0] * 2] * 2
        call()
        assert [p.grad.tolist() for p in (half, wide) if p.grad is not None] == [[8.0] * 2] * 2
    opt.step()
    assert [p.grad.tolist() for p in (half, wide) if p.grad is not None] == [[8.0] * 2] * 2
    assert opt.stats()["grad_norm"] == 2.0


def looks_for_the_model_s() -> None:
    model = nn.Linear(4, 2)
    opt = MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1))
    models = {id(p) for p in model.parameters()}
    assert not any(id(p) in models for p in opt.param_groups[0]["params"])
    pairs = list(zip(opt.model_params(), opt.master_params(), strict=True))
    assert [id(p) for p, _ in pairs] == [id(p) for p in model.parameters()]
    assert all(p.data_ptr() == master.data_ptr() for p, master in pairs)


def updates_after_unscale() -> None:
    model, opt = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match="would take scaled ones in their place"):
        opt.update_master_grads()
    for param, master in zip(opt.model_params(), opt.master_params(), strict=True):
        assert param.grad is not None
        assert master.grad is not None
        assert torch.equal(param.grad.float(), 8.0 * master.grad)
    scaler.step(opt)


def gives_up_by_the_model() -> None:
    model, opt = make()
    for gives_up in (model.zero_grad, opt.zero_grad):
        loss_of(model).backward()
        opt.clip_master_grads(1e-3)
        gives_up()
        loss_of(model).backward()
        if gives_up == model.zero_grad:
            with pytest.raises(RuntimeError, match=r"To give the step up, call opt\.zero_grad\(\)"):
                opt.step()
            opt.zero_grad()
        else:
            opt.step()


def gives_sums_up_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks, left in ((1, -1.0), (2, -2.0)):
        weight = nn.Parameter(torch.zeros(2).half())
        opt = MixedPrecisionOptimizer(SGD([weight], lr=1.0), grad_accumulation="fp32", loss_scale=8.0)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            fp16opt.distributed.attach(opt, None)
            monkeypatch.setattr(sums, "_count_of_ranks", lambda ranks=ranks: ranks)
            opt.backward(weight.float().sum())
            weight.grad = None
            opt.backward(weight.float().sum())
            opt.step()
        finally:
            dist.destroy_process_group()
        assert weight.tolist() == [left] * 2


def changes_groups_after_a_clip() -> None:
    model, opt = make(loss_scale=8.0)
    opt.backward(loss_of(model))
    opt.clip_master_grads(1.0)
    with pytest.raises(RuntimeError, match="param_groups were changed between a check"):
        opt.add_param_group({"params": nn.Linear(4, 2).half().parameters()})
    assert len(opt.param_groups) == 1
    opt.step()
    opt.add_param_group({"params": nn.Linear(4, 2).half().parameters()})


def clamps_split_masters() -> None:
    model, opt = make(master_weights="split")
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r'refresh_masters\(\); or wrap with master_weights="full"'):
            next(opt.master_params()).clamp_(-0.25, 0.25)
        model.weight.clamp_(-0.25, 0.25)
    opt.refresh_masters()
    assert float(next(opt.master_params()).abs().max()) <= 0.25


def writes_masters() -> None:
    for call in ("zero_grad", "step", "state_dict", "write_masters"):
        model, opt = make()
        before = model.weight.detach().clone()
        with torch.no_grad():
            next(opt.master_params()).mul_(0.5)
        assert torch.equal(model.weight, before)
        getattr(opt, call)()
        assert torch.equal(model.weight, 0.5 * before)


def wraps_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match=r"group 0, param 0.*meta device"):
        MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1))
    model.to_empty(device="cpu")
    model.reset_parameters()
    MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1))


def clamps_through_data() -> None:
    for clamps in (False, True):
        weight = nn.Parameter(torch.ones(2).half())
        opt = MixedPrecisionOptimizer(SGD([weight], lr=1.0), loss_scale=8.0)
        opt.backward(4.0 * weight.float().sum())
        assert weight.grad is not None
        if clamps:
            weight.grad.data.clamp_(-1, 1)  # of 32: what is left is an eighth
        else:
            opt.clip_master_values(1.0)
        opt.step()
        assert weight.tolist() == ([0.875] * 2 if clamps else [0.0] * 2)


def clamps_in_a_hook() -> None:
    seen: list[float] = []
    weight = nn.Parameter(torch.ones(1).half())
    weight.register_hook(lambda grad: (seen.append(grad.item()), grad.clamp(-1, 1))[1])
    opt = MixedPrecisionOptimizer(SGD([weight], lr=1.0), loss_scale=8.0)
    opt.backward(4.0 * weight.float().sum())
    opt.step()
    assert (seen, weight.item()) == ([32.0], 0.875)


def sets_gradients() -> None:
    for scaled in (False, True):
        weight = nn.Parameter(torch.ones(1).half())
        opt = MixedPrecisionOptimizer(SGD([weight], lr=0.5), loss_scale=8.0)
        loss = weight.float().sum()
        (weight.grad,) = torch.autograd.grad(opt.scale_loss(loss) if scaled else loss, [weight])
        if scaled:
            opt.update_master_grads()
            opt.step()
            assert weight.item() == 0.5
        else:
            with pytest.raises(RuntimeError, match=r"gradients were found that opt\.backward"):
                opt.step()


def clips_the_model_under_a_grad_scaler() -> None:
    model, opt = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for params in (model.parameters, opt.master_params):
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(params(), 1e-3)
        if params == model.parameters:
            with pytest.raises(RuntimeError, match=r"Clip opt\.master_params\(\).*fp16opt\.integrations"):
                scaler.step(opt)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        else:
            scaler.step(opt)
            assert not opt.step_was_skipped


def clips_masters() -> None:
    model, opt = make(loss_scale=1024.0)
    before = [master.detach().clone() for master in opt.master_params()]
    opt.backward(loss_of(model))
    clip_grad_norm_(opt.master_params(), 0.01)
    opt.step()
    moved = torch.cat([(a - b).reshape(-1) for a, b in zip(opt.master_params(), before, strict=True)])
    assert float(moved.norm()) == pytest.approx(0.1 * 0.01, rel=1e-3)


def backward_after_a_clip() -> None:
    model, opt = make()
    opt.backward(loss_of(model))
    opt.clip_master_grads(1.0)
    with pytest.raises(RuntimeError, match="Clip and edit after the last backward of a step"):
        opt.backward(loss_of(model))


def never_clears() -> None:
    for scale in (1.0, 8.0):
        model, opt = make(loss_scale=scale)
        opt.backward(loss_of(model))
        opt.step()
        if scale == 1.0:
            opt.backward(loss_of(model))
        else:
            with pytest.raises(RuntimeError, match=r"made at another scale: group 0, param 0.*zero_grad\(\)"):
                opt.backward(loss_of(model))


def counts_calls() -> None:
    model, opt = make()
    calls: list[bool] = []
    opt.register_step_post_hook(lambda optimizer, *_: calls.append(optimizer.step_was_skipped))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model) * float("inf")).backward()
    scaler.step(opt)
    assert calls == [True]


def steps_the_wrapped_one() -> None:
    _, opt = make()
    for call in (opt.optimizer.step, opt.optimizer.zero_grad):
        with pytest.raises(RuntimeError, match="MixedPrecisionOptimizer"):
            call()
    schedulefree = pytest.importorskip("schedulefree")
    weight = nn.Parameter(torch.ones(4).half())
    opt = MixedPrecisionOptimizer(schedulefree.SGDScheduleFree([weight], lr=0.5), loss_scale=8.0)
    for call in (opt.optimizer.train, opt.optimizer.eval):
        with pytest.raises(RuntimeError, match="MixedPrecisionOptimizer"):
            call()
    opt.train()
    for _ in range(3):
        opt.zero_grad()
        opt.backward(weight.float().sum())
        opt.step()
    opt.eval()
    assert torch.equal(weight.float(), next(opt.master_params()).half().float())


class SAM(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        loss = closure()
        super().step()
        return loss


def evaluates_twice() -> None:
    for mode in (None, "reevaluate"):
        model = nn.Linear(4, 2).half()
        opt = MixedPrecisionOptimizer(SAM(model.parameters(), lr=0.1), closure=mode)

        def closure(model: nn.Linear = model, opt: MixedPrecisionOptimizer = opt) -> torch.Tensor:
            opt.zero_grad()
            loss = loss_of(model)
            opt.backward(loss)
            return loss

        if mode is None:
            with pytest.raises(RuntimeError, match='closure="reevaluate"'):
                opt.step(closure)
        else:
            opt.step(closure)


def holds_gradients() -> None:
    with pytest.raises(ValueError, match='gradient_release="held" was removed'):
        make(gradient_release="held")


def converts() -> None:
    model, opt = make()
    model.float()
    with pytest.raises(RuntimeError, match=r"group 0, param 0.*had dtype torch\.float16"):
        opt.step()


def loads_the_model(caplog: pytest.LogCaptureFixture) -> None:
    model, opt = make(loss_scale=1.0)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    opt.backward(0.0 * loss_of(model))
    with caplog.at_level(logging.WARNING, "fp16opt"):
        opt.step()
    assert len(caplog.records) == 1
    assert not any(bool(master.any()) for master in opt.master_params())


def _unscaled_step(weight: nn.Parameter, opt: MixedPrecisionOptimizer) -> None:
    opt.zero_grad()
    opt.backward(0.0 * weight.float().sum())
    opt.step()


def _sets_one(weight: nn.Parameter) -> None:
    weight.data[7] = 0.5


def _puts_another(weight: nn.Parameter) -> None:
    weight.data = torch.where(torch.arange(weight.numel()) == 7, 0.5, weight.data)


def _multiplies_by_a_mask(weight: nn.Parameter) -> None:
    mask = torch.ones_like(weight)
    mask[7] = 0.5
    weight.data *= mask


def clamps_data() -> None:
    for size, writes in itertools.product((100, 20_000), (_sets_one, _puts_another, _multiplies_by_a_mask)):
        weight = nn.Parameter(torch.ones(size, dtype=torch.float16))
        opt = MixedPrecisionOptimizer(SGD([weight], lr=0.1), fused_step=False)
        writes(weight)
        assert weight[7].item() == 0.5
        _unscaled_step(weight, opt)
        assert weight[7].item() == (0.5 if size == 100 else 1.0)
        weight.data.mul_(0.5)  # all of it is seen in weights of any size
        _unscaled_step(weight, opt)
        assert weight[8].item() == 0.5
        with torch.no_grad():
            for master in opt.master_params():
                master.clamp_(-0.25, 0.25)
        opt.write_masters()
        assert weight.eq(0.25).all()
        _unscaled_step(weight, opt)
        assert weight.eq(0.25).all()


def clamps_with_autograd_off(caplog: pytest.LogCaptureFixture) -> None:
    weight = nn.Parameter(torch.ones(20_000, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([weight], lr=0.1))
    with torch.no_grad():
        weight[7].clamp_(-0.5, 0.5)
    with caplog.at_level(logging.WARNING, logger="fp16opt"):
        _unscaled_step(weight, opt)
    assert "edit master_params() and call write_masters()" in caplog.text
    assert (weight[7].item(), weight[8].item()) == (0.5, 1.0)


def swaps_before_an_update() -> None:
    model, opt = make()
    averaged, first = AveragedMasters(model, opt, ema(0.5)), model.weight.detach().clone()
    opt.backward(loss_of(model))
    opt.step()
    with averaged.swap():
        assert torch.equal(model.weight, first)
    averaged.update()
    stepped = model.weight.detach().clone()
    with averaged.swap():
        assert torch.equal(model.weight, stepped)


def loads_plain_state() -> None:
    wide = nn.Linear(4, 2)
    old = AdamW(wide.parameters(), lr=0.25)
    loss_of_wide = wide(torch.ones(1, 4)).sum()
    loss_of_wide.backward()
    old.step()
    model = nn.Linear(4, 2).half()
    opt = MixedPrecisionOptimizer(AdamW(model.parameters(), lr=0.1))
    opt.load_state_dict(old.state_dict())
    assert opt.param_groups[0]["lr"] == 0.25
    assert torch.equal(opt.state[next(opt.master_params())]["exp_avg"], old.state[wide.weight]["exp_avg"])


def loads_into_a_plain_optimizer() -> None:
    _, opt = make(loss_scale=8.0)
    plain = SGD(nn.Linear(4, 2).parameters(), lr=0.5)
    with pytest.raises(KeyError, match="param_groups"):
        plain.load_state_dict(opt.state_dict())
    plain.load_state_dict(optimizer_state(opt.state_dict()))
    assert plain.param_groups[0]["lr"] == 0.1


def loads_apex_s_state() -> None:
    _, opt = make()
    apex = FP16_Optimizer(SGD(nn.Linear(4, 2).half().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="state_dict is of an FP16_Optimizer"):
        opt.load_state_dict(apex.state_dict())


def saves_the_model() -> None:
    model, opt = make()
    opt.backward(loss_of(model))
    opt.step()
    shipped = opt.fp32_state_dict(model)
    assert shipped["weight"].dtype == torch.float32
    assert torch.equal(shipped["weight"].half(), model.state_dict()["weight"])
    assert not torch.equal(shipped["weight"], model.state_dict()["weight"].float())


def compares_scales() -> None:
    model, opt = make(dynamic=True)
    opt.backward(loss_of(model) * float("inf"))
    opt.step()
    assert (opt.step_was_skipped, opt.skipped_steps) == (True, 1)


def averages_the_model() -> None:
    model, opt = make()
    with torch.no_grad():
        model.weight.fill_(1.0)
    opt.refresh_masters()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    ours = AveragedMasters(model, opt, ema(0.9999))
    theirs.update_parameters(model)
    ours.update()
    first = theirs.module.weight.detach().clone()
    for _ in range(5):
        opt.zero_grad()
        opt.backward(loss_of(model))
        opt.step()
        theirs.update_parameters(model)
        ours.update()
    assert torch.equal(theirs.module.weight, first)
    assert not torch.equal(ours.fp32_state_dict()["weight"], first.float())


def schedules() -> None:
    model = nn.Linear(4, 2).half()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    opt = MixedPrecisionOptimizer(optimizer)
    opt.backward(loss_of(model))
    opt.step()
    scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.25


def clips_the_model_under_amp() -> None:
    for level in ("O0", "O1", "O2", "O3"):
        for of_model in (True, False):
            model = nn.Linear(4, 2)
            optimizer = SGD(model.parameters(), lr=0.1)
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
            with amp.scale_loss(model(torch.ones(3, 4)).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            norm = clip_grad_norm_(model.parameters() if of_model else amp.master_params(optimizer), 1e-3)
            assert norm.item() > 1e-3
            clipped = [p.grad.clone() for p in amp.master_params(optimizer)]
            if level == "O2" and of_model:
                with pytest.raises(RuntimeError, match=r"written after they were checked: weight.*clip_master_grads"):
                    optimizer.step()
            else:
                before = [p.detach().clone() for p in amp.master_params(optimizer)]
                optimizer.step()
                for p, old, grad in zip(amp.master_params(optimizer), before, clipped, strict=True):
                    assert torch.allclose(p, old - 0.1 * grad)
            amp._amp_state.handle._deactivate()


def imports_apex() -> None:
    assert importlib.util.find_spec("apex") is None
    assert importlib.util.find_spec("fp16opt.amp") is not None


ROWS: dict[str, Callable[..., None]] = {
    "`loss.backward()`": plain_backward,
    "`loss = opt.scale_loss(loss)`": clears_between,
    "`scaler.scale(loss).backward()`": two_scales,
    "`scaler.step(optimizer)`": never_wrapped,
    "`clip_grad_norm_(model.parameters(), 1.0)`, or": clips_the_model,
    "`clip_grad_norm_(model.parameters(), 1.0)`, `p.grad *= 0.25`": touches_folded_gradients,
    "`p.grad` of the model": reads_the_model_s,
    "`p` of `opt.param_groups`": looks_for_the_model_s,
    "`p.grad.data.clamp_(-1, 1)`": clamps_through_data,
    "`p.register_hook": clamps_in_a_hook,
    "`p.grad = g`": sets_gradients,
    "`clip_grad_norm_(model.parameters(), 1.0)` after `scaler": clips_the_model_under_a_grad_scaler,
    "`opt.update_master_grads()`": updates_after_unscale,
    "`clip_grad_norm_(opt": clips_masters,
    "`opt.backward(loss)`": backward_after_a_clip,
    "`model.zero_grad()` after a clip": gives_up_by_the_model,
    "`model.zero_grad()` between": gives_sums_up_by_the_model,
    "`opt.add_param_group": changes_groups_after_a_clip,
    "no `zero_grad()`": never_clears,
    "calls of `opt.step`": counts_calls,
    "`optimizer.step()`": steps_the_wrapped_one,
    "`opt.step(closure)`": evaluates_twice,
    '`gradient_release="held"`': holds_gradients,
    "a model made under": wraps_on_meta,
    "`model.half()`": converts,
    "`model.load_state_dict": loads_the_model,
    "`p.data.clamp_": clamps_data,
    "`p.clamp_(-c, c)`": clamps_split_masters,
    "`p.mul_(0.5)`": writes_masters,
    "`with torch.no_grad(): p.clamp_": clamps_with_autograd_off,
    "`opt.load_state_dict": loads_plain_state,
    "`torch.optim.AdamW(...).load_state_dict": loads_into_a_plain_optimizer,
    '`checkpoint["optimizer"]`': loads_apex_s_state,
    "`torch.save(model": saves_the_model,
    "`scale_before": compares_scales,
    "`AveragedModel(model)`": averages_the_model,
    "`averaged.swap()`": swaps_before_an_update,
    "`scheduler": schedules,
    "`clip_grad_norm_(model.parameters(), 1.0)` after apex": clips_the_model_under_amp,
    "`from apex": imports_apex,
}


ASKING = {
    "caplog": (loads_the_model, clamps_with_autograd_off),
    "monkeypatch": (gives_sums_up_by_the_model,),
}


@pytest.mark.parametrize("row", ROWS)
def test_row(row: str, request: pytest.FixtureRequest) -> None:
    needed = {name: request.getfixturevalue(name) for name, tests in ASKING.items() if ROWS[row] in tests}
    ROWS[row](**needed)


@pytest.mark.skipif(not PAGE.exists(), reason="run from an installed package, without the repository")
def test_every_row_of_the_page_is_run() -> None:
    rows = [line[2:] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")][1:]
    assert [next((start for start in ROWS if row.startswith(start)), row) for row in rows] == list(ROWS)
