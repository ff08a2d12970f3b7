"""Calls that a call site makes again: what they notice, and what they count."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from fp16opt import kernels
from fp16opt.kernels import CastStats, GradStats, PointerTables, native
from fp16opt.kernels.operations import AdamOptions, Factors, SgdOptions, multi_tensor_step

if native.module is None or native._exchange is None:
    pytest.skip("no compiled module, or no exchange table", allow_module_level=True)

N = 5
HALF, SINGLE = torch.float16, torch.float32


def tensors(dtype: torch.dtype, value: float = 1.0) -> list[Any]:
    return [torch.full((3 + k,), value, dtype=dtype) for k in range(N)]


class Looks:
    """A site of :func:`multi_tensor_unscale` that has made its call twice."""

    def __init__(self) -> None:
        self.grads, self.outs = tensors(HALF, 2.0), tensors(SINGLE, 0.0)
        self.stats, self.tables = GradStats.allocate(N, "cpu"), PointerTables()
        for _ in range(2):
            self.call()

    def call(self, inv_scale: Tensor | None = None, **given: Any) -> None:
        inv_scale = torch.tensor(0.5) if inv_scale is None else inv_scale
        kernels.multi_tensor_unscale(self.grads, self.outs, inv_scale, self.stats, tables=self.tables, **given)


@pytest.fixture
def looks() -> Looks:
    return Looks()


@pytest.fixture
def unchecked(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> Looks:
    """A site, where the checks must not run any more."""

    def refuse(*_: object) -> None:
        raise AssertionError("the call was checked again")

    monkeypatch.setattr(kernels.operations, "call_for", refuse)
    return looks


def test_addresses_numbers_and_flags_are_read_anew(unchecked: Looks) -> None:
    unchecked.grads = tensors(HALF, 8.0)
    unchecked.outs[0] = torch.full((3,), 7.0)
    unchecked.stats = GradStats.allocate(N, "cpu")
    unchecked.call(torch.tensor([0.25]).squeeze(), accumulate=True)
    assert [out[0].item() for out in unchecked.outs] == [9.0, 3.0, 3.0, 3.0, 3.0]
    assert unchecked.stats.touched
    assert unchecked.stats.norm.item() == pytest.approx(
        sum(n * v * v for n, v in zip(range(3, 8), [9, 3, 3, 3, 3], strict=True)) ** 0.5
    )
    unchecked.grads[2][1] = float("inf")
    unchecked.call()
    assert unchecked.stats.nonfinite.tolist() == [0, 0, kernels.INF, 0, 0]
    assert unchecked.stats.found_inf.item() == 1.0


def test_what_is_not_written_stays(unchecked: Looks) -> None:
    before = [out.clone() for out in unchecked.outs]
    versions = [out._version for out in unchecked.outs]
    unchecked.grads = tensors(HALF, 64.0)
    unchecked.call(write=False)
    assert all(map(torch.equal, unchecked.outs, before))
    assert [out._version for out in unchecked.outs] == versions
    unchecked.call()
    assert [out._version for out in unchecked.outs] == [version + 1 for version in versions]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (torch.tensor(0.5, dtype=torch.float64), TypeError, "inv_scale must be float32"),
        (torch.tensor([0.5, 0.5]), ValueError, "inv_scale must be contiguous with 1 element"),
        (torch.tensor(0.5, device="meta"), ValueError, "inv_scale must be on cpu"),
        (0.5, TypeError, "inv_scale must be a tensor, got float"),
    ],
)
def test_a_number_of_another_kind_is_refused_and_nothing_is_written(
    looks: Looks, wrong: Any, error: type[Exception], words: str
) -> None:
    before = [out.clone() for out in looks.outs]
    looks.grads = tensors(HALF, 64.0)
    with pytest.raises(error, match=words):
        looks.call(wrong)
    assert all(map(torch.equal, looks.outs, before))


def test_statistics_of_other_lists_are_refused(looks: Looks) -> None:
    looks.stats = GradStats.allocate(N + 1, "cpu")
    with pytest.raises(ValueError, match=r"stats\.nonfinite must be contiguous with 5 element"):
        looks.call()


@pytest.mark.parametrize("flags", [[True] * (N - 1), [True] * (N + 1)])
def test_flags_of_another_number_are_refused(looks: Looks, flags: list[bool]) -> None:
    looks.call(accumulate=[True] * N)
    looks.call(accumulate=[True] * N)
    before = [out.clone() for out in looks.outs]
    with pytest.raises(ValueError, match=r"flag for each|accumulate has"):
        looks.call(accumulate=flags)
    assert all(map(torch.equal, looks.outs, before))


class Steps:
    """A site of Adam's step that has made its call twice."""

    def __init__(self) -> None:
        self.masters, self.state, self.models = (
            tensors(SINGLE),
            (tensors(SINGLE, 0.0), tensors(SINGLE, 0.0)),
            tensors(HALF),
        )
        self.steps = [torch.zeros(()) for _ in range(N)]
        self.stats, self.tables = CastStats.allocate(N, "cpu"), PointerTables()
        for _ in range(2):
            self.call()

    def call(self, formula: str = "adamw", **given: Any) -> None:
        options = given.pop("options", [AdamOptions(0.125, 0.5, 0.5, 0.0, 0.0, True, False)])
        given = {"steps": self.steps, "models": self.models, "stats": self.stats, "tables": self.tables, **given}
        group_of, one = given.pop("group_of", [0] * N), torch.tensor(1.0)
        lists = tensors(HALF, 2.0), self.masters, self.state
        multi_tensor_step(formula, *lists, options, group_of, Factors(one, one), **given)


