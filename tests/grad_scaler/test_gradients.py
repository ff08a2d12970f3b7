"""Which gradients are unscaled and checked: dtypes, layouts, sparse and complex ones, odd strides, several devices."""

from __future__ import annotations

import gc
import pickle
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
    scaler = cls("cpu", init_scale=SCALE, **({"allow_16bit_weights": True} if cls is Ours else {}))
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


MENDED_BY = r"^Attempting to unscale FP16 gradients\..*group 0, param 0\. Write optimizer = fp16opt\.Mixed"


def _half(cls: type = SGD, scaler: object = None, **kwargs: object) -> tuple:
    """One FP16 weight with the scaled gradient 2, its optimizer and its scaler."""
    (param,) = parameters([(3,)], torch.float16)
    scaler = scaler or Ours("cpu", init_scale=SCALE)
    scaler.scale((2.0 * param).sum()).backward()
    return param, cls([param], lr=0.5, **kwargs), scaler


@pytest.mark.parametrize("call", ["step", "unscale_", "clip_grad_norm_"])
def test_fp16_weights_stepped_directly_raise_what_torch_raises_and_nothing_is_touched(call: str) -> None:
    param, optimizer, scaler = _half()
    grad, before = param.grad.clone(), param.detach().clone()
    arguments = (1.0,) if call == "clip_grad_norm_" else ()
    if call != "clip_grad_norm_":
        with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.$"):
            getattr(_half(scaler=Theirs("cpu"))[2], call)(optimizer)
    for _ in range(2):  # as often as it is called
        with pytest.raises(ValueError, match=MENDED_BY):
            getattr(scaler, call)(optimizer, *arguments)
    assert torch.equal(param.grad, grad)
    assert torch.equal(param, before)
    mended = MixedPrecisionOptimizer(optimizer)
    scaler.step(mended)  # the same iteration goes on with the line that the message gives
    scaler.update()
    assert_same_bits(next(mended.master_params()), before.float() - 1.0)


def test_fp16_among_fp32_weights_is_refused_before_any_gradient_is_written() -> None:
    params = [*parameters([(4, 2)]), *parameters([(3,)], torch.float16)]
    optimizer, scaler = SGD([{"params": params, "name": "all"}], lr=0.5), Ours("cpu", init_scale=SCALE)
    scaler.scale(params[0].sum() + params[1].float().sum()).backward()
    with pytest.raises(ValueError, match=r"group 0, param 1\. Write"):
        scaler.step(optimizer)
    assert [float(p.grad.max()) for p in params] == [SCALE, SCALE]
    params[1].grad = None
    scaler.step(optimizer)  # what was refused is not remembered
    assert float(params[0].grad.max()) == 1.0


@pytest.mark.parametrize("fused", [False, True])
def test_torch_s_fused_steps_are_refused_where_torch_refuses_them(fused: bool) -> None:
    """torch's own scaler leaves the unscaling to a fused step, and asks for no dtype then."""
    outcomes = []
    for scaler in (Theirs("cpu", init_scale=SCALE), Ours("cpu", init_scale=SCALE)):
        for explicit in (True, False):
            _, optimizer, _ = _half(Adam, scaler, fused=fused)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    if explicit:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    outcomes.append("stepped")
                except ValueError:
                    outcomes.append("refused")
    assert outcomes == ["refused", "stepped" if fused else "refused"] * 2


def test_a_closure_with_fp16_gradients_is_refused_and_undone() -> None:
    param, optimizer, scaler = _half()
    before = param.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (2.0 * param).sum()
        scaler.scale(loss).backward()
        return loss

    with pytest.raises(ValueError, match=MENDED_BY):
        scaler.step(optimizer, closure)
    assert torch.equal(param, before)


def test_allowed_16_bit_weights_are_warned_of_once_by_name() -> None:
    for dtype, allowed in ((torch.float16, True), (torch.bfloat16, True), (torch.bfloat16, False)):
        (param,) = parameters([(3,)], dtype)
        optimizer, scaler = SGD([param], lr=0.5), Ours("cpu", init_scale=SCALE, allow_16bit_weights=allowed)
        scaler.scale(param.sum()).backward()
        before = param.detach().clone()
        with pytest.warns(UserWarning, match=r"group 0, param 0.*MixedPrecisionOptimizer"):
            scaler.step(optimizer)
        assert torch.equal(param, before - 0.5)
        scaler.update()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.scale(param.sum()).backward()
            scaler.step(optimizer)


def test_allow_16bit_weights_is_a_bool_and_travels_in_copies_and_not_in_checkpoints() -> None:
    with pytest.raises(TypeError, match="allow_16bit_weights: expected True or False, got int"):
        Ours("cpu", allow_16bit_weights=1)
    allowed = Ours("cpu", init_scale=SCALE, allow_16bit_weights=True)
    _, optimizer, copied = _half(scaler=pickle.loads(pickle.dumps(allowed)))
    with pytest.warns(UserWarning, match="without FP32 masters"):
        copied.step(optimizer)
    plain = Ours("cpu")
    plain.load_state_dict(allowed.state_dict())  # the code says it, not the file
    _, optimizer, _ = _half(scaler=plain)
    with pytest.raises(ValueError, match=MENDED_BY):
        plain.step(optimizer)


def test_fp16_that_grows_too_large_in_unscaling_is_an_overflow() -> None:
    param = torch.nn.Parameter(torch.ones(2).half())
    param.grad = torch.tensor([1.0, 60000.0]).half()
    optimizer, scaler = SGD([param], lr=1.0), Ours("cpu", init_scale=0.5, allow_16bit_weights=True)
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


@pytest.mark.parametrize(("second", "skipped"), [(20000.0, False), (40000.0, True)])
def test_sparse_fp16_duplicates_are_summed_in_fp32(second: float, skipped: bool) -> None:
    """40000 + 20000 is no FP16 number when scaled; 40000 + 40000 is none after it either."""
    param = torch.nn.Parameter(torch.zeros(4, 2).half())
    grad = _duplicated(torch.float16, [[40000.0, 1.0], [second, 2048.0], [1.0, 1.0]])
    scaler, optimizer = _unscaled([param], [grad])
    if not skipped:
        assert param.grad.is_coalesced()
        assert torch.equal(param.grad.to_dense()[1], torch.tensor([60000.0 / SCALE, 2049.0 / SCALE]).half())
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer) is skipped


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


@pytest.mark.card
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
