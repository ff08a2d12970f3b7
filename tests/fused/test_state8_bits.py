"""multi_tensor_adam8 and multi_tensor_sgd8 against numpy, bit for bit, on every backend."""

from __future__ import annotations

import functools
from typing import Any

import emulated
import numpy as np
import pretended
import pytest
import torch
from torch import Tensor

from fp16opt.kernels import WHOLE, CallCache, CastStats, multi_tensor_join, multi_tensor_split, state8
from fp16opt.kernels.operations import AdamOptions, Factors, SgdOptions
from fp16opt.kernels.state8 import multi_tensor_adam8, multi_tensor_sgd8
from fused import oracle_state8 as oracle
from fused.conftest import LEVELS
from fused.test_fused_bits import ADAM, SGD, spread

SIZES = (0, 1, 127, 129, 192, 1000, 65536 + 130, 140000)  # the last for threads
ADAM_CASES: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1},
    "l2": {"decoupled": False, "weight_decay": 0.1, "maximize": True},
    "limit 2": {"betas": (0.9, 0.95)},
    "limit 32": {"betas": (0.0, 0.999), "eps": 0.0},
    "saturates": {"betas": (0.9, 0.5)},
}
SGD_CASES: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01, "maximize": True},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}
KINDS = {"half": torch.float16, "bfloat16": torch.bfloat16, "half split": torch.float16, "own": None}
INV_SCALE, CLIP = 2.0**-9, 0.3721
GIVEN = Factors(torch.tensor(INV_SCALE), torch.tensor(CLIP))


FEW = ["reference", "emulated", *[f"{level}-{n}" for level, n in zip(LEVELS, (2, 3, 1), strict=False)]]
few = pytest.mark.parametrize("implementation", FEW, indirect=True)
"""Each SIMD level once, each with another number of threads; :func:`test_threads` has all of them."""


@functools.cache
def drawn() -> tuple[list[oracle.Array], list[list[oracle.Array]]]:
    """Parameters, and gradients of four steps, of any size, also such as leave v at zero; one block at rest. Drawn
    once, written by nobody."""
    rng = np.random.default_rng(0)
    masters = [spread(rng, n, -4, 2) for n in SIZES]
    grads = [[spread(rng, n, low, 3) for n in SIZES] for low in (-3, -26, -3, -3)]
    for values in (*masters, *(values for step in grads for values in step)):
        values.flags.writeable = False
    return masters, grads


class Problem:
    """Parameters for the oracle, and the same as lists of tensors."""

    def __init__(self, kind: str, state: type) -> None:
        self.dtype = KINDS[kind]
        masters = [torch.from_numpy(values.copy()) for values in drawn()[0]]
        self.stats = CastStats.allocate(len(SIZES), "cpu")
        self.models = None if self.dtype is None else [torch.zeros(n, dtype=self.dtype) for n in SIZES]
        self.masters = masters
        if "split" in kind:
            assert self.models is not None
            self.masters = [torch.zeros(n, dtype=torch.int16) for n in SIZES]
            multi_tensor_split(masters, self.models, self.masters, self.stats)
        self.elements = [oracle.Element(p, state.zeros(p.size)) for p in map(np.copy, self.values())]
        self.scales = [torch.zeros(WHOLE.block_count(n)) for n in SIZES]
        self.first = [torch.zeros(n, dtype=torch.int8) for n in SIZES]
        self.second = [torch.zeros(n, dtype=torch.uint8) for n in SIZES]

    def values(self) -> list[oracle.Array]:
        if self.masters[0].dtype == torch.float32:
            return [master.numpy() for master in self.masters]
        outs = [torch.zeros(n) for n in SIZES]
        assert self.models is not None
        multi_tensor_join(self.models, self.masters, outs)
        return [out.numpy() for out in outs]

    def grads(self, step: int) -> list[Tensor]:
        """Those of the first step may be beyond the range of v."""
        dtype = self.dtype if self.dtype is not None and step != 1 else torch.float32
        made = [values.copy() for values in drawn()[1][min(step, 4) - 1]]
        for values in made:
            values[128:256] = 0.0
            if self.dtype != torch.float16 and step == 1:
                values[300:310] = 1e30
        return [torch.from_numpy(values).to(dtype) for values in made]

    def check(self, got: list[Tensor] | list[oracle.Array], want: list[oracle.Array], what: str) -> None:
        for n, tensor, b in zip(SIZES, got, want, strict=True):
            a = tensor.numpy() if isinstance(tensor, Tensor) else tensor
            kind = {1: np.int8, 4: np.int32}[a.itemsize]
            same = a.view(kind) == b.view(kind)
            if kind == np.int32:
                same |= np.isnan(a) & np.isnan(b)
            assert same.all(), f"{what} of {n}: {np.flatnonzero(~same)[:5]}, {a[~same][:3]} wanted {b[~same][:3]}"

    def settle(self) -> None:
        """The oracle goes on with masters as they are kept: split ones are not exact at the far ends."""
        for e, kept in zip(self.elements, self.values(), strict=True):
            if self.masters[0].dtype == torch.float32:
                assert np.array_equal(e.p.view(np.int32), kept.view(np.int32)) or np.isnan(e.p).any()
            e.p = kept.copy()


