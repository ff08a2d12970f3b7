"""What does the wrapper cost on several ranks, and do messages and memory follow the plan?

    python benchmarks/distributed.py            # about two minutes on two quiet cores; 5 GB of memory
    python benchmarks/distributed.py --quick    # checks only

Processes on this machine, gloo between them, one thread each. Timed is a step with a clip that scales, under DDP on two
ranks and on one, 34 million parameters (--width): FP16 weights with the wrapper around torch's fused AdamW against FP32
weights with torch.amp.GradScaler, clip_grad_norm_ and the same AdamW. The wrapper three times: after
``backward(loss, update_master_grads=False)``, so that unscaling and clipping are one write; after a plain
``backward(loss)``, whose own unscaling is then timed with it; and with ``fused_step=True``. All are checked first:
ranks agree bit for bit, and the wrapper's masters are those of plain FP32 AdamW on the same gradients. Then bytes and
messages of one step are counted at 1, 2 and 4 ranks and held against ``fp16opt.plan``.
"""

from __future__ import annotations

import common  # first: it sets OpenMP's settings

# isort: split
import argparse
import multiprocessing
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed, parallel
from fp16opt.distributed.replicas import verify
from fp16opt.tools.plan import Plan

LAYERS = 8
MAX_NORM = 1e-3
SCALE = 2.0**10  # no step may overflow: a skipped one is no step
CPU = [torch.profiler.ProfilerActivity.CPU]


def make_net(width: int, dtype: torch.dtype) -> nn.Sequential:
    """Square matrices without bias, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))).to(dtype)


def make_optimizer(model: nn.Module) -> Any:
    """torch's fused AdamW."""
    return AdamW(model.parameters(), lr=1e-3, fused=True)


class Route:
    """One way to train under DDP; ``run`` is what comes after backward."""

    def __init__(self, name: str, width: int, dtype: torch.dtype) -> None:
        self.name = name
        self.width = width
        self.model = DistributedDataParallel(make_net(width, dtype), gradient_as_bucket_view=True)
        self.steps = 0

    def loss(self) -> Tensor:
        self.steps += 1
        generator = torch.Generator().manual_seed(2 * self.steps + dist.get_rank())
        x = torch.randn(1, self.width, generator=generator)
        return self.model(x.to(next(self.model.parameters()).dtype)).float().square().mean()

    def prepare(self) -> None:
        self.zero_grad()
        self.backward()
        dist.barrier()


class Ours(Route):
    """FP16 weights, the wrapper.

    With ``early`` what a plain ``backward(loss)`` does after autograd is timed too; ``fused`` is ``fused_step=True``.
    """

    def __init__(self, width: int, early: bool = False, fused: bool = False) -> None:
        how = ", unscaled by backward" if early else ", fused_step=True" if fused else ""
        super().__init__(f"fp16opt, FP16 weights{how}", width, torch.float16)
        self.early = early
        scaler = DynamicLossScaler(init_scale=SCALE)
        self.opt = MixedPrecisionOptimizer(make_optimizer(self.model), scaler=scaler, fused_step=fused)
        distributed.attach(self.opt, self.model)

    def zero_grad(self) -> None:
        self.opt.zero_grad()

    def backward(self) -> None:
        self.opt.backward(self.loss(), update_master_grads=False)

    def run(self) -> None:
        if self.early:
            self.opt.update_master_grads()
        self.opt.clip_master_grads(MAX_NORM)
        self.opt.step()


class Attach:
    """``attach``, once a training."""

    name = "attach"

    def __init__(self, route: Ours) -> None:
        self.route = route

    def prepare(self) -> None:
        dist.barrier()

    def run(self) -> None:
        distributed.attach(self.route.opt, self.route.model)


class Verify(Attach):
    """What ``verify_ranks_every`` adds to the steps after which ranks are compared."""

    name = "verify"

    def run(self) -> None:
        verify(self.route.model.process_group, parallel.digest(self.route.opt))


