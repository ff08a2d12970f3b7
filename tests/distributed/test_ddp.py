"""DDP: one verdict on every rank without a message, sums under no_sync, compression hooks, uneven inputs."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from distributed.models import HALF, Net, assert_alike, batch, loss_of
from distributed.world import World, on_ranks, raised
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed


def make(every: int = 0, attached: bool = True, **options: Any) -> Any:
    """(module, DDP module, wrapper)."""
    ddp_options = {k: options.pop(k) for k in list(options) if k in ("gradient_as_bucket_view", "static_graph")}
    ddp_options |= {"find_unused_parameters": options.pop("unused")} if "unused" in options else {}
    net = options.pop("net", None) or Net()
    ddp = DDP(net, **ddp_options)
    inner = options.pop("inner", None) or AdamW(ddp.parameters(), lr=1e-2)
    options.setdefault("scaler", DynamicLossScaler(init_scale=2.0**8, growth_interval=20))
    opt = MixedPrecisionOptimizer(inner, named_parameters=net.named_parameters(), **options)
    if attached:
        distributed.attach(opt, ddp, verify_ranks_every=every)
    return net, ddp, opt


def train(rank: int, ddp: nn.Module, opt: Any, steps: range, poison: Any = ()) -> list[bool]:
    """Plain steps with clipping; which of them were skipped. ``poison``: (step, rank) pairs."""
    skips = []
    for step in steps:
        opt.zero_grad()
        opt.backward(loss_of(ddp, step, rank, (step, rank) in poison))
        opt.clip_master_grads(0.5)
        opt.step()
        skips.append(opt.step_was_skipped)
    return skips


def values(opt: Any) -> list[Tensor]:
    state = [v for entry in opt.state.values() for v in entry.values()]
    return [*opt.master_params(), *opt.model_params(), *state, opt.scaler.scale]


@pytest.mark.parametrize("steps", [60, pytest.param(200, marks=pytest.mark.all)])
@on_ranks(2)
def test_masters_stay_equal_with_overflows_on_changing_ranks(rank: int, size: int, steps: int) -> None:
    poison = {(step, step // 7 % size) for step in range(3, steps, 7)}
    _, ddp, opt = make(every=10)
    skips = train(rank, ddp, opt, range(steps), poison)
    assert [step for step, skipped in enumerate(skips) if skipped] == sorted(step for step, _ in poison)
    assert opt.skipped_steps == len(poison)
    assert_alike(values(opt))
    assert float(opt.scaler.scale) != 2.0**8


@on_ranks(2)
def test_no_message_besides_the_gradients(rank: int, size: int) -> None:
    """The wrapper's step, clip and all, sends what a plain DDP step sends."""
    _, ddp, opt = make()
    plain = DDP(Net())
    plain_opt = SGD(plain.parameters(), lr=0.0)
    train(rank, ddp, opt, range(3))  # DDP arranges its buckets anew in the second step

    def plain_step(step: int) -> None:
        plain_opt.zero_grad()
        loss_of(plain, step, rank).backward()
        plain_opt.step()

    for step in range(3):
        plain_step(step)
    wanted = sent(lambda: plain_step(3))
    assert sent(lambda: train(rank, ddp, opt, range(3, 4))) == wanted
    assert sum(wanted.values()) >= 1, "the profiler sees messages at all"
    flag = sent(lambda: dist.all_reduce(torch.zeros(1)))
    assert sum(flag.values()) == 1


def sent(work: Any) -> dict[str, int]:
    """How often each collective ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    found: dict[str, int] = {}
    for event in profile.events() or ():
        if event.name.startswith("c10d::"):
            found[event.name] = found.get(event.name, 0) + 1
    return found


def grads_of(net: nn.Module, x: Tensor, scale: float) -> list[Tensor]:
    """This rank's gradients of a scaled loss, as autograd leaves them in the parameters' dtypes."""
    loss = (net(x) - 1.0).square().mean() * scale
    return [g.clone() for g in torch.autograd.grad(loss, list(net.parameters()))]


def mean_over_ranks(grads: list[Tensor], size: int) -> list[Tensor]:
    """As DDP does it on two ranks: divide, then add, in the gradients' dtype."""
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, grads)
    return [sum((g / size for g in same[1:]), same[0] / size) for same in zip(*everyone, strict=True)]