@pytest.mark.cells("each")
@few
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ADAM_CASES)
def test_adam_has_the_bits_of_the_oracle(case: str, kind: str, implementation: str) -> None:
    o = {**ADAM, **ADAM_CASES[case]}
    problem = Problem(kind, oracle.Moments)
    options = [AdamOptions(o["lr"], *o["betas"], o["eps"], o["weight_decay"], o["decoupled"], o["maximize"])]
    steps, tables = [torch.tensor(0.0) for _ in SIZES], CallCache()
    for number in (1, 2, 3, 0xFFFFFFFF + 7):
        grads = problem.grads(number)
        multi_tensor_adam8(
            grads, problem.masters, problem.first, problem.second, problem.scales, steps, options, [0] * len(SIZES),
            GIVEN, number, models=problem.models, stats=problem.stats, cache=tables,
        )  # fmt: skip
        for e, grad in zip(problem.elements, grads, strict=True):
            oracle.adam(e, grad.float().numpy(), INV_SCALE, CLIP, number, **o)
        problem.settle()
        problem.check(problem.first, [e.state.m for e in problem.elements], f"step {number}: codes of exp_avg")
        problem.check(problem.second, [e.state.v for e in problem.elements], f"step {number}: codes of exp_avg_sq")
        problem.check(problem.scales, [e.state.scales for e in problem.elements], f"step {number}: scales")
    assert [float(s) for s in steps] == [4.0] * len(SIZES)


@pytest.mark.cells("each")
@few
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SGD_CASES)
def test_sgd_has_the_bits_of_the_oracle(case: str, kind: str, implementation: str) -> None:
    o = {**SGD, **SGD_CASES[case]}
    problem = Problem(kind, oracle.Momentum)
    for codes, scales in zip(problem.first, problem.scales, strict=True):  # the first step does not look at them
        codes.fill_(77)
        scales.fill_(float("nan"))
    for number in (1, 2, 3, 4):
        grads = problem.grads(number)
        multi_tensor_sgd8(
            grads, problem.masters, problem.first, problem.scales, [SgdOptions(**o)], [0] * len(SIZES), GIVEN, number,
            first=[number == 1] * len(SIZES), models=problem.models, stats=problem.stats,
        )  # fmt: skip
        for e, grad in zip(problem.elements, grads, strict=True):
            oracle.sgd(e, grad.float().numpy(), INV_SCALE, CLIP, number, number == 1, **o)
        problem.settle()
        problem.check(problem.first, [e.state.codes for e in problem.elements], f"step {number}: codes")
        problem.check(problem.scales, [e.state.scales for e in problem.elements], f"step {number}: scales")


NOT_FINITE = np.array([0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FFFE000], np.uint32)
"""Bits of inf, and of nans: quiet, signaling and full ones. A card makes 0x7FFFFFFF, a processor keeps some of them."""


