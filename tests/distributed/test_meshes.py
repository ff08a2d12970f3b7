"""DTensors in the ways that users lay them out: flattened and small meshes, sequence parallelism, groups added late."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import SGD, AdamW

from distributed.models import HALF, Net, batch, full, loss_of, messages, one_step
from distributed.test_sharded import sharded
from distributed.world import World, on_ranks, raised
from fp16opt import DynamicLossScaler, LossScaleError, MixedPrecisionOptimizer, distributed


def poisoned_step(net: Any, opt: Any, step: int, rank: int, poison: bool) -> None:
    """One element of one piece is infinite on rank 1 where ``poison`` is set; then no rank may step."""
    opt.zero_grad()
    opt.backward(loss_of(net, step, rank), update_master_grads=False)
    if poison and rank == 1:
        net.a.weight.grad._local_tensor.view(-1)[0] = math.inf
    opt.step()
    assert opt.step_was_skipped == poison, step


def norms(rank: int, size: int, way: str) -> None:
    """A mesh of its own dimension names counts every element once, too."""
    if way == "flattened":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["dp", "cp"]._flatten("dp_cp")
    else:  # two of four ranks, in two dimensions
        mesh = DeviceMesh("cpu", [[0, 2]], mesh_dim_names=("outer", "inner"))
        if rank in (1, 3):
            dist.barrier()
            return
        mesh = mesh["inner"]
    net = sharded(Net(norm=False), mesh=mesh)
    made, new_group = [], dist.new_group
    dist.new_group = lambda *args, **kwargs: (made.append(args), new_group(*args, **kwargs))[1]
    opt = MixedPrecisionOptimizer(SGD(net.parameters(), lr=0.1), loss_scale=64.0)
    opt.backward(loss_of(net, 0, rank))
    got = opt.clip_master_grads(1e9)
    wanted = torch.cat([full(p.grad).double().reshape(-1) for p in opt.master_params()]).norm()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=0.0)
    opt.step()
    dist.new_group = new_group
    assert not made, "a group of its own, of which other ranks would not know"
    if way != "flattened":
        dist.barrier()


@pytest.mark.parametrize("way", ["flattened", "small"])
def test_norms_on_other_meshes(four: World, way: str) -> None:
    four.run(norms, way)


class Sequence(nn.Module):
    """Layer norms that see a part of the sequence each: their gradients are parts of a sum."""

    def __init__(self, norms: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.LayerNorm(16, dtype=norms), nn.LayerNorm(16, dtype=norms)
        self.up, self.down = nn.Linear(16, 24, dtype=HALF), nn.Linear(24, 16, dtype=HALF)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.first.weight.dtype
        x = self.down(torch.relu(self.up(self.first(x.to(dtype)).half())))
        return self.last(x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@on_ranks(2)
def test_gradients_that_are_parts_of_a_sum(rank: int, size: int, dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole_sequence = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    plan = {"first": SequenceParallel(), "last": SequenceParallel(), "": whole_sequence}
    plan |= {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
    ends = []
    for net in (Sequence(dtype), parallelize_module(Sequence(dtype), mesh, plan)):
        opt = MixedPrecisionOptimizer(SGD(net.parameters(), lr=0.1), loss_scale=64.0)
        found = []
        for step in range(3):
            opt.zero_grad()
            x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(step))
            opt.scale_loss((net(x).float() - 1.0).square().mean()).backward()
            if hasattr(net.first.weight, "placements"):
                assert net.first.weight.grad.placements == (Partial("sum"),), "else this tests nothing"
            found.append(float(opt.clip_master_grads(0.3)))
            opt.step()
        ends.append((found, [full(p) for p in opt.master_params()]))
    (wanted, masters), (got, others) = ends
    assert got == pytest.approx(wanted, rel=2e-3)  # FP16 products, summed in another order
    for a, b in zip(masters, others, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=3 * 0.1 * 0.3 * 2e-3)  # of steps of 0.1 * 0.3 at most


@on_ranks(2)
def test_groups_of_pieces_that_come_later(rank: int, size: int) -> None:
    """Sharded parameters that come later are everybody's business from then on."""
    for inside in (False, True):
        extra = nn.Parameter(torch.ones(3).half())
        net = sharded(Net(norm=False))
        opt = MixedPrecisionOptimizer(SGD([extra], lr=0.1), scaler=DynamicLossScaler(init_scale=2.0**8))
        (opt.optimizer if inside else opt).add_param_group({"params": list(net.parameters())})
        poisoned_step(net, opt, 0, rank, poison=False)  # compares the ranks
        for step in range(1, 4):
            with messages() as sent:
                poisoned_step(net, opt, step, rank, poison=step == 2)
            assert sent == [("all_reduce", 32)]
    other = DeviceMesh("cpu", [1, 0], mesh_dim_names=("y",))
    param = nn.Parameter(distribute_tensor(torch.ones(4), other, [Shard(0)]))
    opt.add_param_group({"params": [param]})
    poisoned_step(net, opt, 4, rank, poison=True)