def accumulate(rank: int, size: int, options: dict[str, Any], synced_last: bool) -> None:
    """Three micro-batches, two or three of them under no_sync, against the same sums by hand."""
    net, ddp, opt = make(grad_accumulation="fp32", inner=None, **options)
    twin = Net()
    for step in range(2):
        twin.load_state_dict(net.state_dict())
        scale = float(opt.scaler.scale)
        parts = [grads_of(twin, batch(10 * step + k, rank), scale) for k in range(3)]
        local = parts[:2] if synced_last else parts
        sums = [torch.zeros_like(g, dtype=torch.float32) for g in parts[0]]
        for part in local:
            sums = [s + g.float() * (1.0 / scale) for s, g in zip(sums, part, strict=True)]
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, sums)
        wanted = [(a + b) * 0.5 for a, b in zip(*everyone, strict=True)]
        if synced_last:
            reduced = mean_over_ranks(parts[2], size)
            wanted = [w + g.float() * (1.0 / scale) for w, g in zip(wanted, reduced, strict=True)]
        opt.zero_grad()
        for k in range(3):
            x = batch(10 * step + k, rank)
            if k < 2 or not synced_last:
                with ddp.no_sync():
                    opt.backward((ddp(x) - 1.0).square().mean())
            else:
                opt.backward((ddp(x) - 1.0).square().mean())
        norm = opt.clip_master_grads(1e9)
        for i, (master, want) in enumerate(zip(opt.master_params(), wanted, strict=True)):
            assert torch.equal(master.grad, want), (i, step, (master.grad - want).abs().max())
        exact = torch.cat([w.double().reshape(-1) for w in wanted]).norm()
        torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0.0)
        opt.step()
    assert_alike(values(opt))


@pytest.mark.parametrize("synced_last", [True, False])
@pytest.mark.parametrize("view", [False, True])
def test_fp32_sums_under_no_sync_are_averaged_once(two: World, view: bool, synced_last: bool) -> None:
    two.run(accumulate, {"gradient_as_bucket_view": view}, synced_last)


@on_ranks(2)
def test_gradients_made_under_no_sync_wait_for_their_reduction(rank: int, size: int) -> None:
    """grad_accumulation="model": under no_sync nothing is unscaled, with or without update_master_grads=False."""
    made = [make() for _ in range(2)]
    for step in range(3):
        for (_, ddp, opt), told in zip(made, (True, False), strict=True):
            opt.zero_grad()
            with ddp.no_sync():
                opt.backward(loss_of(ddp, step, rank), **({"update_master_grads": False} if told else {}))
                for call in (opt.update_master_grads, opt.step, lambda o=opt: o.clip_master_grads(1.0)):
                    assert "no_sync" in raised(RuntimeError, call)
            opt.backward(loss_of(ddp, step + 50, rank))
            opt.step()
    for a, b in zip(values(made[0][2]), values(made[1][2]), strict=True):
        assert torch.equal(a, b)
    assert_alike(values(made[0][2]))


@on_ranks(2)
def test_the_scaler_whose_loss_overflowed_backs_off(rank: int, size: int) -> None:
    """Of two scalers in one step only the one whose loss overflowed backs off, on every rank."""
    _, ddp, opt = make(grad_accumulation="fp32", every=1)
    other = DynamicLossScaler(init_scale=2.0**4)
    for step in range(3):
        opt.zero_grad()
        with ddp.no_sync():
            opt.backward(loss_of(ddp, step, rank))
            opt.backward(loss_of(ddp, step + 50, rank, poison=(step, rank) == (1, 1)), scaler=other)
        opt.backward(loss_of(ddp, step + 90, rank))
        opt.step()
        assert opt.step_was_skipped == (step == 1)
    assert (opt.loss_scale, float(other.scale)) == (2.0**8, 2.0**3)
    # A sum that is not finite although no gradient was counts for every scaler that had a part in it.
    net = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    _, ddp, opt = make(net=net, grad_accumulation="fp32", scaler=DynamicLossScaler(init_scale=1.0))
    with ddp.no_sync():
        opt.backward(ddp(torch.ones(1, 2, dtype=torch.bfloat16)).float().sum() * 3e38)
    opt.backward(ddp(torch.ones(1, 2, dtype=torch.bfloat16)).float().sum())
    opt.step()
    assert opt.step_was_skipped
    assert opt.loss_scale == 0.5


