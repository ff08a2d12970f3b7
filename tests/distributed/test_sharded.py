"""FSDP2 and tensor parallelism: masters are DTensors, kernels see pieces, one message of 32 bytes a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW

from distributed.models import HALF, Net, assert_alike, full, loss_of, messages, one_step
from distributed.world import World, on_ranks, raised
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, StaticLossScaler, distributed


def sharded(net: nn.Module, **options: Any) -> nn.Module:
    """Each layer on its own, then the rest."""
    for layer in net.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(net, **options)


def wrap(net: nn.Module, inner: Any = None, **options: Any) -> MixedPrecisionOptimizer:
    options.setdefault("scaler", DynamicLossScaler(init_scale=2.0**8, growth_interval=3))
    options.setdefault("fused_step", False)  # the wrapped optimizer's own step, as pieces are stepped
    inner = inner or AdamW(net.parameters(), lr=1e-2)
    return MixedPrecisionOptimizer(inner, named_parameters=net.named_parameters(), **options)


def like_unsharded(rank: int, size: int, policy: dict[str, Any], accumulation: str) -> None:
    """Every rank has the same batch: halves add up exactly, so all bits must be those of one process."""
    plain, net = Net(), Net()
    if "param_dtype" in policy:
        plain, net = plain.float(), net.float()
    options = {"mp_policy": MixedPrecisionPolicy(**policy)} if policy else {}
    net = sharded(net, **options)
    one, many = (wrap(m, grad_accumulation=accumulation) for m in (plain, net))
    distributed.attach(one, None)
    if "param_dtype" not in policy:
        for number in range(5):
            one_step(plain, one, number, 0, poison=number == 2)
            one_step(net, many, number, 0, poison=number == 2)
            assert one.step_was_skipped == many.step_was_skipped == (number == 2)
            for a, b in zip(one.master_params(), many.master_params(), strict=True):
                assert isinstance(b, DTensor)
                assert b.dtype == torch.float32
                assert torch.equal(a, full(b)), (number, a.shape)
            for a, b in zip(plain.parameters(), net.parameters(), strict=True):
                assert torch.equal(a, full(b))
                assert b.dtype == a.dtype
            for a, b in zip(one.state.values(), many.state.values(), strict=True):
                assert torch.equal(a["exp_avg_sq"], full(b["exp_avg_sq"]))
    else:
        for number in range(3):
            one_step(net, many, number, rank)
        assert {p.dtype for p in many.master_params()} == {torch.float32}
    assert float(one.scaler.scale) == float(many.scaler.scale) or policy


@pytest.mark.parametrize("policy", [{}, {"reduce_dtype": torch.float32}, {"param_dtype": HALF}], ids=str)
def test_fsdp2_trains_like_one_process_bit_for_bit(two: World, policy: dict[str, Any]) -> None:
    two.run(like_unsharded, policy, "model")


@pytest.mark.all
def test_fsdp2_on_four_ranks_with_empty_pieces(four: World) -> None:
    four.run(like_unsharded, {}, "fp32")


def verdict(rank: int, size: int) -> None:
    """An inf in one element of one piece skips on every rank; norms are those of the whole gradient."""
    net = sharded(Net(norm=False))
    opt = wrap(net, SGD(net.parameters(), lr=0.1), scaler=StaticLossScaler(64.0))
    pieces = [p._local_tensor.shape for p in opt.master_params()]
    assert size < 4 or torch.Size([0, 7]) in pieces or rank < 3, "a rank without elements of b.weight"
    for number in range(4):
        before = [full(p).clone() for p in opt.master_params()]
        opt.zero_grad()
        opt.backward(loss_of(net, number, rank))
        if number == 2:
            last = next(net.parameters()).grad._local_tensor
            if rank == size - 1:
                last.view(-1)[-1] = math.inf
        opt.update_master_grads()
        norm_type = (2.0, math.inf, 2.0, 3.0)[number]
        wanted = torch.cat([full(p.grad).double().reshape(-1) for p in opt.master_params()])
        got = opt.clip_master_grads(1e-2, norm_type)
        opt.step()
        if number == 2:
            assert float(got) == math.inf
            assert opt.step_was_skipped
            assert all(torch.equal(a, full(b)) for a, b in zip(before, opt.master_params(), strict=True))
            assert bool(opt.overflow_report()) == (rank == size - 1)
        else:
            exact = torch.linalg.vector_norm(wanted, norm_type)
            torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=0.0)
            clipped = torch.cat([full(p.grad).double().reshape(-1) for p in opt.master_params()])
            torch.testing.assert_close(clipped, wanted * (1e-2 / (exact + 1e-6)), rtol=1e-6, atol=0.0)
            assert not opt.step_was_skipped
    opt.zero_grad()
    opt.backward(loss_of(net, 8, rank))
    norm = float(opt.clip_master_grads(1e9))
    for master in opt.master_params():
        master.grad._local_tensor.mul_(2.0)
    assert float(opt.clip_master_grads(1e9)) == pytest.approx(2 * norm, rel=1e-6), "a write to a piece is noticed"
    opt.zero_grad()
    opt.backward(loss_of(net, 9, rank, poison=rank == 0))
    message = raised(RuntimeError, lambda: opt.clip_master_grads(1.0, error_if_nonfinite=True))
    assert "can't be clipped" in message


def test_verdict_and_norm_over_pieces(two: World) -> None:
    two.run(verdict)


def test_verdict_and_norm_over_empty_pieces(four: World) -> None:
    four.run(verdict)


@on_ranks(2)
def test_one_message_of_32_bytes_clip_or_not(rank: int, size: int) -> None:
    net = sharded(Net())
    opt = wrap(net)
    one_step(net, opt, 0, rank)  # the first step compares the ranks
    for number, clips in enumerate((0, 1, 2, 1), 1):
        opt.zero_grad()
        opt.backward(loss_of(net, number, rank, poison=number == 4))
        with messages() as sent:
            for _ in range(min(clips, 1)):
                opt.clip_master_grads(1.0)
            opt.step()
        assert sent == [("all_reduce", 32)], (number, sent)
    for number in range(5, 7):  # a plain backward, whose gradients update_master_grads takes
        opt = wrap(net, scaler=None) if number == 5 else opt
        opt.zero_grad()
        loss_of(net, number, rank).backward()
        with messages() as sent:
            opt.update_master_grads()
            opt.clip_master_grads(0.1)
            opt.step()
        assert number == 5 or sent == [("all_reduce", 32)], (number, sent)
    opt = wrap(net)
    one_step(net, opt, 0, rank)
    # Two scalers' verdicts share the first eight bytes.
    other = DynamicLossScaler(init_scale=2.0**4)
    for poison in (False, True):
        opt.zero_grad()
        with messages() as sent:
            opt.backward(loss_of(net, 7, rank))
            opt.backward(loss_of(net, 8, rank, poison=poison and rank == 1), scaler=other)
            opt.clip_master_grads(1.0)
            opt.step()
        assert sent == [("all_reduce", 32)]
        assert opt.step_was_skipped == poison
    assert float(other.scale) == 2.0**3
    assert float(opt.scaler.scale) >= 2.0**8
    assert_alike([opt.scaler.scale, other.scale])


@on_ranks(2)
def test_writes_to_pieces_are_noticed(rank: int, size: int) -> None:
    """Through the DTensor, and where the master's piece is written too; test_modes.py has those to pieces alone."""
    net = sharded(Net(norm=False))
    opt = wrap(net, SGD(net.parameters(), lr=0.0))
    weight, master = next(net.parameters()), next(opt.master_params())
    one_step(net, opt, 0, rank)
    with torch.no_grad():
        weight.mul_(2.0)
    one_step(net, opt, 2, rank)
    assert torch.equal(master._local_tensor.half(), weight._local_tensor)
    with torch.no_grad():  # both pieces: the master's wins and is copied down
        weight._local_tensor.fill_(0.25)
        master._local_tensor.fill_(0.5)
    one_step(net, opt, 3, rank)
    assert bool((weight._local_tensor == 0.5).all())
    opt.zero_grad()
    opt = wrap(net, SGD(net.parameters(), lr=0.0), on_model_write="error")
    one_step(net, opt, 4, rank)
    with torch.no_grad():
        weight._local_tensor.fill_(0.25)
    opt.zero_grad()
    opt.backward(loss_of(net, 4, rank))
    assert "a.weight" in raised(RuntimeError, opt.step)


