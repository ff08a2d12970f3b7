"""State on the host, and phases, on a card: bits and files of runs without, what is left there, shards over NCCL."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import card
import pytest
import torch
import torch.distributed as dist
from engine.checks import assert_same, normal, snapshot
from fused.test_registered_classes import PlainLion
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed
from fp16opt.kernels import host_memory

SHAPES = ((), (70,), (3, 0), (64, 80), (33, 65), (300, 500))
DTYPES = (torch.float16, torch.bfloat16, torch.float16, torch.bfloat16, torch.float32, torch.float16)
MAKERS: dict[str, Any] = {
    "AdamW": lambda p: AdamW(p, lr=0.02),
    "amsgrad": lambda p: Adam(p, lr=0.02, amsgrad=True),
    "momentum": lambda p: SGD(p, lr=0.02, momentum=0.9),
    "Lion": lambda p: PlainLion(p),
}
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "split": {"master_weights": "split"},
    "split24": {"master_weights": "split24"},
    "split24, 8 bits": {"master_weights": "split24", "optimizer_state": "8bit"},
    "sums": {"grad_accumulation": "fp32"},
}
PAIRS = [
    pytest.param(make, mode, id=f"{name}-{word}")
    for word, mode in MODES.items()
    for name, make in MAKERS.items()
    if "optimizer_state" not in mode or name in ("AdamW", "momentum")
]
LARGE = 1 << 22  # elements whose state is not hidden by what the allocator rounds
needs_card = [pytest.mark.card, pytest.mark.skipif(not card.IS_THERE, reason="there is no card")]


class Run:
    """A training whose gradients are the same bits on every device, with planned overflows."""

    def __init__(self, device: torch.device, make: Any = MAKERS["AdamW"], **settings: Any) -> None:
        pairs = zip(SHAPES, DTYPES, strict=True)
        self.params = [nn.Parameter(normal(shape, dtype, k).to(device)) for k, (shape, dtype) in enumerate(pairs)]
        self.targets = [normal(p.shape, torch.float32, 40 + k).to(device) for k, p in enumerate(self.params)]
        if "gradient_release" not in settings:
            settings["scaler"] = DynamicLossScaler(init_scale=2.0**8, growth_interval=3)
        self.opt = MixedPrecisionOptimizer(make(self.params), **settings)

    def train(self, steps: int = 5, overflows: tuple[int, ...] = (1, 3)) -> Run:
        for k in range(steps):
            self.opt.zero_grad()
            factor = float("inf") if k in overflows else 1.0 / (k + 1)
            loss = torch.zeros((), device=self.params[0].device)
            for param, target in zip(self.params, self.targets, strict=True):
                loss = loss + (param.float() * target).sum() * factor
            self.opt.backward(loss)
            if not self.opt.gradient_release:
                self.opt.clip_master_grads(0.5)
            self.opt.step()
        return self

    def all(self) -> Any:
        """All that a user can see of it."""
        return {"held": snapshot(self.opt, self.params), "saved": self.opt.state_dict()}

    def resumed(self, other: Run) -> Run:
        """From a file of the other run."""
        file = io.BytesIO()
        torch.save(other.opt.state_dict(), file)
        with torch.no_grad():
            for mine, theirs in zip(self.params, other.params, strict=True):
                mine.copy_(theirs)
        file.seek(0)
        self.opt.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        return self


@pytest.mark.parametrize(("make", "settings"), PAIRS)
def test_fifty_steps_have_the_bits_of_those_without(device: torch.device, make: Any, settings: dict[str, Any]) -> None:
    steps = 50 if card.IS_THERE else 6
    there = Run(device, make, offload="cpu", **settings).train(steps)
    here = Run(device, make, **settings).train(steps)
    assert there.opt.skipped_steps == here.opt.skipped_steps == 2
    assert_same(there.all(), here.all())
    there, here = (
        Run(device, make, **settings).resumed(there),
        Run(device, make, offload="cpu", **settings).resumed(here),
    )
    assert_same(there.train().all(), here.train().all())


def test_released_gradients_too(device: torch.device) -> None:
    settings = {"gradient_release": True, "loss_scale": 8.0, "master_weights": "split24", "optimizer_state": "8bit"}
    assert_same(Run(device, offload="cpu", **settings).train().all(), Run(device, **settings).train().all())


def test_the_bits_are_the_cpus(device: torch.device) -> None:
    there = Run(device, offload="cpu", master_weights="split").train()
    here = Run(torch.device("cpu"), master_weights="split", fused_step=True).train()
    assert_same(there.opt.state_dict()["masters"], here.opt.state_dict()["masters"])


def test_copies_are_apart(device: torch.device) -> None:
    run = Run(device, offload="cpu").train(2)
    other = copy.deepcopy(run).train(2)
    assert_same(run.train(2).all(), other.all())


def test_steps_on_a_stream_of_the_users(device: torch.device) -> None:
    stream = torch.cuda.Stream()
    run = Run(device, offload="cpu", master_weights="split24", optimizer_state="8bit")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run.train()
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(run.all(), Run(device, master_weights="split24", optimizer_state="8bit").train().all())


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_phases_bring_all_back(device: torch.device, settings: dict[str, Any]) -> None:
    run, wanted = Run(device, **settings).train(3), Run(device, **settings).train(3)
    for _ in range(2):
        run.opt.zero_grad()
        run.opt.offload()
        assert run.opt.memory().host > 0
        with pytest.raises(RuntimeError, match=r"Call opt\.onload\(\)"):
            run.opt.step()
        run.opt.onload()
        assert run.opt.memory().host == 0
    assert_same(run.train(3).all(), wanted.train(3).all())


class TestOnTheCard:
    """What a pretended card can't show: addresses, and the card's memory."""

    pytestmark = needs_card

    @staticmethod
    def wrapped(**settings: Any) -> tuple[nn.Parameter, MixedPrecisionOptimizer]:
        param = nn.Parameter(torch.zeros(1024, LARGE // 1024, dtype=torch.float16, device="cuda"))
        return param, MixedPrecisionOptimizer(AdamW([param]), loss_scale=8.0, **settings)

    @staticmethod
    def step(param: nn.Parameter, opt: MixedPrecisionOptimizer) -> None:
        opt.zero_grad()
        opt.backward(param.float().sum())
        opt.step()
        opt.zero_grad()

    @staticmethod
    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def test_the_card_writes_what_the_host_reads(self) -> None:
        room = host_memory.Room(torch.device("cuda", 0))
        there = room.like(torch.empty(3, 1000, dtype=torch.float32, device="meta").t())
        assert there.is_cuda
        assert there.stride() == (1, 1000)
        there.copy_(torch.arange(3000.0, device="cuda").view(1000, 3))
        here = host_memory.on_host(there)
        assert torch.equal(here, torch.arange(3000.0).view(1000, 3))
        here.mul_(2.0)
        assert torch.equal(there.cpu(), here)

    @pytest.mark.parametrize("masters", ["full", "split", "split24"])
    @pytest.mark.parametrize("bits", ["fp32", "8bit"])
    def test_what_is_left_on_the_card_while_it_trains_saves_and_loads(self, masters: Any, bits: Any) -> None:
        before = self.used()
        param, opt = self.wrapped(offload="cpu", master_weights=masters, optimizer_state=bits)
        self.step(param, opt)
        kept = (self.used() - before) / LARGE
        assert 2.0 <= kept < 2.2, "weights, scales and statistics"
        torch.cuda.reset_peak_memory_stats()
        saved = opt.state_dict()
        assert torch.cuda.max_memory_allocated() - before < 2.3 * LARGE
        assert all(master is None or master.device.type == "cpu" for master in saved["masters"])
        saved = copy.deepcopy(saved)
        torch.cuda.reset_peak_memory_stats()
        opt.load_state_dict(saved)
        assert torch.cuda.max_memory_allocated() - before < 6.5 * LARGE, "a master, one parameter at a time"
        self.step(param, opt)

    def test_nothing_of_the_engine_is_left_after_offload(self) -> None:
        before = self.used()
        param, opt = self.wrapped(master_weights="split", optimizer_state="8bit", track_changes=True)
        self.step(param, opt)
        opt.offload()
        assert self.used() - before == param.numel() * param.element_size()
        param.data = param.data.cpu()
        assert self.used() == before
        param.data = param.data.cuda()
        opt.onload()
        self.step(param, opt)

    def test_memory_goes_back(self) -> None:
        param, opt = self.wrapped(offload="cpu")
        self.step(param, opt)
        slabs = [line for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith("Rss")]
        held = sum(int(line.split()[1]) for line in slabs)
        del opt
        gc.collect()
        after = [line for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith("Rss")]
        assert held - sum(int(line.split()[1]) for line in after) > 0.9 * 12 * LARGE / 1024

    def test_a_step_within_a_captured_graph(self) -> None:
        param, opt = self.wrapped(offload="cpu", fused_step=True)
        other, plain = self.wrapped(fused_step=True)
        grads = torch.full_like(param, 0.5)
        for each, one in ((param, opt), (other, plain)):
            each.grad = grads.clone()
            one.scale_loss(torch.zeros((), device="cuda"))
            self.step(each, one)
        graphs = []
        for each, one in ((param, opt), (other, plain)):
            each.grad = grads.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                one.update_master_grads()
                one.step()
            graphs.append(graph)
        for graph in graphs * 3:
            graph.replay()
        assert torch.equal(param, other)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "cuda:nccl,cpu:gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).half()


def trained(model: nn.Module, opt: MixedPrecisionOptimizer) -> list[Tensor]:
    norms = []
    for step in range(6):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).half().cuda()
        opt.zero_grad()
        opt.backward(model(x).float().square().mean() * (float("inf") if step == 2 else 1.0))
        norms.append(opt.clip_master_grads(0.01).cpu())
        opt.step()
    return norms


@pytest.mark.card
@pytest.mark.skipif(not card.IS_THERE, reason="there is no card")
@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_fsdp2_over_nccl(one_rank: None, tmp_path: Path, settings: dict[str, Any]) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    runs = []
    for offload in (None, "cpu"):
        model = layers().cuda()
        fsdp.fully_shard(model, mesh=dist.init_device_mesh("cuda", (1,)))
        opt = MixedPrecisionOptimizer(AdamW(model.parameters()), dynamic=True, offload=offload, **settings)
        norms = trained(model, opt)
        distributed.save(tmp_path / f"saved {offload}", model, opt)
        again = layers().cuda()
        fsdp.fully_shard(again, mesh=dist.init_device_mesh("cuda", (1,)))
        other = MixedPrecisionOptimizer(AdamW(again.parameters()), dynamic=True, offload="cpu", **settings)
        distributed.load(tmp_path / f"saved {offload}", again, other)
        norms += trained(again, other)
        opt.offload()
        opt.onload()
        norms += trained(model, opt)
        runs.append([*norms, *(p.full_tensor().cpu() for m in (model, again) for p in m.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.card
@pytest.mark.skipif(not card.IS_THERE, reason="there is no card")
def test_our_clip_beside_cpu_offload_policy_with_pinned_memory(one_rank: None) -> None:
    """The CPU steps there, as FSDP2 has it; the clip's one message goes by the card."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    runs = []
    for policy in (None, fsdp.CPUOffloadPolicy(pin_memory=True)):
        model = layers().cuda()
        mesh = dist.init_device_mesh("cuda", (1,))
        fsdp.fully_shard(model, mesh=mesh, **({} if policy is None else {"offload_policy": policy}))
        opt = MixedPrecisionOptimizer(AdamW(model.parameters()), dynamic=True, fused_step=True)
        norms = trained(model, opt)
        runs.append([*norms, *(p.to_local().cpu() for p in model.parameters())])
        if policy is not None:
            with pytest.raises(RuntimeError, match=r"^cpu is no card with memory of its own"):
                MixedPrecisionOptimizer(AdamW(model.parameters()), offload="cpu")
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
