"""What is asked of whole lists of tensors: the same from compiled code, item by item, and without an exchange API."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp16opt import MixedPrecisionOptimizer
from fp16opt.kernels import native, tensor_lists
from fp16opt.kernels.readings import Rows


@pytest.fixture(params=["compiled", "no exchange API", "item by item"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "item by item":
        monkeypatch.setattr(native, "module", None)
    elif native.module is None:
        pytest.skip("no compiled module")
    if request.param == "no exchange API":
        plain = tensor_lists.reader_of(None)
        monkeypatch.setattr(tensor_lists, "reader_of", lambda module: plain)
    return request.param


class Counted(nn.Parameter):
    """A parameter whose class has a say in torch's functions, and says something wrong."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a class was asked for what torch holds")


def test_gradients_are_read_as_torch_holds_them(way: str) -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3)), Counted(torch.ones(1))]
    torch.Tensor.grad.__set__(params[0], torch.ones(2))  # type: ignore[attr-defined]
    found = tensor_lists.grads_of(params)
    assert found[1:] == [None, None]
    assert found[0] is params[0].grad
    assert list(tensor_lists.gradients(params)) == found
    assert tensor_lists.grads_of(iter(params[1:])) == [None, None]


def test_versions_are_counted(way: str) -> None:
    with torch.inference_mode():
        uncounted = torch.ones(2)
    written = torch.ones(2).mul_(2.0).add_(1.0)
    assert tensor_lists.versions_of([torch.ones(1), None, written, uncounted]) == [0, -1, 2, 0]
    assert tensor_lists.versions_of([written, torch.ones(1)]) == [2, 0]
    with pytest.raises((AttributeError, TypeError)):
        tensor_lists.versions_of([written, 3])  # type: ignore[list-item]


def test_identity_is_compared_and_never_equality(way: str) -> None:
    a, b = torch.ones(2), torch.ones(2)
    assert tensor_lists.are_items([a, b], (b, a, b), 1)
    for items, start in (([a, a], 1), ([a, b], 2), ([a, b], 0), ([a, b, a], 1)):
        assert not tensor_lists.are_items(items, (b, a, b), start)
    assert tensor_lists.hold([([{"x": a}, {"x": b}], "x", [a, b]), ([], "y", [])])
    assert not tensor_lists.hold([([{"x": a}, {"x": b}], "x", [a, a])])
    assert not tensor_lists.hold([([{"x": a}], "x", [a]), ([{"x": a}, {}], "x", [a, b])])
    assert tensor_lists.any_there([None, a])
    assert not tensor_lists.any_there([None, None])
    assert tensor_lists.all_there([a, b])
    assert not tensor_lists.all_there([a, None])
    assert tensor_lists.types_of([a, None, nn.Parameter(a), b]) == [Tensor, type(None), nn.Parameter]


def test_references_keep_nothing_alive(way: str) -> None:
    items = [torch.ones(1), None, torch.ones(1)]
    references = tensor_lists.references_to(items)
    assert tensor_lists.are_references_to(references, items)
    assert not tensor_lists.are_references_to(references, [items[0], items[0], items[2]])
    assert not tensor_lists.are_references_to(references, [None, *items[1:]])
    items[2] = torch.ones(1)
    gc.collect()
    assert references[2] is not None
    assert references[2]() is None
    assert not tensor_lists.are_references_to(references, items)
    assert not tensor_lists.are_references_to(references, [*items[:2], None]), "one that is gone is not None"