@on_ranks(2)
def test_refusals(rank: int, size: int) -> None:
    net = sharded(Net())
    opt = wrap(net, SGD(list(net.parameters())[: 2 + rank], lr=0.1))
    before = [full(p).clone() for p in list(opt.master_params())[:2]]
    opt.backward(loss_of(net, 0, rank))
    assert "2 parameters in group 0, rank 1 has 3 parameters" in raised(ValueError, opt.step)
    assert all(torch.equal(a, full(b)) for a, b in zip(before, opt.master_params(), strict=False))
    opt = wrap(net, scaler=DynamicLossScaler(backoff_factor=0.5 if rank else 0.25))
    assert "backoff_factor=0.25, rank 1 has a scaler with backoff_factor=0.5" in raised(
        ValueError, lambda: distributed.attach(opt, net)
    )
    for call in (opt.state_dict, lambda: opt.load_state_dict({})):
        assert "fp16opt.distributed.state_dict" in raised(RuntimeError, call)
    old = FullyShardedDataParallel(Net(norm=False), use_orig_params=True, device_id=torch.device("cpu"))
    assert "FSDP1" in raised(ValueError, lambda: MixedPrecisionOptimizer(SGD(old.parameters(), lr=0.1)))
    flat = FullyShardedDataParallel(Net(norm=False), device_id=torch.device("cpu"))
    assert "FSDP1" in raised(ValueError, lambda: MixedPrecisionOptimizer(SGD(flat.parameters(), lr=0.1)))
    dist.barrier()


