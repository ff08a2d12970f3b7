"""fused_step and master_weights on several ranks: the bits of one process, or a refusal that says why."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import products
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from distributed.models import Net, assert_alike, full, loss_of
from distributed.world import World, on_ranks, raised
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed

CHOICES: tuple[dict[str, Any], ...] = ({"fused_step": True}, {"fused_step": False}, {"master_weights": "split"})


def wrap(net: nn.Module, inner: Any = AdamW, **options: Any) -> MixedPrecisionOptimizer:
    scaler = DynamicLossScaler(init_scale=2.0**8, growth_interval=3)
    optimizer = inner if isinstance(inner, torch.optim.Optimizer) else inner(net.parameters(), lr=1e-2)
    return MixedPrecisionOptimizer(optimizer, scaler=scaler, named_parameters=net.named_parameters(), **options)


def train(model: nn.Module, opt: Any, rank: int, poison: Any = (), micro: int = 1, steps: range = range(6)) -> None:
    """Steps of ``micro`` backwards, all but the last under DDP's no_sync; every other one is clipped."""
    for step in steps:
        opt.zero_grad()
        for k in range(micro):
            waits = isinstance(model, DDP) and k < micro - 1
            with model.no_sync() if waits else contextlib.nullcontext():
                # One look at all gradients, alone as under DDP: the norm's last bits depend on which pass measured it.
                looks = k == micro - 1 or opt.grad_accumulation == "fp32"
                loss = loss_of(model, step + 100 * k, rank, (step, rank) in poison and k == 0)
                opt.backward(loss, update_master_grads=looks)
        if step % 2:
            opt.clip_master_grads(0.5)
        opt.step()
        assert opt.step_was_skipped == any(step == at for at, _ in poison), step


def values(net: nn.Module, opt: Any) -> list[Tensor]:
    state = [v for entry in opt.state.values() for v in entry.values()]
    return [full(t) for t in (*opt.master_params(), *net.parameters(), *state, opt.scaler.scale)]


def under_ddp(rank: int, size: int, rows: list[Any]) -> None:
    """With one batch for both ranks halves add up exactly, so all bits must be those of one process."""
    for (dtype, cls), options, view, (accumulation, micro) in rows:
        made = []
        for shared in (True, False):
            net = Net(dtype)
            model = DDP(net, gradient_as_bucket_view=view) if shared else net
            opt = wrap(net, cls, grad_accumulation=accumulation, **options)
            distributed.attach(opt, model if shared else None, verify_ranks_every=1)
            train(model, opt, 0, {(2, 0)}, micro)
            made.append(values(net, opt))
        assert all(torch.equal(a, b) for a, b in zip(*made, strict=True)), (options, view, accumulation, micro)
        net = Net(dtype)
        model, opt = DDP(net), wrap(net, cls, grad_accumulation=accumulation, **options)
        distributed.attach(opt, model, verify_ranks_every=1)
        train(model, opt, rank, {(1, 1), (4, 0)}, micro)
        assert_alike(values(net, opt))


TRAINED = [(torch.float16, AdamW), (torch.bfloat16, SGD)]
SUMMED = [("model", 1), ("model", 2), ("fp32", 2)]


def test_fused_steps_and_split_masters_under_ddp(two: World) -> None:
    two.run(under_ddp, products.sample("choices", TRAINED, CHOICES, (False, True), SUMMED))


@on_ranks(2)
def test_drifting_split_masters_are_named(rank: int, size: int) -> None:
    """A split master is a weight and a remainder: either may differ."""
    for where in ("weight", "remainder"):
        net = Net()
        model, opt = DDP(net), wrap(net, SGD, master_weights="split")
        distributed.attach(opt, model, verify_ranks_every=1)
        train(model, opt, rank, steps=range(2))
        with torch.no_grad():
            if where == "remainder":  # an eighth of an ulp: the weight, rounded, stays
                saved = copy.deepcopy(opt.state_dict())
                saved["masters"][4][0, 0] = net.b.weight[0, 0].float() * (1.0 + rank * 2.0**-14)
                before = net.b.weight.clone()
                opt.load_state_dict(saved)
                assert torch.equal(before, net.b.weight)
            elif rank:
                net.b.weight[0, 0] = 3.0
        message = raised(RuntimeError, lambda m=model, o=opt: train(m, o, rank, steps=range(2, 3)))
        assert "the master of 'b.weight' differs between rank 0 and rank 1 (1 differ in all)" in message, message


@on_ranks(2)
def test_sharded_training_refuses_what_it_cannot_serve(rank: int, size: int) -> None:
    """What can't be served is refused, and the optimizer is left as it was."""
    net, zero_net = Net(), Net(norm=False)
    for layer in (net.a, net.norm, net.b, net):
        fully_shard(layer)
    opt = wrap(net)
    zero = wrap(zero_net, ZeroRedundancyOptimizer(zero_net.parameters(), AdamW, lr=1e-2))
    inner = AdamW(net.parameters())
    part = ZeroRedundancyOptimizer(zero_net.parameters(), AdamW, lr=1e-2)
    for optimizer in (inner, part):
        refused = {
            'master_weights="split" needs the one-pass step, which can\'t be had: fused_step=False': {
                "master_weights": "split",
                "fused_step": False,
            },
            "gradient_release=True takes plain tensors and an optimizer that steps them, got ": {
                "gradient_release": True
            },
        }
        for message, options in refused.items():
            heard = raised(ValueError, lambda o=options, w=optimizer: MixedPrecisionOptimizer(w, **o))
            assert message in heard, heard
    adagrad = torch.optim.Adagrad(net.parameters())
    heard = raised(ValueError, lambda: MixedPrecisionOptimizer(adagrad, master_weights="split"))
    assert 'master_weights="split" needs the one-pass step, which can\'t be had: Adagrad is not exactly SGD' in heard, (
        heard
    )
    assert 'Use master_weights="full".' in heard
    for wrapped in (opt, zero):
        heard = raised(RuntimeError, lambda o=wrapped: o.state_dict(compact=True))
        assert "state_dict: masters and optimizer state are spread over ranks" in heard
    for optimizer, params in ((inner, list(net.parameters())), (part, list(zero_net.parameters()))):
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))


@on_ranks(2)
def test_eight_bits_under_ddp_and_a_compact_checkpoint(rank: int, size: int) -> None:
    """Ranks round alike, by index and step; codes that one rank saves go on on both, bit for bit."""
    ends = []
    for resumes in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 70), nn.Linear(70, 70), nn.Linear(70, 4)).half()
        model, opt = DDP(net), wrap(net, master_weights="split24", optimizer_state="8bit")
        distributed.attach(opt, model, verify_ranks_every=1)
        for step in range(4):
            if resumes and step == 2:
                saved, weights = copy.deepcopy(opt.state_dict(compact=True)), copy.deepcopy(net.state_dict())
                assert any("exp_avg_codes" in entry for entry in saved["optimizer"]["state"].values())
                net.load_state_dict(weights)
                model, opt = DDP(net), wrap(net, master_weights="split24", optimizer_state="8bit")
                distributed.attach(opt, model, verify_ranks_every=1)
                opt.load_state_dict(saved)
            opt.zero_grad()
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank)).half()
            opt.backward(model(x).float().square().mean())
            opt.clip_master_grads(0.5)
            opt.step()
        state = [v for entry in opt.state.values() for v in entry.values() if isinstance(v, Tensor)]
        assert any(v.dtype == torch.uint8 for v in state)
        ends.append([*net.parameters(), *(v.float() for v in state)])
        assert_alike([t.detach() for t in ends[-1]])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