@few
@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_that_are_not_finite_and_any_codes(kind: str, dtype: torch.dtype, implementation: str) -> None:
    """Also -128, which no step writes. The sign and the other bits of a nan decide nothing."""
    rng, n = np.random.default_rng(11), 128 * 40 + 37
    steps = {"adam": {**ADAM, "weight_decay": 0.1}, "sgd": {**SGD, "momentum": 0.9}}
    more: dict[str, Any]
    for share in (1.0, 0.3, 0.01):
        grads = rng.standard_normal(n).astype(np.float32)
        odd = rng.random(n) < share
        grads.view(np.uint32)[odd] = rng.choice(NOT_FINITE, odd.sum()) | rng.integers(0, 2, odd.sum(), np.uint32) << 31
        grad = torch.from_numpy(grads).to(dtype)
        if dtype != torch.float32:  # conversions make one nan of all
            grad.view(torch.int16)[::7] = -1
        first = rng.integers(-128, 128, n).astype(np.int8)
        second = rng.integers(0, 256, n).astype(np.uint8)
        scales = np.ldexp(rng.random(41).astype(np.float32), rng.integers(-45, 60, 41)).astype(np.float32)
        scales[::5] = 0.0
        master = rng.standard_normal(n).astype(np.float32)
        m, v, s, p = (torch.from_numpy(a.copy()) for a in (first, second, scales, master))
        o, more = steps[kind], {}
        if dtype != torch.float32:
            more = {"models": [torch.zeros(n, dtype=dtype)], "stats": CastStats.allocate(1, "cpu")}
        if kind == "adam":
            whole: Any = oracle.Moments(first, second, scales)
            element = oracle.Element(master, whole, 3)
            oracle.adam(element, grad.float().numpy(), INV_SCALE, CLIP, 9, **o)
            options = [AdamOptions(o["lr"], *o["betas"], o["eps"], o["weight_decay"], o["decoupled"], o["maximize"])]
            step = [torch.tensor(3.0)]
            multi_tensor_adam8([grad], [p], [m], [v], [s], step, options, [0], GIVEN, 9, **more)
            assert np.array_equal(m.numpy(), whole.m)
            assert np.array_equal(v.numpy(), whole.v)
        else:
            whole = oracle.Momentum(first, scales)
            element = oracle.Element(master, whole)
            oracle.sgd(element, grad.float().numpy(), INV_SCALE, CLIP, 9, False, **o)
            multi_tensor_sgd8([grad], [p], [m], [s], [SgdOptions(**o)], [0], GIVEN, 9, first=[False], **more)
            assert np.array_equal(m.numpy(), whole.codes)
        assert np.array_equal(s.numpy(), whole.scales)
        same = p.numpy().view(np.uint32) == element.p.view(np.uint32)
        assert (same | (np.isnan(p.numpy()) & np.isnan(element.p))).all()


def test_threads(implementation: str) -> None:
    """The emulated CUDA kernels are among them."""
    test_adam_has_the_bits_of_the_oracle("adamw", "half split", implementation)
    test_sgd_has_the_bits_of_the_oracle("momentum", "bfloat16", implementation)