class Theirs(Route):
    """FP32 weights, torch.amp.GradScaler."""

    def __init__(self, width: int) -> None:
        super().__init__("GradScaler, FP32 weights", width, torch.float32)
        self.opt = make_optimizer(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def zero_grad(self) -> None:
        self.opt.zero_grad()

    def backward(self) -> None:
        self.scaler.scale(self.loss()).backward()

    def run(self) -> None:
        self.scaler.unscale_(self.opt)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.scaler.step(self.opt)
        self.scaler.update()


def clip_exactly(params: list[nn.Parameter]) -> None:
    """What clip_grad_norm_ does, with a norm in float64: torch's own FP32 sum of millions of squares is 1e-4 off."""
    squares = [p.grad.double().square().sum() for p in params]
    factor = (1.0 / (torch.stack(squares).sum().sqrt().float() + 1e-6) * MAX_NORM).clamp(max=1.0)
    for p in params:
        p.grad.mul_(factor)


def check(route: Ours) -> None:
    """Three steps: masters are those of plain FP32 AdamW with clip_grad_norm_, and alike on all ranks."""
    masters = list(route.opt.master_params())
    plain = [nn.Parameter(m.detach().clone()) for m in masters]
    reference = AdamW(plain, lr=1e-3, fused=True)
    for _ in range(3):
        route.prepare()
        scale = route.opt.loss_scale
        for p, q in zip(plain, route.model.parameters(), strict=True):
            p.grad = q.grad.float() / scale
        route.run()
        clip_exactly(plain)
        reference.step()
    # The factors differ by an ulp at most (6e-8), and so three steps of at most 1e-3 by far less than 3e-8.
    for ours, theirs in zip(masters, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=3e-8)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [m.detach().double().sum().item() for m in masters])
    if any(other != everyone[0] for other in everyone):
        raise AssertionError("ranks differ")


def timed(arguments: argparse.Namespace) -> list[common.Timing]:
    """Under DDP: ours, early and fused, theirs, attaching and comparing, in turns."""
    width = 64 if arguments.quick else arguments.width
    ours = [Ours(width), Ours(width, early=True), Ours(width, fused=True)]
    theirs = Theirs(width)
    for route in ours:
        check(route)
    for route in (*ours, theirs):
        for group in route.opt.param_groups:
            group["lr"] = 1e-7  # dozens of steps without a target would diverge, and overflow
    contenders = [*ours, theirs, Attach(ours[0]), Verify(ours[0])]
    timings = common.alternate(contenders, 2 if arguments.quick else arguments.rounds, warmup=3)
    if any(route.opt.skipped_steps for route in ours) or theirs.scaler.get_scale() != SCALE:
        raise AssertionError("a step was skipped")
    return [timings[contender.name] for contender in contenders]


def rows_of(ranks: int, timings: list[common.Timing], bound: float | None) -> list[common.Row]:
    """The bound of the project's plan, and the rest for information."""
    ours, early, fused, theirs, attach, verified = timings
    where, row = f"{ranks} rank{'s' if ranks > 1 else ''}, DDP: ", common.ratio_row
    return [
        row(f"{where}clip and step / GradScaler", bound, ours, theirs),
        row(f"{where}unscaled by backward / GradScaler", None, early, theirs),
        row(f"{where}fused_step=True / GradScaler", None, fused, theirs),
        row(f"{where}attach, once / clip and step", None, attach, ours),
        row(f"{where}comparing ranks / clip and step", None, verified, ours),
    ]


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=2048, help="of the 8 square layers (default: %(default)s)")


