"""Every mode on every kind of shards, and what stands around a training: one table, of which `--all` runs every cell.

Each cell trains a model on two ranks and, beside it, the same one in one process: the same gradients, an overflow among
them, every other step clipped. Then it compares averages, records of a Monitor, reports of the skipped step, deltas,
and what ``memory()`` and ``plan`` say of bytes.
"""

from __future__ import annotations

import math
from typing import Any

import products
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

from distributed.models import full, messages
from distributed.world import World, on_ranks, raised
from fp16opt import (
    AveragedMasters,
    DynamicLossScaler,
    MixedPrecisionOptimizer,
    Monitor,
    certify,
    diagnose,
    distributed,
    ema,
)
from fp16opt.engine.dtensors import local
from fp16opt.tools.plan import Plan

MODES: dict[str, dict[str, Any]] = {
    "wrapped": {"fused_step": False},
    "one pass": {"fused_step": True},
    "FP32 sums": {"grad_accumulation": "fp32"},
    "split": {"master_weights": "split"},
    "split24": {"master_weights": "split24"},
    "none": {"master_weights": "none"},
    "8-bit": {"optimizer_state": "8bit"},
    "split + 8-bit": {"master_weights": "split", "optimizer_state": "8bit"},
    "split24 + 8-bit": {"master_weights": "split24", "optimizer_state": "8bit"},
}
LAYOUTS = ("fsdp2", "hsdp", "tensor parallel", "experts", "zero")
STEPS, SKIPPED = range(5), 2


