"""What a call site's memory takes as known, what it compares, and what it holds."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp16opt import kernels
from fp16opt.kernels import CallCache, CastStats, GradStats, readings, tensor_lists
from fp16opt.kernels.operations import AdamOptions, Factors, LionOptions, SgdOptions, multi_tensor_step
from fp16opt.kernels.readings import Rows

N = 4
HALF, SINGLE = torch.float16, torch.float32


def tensors(dtype: torch.dtype, value: float = 1.0) -> list[Any]:
    return [torch.full((2, 3 + k), value, dtype=dtype) for k in range(N)]


class Site:
    """A site of :func:`multi_tensor_unscale` that has made its call twice."""

    def __init__(self, kind: type = list) -> None:
        self.grads, self.outs = kind(tensors(HALF, 2.0)), kind(tensors(SINGLE, 0.0))
        self.stats, self.cache = GradStats.allocate(N, "cpu"), CallCache()
        for _ in range(2):
            self.call()

    def call(self, inv_scale: Any = None, **given: Any) -> int:
        """How many times lists were checked until now."""
        inv_scale = torch.tensor(0.5) if inv_scale is None else inv_scale
        kernels.multi_tensor_unscale(self.grads, self.outs, inv_scale, self.stats, cache=self.cache, **given)
        return self.cache.rebuilds


@pytest.fixture(params=[list, tuple])
def site(request: pytest.FixtureRequest, level: str) -> Site:
    return Site(request.param)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the lists of entries whose forms were read, item by item: as where torch has no exchange API."""
    plain, found = tensor_lists.reader_of(None), []
    monkeypatch.setattr(tensor_lists, "reader_of", lambda module: plain)
    forms = readings.Forms

    def noting(types: list[type], *columns: Any) -> Any:
        if len(types) == N:  # the numbers beside the lists are five
            found.append(N)
        return forms(types, *columns)

    monkeypatch.setattr(readings, "Forms", noting)
    return found


# -- the same tuple object at the same addresses -----------------------------------------------------------------------


def test_the_layout_of_the_same_tuple_is_not_read_again(level: str, reads: list[int]) -> None:
    site = Site(tuple)
    reads.clear()
    site.grads[0].fill_(8.0)
    assert site.call() == 1
    assert reads == []
    assert site.outs[0][0, 0].item() == 4.0


def test_the_same_tuple_with_another_address_is_read_and_known_again(level: str, reads: list[int]) -> None:
    site = Site(tuple)
    kept = site.grads[1].data
    site.grads[1].data = torch.full_like(kept, 6.0)
    reads.clear()
    assert site.call() == 1
    assert site.outs[1][0, 0].item() == 3.0
    assert reads == [N], "of the list with the other address"
    assert site.call() == 1
    assert reads == [N]


@pytest.mark.parametrize(
    "other",
    [
        lambda t: torch.ones(3, 2, dtype=t.dtype).t().contiguous().t().reshape(3, 2),
        lambda t: torch.ones(4, 2, dtype=t.dtype).t(),
        lambda t: torch.ones(2, 4).bfloat16(),
        lambda t: torch.ones(2, 8, dtype=t.dtype)[:, ::2],
    ],
    ids=["shape", "strides", "dtype", "gaps"],
)
def test_the_same_tuple_with_another_address_and_layout_is_checked(
    level: str, other: Callable[[Tensor], Tensor]
) -> None:
    site = Site(tuple)
    site.grads[1].data = other(site.grads[1])
    fits = site.grads[1].shape == site.outs[1].shape
    if not fits:
        with pytest.raises(ValueError, match=r"grads\[1\] has shape"):
            site.call()
        return
    assert site.call() == 2
    assert site.outs[1].unique().tolist() == [0.5]


def test_addresses_of_0_prove_nothing(level: str) -> None:
    """Empty tensors have this one; those of the meta device, too, are checked in every call."""
    cache, empty = CallCache(), (torch.empty(0, 3), torch.ones(2))
    for _ in range(3):
        kernels.multi_tensor_l2norm(empty, cache=cache)
    empty[0].data = torch.empty(0, dtype=torch.int32).view(0, 1).float()
    kernels.multi_tensor_l2norm(empty, cache=cache)
    assert cache.rebuilds == 2
    meta, cache = (torch.empty(3, device="meta"),), CallCache()
    for _ in range(3):
        kernels.multi_tensor_l2norm(meta, cache=cache)
    assert cache.rebuilds == 3


