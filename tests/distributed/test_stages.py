"""Pipelines: one verdict and one norm over stages that hold different parameters."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from distributed.models import HALF, assert_alike, full, messages
from distributed.world import on_ranks, raised
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed

MICRO = 4
SPLIT = {"master_weights": "split", "optimizer_state": "8bit"}
CPU = torch.device("cpu")


class Whole(nn.Module):
    """Two stages: one that is wide, and one with an FP32 layer norm among 16-bit weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first: Any = nn.Sequential(nn.Linear(16, 24, dtype=HALF), nn.Tanh())
        self.last: Any = nn.Sequential(
            nn.Linear(24, 8, dtype=HALF), nn.Tanh(), Cast(), nn.LayerNorm(8), nn.Linear(8, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in (self.first, self.last):
            x = x if stage is None else stage(x)
        return x


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def stage_of(number: int) -> Whole:
    """The whole model without the other stage: names are those of the whole."""
    net = Whole()
    setattr(net, ("last", "first")[number], None)
    return net


def batch(step: int, part: int = 0) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + part)).half()


def mse(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


TARGET = torch.ones(8, 3)


def wrap(net: nn.Module, inner: Any = None, **options: Any) -> MixedPrecisionOptimizer:
    options.setdefault("scaler", DynamicLossScaler(init_scale=2.0**8, growth_interval=3))
    inner = inner or AdamW(net.parameters(), lr=1e-2)
    return MixedPrecisionOptimizer(inner, **options)


class Pipeline:
    """A rank's stage, its optimizer and the schedule."""

    def __init__(self, number: int, net: Any, opt: Any, kind: Any = ScheduleGPipe, group: Any = None) -> None:
        self.number, self.opt = number, opt
        # Shapes are told, for torch would try DDP's forward to find them, and its reducer fails after that.
        inner = torch.zeros(2, 24, dtype=HALF, requires_grad=True)
        ends = torch.zeros(2, 16, dtype=HALF), torch.zeros(2, 3, requires_grad=True)
        shapes = {"input_args": (ends[0], inner)[number], "output_args": (inner, ends[1])[number]}
        stage = PipelineStage(net, number, 2, CPU, group=group, **shapes)
        self.schedule = kind(stage, MICRO, loss_fn=lambda out, target: opt.scale_loss(mse(out, target)))

    def backward(self, x: Tensor) -> None:
        """All micro-batches, forth and back."""
        self.opt.zero_grad()
        if self.number == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=TARGET)


def poison(net: nn.Module) -> None:
    next(net.parameters()).grad.view(-1)[-1] = math.inf


def in_one_process(whole: nn.Module, opt: Any, step: int) -> None:
    """The backwards of :class:`Pipeline`, without one."""
    opt.zero_grad()
    for x, target in zip(batch(step).chunk(MICRO), TARGET.chunk(MICRO), strict=True):
        opt.scale_loss(mse(whole(x), target)).backward()
    for p in whole.parameters():
        p.grad.div_(MICRO)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("gpipe", {}), ("1f1b", {}), ("gpipe", SPLIT)],
    ids=["gpipe", "1f1b", "split"],
)
@on_ranks(2)
def test_a_pipeline_of_two_stages(rank: int, size: int, kind: str, options: dict[str, Any]) -> None:
    """Four micro-batches a step. An overflow on one stage, then on the other, skips on both; as in one process."""
    whole, net = Whole(), stage_of(rank)
    one, opt = wrap(whole, **options), wrap(net, **options)
    distributed.attach(one, None)
    distributed.attach(opt, net, process_group=dist.group.WORLD)
    pipeline = Pipeline(rank, net, opt, {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind])
    bad = {2: 0, 4: 1}  # which stage overflows in which step
    for step in range(8):
        in_one_process(whole, one, step)
        pipeline.backward(batch(step))
        if step in bad:
            poison((whole.first, whole.last)[bad[step]])
            if bad[step] == rank:
                poison(net)
        norms = []
        for each in (one, opt):
            each.update_master_grads()
            norms.append(each.clip_master_grads(0.1))
            each.step()
        assert_alike([norms[1], opt.scaler.scale])
        assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-6)
        assert math.isinf(float(norms[1])) == (step in bad)
        assert opt.step_was_skipped == one.step_was_skipped == (step in bad)
        assert bool(opt.overflow_report()) == (bad.get(step) == rank)
        assert float(opt.scaler.scale) == float(one.scaler.scale)
    wanted = dict(whole.named_parameters())
    masters = dict(zip(wanted, one.master_params(), strict=True))
    for (name, p), master in zip(net.named_parameters(), opt.master_params(), strict=True):
        torch.testing.assert_close(master, masters[name], rtol=0.0, atol=1e-7)
        assert p.dtype == wanted[name].dtype
    assert opt.skipped_steps == 2


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@on_ranks(2)
def test_one_message_of_32_bytes(rank: int, size: int, static: bool) -> None:
    net = stage_of(rank)
    opt = wrap(net, **({"scaler": None} if static else {}))
    distributed.attach(opt, net, process_group=dist.group.WORLD)
    pipeline = Pipeline(rank, net, opt)
    for step, clips in enumerate((0, 1, 2)):
        pipeline.backward(batch(step))
        with messages() as sent:
            opt.update_master_grads()
            for _ in range(min(clips, 1)):
                opt.clip_master_grads(1.0)
            opt.step()
        assert sent == [("all_reduce", 32)], (step, sent)
    distributed.attach(opt, None)
    pipeline.backward(batch(3))
    with messages() as sent:
        opt.update_master_grads()
        opt.step()
    assert not sent, "attached to no stage any more"