class Net(nn.Module):
    """Rows and columns that two ranks cut into whole blocks of 8-bit state, and a small tensor."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def made(*shape: int) -> nn.Module:
            layer = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16)
            with torch.no_grad():
                layer.weight.copy_(torch.randn(shape, generator=generator) * 0.1)
            return layer

        self.rows, self.columns, self.experts = made(96, 256), made(64, 256), made(70, 128)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 33).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        parts = self.rows(x), self.columns(x), self.experts(x[:, :128])
        return sum(part.float().square().mean() for part in parts) + self.scale.float().square().sum()


def spread(net: Net, layout: str, size: int) -> None:
    if layout == "fsdp2":
        fully_shard(net.rows)
        fully_shard(net)
    elif layout == "hsdp":  # two copies of one shard
        fully_shard(net, mesh=init_device_mesh("cpu", (size, 1), mesh_dim_names=("copies", "shards")))
    elif layout == "tensor parallel":  # plain tensors beside, alike on all ranks
        mesh = init_device_mesh("cpu", (size,))
        row_wise = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(net, mesh, {"rows": ColwiseParallel(), "columns": row_wise})
    elif layout == "experts":
        fully_shard(net.experts, mesh=init_device_mesh("cpu", (size, 1), mesh_dim_names=("copies", "shards")))
        fully_shard(net, mesh=init_device_mesh("cpu", (size,)))


def wrapped(net: nn.Module, mode: str, zero: bool = False) -> MixedPrecisionOptimizer:
    params, inner = list(net.parameters()), AdamW
    made: Any = ZeroRedundancyOptimizer(params, inner, lr=1e-2) if zero else inner(params, lr=1e-2)
    scaler = DynamicLossScaler(init_scale=2.0**8, growth_interval=3)
    named = net.named_parameters()
    return MixedPrecisionOptimizer(made, named_parameters=named, scaler=scaler, track_changes=True, **MODES[mode])


def give(net: nn.Module, opt: MixedPrecisionOptimizer, number: int) -> None:
    """Gradients of the whole parameters, the same on every rank, as autograd leaves them on shards."""
    opt.zero_grad()
    scale = float(opt.scaler.scale)
    opt.scale_loss(torch.zeros(()))
    generator = torch.Generator().manual_seed(100 + number)
    for name, p in net.named_parameters():
        grad = (torch.randn(p.shape, generator=generator) * 0.01 * scale).to(p.dtype)
        if number == SKIPPED and name == "columns.weight":
            grad[-1, -1] = math.inf  # on the last rank only, where it is cut
        if isinstance(p, DTensor):
            grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = grad


class Run:
    """A training, with what watches it."""

    def __init__(self, net: Any, mode: str, zero: bool = False) -> None:
        self.net, self.opt = net, wrapped(net, mode, zero)
        if not self.opt.params.has_dtensors:
            distributed.attach(self.opt, None)  # there is no DDP
        self.records: list[dict[str, Any]] = []
        self.monitor = Monitor(self.opt, every=1, to=self.records.append)
        self.averaged = None if zero else AveragedMasters(net, self.opt, ema(0.75))
        self.deltas: list[Any] = []
        self.blamed: list[str] = []

    def step(self, number: int) -> None:
        give(self.net, self.opt, number)
        if number % 2:
            self.opt.clip_master_grads(0.5)
        if number == STEPS[-1]:
            self.memory = self.opt.memory()
        self.opt.step()
        assert self.opt.step_was_skipped == (number == SKIPPED)
        self.blamed += [found.name for found in self.opt.overflow_report()]
        self.deltas.append(self.opt.take_delta(self.net))
        if self.averaged is not None:
            self.averaged.update()


class Cell:
    """Compares two trainings. What differs is noted, not raised: the other ranks wait for the next message."""

    def __init__(self, one: Run, many: Run, mode: str, rank: int) -> None:
        self.one, self.many, self.mode, self.rank = one, many, mode, rank
        self.wrong: list[Any] = []

    def expect(self, is_so: bool, *what: object) -> None:
        if not is_so:
            self.wrong.append(what)

    def expect_close(self, ours: Any, theirs: Any, rel: float, *what: object, least: float = 1e-6) -> None:
        if not (isinstance(theirs, (int, float)) and isinstance(ours, (int, float))):
            self.expect(ours == theirs, *what, ours, theirs)
        else:
            self.expect(ours == pytest.approx(theirs, rel=rel, abs=least, nan_ok=True), *what, ours, theirs)

    def weights(self, number: int) -> None:
        for (name, p), q in zip(self.one.net.named_parameters(), self.many.net.parameters(), strict=True):
            self.expect(torch.equal(p, full(q)), "weight", name, number)

    def averages(self) -> None:
        one, many = self.one.averaged, self.many.averaged
        assert one is not None
        assert many is not None
        found = {name: full(value).clone() for name, value in many.fp32_state_dict().items()}
        for name, value in one.fp32_state_dict().items():
            self.expect(torch.equal(found[name], value), "average", name)
        kept = [full(p).clone() for p in self.many.net.parameters()]
        with one.swap(), many.swap():
            self.weights(-1)
            p, q = self.many.net.rows.weight, kept[0]
            self.expect(not any(torch.equal(full(p), q) for q in kept if q.shape == p.shape), "nothing was swapped")
        for p, q in zip(self.many.net.parameters(), kept, strict=True):
            self.expect(torch.equal(full(p), q), "put back")
        other = AveragedMasters(self.many.net, self.many.opt, ema(0.5))
        other.load_state_dict(many.state_dict())
        for name, value in other.fp32_state_dict().items():
            self.expect(torch.equal(full(value), found[name]), "loaded average", name)

    def records(self) -> None:
        self.one.monitor.detach()
        self.many.monitor.detach()
        if self.rank:
            self.expect(not self.many.records, "rank 0 alone writes")
            return
        ours, theirs = self.many.records, self.one.records
        self.expect([r["kind"] for r in ours] == [r["kind"] for r in theirs], "kinds of records")
        for a, b in zip(ours, theirs, strict=True):
            for key in ("loss_scale", "skipped", "grad_norm", "skipped_steps"):
                self.expect_close(a.get(key), b.get(key), 1e-5, "record", key)
            for name, row in b.get("rows", {}).items():
                for what, value in row.items():
                    # Of updates one element in 17 is looked at, others in pieces than in the whole; of the few that
                    # stand still some five more or less of 24,576.
                    loose = what in ("update_ulps", "lost", "still", "distance", "update_ratio")
                    rel, least = (0.25, 2e-4) if loose else (1e-3, 1e-6)
                    self.expect_close(a["rows"][name][what], value, rel, "record", name, what, least=least)

    def report(self, size: int) -> None:
        everyone: list[Any] = [None] * size
        torch.distributed.all_gather_object(everyone, self.many.blamed)
        blamed = {name for names in everyone for name in names}
        self.expect(set(self.one.blamed) == blamed == {"columns.weight"}, "report", everyone)
        a, b = self.many.opt.stats(), self.one.opt.stats()
        for key in ("loss_scale", "steps", "skipped_steps", "steps_taken", "grad_norm", "clip_factor"):
            self.expect_close(a[key], b[key], 1e-5, "stats", key)

    def diagnosis(self) -> None:
        x = torch.ones(2, 256, dtype=torch.bfloat16)
        ours, theirs = (diagnose(run.net, lambda run=run: run.net(x), run.opt) for run in (self.many, self.one))
        self.expect(ours.kind == theirs.kind == "none", "diagnosis", ours, theirs)
        self.expect(ours.largest_scale == theirs.largest_scale, "largest scale", ours, theirs)

    def deltas(self) -> None:
        sampler = Net()
        for number, (theirs, part) in enumerate(zip(self.one.deltas, self.many.deltas, strict=True)):
            delta = part.gather()
            if delta is not None:
                self.expect(delta.names() == theirs.names(), "delta", number, delta.names(), theirs.names())
                delta.apply_(sampler)
        if self.rank == 0:
            for (name, p), q in zip(sampler.named_parameters(), self.one.net.parameters(), strict=True):
                self.expect(torch.equal(p, q), "weight by deltas", name)

    def bytes(self) -> None:
        options, memory = MODES[self.mode], self.many.memory
        here = sum(local(pair.model).numel() for pair in self.many.opt.params.all)  # what this rank steps
        everywhere = sum(local(p).numel() for p in self.many.net.parameters())
        if self.mode == "none":  # 16-bit weights are stepped, in 16 bits: no plan has them
            wanted = {"weights": 2 * everywhere, "moments": 4 * here, "gradients": 2 * (everywhere + here)}
        else:
            masters, state = options.get("master_weights", "full"), options.get("optimizer_state", "fp32")
            plan = Plan(params=here, masters=masters, state=state, fused_step=self.mode != "wrapped").memory_parts()
            sums = 4 * here if self.mode == "FP32 sums" else 0  # the last gradients are not folded yet
            wanted = {
                "weights": 2 * everywhere,
                "masters": plan["masters"],
                "moments": plan["optimizer state"],
                "gradients": 2 * everywhere + sums + plan["FP32 master gradients"],
            }
        self.expect(memory.parameters == everywhere, "elements", memory)
        few = 4 * 8 + 8 * 33  # numbers beside split masters, counters, and a small tensor whose moments stay FP32
        for name, value in wanted.items():
            self.expect(abs(getattr(memory, name) - value) <= 0.01 * value + few, "bytes", name, value, memory)


def cells(rank: int, size: int, layout: str, modes: list[str]) -> None:
    zero, wrong = layout == "zero", []
    for mode in modes:
        plain, net = Net(), Net()
        spread(net, layout, size)
        cell = Cell(Run(plain, mode), Run(net, mode, zero), mode, rank)
        for number in STEPS:
            cell.one.step(number)
            cell.many.step(number)
            cell.weights(number)
        cell.records()
        cell.report(size)
        cell.diagnosis()
        cell.deltas()
        cell.bytes()
        if not zero:
            cell.averages()
        wrong += [(mode, *what) for what in cell.wrong]
    assert not wrong, f"{layout}: " + "\n".join(map(str, wrong))
    if zero:
        message = raised(RuntimeError, lambda: AveragedMasters(net, cell.many.opt, ema(0.5)))
        assert "ZeroRedundancyOptimizer spreads them" in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mode_on(two: World, layout: str) -> None:
    taken = products.sample("table", LAYOUTS, list(MODES))  # test_modes.py has bits of more pairs
    two.run(cells, layout, [mode for mode in MODES if (layout, mode) in taken])


@on_ranks(2)
def test_certify_asks_no_other_rank(rank: int, size: int) -> None:
    with messages() as sent:
        assert certify(lambda params: AdamW(params, lr=1e-2)).ok
    assert not sent