# -- every other list --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple])
def test_another_list_of_the_same_layout_is_known(level: str, kind: type, reads: list[int]) -> None:
    site = Site(kind)
    reads.clear()
    site.grads = kind(tensors(HALF, 8.0))
    assert site.call() == 1
    assert N in reads
    assert site.outs[3][0, 0].item() == 4.0


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda t: t.bfloat16(), None),
        (lambda t: t.t().contiguous().t(), None),
        (lambda t: torch.ones(2, 8).half()[:, ::2], None),
        (lambda t: None, None),
        (lambda t: t.double(), (TypeError, r"grads\[1\] float64, outs\[1\] float32")),
        (lambda t: t.view(4, 2), (ValueError, r"grads\[1\] has shape \(4, 2\)")),
        (lambda t: t.to("meta"), (ValueError, r"grads\[1\] is on meta")),
        (lambda t: t.to_sparse(), (TypeError, r"grads\[1\] must be a dense tensor, got layout torch.sparse_coo")),
        (lambda t: t.float().to_mkldnn(), (TypeError, r"must be a dense tensor, got layout torch._mkldnn")),
        (lambda t: 2.0, (TypeError, r"grads\[1\] must be a tensor or None, got float")),
    ],
    ids=["dtype", "strides", "gaps", "None", "double", "shape", "meta", "sparse", "mkldnn", "no tensor"],
)
def test_another_list_of_another_layout_is_checked(
    level: str, kind: type, change: Callable[[Tensor], Any], wanted: tuple[type[Exception], str] | None
) -> None:
    site = Site(kind)
    grads = list(site.grads)
    grads[1] = change(grads[1])
    site.grads = kind(grads)
    if wanted is not None:
        with pytest.raises(wanted[0], match=wanted[1]):
            site.call()
        return
    before = site.outs[1].clone()
    assert site.call(torch.tensor(0.25)) == 2
    assert torch.equal(site.outs[1], before if grads[1] is None else grads[1].float() * 0.25)
    assert site.outs[2][0, 0].item() == 0.5


@pytest.mark.parametrize("kind", [list, tuple])
def test_entries_that_are_none_stay_where_they_were(level: str, kind: type) -> None:
    cache, one = CallCache(), torch.ones(4)
    for entries, wanted in (([None, one], [0.0, 2.0]), ([one, None], [2.0, 0.0]), ([one, one], [2.0, 2.0])) * 2:
        assert kernels.multi_tensor_l2norm(kind(entries), cache=cache)[1].tolist() == wanted
    known = kind([None, one, one])
    for _ in range(3):
        assert kernels.multi_tensor_l2norm(known, cache=cache)[1].tolist() == [0.0, 2.0, 2.0]
    assert cache.rebuilds == 7


def test_a_freed_address_that_is_used_again_with_other_strides(level: str) -> None:
    memory, cache = torch.arange(12.0), CallCache()
    for view in (memory.view(3, 4), memory.view(4, 3).t(), memory.view(3, 4), memory[:6].view(3, 2)):
        found = torch.zeros(view.shape)
        for _ in range(2):
            kernels.multi_tensor_unscale([view], [found], torch.tensor(0.5), GradStats.allocate(1, "cpu"), cache=cache)
            assert torch.equal(found, view * 0.5)


def test_a_lazily_negated_tensor_at_the_address_of_a_plain_one(level: str) -> None:
    number, cache = torch.tensor([1.0 + 2.0j]), CallCache()
    for view in (number.imag, number.imag, number.conj().imag, number.imag, torch._neg_view(number.imag)):
        out = torch.zeros(1)
        kernels.multi_tensor_unscale([view], [out], torch.tensor(1.0), GradStats.allocate(1, "cpu"), cache=cache)
        assert out.item() == view.item()


