"""model.to(...), p.data = ..., replaced parameter objects: handled, or refused by name; never a dead copy trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from engine.checks import array, assert_model_is_rounded_masters, assert_same_bits, by_step, linear_loss, one_step
from fp16opt import MixedPrecisionOptimizer

pytestmark = by_step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(4, dtype=torch.float16))
        self.second = nn.Parameter(torch.ones(2, 3, dtype=torch.float16))


def _made() -> tuple[Net, MixedPrecisionOptimizer]:
    net = Net()
    opt = MixedPrecisionOptimizer(
        SGD(net.parameters(), lr=0.5), loss_scale=4.0, named_parameters=net.named_parameters()
    )
    return net, opt


def _step(net: Net, opt: MixedPrecisionOptimizer) -> None:
    one_step(opt, list(net.parameters()), [1.0, 1.0])


@pytest.mark.parametrize("call", ["step", "state_dict", "fp32_state_dict", "refresh_masters"])
def test_param_data_of_another_shape_is_refused_by_name(call: str) -> None:
    net, opt = _made()
    first, second = opt.master_params()
    net.second.data = torch.ones(3, 2, dtype=torch.float16)
    calls = {
        "step": lambda: _step(net, opt),
        "state_dict": opt.state_dict,
        "fp32_state_dict": lambda: opt.fp32_state_dict(net),
        "refresh_masters": opt.refresh_masters,
    }
    with pytest.raises((RuntimeError, ValueError), match="second"):
        calls[call]()
    assert_same_bits(first, torch.ones(4))
    assert_same_bits(second, torch.ones(2, 3))
    assert_same_bits(net.first, array([1.0] * 4))


@pytest.mark.parametrize("layout", ["same", "transposed", "offset", "strided"])
def test_param_data_of_the_same_shape_in_other_memory_is_trained(layout: str) -> None:
    net, opt = _made()
    _step(net, opt)
    new = {
        "same": torch.full((2, 3), 2.0, dtype=torch.float16),
        "transposed": torch.full((3, 2), 2.0, dtype=torch.float16).t(),
        "offset": torch.full((7,), 2.0, dtype=torch.float16)[1:].view(2, 3),
        "strided": torch.full((2, 6), 2.0, dtype=torch.float16)[:, ::2],
    }[layout]
    net.second.data = new
    _step(net, opt)
    assert_same_bits(net.second, torch.full((2, 3), 1.5).half())
    assert net.second.data_ptr() == new.data_ptr()
    assert_model_is_rounded_masters(opt)
    _step(net, opt)
    assert_same_bits(net.second, torch.full((2, 3), 1.0).half())


def test_a_replaced_parameter_object_is_noticed_in_the_export() -> None:
    """opt holds the old object, the model computes with a new one: saving must not pass the dead copy off
    as it."""
    net, opt = _made()
    _step(net, opt)
    net.first = nn.Parameter(torch.full((4,), 3.0, dtype=torch.float16))
    try:
        out = opt.fp32_state_dict(net)
    except (RuntimeError, ValueError) as err:
        assert "first" in str(err)  # noqa: PT017
        return
    assert_same_bits(out["first"].detach().float(), torch.full((4,), 3.0))


def test_a_replaced_parameter_object_is_never_trained_silently(caplog: pytest.LogCaptureFixture) -> None:
    """The dead copy gets no gradient. Where every param was replaced, step finds gradients nowhere and
    says so, or
    leaves all as it is; a dead copy must never move."""
    net, opt = _made()
    old = net.first
    net.first = nn.Parameter(torch.full((4,), 3.0, dtype=torch.float16))
    _step(net, opt)
    assert_same_bits(old, array([1.0] * 4))
    assert_same_bits(net.second, torch.full((2, 3), 0.5).half())
    assert_same_bits(net.first, array([3.0] * 4))


class Rebinding(SGD):
    """Gives parameters other memory in its step, as SAM does on its way back; evaluates the closure if there is one."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad
        return loss


@pytest.mark.parametrize(
    ("dtype", "masters"),
    [
        (torch.float16, "full"),
        (torch.bfloat16, "none"),
        (torch.float32, "full"),
        (torch.float64, "full"),
    ],
    ids=str,
)
@pytest.mark.parametrize("closure", ["once", "reevaluate"])
def test_memory_that_a_step_gives_parameters_reaches_the_weights(
    dtype: torch.dtype, masters: Any, closure: Any
) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    at = weight.data_ptr()
    opt = MixedPrecisionOptimizer(Rebinding([weight], lr=0.25), loss_scale=4.0, master_weights=masters, closure=closure)

    def evaluate() -> torch.Tensor:
        opt.zero_grad()
        loss = linear_loss([weight], [1.0])
        opt.backward(loss)
        return loss

    for left in (0.75, 0.5):
        if closure == "once":
            evaluate()
            opt.step()
        else:
            opt.step(evaluate)
        assert weight.tolist() == [left] * 4
        assert next(opt.master_params()).tolist() == [left] * 4
    assert weight.data_ptr() == at


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_weight_whose_storage_was_freed_is_named_before_it_is_read(dtype: torch.dtype) -> None:
    """torch's own Adam ends the process there."""
    weight = torch.nn.Parameter(torch.ones(8, 8, dtype=dtype))
    opt = MixedPrecisionOptimizer(torch.optim.Adam([weight], lr=0.5), loss_scale=4.0, named_parameters=[("w", weight)])
    one_step(opt, [weight], [1.0])
    kept, size = weight.detach().clone(), weight.untyped_storage().nbytes()
    opt.zero_grad()
    opt.backward(weight.float().sum())
    weight.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'w' has no memory: its storage was resized to 0. Give it its memory"):
            opt.step()
    weight.untyped_storage().resize_(size)
    weight.data.copy_(kept)
    opt.step()
    assert bool((weight < kept).all())
