"""The multi-tensor operations: one typed function each, over lists of tensors.

All lists of a call have the same length n, and all tensors live on one device. An entry may be None: it is skipped,
and its statistics stay as they are. Results are written into tensors that the caller gives, on the device, and
nothing waits for the device. Tensors may have any strides; those that one index can walk through memory together
are served by a compiled kernel where there is one (:func:`backend`), all others by :mod:`fp16opt.kernels.reference`,
with the same bits.

Every function takes ``tables``, a :class:`PointerTables` of the call site, to save time by skipping checks made before.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from . import cuda, native, reference
from .checks import accumulate_flags, as_single, check_grad_stats, check_result
from .splitting import multi_tensor_join, multi_tensor_renew, multi_tensor_split
from .stats import INF, NAN, NOT_FINITE, TOO_LARGE, CastStats, GradStats, sum_dtype
from .tables import (
    AXPBY,
    CAST,
    CHECK,
    HALF_DTYPES,
    HASH,
    L2NORM,
    SCALE,
    TAKE,
    UNSCALE,
    Call,
    Entries,
    PointerTables,
    Seen,
    Watch,
    call_for,
)

__all__ = [
    "HALF_DTYPES",
    "INF",
    "NAN",
    "NOT_FINITE",
    "TOO_LARGE",
    "CastStats",
    "GradStats",
    "PointerTables",
    "Seen",
    "Watch",
    "backend",
    "multi_tensor_axpby",
    "multi_tensor_cast",
    "multi_tensor_check",
    "multi_tensor_hash",
    "multi_tensor_join",
    "multi_tensor_l2norm",
    "multi_tensor_renew",
    "multi_tensor_scale",
    "multi_tensor_split",
    "multi_tensor_take",
    "multi_tensor_unscale",
    "multi_tensor_unscale_clipped",
]


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
    served_by = _compiled(torch.device(device))
    return "reference" if served_by is None else "cpu" if served_by is native else "cuda"


def _compiled(device: torch.device) -> ModuleType | None:
    """The room that calls the compiled kernels for a device; None where torch operations serve."""
    if device.type == "cpu":
        return native if native.available() else None
    return cuda if cuda.serves(device) else None


def _watched_call(
    name: str, watch: Watch | None, count: int, device: torch.device, compiled: ModuleType | None
) -> Call | None:
    """The tensors to be hashed along with n = ``count`` gradients, checked; those of odd layout hashed already."""
    if watch is None:
        return None
    call = call_for(HASH, (watch.params,), watch.tables)
    if call.plan.count != count:
        raise ValueError(
            f"{name}: watch.params has {call.plan.count} entries, grads has {count}. Give None for what is not to be "
            "watched."
        )
    if call.plan.device is not None and call.plan.device != device:
        raise ValueError(f"{name}: watch.params are on {call.plan.device}, the gradients on {device}.")
    check_result(name, "watch.hashes", watch.hashes, count, torch.int64, device)
    check_result(name, "watch.samples", watch.samples, count, torch.int64, device)
    _hash_indirect(call, watch.hashes, False, compiled)
    _hash_indirect(call, watch.samples, True, compiled)
    return call


def _hash_indirect(call: Call, hashes: Tensor, sample: bool, compiled: ModuleType | None) -> None:
    operation = reference.content_sample if sample else reference.content_hash
    for place, row in call.for_reference(compiled is not None):
        hashes[row] = operation(call.columns[0][place])


def _unscale(
    call: Call,
    inv_scale: Tensor,
    adds: bool | list[bool],
    write: bool,
    stats: GradStats,
    watch: Watch | None,
    compiled: ModuleType | None,
) -> None:
    """The pass of :func:`multi_tensor_unscale` and :func:`multi_tensor_check`, on lists that were checked."""
    name, device = call.plan.operation.name, call.plan.device or stats.norm.device
    stats.touched = True
    watched = _watched_call(name, watch, call.plan.count, device, compiled)
    for place, row in call.for_reference(compiled is not None):
        grad, out = call.columns[0][place], call.columns[1][place]
        if call.plan.operation is CHECK:  # which has no outs, and judges what float32 ones would hold
            out = torch.empty_like(grad, dtype=torch.float32)
        add = adds if isinstance(adds, bool) else adds[place]
        reference.unscale(row, grad, out, inv_scale.view(()), add, write, stats)
    if compiled is not None:
        compiled.unscale(call, inv_scale, adds, write, stats, watched, watch)
    else:
        reference.finish(stats)


def multi_tensor_unscale(
    grads: Entries,
    outs: Entries,
    inv_scale: Tensor,
    stats: GradStats,
    *,
    accumulate: bool | Sequence[bool] = False,
    write: bool = True,
    watch: Watch | None = None,
    tables: PointerTables | None = None,
) -> None:
    """``outs[i] = grads[i] * inv_scale``, with non-finite flags and the norm of what was written, in one pass.

    One rounding for each multiplication and one for each addition. The norm of float16 ``grads`` that are not added to
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
        watch: 16-bit tensors to be hashed in the same pass.
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
    with torch.no_grad():
        call = call_for(UNSCALE, (grads, outs), tables)
        device = call.plan.device or stats.norm.device
        check_result(UNSCALE.name, "inv_scale", inv_scale, 1, torch.float32, device)
        check_grad_stats(stats, call.plan.count, device)
        adds = accumulate_flags(accumulate, call.plan.rows, call.plan.count)
        if not write and accumulate is not False:
            raise ValueError(f"{UNSCALE.name}: write=False goes with accumulate=False only.")
        _unscale(call, inv_scale, adds, write, stats, watch, _compiled(device))


