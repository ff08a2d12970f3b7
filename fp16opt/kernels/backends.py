"""Which implementation serves a device, of lists of tensors, and of the few numbers that a step decides between passes.

These numbers stay on their device, and nothing waits for it. In torch operations each decision is a dozen launches that
move a few bytes each; where the compiled CUDA kernels serve it is one.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import cuda, native
from .cuda import Outcome, ScaleMemory
from .stats import GradStats

_HOST = torch.device("cpu")


def compiled_for(device: torch.device) -> ModuleType | None:
    """The file that calls the compiled kernels for a device; None where torch operations serve. Does not sync."""
    if device == _HOST or device.type == "cpu":  # asking for the type makes a string by way of a C++ stream
        if native.module is not None:
            return native
    elif cuda.serves(device):
        return cuda
    native.warn_unbuilt()
    return None


def captures(device: torch.device) -> bool:
    """Whether work on ``device`` goes into a CUDA graph now. Does not sync.

    Example:
        >>> captures(torch.device("cpu"))
        False
    """
    on_card = device.type == "cuda" or compiled_for(device) is cuda
    return on_card and cuda.Stream(device).captures


def backend(device: torch.device | str) -> str:
    """Which implementation serves tensors on ``device``.

    Args:
        device: a torch device or its name.

    Returns:
        "cpu" and "cuda" for the compiled kernels, "reference" for plain torch operations.

    Example:
        >>> backend("meta")
        'reference'
    """
    served_by = compiled_for(torch.device(device))
    return "reference" if served_by is None else "cpu" if served_by is native else "cuda"


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors of one shape, dtype and device hold the same bits. Syncs.

    Example:
        >>> are_equal(torch.tensor([1, 2]), torch.tensor([1, 3]))
        False
    """
    if compiled_for(one.device) is native:
        return bool(native.module.are_equal(one.data_ptr(), other.data_ptr(), one.nbytes))
    return torch.equal(one, other)


def is_zero(tensor: Tensor) -> bool:
    """Whether every bit of a contiguous tensor is 0. Syncs.

    Example:
        >>> is_zero(torch.zeros(3, dtype=torch.int32))
        True
    """
    if compiled_for(tensor.device) is native:
        return bool(native.module.is_zero(tensor.data_ptr(), tensor.nbytes))
    return not bool(tensor.any())


# -- what is decided of single numbers ---------------------------------------------------------------------------------


def are_compiled(device: torch.device) -> bool:
    """Whether a step's end on ``device`` is one launch. Syncs where the kernel is proved first, else not.

    Example:
        >>> are_compiled(torch.device("cpu"))
        False
    """
    return _decides(device, "close_step")


def _decides(device: torch.device, kernel: str) -> bool:
    """Whether a CUDA kernel makes a decision on ``device``."""
    return compiled_for(device) is cuda and cuda.trusted(kernel, device)