class Plain(Tensor):
    """A subclass whose memory is its own, and which has a say in torch's functions."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Plain.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_are_read_as_torch_has_them(level: str) -> None:
    cache, given = CallCache(), [torch.ones(4).as_subclass(Plain)]
    for _ in range(2):
        kernels.multi_tensor_l2norm(given, cache=cache)
    Plain.asked = 0
    assert kernels.multi_tensor_l2norm(given, cache=cache)[0].item() == 2.0
    if level != "reference":
        assert Plain.asked == 0
    assert kernels.multi_tensor_l2norm([torch.ones(4)], cache=cache)[0].item() == 2.0
    assert cache.rebuilds == 2, "another class may have no memory of its own"


# -- what it holds -----------------------------------------------------------------------------------------------------


def test_a_list_is_not_kept_alive(level: str) -> None:
    site = Site(list)
    gone = [weakref.ref(grad) for grad in site.grads]
    site.grads = []
    gc.collect()
    assert all(reference() is None for reference in gone)


def test_a_refused_call_clears_the_cache() -> None:
    site = Site(tuple)
    site.grads = [*site.grads[:3], 3.0]
    with pytest.raises(TypeError, match="got float"):
        site.call()
    assert repr(site.cache) == "CallCache(empty)"


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_know_nothing(again: Callable[[CallCache], CallCache]) -> None:
    site = Site(tuple)
    assert repr(site.cache) == f"CallCache(multi_tensor_unscale, {N} entries)"
    site.cache = again(site.cache)
    assert repr(site.cache) == "CallCache(empty)"
    assert site.call() == 1


def test_a_cache_may_serve_another_operation(level: str) -> None:
    cache = CallCache()
    values = tuple(tensors(SINGLE, 2.0))
    for _ in range(2):
        norm = kernels.multi_tensor_l2norm(values, cache=cache)[0].item()
        kernels.multi_tensor_scale(values, torch.tensor(0.5), cache=cache)
        assert kernels.multi_tensor_l2norm(values, cache=cache)[0].item() == norm / 2
    assert cache.rebuilds == 5


def test_unscaling_with_and_without_clipping_share_what_is_known(level: str) -> None:
    site = Site(list)
    half = torch.tensor(0.5)
    kernels.multi_tensor_unscale_clipped(site.grads, site.outs, half, half, cache=site.cache)
    assert site.outs[0][0, 0].item() == 0.5
    assert site.cache.rebuilds == 1


# -- calls on lists that are known -------------------------------------------------------------------------------------


def test_numbers_flags_and_statistics_are_read_anew(site: Site) -> None:
    site.grads = type(site.grads)(tensors(HALF, 8.0))
    site.stats = GradStats.allocate(N, "cpu")
    assert site.call(torch.tensor([0.25]).squeeze(), accumulate=True) == 1
    assert [out[0, 0].item() for out in site.outs] == [3.0] * N
    assert site.stats.touched
    assert site.stats.norm.item() == pytest.approx((9.0 * sum(2 * (3 + k) for k in range(N))) ** 0.5)
    site.grads[2][0, 1] = float("inf")
    site.call()
    assert site.stats.nonfinite.tolist() == [0, 0, kernels.INF, 0]
    assert site.stats.found_inf.item() == 1.0
    site.call(accumulate=[True, False, False, False])
    assert [out[0, 0].item() for out in site.outs] == [8.0, 4.0, 4.0, 4.0]


def test_what_is_not_written_stays(site: Site) -> None:
    before, versions = [out.clone() for out in site.outs], [out._version for out in site.outs]
    site.call(torch.tensor(7.0), write=False)
    assert all(map(torch.equal, site.outs, before))
    assert [out._version for out in site.outs] == versions
    site.call()
    assert all(out._version > version for out, version in zip(site.outs, versions, strict=True))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"inv_scale": torch.tensor(0.5).double()}, TypeError, "inv_scale must be float32"),
        ({"inv_scale": torch.tensor([0.5, 0.5])}, ValueError, "inv_scale must be contiguous with 1 element"),
        ({"inv_scale": torch.tensor(0.5, device="meta")}, ValueError, "inv_scale must be on cpu"),
        ({"inv_scale": 0.5}, TypeError, "inv_scale must be a tensor, got float"),
        ({"accumulate": [True] * (N + 1)}, ValueError, "accumulate has 5 entries"),
    ],
)
def test_what_is_given_is_checked_in_every_call(
    site: Site, given: dict[str, Any], error: type[Exception], words: str
) -> None:
    before = [out.clone() for out in site.outs]
    site.grads = type(site.grads)(tensors(HALF, 64.0))
    with pytest.raises(error, match=words):
        site.call(**given)
    site.stats = GradStats.allocate(N + 1, "cpu")
    with pytest.raises(ValueError, match=r"stats\.nonfinite must be contiguous with 4 element"):
        site.call()
    assert all(map(torch.equal, site.outs, before))


def test_tensors_of_inference_mode_are_written_and_count_nothing(site: Site, level: str) -> None:
    if level == "reference":
        pytest.skip("torch operations refuse to write such a tensor outside of the mode")
    with torch.inference_mode():
        made = torch.zeros(2, 3)
    site.outs = type(site.outs)([made, *site.outs[1:]])
    version = site.outs[1]._version
    site.call()
    assert site.outs[0][0, 0].item() == 1.0
    assert site.outs[1]._version > version


class Steps:
    """A site of Adam's step that has made its call twice."""

    def __init__(self, kind: type = tuple) -> None:
        self.masters, self.models = kind(tensors(SINGLE)), kind(tensors(HALF))
        self.state = (kind(tensors(SINGLE, 0.0)), kind(tensors(SINGLE, 0.0)))
        self.steps = kind(torch.zeros(()) for _ in range(N))
        self.stats, self.cache = CastStats.allocate(N, "cpu"), CallCache()
        for _ in range(2):
            self.call()

    def call(self, formula: str = "adamw", **given: Any) -> None:
        options = given.pop("options", [AdamOptions(0.125, 0.5, 0.5, 0.0, 0.0, True, False)])
        given = {"steps": self.steps, "models": self.models, "stats": self.stats, "cache": self.cache, **given}
        group_of, one = given.pop("group_of", [0] * N), torch.tensor(1.0)
        lists = tensors(HALF, 2.0), self.masters, self.state
        multi_tensor_step(formula, *lists, options, group_of, Factors(one, one), **given)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_step_made_again_counts_and_moves(level: str, kind: type) -> None:
    site = Steps(kind)
    for count in range(3, 6):
        before, versions = site.masters[0].clone(), [model._version for model in site.models]
        site.call()
        assert [step.item() for step in site.steps] == [count] * N
        assert torch.equal(site.masters[0], before - 0.125), "a gradient that stays moves by lr"
        assert torch.equal(site.models[0], site.masters[0].half())
        assert all(model._version > version for model, version in zip(site.models, versions, strict=True))
    assert site.cache.rebuilds == 1


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"options": [AdamOptions(0.1, 1.0, 0.5, 0.0, 0.0, True, False)]}, ValueError, r"options\[0\].beta1 must be"),
        ({"options": [SgdOptions(0.1, 0.0, 0.0, 0.0, False, False)]}, TypeError, r"options\[0\] must be AdamOptions"),
        ({"group_of": [0] * (N - 1) + [1]}, ValueError, "group_of reaches from 0 to 1, there are 1 options"),
        ({"group_of": [2**40] * N}, ValueError, "group_of"),
        ({"group_of": [-1] * N}, ValueError, "group_of reaches from -1"),
        ({"group_of": [0] * (N + 1)}, ValueError, "group_of has 5 entries, grads has 4"),
        ({"stats": None}, ValueError, "stats must be given along with models"),
        ({"stats": CastStats.allocate(N - 1, "cpu")}, ValueError, "stats.overflow"),
        ({"found_inf": torch.tensor(1.0, dtype=torch.float64)}, TypeError, "found_inf must be float32"),
    ],
    ids=["beta", "options", "group", "far group", "negative group", "groups", "no stats", "stats", "found_inf"],
)
def test_a_step_refuses_what_a_first_one_refuses(given: dict[str, Any], error: type[Exception], words: str) -> None:
    site = Steps()
    before = [master.clone() for master in site.masters]
    with pytest.raises(error, match=words):
        site.call(**given)
    assert all(map(torch.equal, site.masters, before))
    assert [step.item() for step in site.steps] == [2.0] * N


