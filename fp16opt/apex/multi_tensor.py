"""amp_C, apex_C and apex.multi_tensor_apply: apex's argument orders in front of this engine's kernels.

Each ``multi_tensor_*`` function takes ``(chunk_size, flag, lists, ...)``. ``chunk_size`` is not needed: the kernels
have a chunk of their own. ``flag``, int32 with one element, is only ever set to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

from .. import kernels
from ..optimizers.adam import adam_update
from ..optimizers.lamb import clip_divisor, lamb_update
from ..optimizers.sgd import sgd_update

__all__ = [
    "MultiTensorApply",
    "flatten",
    "multi_tensor_adam",
    "multi_tensor_applier",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_lamb",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "unflatten",
    "update_scale_hysteresis",
]

Lists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """Calls an operation of amp_C's with a chunk size.

    Args:
        chunk_size: Passed on, and not needed by the kernels here.

    Example:
        >>> flag, x = torch.zeros(1, dtype=torch.int32), [torch.ones(2)]
        >>> multi_tensor_applier(multi_tensor_scale, flag, [x, x], 0.5)
        >>> x
        [tensor([0.5000, 0.5000])]
    """

    available: ClassVar[bool] = True
    warned: ClassVar[bool] = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """The operations are always there."""

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Lists, *args: Any) -> Any:
        """``op`` of the lists and what stands behind them."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def _take(name: str, lists: Lists, *counts: int) -> list[list[Tensor]]:
    """The lists, checked for their number and length."""
    if len(lists) not in counts:
        raise ValueError(f"{name}: expected {' or '.join(map(str, counts))} lists of tensors, got {len(lists)}.")
    lengths = [len(tensors) for tensors in lists]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(f"{name}: expected lists of one length that are not empty, got lengths {lengths}.")
    for tensors in zip(*lists, strict=True):
        if len({tensor.numel() for tensor in tensors}) != 1:
            sizes = [tensor.numel() for tensor in tensors]
            raise ValueError(f"{name}: expected tensors of one size side by side, got {sizes} elements.")
    return [list(tensors) for tensors in lists]


