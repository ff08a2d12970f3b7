"""What the multi-tensor operations are given beside lists of tensors: the numbers and statistics of a call, checked.

Statistics are the tensors into which operations write what they found. They are allocated once by the caller, live on
the device of the tensors, and are overwritten by every call, so that a training step allocates nothing and never waits
for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .changed import ChangedBits, Marks

INF = 1
"""Bit in :attr:`GradStats.nonfinite`: an unscaled gradient is infinite."""
NAN = 2
"""Bit in :attr:`GradStats.nonfinite`: an unscaled gradient is not a number."""
TOO_LARGE = 1
"""Bit in :attr:`CastStats.overflow`: a finite master became infinite in the narrower type."""
NOT_FINITE = 2
"""Bit in :attr:`CastStats.overflow`: a master was infinite or not a number already."""


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which sums of squares are kept: float64, or float32 on a device that has no float64.

    Args:
        device: where the sums live.

    Returns:
        ``torch.float32`` on ``mps``, else ``torch.float64``.

    Example:
        >>> sum_dtype(torch.device("cpu"))
        torch.float64
    """
    return torch.float32 if device.type == "mps" else torch.float64


def _check_rows(
    owner: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], like: Tensor
) -> None:
    """Raise unless kernels may write ``tensor``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{owner}: {name} must be a tensor, got {type(tensor).__name__}.")
    if tensor.dtype != dtype:
        raise TypeError(f"{owner}: {name} must be {str(dtype)[6:]}, got {str(tensor.dtype)[6:]}.")
    if tensor.device != like.device:
        raise ValueError(f"{owner}: {name} must be on {like.device} like the others, got {tensor.device}.")
    if tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{owner}: {name} must be contiguous of shape {shape}, got shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}."
        )


class Given:
    """One argument of an operation that stands for several of its kernels' arguments.

    Attributes:
        tensors: what kernels are given.
    """

    tensors: tuple[Tensor, ...]


@dataclass(eq=False)
class GradStats(Given):
    """What an unscaling pass finds in n gradients.

    Attributes:
        nonfinite: int32, shape [n]. Bits ``INF | NAN`` of tensor i.
        sumsq: float64, shape [n]. Sum of squares of what was written for tensor i, to the precision of
            :func:`fp16opt.kernels.multi_tensor_l2norm`.
        norm: float64, shape []. Square root of the sum of all n ``sumsq``.
        found_inf: float32, shape []. Exactly 1.0 if any of the n ``nonfinite`` is set, else exactly 0.0.
        memory: uint8. What the four lie in together, to be cleared at once; None where they do not.
        touched: whether something was written since all was zero. Set it where you write to them yourself.

    The tensors are checked here, once, and not at every call: write into them, but put no others in their place.

    Raises:
        TypeError, ValueError: one of them is of another kind.

    Example:
        >>> stats = GradStats.allocate(2, "cpu")
        >>> stats.nonfinite
        tensor([0, 0], dtype=torch.int32)
    """

    nonfinite: Tensor
    sumsq: Tensor
    norm: Tensor
    found_inf: Tensor
    memory: Tensor | None = None
    touched: bool = True

    def __post_init__(self) -> None:
        self.tensors = self.nonfinite, self.sumsq, self.norm, self.found_inf
        like = self.nonfinite
        n, wide = (
            (len(like),) if isinstance(like, Tensor) else (),
            sum_dtype(getattr(like, "device", torch.device("cpu"))),
        )
        _check_rows("GradStats", "nonfinite", like, torch.int32, n, like)
        _check_rows("GradStats", "sumsq", self.sumsq, wide, n, like)
        _check_rows("GradStats", "norm", self.norm, wide, (), like)
        _check_rows("GradStats", "found_inf", self.found_inf, torch.float32, (), like)

    @classmethod
    def allocate(cls, n: int, device: torch.device | str) -> GradStats:
        """All zeros, for lists of ``n`` tensors on ``device``.

        Args:
            n: how many tensors the lists hold, None entries included.
            device: where they live.

        Returns:
            A new GradStats. Does not sync.
        """
        wide = sum_dtype(torch.device(device))
        memory = torch.zeros(wide.itemsize * (n + 1) + 4 * (n + 1), dtype=torch.uint8, device=device)
        sums, flags = memory[: wide.itemsize * (n + 1)].view(wide), memory[wide.itemsize * (n + 1) :]
        return cls(
            nonfinite=flags[: 4 * n].view(torch.int32),
            sumsq=sums[:n],
            norm=sums[n],
            found_inf=flags[4 * n :].view(torch.float32)[0],
            memory=memory,
            touched=False,
        )

    def __getstate__(self) -> dict[str, Tensor]:
        """Copies of the four: torch.save refuses views of one memory as several dtypes."""
        return {name: getattr(self, name).clone() for name in ("nonfinite", "sumsq", "norm", "found_inf")}

    def __setstate__(self, state: dict[str, Tensor]) -> None:
        fresh = GradStats.allocate(len(state["nonfinite"]), state["nonfinite"].device)
        self.memory, self.touched = fresh.memory, True
        for name, value in state.items():
            setattr(self, name, getattr(fresh, name).copy_(value))
        self.tensors = fresh.tensors

    def reset(self) -> None:
        """Set everything to zero, as after :meth:`allocate`, where it is not. Does not sync."""
        if not self.touched:
            return
        self.touched = False
        for tensor in self.tensors if self.memory is None else (self.memory,):
            tensor.zero_()


@dataclass(eq=False)
class CastStats(Given):
    """What a pass that rounds n masters to 16 bits finds.

    Attributes:
        overflow: int32, shape [n]. Bits ``TOO_LARGE | NOT_FINITE`` of tensor i. Checked here, once, and not at every
            call: write into it, but put no other in its place.
        changed: marks the elements of the 16-bit tensors that get other bits; None: nothing does.

    Raises:
        TypeError, ValueError: it is of another kind.

    Example:
        >>> CastStats.allocate(2, "cpu").overflow
        tensor([0, 0], dtype=torch.int32)
    """

    overflow: Tensor
    changed: ChangedBits | None = None

    def __post_init__(self) -> None:
        self.tensors = (self.overflow,)
        n = (self.overflow.numel(),) if isinstance(self.overflow, Tensor) else ()
        _check_rows("CastStats", "overflow", self.overflow, torch.int32, n, self.overflow)

    @property
    def marks(self) -> Marks:
        """What kernels are given to mark what changes: bits, and where a row's begin; zeros where nothing does."""
        return (0, 0) if self.changed is None else (self.changed.memory, self.changed.offsets)

    @classmethod
    def allocate(cls, n: int, device: torch.device | str) -> CastStats:
        """All zeros, for lists of ``n`` tensors on ``device``.

        Args:
            n: how many tensors the lists hold, None entries included.
            device: where they live.

        Returns:
            A new CastStats. Does not sync.
        """
        return cls(overflow=torch.zeros(n, dtype=torch.int32, device=device))

    def beside(self, rows: Sequence[int]) -> CastStats:
        """For a list of the tensors at ``rows`` alone: flags of its own, and the same bits. Does not sync."""
        made = CastStats.allocate(len(rows), self.overflow.device)
        made.changed = None if self.changed is None else self.changed.select(rows)
        return made

    def of_row(self, row: int) -> CastStats:
        """For a list of the tensor at ``row`` alone: the same flags and bits. Does not sync."""
        return CastStats(self.overflow[row : row + 1], None if self.changed is None else self.changed.select([row]))


def check_result(
    operation: str, name: str, tensor: Tensor, numel: int, dtype: torch.dtype, device: torch.device | None
) -> None:
    """Raise unless ``tensor`` is contiguous with ``numel`` elements of ``dtype`` (None entries of a list count)."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{operation}: {name} must be a tensor, got {type(tensor).__name__}.")
    if tensor.dtype != dtype:
        raise TypeError(f"{operation}: {name} must be {str(dtype)[6:]}, got {str(tensor.dtype)[6:]}.")
    if tensor.device != device:
        raise ValueError(f"{operation}: {name} must be on {device} like the tensors of the call, got {tensor.device}.")
    if tensor.numel() != numel or not tensor.is_contiguous():
        raise ValueError(
            f"{operation}: {name} must be contiguous with {numel} element(s), got shape {tuple(tensor.shape)} and "
            f"strides {tensor.stride()}."
        )