def counted(shard: str) -> dict[str, dict[str, float]]:
    """Bytes held, bytes in collectives and messages of one step, counted; beside what the plan says."""
    width = 96
    net = make_net(width, torch.float16)
    ranks = dist.get_world_size()
    if shard == "fsdp2":
        for layer in net:
            fully_shard(layer, reshard_after_forward=True)
    model: nn.Module = DistributedDataParallel(net) if shard in ("ddp", "zero") else net
    params = list(net.parameters())
    optimizer: Any = ZeroRedundancyOptimizer(params, AdamW, lr=1e-3) if shard == "zero" else AdamW(params, lr=1e-3)
    opt = MixedPrecisionOptimizer(optimizer, loss_scale=8.0, fused_step=False)  # whose gradients are FP32
    if shard != "none":
        distributed.attach(opt, model)

    def step() -> None:
        opt.zero_grad()
        opt.backward(model(torch.ones(1, width).half()).float().square().mean())
        opt.clip_master_grads(MAX_NORM)
        opt.step()

    for _ in range(3):
        step()
    with torch.profiler.profile(activities=CPU, record_shapes=True) as profile:
        step()
    held = [*params, *(p.grad for p in params), *opt.master_params(), *(m.grad for m in opt.master_params())]
    held += [value for entry in opt.state.values() for key, value in entry.items() if key != "step"]
    memory = float(sum(getattr(t, "_local_tensor", t).nbytes for t in {id(t): t for t in held}.values()))
    plan = Plan(params=LAYERS * width * width, ranks=ranks, shard=shard, layers=LAYERS, fused_step=False)
    parts = plan.memory_parts()
    kept = {k: v for k, v in parts.items() if "buckets" not in k and "gathered" not in k}
    payload, messages = sent(profile)
    return {
        "bytes held a rank": {"counted": memory, "plan": sum(kept.values())},
        "bytes in collectives": {"counted": payload, "plan": sum(plan.payload().values())},
        "messages": {"counted": messages, "plan": float(sum(plan.messages().values()))},
    }


OWN = 4
"""Numbers in the optimizer's one message."""


def sent(profile: Any) -> tuple[float, float]:
    """(bytes of 16-bit tensors in collectives; how many collectives) of one step, the 32 bytes among the latter."""
    elements = 0
    messages = 0
    for event in profile.events():
        shapes = event.input_shapes
        if event.name.startswith("c10d::"):
            messages += 1
        if event.name == "c10d::_allgather_base_":
            elements += torch.Size(shapes[0]).numel()
        elif event.name in ("gloo:all_reduce", "gloo:broadcast"):  # gloo scatters what an all-reduce gave
            count = torch.Size(shapes[0]).numel()
            messages += count <= OWN  # by connections of its own, beside those of c10d
            elements += count if count > OWN else 0
    return 2.0 * elements, float(messages)


def work(rank: int, ranks: int, store: str, arguments: argparse.Namespace, pipe: Any) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    timings = timed(arguments) if ranks < 4 else []
    counts = {shard: counted(shard) for shard in (("none",) if ranks == 1 else ("ddp", "zero", "fsdp2"))}
    if rank == 0:
        pipe.send((timings, counts))
    dist.destroy_process_group()


def run(ranks: int, arguments: argparse.Namespace) -> Any:
    """What rank 0 of a group of ``ranks`` processes found."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, f"{folder}/store", arguments, there)
        processes = [context.Process(target=work, args=(rank, *args), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        there.close()
        try:
            if not here.poll(300):
                raise RuntimeError(f"{ranks} ranks: no answer in 300 s")
            return here.recv()
        finally:
            for process in processes:
                process.join(30)
                process.kill()


def print_counts(counts: dict[int, Any]) -> list[str]:
    """The table, and what differs from the plan."""
    wrong = []
    print(f"\n{'ranks':>5}  {'shard':<6}  {'what':<22}  {'counted':>10}  {'plan':>10}")
    for ranks, by_shard in counts.items():
        for shard, figures in by_shard.items():
            for what, pair in figures.items():
                print(f"{ranks:>5}  {shard:<6}  {what:<22}  {pair['counted']:>10.0f}  {pair['plan']:>10.0f}")
                by_tensor = shard == "zero" and what == "messages"  # ZeRO broadcasts tensor by tensor
                if not by_tensor and pair["counted"] != pair["plan"]:
                    wrong.append(f"{ranks} ranks, {shard}: {what}")
    return wrong


def main() -> None:
    """Check, time, count, compare."""
    arguments = common.parse_arguments(__doc__ or "", more_options)
    found = {ranks: run(ranks, arguments) for ranks in (1, 2, 4)}
    wrong = print_counts({ranks: counts for ranks, (_, counts) in found.items()})
    bound = None if arguments.quick else 1.0
    rows = [*rows_of(2, found[2][0], bound), *rows_of(1, found[1][0], None)]
    common.print_rows(rows)
    common.print_versions()
    counts = {str(ranks): counts for ranks, (_, counts) in found.items()}
    common.write_json(arguments.json, rows=rows, timings=found[2][0], counts=counts)
    if wrong:
        raise SystemExit(f"not as planned: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
