"""multi_tensor_step against numpy, bit for bit, on every backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from named_steps import adam_step, sgd_step
from torch import Tensor

from fp16opt.kernels import CallCache, CastStats, multi_tensor_cast
from fp16opt.kernels.operations import (
    AdamOptions,
    Factors,
    LionOptions,
    SgdOptions,
    multi_tensor_step,
)
from fused import oracle_fused as oracle
from fused.oracle_fused import Element

SIZES = (0, 1, 3, 63, 64, 65, 1000, 4095, 131073)
ADAM = {
    "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False,
    "decoupled": True,
}  # fmt: skip
ADAM_CASES: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1},
    "adam": {"decoupled": False},
    "l2": {"decoupled": False, "weight_decay": 0.1},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.01},
    "maximize": {"maximize": True, "weight_decay": 0.01},
    "beta1 0": {"betas": (0.0, 0.99)},
    "beta1 0.3": {"betas": (0.3, 0.5), "amsgrad": True, "maximize": True},
    "beta1 0.5": {"betas": (0.5, 0.9)},
    "eps 0": {"eps": 0.0},
}
SGD = {
    "lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False,
}  # fmt: skip
SGD_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "maximize": True},
    "momentum": {"momentum": 0.9},
    "maximize": {"momentum": 0.9, "maximize": True},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}
LION = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
LION_CASES: dict[str, dict[str, Any]] = {
    "lion": {},
    "decay": {"weight_decay": 0.1, "maximize": True},
    "betas 0": {"betas": (0.0, 0.0), "weight_decay": 0.01},
}
KINDS = {"half": torch.float16, "bfloat16": torch.bfloat16, "own": None}


def spread(rng: np.random.Generator, numel: int, low: float, high: float) -> oracle.Array:
    """Values whose magnitudes are spread evenly over powers of ten, some zero and some subnormal."""
    values = (rng.standard_normal(numel) * 10.0 ** rng.uniform(low, high, numel)).astype(np.float32)
    values[rng.random(numel) < 0.02] = 0.0
    values[rng.random(numel) < 0.02] = 1e-41
    return values


def positive(rng: np.random.Generator, numel: int) -> oracle.Array:
    """Second moments over the whole range of float32: what roots and quotients can meet."""
    values = np.abs(spread(rng, numel, -44, 38))
    values[rng.random(numel) < 0.01] = np.inf
    return values


class Drawn(NamedTuple):
    """Parameters, columns of state, and the gradients of three steps; computed once, written by none."""

    values: list[oracle.Array]
    state: list[list[oracle.Array]]
    grads: list[list[oracle.Array]]


@functools.cache
def drawn(state: int, lion: bool = False) -> Drawn:
    rng = np.random.default_rng(0)
    values = [spread(rng, n, -6, 2) for n in SIZES]
    columns = [[positive(rng, n) if k else spread(rng, n, -9, 1) for n in SIZES] for k in range(state)]
    grads = [[spread(rng, n, -3, 3) for n in SIZES] for _ in range(3)]
    if lion:  # zero momentum and zero gradients: no direction
        for column in (values, columns[0], *grads):
            column[3][:3] = 0.0
        columns[0][4][5] = np.nan
    for column in (values, *columns, *grads):
        for array in column:
            array.flags.writeable = False
    return Drawn(values, columns, grads)


def grads_of(numbers: Drawn, dtype: torch.dtype | None, step: int) -> list[Tensor]:
    """The second step's are in float32 whatever the parameters are in."""
    to = dtype if dtype is not None and step != 1 else torch.float32
    return [torch.from_numpy(a.copy()).to(to) for a in numbers.grads[step]]


class Problem:
    """Lists of tensors to step."""

    def __init__(self, dtype: torch.dtype | None, numbers: Drawn) -> None:
        self.dtype, self.numbers = dtype, numbers
        self.masters = [torch.from_numpy(a.copy()) for a in numbers.values]
        self.kept = [[torch.from_numpy(a.copy()) for a in column] for column in numbers.state]
        self.models = None if dtype is None else [torch.zeros(n, dtype=dtype) for n in SIZES]
        self.stats = CastStats.allocate(len(SIZES), "cpu")

    def grads(self, step: int) -> list[Tensor]:
        return grads_of(self.numbers, self.dtype, step)

    def check(self, got: list[Tensor], want: list[oracle.Array], what: str) -> None:
        for n, tensor, array in zip(SIZES, got, want, strict=True):
            a, b = tensor.numpy(), array
            same = (a.view(np.int32) == b.view(np.int32)) | (np.isnan(a) & np.isnan(b))
            assert same.all(), f"{what} of {n}: {np.flatnonzero(~same)[:5]}, {a[~same][:3]} wanted {b[~same][:3]}"

    def check_models(self) -> None:
        """Weights and flags are those of the copy pass."""
        if self.models is None:
            return
        want, stats = [torch.zeros_like(model) for model in self.models], CastStats.allocate(len(SIZES), "cpu")
        multi_tensor_cast(self.masters, want, stats)
        for n, a, b in zip(SIZES, self.models, want, strict=True):
            nans = torch.isnan(b)
            assert torch.equal(torch.isnan(a), nans), n
            assert torch.equal(a.view(torch.int16)[~nans], b.view(torch.int16)[~nans]), n
        assert torch.equal(stats.overflow, self.stats.overflow)