def multi_tensor_check(
    grads: Entries,
    inv_scale: Tensor,
    stats: GradStats,
    *,
    watch: Watch | None = None,
    tables: PointerTables | None = None,
) -> None:
    """What :func:`multi_tensor_unscale` into float32 would find: flags and norm of ``grads[i] * inv_scale``.

    Args:
        grads: n tensors: float16, bfloat16 or float32. They stay as they are.
        inv_scale, stats, watch, tables: as for :func:`multi_tensor_unscale`.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> stats = GradStats.allocate(1, "cpu")
        >>> multi_tensor_check([torch.full((2,), 6.0).half()], torch.tensor(0.5), stats)
        >>> stats.sumsq.item(), stats.found_inf.item()
        (18.0, 0.0)
    """
    with torch.no_grad():
        call = call_for(CHECK, (grads, grads), tables)
        device = call.plan.device or stats.norm.device
        check_result(CHECK.name, "inv_scale", inv_scale, 1, torch.float32, device)
        check_grad_stats(stats, call.plan.count, device)
        _unscale(call, inv_scale, False, False, stats, watch, _compiled(device))


def multi_tensor_unscale_clipped(
    grads: Entries,
    outs: Entries,
    inv_scale: Tensor,
    factor: Tensor,
    *,
    watch: Watch | None = None,
    tables: PointerTables | None = None,
) -> None:
    """``outs[i] = (grads[i] * inv_scale) * factor``, each multiplication rounded: unscaling and clipping in one pass.

    Args:
        grads: n tensors: float16, bfloat16 or float32; float64 with a float64 ``out``.
        outs: n tensors of the same shapes: float32, or float64. Written; ``outs[i]`` may be ``grads[i]``.
        inv_scale: float32, shape [], on the device. 1 / loss scale.
        factor: float32, shape [], on the device.
        watch: 16-bit tensors to be hashed in the same pass.
        tables: the cache of this call site; one that serves :func:`multi_tensor_unscale` on the same lists serves here.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> out = [torch.zeros(1)]
        >>> multi_tensor_unscale_clipped([torch.tensor([8.0]).half()], out, torch.tensor(0.5), torch.tensor(0.25))
        >>> out
        [tensor([1.])]
    """
    with torch.no_grad():
        call = call_for(UNSCALE, (grads, outs), tables)
        device = call.plan.device or inv_scale.device
        name = "multi_tensor_unscale_clipped"
        check_result(name, "inv_scale", inv_scale, 1, torch.float32, device)
        check_result(name, "factor", factor, 1, torch.float32, device)
        compiled = _compiled(device)
        watched = _watched_call(name, watch, call.plan.count, device, compiled)
        for place, _ in call.for_reference(compiled is not None):
            grad, out = call.columns[0][place], call.columns[1][place]
            reference.unscale_clipped(grad, out, inv_scale.view(()), factor.view(()))
        if compiled is not None:
            compiled.unscale_clipped(call, inv_scale, factor, watched, watch)


