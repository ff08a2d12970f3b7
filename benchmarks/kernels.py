"""How fast are the multi-tensor kernels, each against the torch calls that do the same, and against the memory itself?

    python benchmarks/kernels.py [--quick] [--json PATH] [--rounds N] [--threads N]

Some 150 tensors shaped like a small GPT's, 50 million elements. Every operation is first checked, bit for bit, against
the numpy oracle of the tests. Contenders take turns in one run; ratios are taken within a round.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import common  # first: it quiets the worker threads before torch is loaded
import torch
from torch import Tensor

from fp16opt import kernels
from fp16opt.kernels import native

sys.path.insert(0, str(common.ROOT / "tests" / "kernels"))
import oracle_kernels as oracle

BYTES = {  # read and written per parameter, counted
    "unscale": 2 + 4,
    "unscale, bfloat16": 2 + 4,
    "unscale, accumulating": 2 + 4 + 4,
    "look without writing": 2,
    "unscale and clip": 2 + 4,
    "unscale, three torch calls": 2 + 4 + 4 + 4 + 4,
    "cast": 4 + 2,
    "_foreach_copy_": 4 + 2,
    "norm": 4,
    "scale by 0.5": 4 + 4,
    "copy of the bytes of unscale": 6,
    "torch copy of the bytes of unscale": 6,
}


@dataclass
class Job:
    """A contender: a name and what it does."""

    name: str
    work: Callable[[], object]

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.work()


def gpt_shapes(quick: bool) -> list[tuple[int, ...]]:
    """148 tensors with 50.8 million elements, or a small version of them."""
    layers, width, words = (12, 512, 25000) if not quick else (2, 64, 500)
    shapes: list[tuple[int, ...]] = [(words, width), (1024, width), (width,), (width,)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return shapes


class Lists:
    """The tensors of all contenders, and their caches."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        generator = torch.Generator().manual_seed(0)
        wide = [torch.randn(shape, generator=generator) for shape in shapes]
        self.halves = [t.half() for t in wide]
        self.bfloats = [t.bfloat16() for t in wide]
        self.masters = wide
        self.params = [torch.zeros_like(t) for t in self.halves]
        self.outs = [torch.zeros_like(t) for t in wide]
        self.inv_scale = torch.tensor(2.0**-10)
        self.stats = kernels.GradStats.allocate(len(wide), "cpu")
        self.cast_stats = kernels.CastStats.allocate(len(wide), "cpu")
        self.samples = torch.zeros(len(wide), dtype=torch.int64)
        self.found_inf = torch.zeros(())
        self.elements = sum(t.numel() for t in wide)
        self.caches: dict[str, kernels.CallCache] = {}

    def _cache(self, name: str) -> kernels.CallCache:
        return self.caches.setdefault(name, kernels.CallCache())

    def unscale(self, grads: list[Tensor], name: str, **options: Any) -> None:
        cache = self._cache(name)
        kernels.multi_tensor_unscale(grads, self.outs, self.inv_scale, self.stats, cache=cache, **options)

    def unscale_clipped(self) -> None:
        factor, cache = torch.tensor(0.5), self._cache("half")
        kernels.multi_tensor_unscale_clipped(self.halves, self.outs, self.inv_scale, factor, cache=cache)

    def unscale_torch(self) -> None:
        torch._foreach_copy_(self.outs, self.halves)
        torch._amp_foreach_non_finite_check_and_unscale_(self.outs, self.found_inf, self.inv_scale)
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.outs)))

    def cast(self) -> None:
        kernels.multi_tensor_cast(self.masters, self.params, self.cast_stats, cache=self._cache("cast"))

    def sample(self) -> None:
        kernels.multi_tensor_sample(self.params, self.samples, cache=self._cache("sample"))

    def scale(self, factor: float) -> None:
        kernels.multi_tensor_scale(self.outs, torch.tensor(factor), cache=self._cache("scale"))


