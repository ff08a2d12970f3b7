"""What do a clip and a step cost on shards, and what does a rank keep, against what people use there?

    python benchmarks/shards.py            # about three minutes on two quiet cores; 4 GB of memory
    python benchmarks/shards.py --quick    # small sizes, checks only

Two processes, gloo between them, one thread each, FSDP2 (``fully_shard`` of each layer). Timed is what comes between
``backward`` and ``zero_grad``, clip included, on 30 million parameters and on 1,000 tensors of 64 elements a rank:
BF16 weights with fp16opt in its modes against FP32 weights with ``MixedPrecisionPolicy(param_dtype=bfloat16)``,
``clip_grad_norm_`` and torch's fused AdamW, and its default one. Gradients are put in place by hand, as autograd leaves
them under FSDP2. Bytes are those of tensors that are kept between ``backward`` and ``step``, over the ranks, a
parameter.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # a rank each has one core

import common  # first: it sets OpenMP's settings

# isort: split
import argparse
import multiprocessing
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from fp16opt import MixedPrecisionOptimizer

MAX_NORM = 1.0
LR = 1e-4
WARMUP = 3
MODES: dict[str, dict[str, Any]] = {
    "general step": {"fused_step": False},
    "one pass": {"fused_step": True},
    "split": {"master_weights": "split"},
    "split24": {"master_weights": "split24"},
    "split + 8-bit": {"master_weights": "split", "optimizer_state": "8bit"},
    "split24 + 8-bit": {"master_weights": "split24", "optimizer_state": "8bit"},
}
BYTES = {"one pass": 16.0, "split": 14.0, "split24": 13.0, "split + 8-bit": 8.1, "split24 + 8-bit": 7.1}
"""At most, a parameter, over the ranks: weights, gradients, masters, moments."""


class Net(nn.Module):
    """Matrices that are parameters of one layer each."""

    def __init__(self, shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(b, a, bias=False) for a, b in shapes)
        self.to(torch.bfloat16).to(dtype)  # the same numbers for all


def sharded(shapes: list[tuple[int, int]], dtype: torch.dtype, **options: Any) -> Net:
    net = Net(shapes, dtype)
    if len(shapes) < 100:
        for layer in net.layers:
            fully_shard(layer, **options)
    return fully_shard(net, **options)  # type: ignore[return-value]


class Route:
    """One way to train; ``run`` is what comes between backward and zero_grad."""

    def __init__(self, name: str, shapes: list[tuple[int, int]], dtype: torch.dtype, **options: Any) -> None:
        self.name = name
        self.net = sharded(shapes, dtype, **options)
        self.params = list(self.net.parameters())
        generator = torch.Generator().manual_seed(dist.get_rank())
        drawn = [torch.randn(p._local_tensor.shape, generator=generator) * 1e-2 for p in self.params]
        self.ready = [values.bfloat16().to(dtype) for values in drawn]  # the same numbers for all

    def give_grads(self) -> None:
        for p, ready in zip(self.params, self.ready, strict=True):
            p.grad = DTensor.from_local(
                ready.clone(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )

    def prepare(self) -> None:
        self.zero_grad()
        self.give_grads()
        dist.barrier()


class Ours(Route):
    """BF16 weights under the wrapper."""

    def __init__(self, mode: str, shapes: list[tuple[int, int]]) -> None:
        super().__init__(mode, shapes, torch.bfloat16)
        inner = AdamW(self.params, lr=LR, fused=True)
        self.opt = MixedPrecisionOptimizer(inner, **MODES[mode])

    def zero_grad(self) -> None:
        self.opt.zero_grad()

    def run(self) -> None:
        self.norm = self.opt.clip_master_grads(MAX_NORM)
        self.opt.step()

    def masters(self) -> list[Tensor]:
        return [master.detach()._local_tensor for master in self.opt.master_params()]

    def kept(self) -> float:
        """Bytes on this rank, a parameter of its part."""
        memory = self.opt.memory()
        count = sum(p._local_tensor.numel() for p in self.params)
        return (memory.weights + memory.gradients + memory.masters + memory.moments) / count


class Theirs(Route):
    """FP32 weights that are gathered in BF16."""

    def __init__(self, shapes: list[tuple[int, int]], fused: bool) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        name = f"FP32, MixedPrecisionPolicy, {'fused' if fused else 'default'} AdamW"
        super().__init__(name, shapes, torch.float32, mp_policy=policy)
        self.opt = AdamW(self.params, lr=LR, fused=fused)

    def zero_grad(self) -> None:
        self.opt.zero_grad()

    def run(self) -> None:
        self.norm = torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.opt.step()

    def masters(self) -> list[Tensor]:
        return [p.detach()._local_tensor for p in self.params]

    def kept(self) -> float:
        """Bytes on this rank, a parameter of its part."""
        state = [value for entry in self.opt.state.values() for key, value in entry.items() if key != "step"]
        pieces = [value._local_tensor for value in (*self.params, *(p.grad for p in self.params), *state)]
        return sum(piece.nbytes for piece in pieces) / sum(p._local_tensor.numel() for p in self.params)


EXACT = ("general step", "one pass", "split")
"""Modes whose masters are FP32."""


def check(routes: list[Any], steps: int) -> None:
    """All were given the same weights and gradients: norms, and masters in FP32, are those of the first."""
    wanted = routes[0]
    for route in routes:
        norm, other = (float(getattr(r.norm, "full_tensor", lambda r=r: r.norm)()) for r in (route, wanted))
        # torch adds squares up in float32, ours in float64.
        if not abs(norm - other) < 1e-3 * other:
            raise AssertionError(f"{route.name}: norm {norm}, wanted {other}")
        for mine, theirs in zip(route.masters(), wanted.masters(), strict=True) if route.name in EXACT else ():
            # A step moves at most lr, and the factors of the clip differ as much as the norms do.
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=steps * LR * 1e-3)


def timed(arguments: argparse.Namespace, shapes: list[tuple[int, int]], rounds: int) -> dict[str, Any]:
    """Timings by name, bytes by name."""
    modes = arguments.modes.split(",") if arguments.modes else list(MODES)
    routes: list[Any] = [Theirs(shapes, True), Theirs(shapes, False), *(Ours(mode, shapes) for mode in modes)]
    timings = common.alternate(routes, rounds, warmup=WARMUP)
    check(routes, rounds + WARMUP)
    for route in routes:
        route.prepare()
    return {"timings": timings, "bytes": {route.name: route.kept() for route in routes}}


def work(rank: int, store: str, arguments: argparse.Namespace, pipe: Any) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    large = [(256, 128)] * 2 if arguments.quick else [(1936, 1936)] * 8
    small = [(2, 64)] * (10 if arguments.quick else 1000)
    rounds = 2 if arguments.quick else arguments.rounds
    found = {"30 M": timed(arguments, large, rounds), "1,000 x 64": timed(arguments, small, rounds)}
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


def rows_of(found: dict[str, Any], quick: bool) -> list[common.Row]:
    """Ratios against FP32 with fused AdamW, and bytes."""
    bounds = {("30 M", "one pass"): 0.80, ("30 M", "split + 8-bit"): 0.90, ("1,000 x 64", "one pass"): 0.50}
    rows = []
    for shape, figures in found.items():
        timings = dict(figures["timings"])
        theirs = timings.pop("FP32, MixedPrecisionPolicy, fused AdamW")
        for name, timing in timings.items():
            bound = None if quick else bounds.get((shape, name))
            rows.append(common.ratio_row(f"{shape}: {name} / FP32, policy, fused AdamW", bound, timing, theirs))
    for name, value in found["30 M"]["bytes"].items():
        bound = None if quick else BYTES.get(name)
        value = round(value, 2)  # counters of 4 bytes a tensor aside
        rows.append(common.Row(f"bytes a parameter, over the ranks: {name}", bound, value, value, value))
    return rows


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", help="some of the modes, with commas between them")


def main() -> None:
    """Time, count, compare."""
    arguments = common.parse_arguments(__doc__ or "", more_options, threads=1)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        given = (f"{folder}/store", arguments, there)
        processes = [context.Process(target=work, args=(rank, *given), daemon=True) for rank in range(2)]
        for process in processes:
            process.start()
        there.close()
        found = here.recv()
        for process in processes:
            process.join(60)
    rows = rows_of(found, arguments.quick)
    common.print_rows(rows)
    common.print_versions()
    timings = [timing for figures in found.values() for timing in figures["timings"].values()]
    common.write_json(arguments.json, rows=rows, timings=timings)


if __name__ == "__main__":
    main()
