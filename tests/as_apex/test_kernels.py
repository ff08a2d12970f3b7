"""amp_C: apex's argument orders, values and flags, against numpy and plain Python."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp16opt.apex import multi_tensor as amp_C
from fp16opt.apex.multi_tensor import MultiTensorApply, multi_tensor_applier

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (7777, 555, 33, 1, 0, 2048 + 1)


def flag() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def filled(dtype: torch.dtype, value: float = 0.0, count: int = 12) -> list[Tensor]:
    return [torch.full((SIZES[i % len(SIZES)],), value, dtype=dtype) for i in range(count)]


def random(dtype: torch.dtype, seed: int = 0, count: int = 12) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    shapes = [SIZES[i % len(SIZES)] for i in range(count)]
    return [torch.from_numpy(rng.normal(size=n).astype(np.float32)).to(dtype) for n in shapes]


def array(x: Tensor) -> np.ndarray[Any, Any]:
    return x.float().numpy().astype(np.float32)


# -- scale -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_type", "out_type"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("inplace", [False, True])
def test_scale_values_and_flag(in_type: torch.dtype, out_type: torch.dtype, inplace: bool) -> None:
    if inplace and in_type != out_type:
        pytest.skip("in place means one dtype")
    ins = random(in_type)
    outs = ins if inplace else filled(out_type)
    want = [torch.from_numpy(array(x) * np.float32(0.3)).to(out_type) for x in ins]
    found = flag()
    multi_tensor_applier(amp_C.multi_tensor_scale, found, [ins, outs], 0.3)
    for out, expected in zip(outs, want, strict=True):
        assert torch.equal(out, expected)
    assert found.item() == 0


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("place", [(0, 0), (0, -1), (3, 0), (11, -1)])
@pytest.mark.parametrize("out_type", [torch.float32, torch.float16])
def test_scale_finds_planted_values_and_writes_anyway(
    value: float, place: tuple[int, int], out_type: torch.dtype
) -> None:
    ins, outs = filled(torch.float16, 2.0), filled(out_type, 7.0)
    ins[place[0]][place[1]] = value
    found = flag()
    amp_C.multi_tensor_scale(333, found, [ins, outs], 0.25)
    assert found.item() == 1
    assert not torch.isfinite(outs[place[0]][place[1]])
    assert all((out == 0.5).sum() >= out.numel() - 1 for out in outs)


def test_scale_looks_at_the_input_and_only_raises_the_flag() -> None:
    found = flag()
    amp_C.multi_tensor_scale(1, found, [[torch.tensor([3e38])], [torch.zeros(1)]], 8.0)
    assert found.item() == 0, "the product overflows, the input is finite"
    amp_C.multi_tensor_scale(1, found, [[torch.tensor([math.inf])], [torch.zeros(1)]], 0.0)
    assert found.item() == 1, "inf * 0 is nan, and the input is not finite"
    amp_C.multi_tensor_scale(1, found, [[torch.ones(1)], [torch.zeros(1)]], 1.0)
    assert found.item() == 1, "never cleared"


def test_channels_last_and_other_shapes_of_one_size() -> None:
    """apex scrambled mixed memory formats (quirk 47)."""
    x = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    out = torch.zeros(1, 2, 3, 4)
    amp_C.multi_tensor_scale(65536, flag(), [[x], [out]], 2.0)
    assert torch.equal(out, torch.arange(24.0).view(1, 2, 3, 4) * 2)
    flat = torch.zeros(24)
    amp_C.multi_tensor_axpby(65536, flag(), [[x], [out], [flat]], 1.0, 1.0, -1)
    assert torch.equal(flat, torch.arange(24.0) * 3)
    assert amp_C.multi_tensor_l2norm(1, flag(), [[x]])[0].item() == pytest.approx(
        math.sqrt(sum(i * i for i in range(24)))
    )


def test_a_trailing_empty_tensor_changes_nothing() -> None:
    """apex dropped the last launch (quirk 47)."""
    xs = [torch.ones(5), torch.ones(0)]
    amp_C.multi_tensor_scale(65536, flag(), [xs, xs], 3.0)
    assert xs[0].tolist() == [3.0] * 5


def test_writes_move_version_counters() -> None:
    """apex's kernels did not, so autograd used overwritten values silently (quirk 47)."""
    x = torch.ones(3, requires_grad=True)
    y = x.detach() * 2
    square = (y.requires_grad_() * y).sum()
    amp_C.multi_tensor_scale(1, flag(), [[y.detach()], [y.detach()]], 5.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


# -- axpby and norms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("x_type", "y_type", "out_type"), list(itertools.product(DTYPES[:2], repeat=3)))
def test_axpby_values(x_type: torch.dtype, y_type: torch.dtype, out_type: torch.dtype) -> None:
    xs, ys, outs = random(x_type, 1), random(y_type, 2), filled(out_type)
    found = flag()
    multi_tensor_applier(amp_C.multi_tensor_axpby, found, [xs, ys, outs], 2.0, -0.3, -1)
    for x, y, out in zip(xs, ys, outs, strict=True):
        want = np.float32(2.0) * array(x) + np.float32(-0.3) * array(y)
        assert torch.equal(out, torch.from_numpy(want.astype(np.float32)).to(out_type))
    assert found.item() == 0


@pytest.mark.parametrize("argument", [-1, 0, 1])
@pytest.mark.parametrize("bad", ["x", "y"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_axpby_looks_where_it_is_told(argument: int, bad: str, value: float) -> None:
    lists = {"x": filled(torch.float16, 1.0), "y": filled(torch.float32, 1.0)}
    lists[bad][5][2000] = value
    found = flag()
    amp_C.multi_tensor_axpby(65536, found, [lists["x"], lists["y"], filled(torch.float32)], 1.0, 1.0, argument)
    assert found.item() == int(argument == -1 or argument == "xy".index(bad))


@pytest.mark.parametrize("count", [2, 110])
@pytest.mark.parametrize("chunk", [333, 2048, 65536])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(count: int, chunk: int, dtype: torch.dtype) -> None:
    tensors = random(dtype, 3, count)
    each = [math.sqrt(float((array(t).astype(np.float64) ** 2).sum())) for t in tensors]
    total = math.sqrt(math.fsum(n * n for n in each))
    norm, norms = MultiTensorApply(chunk)(amp_C.multi_tensor_l2norm, flag(), [tensors], True)
    assert (norm.shape, norm.dtype, norms.shape, norms.dtype) == ((1,), torch.float32, (count,), torch.float32)
    # the sums are in double: one rounding to float32 is left
    assert norm.item() == pytest.approx(total, rel=6e-8)
    np.testing.assert_allclose(norms.numpy(), np.array(each), rtol=6e-8)
    before = [t.clone() for t in tensors]
    norm, norms = amp_C.multi_tensor_unscale_l2norm(chunk, flag(), [tensors], torch.tensor([0.125]), True)
    assert norm.item() == pytest.approx(total / 8, rel=6e-8)
    np.testing.assert_allclose(norms.numpy(), np.array(each) / 8, rtol=6e-8)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    norm, norms = amp_C.multi_tensor_l2norm(chunk, flag(), [tensors])
    assert norms.numel() == 0


# -- the scale -------------------------------------------------------------------------------------------------------


class PlainHysteresis:
    """The rule in plain numbers."""

    def __init__(self, scale: float, growth: float, backoff: float, interval: int, hysteresis: int) -> None:
        self.scale, self.growth, self.backoff = scale, growth, backoff
        self.interval, self.hysteresis = interval, hysteresis
        self.clean, self.left = 0, hysteresis

    def update(self, bad: bool) -> None:
        if bad:
            self.left -= 1
            self.clean = 0
            if self.left <= 0:
                self.scale = float(np.float32(self.scale) * np.float32(self.backoff))
            return
        self.left = self.hysteresis
        self.clean += 1
        if self.clean == self.interval:
            grown = self.scale * self.growth
            self.scale = grown if grown < 2.0**128 else self.scale
            self.clean = 0


@pytest.mark.parametrize("init", [1.0, 2.0**16, 2.0**127])
@pytest.mark.parametrize("growth", [2.0, 4.0])
@pytest.mark.parametrize("backoff", [0.5, 0.25])
@pytest.mark.parametrize("interval", [10, 100])
@pytest.mark.parametrize("hysteresis", [1, 2, 4])
def test_update_scale_hysteresis(init: float, growth: float, backoff: float, interval: int, hysteresis: int) -> None:
    """72 settings, 400 random steps each."""
    plain = PlainHysteresis(init, growth, backoff, interval, hysteresis)
    scale, found = torch.tensor([init]), torch.zeros(1)
    clean, left = torch.zeros(1, dtype=torch.int32), torch.full((1,), hysteresis, dtype=torch.int32)
    rng = np.random.default_rng(int(interval + hysteresis))
    for step in range(400):
        bad = bool(rng.random() < (0.02 if step < 200 else 0.3))
        found.fill_(float(bad))
        out = amp_C.update_scale_hysteresis(scale, clean, left, found, growth, backoff, interval, hysteresis)
        plain.update(bad)
        assert out is scale
        assert (scale.item(), clean.item(), left.item()) == (plain.scale, plain.clean, plain.left), step


# -- steps -----------------------------------------------------------------------------------------------------------


def test_adam_step_and_a_flag_that_is_set() -> None:
    for mode, cls in ((0, torch.optim.Adam), (1, torch.optim.AdamW)):
        params, grads = random(torch.float32, 4), random(torch.float32, 5)
        twins = [torch.nn.Parameter(p.clone()) for p in params]
        optimizer = cls(twins, lr=0.1, weight_decay=0.1, fused=True)
        moments, squares = filled(torch.float32), filled(torch.float32)
        for step in (1, 2, 3):
            for twin, grad in zip(twins, grads, strict=True):
                twin.grad = grad.clone()
            optimizer.step()
            lists = [grads, params, moments, squares]
            amp_C.multi_tensor_adam(65536, flag(), lists, 0.1, 0.9, 0.999, 1e-8, step, mode, 1, 0.1)
        for param, twin in zip(params, twins, strict=True):
            assert torch.equal(param, twin)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_steps_with_a_half_copy(nesterov: bool) -> None:
    params, grads = random(torch.float32, 6), random(torch.float16, 7)
    twins = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = torch.optim.SGD(twins, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
    buffers, copies = filled(torch.float32), filled(torch.float16)
    for first in (True, False, False):
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad.float() * 0.5
        optimizer.step()
        lists = [grads, params, buffers, copies]
        amp_C.multi_tensor_sgd(65536, flag(), lists, 0.01, 0.9, 0.0, 0.1, nesterov, first, False, 0.5)
    for param, twin, buffer, copy in zip(params, twins, buffers, copies, strict=True):
        torch.testing.assert_close(param, twin.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(copy, param.half())
        torch.testing.assert_close(buffer, optimizer.state[twin]["momentum_buffer"], rtol=1e-6, atol=1e-7)
    before = [p.clone() for p in params]
    set_flag = flag() + 1
    amp_C.multi_tensor_sgd(1, set_flag.int(), [grads, params, buffers], 0.0, 0.9, 0.0, 0.1, False, False, False, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True)), "a set flag means: do nothing"


def test_half_params_are_stepped_in_fp32() -> None:
    param, grad = torch.ones(4).half(), torch.full((4,), 1e-4).half()
    m, v = torch.zeros(4), torch.zeros(4)
    amp_C.multi_tensor_adam(1, flag(), [[grad], [param], [m], [v]], 2.0**-9, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    assert param.tolist() == [1.0 - 2.0**-9] * 4
    assert m[0].item() == pytest.approx(1e-5, rel=1e-3)
    amp_C.multi_tensor_sgd(1, flag(), [[grad], [param], [torch.zeros(4).half()]], 0.0, 0.5, 0, 100.0, False, True, True)
    assert param[0].item() == pytest.approx(1.0 - 2.0**-9 - 1e-2, abs=2.0**-11)


def test_lamb_is_the_optimizers_own_step_and_leaves_gradients() -> None:
    """apex wrote the update over the gradients (quirk 45)."""
    from fp16opt.optimizers import FusedLAMB

    params, grads = random(torch.float32, 8), random(torch.float32, 9)
    twins = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = FusedLAMB(twins, lr=0.1)
    moments, squares = filled(torch.float32), filled(torch.float32)
    given = [g.clone() for g in grads]
    for step in (1, 2):
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad
        optimizer.step()
        norm, _ = amp_C.multi_tensor_l2norm(65536, flag(), [grads])
        lists = [grads, params, moments, squares]
        args = (0.1, 0.9, 0.999, 1e-6, step, 1, 0.01, 1, 1, norm, 1.0, False)
        multi_tensor_applier(amp_C.multi_tensor_lamb, flag(), lists, *args)
    for param, twin, grad, before in zip(params, twins, grads, given, strict=True):
        torch.testing.assert_close(param, twin.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(grad, before)


# -- the rest --------------------------------------------------------------------------------------------------------


def test_applier_and_flatten() -> None:
    assert multi_tensor_applier.available
    assert multi_tensor_applier.chunk_size == 65536
    multi_tensor_applier.check_avail()
    tensors = [torch.ones(2, 2), torch.zeros(3)]
    flat = amp_C.flatten(tensors)
    assert flat.tolist() == [1.0] * 4 + [0.0] * 3
    assert [t.shape for t in amp_C.unflatten(flat, tensors)] == [t.shape for t in tensors]


BAD = [
    (amp_C.multi_tensor_scale, [[torch.ones(1)]], (1.0,), "multi_tensor_scale: expected 2 lists of tensors, got 1"),
    (
        amp_C.multi_tensor_scale,
        [[], []],
        (1.0,),
        r"expected lists of one length that are not empty, got lengths \[0, 0\]",
    ),
    (amp_C.multi_tensor_scale, [[torch.ones(1)], []], (1.0,), r"got lengths \[1, 0\]"),
    (
        amp_C.multi_tensor_axpby,
        [[torch.ones(1)], [torch.ones(2)], [torch.ones(1)]],
        (1.0, 1.0, -1),
        r"multi_tensor_axpby: expected tensors of one size side by side, got \[1, 2, 1\] elements",
    ),
    (amp_C.multi_tensor_axpby, [[torch.ones(1)]] * 3, (1.0, 1.0, 2), "expected arg_to_check -1, 0 or 1, got 2"),
    (amp_C.multi_tensor_sgd, [[torch.ones(1)]] * 2, (0, 0, 0, 0.1, False, True, False), "expected 3 or 4 lists"),
]


@pytest.mark.parametrize(("op", "lists", "arguments", "message"), BAD)
def test_bad_lists_are_refused(op: Any, lists: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op(65536, flag(), lists, *arguments)