def _shaped(tensors: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Tensors of equal size in the shapes of others: in apex only the number of elements counts."""
    return [x if x.shape == out.shape else x.reshape(out.shape) for x, out in zip(tensors, like, strict=True)]


def _raise_flag(flag: Tensor, found: Tensor) -> None:
    flag.masked_fill_((found > 0).to(flag.device), 1)


def multi_tensor_scale(chunk_size: int, flag: Tensor, lists: Lists, scale: float) -> None:
    """``out = in * scale`` in FP32 for lists ``[ins, outs]``; the flag is set where an input is not finite.

    Dtypes may be mixed, and outs may be ins. No host sync.
    """
    ins, outs = _take("multi_tensor_scale", lists, 2)
    with torch.no_grad():
        device = ins[0].device
        factor = torch.tensor(float(scale), dtype=torch.float32, device=device)
        wide = [out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32) for out in outs]
        stats = kernels.GradStats.allocate(len(ins), device)
        sources = _shaped(ins, outs)
        # Looked at before the pass, which may overwrite them; a product may overflow where its input is finite.
        finite = torch.stack([torch.isfinite(x).all() for x in sources]).all()
        kernels.multi_tensor_unscale(sources, wide, factor, stats)
        for out, value in zip(outs, wide, strict=True):
            if out is not value:
                out.copy_(value)
        _raise_flag(flag, (~finite).float())


def multi_tensor_axpby(chunk_size: int, flag: Tensor, lists: Lists, a: float, b: float, arg_to_check: int = -1) -> None:
    """``out = a*x + b*y`` in FP32 for lists ``[xs, ys, outs]``.

    Args:
        arg_to_check: Which inputs set the flag where they are not finite: -1 both, 0 x, 1 y.
    """
    xs, ys, outs = _take("multi_tensor_axpby", lists, 3)
    checks: dict[int, Any] = {-1: "both", 0: "x", 1: "y"}
    if arg_to_check not in checks:
        raise ValueError(f"multi_tensor_axpby: expected arg_to_check -1, 0 or 1, got {arg_to_check!r}.")
    found = torch.zeros((), dtype=torch.float32, device=outs[0].device)
    xs, ys = _shaped(xs, outs), _shaped(ys, outs)
    kernels.multi_tensor_axpby(float(a), xs, float(b), ys, outs, found_inf=found, check=checks[arg_to_check])
    _raise_flag(flag, found)


def multi_tensor_l2norm(
    chunk_size: int, flag: Tensor, lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """The 2-norm over the one list: (FP32 [1], of each tensor FP32 [n], or empty unless ``per_tensor``)."""
    (tensors,) = _take("multi_tensor_l2norm", lists, 1)
    return _norms(tensors, None, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int, flag: Tensor, lists: Lists, inv_scale: Tensor, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """As :func:`multi_tensor_l2norm`, of the tensors times ``inv_scale`` (one element). Writes none of them."""
    (tensors,) = _take("multi_tensor_unscale_l2norm", lists, 1)
    return _norms(tensors, inv_scale, per_tensor)


def _norms(tensors: list[Tensor], factor: Tensor | None, per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    total, each = kernels.multi_tensor_l2norm(tensors)
    if factor is not None:
        total, each = total * factor.reshape(()).abs(), each * factor.reshape(()).abs()
    return total.float().reshape(1), each.float() if per_tensor else each.new_empty(0, dtype=torch.float32)


def multi_tensor_adam(
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of Adam (``mode`` 0) or AdamW (1) for lists ``[grads, params, exp_avgs, exp_avg_sqs]``.

    Args:
        step: Which step this is, from 1.
        bias_correction: 0 leaves it out.
    """
    with torch.no_grad():
        grads, params, exp_avgs, exp_avg_sqs = _take("multi_tensor_adam", lists, 4)
        wide = _Wide(params, exp_avgs, exp_avg_sqs)
        values, firsts, seconds = wide.columns
        adam_update(
            values,
            _like(grads, values),
            firsts,
            seconds,
            [torch.full((), float(step - 1), dtype=torch.float32, device=value.device) for value in values],
            lr=lr,
            betas=(beta1, beta2),
            eps=eps,
            weight_decay=weight_decay,
            decoupled=mode == 1,
            bias_correction=bool(bias_correction),
        )
        wide.write_back()


def multi_tensor_sgd(
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
) -> None:
    """One step of SGD for lists ``[grads, params, momentum_buffers]`` and, as a fourth, 16-bit copies to write.

    Does nothing where the flag is set, which syncs with the device.

    Args:
        first_run: The buffers hold nothing yet.
        scale: Multiplies the gradients.
    """
    with torch.no_grad():
        grads, params, buffers, *copies = _take("multi_tensor_sgd", lists, 3, 4)
        if bool(flag.any()):
            return
        wide = _Wide(params, buffers)
        values, moments = wide.columns
        gradients = _like(grads, values)
        if scale != 1.0:
            gradients = [grad * scale for grad in gradients]
        made: list[Tensor | None] = [None] * len(values) if first_run else list(moments)
        sgd_update(
            values,
            gradients,
            made,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=wd,
            nesterov=nesterov,
            wd_after_momentum=wd_after_momentum,
        )
        for moment, new in zip(moments, made, strict=True):
            if new is not None and new is not moment:
                moment.copy_(new)
        wide.write_back()
        for copy, param in zip(copies[0] if copies else [], params, strict=False):
            copy.copy_(param)


def multi_tensor_lamb(
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = False,
) -> None:
    """One step of LAMB for lists ``[grads, params, exp_avgs, exp_avg_sqs]``; gradients are left as they are.

    Args:
        step: Which step this is, from 1.
        mode: 0 adds weight decay to the gradient, 1 to the update.
        global_grad_norm: One element: the norm over all gradients. Over ``max_grad_norm`` they are divided.
    """
    with torch.no_grad():
        grads, params, exp_avgs, exp_avg_sqs = _take("multi_tensor_lamb", lists, 4)
        wide = _Wide(params, exp_avgs, exp_avg_sqs)
        values, firsts, seconds = wide.columns
        lamb_update(
            values,
            _like(grads, values),
            firsts,
            seconds,
            [step] * len(values),
            lr=lr,
            betas=(beta1, beta2),
            eps=eps,
            weight_decay=weight_decay,
            decoupled=mode == 1,
            bias_correction=bool(bias_correction),
            grad_averaging=bool(grad_averaging),
            divisor=clip_divisor(global_grad_norm.reshape(()), max_grad_norm),
            use_nvlamb=bool(use_nvlamb),
        )
        wide.write_back()


class _Wide:
    """Columns of tensors with FP32 stand-ins for the 16-bit ones."""

    def __init__(self, *columns: list[Tensor]) -> None:
        self.narrow = columns
        self.columns = [[t.float() if t.element_size() < 4 else t for t in column] for column in columns]

    def write_back(self) -> None:
        for narrow, wide in zip(self.narrow, self.columns, strict=True):
            for target, value in zip(narrow, wide, strict=True):
                if target is not value:
                    target.copy_(value)


def _like(grads: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    """Gradients in the dtype and the strides of what they step."""
    fitting = []
    for grad, value in zip(grads, values, strict=True):
        fits = grad.dtype == value.dtype and grad.stride() == value.stride()
        fitting.append(grad if fits else torch.empty_like(value).copy_(grad))
    return fitting


def update_scale_hysteresis(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Update a loss scale and its trackers, one element each, in place. No host sync.

    A step with inf or nan takes one off ``hysteresis_tracker`` and sets ``growth_tracker`` to 0; once the former is
    used up, each such step multiplies the scale by ``backoff_factor``. A clean step refills it, counts, and at
    ``growth_interval`` multiplies by ``growth_factor`` unless that is not finite.

    Returns:
        ``scale``.
    """
    with torch.no_grad():
        bad = (found_inf > 0).reshape(scale.shape)
        left = hysteresis_tracker - bad.reshape(hysteresis_tracker.shape).to(hysteresis_tracker.dtype)
        clean = growth_tracker + 1
        due = clean == growth_interval
        grown = scale * growth_factor
        grows = ~bad & due.reshape(scale.shape) & torch.isfinite(grown)
        backs_off = bad & (left <= 0).reshape(scale.shape)
        scale.copy_(torch.where(backs_off, scale * backoff_factor, torch.where(grows, grown, scale)))
        fresh = bad.reshape(growth_tracker.shape) | due
        growth_tracker.copy_(torch.where(fresh, torch.zeros_like(clean), clean))
        refilled = torch.full_like(hysteresis_tracker, hysteresis)
        hysteresis_tracker.copy_(torch.where(bad.reshape(hysteresis_tracker.shape), left, refilled))
    return scale