def test_a_step_made_again_counts_and_moves() -> None:
    site, versions = Steps(), None
    for count in range(3, 6):
        before, versions = site.masters[0].clone(), [model._version for model in site.models]
        site.call()
        assert [step.item() for step in site.steps] == [count] * N
        assert torch.equal(site.masters[0], before - 0.125)  # a gradient that stays moves by lr
        assert torch.equal(site.models[0], site.masters[0].half())
        assert [model._version for model in site.models] == [version + 1 for version in versions]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"options": [AdamOptions(0.1, 1.0, 0.5, 0.0, 0.0, True, False)]}, ValueError, r"options\[0\].beta1 must be"),
        ({"options": [SgdOptions(0.1, 0.0, 0.0, 0.0, False, False)]}, TypeError, r"options\[0\] must be AdamOptions"),
        ({"group_of": [0] * (N - 1) + [1]}, ValueError, "group"),
        ({"group_of": [0] * (N + 1)}, ValueError, "group_of"),
        ({"stats": None}, ValueError, "stats must be given along with models"),
        ({"stats": CastStats.allocate(N - 1, "cpu")}, ValueError, "stats.overflow"),
        ({"found_inf": torch.tensor(1.0, dtype=torch.float64)}, TypeError, "found_inf must be float32"),
    ],
    ids=["beta", "options", "group", "groups", "no stats", "stats", "found_inf"],
)
def test_a_step_refuses_what_a_first_one_refuses(given: dict[str, Any], error: type[Exception], words: str) -> None:
    site = Steps()
    before = [master.clone() for master in site.masters]
    with pytest.raises(error, match=words):
        site.call(**given)
    assert all(map(torch.equal, site.masters, before))
    assert [step.item() for step in site.steps] == [2.0] * N


def test_a_flag_that_says_skip_is_looked_at() -> None:
    site = Steps()
    before = site.masters[0].clone()
    site.call(found_inf=torch.tensor(1.0))
    assert torch.equal(site.masters[0], before)
    site.call(found_inf=torch.tensor(0.0))
    assert torch.equal(site.masters[0], before - 0.125)