@on_ranks(2)
def test_a_compiled_module(rank: int, size: int) -> None:
    """torch.compile around DDP: the same module to attach, and forward still says what is local."""
    net, ddp, opt = make(attached=False, net=Net(norm=False), grad_accumulation="fp32")
    model = torch.compile(ddp, backend="eager")
    distributed.attach(opt, model, verify_ranks_every=1)
    for step in range(2):
        opt.zero_grad()
        with ddp.no_sync():
            opt.backward(loss_of(model, step, rank))
        opt.backward(loss_of(model, step + 9, rank))
        opt.step()
    assert_alike(values(opt))
    assert set(distributed.state_dict(model, opt)["masters"]) == {name for name, _ in net.named_parameters()}


@on_ranks(2)
def test_an_overflow_in_a_local_sum_is_everybodys(rank: int, size: int) -> None:
    """An inf under no_sync on one rank alone skips on both; so does one in the synced backward."""
    _, ddp, opt = make(grad_accumulation="fp32", every=1)
    for step in range(4):
        opt.zero_grad()
        with ddp.no_sync():
            opt.backward(loss_of(ddp, step, rank, poison=(step, rank) == (1, 1)))
        opt.backward(loss_of(ddp, step + 9, rank, poison=(step, rank) == (2, 0)))
        opt.step()
        assert opt.step_was_skipped == (step in (1, 2)), step
        assert bool(opt.overflow_report()) == (step in (1, 2))
    assert_alike(values(opt))


