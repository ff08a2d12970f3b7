"""What docs/old-lines.md says of lines that are left in older scripts, row by row, where no other test says it."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

import fp16opt.distributed
from fp16opt import AveragedMasters, MixedPrecisionOptimizer, amp, ema, optimizer_state
from fp16opt.engine.modes import sums

PAGE = Path(__file__).resolve().parents[1] / "docs" / "old-lines.md"


def make(**options: object) -> tuple[nn.Linear, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).half()
    return model, MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1), **options)


def loss_of(model: nn.Linear) -> torch.Tensor:
    return (model(torch.ones(3, 4).half()).float() - 1.0).square().mean()


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


def clamps_split_masters() -> None:
    model, opt = make(master_weights="split")
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r'refresh_masters\(\); or wrap with master_weights="full"'):
            next(opt.master_params()).clamp_(-0.25, 0.25)
        model.weight.clamp_(-0.25, 0.25)
    opt.refresh_masters()
    assert float(next(opt.master_params()).abs().max()) <= 0.25


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


def converts() -> None:
    model, opt = make()
    model.float()
    with pytest.raises(RuntimeError, match=r"group 0, param 0.*had dtype torch\.float16"):
        opt.step()


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


# What the page says of each line: a function here, or the file whose tests tell it.
ROWS: dict[str, Callable[..., None] | str] = {
    "`loss.backward()`": "contract/test_step.py",
    "`loss = opt.scale_loss(loss)`": clears_between,
    "`scaler.scale(loss).backward()`": "contract/test_under_grad_scaler.py",
    "`scaler.step(optimizer)`": "grad_scaler/test_gradients.py",
    "`clip_grad_norm_(model.parameters(), 1.0)`, or": "contract/test_step.py",
    "`clip_grad_norm_(model.parameters(), 1.0)`, `p.grad *= 0.25`": "contract/test_folded.py",
    "`p.grad` of the model": reads_the_model_s,
    "`p` of `opt.param_groups`": looks_for_the_model_s,
    "`p.grad.data.clamp_(-1, 1)`": clamps_through_data,
    "`p.register_hook": clamps_in_a_hook,
    "`p.grad = g`": sets_gradients,
    "`clip_grad_norm_(model.parameters(), 1.0)` after `scaler": "contract/test_under_grad_scaler.py",
    "`opt.update_master_grads()`": "contract/test_under_grad_scaler.py",
    "`clip_grad_norm_(opt": "contract/test_master_params.py",
    "`opt.backward(loss)`": "contract/test_backward.py",
    "`model.zero_grad()` after a clip": "contract/test_zero_grad.py",
    "`model.zero_grad()` between": gives_sums_up_by_the_model,
    "`opt.add_param_group": "contract/test_param_groups.py",
    "no `zero_grad()`": "contract/test_backward.py",
    "calls of `opt.step`": "contract/test_under_grad_scaler.py",
    "`optimizer.step()`": "engine/test_wrapped_guard.py",
    "`opt.step(closure)`": "contract/test_closures.py",
    '`gradient_release="held"`': "fused/test_gradient_release.py",
    "a model made under": "contract/test_construction.py",
    "`model.half()`": converts,
    "`model.load_state_dict": "engine/test_model_write.py",
    "`p.data.clamp_": clamps_data,
    "`p.clamp_(-c, c)`": clamps_split_masters,
    "`p.mul_(0.5)`": "contract/test_written_masters.py",
    "`with torch.no_grad(): p.clamp_": clamps_with_autograd_off,
    "`opt.load_state_dict": loads_plain_state,
    "`torch.optim.AdamW(...).load_state_dict": loads_into_a_plain_optimizer,
    '`checkpoint["optimizer"]`': "fp16_utils/test_checkpoints.py",
    "`torch.save(model": "contract/test_written_masters.py",
    "`scale_before": "contract/test_step.py",
    "`AveragedModel(model)`": "test_averaging.py",
    "`averaged.swap()`": swaps_before_an_update,
    "`scheduler": "contract/test_wrapped_optimizer.py",
    "`clip_grad_norm_(model.parameters(), 1.0)` after apex": clips_the_model_under_amp,
    "`from apex": imports_apex,
}


@pytest.mark.parametrize("row", [row for row, shown in ROWS.items() if callable(shown)])
def test_row(row: str, request: pytest.FixtureRequest) -> None:
    shown = ROWS[row]
    assert callable(shown)
    shown(**{name: request.getfixturevalue(name) for name in inspect.signature(shown).parameters})


def test_the_files_that_tell_the_other_rows_are_there() -> None:
    assert all((Path(__file__).parent / shown).is_file() for shown in ROWS.values() if isinstance(shown, str))


@pytest.mark.skipif(not PAGE.exists(), reason="run from an installed package, without the repository")
def test_every_row_of_the_page_is_run() -> None:
    rows = [line[2:] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")][1:]
    assert [next((start for start in ROWS if row.startswith(start)), row) for row in rows] == list(ROWS)