# -- how tensors lie ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.bfloat16(),
        lambda t: t.view(torch.int16),
        lambda t: t.view(6, 2),
        lambda t: t.t(),
        lambda t: t.view(-1)[:6].view(3, 2),
        lambda t: nn.Parameter(t),
        lambda t: None,
    ],
    ids=["dtype", "dtype of the same size", "shape", "strides", "fewer", "class", "none"],
)
@pytest.mark.parametrize("place", [0, 2])
def test_what_lies_otherwise_is_seen(way: str, change: Callable[[Tensor], Any], place: int) -> None:
    tensors: list[Any] = [torch.ones(3, 4).half() for _ in range(3)]
    known = tensor_lists.read(tensors)
    assert tensor_lists.read(tensors, known, same=True) == known
    tensors[place] = change(tensors[place])
    for like in (known, None):
        now = tensor_lists.read(tensors, like)
        assert not now.lies_as(known)
        assert not known.lies_as(now)
        assert now.lies_as(tensor_lists.read(tensors))
    assert not tensor_lists.read(tensors[:2], known).lies_as(known)


def test_an_address_that_moved_is_seen_and_the_form_is_the_same(way: str) -> None:
    tensors = tuple(torch.ones(3) for _ in range(3))
    known = tensor_lists.read(tensors, counts=True)
    tensors[1].data = torch.ones(3)
    now = tensor_lists.read(tensors, known, same=True, counts=True)
    assert now.lies_as(known)
    assert now != known
    assert now.has_counts_of(known), "torch counts no version for .data"
    tensors[2].add_(1.0)
    assert tensor_lists.read(tensors, known, counts=True).counts == [0, 0, 1]


def test_what_cannot_be_described_is_left_to_the_checks(way: str) -> None:
    one = torch.ones(2, 3)
    odd: list[Any] = [3, one.to_sparse(), one.to("meta"), one.to_mkldnn(), torch._neg_view(one)]
    for value in odd:
        assert tensor_lists.read([one, value]) is None
        assert tensor_lists.read([one, value], tensor_lists.read([one, one])) is None
    assert tensor_lists.read([one.requires_grad_().exp()]) is not None, "a graph is no obstacle"


def test_copies_of_a_reading_know_nothing(way: str) -> None:
    reading = tensor_lists.read([torch.ones(1)])
    assert copy.deepcopy(reading) is None
    assert pickle.loads(pickle.dumps(reading)) is None


def test_entries_that_are_none_are_part_of_the_form(way: str) -> None:
    one, two = torch.ones(2), torch.ones(2, dtype=torch.float64)
    reading = tensor_lists.read([one, None, two], counts=True)
    assert reading.counts == [0, -1, 0]
    assert reading.types == [Tensor]
    full = tensor_lists.read([one, one, two], reading)
    assert not full.lies_as(reading)
    assert reading.has_dtypes_of(full)
    assert full.has_dtypes_of(reading)
    assert not reading.has_dtypes_of(tensor_lists.read([one, one, one]))
    assert not reading.has_dtypes_of(tensor_lists.read([one, one]))
    again = tensor_lists.read([one, None, two], full)
    assert again == reading
    assert tensor_lists.read([None, None]).types == []
    with pytest.raises(RuntimeError, match="versions were not read"):
        full.counts  # noqa: B018


def test_a_class_that_is_gone_is_not_among_the_classes(way: str) -> None:
    mixed = tensor_lists.read([torch.ones(1), nn.Parameter(torch.ones(1))])
    assert mixed.types == [Tensor, nn.Parameter]
    assert tensor_lists.read([torch.ones(1), torch.ones(1)], mixed).types == [Tensor]


def test_gradients_are_met_once_for_all_that_is_asked_of_them(way: str) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    for param in params:
        param.grad = torch.ones(2)
    seen = tensor_lists.gradients(params)
    assert seen.reading.counts == [0, 0, 0]
    assert seen.reading == tensor_lists.read(seen.tensors)
    params[1].grad = None
    fewer = tensor_lists.gradients(params, seen.reading)
    assert fewer.reading.counts == [0, -1, 0]
    counted = tensor_lists.counted_gradients(params)
    assert counted.tensors == fewer.tensors
    assert counted.reading.has_counts_of(fewer.reading)
    assert counted.reading.types == [Tensor]
    assert not counted.reading.lies_as(fewer.reading), "no kernel takes it for one that was read"
    assert not fewer.reading.lies_as(seen.reading)


