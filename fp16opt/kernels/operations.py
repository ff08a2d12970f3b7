"""The multi-tensor operations that every step is made of; the docstring of the package says what holds for all."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from . import backends, cuda, reference
from .calls import CallCache, Entries
from .formulas import AdamOptions, LionOptions, SgdOptions
from .launches import begin, launch, run
from .stats import CastStats, GradStats, check_result, sum_dtype
from .steps import Factors, multi_tensor_step
from .table import (
    AXPBY,
    CAST,
    CHECK,
    CHECKED,
    JOIN,
    L2NORM,
    SAMPLE,
    SCALE,
    SPLIT,
    UNSCALE,
    UNSCALE_CLIPPED,
)

__all__ = [
    "AdamOptions",
    "Factors",
    "LionOptions",
    "SgdOptions",
    "is_host",
    "multi_tensor_axpby",
    "multi_tensor_cast",
    "multi_tensor_check",
    "multi_tensor_join",
    "multi_tensor_l2norm",
    "multi_tensor_sample",
    "multi_tensor_scale",
    "multi_tensor_split",
    "multi_tensor_step",
    "multi_tensor_unscale",
    "multi_tensor_unscale_clipped",
]


def is_host(device: torch.device) -> bool:
    """Whether tensors on ``device`` can be read at once, without waiting for work that was queued.

    Example:
        >>> is_host(torch.device("cpu")), is_host(torch.device("meta"))
        (True, False)
    """
    return device.type == "cpu"


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor`` on ``device``, itself where it is there already. The host waits only where it is to read the copy.

    torch's ``to(..., non_blocking=True)`` waits for no copy to the host either, where the number is read before it
    has arrived.

    Example:
        >>> moved(torch.tensor(2, dtype=torch.int32), torch.device("cpu"), torch.float32)
        tensor(2.)
    """
    return tensor.to(device, dtype, non_blocking=not is_host(device))


