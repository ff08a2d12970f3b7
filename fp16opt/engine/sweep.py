"""Sweep: one device's gradients looked at, written, measured and scaled, a row for each parameter."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import kernels
from ..kernels import PointerTables, reference
from ..kernels.calls import Entries


class Sweep:
    """The passes over the gradients of one device, and what the last of them found.

    All lists have ``rows`` entries; None is left out, and its statistics stay. No call waits for the device.

    Attributes:
        stats: non-finite flags and sums of squares of each row; ``found_inf`` and ``norm`` over all rows.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device = device
        self.stats = kernels.GradStats.allocate(rows, device)
        self.one = torch.ones((), dtype=torch.float32, device=device)
        self._look, self._take, self._in_place = PointerTables(), PointerTables(), PointerTables()
        self._judge, self._round = PointerTables(), PointerTables()
        self._norm, self._scale = PointerTables(), PointerTables()

    def look(self, grads: Entries, inv_scale: Tensor) -> None:
        """What ``grads * inv_scale`` would be in FP32: flags and sums of squares. Writes no gradient."""
        kernels.multi_tensor_check(grads, inv_scale, self.stats, tables=self._look)

    def take(self, grads: Entries, outs: Entries, inv_scale: Tensor, adds: bool | list[bool] = False) -> None:
        """``outs = grads * inv_scale``, or added to, looked at on the way. ``outs`` may be ``grads``."""
        tables = self._in_place if outs is grads else self._take
        kernels.multi_tensor_unscale(grads, outs, inv_scale, self.stats, accumulate=adds, tables=tables)

    def write(self, grads: Entries, outs: Entries, inv_scale: Tensor, coefficient: Tensor) -> None:
        """``outs = (grads * inv_scale) * coefficient``, of gradients that were looked at."""
        kernels.multi_tensor_unscale_clipped(grads, outs, inv_scale, coefficient, tables=self._take)

    def judge(self, values: Entries, narrow: Sequence[int]) -> None:
        """Look at gradients that are true already.

        Args:
            values: float32 or float64; in 16 bits where there are no masters.
            narrow: rows that may be in 16 bits.
        """
        if narrow:
            values = list(values)
            halves: list[Tensor | None] = [None] * len(values)
            for row in narrow:
                value = values[row]
                if value is not None and value.dtype in kernels.HALF_DTYPES:
                    halves[row], values[row] = value, None
            self.look(halves, self.one)
            if all(map(operator.is_, values, itertools.repeat(None))):
                return
        kernels.multi_tensor_unscale(values, values, self.one, self.stats, write=False, tables=self._judge)

    def measure(self, sums: Entries, known: Tensor | None, narrow: Sequence[int]) -> None:
        """Sums of squares of FP32 sums. Flags stay, and rise where a sum is not finite that was not ``known`` to be."""
        flags = self.stats.nonfinite.clone()
        self.judge(sums, narrow)
        new = self.stats.nonfinite if known is None else self.stats.nonfinite.masked_fill(known != 0, 0)
        self.stats.nonfinite.copy_(flags | new)
        self.total()

    def drop(self, rows: list[int]) -> None:
        """Gradients are gone: what was found in them does not count."""
        index = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device)
        self.stats.nonfinite.index_fill_(0, index, 0)
        self.stats.sumsq.index_fill_(0, index, 0.0)
        self.total()

    def round(self, rows: list[int], wide: Entries, outs: Entries) -> None:
        """``outs = wide`` in the 16 bits of parameters without masters; what is too large for them counts as inf."""
        found = kernels.CastStats.allocate(len(rows), self.device)
        kernels.multi_tensor_cast(wide, outs, found, tables=self._round)
        self.flag(rows, (found.overflow & kernels.TOO_LARGE).ne(0) * kernels.INF)

    def forget_flags(self) -> None:
        """No row is known to have a non-finite gradient. Sums of squares stay."""
        self.stats.nonfinite.zero_()
        self.stats.found_inf.zero_()

    def flag(self, rows: list[int], bits: Tensor) -> None:
        """Add flags (int32, one for each of ``rows``) that another pass has found."""
        index = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device)
        self.stats.nonfinite[index] |= bits
        self.total()

    def total(self) -> None:
        """``found_inf`` and ``norm`` anew from the rows."""
        reference.finish(self.stats)

    def norm(self, values: Entries) -> Tensor:
        """The 2-norm over all rows, read again: float64, 0-dim, on the device also where no row has a tensor."""
        if all(map(operator.is_, values, itertools.repeat(None))):
            return torch.zeros_like(self.stats.norm)
        return kernels.multi_tensor_l2norm(values, tables=self._norm)[0]

    def largest_norm(self) -> Tensor:
        """The largest of the rows' norms that the last pass has found: float32, 0-dim. No element is larger."""
        sums = self.stats.sumsq
        return sums.amax().sqrt().float() if len(sums) else torch.zeros_like(self.one)

    def scale(self, values: Entries, factor: Tensor) -> None:
        """``values *= factor`` in place. On the CPU a factor of 1 touches no memory."""
        kernels.multi_tensor_scale(values, factor, tables=self._scale)


def total_norm(parts: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm over tensors whose norms are ``parts``: float64, 0-dim, on ``device``."""
    if len(parts) == 1:
        return parts[0].to(device)
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return vector_norm(torch.stack([part.to(device) for part in parts]), norm_type)


def vector_norm(value: Tensor, norm_type: float) -> Tensor:
    """The norm of one dense tensor: float64, 0-dim. No host sync."""
    dtype = torch.complex128 if value.is_complex() else torch.float64
    norm: Tensor = torch.linalg.vector_norm(value, norm_type, dtype=dtype)
    return norm