class PlainCopy:
    """memmove of as many bytes, read and written together, as a pass moves; one stretch for each thread."""

    def __init__(self, moved: int, threads: int) -> None:
        self.source = torch.ones(moved // 2, dtype=torch.uint8)
        self.target = torch.zeros_like(self.source)
        self.threads = ThreadPoolExecutor(threads)
        size = self.source.numel() // threads // 4096 * 4096
        starts = [i * size for i in range(threads)]
        self.parts = [(s, size if i + 1 < threads else self.source.numel() - s) for i, s in enumerate(starts)]

    def _move(self, part: tuple[int, int]) -> None:
        start, size = part
        ctypes.memmove(self.target.data_ptr() + start, self.source.data_ptr() + start, size)

    def by_memmove(self) -> None:
        list(self.threads.map(self._move, self.parts))

    def by_torch(self) -> None:
        self.target.copy_(self.source)


def check(lists: Lists) -> None:
    """Every kernel against the oracle, on all elements. Exits where a bit differs."""
    lists.unscale(lists.halves, "check")
    inv = lists.inv_scale.numpy()[()]
    sums = []
    for i, (grad, out) in enumerate(zip(lists.halves, lists.outs, strict=True)):
        wanted = oracle.unscale(grad.view(torch.int16).numpy().view("u2").reshape(-1), "half", inv)
        if not (wanted.out == out.numpy().reshape(-1)).all() or wanted.sumsq != lists.stats.sumsq[i].item():
            sys.exit(f"unscale is wrong in tensor {i}")
        sums.append(wanted.sumsq)
    if lists.stats.norm.item() != oracle.norm(sums) or lists.stats.found_inf.item() != 0.0:
        sys.exit("the norm or found_inf is wrong")
    written = [out.clone() for out in lists.outs]
    lists.unscale_clipped()
    if any(not torch.equal(out, 0.5 * before) for out, before in zip(lists.outs, written, strict=True)):
        sys.exit("unscaled and clipped is not half of unscaled")
    lists.cast()
    lists.sample()
    for i, (master, param) in enumerate(zip(lists.masters, lists.params, strict=True)):
        wanted_cast = oracle.cast(master.numpy().reshape(-1), "half")
        bits = param.view(torch.int16).numpy().view("u2").reshape(-1)
        found = (lists.cast_stats.overflow[i].item(), lists.samples[i].item())
        if not (wanted_cast.out == bits).all() or found != (wanted_cast.overflow, oracle.sample(bits)):
            sys.exit(f"cast or sample is wrong in tensor {i}")
    print(f"checked: {len(lists.masters)} tensors, {lists.elements / 1e6:.1f} million elements, equal to the oracle")


def contenders(lists: Lists, copy: PlainCopy) -> list[common.Contender]:
    norm_cache = kernels.CallCache()
    return [
        Job("unscale", lambda: lists.unscale(lists.halves, "half")),
        Job("look without writing", lambda: lists.unscale(lists.halves, "half", write=False)),
        Job("unscale and clip", lists.unscale_clipped),
        Job("unscale, three torch calls", lists.unscale_torch),
        Job("copy of the bytes of unscale", copy.by_memmove),
        Job("torch copy of the bytes of unscale", copy.by_torch),
        Job("unscale, bfloat16", lambda: lists.unscale(lists.bfloats, "bfloat")),
        Job("unscale, accumulating", lambda: lists.unscale(lists.halves, "add", accumulate=True)),
        Job("cast", lists.cast),
        Job("_foreach_copy_", lambda: torch._foreach_copy_(lists.params, lists.masters)),
        Job("norm", lambda: kernels.multi_tensor_l2norm(lists.outs, cache=norm_cache)),
        Job("sample", lists.sample),
        Job("scale by 0.5", lambda: lists.scale(0.5)),
        Job("scale by 1", lambda: lists.scale(1.0)),
    ]


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "")
    if not native.available():
        sys.exit(f"there are no compiled kernels to measure: _cpu is {native.status()}")
    lists = Lists(gpt_shapes(arguments.quick))
    common.print_versions()
    print(f"SIMD level {native.simd_level()}")
    check(lists)
    moved = 6 * lists.elements
    copy = PlainCopy(moved, arguments.threads)
    rounds = 2 if arguments.quick else arguments.rounds
    timings = common.alternate(contenders(lists, copy), rounds)
    unscale = timings["unscale"]
    by_memmove, by_torch = timings["copy of the bytes of unscale"], timings["torch copy of the bytes of unscale"]
    best_copy = min((by_memmove, by_torch), key=lambda timing: timing.median)
    rows = [
        common.ratio_row(
            "unscale + check + norm / three torch calls", 0.40, unscale, timings["unscale, three torch calls"]
        ),
        common.ratio_row(f"{best_copy.name} / unscale + check + norm", 0.90, best_copy, unscale),
        common.ratio_row("masters to FP16 / _foreach_copy_", 0.95, timings["cast"], timings["_foreach_copy_"]),
        common.ratio_row("clip with nothing to clip / clip", 0.05, timings["scale by 1"], timings["scale by 0.5"]),
        common.ratio_row("sample / look without writing", None, timings["sample"], timings["look without writing"]),
    ]
    rows[1].at_least = True
    if arguments.quick:
        for row in rows:
            row.bound = None
    common.print_timings(list(timings.values()), lists.elements, BYTES, moved / best_copy.median)
    common.print_rows(rows)
    common.write_json(
        arguments.json,
        timings=list(timings.values()),
        rows=rows,
        elements=lists.elements,
        simd_level=native.simd_level(),
    )


if __name__ == "__main__":
    main()