@on_ranks(2)
def test_scalers_that_follow_norms(rank: int, size: int) -> None:
    """A scaler that follows norms hears of the largest over all stages: it does as that of one process."""
    whole, net = Whole(), stage_of(rank)
    one, opt = (
        wrap(model, scaler=DynamicLossScaler(init_scale=2.0**4, growth_interval=2, policy="headroom"))
        for model in (whole, net)
    )
    distributed.attach(opt, net, process_group=dist.group.WORLD)
    pipeline = Pipeline(rank, net, opt)
    for step in range(8):
        in_one_process(whole, one, step)
        pipeline.backward(batch(step))
        if step == 5:
            poison(whole)
            if rank == 0:
                poison(net)
        for each in (one, opt):
            each.update_master_grads()
            each.clip_master_grads(1.0)
            each.step()
        assert opt.step_was_skipped == (step == 5)
        seen = [value for value in opt.scaler.state_dict().values() if isinstance(value, Tensor)]
        assert_alike(seen)
        wanted = [value for value in one.scaler.state_dict().values() if isinstance(value, Tensor)]
        torch.testing.assert_close(seen, wanted, rtol=1e-6, atol=0.0)
    other = DynamicLossScaler(init_scale=2.0**6)
    if rank == 1:
        opt.zero_grad()
        for scaler in (opt.scaler, other):
            opt.backward(mse(net(torch.ones(4, 24).half()), torch.ones(4, 3)), scaler=scaler)
        assert "expected gradients of one loss scaler, got those of 2" in raised(RuntimeError, opt.step)


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@on_ranks(4)
def test_a_pipeline_with_data_parallelism(rank: int, size: int, way: str) -> None:
    """2 stages x 2 ranks: every element of the whole model's gradient enters the norm once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number, part = mesh.get_coordinate()
    net: Any = stage_of(number)
    if way == "ddp":
        model = DDP(net, process_group=mesh.get_group("dp"))
    else:
        for layer in (net.first, net.last)[number]:
            fully_shard(layer, mesh=mesh["dp"])
        model = fully_shard(net, mesh=mesh["dp"])
    opt = wrap(model, SGD(model.parameters(), lr=0.1))
    distributed.attach(opt, model, process_group=dist.group.WORLD)
    pipeline = Pipeline(number, model, opt, group=mesh.get_group("pp"))
    for step in range(4):
        pipeline.backward(batch(step, part))
        if step == 2 and rank == 1:  # under DDP of one replica alone: also then no rank steps
            grad = next(model.parameters()).grad
            (grad._local_tensor if way == "fsdp2" else grad).view(-1)[-1] = math.inf
        opt.update_master_grads()
        grads = [full(p.grad).double().reshape(-1) for p in opt.master_params()]
        got = opt.clip_master_grads(1e-2)
        opt.step()
        assert opt.step_was_skipped == (step == 2)
        squares = torch.cat(grads).square().sum()
        dist.all_reduce(squares, group=mesh.get_group("pp"))
        if step != 2:
            assert float(got) == pytest.approx(float(squares.sqrt()), rel=1e-6)
        assert_alike([got, opt.scaler.scale])
    ends: list[Any] = [None] * 4
    dist.all_gather_object(ends, [full(p) for p in opt.master_params()])
    assert all(torch.equal(a, b) for a, b in zip(ends[rank], ends[rank ^ 1], strict=True))


@on_ranks(4)
def test_copies_in_a_stage_are_counted_once(rank: int, size: int) -> None:
    """One stage on a mesh with copies of shards, a plain tensor beside: attached or not, each is counted once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    net: Any = nn.Sequential(nn.Linear(6, 5, dtype=HALF), nn.Linear(5, 4, dtype=HALF))
    torch.manual_seed(3)
    for p in net.parameters():
        nn.init.normal_(p)
    fully_shard(net[0], mesh=mesh["shards"])
    opt = wrap(net, SGD(net.parameters(), lr=0.1), loss_scale=1.0, scaler=None)
    norms = []
    for attached in (False, True):
        if attached:
            distributed.attach(opt, net, process_group=dist.group.WORLD)
        for p in net.parameters():
            p.grad = p.detach().clone()
        wanted = torch.cat([full(p).double().reshape(-1) for p in net.parameters()]).norm()
        norms.append(float(opt.clip_master_grads(1e9)))
        assert norms[-1] == pytest.approx(float(wanted), rel=1e-6)
        opt.zero_grad()