FACTORS = (2.0**-9, 0.3721)


def factors() -> Factors:
    return Factors(torch.tensor(FACTORS[0]), torch.tensor(FACTORS[1]))


def three_steps(recipe: Callable[..., None], elements: list[Element], numbers: Drawn, kind: str, o: Any) -> None:
    for step in range(3):
        for e, grad in zip(elements, grads_of(numbers, KINDS[kind], step), strict=True):
            recipe(e, grad.float().numpy(), *FACTORS, **o)


@functools.cache
def after_adam(case: str, kind: str) -> list[Element]:
    """What the recipe gives, for all implementations."""
    o = {**ADAM, **ADAM_CASES[case]}
    numbers = drawn(3 if o["amsgrad"] else 2)
    columns = [*numbers.state, [None] * len(SIZES)][:3]
    rows = zip(numbers.values, *columns, strict=True)
    elements = [Element(p, m, v, largest, k % 3) for k, (p, m, v, largest) in enumerate(rows)]
    three_steps(oracle.adam, elements, numbers, kind, o)
    return elements


@functools.cache
def after_sgd(case: str, kind: str) -> list[Element]:
    elements = [Element(p) for p in drawn(0).values]
    three_steps(oracle.sgd, elements, drawn(0), kind, {**SGD, **SGD_CASES[case]})
    return elements


@functools.cache
def after_lion(case: str, kind: str) -> list[Element]:
    numbers = drawn(1, lion=True)
    elements = [Element(p, m) for p, m in zip(numbers.values, numbers.state[0], strict=True)]
    three_steps(oracle.lion, elements, numbers, kind, {**LION, **LION_CASES[case]})
    return elements


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ADAM_CASES)
def test_adam_has_the_bits_of_the_recipe(case: str, kind: str, implementation: str) -> None:
    o = {**ADAM, **ADAM_CASES[case]}
    problem, wanted = Problem(KINDS[kind], drawn(3 if o["amsgrad"] else 2)), after_adam(case, kind)
    options = [AdamOptions(o["lr"], *o["betas"], o["eps"], o["weight_decay"], o["decoupled"], o["maximize"])]
    steps = [torch.tensor(float(k % 3)) for k in range(len(SIZES))]
    tables = CallCache()
    for step in range(3):
        adam_step(
            problem.grads(step), problem.masters, problem.kept[0], problem.kept[1], steps, options,
            [0] * len(SIZES), factors(),
            max_exp_avg_sqs=problem.kept[2] if o["amsgrad"] else None, models=problem.models, stats=problem.stats,
            cache=tables,
        )  # fmt: skip
    problem.check(problem.masters, [e.p for e in wanted], "master")
    problem.check(problem.kept[0], [e.m for e in wanted], "exp_avg")
    problem.check(problem.kept[1], [e.v for e in wanted], "exp_avg_sq")
    if o["amsgrad"]:
        problem.check(problem.kept[2], [e.largest for e in wanted], "max_exp_avg_sq")
    assert [float(s) for s in steps] == [k % 3 + 3.0 for k in range(len(SIZES))]
    problem.check_models()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SGD_CASES)
def test_sgd_has_the_bits_of_the_recipe(case: str, kind: str, implementation: str) -> None:
    o = {**SGD, **SGD_CASES[case]}
    problem, wanted = Problem(KINDS[kind], drawn(0)), after_sgd(case, kind)
    buffers = [torch.full((n,), float("nan")) for n in SIZES] if o["momentum"] else None
    options = [SgdOptions(**o)]
    for step in range(3):
        sgd_step(
            problem.grads(step), problem.masters, options, [0] * len(SIZES), factors(), momentum_buffers=buffers,
            first=[step == 0] * len(SIZES) if buffers else None, models=problem.models, stats=problem.stats,
        )  # fmt: skip
    problem.check(problem.masters, [e.p for e in wanted], "master")
    if buffers:
        problem.check(buffers, [e.m for e in wanted], "momentum_buffer")
    problem.check_models()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", LION_CASES)
