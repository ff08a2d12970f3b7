"""Which gradients are unscaled and checked: dtypes, layouts, sparse and complex ones, odd strides, several devices."""

from __future__ import annotations

import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam

from fp16opt import MixedPrecisionOptimizer
from grad_scaler.pairs import Ours, Theirs, assert_norm, assert_same_bits, exact_norm, parameters, values

SCALE = 1024.0
HALF = (torch.float16, torch.bfloat16)
ALL = (*HALF, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.complex32)


def _unscaled(params: list[torch.Tensor], grads: list[torch.Tensor], cls: type = Ours) -> tuple:
    optimizer = SGD(params, lr=0.5)
    scaler = cls("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler.unscale_(optimizer)
    return scaler, optimizer


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("bad", [None, "inf", "nan"])
def test_every_dtype_is_unscaled_and_checked(dtype: torch.dtype, bad: str | None) -> None:
    real = values((5, 3), 1)
    grad = torch.complex(real, values((5, 3), 2)).to(dtype) if dtype.is_complex else real.to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = (grad.to(wide) / SCALE).to(dtype)
    param = torch.nn.Parameter(torch.zeros_like(grad))
    if bad:
        (torch.view_as_real(grad) if dtype.is_complex else grad).view(-1)[-1] = float(bad)
    scaler, optimizer = _unscaled([param], [grad])
    before = param.detach().clone()
    if not bad:
        assert_same_bits(param.grad, expected)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer) is bool(bad)
    if bad:
        assert_same_bits(param, before)
    else:
        stepped = param.detach()
        assert (torch.view_as_real(stepped) if dtype.is_complex else stepped).count_nonzero() > 0
    scaler.update()
    assert scaler.get_scale() == (SCALE / 2 if bad else SCALE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_same_bits_as_torch_where_torch_can_unscale(dtype: torch.dtype) -> None:
    grads = [values((70000,), 3, dtype), values((0,), 4, dtype), values((), 5, dtype)]
    both = []
    for cls in (Theirs, Ours):
        params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        scaler, _ = _unscaled(params, [grad.clone() for grad in grads], cls)
        scaler.update(3.0)
        both.append([p.grad for p in params])
    for theirs, ours in zip(*both, strict=True):
        assert_same_bits(theirs, ours)


def test_torch_refuses_fp16_gradients_and_ours_warns_once_by_name() -> None:
    with pytest.raises(ValueError, match="FP16"):
        _unscaled(parameters([(3,)], torch.float16), [torch.ones(3).half()], Theirs)
    params = parameters([(3,)], torch.float16)
    optimizer, scaler = SGD(params, lr=0.5), Ours("cpu", init_scale=SCALE)
    scaler.scale(params[0].sum()).backward()
    with pytest.warns(UserWarning, match=r"group 0, param 0.*MixedPrecisionOptimizer"):
        scaler.step(optimizer)
    scaler.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.scale(params[0].sum()).backward()
        scaler.step(optimizer)


def test_a_wrapped_optimizer_is_not_warned_of() -> None:
    params = parameters([(3,)], torch.float16)
    optimizer, scaler = MixedPrecisionOptimizer(SGD(params, lr=0.5)), Ours("cpu", init_scale=SCALE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.scale(params[0].sum()).backward()
        scaler.step(optimizer)


def test_fp16_that_grows_too_large_in_unscaling_is_an_overflow() -> None:
    param = torch.nn.Parameter(torch.ones(2).half())
    param.grad = torch.tensor([1.0, 60000.0]).half()
    optimizer, scaler = SGD([param], lr=1.0), Ours("cpu", init_scale=0.5)
    scaler.scale(torch.ones(()))
    with pytest.warns(UserWarning, match="without FP32 masters"):
        scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    assert [(o.name, o.inf, o.nan) for o in scaler.overflow_report(optimizer)] == [("group 0, param 0", True, False)]


def test_overflow_made_by_unscaling_is_seen_in_fp32_too() -> None:
    """The product is judged. torch judges the gradient before it and steps to inf."""
    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.tensor([1e30])
    optimizer, scaler = SGD([param], lr=1.0), Ours("cpu", init_scale=2.0**-60)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    assert param.item() == 1.0


def _duplicated(dtype: torch.dtype, values: list[list[float]]) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 3]]), torch.tensor(values, dtype=dtype), (4, 2), check_invariants=True
    )


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64, torch.complex64], ids=str)
def test_sparse_gradients(dtype: torch.dtype) -> None:
    grad = _duplicated(dtype, [[1024.0, 2048.0], [1024.0, -2048.0], [512.0, 0.0]])
    param = torch.nn.Parameter(torch.zeros(4, 2, dtype=dtype))
    scaler, optimizer = _unscaled([param], [grad])
    assert param.grad.layout is torch.sparse_coo
    dense = torch.tensor([[0, 0], [2.0, 0], [0, 0], [0.5, 0]], dtype=dtype)
    assert torch.equal(param.grad.to_dense(), dense)
    assert_norm(scaler.clip_grad_norm_(optimizer, 1e9), exact_norm([dense]))
    scaler.clip_grad_norm_(optimizer, 1.0)
    assert float(exact_norm([param.grad])) == pytest.approx(1.0, rel=1e-2)
    scaler.step(optimizer)
    assert param[1, 0] != 0