@on_ranks(2)
def test_checkpoints_by_name(rank: int, size: int, tmp_path: Path) -> None:
    """Saved in two stages; loaded in two stages and into the whole model; training goes on to the bit."""

    def make() -> tuple[Any, Any, Pipeline]:
        net = stage_of(rank)
        opt = wrap(net)
        distributed.attach(opt, net, process_group=dist.group.WORLD)
        return net, opt, Pipeline(rank, net, opt)

    def train(opt: Any, pipeline: Pipeline, steps: range) -> None:
        for step in steps:
            pipeline.backward(batch(step))
            opt.update_master_grads()
            opt.clip_master_grads(0.1)
            opt.step()

    net, opt, pipeline = make()
    train(opt, pipeline, range(3))
    distributed.save(f"{tmp_path}/step", net, opt)
    distributed.save_async(f"{tmp_path}/later", net, opt).result(60.0)
    taken = {key: value for key, value in distributed.state_dict(net, opt).items() if key != "masters"}
    assert [name for group in taken["param_groups"] for name in group["params"]] == [
        n for n, _ in net.named_parameters()
    ]
    for call in (opt.state_dict, lambda: opt.load_state_dict({})):
        assert "fp16opt.distributed.state_dict" in raised(RuntimeError, call)
    message = raised(RuntimeError, lambda: distributed.fp32_state_dict(net, opt))
    assert "rank 0 has one stage of the pipeline" in message
    ends = {name: p.clone() for (name, _), p in zip(net.named_parameters(), opt.master_params(), strict=True)}
    train(opt, pipeline, range(3, 5))
    after = [p.clone() for p in opt.master_params()]
    for name in ("step", "later"):
        net, opt, pipeline = make()
        distributed.load(f"{tmp_path}/{name}", net, opt)
        train(opt, pipeline, range(3, 5))
        assert all(torch.equal(a, b) for a, b in zip(after, opt.master_params(), strict=True))
    whole = Whole()
    one = wrap(whole)
    distributed.load(f"{tmp_path}/step", whole, one)
    for (name, _), master in zip(whole.named_parameters(), one.master_params(), strict=True):
        assert name not in ends or torch.equal(ends[name], master)
    assert one.steps_counted() == 3


def attached(rank: int, **options: Any) -> tuple[nn.Module, Any]:
    """A small stage of a name of its own."""
    net = nn.Module()
    net.add_module(f"stage{rank}", nn.Linear(4, 3, dtype=HALF))
    opt = wrap(net, SGD(net.parameters(), lr=0.1), **options)
    distributed.attach(opt, net, process_group=dist.group.WORLD)
    return net, opt


def give_ones(net: nn.Module, opt: Any, bad: bool = False) -> None:
    """Gradients of ones, scaled, as a schedule leaves them."""
    opt.zero_grad()
    for p in net.parameters():
        p.grad = torch.full_like(p, math.inf if bad else opt.loss_scale) if p.requires_grad else None
    opt.update_master_grads()