class FirstRow(Net):
    """Its loss depends on the first row of one weight, which rank 0 has."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.half())[:, 0].float()


@on_ranks(2)
def test_gradients_that_are_left_over_or_edited(rank: int, size: int) -> None:
    """What is left over, or was written, is refused on every rank, also where this rank's pieces are all zeros."""
    net = sharded(FirstRow())
    opt = wrap(net)
    opt.backward(loss_of(net, 0, rank))
    opt.step()
    where = "has made them: a parameter's piece on another rank" if rank else "has made them: a.weight"
    assert where in raised(RuntimeError, lambda: opt.backward(loss_of(net, 1, rank)))
    net = sharded(Net())
    opt = wrap(net, SGD(net.parameters(), lr=2.0**-6))
    one_step(net, opt, 0, rank)
    opt.zero_grad(set_to_none=False)
    opt.backward(loss_of(net, 1, rank))
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    for call in (opt.step, lambda: opt.clip_master_grads(1.0)):
        assert "clip_master_grads(max_norm) in place of clip_grad_norm_(model.parameters())" in raised(
            RuntimeError, call
        )
    before = [full(p).clone() for p in opt.master_params()]
    grads = [full(p.grad).clone() for p in net.parameters()]
    opt.update_master_grads()
    opt.step()
    for p, old, grad in zip(opt.master_params(), before, grads, strict=True):
        assert torch.equal(full(p), old - grad.float() / 2.0**8 * 2.0**-6)
    ends = []
    for ours in (True, False):
        net = sharded(Net())
        opt = wrap(net)
        opt.backward(loss_of(net, 1, rank))
        clip = opt.clip_master_grads if ours else lambda m, o=opt: torch.nn.utils.clip_grad_norm_(o.master_params(), m)
        norm = clip(0.125)
        assert "clipped or edited" in raised(RuntimeError, lambda o=opt, n=net: o.backward(loss_of(n, 2, rank)))
        opt.step()
        ends.append([full(norm), *map(full, opt.master_params())])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "options", [{}, {"fused_step": True}, {"fused_step": True, "master_weights": "split"}], ids=str
)
@on_ranks(2)
def test_a_model_that_is_moved_after_its_step(rank: int, size: int, options: dict[str, Any]) -> None:
    """RL trainers move the model between phases, with the gradients of the last step still there."""
    ends = []
    for moves in (False, True):
        net = sharded(Net())
        opt = wrap(net, **options)
        for number in range(3):
            one_step(net, opt, number, rank)
            if moves:
                net._apply(lambda tensor: tensor.clone())  # as net.cpu() and net.to(device) do
        ends.append([full(p) for p in net.parameters()])
    assert all(map(torch.equal, *ends))
