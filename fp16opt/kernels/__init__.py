"""The multi-tensor operations: one typed function each, over lists of tensors.

All lists of a call have the same length n, and all tensors live on one device. An entry may be None: it is skipped,
and its statistics stay as they are. Results are written into tensors that the caller gives, on the device, and
nothing waits for the device. Tensors may have any strides; those that one index can walk through memory together
are served by a compiled kernel where there is one (:func:`backend`), all others by :mod:`fp16opt.kernels.reference`,
with the same bits.

Version counters move for the tensors that autograd or users see change: ``outs``, tensors scaled in place, 16-bit
params, parameters that are their own masters, statistics; not for optimizer state, step counters and float32 masters
where 16-bit models are stepped along with them, as in torch's own fused steps.

Every function takes ``tables``, a :class:`PointerTables` of the call site, to save time by skipping checks made before.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from . import backends, cuda, reference
from .averages import multi_tensor_lerp
from .backends import backend
from .calls import Entries, PointerTables
from .held import HELD_BLOCK, multi_tensor_decode, multi_tensor_encode
from .measures import COMPARED, MEASURED, Snapshots, multi_tensor_compare, multi_tensor_measure
from .splitting import multi_tensor_join, multi_tensor_split
from .stats import (
    INF,
    NAN,
    NOT_FINITE,
    TOO_LARGE,
    CastStats,
    GradStats,
    check_given,
    check_result,
    sum_dtype,
)
from .tables import (
    AXPBY,
    CAST,
    CHECK,
    HALF_DTYPES,
    L2NORM,
    SAMPLE,
    SCALE,
    UNSCALE,
    Seen,
    call_for,
)
from .written import multi_tensor_renew, multi_tensor_take

__all__ = [
    "COMPARED",
    "HALF_DTYPES",
    "HELD_BLOCK",
    "INF",
    "MEASURED",
    "NAN",
    "NOT_FINITE",
    "TOO_LARGE",
    "CastStats",
    "GradStats",
    "PointerTables",
    "Seen",
    "Snapshots",
    "backend",
    "is_host",
    "multi_tensor_axpby",
    "multi_tensor_cast",
    "multi_tensor_check",
    "multi_tensor_compare",
    "multi_tensor_decode",
    "multi_tensor_encode",
    "multi_tensor_join",
    "multi_tensor_l2norm",
    "multi_tensor_lerp",
    "multi_tensor_measure",
    "multi_tensor_renew",
    "multi_tensor_sample",
    "multi_tensor_scale",
    "multi_tensor_split",
    "multi_tensor_take",
    "multi_tensor_unscale",
    "multi_tensor_unscale_clipped",
]

_CHECKS = {"x": 1, "y": 2, "both": 3}


def is_host(device: torch.device) -> bool:
    """Whether tensors on ``device`` can be read at once, without waiting for work that was queued.

    Example:
        >>> is_host(torch.device("cpu")), is_host(torch.device("meta"))
        (True, False)
    """
    return device.type == "cpu"


def multi_tensor_unscale(
    grads: Entries,
    outs: Entries,
    inv_scale: Tensor,
    stats: GradStats,
    *,
    accumulate: bool | Sequence[bool] = False,
    write: bool = True,
    tables: PointerTables | None = None,
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
        tables: the cache of this call site.

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
    results = (stats.nonfinite, stats.sumsq, stats.norm, stats.found_inf)
    arguments = (inv_scale, *results, write)
    if tables is not None and tables.repeats("unscale", (grads, outs), (*arguments, accumulate), write):
        stats.touched = True
        return
    call = call_for(UNSCALE, (grads, outs), tables, stats.norm.device)
    plan = call.plan
    check_given(UNSCALE.name, plan, {"inv_scale": inv_scale}, stats, {"accumulate": accumulate})
    stats.touched = True
    for _, row in plan.by_reference:
        grad, out = call.row(row)
        add = accumulate if isinstance(accumulate, bool) else bool(accumulate[row])
        reference.unscale(row, grad, out, inv_scale.view(()), add, write, stats)
    if plan.serving is None:
        return reference.finish(stats)
    plan.serving.launch(call, "unscale", *arguments, results=results, flags=accumulate, writes=write)


def multi_tensor_check(
    grads: Entries,
    inv_scale: Tensor,
    stats: GradStats,
    *,
    tables: PointerTables | None = None,
) -> None:
    """What :func:`multi_tensor_unscale` into float32 would find: flags and norm of ``grads[i] * inv_scale``.

    Args:
        grads: n tensors: float16, bfloat16 or float32. They stay as they are.
        inv_scale, stats, tables: as for :func:`multi_tensor_unscale`.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> stats = GradStats.allocate(1, "cpu")
        >>> multi_tensor_check([torch.full((2,), 6.0).half()], torch.tensor(0.5), stats)
        >>> stats.sumsq.item(), stats.found_inf.item()
        (18.0, 0.0)
    """
    results = (stats.nonfinite, stats.sumsq, stats.norm, stats.found_inf)
    if tables is not None and tables.repeats("unscale", (grads,), (inv_scale, *results, False, False), False):
        stats.touched = True
        return
    call = call_for(CHECK, (grads,), tables, stats.norm.device)
    plan = call.plan
    check_given(CHECK.name, plan, {"inv_scale": inv_scale}, stats)
    stats.touched = True
    for _, row in plan.by_reference:
        (grad,) = call.row(row)
        out = torch.empty_like(grad, dtype=torch.float32)  # judged is what float32 ones would hold
        reference.unscale(row, grad, out, inv_scale.view(()), False, False, stats)
    if plan.serving is None:
        return reference.finish(stats)
    name = "check" if plan.serving is cuda else "unscale"
    plan.serving.launch(call, name, inv_scale, *results, False, results=results, flags=False)


def multi_tensor_unscale_clipped(
    grads: Entries,
    outs: Entries,
    inv_scale: Tensor,
    factor: Tensor,
    *,
    tables: PointerTables | None = None,
) -> None:
    """``outs[i] = (grads[i] * inv_scale) * factor``, each multiplication rounded: unscaling and clipping in one pass.

    Args:
        grads: n tensors: float16, bfloat16 or float32; float64 with a float64 ``out``.
        outs: n tensors of the same shapes: float32, or float64. Written; ``outs[i]`` may be ``grads[i]``.
        inv_scale: float32, shape [], on the device. 1 / loss scale.
        factor: float32, shape [], on the device.
        tables: the cache of this call site; one that serves :func:`multi_tensor_unscale` on the same lists serves here.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> out = [torch.zeros(1)]
        >>> multi_tensor_unscale_clipped([torch.tensor([8.0]).half()], out, torch.tensor(0.5), torch.tensor(0.25))
        >>> out
        [tensor([1.])]
    """
    if tables is not None and tables.repeats("unscale_clipped", (grads, outs), (inv_scale, factor), True):
        return
    call = call_for(UNSCALE, (grads, outs), tables, getattr(inv_scale, "device", None))
    plan = call.plan
    check_given("multi_tensor_unscale_clipped", plan, {"inv_scale": inv_scale, "factor": factor})
    for _, row in plan.by_reference:
        grad, out = call.row(row)
        reference.unscale_clipped(grad, out, inv_scale.view(()), factor.view(()))
    if plan.serving is not None:
        plan.serving.launch(call, "unscale_clipped", inv_scale, factor)


def multi_tensor_l2norm(tensors: Entries, *, tables: PointerTables | None = None) -> tuple[Tensor, Tensor]:
    """The 2-norm over all tensors, and of each, summed in a fixed order.

    Squares are float32 where they stay in its range, and so are the sums of four of them, of 16-bit tensors of eight;
    all else is float64 (relative error of the norm below 1e-7; of float64 tensors everything is). The result is
    bit-equal for every thread count and vector width, and to the norm that :func:`multi_tensor_unscale` reports for the
    same values in the same dtype.

    Args:
        tensors: n tensors, float16 to float64. None counts 0.
        tables: the cache of this call site.

    Returns:
        (norm, float64, shape []; norms, float64, shape [n]), on the tensors' device.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> multi_tensor_l2norm([torch.tensor([3e30, 4e30]), None])[1]
        tensor([5.0000e+30, 0.0000e+00], dtype=torch.float64)
    """
    call = call_for(L2NORM, (tensors,), tables, None)
    plan = call.plan
    sumsq = torch.zeros(plan.count, dtype=sum_dtype(plan.device), device=plan.device)
    for _, row in plan.by_reference:
        sumsq[row] = reference.sum_of_squares(call.row(row)[0])
    if plan.serving is None:
        return reference.norms(sumsq)
    norm, norms = sumsq.new_zeros(()), torch.zeros_like(sumsq)
    plan.serving.launch(call, "l2norm", sumsq, norm, norms, results=(sumsq,), again=False)
    return norm, norms


def multi_tensor_scale(tensors: Entries, factor: Tensor, *, tables: PointerTables | None = None) -> None:
    """``tensors[i] *= factor`` in place. On the CPU a factor of exactly 1 touches no memory of the tensors.

    Args:
        tensors: n tensors, float16 to float64. One multiplication in float32, rounded to the tensor's dtype; float64
            tensors are multiplied by ``double(factor)``.
        factor: float32, shape [], on the device.
        tables: the cache of this call site.

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
    if on_host and factor.item() == 1.0:  # before the tables: nothing to clip costs nothing
        return
    if tables is not None and tables.repeats("scale", (tensors,), (factor,), True):
        return
    call = call_for(SCALE, (tensors,), tables, factor.device)
    plan = call.plan
    check_given(SCALE.name, plan, {"factor": factor})
    for _, row in plan.by_reference:
        reference.scale(call.row(row)[0], factor.view(()))
    if plan.serving is not None:
        plan.serving.launch(call, "scale", factor)


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
    tables: PointerTables | None = None,
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
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`, and for an ``a`` or ``b`` outside float32.

    Example:
        >>> out = [torch.zeros(1)]
        >>> multi_tensor_axpby(2.0, [torch.ones(1).half()], -1.0, [torch.ones(1)], out)
        >>> out
        [tensor([1.])]
    """
    if check not in _CHECKS:
        raise ValueError(f"{AXPBY.name}: check must be 'both', 'x' or 'y', got {check!r}.")
    a, b = _as_single("a", a), _as_single("b", b)
    checked, flag = (0, 0) if found_inf is None else (_CHECKS[check], found_inf)
    if tables is not None and tables.repeats("axpby", (xs, ys, outs), (a, b, checked, flag), True):
        return
    call = call_for(AXPBY, (xs, ys, outs), tables, getattr(found_inf, "device", None))
    plan = call.plan
    check_given(AXPBY.name, plan, {"found_inf": found_inf})
    for _, row in plan.by_reference:
        x, y, out = call.row(row)
        reference.axpby(a, x, b, y, out, found_inf, check)
    if plan.serving is not None:
        plan.serving.launch(call, "axpby", a, b, checked, flag, results=(flag,))


def multi_tensor_cast(
    masters: Entries, params: Entries, stats: CastStats, *, tables: PointerTables | None = None
) -> None:
    """``params[i] = masters[i]`` rounded to nearest, ties to even, with flags.

    Args:
        masters: n float32 tensors.
        params: n float16 or bfloat16 tensors of the same shapes. Written.
        stats: for n tensors. Rows of entries that are not None are overwritten: ``TOO_LARGE`` where a finite master
            became infinite (float16: from 65520 on), ``NOT_FINITE`` where a master is infinite or not a number.
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> stats = CastStats.allocate(1, "cpu")
        >>> multi_tensor_cast([torch.tensor([65520.0])], [torch.zeros(1).half()], stats)
        >>> stats.overflow.item() == TOO_LARGE
        True
    """
    if tables is not None and tables.repeats("cast", (masters, params), (stats.overflow,), True):
        return
    call = call_for(CAST, (masters, params), tables, stats.overflow.device)
    plan = call.plan
    check_given(CAST.name, plan, {}, stats)
    for _, row in plan.by_reference:
        master, param = call.row(row)
        reference.cast(row, master, param, stats)
    if plan.serving is not None:
        plan.serving.launch(call, "cast", stats.overflow, results=(stats.overflow,))


def multi_tensor_sample(tensors: Entries, samples: Tensor, *, tables: PointerTables | None = None) -> None:
    """A 64-bit digest of sampled bits of each 16-bit tensor, by which a write to it is noticed.

    Of a tensor with up to 16,384 elements all are looked at; of a larger one about one in a thousand, in a lattice
    whose step has no divisor in common with the length of any dimension. So a change of most elements is seen, and so
    is one of a whole column of a matrix with a thousand rows; one of few elements of a large tensor may not be.

    Args:
        tensors: n float16 or bfloat16 tensors. Two with the same values in the same memory order have one digest.
        samples: int64, shape [n], on the device. Rows of entries that are not None are overwritten; an empty tensor
            gives 0. The same bits on every device and for every number of threads.
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> samples = torch.zeros(1, dtype=torch.int64)
        >>> multi_tensor_sample([torch.ones(5).half()], samples)
        >>> samples.item() != 0
        True
    """
    if tables is not None and tables.repeats("sample", (tensors,), (samples,), True):
        return
    call = call_for(SAMPLE, (tensors,), tables, getattr(samples, "device", None))
    plan = call.plan
    check_result(SAMPLE.name, "samples", samples, plan.count, torch.int64, plan.device)
    for _, row in plan.by_reference:
        samples[row] = reference.sample(call.row(row)[0])
    if plan.serving is not None:
        plan.serving.launch(call, "sample", samples, results=(samples,))