def test_lion_has_the_bits_of_the_recipe(case: str, kind: str, implementation: str) -> None:
    o = {**LION, **LION_CASES[case]}
    problem, wanted = Problem(KINDS[kind], drawn(1, lion=True)), after_lion(case, kind)
    options = [LionOptions(o["lr"], *o["betas"], o["weight_decay"], o["maximize"])]
    for step in range(3):
        multi_tensor_step(
            "lion", problem.grads(step), problem.masters, [problem.kept[0]], options, [0] * len(SIZES), factors(),
            models=problem.models, stats=problem.stats,
        )  # fmt: skip
    problem.check(problem.masters, [e.p for e in wanted], "master")
    problem.check(problem.kept[0], [e.m for e in wanted], "exp_avg")
    problem.check_models()


def test_groups_and_absent_entries(implementation: str) -> None:
    """Each tensor steps with its own group's numbers and its own step; None entries stay."""
    masters = [torch.ones(5), torch.ones(5), torch.ones(5)]
    m, v = [torch.zeros(5) for _ in range(3)], [torch.zeros(5) for _ in range(3)]
    steps = [torch.tensor(0.0), torch.tensor(7.0), torch.tensor(3.0)]
    options = [AdamOptions(lr, 0.9, 0.99, 1e-8, 0.0, True, False) for lr in (0.5, 0.25)]
    one = torch.tensor(1.0)
    grads = [torch.full((5,), 2.0), torch.full((5,), 2.0), None]
    adam_step(grads, masters, m, v, steps, options, [1, 0, 0], Factors(one, one))
    for k, (lr, t) in enumerate([(0.25, 0), (0.5, 7)]):
        e = Element(np.ones(5, np.float32), np.zeros(5, np.float32), np.zeros(5, np.float32), None, t)
        oracle.adam(e, np.full(5, 2, np.float32), 1.0, 1.0, **{**ADAM, "lr": lr, "betas": (0.9, 0.99)})
        assert np.array_equal(masters[k].numpy(), e.p)
    assert bool((masters[2] == 1).all())
    assert [float(s) for s in steps] == [1.0, 8.0, 3.0]


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_nothing_is_written_where_found_inf_is_set(found: float, implementation: str) -> None:
    one, flag = torch.tensor(1.0), torch.tensor(found)
    lists = [[torch.full((70,), x)] for x in (2.0, 1.0, 0.5, 0.25)]
    model, stats, step = [torch.zeros(70).half()], CastStats.allocate(1, "cpu"), [torch.tensor(4.0)]
    options = [AdamOptions(0.1, 0.9, 0.99, 1e-8, 0.0, True, False)]
    adam_step(
        *lists, step, options, [0], Factors(one, one), models=model, stats=stats, found_inf=flag
    )  # fmt: skip
    untouched = float(lists[1][0][0]) == 1.0 and float(step[0]) == 4.0 and not model[0].any()
    assert untouched == bool(found)
    master, buffer = [torch.ones(3)], [torch.ones(3)]
    o = [SgdOptions(0.1, 0.9, 0.0, 0.0, False, False)]
    sgd_step(
        [torch.ones(3)], master, o, [0], Factors(one, one), momentum_buffers=buffer, found_inf=flag
    )  # fmt: skip
    assert (float(master[0][0]) == 1.0 and float(buffer[0][0]) == 1.0) == bool(found)


def test_any_layout_gives_the_same_bits(implementation: str) -> None:
    """Channels-last and transposed tensors are walked in memory order; slices go through torch operations."""
    rng = np.random.default_rng(3)
    base = torch.from_numpy(rng.standard_normal((4, 6, 5, 3)).astype(np.float32))
    grad = torch.from_numpy(rng.standard_normal((4, 6, 5, 3)).astype(np.float32)).half()
    one = torch.tensor(1.0)
    results = []
    for arrange in (
        lambda t: t.clone(),
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        lambda t: torch.stack([t, t], -1)[..., 0],
    ):
        master, m, v = arrange(base), arrange(torch.zeros_like(base)), arrange(torch.zeros_like(base))
        model, step = arrange(base.half()), torch.tensor(0.0)
        options = [AdamOptions(0.1, 0.9, 0.99, 1e-8, 0.1, True, False)]
        adam_step(
            [arrange(grad)], [master], [m], [v], [step], options, [0], Factors(one, one), models=[model],
            stats=CastStats.allocate(1, "cpu"),
        )  # fmt: skip
        results.append((master.contiguous(), m.contiguous(), v.contiguous(), model.contiguous(), float(step)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][:4], other[:4], strict=True))
        assert other[4] == 1.0