def multi_tensor_l2norm(tensors: Entries, *, tables: PointerTables | None = None) -> tuple[Tensor, Tensor]:
    """The 2-norm over all tensors, and of each, summed in a fixed order.

    Squares and sums are float64, but for float16 tensors: there a square, which is exact, and a sum of eight of them
    are float32, and what follows is float64 (relative error of the norm below 1e-7). The result is bit-equal for every
    thread count and vector width, and to the norm that :func:`multi_tensor_unscale` reports for the same values in
    the same dtype.

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
    with torch.no_grad():
        call = call_for(L2NORM, (tensors,), tables)
        device = call.plan.device or torch.device("cpu")
        sumsq = torch.zeros(call.plan.count, dtype=sum_dtype(device), device=device)
        compiled = _compiled(device)
        for place, row in call.for_reference(compiled is not None):
            sumsq[row] = reference.sum_of_squares(call.columns[0][place])
        if compiled is not None:
            found: tuple[Tensor, Tensor] = compiled.l2norm(call, sumsq)
            return found
        return reference.norms(sumsq)


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
    with torch.no_grad():
        check_result(SCALE.name, "factor", factor, 1, torch.float32, getattr(factor, "device", None))
        on_host = factor.device.type == "cpu" and _compiled(factor.device) is not cuda
        if on_host and factor.item() == 1.0:  # before the tables: nothing to clip costs nothing
            return
        call = call_for(SCALE, (tensors,), tables)
        check_result(SCALE.name, "factor", factor, 1, torch.float32, call.plan.device or factor.device)
        compiled = _compiled(factor.device)
        for place, _ in call.for_reference(compiled is not None):
            reference.scale(call.columns[0][place], factor.view(()))
        if compiled is not None:
            compiled.scale(call, factor)


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
    if check not in ("both", "x", "y"):
        raise ValueError(f"{AXPBY.name}: check must be 'both', 'x' or 'y', got {check!r}.")
    a, b = as_single("a", a), as_single("b", b)
    with torch.no_grad():
        call = call_for(AXPBY, (xs, ys, outs), tables)
        if found_inf is not None:
            device = call.plan.device or getattr(found_inf, "device", None)
            check_result(AXPBY.name, "found_inf", found_inf, 1, torch.float32, device)
        compiled = _compiled(call.plan.device or torch.device("cpu"))
        for place, _ in call.for_reference(compiled is not None):
            x, y, out = (column[place] for column in call.columns)
            reference.axpby(a, x, b, y, out, found_inf, check)
        if compiled is not None:
            compiled.axpby(call, a, b, found_inf, check)


def multi_tensor_cast(
    masters: Entries, params: Entries, stats: CastStats, *, tables: PointerTables | None = None
) -> None:
    """``params[i] = masters[i]`` rounded to nearest, ties to even, with flags and a hash of what was written.

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
    with torch.no_grad():
        call = call_for(CAST, (masters, params), tables)
        device, count = call.plan.device or stats.hashes.device, call.plan.count
        check_result(CAST.name, "stats.overflow", stats.overflow, count, torch.int32, device)
        check_result(CAST.name, "stats.hashes", stats.hashes, count, torch.int64, device)
        compiled = _compiled(device)
        for place, row in call.for_reference(compiled is not None):
            reference.cast(row, call.columns[0][place], call.columns[1][place], stats)
        if compiled is not None:
            compiled.cast(call, stats)