def on_mesh(values: Tensor, mesh: DeviceMesh, *placements: Any) -> nn.Parameter:
    """A parameter whose pieces are cut here of what every rank has."""
    return nn.Parameter(distribute_tensor(values, mesh, placements, src_data_rank=None))


def norm_and_verdicts(rank: int, opt: Any, wanted: float) -> None:
    """The norm of gradients that equal the parameters; an overflow in a piece of each of them skips everywhere."""
    for step in range(1 + len(opt.param_groups[0]["params"])):
        for p in opt.model_params():
            p.grad = p.detach().clone()
        if step and rank == step % dist.get_world_size():
            piece = list(opt.model_params())[step - 1].grad
            getattr(piece, "_local_tensor", piece).view(-1)[-1:] = math.inf
        with messages() as sent:
            got = float(opt.clip_master_grads(1e9))
            opt.step()
        if step == 0:
            assert got == pytest.approx(wanted, rel=1e-6)
        assert sent[-1] == ("all_reduce", 32)
        assert sent[:-1] == ([("all_gather_object", -1)] if step == 0 else [])
        found = torch.tensor(float(any(getattr(g, "_local_tensor", g).isinf().any() for g in grads_of(opt))))
        dist.all_reduce(found)
        assert opt.step_was_skipped == bool(found), step
        opt.zero_grad()


def grads_of(opt: Any) -> list[Any]:
    return [p.grad for p in opt.model_params()]