def test_sparse_fp16_duplicates_are_summed_in_fp32() -> None:
    """In FP16 40000 + 40000 is inf before it is unscaled; unscaled it is 78."""
    param = torch.nn.Parameter(torch.zeros(4, 2).half())
    grad = _duplicated(torch.float16, [[40000.0, 1.0], [20000.0, 2048.0], [1.0, 1.0]])
    scaler, optimizer = _unscaled([param], [grad])
    assert param.grad.is_coalesced()
    assert torch.equal(param.grad.to_dense()[1], torch.tensor([60000.0 / SCALE, 2049.0 / SCALE]).half())
    scaler.step(optimizer)
    assert not scaler.step_was_skipped(optimizer)


def test_sparse_fp16_overflow_in_the_sum_is_found() -> None:
    param = torch.nn.Parameter(torch.zeros(4, 2).half())
    grad = _duplicated(torch.float16, [[40000.0, 1.0], [40000.0, 1.0], [1.0, 1.0]])
    scaler, optimizer = _unscaled([param], [grad])
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)


def test_embedding_with_sparse_gradients_trains_as_under_torch() -> None:
    both = []
    for cls in (Theirs, Ours):
        table = torch.nn.Embedding(6, 2, sparse=True)
        with torch.no_grad():
            table.weight.copy_(values((6, 2), 7))
        optimizer, scaler = torch.optim.SparseAdam(table.parameters(), lr=0.1), cls("cpu")
        for rows in ([1, 1, 2], [0, 5, 5], [1, 1, 1]):
            optimizer.zero_grad()
            scaler.scale(table(torch.tensor(rows)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        both.append(table.weight)
    assert_same_bits(*both)


def test_complex_training_is_unscaled_training() -> None:
    results = []
    for scaled in (False, True):
        param = torch.nn.Parameter(values((4,), 1, torch.complex64) + 1j * values((4,), 2))
        optimizer, scaler = Adam([param], lr=0.25), Ours("cpu", enabled=scaled)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((param * (2 - 3j)).abs().square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(param)
    assert_same_bits(*results)


def test_conjugated_gradients() -> None:
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    grad = (values((3,), 1, torch.complex64) + 1j * values((3,), 2)) * SCALE
    expected = grad.conj().resolve_conj() / SCALE
    _unscaled([param], [grad.conj()])
    assert_same_bits(param.grad.resolve_conj(), expected)


@pytest.mark.parametrize("kind", ["transposed", "channels_last", "slice", "requires_grad"])
def test_odd_strides_and_gradients_with_a_graph(kind: str) -> None:
    base = values((4, 3, 2, 6), 1) * SCALE
    grad = {
        "transposed": lambda: base.clone().transpose(0, 3).contiguous().transpose(0, 3),
        "channels_last": lambda: base.to(memory_format=torch.channels_last, copy=True),
        "slice": lambda: torch.zeros(4, 3, 2, 12)[..., ::2].copy_(base),
        "requires_grad": lambda: base.clone().requires_grad_() * 1.0,
    }[kind]()
    param = torch.nn.Parameter(torch.zeros(4, 3, 2, 6))
    scaler, optimizer = _unscaled([param], [grad])
    assert_same_bits(param.grad, base / SCALE)
    assert_norm(scaler.clip_grad_norm_(optimizer, 1e9), exact_norm([base / SCALE]))


def test_gradient_made_with_create_graph_can_be_unscaled() -> None:
    param = torch.nn.Parameter(torch.full((2,), 3.0))
    optimizer, scaler = SGD([param], lr=1.0), Ours("cpu", init_scale=SCALE)
    scaler.scale(param.square().sum()).backward(create_graph=True)
    scaler.step(optimizer)
    assert param.tolist() == [-3.0, -3.0]


def test_a_gradient_that_cannot_be_served_is_named_and_nothing_is_touched() -> None:
    good, bad = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.eye(2).to_sparse_csr())
    optimizer, scaler = SGD([good, bad], lr=1.0), Ours("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    good.grad = torch.ones(2)
    bad.grad = torch.eye(2).to_sparse_csr()
    with pytest.raises(TypeError, match=r"group 0, param 1.*sparse_csr"):
        scaler.unscale_(optimizer)
    assert good.grad.tolist() == [1.0, 1.0]
    bad.grad = None
    scaler.step(optimizer)  # the refused call does not count


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.10 takes no such gradient")
def test_a_dtype_without_kernels_is_named() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad_dtype = None
    optimizer, scaler = SGD([param], lr=1.0), Ours("cpu")
    scaler.scale(torch.ones(()))
    param.grad = torch.zeros(2).to(torch.float8_e5m2)
    with pytest.raises(TypeError, match=r"group 0, param 0.*float8_e5m2"):
        scaler.step(optimizer)


def test_a_group_entry_that_is_no_tensor_is_named() -> None:
    optimizer, scaler = SGD(parameters([(1,)]), lr=1.0), Ours("cpu")
    optimizer.param_groups[0]["params"].append("weight")
    scaler.scale(torch.ones(()))
    with pytest.raises(TypeError, match=r"group 0, param 1: expected a tensor, got str"):
        scaler.unscale_(optimizer)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_listed_twice_is_unscaled_once() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = SGD([param, param], lr=0.5), Ours("cpu", init_scale=SCALE)
    scaler.scale((param * 4.0).sum()).backward()
    scaler.unscale_(optimizer)
    assert param.grad.tolist() == [4.0, 4.0]


def test_gradients_are_let_go_after_the_step() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = SGD([param], lr=0.5), Ours("cpu")
    for ends_with in ("step", "update"):
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizer, 1.0)
        grad = weakref.ref(param.grad)
        if ends_with == "step":
            scaler.step(optimizer)
        else:
            scaler.update()
        optimizer.zero_grad()
        gc.collect()
        assert grad() is None, f"the gradient outlives {ends_with} and zero_grad"
        if ends_with == "step":
            scaler.update()


def test_the_scaler_keeps_no_optimizer_alive() -> None:
    scaler = Ours("cpu")
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = SGD([param], lr=0.5)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_tensor_subclasses_go_through_torchs_operations() -> None:
    """A DTensor's values are not at its own address. Here a mesh of one process."""
    from torch import distributed

    tensor = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(tensor, "Replicate"):
        pytest.skip("this torch has no public DTensor")
    Replicate, distribute_tensor = tensor.Replicate, tensor.distribute_tensor
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        weight = torch.nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
        plain = torch.nn.Parameter(torch.zeros(2))
        optimizer, scaler = SGD([weight, plain], lr=1.0, foreach=False), Ours("cpu", init_scale=SCALE)
        for factor, skipped in ((1.0, False), (float("inf"), True)):
            optimizer.zero_grad()
            weight.grad = distribute_tensor(torch.full((4,), 3.0 * SCALE * factor), mesh, [Replicate()])
            plain.grad = torch.full((2,), SCALE)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            assert scaler.step_was_skipped(optimizer) is skipped
            scaler.update()
        assert weight.full_tensor().tolist() == [-3.0] * 4
        assert plain.tolist() == [-1.0, -1.0]
    finally:
        distributed.destroy_process_group()


@pytest.mark.gpu
def test_parameters_on_several_devices() -> None:
    params = [torch.nn.Parameter(torch.zeros(3, device=device)) for device in ("cuda", "cpu")]
    optimizer, scaler = SGD(params, lr=1.0), Ours("cuda", init_scale=SCALE)
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale(params[0].sum() * 3.0).backward()
        scaler.scale(params[1].sum() * (float("inf") if bad else 4.0)).backward()
        norm = scaler.clip_grad_norm_(optimizer, 1e9)
        assert bad or float(norm) == pytest.approx(np.sqrt(3 * 9 + 3 * 16))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped(optimizer) is bad
    assert [p.tolist() for p in params] == [[-3.0] * 3, [-4.0] * 3]
