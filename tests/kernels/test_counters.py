"""Gradients and version counters of many tensors, read by compiled code and in Python."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fp16opt.kernels import counters, native

READERS = {"python": counters.Reader(), "compiled": native.tensor_reader(Tensor.grad, Tensor._version)}


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Any:
    found = READERS[request.param]
    if found is None:
        pytest.skip("no compiled module")
    return found


class InFront(torch.nn.Parameter):
    """Its ``grad`` is not what it holds."""

    @property  # type: ignore[override]
    def grad(self) -> None:
        raise AssertionError("asked")


class Overridden(Tensor):
    """It would answer for itself."""

    @classmethod
    def __torch_function__(cls, *given: Any, **more: Any) -> Any:
        raise AssertionError("asked")


class Piece(Tensor):
    """It may leave counting to a tensor inside."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("no operation is called")


def made(kind: type, written: int = 0) -> Any:
    values = torch.zeros(3)
    for _ in range(written):
        values.add_(1.0)
    return values if kind is Tensor else values.as_subclass(kind)


def test_those_that_are_there_are_counted(reader: Any) -> None:
    x = torch.zeros(1)
    assert [reader.count_there(given) for given in ([], [None], [x], [None, x, x, None])] == [0, 0, 1, 2]


def test_the_compiled_one_serves_where_it_is() -> None:
    assert (READERS["compiled"] is not None) == native.available()
    assert isinstance(counters.versions.__self__, counters.Reader) != native.available()  # type: ignore[attr-defined]


def test_gradients_are_those_that_tensors_hold(reader: Any) -> None:
    front = InFront(torch.zeros(2))
    Tensor.grad.__set__(front, torch.ones(2))  # type: ignore[attr-defined]
    plain, parameter = torch.zeros(2), torch.nn.Parameter(torch.zeros(2))
    plain.grad = torch.ones(2)
    found = reader.gradients([front, parameter, plain, made(Overridden)])
    assert found[0] is Tensor.grad.__get__(front)  # type: ignore[attr-defined]
    assert found[1] is None
    assert found[2] is plain.grad
    assert found[3] is None
    assert reader.gradients([]) == []


def test_versions_count_writes(reader: Any) -> None:
    kinds = [Tensor, torch.nn.Parameter, InFront, Overridden]
    tensors = [kind(torch.zeros(3)) if kind not in (Tensor, Overridden) else made(kind) for kind in kinds]
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for writes, tensor in enumerate(tensors):
            for _ in range(300 * writes):  # beyond the integers that Python shares
                tensor.zero_()
    entries = [*tensors, None]
    now = reader.versions(entries)
    assert now == [*(tensor._version for tensor in tensors[:3]), 900, -1]
    assert now[1] - now[0] >= 300
    assert reader.have_versions(entries, list(now))
    assert not reader.have_versions(entries, [*now[:3], 901, -1])
    assert not reader.have_versions(entries, [*now[:4], 0])
    assert not reader.have_versions(entries, now[:4])
    assert not reader.have_versions(entries[:4], now)
    assert reader.have_versions([], [])


def test_one_that_may_count_elsewhere_is_not_judged(reader: Any) -> None:
    piece = Tensor._make_subclass(Piece, torch.zeros(3))  # type: ignore[attr-defined]
    assert reader.versions([torch.zeros(1), piece]) is None
    assert not reader.have_versions([torch.zeros(1), piece], [0, 0])
    assert reader.versions([torch.zeros(1)]) == [0], "and the next is"
    param = torch.nn.Parameter(torch.zeros(3))
    assert reader.gradients([piece, param]) == [None, None], "what it holds is its own"


