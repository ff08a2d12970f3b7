"""``scale_loss(loss)``: the number, and gradients that the user's own backward makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specs import BAD_LOSSES
from torch.utils._python_dispatch import TorchDispatchMode

from contract.worlds import (
    WRAPPED,
    Mode,
    World,
    every_mode_that_keeps_gradients,
    values,
)

GRADS = values(0.5, 1.0, -0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_it_is_the_loss_in_fp32_times_the_scale_with_its_graph(dtype: torch.dtype) -> None:
    world = World(WRAPPED)
    world.opt.loss_scale = 1024.0
    loss = torch.tensor(600.0, dtype=dtype, requires_grad=True)
    scaled = world.opt.scale_loss(loss)
    assert scaled.dtype == torch.float32
    assert scaled.requires_grad
    assert float(scaled) == float(loss) * 1024.0


@pytest.mark.parametrize(("make", "error", "match"), [pytest.param(*c[1:], id=c[0]) for c in BAD_LOSSES])
def test_what_is_no_loss_is_refused(make: Any, error: type[Exception], match: str) -> None:
    world = World(WRAPPED)
    loss = make(world.params[0])
    if isinstance(loss, torch.Tensor) and loss.dim():  # a vector may be reduced by the user afterwards
        assert torch.equal(world.opt.scale_loss(loss), loss * 64.0)
        return
    with pytest.raises(error, match=match):
        world.opt.scale_loss(loss)
    world.backward(GRADS)
    world.expect_step(GRADS)


class HostReads(TorchDispatchMode):
    """Counts operations that wait for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_it_does_not_wait_for_the_device() -> None:
    world = World(WRAPPED, "dynamic")
    loss = world.loss(GRADS)
    with HostReads() as seen:
        world.opt.scale_loss(loss)
    assert seen.count == 0


@every_mode_that_keeps_gradients
def test_gradients_of_an_earlier_step_may_be_cleared_after_it(mode: Mode) -> None:
    """A gradient penalty takes ``autograd.grad`` of it, before ``zero_grad()``: nothing is added to gradients there."""
    world = World(mode, "dynamic")
    world.backward(GRADS)
    world.expect_step(GRADS)
    inner = torch.ones(3, requires_grad=True)
    (found,) = torch.autograd.grad(world.opt.scale_loss(inner.square().sum()), inner)
    assert torch.equal(found, 2.0 * torch.ones(3) * world.opt.loss_scale)
    world.opt.zero_grad()
    world.backward(GRADS)
    world.expect_step(GRADS)