def test_layouts_walk_in_memory_order(implementation: str) -> None:
    """Blocks are those of memory: a transposed tensor has the codes of the plain one, one with gaps too."""
    rng = np.random.default_rng(3)
    base, grad = (torch.from_numpy(rng.standard_normal((40, 30)).astype(np.float32)) for _ in range(2))
    options = [AdamOptions(0.1, 0.9, 0.99, 1e-8, 0.1, True, False)]
    results = []
    for arrange in (lambda t: t.clone(), lambda t: t.t().contiguous().t(), lambda t: torch.stack([t, t], -1)[..., 0]):
        transposed = arrange(base).stride(0) == 1
        values = [base.t().reshape(40, 30), grad.t().reshape(40, 30)] if transposed else [base, grad]
        place = (lambda t: t.reshape(30, 40).t()) if transposed else arrange
        master, g = (place(v.clone()) for v in values) if transposed else (arrange(v) for v in values)
        first, second = (arrange(torch.zeros(40, 30, dtype=d)) for d in (torch.int8, torch.uint8))
        scales, step = torch.zeros(WHOLE.block_count(1200)), torch.tensor(0.0)
        for number in (1, 2):
            multi_tensor_adam8([g], [master], [first], [second], [scales], [step], options, [0], GIVEN, number)
        in_memory = (lambda t: t.t()) if transposed else (lambda t: t)
        results.append([in_memory(t).reshape(-1).clone() for t in (master, first, second)] + [scales])
    plain, other, gaps = results
    assert all(torch.equal(a, b) for a, b in zip(plain, gaps, strict=True))
    wanted = oracle.Element(base.t().reshape(-1).numpy().copy(), oracle.Moments.zeros(1200))
    o = {**ADAM, "lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1}
    for number in (1, 2):
        oracle.adam(wanted, grad.t().reshape(-1).numpy(), INV_SCALE, CLIP, number, **o)
    assert np.array_equal(other[1].numpy(), wanted.state.m)
    assert np.array_equal(other[2].numpy(), wanted.state.v)


@pytest.mark.parametrize("number", [None, 1, 77], ids=["nearest", "dithered", "dithered later"])
def test_bounds_of_one_rounding(number: int | None) -> None:
    """What the page on optimizer state says of both formats, and that what was kept is kept as it is."""
    rng = np.random.default_rng(number or 0)
    n, half = 128 * 500, 0.5 if number is None else 1.0
    v = (10.0 ** rng.uniform(-12, -4, n) * np.repeat(10.0 ** rng.uniform(-12, 12, n // 128), 128)).astype(np.float32)
    r = np.sqrt(v)
    ratio = (rng.standard_normal(n) * 2).clip(-8, 8).astype(np.float32)
    state = oracle.Moments.zeros(n)
    state.encode(ratio * r, v, number)
    m, second = state.decode()
    scale = np.repeat(state.scales, 128).astype(np.float64)
    kept, there = np.sqrt(second.astype(np.float64)), state.v > 1
    bound = 2 * np.sqrt(r / scale) / 255 * half + (half / 255) ** 2
    assert (np.abs(kept - r)[there] / scale[there] <= bound[there] * (1 + 1e-4)).all()
    apart = np.abs(m / kept - (ratio * r) / r)
    assert (apart <= (np.abs(ratio) + 8 / 247) / 16 * half * (1 + 1e-4)).all()
    again = oracle.Moments.zeros(n)
    again.encode(m, second, None)
    assert np.array_equal(again.m, state.m)
    assert np.array_equal(again.v, state.v)
    assert np.array_equal(again.scales, state.scales)
    momentum = oracle.Momentum.zeros(n)
    values = (ratio * r).astype(np.float32)
    momentum.encode(values, number)
    decoded, largest = momentum.decode(), np.repeat(momentum.scales, 128)
    assert (np.abs(decoded - values) <= (np.abs(values) + largest / 247) / 16 * half * (1 + 1e-4)).all()
    back = oracle.Momentum.zeros(n)
    back.encode(decoded, None)
    assert np.array_equal(back.codes, momentum.codes)
    assert np.array_equal(back.scales, momentum.scales)


def test_every_code_comes_back() -> None:
    """All codes of v with all of m, at scales over the whole range: FP32 and back changes nothing."""
    m, v = (a.reshape(-1) for a in np.meshgrid(np.arange(-127, 128, dtype=np.int8), np.arange(1, 256, dtype=np.uint8)))
    rows = -(-m.size // 127)
    for scale in 2.0 ** np.linspace(-45.9, 61.9, 40):
        codes = oracle.Moments.zeros(rows * 128)
        codes.m = np.concatenate([np.concatenate([m, m])[: rows * 127].reshape(rows, 127), np.full((rows, 1), 127)], 1)
        codes.v = np.concatenate([np.concatenate([v, v])[: rows * 127].reshape(rows, 127), np.full((rows, 1), 255)], 1)
        codes.m, codes.v = codes.m.reshape(-1).astype(np.int8), codes.v.reshape(-1).astype(np.uint8)
        codes.scales = np.full(rows, scale, np.float32)
        first, second, scales = (torch.from_numpy(a.copy()) for a in (codes.m, codes.v, codes.scales))
        moments = state8.decode_moments(first, second, scales, 8.0)
        wanted = codes.decode()
        assert np.array_equal(moments[0].numpy(), wanted[0])
        assert np.array_equal(moments[1].numpy(), wanted[1])
        again = torch.zeros_like(first), torch.zeros_like(second), torch.zeros_like(scales)
        state8.encode_moments(*moments, *again, 8.0)
        assert torch.equal(again[0], first)
        assert torch.equal(again[1], second)
        assert torch.equal(again[2], scales)


def test_on_a_card_one_kernel_steps_all(emulated_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split masters of 24 bits with 8-bit state: one launch a step, and no torch operation beside it."""
    emulated.use(emulated_cuda, monkeypatch)
    n, one = 300, torch.tensor(1.0)
    models, rests = [torch.ones(n).half()], [torch.zeros(n, dtype=torch.int8)]
    first, second = [torch.zeros(n, dtype=torch.int8)], [torch.zeros(n, dtype=torch.uint8)]
    more: dict[str, Any] = {"models": models, "stats": CastStats.allocate(1, "cpu"), "found_inf": torch.tensor(0.0)}
    lists, scales, steps = ([torch.ones(n).half()], rests), [torch.zeros(3)], [torch.tensor(0.0)]
    adam = [AdamOptions(0.1, 0.9, 0.999, 1e-8, 0.0, True, False)], [0], Factors(one, one), 1
    sgd = [SgdOptions(0.1, 0.9, 0.0, 0.0, False, False)], [0], Factors(one, one), 1
    tables = CallCache(), CallCache()

    def both() -> None:
        multi_tensor_adam8(*lists, first, second, scales, steps, *adam, cache=tables[0], **more)
        multi_tensor_sgd8(*lists, first, scales, *sgd, first=[True], cache=tables[1], **more)

    both()
    count = pretended.counting(monkeypatch)
    with pretended.watching(monkeypatch) as seen:
        both()
    assert seen.looks == []
    assert count.launches == {"adam8_half_24": 1, "sgd8_half_24": 1}
    more["found_inf"].fill_(1.0)
    written = [*models, *rests, *first, *second, *scales, *steps]
    before = [t.clone() for t in written]
    both()
    assert all(torch.equal(a, b) for a, b in zip(before, written, strict=True))
    more["found_inf"].zero_()
    both()
    assert not torch.equal(before[0], models[0])