def test_gradients_are_held_until_replaced_written_or_dropped(reader: Any) -> None:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for param in params[:2]:
        param.grad = torch.ones(2)
    grads = reader.gradients(params)
    then = reader.versions(grads)
    assert then == [0, 0, -1]
    assert reader.hold_gradients(params, grads, then)
    assert not reader.hold_gradients(params[:2], grads, then)
    assert not reader.hold_gradients(params, grads[:2], then)
    assert not reader.hold_gradients(params, grads, then[:2])
    params[0].grad = grads[0].clone()
    assert not reader.hold_gradients(params, grads, then)
    params[0].grad = grads[0]
    assert reader.hold_gradients(params, grads, then)
    grads[1].mul_(1.0)
    assert not reader.hold_gradients(params, grads, then)
    assert reader.hold_gradients(params, grads, [0, 1, -1])
    params[1].grad = None
    assert not reader.hold_gradients(params, grads, [0, 1, -1])
    params[1].grad, params[2].grad = grads[1], torch.ones(2)
    assert not reader.hold_gradients(params, grads, [0, 1, -1])


def test_gradients_are_seen_with_their_versions(reader: Any) -> None:
    params = [InFront(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2)), torch.zeros(2)]
    assert reader.see(params) == ([None] * 3, [-1] * 3)
    assert not reader.have_gradients(params)
    wanted = [torch.ones(2).mul_(2.0), None, torch.zeros(2)]
    reader.set_gradients(params, wanted)
    grads, then = reader.see(params)
    assert [a is b for a, b in zip(grads, wanted, strict=True)] == [True] * 3
    assert then == [1, -1, 0]
    assert reader.have_gradients(params)
    assert reader.have_gradients(params[2:])
    assert not reader.have_gradients(params[1:2])
    reader.set_gradients(params, [None] * 3)
    assert not reader.have_gradients(params)
    assert reader.see([]) == ([], [])


def test_seeing_is_told_of_gradients_that_may_count_elsewhere_or_count_nothing(reader: Any) -> None:
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    piece = Tensor._make_subclass(Piece, torch.zeros(3))  # type: ignore[attr-defined]
    params[0].grad = params[2].grad = torch.ones(3)
    Tensor.grad.__set__(params[1], piece)  # type: ignore[attr-defined]
    grads, then = reader.see(params)
    assert grads[0] is grads[2]
    assert grads[1] is piece
    assert then is None
    with torch.inference_mode():
        params[1].grad = torch.ones(3)
    grads, then = reader.see(params)
    assert grads[1] is params[1].grad
    assert then is None


def test_a_gradient_that_torch_refuses_is_not_set(reader: Any) -> None:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    grads = [torch.ones(2), torch.ones(5), torch.ones(2)]
    with pytest.raises(RuntimeError, match="size"):
        reader.set_gradients(params, grads)
    assert params[0].grad is grads[0]
    assert params[1].grad is None
    with pytest.raises(TypeError):
        reader.set_gradients(params, [torch.ones(2), 3, None])
    with pytest.raises(TypeError):
        reader.set_gradients([3], [None])
    with pytest.raises(ValueError, match="one gradient for each"):
        reader.set_gradients(params, grads[:2])


@pytest.mark.skipif(not native.available(), reason="no compiled module")
def test_nothing_depends_on_where_torch_keeps_its_tensors() -> None:
    """Compiled code asks the cache ahead only where a tensor of Python's is laid out as it knows."""
    reader, probe = READERS["compiled"], torch.empty(0)
    assert reader is not None
    params: list[Any] = [torch.nn.Parameter(torch.zeros(2)) for _ in range(60)]
    for param in params[::2]:
        param.grad = torch.ones(2)
    mixed = [*params[:30], None, *params[30:], made(Overridden), None]
    wanted = (reader.see(params), reader.versions(mixed))
    try:
        for address in (0, probe._cdata + 8):
            native.module.learn_tensors(probe, address)
            assert (reader.see(params), reader.versions(mixed)) == wanted
        native.module.learn_tensors(probe, probe._cdata)
        assert (reader.see(params), reader.versions(mixed)) == wanted
    finally:
        native.module.learn_tensors(probe, probe._cdata)