def test_another_formula_on_the_same_lists_is_another_call() -> None:
    """Lion's lists are those of SGD with momentum, and its options are others."""
    site, results = PointerTables(), []
    for formula in ("sgd", "sgd", "lion", "lion", "sgd"):
        masters, state, one = tensors(SINGLE), (tensors(SINGLE, 0.0),), torch.tensor(1.0)
        sgd = formula == "sgd"
        kind = (
            SgdOptions(0.25, 0.5, 0.0, 0.0, False, False)
            if sgd
            else kernels.operations.LionOptions(0.5, 0.5, 0.5, 0.0, False)
        )
        lists = tensors(HALF, 2.0), masters, state
        given = {"models": tensors(HALF), "stats": CastStats.allocate(N, "cpu"), "tables": site}
        multi_tensor_step(formula, *lists, [kind], [0] * N, Factors(one, one), first=[False] * N, **given)
        results.append(masters[0][0].item())
    assert results == [0.5, 0.5, 0.5, 0.5, 0.5]


def test_tensors_of_inference_mode_are_written_and_count_nothing(looks: Looks) -> None:
    with torch.inference_mode():
        outs = tensors(SINGLE, 0.0)
    kept, looks.outs = looks.outs, [outs[0], *looks.outs[1:]]
    version = looks.outs[1]._version
    looks.call()
    assert looks.outs[0][0].item() == 1.0
    assert looks.outs[1]._version == version + 1
    assert looks.outs[1] is kept[1]


def test_two_threads_at_one_site(looks: Looks) -> None:
    """While one of them works without Python's lock, the other has the site forget and learn."""
    failures: list[BaseException] = []

    def work(shapes: int) -> None:
        try:
            for k in range(300):
                grads = [torch.full((shapes + k % 2,), 2.0).half() for _ in range(N)]
                outs, stats = [torch.zeros(len(grad)) for grad in grads], GradStats.allocate(N, "cpu")
                for _ in range(3):
                    kernels.multi_tensor_unscale(grads, outs, torch.tensor(0.5), stats, tables=looks.tables)
                assert all(bool((out == 1.0).all()) for out in outs)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in (3, 50_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_copies_know_nothing(looks: Looks) -> None:
    fresh = copy.deepcopy(looks.tables)
    assert fresh.known is None
    looks.tables = fresh
    looks.call()
    assert looks.outs[0][0].item() == 1.0
    assert looks.tables.rebuilds == 1


@pytest.mark.parametrize("group", [2**32, -(2**32), 2**40, -1])
def test_a_group_far_outside_is_refused(group: int) -> None:
    site = Steps()
    before = site.masters[0].clone()
    with pytest.raises(ValueError, match="group_of"):
        site.call(group_of=[group] * N)
    assert torch.equal(site.masters[0], before)


def test_flags_in_a_tensor_are_flags(looks: Looks) -> None:
    for sums in (2.0, 3.0, 4.0):
        looks.call(accumulate=torch.ones(N, dtype=torch.bool))
        assert looks.outs[0][0].item() == sums


def test_what_is_remembered_is_of_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread has the site see other lists just when a call on these is about to be remembered."""
    site, long = Looks(), [tensors(HALF, 2.0) * 13, tensors(SINGLE, 0.0) * 13]
    long = [[torch.full((64,), t[0].item(), dtype=t.dtype) for t in entries] for entries in long]
    stats, seen_lists, other = GradStats.allocate(13 * N, "cpu"), native.seen_lists, [True]

    def switched(*arguments: Any) -> Any:
        if other and len(arguments[0]) == 1:
            other.clear()
            kernels.multi_tensor_unscale(*long, torch.tensor(0.5), stats, tables=site.tables)
        return seen_lists(*arguments)

    monkeypatch.setattr(native, "seen_lists", switched)
    site.tables = PointerTables()
    for _ in range(4):
        site.call()
        kernels.multi_tensor_unscale(*long, torch.tensor(0.5), stats, tables=site.tables)
    assert not other
    assert all(bool((out == 1.0).all()) for out in (*site.outs, *long[1]))