class AwaitedFlag:
    """A flag on its way to the host. The device goes on with what is queued behind it while the host waits for it.

    Args:
        flag: float32, 0-dim, on any device, as it is once the work that is queued there now is done.

    Example:
        >>> AwaitedFlag(torch.tensor(1.0)).read()
        True
    """

    def __init__(self, flag: Tensor) -> None:
        self._arrived: Any = None
        if flag.device.type == "cuda":
            self._copy = flag.to("cpu", non_blocking=True)  # torch takes pinned memory for it
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(flag.device))
        else:
            self._copy = flag.to("cpu", copy=True)

    def read(self) -> bool:
        """Whether it is not 0. Waits until it has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._copy)


def multi_tensor_unscale(
    grads: Entries,
    outs: Entries,
    inv_scale: Tensor,
    stats: GradStats,
    *,
    accumulate: bool | Sequence[bool] = False,
    write: bool = True,
    cache: CallCache | None = None,
) -> None:
    """``outs[i] = grads[i] * inv_scale``, with non-finite flags and the norm of what was written, in one pass.

    One rounding for each multiplication and one for each addition. The norm of 16-bit ``grads`` that are not added to
    ``outs`` is taken of ``grads`` and multiplied by ``inv_scale``. A tensor is flagged where a *product* is infinite
    (``INF``) or not a number (``NAN``) and, when accumulating, where a sum is not finite although the value before it
    was.

    Args:
        grads: n tensors: float16, bfloat16 or float32; float64 with a float64 ``out``.
        outs: n tensors of the same shapes: float32, or float64. Written; ``outs[i]`` may be ``grads[i]``.
        inv_scale: float32, shape [], on the device. 1 / loss scale.
        stats: for n tensors. Rows of entries that are not None are overwritten, and so are ``norm`` and ``found_inf``,
            which are taken over all n rows.
        accumulate: ``outs[i] += ...`` instead; one bool, or n of them.
        write: False leaves ``outs`` as they are, and the rest is as if they were written. Not with ``accumulate``.
        cache: the cache of this call site.

    Raises:
        TypeError: a wrong type or dtype. ValueError: lengths, shapes or devices that differ. Nothing is written then.

    Example:
        >>> grads, outs = [torch.full((2,), 8.0).half()], [torch.zeros(2)]
        >>> stats = GradStats.allocate(1, "cpu")
        >>> multi_tensor_unscale(grads, outs, torch.tensor(0.5), stats)
        >>> outs[0], stats.norm.item()
        (tensor([4., 4.]), 5.656854249492381)
    """
    if not write and accumulate is not False:
        raise ValueError(f"{UNSCALE.name}: write=False goes with accumulate=False only.")
    stats.touched = True
    given, device = (inv_scale, stats, write), stats.norm.device
    if not launch(UNSCALE, (grads, outs), given, cache, device=device, flags=accumulate, writes=write):
        reference.finish(stats)


def multi_tensor_check(
    grads: Entries,
    inv_scale: Tensor,
    stats: GradStats,
    *,
    cache: CallCache | None = None,
) -> None:
    """What :func:`multi_tensor_unscale` into float32 would find: flags and norm of ``grads[i] * inv_scale``.

    Args:
        grads: n tensors: float16, bfloat16 or float32. They stay as they are.
        inv_scale, stats, cache: as for :func:`multi_tensor_unscale`.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> stats = GradStats.allocate(1, "cpu")
        >>> multi_tensor_check([torch.full((2,), 6.0).half()], torch.tensor(0.5), stats)
        >>> stats.sumsq.item(), stats.found_inf.item()
        (18.0, 0.0)
    """
    stats.touched = True
    given, device = (inv_scale, stats, False), stats.norm.device
    if not launch(CHECK, (grads,), given, cache, device=device, flags=False, writes=False):
        reference.finish(stats)


def multi_tensor_unscale_clipped(
    grads: Entries,
    outs: Entries,
    inv_scale: Tensor,
    factor: Tensor,
    *,
    cache: CallCache | None = None,
) -> None:
    """``outs[i] = (grads[i] * inv_scale) * factor``, each multiplication rounded: unscaling and clipping in one pass.

    Args:
        grads: n tensors: float16, bfloat16 or float32; float64 with a float64 ``out``.
        outs: n tensors of the same shapes: float32, or float64. Written; ``outs[i]`` may be ``grads[i]``.
        inv_scale: float32, shape [], on the device. 1 / loss scale.
        factor: float32, shape [], on the device.
        cache: the cache of this call site; one that serves :func:`multi_tensor_unscale` on the same lists serves here.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> out = [torch.zeros(1)]
        >>> multi_tensor_unscale_clipped([torch.tensor([8.0]).half()], out, torch.tensor(0.5), torch.tensor(0.25))
        >>> out
        [tensor([1.])]
    """
    device = getattr(inv_scale, "device", None)
    launch(UNSCALE_CLIPPED, (grads, outs), (inv_scale, factor), cache, device=device)


def multi_tensor_l2norm(tensors: Entries, *, cache: CallCache | None = None) -> tuple[Tensor, Tensor]:
    """The 2-norm over all tensors, and of each, summed in a fixed order.

    Squares are float32 where they stay in its range, and so are the sums of four of them, of 16-bit tensors of eight;
    all else is float64 (relative error of the norm below 1e-7; of float64 tensors everything is). The result is
    bit-equal for every thread count and vector width, and to the norm that :func:`multi_tensor_unscale` reports for the
    same values in the same dtype.

    Args:
        tensors: n tensors, float16 to float64. None counts 0.
        cache: the cache of this call site.

    Returns:
        (norm, float64, shape []; norms, float64, shape [n]), on the tensors' device.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> multi_tensor_l2norm([torch.tensor([3e30, 4e30]), None])[1]
        tensor([5.0000e+30, 0.0000e+00], dtype=torch.float64)
    """
    call = begin(L2NORM, (tensors,), cache)
    device = call.plan.device
    sumsq = torch.zeros(call.plan.count, dtype=sum_dtype(device), device=device)
    norm, norms = sumsq.new_zeros(()), torch.zeros_like(sumsq)
    given = sumsq, norm, norms
    return (norm, norms) if run(call, given, given) else reference.norms(sumsq)


def multi_tensor_scale(tensors: Entries, factor: Tensor, *, cache: CallCache | None = None) -> None:
    """``tensors[i] *= factor`` in place. On the CPU a factor of exactly 1 touches no memory of the tensors.

    Args:
        tensors: n tensors, float16 to float64. One multiplication in float32, rounded to the tensor's dtype; float64
            tensors are multiplied by ``double(factor)``.
        factor: float32, shape [], on the device.
        cache: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> grads = [torch.ones(2)]
        >>> multi_tensor_scale(grads, torch.tensor(0.25))
        >>> grads
        [tensor([0.2500, 0.2500])]
    """
    check_result(SCALE.name, "factor", factor, 1, torch.float32, getattr(factor, "device", None))
    on_host = factor.device.type == "cpu" and backends.compiled_for(factor.device) is not cuda
    if on_host and factor.item() == 1.0:  # before the lists: nothing to clip costs nothing
        return
    launch(SCALE, (tensors,), (factor,), cache, device=factor.device)


def _as_single(name: str, value: float) -> float:
    """``value`` rounded to float32."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{AXPBY.name}: {name} must be a float, got {type(value).__name__}.")
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        raise ValueError(f"{AXPBY.name}: {name} must fit into float32, got {value!r}.") from None


