"""timm: MasterScaler in the place of NativeScaler: what it loads, clips and refuses; apex."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import interpreters
import pytest
import torch
from contract import reference
from torch import nn

import fp16opt
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer
from fp16opt.integrations.timm import MasterScaler, with_masters
from integrations.byhand import BF16, HALF, adamw, batches, loss_of, network
from integrations.stand_in import import_timm

needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None, reason="timm is not installed (requirements/trainers-nodeps.txt)"
)


def test_a_scale_is_loaded_before_and_after_the_first_call() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=HALF))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.5), scaler=DynamicLossScaler(64.0))
    scaler = MasterScaler("cuda")
    assert scaler.state_dict() == {}
    native = torch.amp.GradScaler("cpu", init_scale=512.0)
    native.scale(torch.ones(()))
    scaler.load_state_dict(native.state_dict())
    scaler(weight.float().sum(), optimizer, need_update=False)
    assert optimizer.loss_scale == 512.0
    optimizer.zero_grad()
    scaler.load_state_dict(DynamicLossScaler(32.0).state_dict())
    assert optimizer.loss_scale == 32.0
    with pytest.raises(ValueError, match="this scaler is dynamic"):
        scaler.load_state_dict(fp16opt.StaticLossScaler(2.0).state_dict())


def test_what_it_can_not_do_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=HALF))
    bare = torch.optim.SGD([weight], lr=0.5)
    scaler = MasterScaler()
    with pytest.raises(TypeError, match="optimizer: expected a MixedPrecisionOptimizer, got SGD"):
        scaler(weight.float().sum(), bare)  # type: ignore[arg-type]
    optimizer = MixedPrecisionOptimizer(bare)
    with pytest.raises(ValueError, match="clip_mode: expected 'norm', 'value' or 'agc', got 'max'"):
        scaler(weight.float().sum(), optimizer, clip_grad=1.0, clip_mode="max")
    assert weight.grad is None


def test_two_lines_are_all() -> None:
    """The scale goes by the model's dtype, names are the model's; one that is wrapped stays; a stranger is refused."""
    for dtype, dynamic in ((HALF, True), (BF16, False)):
        net = network(dtype)
        optimizer, loss_scaler = with_masters(adamw(net.parameters()), net)
        assert optimizer.scaler.dynamic is dynamic
        assert optimizer.params.names == [name for name, _ in net.named_parameters()]
        assert with_masters(optimizer, net)[0] is optimizer
        before = next(net.parameters()).detach().clone()
        loss_scaler(loss_of(net, batches(1)[0], dtype) * 2.0**-8, optimizer)
        assert not torch.equal(next(net.parameters()), before)
    net = network(HALF)
    assert not with_masters(adamw(net.parameters()), net, loss_scale=8.0)[0].scaler.dynamic


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer 0 \(AdamW\) has none of the model's parameters"):
        with_masters(adamw(network(HALF).parameters()), network(HALF))


@needs_timm
def test_adaptive_clipping_is_timms_own_on_masters() -> None:
    import_timm()
    from timm.utils.agc import adaptive_clip_grad

    net = network(HALF)
    optimizer = MixedPrecisionOptimizer(adamw(net.parameters()), loss_scale=64.0, fused_step=False)
    scaler = MasterScaler()
    params = list(net.parameters())[:2]
    batch = batches(1)[0]
    loss_of(net, batch, HALF).mul(64.0).backward()
    want = [nn.Parameter(param.detach().float()) for param in params]
    for master, param in zip(want, params, strict=True):
        master.grad = reference.unscaled(param.grad, 64.0)
    adaptive_clip_grad(want, 0.01)
    net.zero_grad()
    scaler(loss_of(net, batch, HALF), optimizer, clip_grad=0.01, clip_mode="agc", parameters=params)
    for got, master in zip(optimizer.master_params(), want, strict=False):
        assert torch.equal(got.grad, master.grad)
    optimizer.zero_grad()
    scaler(loss_of(net, batch, HALF) * float("inf"), optimizer, clip_grad=0.01, clip_mode="agc")
    assert optimizer.step_was_skipped


APEX = """
import sys
import torch
from integrations.stand_in import import_timm
import_timm()
from timm.utils import ApexScaler
from apex import amp
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
scaler, x = ApexScaler(), torch.randn(32, 8)
losses = []
for _ in range(20):
    loss = (model(x).squeeze(1) - x.sum(dim=1)).square().mean()
    losses.append(loss.item())
    optimizer.zero_grad()
    scaler(loss, optimizer, clip_grad=5.0, parameters=model.parameters())
assert next(model.parameters()).dtype == torch.float16, "O2"
assert losses[-1] < 0.2 * losses[0], losses
assert "fp16opt" in amp.scale_loss.__module__, amp.scale_loss.__module__
print("trained", ApexScaler.state_dict_key, sorted(scaler.state_dict()))
"""


@needs_timm
def test_timms_apex_scaler_runs_through_ours(tmp_path: Path) -> None:
    """``python -m fp16opt.apex train.py --amp --amp-impl apex`` needs no apex."""
    (tmp_path / "train.py").write_text(APEX)
    path = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    done = interpreters.python("-m", "fp16opt.apex", str(tmp_path / "train.py"), cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained amp ['loss_scaler0']\n"