@pytest.mark.parametrize("policy", ["doubling", "headroom"])
@on_ranks(2)
def test_a_stage_without_gradients(rank: int, size: int, policy: str) -> None:
    """A stage without gradients hears of the others' steps, and its scaler goes with theirs."""
    net, opt = attached(rank, scaler=DynamicLossScaler(init_scale=2.0**8, growth_interval=2, policy=policy))
    frozen = rank == 0
    net.requires_grad_(not frozen)
    for step in range(5):
        give_ones(net, opt, bad=step == 2)
        with messages() as sent:
            clips = step % 2 == 0
            norm = opt.clip_master_grads(1e-3) if clips else torch.zeros(())
            opt.step()
        extra = [("all_gather_object", -1)] if step == 0 else []  # that it has none of its own is asked once
        extra += [("all_reduce", 4)] if policy == "headroom" else []
        assert sent == [("all_reduce", 32), *extra], sent
        assert float(norm) == pytest.approx((math.inf if step == 2 else 15**0.5) if clips else 0.0)
        assert opt.step_was_skipped == (step == 2)
        assert_alike([norm, *(v for v in opt.scaler.state_dict().values() if isinstance(v, Tensor))])
    assert (opt.steps_counted(), opt.skipped_steps) == (4, 1)
    opt.zero_grad()
    before = repr(opt.scaler.state_dict())
    assert float(opt.clip_master_grads(1.0)) == 0.0
    opt.step()  # no rank has anything: not counted anywhere
    assert (opt.steps_counted(), opt.stats()["steps"]) == (4, 5)
    assert repr(opt.scaler.state_dict()) == before
    give_ones(net, opt)
    opt.clip_master_grads(1.0)
    give_ones(net, opt)  # the batch was given up
    opt.step()
    assert opt.steps_counted() == 5
    if frozen:
        net.requires_grad_(True)
    give_ones(net, opt)
    assert float(opt.clip_master_grads(1.0)) == pytest.approx(30**0.5)


@pytest.mark.parametrize("way", ["clip", "twice", "max_norm", 3.0, math.inf])
@on_ranks(2)
def test_ranks_that_call_in_another_order(rank: int, size: int, way: Any) -> None:
    net, opt = attached(rank)
    ends = [p.clone() for p in net.parameters()]
    give_ones(net, opt)
    if way == "clip":
        message = raised(RuntimeError, opt.step if rank else lambda: opt.clip_master_grads(1.0))
        what = "clip_master_grads(1, norm_type=2), of step 1, rank 1", "step(), of step 1. Nothing was"
    elif way == "twice":
        opt.clip_master_grads(1.0)
        if rank:  # goes on to the next step
            opt.step()
            ends = [p.clone() for p in net.parameters()]
            give_ones(net, opt)
        message = raised(RuntimeError, lambda: opt.clip_master_grads(1.0))
        what = (
            "clip_master_grads(1, norm_type=2), after 1 clip of",
            "clip_master_grads(1, norm_type=2), of step 2. Nothing",
        )
    elif way == "max_norm":
        message = raised(RuntimeError, lambda: opt.clip_master_grads((1.0, 0.5)[rank]))
        what = "clip_master_grads(1, norm_type=2)", "clip_master_grads(0.5, norm_type=2)"
    else:
        message = raised(RuntimeError, lambda: opt.clip_master_grads(1.0, (2.0, way)[rank]))
        what = "clip_master_grads(1, norm_type=2)", f"clip_master_grads(1, norm_type={way:g})"
    assert f"ranks called in another order: rank 0 has come to {what[0]}" in message, message
    assert f", rank 1 to {what[1]}" in message, message
    assert all(torch.equal(a, b) for a, b in zip(ends, net.parameters(), strict=True))
    give_ones(net, opt)
    if way == "twice":  # a rank is a step behind: that is said until all load a checkpoint
        assert "ranks called in another order" in raised(RuntimeError, lambda: opt.clip_master_grads(1.0))
        distributed.load_state_dict(net, opt, distributed.state_dict(net, opt))
        give_ones(net, opt)
    assert float(opt.clip_master_grads(1.0)) == pytest.approx(30**0.5), "all begin anew"
    opt.step()
    give_ones(net, opt)
    assert float(opt.clip_master_grads(1.0, math.inf)) == 1.0
    opt.step()
    give_ones(net, opt, bad=rank == 1)
    assert float(opt.clip_master_grads(1.0, math.inf)) == math.inf
    opt.step()
    assert opt.step_was_skipped