def test_rows_are_a_sequence_and_nothing_keeps_them() -> None:
    one = torch.ones(1)
    rows = Rows((one, None), None)
    assert (len(rows), rows[0], rows[1:], list(rows)) == (2, one, (None,), [one, None])
    gone = weakref.ref(rows)
    del rows
    assert gone() is None


# -- what users see ----------------------------------------------------------------------------------------------------


def wrapped(count: int = 3) -> tuple[list[nn.Parameter], MixedPrecisionOptimizer]:
    params = [nn.Parameter(torch.ones(4).half()) for _ in range(count)]
    return params, MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.5, momentum=0.5), loss_scale=4.0)


def backward(params: list[nn.Parameter], opt: MixedPrecisionOptimizer) -> None:
    opt.zero_grad()
    opt.backward(sum((param.float().sum() for param in params), start=torch.zeros(())))


def test_memory_of_a_gradient_that_is_replaced_after_a_clip_is_what_is_stepped(way: str) -> None:
    params, opt = wrapped()
    backward(params, opt)
    opt.clip_master_grads(1e6)
    assert params[1].grad is not None
    params[1].grad.data = torch.full((4,), 8.0).half()
    gone = torch.full((4,), float("nan")).half()  # where the other was
    opt.step()
    assert [param[0].item() for param in params] == [0.5, 0.0, 0.5]
    assert gone.isnan().all()


def test_memory_that_a_hook_replaces_before_the_step_is_what_is_stepped(way: str) -> None:
    """What the step read at its start does not count after code of the user's has run."""
    params, opt = wrapped()
    for _ in range(2):
        backward(params, opt)
        opt.step()
    old: list[Tensor] = []

    def move(*_: Any) -> None:
        for tensor in (params[0], params[1].grad):
            assert tensor is not None
            old.append(tensor.data)
            tensor.data = tensor.data.clone()
        old[0].fill_(9.0)
        old[1].fill_(9.0)

    opt.optimizer.register_step_pre_hook(move)
    backward(params, opt)
    opt.clip_master_grads(1e6)
    opt.step()
    assert [param[0].item() for param in params] == [-1.125] * 3, "1 - lr * (1 + 1.5 + 1.75)"
    assert [tensor.tolist() for tensor in old] == [[9.0] * 4] * 2


def test_a_negated_gradient_is_its_values_and_not_its_memory(way: str) -> None:
    negations = ("at another address", "at the address that was seen", "by its data")
    for negated, is_checked_before in itertools.product(negations, (False, True)):
        params = [nn.Parameter(torch.ones(4).half()) for _ in range(3)]
        opt = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.5), loss_scale=1.0)
        kept = [torch.full((4,), 4.0).half() for _ in params]
        for turn in range(2):
            given = list(kept)
            if turn and negated == "by its data":
                given[1] = kept[1].detach()
                given[1].data = torch._neg_view(kept[1])
            elif turn:
                given[1] = torch._neg_view(kept[1].clone() if negated == "at another address" else kept[1])
            for param, grad in zip(params, given, strict=True):
                param.grad = None
                param.grad = grad
            if is_checked_before:
                opt.update_master_grads()
            opt.step()
        assert [param[0].item() for param in params] == [-3.0, 1.0, -3.0], (negated, is_checked_before)


def test_a_gradient_that_is_replaced_by_the_negative_of_its_memory_after_a_clip_is_refused(way: str) -> None:
    params, opt = wrapped()
    backward(params, opt)
    opt.clip_master_grads(1e6)
    assert params[1].grad is not None
    params[1].grad = torch._neg_view(params[1].grad)
    with pytest.raises(RuntimeError, match="written after they were checked"):
        opt.step()
    opt.update_master_grads()
    opt.step()
    assert [param[0].item() for param in params] == [0.5, 1.5, 0.5]
