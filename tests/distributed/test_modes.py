"""Every mode on shards: the bits are those of one process that steps the same gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fused.test_registered_classes import PlainLion
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, Adam, AdamW

import fp16opt
from distributed import models
from distributed.models import full
from distributed.world import World, on_ranks, raised
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed
from fp16opt.engine.dtensors import local, piece_of

WRAPPED = {"fused_step": False}
MODES: dict[str, dict[str, Any]] = {
    "one pass": {"fused_step": True},
    "split": {"master_weights": "split", "fused_step": True},
    "split24": {"master_weights": "split24"},
    "8-bit": {"optimizer_state": "8bit"},
    "split + 8-bit": {"master_weights": "split", "optimizer_state": "8bit"},
    "split24 + 8-bit": {"master_weights": "split24", "optimizer_state": "8bit"},
}
CLASSES: dict[str, Any] = {
    "AdamW": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adam": lambda p: Adam(p, lr=1e-2, amsgrad=False),
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "ZeRO": lambda p: ZeroRedundancyOptimizer(p, AdamW, lr=1e-2, weight_decay=0.1),
}


class Net(nn.Module):
    """Matrices of rows that are multiples of 128, and are not; a bias; a weight with fewer rows than ranks; FP32."""

    def __init__(self, dtype: torch.dtype, wide: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def made(*shape: int, of: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).mul_(0.1).to(of))

        self.even = made(48, 512)
        self.odd = made(45, 100)
        self.cube = made(10, 12, 40)
        self.few = made(1, 5000)
        self.bias = made(37)
        self.wide = nn.Module()
        self.wide.weight = made(64, 72, of=wide)


def wrap(net: nn.Module, cls: str, **options: Any) -> MixedPrecisionOptimizer:
    scaler = DynamicLossScaler(init_scale=2.0**8, growth_interval=3)
    inner = CLASSES[cls](net.parameters())
    return MixedPrecisionOptimizer(inner, named_parameters=net.named_parameters(), scaler=scaler, **options)


def gradients(net: nn.Module, number: int, scale: float) -> list[Tensor]:
    """Of the whole parameters, scaled, the same on every rank; every fourth step has an inf at the end of one."""
    generator = torch.Generator().manual_seed(100 + number)
    found = []
    for p in net.parameters():
        found.append((torch.randn(p.shape, generator=generator) * 0.01 * scale).to(p.dtype))
    if number % 4 == 2:
        found[0].view(-1)[-1] = math.inf
    return found


def give(net: nn.Module, opt: MixedPrecisionOptimizer, number: int) -> None:
    """Gradients as autograd leaves them under FSDP2."""
    opt.zero_grad()
    opt.scale_loss(torch.zeros(()))
    for p, grad in zip(net.parameters(), gradients(net, number, float(opt.scaler.scale)), strict=True):
        if isinstance(p, DTensor):
            grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = grad


def masters_of(opt: MixedPrecisionOptimizer) -> list[Tensor]:
    return [full(master) for master in opt.master_params()]


def assert_same_weights(plain: nn.Module, net: nn.Module, number: int) -> None:
    for (name, a), b in zip(plain.named_parameters(), net.parameters(), strict=True):
        assert torch.equal(a, full(b)), (name, number)


def assert_same(plain: nn.Module, one: MixedPrecisionOptimizer, net: nn.Module, many: MixedPrecisionOptimizer) -> None:
    a, b = distributed.state_dict(plain, one), distributed.state_dict(net, many)
    here = b["masters"].keys()
    is_part = isinstance(many.optimizer, ZeroRedundancyOptimizer)
    assert (0 < len(here) < len(a["masters"])) == is_part
    assert is_part or here == a["masters"].keys()
    for name in here:
        assert torch.equal(a["masters"][name], full(b["masters"][name])), name
        for key, value in a["state"][name].items():
            if isinstance(value, Tensor):
                assert torch.equal(value, full(b["state"][name][key])), (name, key)


def spread(net: Net, layout: str, size: int) -> None:
    """Lay the parameters out over the ranks."""
    if layout == "offloaded":
        fully_shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False))
    elif layout == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "columns":
        fully_shard(
            net, shard_placement_fn=lambda p: Shard(1 if p.dim() == 2 and p.shape[1] % (128 * size) == 0 else 0)
        )
    elif layout in ("tensor parallel", "tensor parallel, then fsdp2"):
        shape = (size,) if layout == "tensor parallel" else (2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[2 - len(shape) :])
        net.linears = nn.ModuleDict({"column": nn.Linear(96, 80, bias=False), "row": nn.Linear(512, 64, bias=True)})
        generator = torch.Generator().manual_seed(3)
        for p in net.linears.parameters():
            p.data = torch.randn(p.shape, generator=generator).to(net.even.dtype)
        if layout == "tensor parallel" or size == 4:
            plan = {"linears.column": ColwiseParallel(), "linears.row": RowwiseParallel()}
            parallelize_module(net, mesh["tp"], plan)
        if layout != "tensor parallel":
            fully_shard(net, mesh=mesh["dp"])
    elif layout != "zero":
        fully_shard(net.wide)
        fully_shard(net)


def like_one_process(rank: int, size: int, mode: str, cls: str, dtype: torch.dtype, layout: str = "fsdp2") -> None:
    wide = dtype if layout == "zero" else torch.float32  # which takes one dtype
    plain, net = Net(dtype, wide), Net(dtype, wide)
    spread(net, layout, size)
    if hasattr(net, "linears"):
        plain.linears = nn.ModuleDict({"column": nn.Linear(96, 80, bias=False), "row": nn.Linear(512, 64, bias=True)})
        for a, b in zip(plain.linears.parameters(), net.linears.parameters(), strict=True):
            a.data = full(b.detach()).clone()
    one, many = wrap(plain, cls, **MODES[mode]), wrap(net, "ZeRO" if layout == "zero" else cls, **MODES[mode])
    for number in range(6):
        for module, opt in ((plain, one), (net, many)):
            for group in opt.optimizer.param_groups:  # ZeRO's own, which users set
                group["lr"] /= 1 + number
            give(module, opt, number)
            if number % 2:
                opt.clip_master_grads(0.5)
            opt.step()
        assert one.step_was_skipped == many.step_was_skipped == (number % 4 == 2)
        assert_same_weights(plain, net, number)
    assert_same(plain, one, net, many)  # whatever differed in an earlier step differs still
    assert "fused" in repr(many).split("step:")[1].splitlines()[0]


def package_in_use(rank: int, size: int) -> tuple[str, str]:
    return fp16opt.__file__, fp16opt.kernels.backend("cpu")


def test_ranks_have_the_package_of_this_process(two: World) -> None:
    """In a clone of an installed package they could find the clone, in which nothing is compiled."""
    assert two.run(package_in_use) == 2 * [package_in_use(0, 1)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_fsdp2_steps_have_the_bits_of_one_process(two: World, mode: str, dtype: torch.dtype) -> None:
    two.run(like_one_process, mode, "AdamW", dtype)


@pytest.mark.parametrize(
    "layout", ["columns", "offloaded", "tensor parallel", "zero", "hsdp", "tensor parallel, then fsdp2"]
)
@pytest.mark.parametrize("mode", ["one pass", "split", "split24 + 8-bit"])
def test_other_layouts_have_the_bits_of_one_process(two: World, four: World, mode: str, layout: str) -> None:
    """Under ZeRO every rank steps its part; weights are everywhere, the verdict and the norm are those of all parts."""
    is_square = layout in ("hsdp", "tensor parallel, then fsdp2")
    (four if is_square else two).run(like_one_process, mode, "AdamW", torch.bfloat16, layout)


@pytest.mark.parametrize("cls", ["Adam", "SGD"])
@pytest.mark.parametrize("mode", ["split", "8-bit"])
def test_other_classes_have_the_bits_of_one_process(two: World, mode: str, cls: str) -> None:
    two.run(like_one_process, mode, cls, torch.float16)


def placed(whole: Tensor) -> None:
    """Every element of a piece is where ``piece_of`` says, of a whole whose elements are their indices."""
    place = piece_of(whole)
    assert place is not None
    piece = local(whole.detach()).reshape(-1)
    assert torch.equal(piece.long(), place.indices(torch.arange(piece.numel()))), (whole.placements, place)


def index(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


@on_ranks(4)
def test_where_a_piece_lies_in_its_whole(rank: int, size: int) -> None:
    flat = init_device_mesh("cpu", (size,))
    for shape in ((10, 6), (3, 5), (9,), (2, 7, 3)):
        placed(distribute_tensor(index(*shape), flat, [Shard(0)], src_data_rank=None))
        placed(distribute_tensor(index(*shape), flat, [Replicate()], src_data_rank=None))
        if len(shape) > 1:
            placed(distribute_tensor(index(*shape), flat, [Shard(1)], src_data_rank=None))
    placed(distribute_tensor(index(2, 7, 6), flat, [Shard(2)], src_data_rank=None))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placed(distribute_tensor(index(7, 10), mesh, [Shard(0), Shard(1)], src_data_rank=None))
    crossed = distribute_tensor(index(4, 6, 8), mesh, [Shard(1), Shard(2)], src_data_rank=None)
    assert piece_of(crossed) is None
    for style in (ColwiseParallel(), RowwiseParallel()):
        net = nn.Sequential(nn.Linear(6, 10, bias=False))
        with torch.no_grad():
            net[0].weight.copy_(index(10, 6))
        parallelize_module(net, mesh["tp"], {"0": style})
        fully_shard(net, mesh=mesh["dp"])
        placed(net[0].weight)


# -- what is refused ---------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_shards_that_no_code_fits(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def param(*shape: int, cut: Any) -> nn.Parameter:
        whole = torch.ones(shape, dtype=torch.bfloat16)
        return nn.Parameter(distribute_tensor(whole, mesh, cut, src_data_rank=None))

    crossed = param(4, 64, 64, cut=[Shard(1), Shard(2)])
    message = raised(ValueError, lambda: MixedPrecisionOptimizer(AdamW([crossed]), master_weights="split24"))
    assert "where the shards of parameter 'group 0, param 0' lie in the whole can't be said" in message
    assert 'master_weights="split" does not ask it' in message
    within = param(64, 320, cut=[Replicate(), Shard(1)])  # 160 columns a rank
    opt = MixedPrecisionOptimizer(AdamW([crossed, within]), optimizer_state="8bit")
    opt.scale_loss(torch.zeros(()))
    for p in (crossed, within):
        p.grad = p.detach() * 0.0 + 1.0
    opt.step()
    assert all("exp_avg" in opt.state[p] for p in (crossed, within))
    message = raised(RuntimeError, lambda: opt.state_dict())
    assert "state_dict: masters and optimizer state are spread over ranks" in message


# -- checkpoints -------------------------------------------------------------------------------------------------------


def trained(net: Net, opt: MixedPrecisionOptimizer, steps: range) -> None:
    for number in steps:
        give(net, opt, number)
        opt.clip_master_grads(0.5)
        opt.step()


def saved_values(net: nn.Module, opt: MixedPrecisionOptimizer) -> dict[str, Tensor]:
    """FP32 masters and moments of the whole parameters, by name."""
    found = distributed.state_dict(net, opt)
    values = {f"master {name}": full(value).clone() for name, value in found["masters"].items()}
    for name, entry in found["state"].items():
        values |= {f"{key} {name}": full(v).clone() for key, v in entry.items() if isinstance(v, Tensor)}
    return values


def sharded_net(mode: str, seed: int) -> tuple[Net, MixedPrecisionOptimizer]:
    torch.manual_seed(seed)
    net = Net(torch.bfloat16)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.01 * seed)
    fully_shard(net.wide)
    fully_shard(net)
    return net, wrap(net, "AdamW", **(WRAPPED if mode == "wrapped" else MODES[mode]))


def save_in(rank: int, size: int, path: str, mode: str) -> dict[str, Tensor]:
    net, opt = sharded_net(mode, 0)
    trained(net, opt, range(5))
    distributed.save(path, net, opt)
    return saved_values(net, opt)


def load_in(rank: int, size: int, path: str, mode: str) -> dict[str, Tensor]:
    net, opt = sharded_net(mode, 1)
    distributed.load(path, net, opt)
    found = saved_values(net, opt)
    trained(net, opt, range(5, 6))  # and goes on
    return found


def load_alone(path: str, mode: str) -> dict[str, Tensor]:
    net = Net(torch.bfloat16)
    opt = wrap(net, "AdamW", **MODES[mode])
    distributed.load(path, net, opt)
    return saved_values(net, opt)


def lost(name: str, mode: str, value: Tensor) -> float:
    """At most so much of a value that is kept in a mode may be lost, as a share of the largest of its row."""
    if name.startswith("master") and "split24" in mode and "wide" not in name:
        return 2.0**-16  # 24 bits, to nearest: half of a last place of 2**-15 of the value
    if "8-bit" in mode and name.startswith("exp_avg"):
        return 2.0**-4  # a code of 8 bits: 4 bits of mantissa, or a root in 255 steps
    return 0.0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("split24 + 8-bit", "split24 + 8-bit"),
        ("one pass", "split24 + 8-bit"),
        pytest.param("8-bit", "split", marks=pytest.mark.all),
    ],
)
def test_saved_in_one_mode_on_four_ranks_loaded_in_another_on_three_and_on_one(
    four: World, three: World, tmp_path: Any, before: str, after: str
) -> None:
    path = str(tmp_path / "saved")
    wanted = four.run(save_in, path, before)[0]
    found = [three.run(load_in, path, after)[0], load_alone(path, after)]
    for values in found:
        assert values.keys() == wanted.keys()
        for name, value in values.items():
            error = (value.double() - wanted[name].double()).abs()
            bound = wanted[name].double().abs().reshape(error.shape[0] if error.dim() else 1, -1).amax(1)
            share = lost(name, after, value) if before != after else 0.0
            assert bool((error.reshape(bound.numel(), -1).amax(1) <= share * bound).all()), (name, error.max())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items()), "codes depend on the mesh"


@pytest.mark.parametrize("mode", ["one pass", "split", "split24 + 8-bit"])
@on_ranks(2)
def test_resuming_on_the_same_ranks_is_exact_to_the_bit(rank: int, size: int, tmp_path: Path, mode: str) -> None:
    net, opt = sharded_net(mode, 0)
    trained(net, opt, range(3))
    distributed.save(tmp_path / "saved", net, opt)
    trained(net, opt, range(3, 7))
    other, resumed = sharded_net(mode, 1)
    distributed.load(tmp_path / "saved", other, resumed)
    trained(other, resumed, range(3, 7))
    a, b = saved_values(net, opt), saved_values(other, resumed)
    assert all(torch.equal(value, b[name]) for name, value in a.items())
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p._local_tensor, q._local_tensor)


# -- whole trainings: gradients of autograd and of FSDP2's reductions --------------------------------------------------


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize(("mode", "kind"), [("one pass", "lion"), ("split", "sgd"), ("split24", "lion")])
@pytest.mark.parametrize("accumulation", ["model", "fp32"])
@on_ranks(2)
def test_trainings_are_those_of_one_process(
    rank: int, size: int, mode: str, accumulation: str, reshards: bool, kind: str
) -> None:
    """Two micro-batches a step, the same on every rank: averages of equal numbers are exact, so gradients are equal."""
    options = {**MODES[mode], "grad_accumulation": accumulation}
    make: Any = PlainLion if kind == "lion" else (lambda p: SGD(p, lr=0.1, momentum=0.9))
    plain, net = (models.Net(torch.float16) for _ in range(2))
    for layer in (net.a, net.norm, net.b, net):
        fully_shard(layer, reshard_after_forward=reshards)
    one, many = (
        MixedPrecisionOptimizer(make(m.parameters()), scaler=DynamicLossScaler(init_scale=2.0**8), **options)
        for m in (plain, net)
    )
    distributed.attach(one, None)
    for number in range(4):
        for model, opt in ((plain, one), (net, many)):
            opt.zero_grad()
            for micro in range(2):
                poisoned = number == 2 and micro == 0
                opt.backward(models.loss_of(model, 10 * number + micro, 0, poison=poisoned))
            if number == 3 and mode == "split":
                torch.nn.utils.clip_grad_norm_(opt.master_params(), 0.1)
            elif number % 2:
                opt.clip_master_grads(0.1)
            opt.step()
        assert one.step_was_skipped == many.step_was_skipped == (number == 2)
        for a, b in zip(masters_of(one), masters_of(many), strict=True):
            if kind == "lion" or number == 0:
                assert torch.equal(a, b), number
            else:
                # Squares are added up in float32 in groups of eight, and shards of seven elements cut a group: norms,
                # and with them the clip's factors, may differ in their last bit of 2**-23. Gradients are below 1.
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    assert "fused" in repr(many).split("step:")[1].splitlines()[0]


@pytest.mark.parametrize("mode", ["wrapped", "split24 + 8-bit"])
@on_ranks(2)
def test_micro_batches_without_synchronisation(rank: int, size: int, mode: str) -> None:
    """While synchronisation is off FSDP2 adds gradients up itself: the last backward shows the sum of all."""
    ends, dtype = [], torch.float16 if mode == "wrapped" else torch.bfloat16
    for off in (False, True):
        torch.manual_seed(0)
        net = models.Net(dtype)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for layer in (net.a, net.norm, net.b, net):
            fully_shard(layer, mp_policy=policy)
        opt = wrap(net, "AdamW", **(WRAPPED if mode == "wrapped" else MODES[mode]))
        for number in range(3):
            opt.zero_grad()
            for micro in range(2):
                net.set_requires_gradient_sync(not off or micro == 1)
                opt.backward(models.loss_of(net, 10 * number + micro, rank))
            opt.step()
        ends.append(masters_of(opt))
    for a, b in zip(*ends, strict=True):
        # Sums are rounded in another order; in BF16 a step of Adam moves at most lr = 1e-2 in either direction.
        torch.testing.assert_close(a, b, rtol=0.0, atol=3e-3 if mode == "wrapped" else 3 * 2e-2)
        assert not torch.equal(a, torch.zeros_like(a))


@pytest.mark.parametrize("mode", ["wrapped", "one pass", "split", "split24 + 8-bit"])
@on_ranks(2)
def test_writes_to_pieces_are_taken_in_every_mode(rank: int, size: int, mode: str) -> None:
    """A write to a weight, on one rank and through its piece, is taken into the master there, and nowhere else."""
    net, opt = sharded_net(mode, 0)
    trained(net, opt, range(2))
    before = [master.to_local().clone() for master in opt.master_params()]
    if rank == 1:
        with torch.no_grad():
            net.even._local_tensor[0, 0] = 3.0
    give(net, opt, 2)
    opt.step()  # an overflow: nothing moves but for what was written
    assert opt.step_was_skipped
    opt.model_writes.sync()
    after = [master.to_local() for master in opt.master_params()]
    assert float(after[0][0, 0]) == (3.0 if rank == 1 else float(before[0][0, 0]))
    for a, b in zip(before[1:], after[1:], strict=True):
        assert torch.equal(a, b)


@on_ranks(2)
def test_masters_that_the_user_wrote_are_sent_by_zero(rank: int, size: int) -> None:
    """A master that the user wrote, and that has no gradient, reaches the model of every rank."""
    params = [nn.Parameter(torch.full((8,), float(i), dtype=torch.float16)) for i in range(4)]
    opt = MixedPrecisionOptimizer(ZeroRedundancyOptimizer(params, AdamW, lr=0.0), fused_step=True)
    for pair in opt.params.all:
        with torch.no_grad():
            pair.master.add_(0.5)
    opt.scale_loss(torch.zeros(()))
    params[0].grad = torch.ones(8).half()
    opt.step()
    assert [float(p[0]) for p in params] == [0.5, 1.5, 2.5, 3.5]