def test_another_formula_on_the_same_lists_is_another_operation(level: str) -> None:
    """Lion's lists are those of SGD with momentum, and its options are others."""
    cache, results = CallCache(), []
    for formula in ("sgd", "sgd", "lion", "lion", "sgd"):
        masters, state, one = tensors(SINGLE), (tensors(SINGLE, 0.0),), torch.tensor(1.0)
        sgd, lion = SgdOptions(0.25, 0.5, 0.0, 0.0, False, False), LionOptions(0.5, 0.5, 0.5, 0.0, False)
        options = [sgd if formula == "sgd" else lion]
        given: dict[str, Any] = {"models": tensors(HALF), "stats": CastStats.allocate(N, "cpu"), "cache": cache}
        lists = tensors(HALF, 2.0), masters, state
        multi_tensor_step(formula, *lists, options, [0] * N, Factors(one, one), first=[False] * N, **given)
        results.append(masters[0][0, 0].item())
    assert results == [0.5] * 5


def test_counters_of_another_dtype_are_noticed(level: str) -> None:
    site = Steps()
    site.steps = [*site.steps[:3], torch.zeros((), dtype=torch.float64)]
    with pytest.raises(TypeError, match=r"steps\[3\] float64"):
        site.call()


@pytest.mark.parametrize("kind", [list, tuple])
def test_three_threads_at_one_site(kind: type) -> None:
    """While one works without Python's lock, or between two of its lists, another has the site forget and learn."""
    site, failures = Site(kind), []

    def work(size: int) -> None:
        try:
            for k in range(200):
                grads = kind(torch.full((size + k % 2,), 2.0).half() for _ in range(N))
                outs, stats = kind(torch.zeros(len(grad)) for grad in grads), GradStats.allocate(N, "cpu")
                for _ in range(3):
                    kernels.multi_tensor_unscale(grads, outs, torch.tensor(0.5), stats, cache=site.cache)
                assert all(bool((out == 1.0).all()) for out in outs)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in (3, 3, 50_000)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures


# -- rows that the caller has just read --------------------------------------------------------------------------------


def just_read(tensors: list[Any]) -> Rows:
    return Rows(tuple(tensors), tensor_lists.read(tensors))


def test_rows_are_taken_as_they_were_read(reads: list[int], level: str) -> None:
    sites = [Site(list), Site(list)]
    grads = just_read(sites[0].grads)
    reads.clear()
    for site in sites:
        site.grads = grads
        site.call()
    assert reads == [N, N], "the lists of results, but not the gradients"
    assert all(bool((out == 1.0).all()) for site in sites for out in site.outs)


MOVES = {
    "shape": lambda grad: torch.full((1,), 2.0, dtype=HALF),
    "dtype": lambda grad: torch.full(grad.shape, 2.0, dtype=SINGLE),
    "strides": lambda grad: torch.full(grad.shape[::-1], 2.0, dtype=HALF).t(),
}


@pytest.mark.parametrize("what", MOVES)
def test_rows_of_another_form_are_checked(what: str, level: str) -> None:
    """Else a kernel would walk memory as the old tensor lay in it."""
    site = Site(list)
    before = site.call()
    site.grads[1].data = MOVES[what](site.grads[1])
    site.grads = just_read(site.grads)
    if what == "shape":
        with pytest.raises(ValueError, match=r"has shape \(1,\)"):
            site.call()
        return
    assert site.call() > before
    assert all(bool((out == 1.0).all()) for out in site.outs)


def test_rows_that_cannot_be_read_are_checked_as_lists_are(level: str) -> None:
    site = Site(list)
    site.grads = Rows((torch._neg_view(site.grads[0]), *site.grads[1:]), None)
    assert site.call() == 2
    assert site.outs[0].unique().tolist() == [-1.0]


def test_a_site_keeps_no_rows_alive(level: str) -> None:
    site = Site(list)
    site.grads = just_read(tensors(HALF, 2.0))
    site.call()
    kept = weakref.ref(site.grads), weakref.ref(site.grads[0])
    del site.grads
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
