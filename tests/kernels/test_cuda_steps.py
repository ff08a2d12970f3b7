"""The CUDA kernels of the one-pass steps and of split masters, emulated, against the CPU's and plain torch's."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import emulated
import numpy as np
import pretended
import pytest
import torch
from kernel_cases import LAYOUTS, SIXTEEN, make, shape_of
from named_steps import adam_step, sgd_step
from step_cases import KINDS, StepCase, assert_same_results, place, random_case, split_and_join, unaligned
from torch import Tensor

from fp16opt import MixedPrecisionOptimizer
from fp16opt.kernels import (
    CallCache,
    CastStats,
    cuda_rows,
    launches,
    lists,
    multi_tensor_reset_remainders,
    native,
)
from fp16opt.kernels.operations import AdamOptions, Factors
from fp16opt.kernels.reference_steps import power
from fp16opt.kernels.state8 import multi_tensor_adam8, multi_tensor_sgd8

compiled = pytest.mark.skipif(not native.available(), reason="the compiled CPU module is not installed")


def two_steps(case: StepCase, seed: int) -> StepCase:
    """A step, and one with other gradients through the same tables."""
    rng = np.random.default_rng(seed)
    grads = [None if g is None else place(g, "cpu") for g in case.columns["grads"]]
    for grad in grads:
        if grad is not None and grad.numel():
            grad.mul_(float(rng.choice([-0.5, 2.0])))
    return case.run().again(grads)


@pytest.mark.parametrize("special", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_have_the_bits_of_the_cpu_and_of_plain_torch(
    emulated_cuda: emulated.Emulated, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int, special: float
) -> None:
    case = random_case(np.random.default_rng(seed), kind, special)
    with monkeypatch.context() as patch:
        patch.setattr(native, "module", None)
        plain = two_steps(case.on("cpu"), seed)
    with monkeypatch.context() as patch:
        emulated.use(emulated_cuda, patch)
        count = pretended.counting(patch)
        got = two_steps(case.on("cpu"), seed)
        assert count.launches == {kind.removeprefix("own "): 2}, "one launch a step"
    assert_same_results(got, plain, f"{kind}, against plain torch")
    if native.available():
        assert_same_results(got, two_steps(case.on("cpu"), seed), f"{kind}, against the CPU's kernels")


@pytest.mark.parametrize("kind", KINDS)
def test_found_inf_leaves_everything_untouched(host: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    case = random_case(np.random.default_rng(5), kind, 0.1).on("cpu")
    assert_same_results(case.on("cpu"), case, "the copy")
    before = case.on("cpu")
    before.stats = case.stats = CastStats.allocate(len(case.group_of), "cpu")  # type: ignore[attr-defined]
    case.stats = CastStats(before.stats.overflow.clone())  # type: ignore[attr-defined]
    assert case.found_inf is not None
    case.found_inf.fill_(1.0)
    dense = {k: [t if t is None or t.is_contiguous() else None for t in c] for k, c in case.columns.items()}
    assert any(t is not None for t in dense["grads"])
    assert_same_results(case.run(), before, kind)
    case.found_inf.zero_()
    case.run()
    with pytest.raises(AssertionError):
        assert_same_results(case, before, kind)


def plain_case(kind: str, count: int = 3) -> StepCase:
    """Nothing that torch operations must serve, and numbers that are numbers."""
    rng = np.random.default_rng(0)
    case = random_case(rng, kind, 0.0, 2)
    own = kind.startswith("own ")
    shapes = [(300 + k,) for k in range(count)]
    case.columns = {name: [] for name in case.columns}
    dtypes = {"grads": torch.float32 if own else torch.float16, "masters": torch.float32, "models": torch.float16}
    for name, column in case.columns.items():
        column += [make(rng, shape, dtypes[name]) for shape in shapes]
    case.state = [[torch.zeros(shape) for shape in shapes] for _ in case.state]
    case.steps = [torch.tensor(0.0) for _ in shapes]
    case.group_of, case.first = [k % 2 for k in range(count)], [False] * count
    lr = 0.125
    case.options = [o._replace(lr=lr) for o in case.options[:2]]
    return case.on("cpu")


def test_nobody_looks(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        case = plain_case(kind)
        case.options = [o._replace(lr=torch.tensor(0.25)) for o in case.options]
        case.run()
        with pretended.watching(monkeypatch) as seen:
            case.run()
        assert seen.looks == []
        assert not seen.launches, f"torch launches nothing beside the kernel: {seen.launches}"


def test_numbers_are_copied_where_one_changed_and_only_there(host: Any) -> None:
    case = plain_case("adam")
    for _ in range(3):
        case.run()
    assert len(host.copies) == 1, "the first call copies addresses and numbers, at once"
    case.options[0] = case.options[0]._replace(lr=0.5)
    case.run().run()
    assert len(host.copies) == 2
    assert host.copies[1] < host.copies[0], "later ones copy what may change, and no more"
    case.columns["grads"] = [place(g, "cpu") for g in case.columns["grads"] if g is not None]
    case.run()
    assert len(host.copies) == 3
    case.options.append(case.options[0]._replace(lr=3.0))
    case.group_of[0] = 2
    before = case.on("cpu")
    case.run()
    assert len(host.copies) == 4, "a param_group that came later"
    assert_same_results(case, before.run(), "three groups")


def test_a_learning_rate_on_the_device_is_read_there(host: Any) -> None:
    for dtype in (torch.float32, torch.float64):
        case, plain = plain_case("momentum"), plain_case("momentum")
        lr = torch.tensor(0.25, dtype=dtype)
        case.options = [o._replace(lr=lr) for o in case.options]
        for value in (0.25, 0.1, 1e-3):
            lr.fill_(value)
            plain.options = [o._replace(lr=float(lr)) for o in plain.options]
            case.run()
            plain.run()
        assert_same_results(case, plain, str(dtype))
        assert len(host.copies) == 1 + 3, "a number that the device holds is not copied"
        host.copies.clear()


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_counters_on_the_host_are_counted_there(host: Any, monkeypatch: pytest.MonkeyPatch, found: float) -> None:
    case, there = plain_case("amsgrad"), plain_case("amsgrad")
    for one in (case, there):
        one.steps = [torch.tensor(float(k)) for k in (0, 4, 1000)]
        one.found_inf = torch.tensor(found)
    there.run().run()
    versions = [step._version for step in case.steps if step is not None]
    check = lists.check_lists

    def elsewhere(*given: Any) -> lists.Plan:
        return dataclasses.replace(check(*given), counts_here=False, decided_here=True)

    monkeypatch.setattr(launches, "check_lists", elsewhere)
    case.run().run()
    assert_same_results(case, there, "host")
    assert [float(step) for step in case.steps if step is not None] == ([2, 6, 1002] if found == 0 else [0, 4, 1000])
    moved = [step._version > old for step, old in zip(case.steps, versions, strict=True) if step is not None]
    assert moved == [found == 0.0] * 3


@pytest.mark.parametrize("kind", ["adam8", "sgd8", "split24"])
def test_what_is_rounded_by_the_number_of_the_step_is_not_captured(
    host: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A replay would round each time as its capture did."""
    case, scales = plain_case("momentum"), [torch.zeros(3) for _ in range(3)]
    columns, given = case.columns, {"models": case.columns["models"], "stats": case.stats, "cache": case.cache}  # type: ignore[attr-defined]
    codes = [
        [torch.zeros(t.shape, dtype=d) for t in columns["models"] if t is not None] for d in (torch.int8, torch.uint8)
    ]
    factors = Factors(*case.factors)

    def step() -> None:
        adam = [AdamOptions(0.1, 0.9, 0.99, 1e-8, 0.0, True, False)] * 2
        if kind == "adam8":
            lists = (columns["grads"], columns["masters"], *codes, scales, case.steps)
            multi_tensor_adam8(*lists, adam, case.group_of, factors, 1, **given)
        elif kind == "sgd8":
            lists = (columns["grads"], columns["masters"], codes[0], scales)
            multi_tensor_sgd8(*lists, case.options, case.group_of, factors, 1, first=case.first, **given)
        else:
            sgd_step(columns["grads"], codes[0], case.options, case.group_of, factors, number=1, **given)

    tensors = [t for column in (*columns.values(), *codes, scales, case.steps) for t in column if t is not None]
    before = [t.clone() for t in tensors]
    monkeypatch.setattr(host, "capturing", True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"_(adam|sgd)8?: state and remainders of 8 bits are rounded by"):
            step()
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    monkeypatch.setattr(host, "capturing", False)
    step()
    assert not all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    "mode",
    [{"optimizer_state": "8bit"}, {"master_weights": "split24"}, {"optimizer_state": "8bit", "fused_step": True}],
)
def test_a_wrapper_that_rounds_by_number_refuses_capture_by_name(
    host: Any, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    monkeypatch.setattr(pretended.who_waits(), "is_host", lambda device: False)
    params = [torch.nn.Parameter(torch.ones(4096).half())]
    opt = MixedPrecisionOptimizer(torch.optim.AdamW(params), **mode)

    def backward() -> None:
        opt.zero_grad()
        opt.scale_loss(torch.zeros(()))
        params[0].grad = torch.ones_like(params[0])

    backward()
    opt.step()
    backward()
    weight = params[0].detach().clone()
    name = 'optimizer_state="8bit"' if "optimizer_state" in mode else 'master_weights="split24"'
    monkeypatch.setattr(host, "capturing", True)
    with pytest.raises(RuntimeError, match=f"a step with {name} can't be captured into a CUDA graph: the host decides"):
        opt.step()
    monkeypatch.setattr(host, "capturing", False)
    assert torch.equal(params[0], weight)
    opt.step()
    assert not torch.equal(params[0], weight)


def test_what_is_compiled_first_is_what_adamw_launches(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretended.who_waits(), "is_host", lambda device: False)
    count = pretended.counting(monkeypatch)
    params = [torch.nn.Parameter(torch.ones(n).half()) for n in (5, 70)]
    opt = MixedPrecisionOptimizer(torch.optim.AdamW(params), dynamic=True)
    for _ in range(2):
        opt.zero_grad()
        opt.backward(sum(((p.float() ** 2).sum() for p in params), torch.zeros(())))
        opt.clip_master_grads(1.0)
        opt.step()
    assert set(count.launches) == set(cuda_rows.FIRST)


# -- powers ------------------------------------------------------------------------------------------------------------


def test_powers_are_rounded_correctly() -> None:
    rng = np.random.default_rng(0)
    bases = [0.9, 0.99, 0.999, 0.5, 0.0, 1 - 2.0**-53, *rng.random(20).tolist()]
    for base in bases:
        for count in (1, 2, 3, 10, 31, 100, 255, 1000):
            exact = Fraction(base) ** count
            if exact > Fraction(1, 2**60) or exact == 0:  # below, what matters is 1 minus it
                assert power(base, float(count)) == float(exact), (base, count)
            assert abs(Fraction(power(base, float(count))) - exact) <= exact / 2**53 + Fraction(1, 2**100)
    assert power(0.9, 0.0) == 1.0
    assert power(0.9, 7.5) == power(0.9, 7.0)


@pytest.mark.parametrize("beta", [1.0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("which", ["beta1", "beta2"])
def test_betas_that_are_none_are_refused(which: str, beta: float) -> None:
    options = AdamOptions(0.1, 0.9, 0.99, 1e-8, 0.0, True, False)._replace(**{which: beta})
    lists: list[list[Tensor | None]] = [[torch.ones(3)] for _ in range(4)]
    one, step = torch.tensor(1.0), torch.tensor(0.0)
    with pytest.raises(ValueError, match=rf"options\[0\].{which} must be at least 0 and less than 1, got {beta}"):
        adam_step(*lists, [step], [options], [0], Factors(one, one), cache=CallCache())
    assert step == 0


# -- split masters -----------------------------------------------------------------------------------------------------


def random_split(rng: np.random.Generator, special: float) -> list[list[Tensor | None]]:
    lists: list[list[Tensor | None]] = [[], [], []]
    for _ in range(int(rng.integers(1, 25))):
        shape, layout, missing = shape_of(rng), LAYOUTS[int(rng.integers(0, len(LAYOUTS)))], rng.random() < 0.1
        dtypes = (torch.float32, SIXTEEN[int(rng.integers(0, 2))], torch.float16)
        row = [unaligned(rng, make(rng, shape, dtype, layout, special)) for dtype in dtypes]
        for column, tensor in zip(lists, (row[0], row[1], row[2].view(torch.int16)), strict=True):
            column.append(None if missing else tensor)
    return lists


@compiled
@pytest.mark.parametrize("special", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_split_and_join_have_the_bits_of_the_cpu(
    emulated_cuda: emulated.Emulated, monkeypatch: pytest.MonkeyPatch, seed: int, special: float
) -> None:
    lists = random_split(np.random.default_rng(seed), special)
    wanted = split_and_join(*lists, "cpu")
    emulated.use(emulated_cuda, monkeypatch)
    count = pretended.counting(monkeypatch)
    got = split_and_join(*lists, "cpu")
    assert count.launches == {"split": 2, "join": 2}
    for name, ours, theirs in zip(("weights", "rests", "outs", "flags"), got, wanted, strict=True):
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a is not None and b is not None:
                bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[b.element_size()]
                same = a.contiguous().view(bits) == b.contiguous().view(bits)
                same |= (a.isnan() & b.isnan()) if b.dtype.is_floating_point else False
                assert same.all(), f"{name}[{k}]"


def test_weights_that_were_written_stand_for_themselves(emulated_cuda: emulated.Emulated) -> None:
    _, params, rests = random_split(np.random.default_rng(7), 0.1)
    count = len(params)
    then = torch.zeros(count, dtype=torch.int64)
    now = then + torch.tensor([k % 2 for k in range(count)])
    results = []
    for backend in ("emulated", "reference"):
        if backend == "emulated":
            patch = pytest.MonkeyPatch()
            emulated.use(emulated_cuda, patch)
        mine, taken = [None if r is None else place(r, "cpu") for r in rests], torch.zeros(count, dtype=torch.int32)
        multi_tensor_reset_remainders(params, mine, now, then, taken)
        if backend == "emulated":
            patch.undo()
        results.append((mine, taken))
    (mine, taken), (theirs, other) = results
    assert torch.equal(taken, other)
    for k, (a, b, before, param) in enumerate(zip(mine, theirs, rests, params, strict=True)):
        if a is not None and b is not None and before is not None and param is not None:
            assert torch.equal(a, b), k
            infinite = param.isinf() if param.dtype == torch.float16 else torch.zeros_like(param, dtype=torch.bool)
            assert torch.equal(a, -infinite.to(torch.int16) if k % 2 else before), k


def test_what_renewing_refuses() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    taken, rest = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int16)
    with pytest.raises(
        TypeError, match="multi_tensor_reset_remainders: wants float16 or bfloat16 params and int16 or int8 remainders"
    ):
        multi_tensor_reset_remainders([torch.ones(2)], [rest], one, one, taken)
    with pytest.raises(ValueError, match="multi_tensor_reset_remainders: now must be contiguous with 1 element"):
        multi_tensor_reset_remainders([torch.ones(2).half()], [rest], torch.zeros(2, dtype=torch.int64), one, taken)
    with pytest.raises(TypeError, match="multi_tensor_reset_remainders: taken must be int32"):
        multi_tensor_reset_remainders([torch.ones(2).half()], [rest], one, one, one)
