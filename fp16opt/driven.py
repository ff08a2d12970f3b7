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
    """Which gradients of the model were given to the masters, by position: the tensor, its version, the norm then.

    Attributes:
        taken: The same for the gradients that were unscaled into the step in hand before ``step`` was called.
        are_logged: Whether the GradScaler that drives is one that logs its skips.
    """

    def __init__(self) -> None:
        self.made: _Seen = {}
        self.taken: _Seen = {}
        self.norm: Tensor | None = None
        self.are_logged = False


_Seen = dict[int, tuple[weakref.ref[Tensor], int]]


def _is_among(seen: _Seen, i: int, grad: Tensor, any_version: bool = False) -> bool:
    known = seen.get(i)
    return known is not None and known[0]() is grad and (any_version or known[1] == grad._version)


def offer(engine: MixedPrecisionOptimizer) -> None:
    """Give the masters FP32 copies of gradients that came without the engine. Called where ``param_groups`` is read.

    Raises:
        RuntimeError: The model's gradients were changed after the masters' were unscaled, and the two can't be shared.
    """
    steps, grads, params, offers = engine._steps, engine._grads, engine._params, engine._offers
    if _is_taken(engine) and (renewed := _renewed(engine)):
        _close(engine, renewed)
    if steps.state is not State.READY or steps.interrupted:
        return
    if not params.copied:
        offers.made = _seen(engine, params.own) if grads.has_unconsumed() else {}
        return
    pairs = [(i, params.model[i].grad, params.master[i].grad) for i in params.copied]
    fresh = [(i, g) for i, g, master in pairs if g is not None and g is not master and not _is_among(offers.made, i, g)]
    if not fresh or not grads.has_unconsumed():
        return
    shares = CAN_SHARE and _is_neutral(engine)
    if not shares and any(i in offers.made and offers.made[i][0]() is grad for i, grad in fresh):
        _check_untouched(engine)
    grads.unscale(torch.ones((), device=engine._device))
    offers.norm = None if shares else grads.norm(2.0, engine._device).clone()
    grads.reset()
    given = [i for i in params.copied if params.model[i].grad is not None and params.master[i].grad is not None]
    for i in given if shares else ():
        params.model[i].grad_dtype = None
        params.model[i].grad = params.master[i].grad
    offers.made = _seen(engine, given)


def _seen(engine: MixedPrecisionOptimizer, index: list[int]) -> _Seen:
    """The model's gradients as they are now."""
    grads = [(i, engine._params.model[i].grad) for i in index]
    return {i: (weakref.ref(grad), grad._version) for i, grad in grads if grad is not None}


def _is_taken(engine: MixedPrecisionOptimizer) -> bool:
    """Whether a clip, or somebody else, unscaled gradients that came without the engine, and no step followed yet.

    A GradScaler does not call ``step`` where they are not finite.
    """
    steps = engine._steps
    pending = steps.pending
    return steps.state is State.UNSCALED and pending is not None and pending.driven and _is_neutral(engine)


def _renewed(engine: MixedPrecisionOptimizer) -> list[Tensor]:
    """Gradients of the model that came, or were added to, since others were taken.

    A clip writes the gradients of parameters that are their own masters, so of these only another tensor counts; but
    where there are no others nothing is lost by taking them once more.
    """
    params, taken, found = engine._params, engine._offers.taken, []
    for i, (model, master) in enumerate(zip(params.model, params.master, strict=True)):
        grad, is_own = model.grad, model is master
        if grad is None or (grad is master.grad and not is_own):
            continue
        if not _is_among(taken, i, grad, any_version=is_own and bool(params.copied)):
            found.append(grad)
    return found


def _close(engine: MixedPrecisionOptimizer, renewed: list[Tensor]) -> None:
    """The step in hand was never called and other gradients are here: count it if it was skipped, and begin anew."""
    if bool(engine._steps.found_inf()):
        _count_skip(engine)
    else:
        engine._steps.begin()
    for grad in renewed:
        grad.__dict__.pop("_fp16opt_consumed", None)


def _count_skip(engine: MixedPrecisionOptimizer) -> None:
    log = engine._outcomes.log
    log.elsewhere = engine._offers.are_logged
    try:
        engine._finish(skipped=True)
    finally:
        log.elsewhere = None


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
    found, grad_scale = engine.__dict__.get("found_inf"), engine.__dict__.get("grad_scale")
    measure(engine, grad_scale)
    if found is not None:
        ours = steps.found_inf()
        flag = found.to(ours.device).reshape(()).clamp(max=1.0)
        steps.verdicts[id(engine.scaler)] = (engine.scaler, torch.maximum(ours, flag))


def measure(engine: MixedPrecisionOptimizer, grad_scale: Tensor | None = None) -> None:
    """Take gradients that came without the engine as made with its present scale, and say so. No host sync.

    Args:
        grad_scale: What they are divided by, where the GradScaler did not.
    """
    if engine._offers.made:
        offer(engine)
    _measure(engine, grad_scale)
    require(engine._steps.pending).driven = True
    engine._offers.taken = _seen(engine, list(range(len(engine._params))))


def _measure(engine: MixedPrecisionOptimizer, grad_scale: Tensor | None = None) -> None:
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
    if engine._offers.made and _is_taken(engine):
        if bool(engine._steps.found_inf()):
            _count_skip(engine)
        return
    offered = bool(engine._offers.made) and engine._steps.state is State.READY and not engine._steps.interrupted
    if not offered or not engine._grads.has_unconsumed() or not _is_neutral(engine):
        return
    _measure(engine)
    if bool(engine._steps.found_inf()):
        _count_skip(engine)
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
