"""The operation by which running averages take values in."""

from __future__ import annotations

from .calls import CallCache, Entries
from .launches import launch
from .table import LERP


def multi_tensor_lerp(averages: Entries, values: Entries, weight: float, *, cache: CallCache | None = None) -> None:
    """``averages[i] += weight * (values[i] - averages[i])``; with a weight of 1/2 or more from the other end.

    That is ``values[i] + (1 - weight) * (averages[i] - values[i])``: a weight of 1 gives the values themselves, as in
    ``torch.lerp``. One rounding each for subtraction, multiplication and addition.

    Args:
        averages: n tensors, float32 or float64. Written.
        values: n tensors of the same shapes: float16, bfloat16 or float32; float64 for float64 ``averages``.
        weight: 0 to 1. It, or 1 - weight, is rounded to the dtype of the averages.
        cache: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`, and for a weight that is no number from 0 to 1.

    Example:
        >>> import torch
        >>> averages = [torch.tensor([0.0, 8.0])]
        >>> multi_tensor_lerp(averages, [torch.tensor([1.0, 0.0]).half()], 0.25)
        >>> averages
        [tensor([0.2500, 6.0000])]
    """
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise TypeError(f"{LERP.name}: weight must be a number, got {type(weight).__name__}.")
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"{LERP.name}: weight must be from 0 to 1, got {weight!r}.")
    from_average = weight < 0.5  # the nearer end: so weights of 0 and 1 are exact, as in torch.lerp
    part = float(weight) if from_average else 1.0 - float(weight)
    launch(LERP, (averages, values), (part, from_average), cache)