ONE = torch.tensor(1.0)
T, H = torch.ones(3), torch.ones(3).half()
OPT = [AdamOptions(0.1, 0.9, 0.99, 1e-8, 0.0, True, False)]
LOPT = [LionOptions(0.1, 0.9, 0.99, 0.0, False)]
SOPT = [SgdOptions(0.1, 0.9, 0.0, 0.0, False, False)]


def stepped(grad: Any = T, master: Any = T, m: Any = T, step: Any = ONE, group: Any = (0,), **more: Any) -> None:
    given = more.pop("factors", Factors(ONE, ONE))
    adam_step([grad], [master], [m], [T], [step], OPT, list(group), given, **more)


REFUSED: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (TypeError, r"multi_tensor_adam: wants float32 each, got grads\[0\] float16", lambda: stepped(H)),
    (TypeError, r"masters\[0\] float64", lambda: stepped(master=T.double())),
    (TypeError, r"gradients of float32 or the model's dtype.*grads\[0\] bfloat16",
     lambda: stepped(T.bfloat16(), models=[H], stats=CastStats.allocate(1, "cpu"))),
    (ValueError, r"exp_avgs\[0\] has shape \(2,\)", lambda: stepped(m=T[:2])),
    (TypeError, r"wants float32, got steps\[0\] float64", lambda: stepped(step=torch.tensor(1.0).double())),
    (ValueError, r"steps must have one element", lambda: stepped(step=T)),
    (ValueError, r"steps\[0\] is on meta, the tensors of the call on cpu", lambda: stepped(step=ONE.to("meta"))),
    (ValueError, r"group_of has 2 entries, grads has 1", lambda: stepped(group=(0, 0))),
    (ValueError, r"group_of reaches from 1 to 1, there are 1 options", lambda: stepped(group=(1,))),
    (ValueError, r"stats must be given along with models", lambda: stepped(models=[H])),
    (ValueError, r"factors.inv_scale must be contiguous with 1 element", lambda: stepped(factors=Factors(T, ONE))),
    (TypeError, r"factors.coefficient must be float32", lambda: stepped(factors=Factors(ONE, ONE.double()))),
    (TypeError, r"found_inf must be float32", lambda: stepped(found_inf=torch.tensor(0))),
    (ValueError, r"first has 2 entries, grads has 1",
     lambda: sgd_step([T], [T], SOPT, [0], Factors(ONE, ONE), momentum_buffers=[T], first=[True, True])),
    (ValueError, r"multi_tensor_lion: options\[0\].beta2 must be at least 0 and less than 1, got 1.0",
     lambda: multi_tensor_step("lion", [T], [T], [[T]], [LOPT[0]._replace(beta2=1.0)], [0], Factors(ONE, ONE))),
    (ValueError, r"multi_tensor_lion: stats must be given along with models",
     lambda: multi_tensor_step("lion", [H], [T], [[T]], LOPT, [0], Factors(ONE, ONE), models=[H])),
    (TypeError, r"multi_tensor_lion: wants float32 each, got .*exp_avgs\[0\] float16",
     lambda: multi_tensor_step("lion", [T], [T], [[H]], LOPT, [0], Factors(ONE, ONE))),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), REFUSED, ids=lambda x: x if isinstance(x, str) else None)
def test_what_is_refused(error: type[Exception], message: str, call: Callable[[], object]) -> None:
    before = T.clone(), H.clone(), ONE.clone()
    with pytest.raises(error, match=message):
        call()
    assert torch.equal(before[0], T)
    assert torch.equal(before[1], H)
    assert torch.equal(before[2], ONE)


def test_absent_entries_before_new_momentum_buffers(implementation: str) -> None:
    """What belongs to an entry is found by its place, whatever is left out."""
    master = [torch.ones(70) for _ in range(3)]
    buffers = [torch.full((70,), x) for x in (float("nan"), 1.0, float("nan"))]
    options = [SgdOptions(lr, 0.5, 0.5, 0.0, False, False) for lr in (1.0, 0.25)]
    one = torch.tensor(1.0)
    sgd_step(
        [None, torch.ones(70), torch.ones(70)], master, options, [0, 1, 0], Factors(one, one),
        momentum_buffers=buffers, first=[True, False, True],
    )  # fmt: skip
    assert [float(m[69]) for m in master] == [1.0, 0.75, 0.0]
    assert [float(b[69]) for b in buffers[1:]] == [1.0, 1.0]