@on_ranks(2)
def test_a_checkpoint_with_a_stage_that_has_no_state(rank: int, size: int, tmp_path: Path) -> None:
    """A stage that has no state yet does not make that of others be taken for none."""
    ends = []
    for resumes in (False, True):
        torch.manual_seed(rank)
        net = nn.Module()
        net.add_module(f"stage{rank}", nn.Linear(4, 3, dtype=HALF))
        opt = wrap(net, SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.5))
        distributed.attach(opt, net, process_group=dist.group.WORLD)
        if resumes:
            distributed.load(f"{tmp_path}/step", net, opt)
            assert len(opt.state) == (0, 2)[rank]
        else:
            net.requires_grad_(rank == 1)
            for _ in range(3):
                give_ones(net, opt)
                opt.step()
            net.requires_grad_(True)
            distributed.save(f"{tmp_path}/step", net, opt)
        for _ in range(2):
            give_ones(net, opt)
            opt.step()
        ends.append([*opt.master_params()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@on_ranks(2)
def test_copies_of_an_attached_optimizer(rank: int, size: int) -> None:
    """A copy would decide alone. Where it is attached to no pipeline any more it is one as ever."""
    net, opt = attached(rank)
    for copy_of in (copy.deepcopy, pickle.dumps):
        assert "a copy or pickle of an optimizer that shares its verdict" in raised(
            RuntimeError, lambda make=copy_of: make(opt)
        )
    distributed.attach(opt, None)
    other, its = copy.deepcopy((net, opt))
    give_ones(other, its, bad=rank == 1)
    its.step()
    assert its.step_was_skipped == (rank == 1)


@on_ranks(4)
def test_two_stages_with_the_same_names(rank: int, size: int) -> None:
    """Two stages whose modules use the same names, on one mesh: no copies, as their values show."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_coordinate()[0]
    torch.manual_seed(stage)
    net = nn.Sequential(nn.Linear(4, 4, dtype=HALF), nn.LayerNorm(4))
    fully_shard(net[0], mesh=mesh["dp"])
    opt = wrap(net, SGD(net.parameters(), lr=0.1), scaler=None)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    wanted = " is taken for one parameter with copies on rank 0 and rank 2, by its name and its mesh, and their values"
    message = raised(ValueError, lambda: opt.clip_master_grads(1.0))
    assert f"'group 0, param 0'{wanted}" in message, message
    message = raised(ValueError, lambda: distributed.attach(opt, net, process_group=dist.group.WORLD))
    assert f"'0.weight'{wanted}" in message, message
    named = [(f"layers.{stage}.{name}", p) for name, p in net.named_parameters()]
    opt = wrap(net, SGD(net.parameters(), lr=0.1), scaler=None, named_parameters=named)
    distributed.attach(opt, net, process_group=dist.group.WORLD)
    assert float(opt.clip_master_grads(1e9)) == pytest.approx(math.sqrt(2 * (16 + 3 * 4)))


@on_ranks(2)
def test_what_stages_must_agree_on(rank: int, size: int) -> None:
    """Stages must agree on scaler, settings and config; on nothing else."""
    world = dist.group.WORLD

    def attach(net: nn.Module, opt: Any) -> str:
        return raised(ValueError, lambda: distributed.attach(opt, net, process_group=world))

    net = stage_of(rank)
    message = attach(net, wrap(net, scaler=DynamicLossScaler(backoff_factor=0.25 if rank else 0.5)))
    assert "rank 0 has a scaler with backoff_factor=0.5, rank 1 has a scaler with backoff_factor=0.25" in message
    message = attach(net, wrap(net, AdamW(net.parameters(), lr=0.5 + rank)))
    assert "rank 0 has group 0 with lr=0.5, rank 1 has group 0 with lr=1.5. Stages of a pipeline differ in" in message
    assert "A group of which a stage has no parameter is empty there: {'params': [], 'lr': ...}." in message
    groups = [{"params": list(net.parameters()) if rank == number else [], "lr": 0.5 + number} for number in range(2)]
    distributed.attach(wrap(net, AdamW(groups)), net, process_group=world)
    message = attach(net, wrap(net, master_weights="split" if rank else "full"))
    assert "rank 0 has master_weights='full', rank 1 has master_weights='split'" in message
    same = nn.Linear(4, 3, dtype=HALF)
    message = attach(same, wrap(same))
    assert (
        "whether 'weight' is one parameter or two can't be told: rank 0 has it on ranks [0], rank 1 on ranks [1]"
        in message
    ), message
    names = [(f"stage{rank}.{name}", p) for name, p in same.named_parameters()]
    distributed.attach(wrap(same, named_parameters=names), same, process_group=world)
    other = wrap(nn.Linear(2, 2, dtype=HALF))
    assert "ddp_model has no parameter 'group 0, param 0'" in raised(
        ValueError, lambda: distributed.attach(other, net, process_group=world)
    )


@on_ranks(2)
def test_refusals(rank: int, size: int) -> None:
    world = dist.group.WORLD
    net = stage_of(rank)
    opt = wrap(net)

    def attach(model: Any, group: Any, opt: Any = opt, error: Any = ValueError, **options: Any) -> str:
        return raised(error, lambda: distributed.attach(opt, model, process_group=group, **options))

    pairs = [dist.new_group([rank]) for rank in range(size)]
    for group in ("all", pairs[1 - rank]):
        assert "expected a torch.distributed.ProcessGroup with this rank in it" in attach(net, group, error=TypeError)
    assert "expected the module of this rank's stage, got NoneType" in attach(None, world, error=TypeError)
    assert "verify_ranks_every: expected 0 with process_group" in attach(net, world, verify_ranks_every=2)
    sums = wrap(net, grad_accumulation="fp32")
    assert 'expected grad_accumulation="model", got "fp32"' in attach(net, world, opt=sums)
    half = stage_of(1).half()
    zero = wrap(half, ZeroRedundancyOptimizer(half.parameters(), AdamW, lr=0.1))
    assert "got a ZeroRedundancyOptimizer" in attach(half, world, opt=zero)
    whole = nn.Linear(3, 2, dtype=HALF)
    ddp = DDP(whole)
    message = attach(ddp, pairs[rank], opt=wrap(whole))
    assert f"expected all ranks over which 'weight' may lie, [0, 1], and [{1 - rank}] are not in it" in message
    distributed.attach(opt, net, process_group=world)
    late = nn.Parameter(torch.ones(2).half())
    opt.add_param_group({"params": [late]})
    late.grad = torch.ones(2).half()
    opt.update_master_grads()
    message = raised(RuntimeError, lambda: opt.clip_master_grads(1.0))
    assert "parameters were added after attach(opt, model, process_group=...)" in message


def test_gradient_release_has_no_pipeline() -> None:
    """Alone: where there are several ranks it is refused at once."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        net = nn.Linear(3, 2, dtype=HALF)
        opt = MixedPrecisionOptimizer(SGD(net.parameters(), lr=0.1), gradient_release=True)
        message = raised(ValueError, lambda: distributed.attach(opt, net, process_group=dist.group.WORLD))
        assert "gradient_release=True steps in backward" in message
    finally:
        dist.destroy_process_group()


@on_ranks(2)
def test_several_chunks_of_a_rank(rank: int, size: int) -> None:
    """Two chunks a rank: one optimizer clips by the norm of all, several are told so; by name each has its own norm."""
    chunks = {str(2 * k + rank): nn.Parameter(torch.ones(1, dtype=torch.float16)) for k in range(2)}

    def made(named: Any, scaler: Any) -> Any:
        opt = MixedPrecisionOptimizer(SGD(named.values(), lr=0.5), scaler=scaler, named_parameters=named.items())
        distributed.attach(opt, nn.ParameterDict(named), process_group=dist.group.WORLD)
        return opt

    def give(opts: list[Any]) -> None:
        opts[-1].scale_loss(sum(p.float().sum() for p in chunks.values())).backward()
        for opt in opts:
            opt.update_master_grads()

    scaler = DynamicLossScaler(init_scale=64.0)
    one = made(chunks, scaler)
    give([one])
    assert float(one.clip_master_grads(1.0)) == 2.0
    one.step()
    # Gradients are 1, and the factor is 1 / (2 + 1e-6): in FP16 0.75.
    assert [float(p) for p in chunks.values()] == [0.75, 0.75]
    one.zero_grad()
    opts = [made({name: p}, scaler) for name, p in chunks.items()]
    give(opts)
    message = raised(RuntimeError, lambda: opts[0].clip_master_grads(1.0))
    assert "clip_master_grads: 1 more of this rank's optimizers are attached to the same ranks" in message, message
    assert "one optimizer over all chunks of a rank, nn.ModuleDict(chunks)" in message
    for opt, p in zip(opts, chunks.values(), strict=True):
        assert float(opt.clip_master_grads(1e9, params=[p])) == pytest.approx(2**0.5)
    for opt in opts:
        opt.step()
        opt.zero_grad()