def multi_tensor_hash(
    tensors: Entries, hashes: Tensor, *, sample: bool = False, tables: PointerTables | None = None
) -> None:
    """A 64-bit hash of the bits of each 16-bit tensor: the one that :func:`multi_tensor_cast` gives for these bits.

    Args:
        tensors: n float16 or bfloat16 tensors.
        hashes: int64, shape [n]. Rows of entries that are not None are overwritten; an empty tensor gives 0.
        sample: read only 64 of every 8,192 elements, which gives the hash of these. In chunks of 65,536 elements; of a
            last one with at most 8,192 all are read.
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> hashes = torch.zeros(1, dtype=torch.int64)
        >>> multi_tensor_hash([torch.ones(5).half()], hashes)
        >>> hashes.item() != 0
        True
    """
    with torch.no_grad():
        call = call_for(HASH, (tensors,), tables)
        device = call.plan.device or getattr(hashes, "device", None)
        check_result(HASH.name, "hashes", hashes, call.plan.count, torch.int64, device)
        compiled = _compiled(hashes.device)
        _hash_indirect(call, hashes, sample, compiled)
        if compiled is not None:
            compiled.content_hash(call, hashes, sample)


def multi_tensor_take(
    masters: Entries,
    params: Entries,
    now: Tensor,
    then: Tensor,
    taken: Tensor,
    *,
    samples: tuple[Tensor, Tensor] | None = None,
    places: Tensor | None = None,
    tables: PointerTables | None = None,
) -> None:
    """Masters take the values of params that were written since a hash was taken, and nobody waits to know whether.

    Where ``now[i]`` is not ``then[i]``, ``masters[i]`` takes the elements of ``params[i]`` whose bits are not those of
    the rounded master; the other elements keep their low bits. Other masters are not read.

    Args:
        masters: n float32 tensors. Written.
        params: n float16 or bfloat16 tensors of the same shapes.
        now, then: int64, shape [n]. Hashes of the params, as :func:`multi_tensor_hash` gives them.
        taken: int32, shape [n]. Set to 1 where an element was taken; never cleared.
        samples: a second pair of hashes, of which a difference counts too.
        places: int64, shape [n]. Entry i's hash is ``now[places[i]]``, also in both ``samples``; default: ``now[i]``.
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> masters, hashes = [torch.tensor([1.0001, 2.0])], torch.zeros(2, 1, dtype=torch.int64)
        >>> hashes[0] = 1
        >>> multi_tensor_take(masters, [torch.tensor([1.0, 3.0]).half()], *hashes, torch.zeros(1, dtype=torch.int32))
        >>> masters[0]
        tensor([1.0001, 3.0000])
    """
    with torch.no_grad():
        call = call_for(TAKE, (masters, params), tables)
        device, count = call.plan.device or now.device, call.plan.count
        wide = count if places is None else now.numel()
        for name, hashes in (("now", now), *(("samples", each) for each in samples or ())):
            check_result(TAKE.name, name, hashes, wide, torch.int64, device)
        for name, each in (("then", then), *([] if places is None else [("places", places)])):
            check_result(TAKE.name, name, each, count, torch.int64, device)
        check_result(TAKE.name, "taken", taken, count, torch.int32, device)
        compiled = cuda if _compiled(device) is cuda else None  # on the CPU, where looking costs nothing, nobody asks
        for place, row in call.for_reference(compiled is not None):
            at = row if places is None else places[row]
            pairs = [now[at] != then[row], *([] if samples is None else [samples[0][at] != samples[1][at]])]
            reference.take(call.columns[0][place], call.columns[1][place], torch.stack(pairs).any(), taken[row])
        if compiled is not None:
            compiled.take(call, now, then, samples, places, taken)