def capture_scale(scale: Tensor) -> tuple[Tensor, Tensor]:
    """The scale as it is now, and what gradients that were made with it are multiplied by.

    Args:
        scale: float32, shape []. A loss scaler's own, which changes in place.

    Returns:
        (scale, 1/scale): float32, shape [], in memory of their own. Does not sync.

    Example:
        >>> capture_scale(torch.tensor(1024.0))
        (tensor(1024.), tensor(0.0010))
    """
    if not _decides(scale.device, "capture_scale"):
        return scale.clone(), scale.reciprocal()
    pair = torch.empty(2, dtype=torch.float32, device=scale.device)
    cuda.capture_scale(scale, pair)
    now, inverse = pair.unbind()
    return now, inverse


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of this norm (float64, 0-dim) are multiplied by: float32, at most 1. No host sync.

    The formula and the bits of ``torch.nn.utils.clip_grad_norm_``, which works in the norm's float32. Where the norm is
    finite but too large for float32 the factor is taken in float64. Written again, bit for bit, in
    ``csrc/functors/clip.h``.

    Example:
        >>> clip_factor(torch.tensor(4.0, dtype=torch.float64), 1.0)
        tensor(0.2500)
    """
    single = norm.float()
    factor = torch.where(single.isfinite(), max_norm / (single + 1e-6), (max_norm / norm).float())
    return factor.clamp(max=1.0)


def decide_clip(
    norm: Tensor, found_inf: Tensor | None, max_norm: float, *, only_finite: bool = False
) -> tuple[Tensor, Tensor]:
    """A clip's outcome.

    Args:
        norm: float64, shape []. The total norm of the gradients.
        found_inf: float32, shape [], on the same device. Where it is 1.0 gradients stay as they are.
        max_norm: what to bring the norm down to.
        only_finite: whether gradients stay as they are where the norm itself is not finite, too.

    Returns:
        (the norm, what to multiply gradients by): float32, shape [], in memory of their own. Does not sync.

    Example:
        >>> decide_clip(torch.tensor(4.0, dtype=torch.float64), torch.tensor(0.0), 1.0)
        (tensor(4.), tensor(0.2500))
    """
    serving = compiled_for(norm.device) if norm.dtype == torch.float64 else None
    if serving is cuda and not _decides(norm.device, "decide_clip"):
        serving = None
    fits = found_inf is None or (found_inf.device == norm.device and found_inf.dtype == torch.float32)
    if serving is not None and fits:
        like = torch.empty((), dtype=torch.float32, device=norm.device) if found_inf is None else found_inf
        single, factor = torch.empty_like(like), torch.empty_like(like)
        serving.decide_clip(norm, found_inf, max_norm, only_finite, single, factor)
        return single, factor
    factor = clip_factor(norm, max_norm)
    if found_inf is not None:
        factor = torch.where(found_inf > 0, 1.0, factor)
    return norm.float(), torch.where(norm.isfinite(), factor, 1.0) if only_finite else factor


def follow(found_inf: Tensor, scaler: ScaleMemory) -> bool | None:
    """A loss scale follows one step, where compiled code does it by the rule of the scaler's ``update``.

    Args:
        found_inf: float32, shape [], 0.0 or 1.0.
        scaler: The scale, int32 trackers (clean steps and skips), and float64 settings in the order of
            ``csrc/functors/loss_scale.h``. Without settings the scale stays, and trackers are one number, the skips.

    Returns:
        Whether the scale has moved, or may have; None where nothing was done. Does not sync.
    """
    scale, trackers, settings = scaler
    if scale is None or trackers is None or trackers.device != found_inf.device:
        return None
    serving = compiled_for(found_inf.device)
    if serving is native and scale.device == found_inf.device:
        return native.follow_scale(bool(found_inf.item()), scale, trackers, settings)
    if serving is cuda and _decides(found_inf.device, "close_step"):
        close_step(found_inf=found_inf, scaler=scaler)
        return settings is not None
    return None


def close_step(
    *,
    stats: GradStats | None = None,
    flags: Tensor | None = None,
    kept: Tensor | None = None,
    found_inf: Tensor | None = None,
    outcome: Outcome = (None, None),
    scaler: ScaleMemory = (None, None, None),
) -> None:
    """The end of a step: the scale follows, the outcome is noted, flags are kept, and statistics are zero again.

    Only where decisions :func:`are_compiled`: elsewhere the callers' torch operations do the same, and they are the
    specification (``LossScaler.update`` for the scale). All tensors lie on one device; any may be left out.

    Args:
        stats: Cleared, after everything else was read.
        flags: int32, shape [n], which may be those of ``stats``. Copied to ``kept``.
        kept: int32, shape [n].
        found_inf: float32, shape [], 0.0 or 1.0, which may be that of ``stats``. None: nothing but the above.
        outcome: What it is written to and added to.
        scaler: As for :func:`follow`.

    Raises:
        ValueError: No compiled kernel serves the device.
    """
    of = [tensor for tensor in (kept, found_inf, None if stats is None else stats.found_inf) if tensor is not None]
    if not of or not are_compiled(of[0].device):
        where = of[0].device if of else "no tensors"
        raise ValueError(
            f"close_step: the compiled CUDA kernels do not serve {where}. Use LossScaler.update and GradStats.reset."
        )
    memory = None if stats is None else stats.memory
    cuda.close_step(of[0].device, memory, flags, kept, found_inf, outcome, scaler)
    if stats is not None:
        stats.touched = stats.memory is None
        stats.reset()
