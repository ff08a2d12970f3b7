"""Classes that move weights after an optimizer's step: inside the wrapper, or around it with ``write_masters()``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rooms import through_file
from test_third_party import Lookahead
from torch import nn
from torch.optim import SGD

from fp16opt import MixedPrecisionOptimizer

STEPS = 6
ROUNDING = 2.0**-13  # by which a weight between 1/4 and 1/2 is off where the loss reads it in FP16


def model_of(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 4).to(dtype)


def loss_of(model: nn.Linear, step: int) -> torch.Tensor:
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    return nn.functional.linear(data, model.weight.float(), model.bias.float()).square().mean()


def in_fp32(around: Any) -> list[torch.Tensor]:
    """The weights of a training in FP32, of the FP16 weights' start."""
    model = model_of(torch.float16).float()
    opt = around(SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, step).backward()
        opt.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_lookahead(inside: bool) -> None:
    model = model_of(torch.float16)
    if inside:
        opt = steps = MixedPrecisionOptimizer(Lookahead(SGD(model.parameters(), lr=0.1), k=2), loss_scale=64.0)
    else:
        opt = MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1), loss_scale=64.0)
        steps = Lookahead(opt, k=2)  # type: ignore[assignment]
    for step in range(STEPS):
        opt.zero_grad()
        opt.backward(loss_of(model, step))
        steps.step()
        if not inside:
            opt.write_masters()
        for p, master in zip(model.parameters(), opt.master_params(), strict=True):
            assert torch.equal(p, master.half()), "the model follows in the same step"
    for master, plain in zip(opt.master_params(), in_fp32(lambda opt: Lookahead(opt, k=2)), strict=True):
        assert torch.allclose(master, plain, rtol=0, atol=ROUNDING)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchs_local_sgd_goes_inside() -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer  # type: ignore[attr-defined]

    def around(opt: SGD) -> Any:
        return PostLocalSGDOptimizer(opt, PeriodicModelAverager(period=2, warmup_steps=0))  # type: ignore[no-untyped-call]

    model = model_of(torch.float16)
    opt = MixedPrecisionOptimizer(around(SGD(model.parameters(), lr=0.1)), loss_scale=64.0)
    for step in range(STEPS):
        opt.zero_grad()
        opt.backward(loss_of(model, step))
        opt.step()
    for p, master, plain in zip(model.parameters(), opt.master_params(), in_fp32(around), strict=True):
        assert torch.equal(p, master.half())
        assert torch.allclose(master, plain, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("base_trains", [False, True], ids=["frozen base", "base that trains"])
def test_adapters_that_are_merged_and_taken_out_again(base_trains: bool) -> None:
    """PEFT's merge rounds the base twice. Masters, where there are some, put it back; a frozen base has none."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(32, 32)).half(),
        peft.LoraConfig(r=4, lora_alpha=64, target_modules=["0"], init_lora_weights=False),
        autocast_adapter_dtype=False,
    )
    base = model.base_model.model[0].base_layer.weight.requires_grad_(base_trains)
    opt = MixedPrecisionOptimizer(SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), loss_scale=64.0)
    opt.backward(model(torch.ones(2, 32).half()).float().square().mean())
    opt.step()
    before = base.detach().clone()
    model.merge_adapter()
    model.unmerge_adapter()
    assert not torch.equal(base, before)
    opt.write_masters()
    assert torch.equal(base, before) == base_trains


class Chain(torch.optim.Optimizer):
    """Muon for matrices, AdamW for the rest, as docs/engine.md has it."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        self.muon = torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02)
        self.adamw = torch.optim.AdamW([p for p in params if p.dim() != 2], lr=3e-3)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part, groups in ((self.muon, self.param_groups[:1]), (self.adamw, self.param_groups[1:])):
            part.param_groups, part.state = groups, self.state
            part.step()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("settings", [{"loss_scale": 64.0}, {"dynamic": True, "grad_accumulation": "fp32"}], ids=str)
def test_a_chain_of_muon_and_adamw_skips_and_resumes_as_one(settings: dict[str, Any]) -> None:
    def made() -> tuple[nn.Linear, MixedPrecisionOptimizer]:
        model = model_of(torch.float16)
        return model, MixedPrecisionOptimizer(Chain(model.parameters()), **settings)

    def train(model: nn.Linear, opt: MixedPrecisionOptimizer, steps: range) -> None:
        for step in steps:
            opt.zero_grad()
            opt.backward(loss_of(model, step) * (float("inf") if step == 2 else 1.0))
            before = [p.detach().clone() for p in model.parameters()]
            opt.clip_master_grads(1.0)
            opt.step()
            stays = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
            assert stays == [step == 2] * 2

    model, opt = made()
    train(model, opt, range(4))
    weights, state = through_file([model.state_dict(), opt.state_dict()])
    other, resumed = made()
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    for one in ((model, opt), (other, resumed)):
        train(*one, range(4, 8))
    for p, q in zip(opt.master_params(), resumed.master_params(), strict=True):
        assert torch.equal(p, q)
