"""A GradScaler, torch's or this library's, drives the wrapper: it finds scaled FP32 gradients where it looks for them.

A GradScaler reads ``optimizer.param_groups``, unscales the ``.grad`` of what it finds there in place, and calls
``optimizer.step()`` unless one was not finite. So when gradients came by a plain backward and ``param_groups`` is read,
masters are given FP32 copies of them, still scaled. The model's 16-bit parameters share these tensors from then on, so
that clipping ``model.parameters()`` and clipping the masters are the same.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import kernels
from .accumulation import State
from .arguments import require

if TYPE_CHECKING:
    from .optimizer import MixedPrecisionOptimizer

CAN_SHARE = hasattr(Tensor, "grad_dtype")  # torch before 2.10 wants a parameter's gradient in the parameter's dtype


class Offers:
    """Which gradients of the model were given to the masters, by position: the tensor, its version, the norm then."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.norm: Tensor | None = None

    def knows(self, i: int, grad: Tensor) -> bool:
        known = self.made.get(i)
        return known is not None and known[0]() is grad and known[1] == grad._version


def offer(engine: MixedPrecisionOptimizer) -> None:
    """Give the masters FP32 copies of gradients that came without the engine. Called where ``param_groups`` is read.

    Raises:
        RuntimeError: The model's gradients were changed after the masters' were unscaled, and the two can't be shared.
    """
    steps, grads, params, offers = engine._steps, engine._grads, engine._params, engine._offers
    if steps.state is not State.READY or steps.interrupted:
        return
    pairs = [(i, params.model[i].grad, params.master[i].grad) for i in params.copied]
    fresh = [(i, g) for i, g, master in pairs if g is not None and g is not master and not offers.knows(i, g)]
    if not fresh or not grads.has_unconsumed():
        return
    shares = CAN_SHARE and _is_neutral(engine)
    if not shares and any(i in offers.made and offers.made[i][0]() is grad for i, grad in fresh):
        _check_untouched(engine)
    grads.unscale(torch.ones((), device=engine._device))
    offers.norm = None if shares else grads.norm(2.0, engine._device).clone()
    grads.reset()
    offers.made = {}
    for i in params.copied:
        model, master = params.model[i], params.master[i]
        if model.grad is not None and master.grad is not None:
            if shares:
                model.grad_dtype = None
                model.grad = master.grad
            offers.made[i] = (weakref.ref(model.grad), model.grad._version)


def _check_untouched(engine: MixedPrecisionOptimizer) -> None:
    """The same gradients were given before and were written since: by a further backward, or by a clip gone astray?"""
    values = [value for shard in engine._params.shards for value in _copied_values(engine, shard.index)]
    norm, _ = kernels.multi_tensor_l2norm(values)
    if engine._offers.norm is None or not torch.equal(norm, engine._offers.norm):
        raise RuntimeError(
            "the model's gradients were changed after unscale_(optimizer), which unscaled the FP32 masters'. Clip the "
            "parameters in optimizer.param_groups instead of model.parameters(). From torch 2.10 on both are the same."
        )


def _copied_values(engine: MixedPrecisionOptimizer, index: list[int]) -> list[Tensor | None]:
    copied = set(engine._params.copied)
    grads = [engine._params.master[i].grad if i in copied else None for i in index]
    return [g._values() if g is not None and g.layout is torch.sparse_coo else g for g in grads]


def _is_neutral(engine: MixedPrecisionOptimizer) -> bool:
    """Whether the wrapper's own loss scale is, and stays, 1, so that a GradScaler's is the only one. Syncs."""
    return not engine.scaler.dynamic and float(engine.scaler.scale) == 1.0


def take(engine: MixedPrecisionOptimizer) -> None:
    """Take gradients that came without the engine into a step: as they are, or by torch's found_inf protocol.

    Raises:
        RuntimeError: The wrapper's own scale is not a static 1.
    """
    if not _is_neutral(engine):
        raise RuntimeError(
            "gradients were found that neither opt.backward(loss) nor opt.scale_loss(loss) made, and the loss scale "
            f"is {engine.loss_scale:g}: they would be unscaled wrongly. Use opt.backward(loss); or, for a GradScaler "
            "to do the scaling, construct MixedPrecisionOptimizer without dynamic, loss_scale and scaler."
        )
    steps = engine._steps
    if engine._offers.made:
        offer(engine)
    found, grad_scale = engine.__dict__.get("found_inf"), engine.__dict__.get("grad_scale")
    _measure(engine, grad_scale)
    if found is not None:
        ours = steps.found_inf()
        flag = found.to(ours.device).reshape(()).clamp(max=1.0)
        steps.verdicts[id(engine.scaler)] = (engine.scaler, torch.maximum(ours, flag))


def _measure(engine: MixedPrecisionOptimizer, grad_scale: Tensor | None = None) -> None:
    """Check the gradients that the masters were given, and divide by ``grad_scale`` where the GradScaler did not."""
    steps = engine._steps
    steps.take_as_scaled(engine.scaler)
    pending = require(steps.pending)
    if grad_scale is not None:
        pending.inv_scale = (1.0 / grad_scale.to(pending.scale.device)).reshape(())
    if CAN_SHARE or not engine._offers.made:
        steps.unscale()
        return
    with torch.no_grad():  # the model's gradients are not the masters', which hold what the GradScaler left there
        for shard in engine._params.shards:
            values = engine._grads.values(shard)
            kernels.multi_tensor_unscale(values, values, pending.inv_scale.to(shard.device), shard.stats)
    steps.verdicts[id(engine.scaler)] = (engine.scaler, engine._grads.found_inf(engine._device))
    steps.state = State.UNSCALED


def settle(engine: MixedPrecisionOptimizer) -> None:
    """Count the step that a GradScaler did not call because the gradients that it found here were not finite.

    It tells nobody, so this is noticed when the gradients are cleared, or when somebody asks. Syncs where it is so.
    """
    offered = bool(engine._offers.made) and engine._steps.state is State.READY and not engine._steps.interrupted
    if not offered or not engine._grads.has_unconsumed() or not _is_neutral(engine):
        return
    _measure(engine)
    if bool(engine._steps.found_inf()):
        engine._finish(skipped=True)
    else:
        engine._steps.begin()


def withdraw(engine: MixedPrecisionOptimizer, set_to_none: bool) -> None:
    """Gradients are about to be cleared. Those that stay, as zeros, get their parameter's dtype again."""
    settle(engine)
    engine._offers.made = {}
    if not set_to_none:
        for i in engine._params.copied:
            model, master = engine._params.model[i], engine._params.master[i]
            if model.grad is not None and model.grad is master.grad:
                model.grad = torch.zeros_like(model)