def test_a_gradient_is_asked_for_unless_its_partner_holds_the_same(reader: Any) -> None:
    tensor, partner, alone = InFront(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2)), torch.zeros(2)
    grads = [torch.full((2,), float(k)) for k in range(3)]
    partners = {id(tensor): weakref.ref(partner), id(alone): weakref.ref(torch.zeros(2))}
    asked: list[tuple[Any, Any]] = []
    store = Tensor.grad.__set__  # type: ignore[attr-defined]

    def ask(model: Tensor, held: Tensor | None) -> None:
        asked.append((model, held))
        store(tensor, grads[2])

    assert reader.asked_gradient(partners, ask, tensor) is grads[2], "none is held"
    partner.grad = grads[2]
    assert reader.asked_gradient(partners, ask, tensor) is grads[2], "both hold the same"
    assert [held for _, held in asked] == [None]
    partner.grad = grads[1]
    assert reader.asked_gradient(partners, ask, tensor) is grads[2], "each holds its own"
    partner.grad = None
    assert reader.asked_gradient(partners, ask, tensor) is grads[2], "one is held"
    assert all(model is partner for model, _ in asked)
    assert [held for _, held in asked[1:]] == [grads[2], grads[2]]
    alone.grad = grads[0]
    assert reader.asked_gradient(partners, ask, alone) is grads[0], "its partner is gone"
    assert reader.asked_gradient(partners, ask, partner) is None, "it has none"
    assert len(asked) == 3


def test_what_is_raised_where_a_gradient_is_asked_for_comes_through(reader: Any) -> None:
    tensor, partner = torch.zeros(2), torch.zeros(2)
    with pytest.raises(ZeroDivisionError):
        reader.asked_gradient({id(tensor): weakref.ref(partner)}, lambda *_: 1 // 0, tensor)
    with pytest.raises(TypeError):
        reader.asked_gradient({}, print, 3)


def test_what_counts_no_versions_raises_as_in_torch(reader: Any) -> None:
    with torch.inference_mode():
        entry = torch.zeros(2)
    with pytest.raises(RuntimeError, match="do not track version counter"):
        reader.versions([entry])
    with pytest.raises(RuntimeError, match="do not track version counter"):
        reader.have_versions([torch.zeros(1).as_subclass(Overridden), entry], [0, 0])


def test_gradients_that_count_no_versions_are_not_known_to_be_held(reader: Any) -> None:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    with torch.inference_mode():
        params[1].grad = torch.zeros(2)
    grads = reader.gradients(params)
    for then in ([-1, 0], [-1, -1]):
        assert not reader.hold_gradients(params, grads, then)
    params[1].grad = None
    assert reader.hold_gradients(params, [None, None], [-1, -1])


@pytest.mark.parametrize("wrong", [3, "x", object()])
def test_what_is_no_tensor_raises(reader: Any, wrong: Any) -> None:
    for read in (reader.versions, reader.gradients):
        with pytest.raises(TypeError):
            read([torch.zeros(1), wrong])
    with pytest.raises(TypeError):
        reader.gradients([None])


def test_torch_asks_subclasses_again_afterwards(reader: Any) -> None:
    """Also where two kinds of subclass came, and where it raised."""
    entry = made(Overridden)
    for param in (torch.nn.Parameter(torch.zeros(3)), made(Overridden)):
        assert reader.hold_gradients([entry, param], [None, None], [-1, -1])
        assert not reader.hold_gradients([entry, param], [None, entry], [-1, 0])
        reader.set_gradients([param], [made(Overridden)])
        assert reader.see([param])[1] == [0]
        assert reader.hold_gradients([param], *reader.see([param]))
        reader.set_gradients([param], [None])
        with pytest.raises(TypeError):
            reader.versions([param, 3])
        with pytest.raises(AssertionError, match="asked"):
            entry.add(1.0)


def test_nothing_is_kept_alive(reader: Any) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    grads = reader.gradients([param])
    assert reader.hold_gradients([param], grads, reader.versions(grads))
    gone = [weakref.ref(param), weakref.ref(grads[0])]
    del param, grads
    assert [one() for one in gone] == [None, None]


def test_a_mode_that_changes_the_list_meanwhile_does_no_harm(reader: Any) -> None:
    tensors = [torch.zeros(1) for _ in range(5)]

    class Emptying(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors.clear()
            return function(*args, **(kwargs or {}))

    with Emptying(), contextlib.suppress(ValueError):  # compiled code says that the list changed
        assert len(reader.versions(tensors)) >= 1
    assert not tensors
