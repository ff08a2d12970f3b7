"""The operations that reports are made of: what gradients hold, and what steps did to masters and weights."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from . import reference_measures as reference
from .calls import Call, CallCache, Entries
from .launches import begin, run
from .reference_measures import COMPARED, MEASURED
from .stats import Given, check_result, sum_dtype
from .table import COMPARE, MEASURE

__all__ = ["COMPARED", "MEASURED", "Snapshots", "multi_tensor_compare", "multi_tensor_measure"]


class Snapshots(Given):
    """Some elements of each tensor of a list, as they were: all of up to 16,384, of more one group of 8 in 17.

    Args:
        tensors: n tensors on one device, float16 to float64, or None.

    Attributes:
        values: float32 numbers of all tensors one behind the other; float64 ones have theirs in ``wide``.
        offsets: int64, shape [n], on the device: where in ``values`` each begins.
        wide: by position.
        shares: float64, shape [n, 1], on the device: how many elements each that was taken stands for.

    Example:
        >>> Snapshots([torch.ones(100000)]).values.numel()
        5888
    """

    def __init__(self, tensors: Entries) -> None:
        there = [tensor for tensor in tensors if tensor is not None]
        device = there[0].device if there else torch.device("cpu")
        numels = [0 if tensor is None else tensor.numel() for tensor in tensors]
        narrow = [tensor is not None and tensor.dtype != torch.float64 for tensor in tensors]
        self._sizes = [reference.snapshot_size(n) if here else 0 for n, here in zip(numels, narrow, strict=True)]
        self._starts = list(itertools.accumulate(self._sizes, initial=0))[:-1]
        self.values = torch.empty(sum(self._sizes), dtype=torch.float32, device=device)
        self.offsets = torch.tensor(self._starts, dtype=torch.int64, device="cpu").to(device)
        self.tensors = self.values, self.offsets
        self.wide: dict[int, Tensor] = {}
        for row, tensor in enumerate(tensors):
            if tensor is None:
                continue
            if not narrow[row]:
                self.wide[row] = tensor.new_empty(reference.snapshot_size(numels[row]))
            reference.snapshot(tensor.detach(), self.of(row))
        each = [n / max(1, reference.snapshot_elements(n)) for n in numels]
        self.shares = torch.tensor(each, dtype=sum_dtype(device), device="cpu").view(-1, 1).to(device)

    def of(self, row: int) -> Tensor:
        """What was taken of the tensor at a position, with padding behind it."""
        start = self._starts[row]
        return self.wide[row] if row in self.wide else self.values[start : start + self._sizes[row]]


def multi_tensor_measure(grads: Entries, *, cache: CallCache | None = None) -> Tensor:
    """What gradients hold, as they are, scaled or not, in one pass.

    Args:
        grads: n tensors, float16 to float64.
        cache: the cache of this call site.

    Returns:
        float64, shape [n, 5], on the device, in the order of ``MEASURED``: sum of squares, to the bit that of
        :func:`multi_tensor_l2norm`; largest magnitude, nan where there is one; and of 16-bit tensors how many elements
        are zero, are subnormal, and are within a factor of 2 of the largest finite number, or beyond. Zeros for None.
        Does not sync.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> multi_tensor_measure([torch.tensor([0.0, 2.0**-20, 3.0, 4e4]).half()])[0, 1:]
        tensor([4.0000e+04, 1.0000e+00, 1.0000e+00, 1.0000e+00], dtype=torch.float64)
    """
    call = begin(MEASURE, (grads,), cache)
    numbers = _zeros(call, len(MEASURED))
    run(call, (numbers,), (numbers,))
    return numbers


def multi_tensor_compare(
    masters: Entries, weights: Entries, before: Snapshots, *, cache: CallCache | None = None
) -> Tensor:
    """What a step did to masters, and how far their weights are from them, in one pass.

    Args:
        masters: n tensors after the step: float32; or parameters without masters, float16 to float64.
        weights: n float16 or bfloat16 tensors of the same shapes; or the same as ``masters``.
        before: of the masters, taken before the step, with their strides.
        cache: the cache of this call site.

    Returns:
        float64, shape [n, 7], on the device, in the order of ``COMPARED``: sums of squares of masters and of masters
        minus weights, of all elements; and, of those in ``before``, scaled up to all, the sum of squares of updates,
        the sum of their magnitudes, the sum of the distances from the values before to the next larger ones of the
        weight's 16-bit dtype (0 where it has no 16 bits), how many updates are not zero, and how many of these are
        under half such a distance. Zeros for None. Does not sync.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`, and where ``before`` is of other tensors.

    Example:
        >>> master = torch.ones(2)
        >>> before = Snapshots([master])
        >>> master += torch.tensor([2.0**-12, 2.0**-10])  # half an ulp at 1 is 2**-11
        >>> multi_tensor_compare([master], [master.half()], before)[0, -2:]
        tensor([2., 1.], dtype=torch.float64)
    """
    call = begin(COMPARE, (masters, weights), cache)
    numbers = _zeros(call, len(COMPARED))
    check_result(COMPARE.name, "before.offsets", before.offsets, call.plan.count, torch.int64, call.plan.device)
    for row in call.plan.rows:
        master = call.row(row)[0]
        have, want = before.of(row).numel(), reference.snapshot_size(master.numel())
        if have != want or (row in before.wide) != (master.dtype == torch.float64):
            raise ValueError(
                f"{COMPARE.name}: before has {have} element(s) for masters[{row}], which needs {want} of its "
                "dtype. Take the snapshots of the same list of masters."
            )
    run(call, (before, numbers), (*before.tensors, numbers))
    numbers[:, 2:] *= before.shares
    return numbers


def _zeros(call: Call, columns: int) -> Tensor:
    device = call.plan.device
    return torch.zeros(call.plan.count, columns, dtype=sum_dtype(device), device=device)