def multi_tensor_axpby(
    a: float,
    xs: Entries,
    b: float,
    ys: Entries,
    outs: Entries,
    *,
    found_inf: Tensor | None = None,
    check: Literal["both", "x", "y"] = "both",
    cache: CallCache | None = None,
) -> None:
    """``outs[i] = a * xs[i] + b * ys[i]`` in float32, rounded to the dtype of ``outs[i]``.

    Args:
        a: factor of ``xs``, rounded to float32.
        xs: n tensors: float16, bfloat16 or float32.
        b: factor of ``ys``, rounded to float32.
        ys: n tensors of the same shapes, each in a dtype of its own.
        outs: n tensors of the same shapes, each in a dtype of its own. Written; may be ``xs[i]`` or ``ys[i]``.
        found_inf: float32, shape []. Set to 1.0, never cleared, where a checked input is not finite.
        check: which inputs ``found_inf`` looks at.
        cache: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`, and for an ``a`` or ``b`` outside float32.

    Example:
        >>> out = [torch.zeros(1)]
        >>> multi_tensor_axpby(2.0, [torch.ones(1).half()], -1.0, [torch.ones(1)], out)
        >>> out
        [tensor([1.])]
    """
    if check not in CHECKED:
        raise ValueError(f"{AXPBY.name}: check must be 'both', 'x' or 'y', got {check!r}.")
    a, b = _as_single("a", a), _as_single("b", b)
    looks = 0 if found_inf is None else CHECKED[check]
    device = getattr(found_inf, "device", None)
    launch(AXPBY, (xs, ys, outs), (a, b, looks, found_inf), cache, device=device)


def multi_tensor_cast(masters: Entries, params: Entries, stats: CastStats, *, cache: CallCache | None = None) -> None:
    """``params[i] = masters[i]`` rounded to nearest, ties to even, with flags.

    Args:
        masters: n float32 tensors.
        params: n float16 or bfloat16 tensors of the same shapes. Written.
        stats: for n tensors. Rows of entries that are not None are overwritten: ``TOO_LARGE`` where a finite master
            became infinite (float16: from 65520 on), ``NOT_FINITE`` where a master is infinite or not a number.
        cache: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> stats = CastStats.allocate(1, "cpu")
        >>> multi_tensor_cast([torch.tensor([65520.0])], [torch.zeros(1).half()], stats)
        >>> stats.overflow.item()  # kernels.TOO_LARGE
        1
    """
    launch(CAST, (masters, params), (stats,), cache, device=stats.overflow.device)


def multi_tensor_sample(tensors: Entries, samples: Tensor, *, cache: CallCache | None = None) -> None:
    """A 64-bit digest of sampled bits of each 16-bit tensor, by which a write to it is noticed.

    Of a tensor with up to 16,384 elements all are looked at; of a larger one about one in a thousand, in a lattice
    whose step has no divisor in common with the length of any dimension. So a change of most elements is seen, and so
    is one of a whole column of a matrix with a thousand rows; one of few elements of a large tensor may not be.

    Args:
        tensors: n float16 or bfloat16 tensors. Two with the same values in the same memory order have one digest.
        samples: int64, shape [n], on the device. Rows of entries that are not None are overwritten; an empty tensor
            gives 0. The same bits on every device and for every number of threads.
        cache: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> samples = torch.zeros(1, dtype=torch.int64)
        >>> multi_tensor_sample([torch.ones(5).half()], samples)
        >>> samples.item() != 0
        True
    """
    launch(SAMPLE, (tensors,), (samples,), cache, device=getattr(samples, "device", None))


# -- split masters: a 16-bit weight and a 16-bit remainder in place of a float32 ---------------------------------------


def multi_tensor_split(
    masters: Entries,
    params: Entries,
    remainders: Entries,
    stats: CastStats,
    *,
    cache: CallCache | None = None,
) -> None:
    """Write ``masters[i]`` as the weight ``params[i]`` and the remainder ``remainders[i]``, with flags.

    bfloat16: exact for every float32; the weight is rounded to nearest, ties away from zero. float16: the weight is
    rounded to nearest, ties to even; exact for magnitudes from 2^-16 up to 65520, below within 2^-40. From 65520 on the
    weight is inf, and the master is kept to 9 bits. With int8 remainders masters have 24 bits, rounded to nearest: see
    :mod:`fp16opt.kernels.reference_split`.

    Args:
        masters: n float32 tensors.
        params: n float16 or bfloat16 tensors of the same shapes. Written.
        remainders: n int16 or int8 tensors of the same shapes. Written.
        stats: for n tensors, as :func:`multi_tensor_cast` fills them.
        cache: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> master, weight, rest = torch.tensor([1 + 2**-20]), torch.zeros(1).bfloat16(), torch.zeros(1).short()
        >>> multi_tensor_split([master], [weight], [rest], CastStats.allocate(1, "cpu"))
        >>> weight.item(), rest.item()
        (1.0, 8)
    """
    launch(SPLIT, (masters, params, remainders), (stats,), cache, device=stats.overflow.device)


def multi_tensor_join(params: Entries, remainders: Entries, outs: Entries, *, cache: CallCache | None = None) -> None:
    """``outs[i]`` becomes the master that ``params[i]`` and ``remainders[i]`` stand for.

    Args:
        params: n float16 or bfloat16 tensors.
        remainders: n int16 or int8 tensors of the same shapes.
        outs: n float32 tensors of the same shapes. Written.
        cache: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> out = torch.zeros(1)
        >>> multi_tensor_join([torch.ones(1).bfloat16()], [torch.tensor([8], dtype=torch.int16)], [out])
        >>> out.item() == 1 + 2**-20
        True
    """
    launch(JOIN, (params, remainders, outs), (), cache)