class TwoHeads(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.heads = nn.ModuleList([nn.Linear(16, 3, dtype=HALF) for _ in range(3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](x.half()).float()


@on_ranks(2)
def test_unused_parameters(rank: int, size: int) -> None:
    net, ddp, opt = make(net=TwoHeads(), unused=True, inner=None)
    before = [p.detach().clone() for p in net.heads[2].parameters()]
    for step in range(4):
        opt.zero_grad()
        head = 1 if rank == 1 and step % 2 else 0
        opt.backward(ddp(batch(step, rank), head).square().mean())
        opt.step()
    assert_alike(values(opt))
    assert all(torch.equal(p, q) for p, q in zip(net.heads[2].parameters(), before, strict=True))
    assert len(opt.state) == 4
    # The same under no_sync: rank 1 alone has a sum for head 1.
    net, ddp, opt = make(net=TwoHeads(), unused=True, grad_accumulation="fp32")
    for step in range(3):
        opt.zero_grad()
        with ddp.no_sync():
            opt.backward(ddp(batch(step, rank), rank).square().mean())
        opt.backward(ddp(batch(step + 9, rank), 0).square().mean())
        opt.step()
    assert_alike(values(opt))
    assert len(opt.state) == 4


@on_ranks(2)
def test_bucket_views_and_static_graphs_change_nothing(rank: int, size: int) -> None:
    """DDP's ways of keeping gradients change no bit."""
    wanted = None
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        for keep in (True, False):
            _, ddp, opt = make(**options)
            for step in range(4):
                opt.zero_grad(set_to_none=keep)
                opt.backward(loss_of(ddp, step, rank))
                opt.step()
            got = values(opt)
            wanted = wanted or got
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (options, keep)
    # Two synchronised backwards a step, each unscaled: the second is written where the first one was.
    sums = []
    for view in (False, True):
        for accumulation in ("model", "fp32"):
            _, ddp, opt = make(gradient_as_bucket_view=view, grad_accumulation=accumulation)
            for step in range(4):
                opt.zero_grad()
                for k in range(2):
                    opt.backward(loss_of(ddp, 10 * step + k, rank))
                opt.step()
            sums.append(values(opt))
    for plain, viewed in ((sums[0], sums[2]), (sums[1], sums[3])):
        assert all(torch.equal(a, b) for a, b in zip(plain, viewed, strict=True))
    # A plain backward, at scale 1, finds new gradients in the same memory.
    net, ddp, opt = make(gradient_as_bucket_view=True, scaler=None)
    start = net.a.weight.detach().clone()
    for step in range(3):
        loss_of(ddp, step, rank).backward()
        opt.step()
        assert not torch.equal(net.a.weight, start)
        start = net.a.weight.detach().clone()
        opt.zero_grad(set_to_none=bool(step % 2))


@on_ranks(2)
def test_edits_are_told_from_gradients_that_ddp_moves(rank: int, size: int) -> None:
    """Where DDP moves gradients into its buckets nothing is raised; an edit raises as ever, until it is taken."""
    for view in (False, True):
        for update in (False, True):
            net, ddp, opt = make(gradient_as_bucket_view=view)
            opt.backward(loss_of(ddp, 0, rank))  # the forward of the next one moves gradients
            if update:
                opt.update_master_grads()
            opt.backward(loss_of(ddp, 1, rank))
            opt.clip_master_grads(0.5)
            opt.step()
            assert not opt.step_was_skipped
            for step in range(2):
                opt.zero_grad()
                opt.backward(loss_of(ddp, step, rank))
                net.a.weight.grad.mul_(0.5)
                assert "gradients were written after backward(loss) had made them: a.weight" in raised(
                    RuntimeError, lambda o=opt, d=ddp: o.backward(loss_of(d, 9, rank))
                )
                opt.update_master_grads()
                opt.step()
            assert_alike(values(opt))
    _, ddp, opt = make(gradient_as_bucket_view=True, attached=False)
    opt.backward(loss_of(ddp, 0, rank))
    assert "call fp16opt.distributed.attach(opt, ddp_model)" in raised(
        RuntimeError, lambda: opt.backward(loss_of(ddp, 1, rank))
    )


@on_ranks(2)
def test_compression_hooks(rank: int, size: int) -> None:
    """fp16 compression works; PowerSGD forgets what was not finite, on every rank."""
    _, ddp, opt = make()
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    assert train(rank, ddp, opt, range(4), {(2, 1)}) == [False, False, True, False]
    assert_alike(values(opt))
    torch.manual_seed(3)
    net = nn.Linear(16, 16, dtype=HALF)
    ddp = DDP(net)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    ddp.register_comm_hook(state, powerSGD_hook)
    opt = MixedPrecisionOptimizer(SGD(ddp.parameters(), lr=1e-3), scaler=DynamicLossScaler(init_scale=16.0))
    distributed.attach(opt, ddp, verify_ranks_every=1)
    skips = []
    for step in range(8):
        opt.zero_grad()
        loss = ddp(batch(step, rank).half()).float().square().mean()
        opt.backward(loss * float("inf") if (step, rank) == (4, 1) else loss)
        opt.step()
        skips.append(opt.step_was_skipped)
    assert skips == [False] * 4 + [True] + [False] * 3
    assert state.error_dict, "PowerSGD was compressing"


@on_ranks(2)
def test_uneven_inputs(rank: int, size: int) -> None:
    """With the optimizer Join raises; without it the attached module's forward does, before ranks drift apart."""
    _, ddp, opt = make()
    assert "Even out the inputs" in raised(RuntimeError, lambda: Join([ddp, opt]))
    before = [value.clone() for value in values(opt)]
    with Join([ddp]):
        assert "Even out the inputs" in raised(RuntimeError, lambda: loss_of(ddp, 0, rank))
    assert "After a Join that is over make the Distrib" in raised(RuntimeError, lambda: loss_of(ddp, 0, rank))
    ddp = DDP(ddp.module)
    distributed.attach(opt, ddp)
    loss_of(ddp, 0, rank)
    with Join([ddp], enable=False):
        train(rank, ddp, opt, range(2))
    assert not torch.equal(values(opt)[0], before[0])
    assert_alike(values(opt))


@on_ranks(2)
def test_refusals_are_heard_on_every_rank(rank: int, size: int) -> None:
    net, ddp, opt = make(attached=False, grad_accumulation="fp32")
    before = [v.clone() for v in values(opt)]
    message = raised(RuntimeError, lambda: opt.backward(loss_of(ddp, 0, rank)))
    assert "process group of 2 ranks" in message
    assert "distributed.attach(opt, ddp_model)" in message
    assert all(torch.equal(a, b) for a, b in zip(values(opt), before, strict=True))
    distributed.attach(opt, None)
    opt.backward(loss_of(net, 0, rank))
    opt.step()
    assert not torch.equal(next(opt.master_params()), before[0])
    attach = distributed.attach
    assert "expected a fp16opt.MixedPrecisionOptimizer, got AdamW" in raised(
        TypeError, lambda: attach(opt.optimizer, ddp)
    )
    assert "expected a DistributedDataParallel" in raised(TypeError, lambda: attach(opt, net))
    assert "expected an int, got bool" in raised(TypeError, lambda: attach(opt, ddp, verify_ranks_every=True))
    assert "expected 0 or more" in raised(ValueError, lambda: attach(opt, ddp, verify_ranks_every=-1))
    other = DDP(Net())
    assert "ddp_model has no parameter 'a.weight'" in raised(ValueError, lambda: attach(opt, other))
    # Only one rank has something else: all of them say so.
    few = MixedPrecisionOptimizer(SGD(list(ddp.parameters())[: 3 + rank], lr=0.1))
    assert "3 parameters in group 0, rank 1 has 4 parameters" in raised(ValueError, lambda: attach(few, ddp))
    scaler = DynamicLossScaler(growth_interval=100 + rank)
    odd = MixedPrecisionOptimizer(SGD(ddp.parameters(), lr=0.1), scaler=scaler)
    assert "growth_interval=100, rank 1 has a scaler with growth_interval=101" in raised(
        ValueError, lambda: attach(odd, ddp)
    )
    masters = MixedPrecisionOptimizer(SGD(ddp.parameters(), lr=0.1), master_weights="split" if rank else "full")
    message = raised(ValueError, lambda: attach(masters, ddp))
    assert "master_weights='full', rank 1 has master_weights='split'" in message
    strange = MixedPrecisionOptimizer(SGD((other if rank else ddp).parameters(), lr=0.1))
    assert "ddp_model has no parameter" in raised(ValueError, lambda: attach(strange, ddp))
    assert_alike(list(ddp.parameters()))


@on_ranks(2)
def test_a_loss_scaler_that_drifts_is_named(rank: int, size: int) -> None:
    net = Net()
    _, ddp, opt = make(every=1, net=net, inner=SGD(net.parameters(), lr=0.0))
    opt.scaler.set_scale(128.0 if rank else 64.0)
    assert "the loss scaler differs" in raised(RuntimeError, lambda: train(rank, ddp, opt, range(1)))


def test_attach_without_a_process_group() -> None:
    net = Net()
    opt = MixedPrecisionOptimizer(SGD(net.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised.*init_process_group"):
        distributed.attach(opt, net)
    distributed.attach(opt, None)


def fail_on_rank_1(rank: int, size: int) -> None:
    assert rank != 1, "rank 1 found something"


def test_what_a_rank_asserts_fails_the_test(two: World) -> None:
    with pytest.raises(AssertionError, match="rank 1 found something"):
        two.run(fail_on_rank_1)
    assert two.run(count_ranks) == [2, 2]


def count_ranks(rank: int, size: int) -> int:
    return size


@pytest.mark.parametrize("shared", [False, True])
@on_ranks(2)
def test_attaching_a_module_gives_names(rank: int, size: int, shared: bool) -> None:
    """Wrapped without names: messages have those of the attached module, of parameters on other ranks too."""
    net = nn.Sequential(OrderedDict(fc=nn.Linear(16, 3, dtype=HALF), out=nn.Linear(3, 2, dtype=HALF)))
    ddp = DDP(net)
    inner = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1) if shared else SGD(ddp.parameters(), lr=0.1)
    opt = MixedPrecisionOptimizer(inner)
    distributed.attach(opt, ddp, verify_ranks_every=1)
    ddp(torch.ones(2, 16, dtype=HALF)).float().sum().backward()
    opt.step()
    opt.zero_grad()
    ddp(torch.ones(2, 16, dtype=HALF)).float().sum().backward()
    with torch.no_grad():
        if not shared:
            next(opt.master_params())[0, 0] += 1000 * rank
            wanted = "the master of 'fc.weight'"
        else:  # what ZeRO sends is overwritten: a hook stands for a rank that went wrong after it
            opt.optimizer.register_step_post_hook(lambda *_: net.fc.weight.data[0, 0].add_(1000 * rank))
            wanted = "'fc.weight'"
    message = raised(RuntimeError, opt.step)
    assert f"ranks drifted apart: {wanted} differs between rank 0 and rank 1 (1 differ in all)" in message, message
    if not shared:
        opt.zero_grad()
        opt.backward(ddp(torch.full((2, 16), math.inf, dtype=HALF)).sum())
        assert "fc.weight" in [overflow.name for overflow in skipped(opt)]


def skipped(opt: Any) -> list[Any]:
    with contextlib.suppress(RuntimeError):  # the ranks are still apart
        opt.step()
    return opt.overflow_report()