def values_of(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def static(params: Any, **options: Any) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(SGD(params, lr=0.0), **options)


@pytest.mark.parametrize("way", ["backwards", "square", "dimension", "apart"])
@on_ranks(4)
def test_experts_on_a_mesh_of_their_own(rank: int, size: int, way: str) -> None:
    """Experts on a mesh that was made apart from that of dense parameters, a plain tensor beside: each counted once."""
    dense, expert, plain = values_of(7, 3, seed=1), values_of(6, 4, seed=2), values_of(5, seed=3)
    line = DeviceMesh("cpu", list(range(size)), mesh_dim_names=("dp",))
    copies = 1
    if way == "backwards":
        placed = on_mesh(expert, DeviceMesh("cpu", list(range(size))[::-1]), Shard(0))
    elif way == "square":
        placed = on_mesh(expert, init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")), Replicate(), Shard(0))
    elif way == "dimension":  # every pair of ranks has the same, as far as can be told
        placed = on_mesh(expert, init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))["ep"], Shard(0))
    else:  # pairs made apart, each with experts of its own
        pairs = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        placed = on_mesh(expert, pairs[rank // 2], Shard(0))
        copies = 2
    params = [on_mesh(dense, line, Shard(0)), placed, nn.Parameter(plain)]
    names = ["dense", f"experts.{rank // 2 if copies == 2 else 0}", "plain"]
    opt = static(params, named_parameters=zip(names, params, strict=True))
    square = sum(float(t.double().square().sum()) for t in (dense, *[expert] * copies, plain))
    norm_and_verdicts(rank, opt, math.sqrt(square))
    if way == "apart":
        opt = static(params)
        params[0].grad = params[0].detach().clone()
        message = raised(ValueError, lambda: opt.clip_master_grads(1.0))
        assert (
            "whether 'group 0, param 1' is one parameter or two can't be told: rank 0 has it on ranks [0, 1]" in message
        )
        assert "rank 2 on ranks [2, 3]" in message
        # Only some ranks have experts.
        some = params[:2] if rank < 2 else params[:1]
        opt = static(some, named_parameters=zip(names, some, strict=False))
        params[0].grad, params[1].grad = params[0].detach().clone(), params[1].detach().clone()
        square = sum(float(t.double().square().sum()) for t in (dense, expert))
        assert float(opt.clip_master_grads(1e9)) == pytest.approx(math.sqrt(square), rel=1e-6)


@on_ranks(4)
def test_meshes_that_no_mesh_covers(rank: int, size: int) -> None:
    """Three of four ranks, no mesh of all three: the user makes the group."""
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    group = dist.new_group([0, 1, 2])
    if rank == 3:
        dist.barrier()
        return
    a, b = values_of(4, seed=1), values_of(6, seed=2)
    here = [(name, on_mesh(v, m, Shard(0))) for name, v, m in (("a", a, first), ("b", b, second)) if rank in m.mesh]
    net = nn.Module()
    for name, p in here:
        net.register_parameter(name, p)
    opt = static(net.parameters())
    for p in net.parameters():
        p.grad = p.detach().clone()
    if rank == 1:
        for call in (lambda: opt.clip_master_grads(1.0), opt.step, lambda: distributed.attach(opt, net)):
            message = raised(ValueError, call)
            assert "lie on the ranks [0, 1, 2] together, and no single mesh does" in message
            assert "torch.distributed.new_group([0, 1, 2])" in message
    distributed.attach(opt, net, process_group=group)
    wanted = torch.cat([a, b]).double().norm()
    assert float(opt.clip_master_grads(1e9)) == pytest.approx(float(wanted), rel=1e-6)
    opt.step()
    dist.barrier()


@on_ranks(2)
def test_decisions_left_to_the_device(rank: int, size: int) -> None:
    """Where the host does not wait for the device (here: the host, treated as one) the bits are the same."""
    ends = []
    place = pretended.who_waits()
    is_host = place.is_host
    for waits in (True, False):
        place.is_host = is_host if waits else lambda device: False
        try:
            for inner, settings in ((AdamW, {"fused": True}), (SGD, {"momentum": 0.9})):
                net = sharded(Net())
                optimizer = inner(net.parameters(), lr=1e-2, **settings)
                opt = MixedPrecisionOptimizer(optimizer, scaler=DynamicLossScaler(init_scale=2.0**8))
                for step in range(6):
                    poisoned_step(net, opt, step, rank, poison=step == 2)
                    if step == 3 and rank == 0:
                        with torch.no_grad():
                            net.a.weight._local_tensor[0, 0] = 3.0
                assert opt.skipped_steps == 1
                ends.append([full(t) for t in (*opt.master_params(), *net.parameters())])
        finally:
            place.is_host = is_host
    half = len(ends) // 2
    for waited, went_on in zip(ends[:half], ends[half:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(waited, went_on, strict=True))


class Root(nn.Module):
    """A layer of its own in the outermost module, which FSDP2 leaves gathered after a forward without backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(16, 16, dtype=HALF)
        self.net = Net(norm=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.first(x.half()).float())


@on_ranks(2)
def test_saving_and_loading_after_validation(rank: int, size: int, tmp_path: Path) -> None:
    root = Root()
    fully_shard(root.net)
    fully_shard(root)
    opt = MixedPrecisionOptimizer(AdamW(root.parameters(), lr=1e-2), loss_scale=64.0)

    def validate() -> Tensor:
        with torch.no_grad():
            return root(batch(0, 0)).clone()

    def train() -> None:
        one_step(root, opt, 1, rank)

    train()
    saved = validate()
    for call in (distributed.attach, distributed.state_dict, distributed.fp32_state_dict):
        validate()
        call(*((opt, root) if call is distributed.attach else (root, opt)))
    validate()
    distributed.save(f"{tmp_path}/step", root, opt)
    train()
    assert not torch.equal(validate(), saved)
    distributed.load(f"{tmp_path}/step", root, opt)
    assert torch.equal(validate(), saved), "weights gathered before the load are not used after it"


@on_ranks(2)
def test_what_other_ranks_found_and_norms_that_cannot_be_had(rank: int, size: int) -> None:
    net = sharded(Net(norm=False))
    scaler = DynamicLossScaler(init_scale=4.0, max_consecutive_skips=1)
    opt = MixedPrecisionOptimizer(SGD(net.parameters(), lr=0.1), scaler=scaler, named_parameters=net.named_parameters())
    message = raised(LossScaleError, lambda: poisoned_step(net, opt, 0, rank, poison=True))
    assert ("Last in: a.weight (inf)" if rank == 1 else "Last in: none of this rank's parameters") in message, message
    opt.zero_grad()
    opt.backward(loss_of(net, 0, rank))
    message = raised(ValueError, lambda: opt.clip_master_grads(1.0, 9.0))
    assert "over ranks expected at most 7, or inf, got 9" in message
    opt.clip_master_grads(1.0, 7.0)
