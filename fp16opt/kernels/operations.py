"""The multi-tensor operations that every step is made of; the docstring of the package says what holds for all."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import backends, cuda, cuda_steps, reference, reference_split, reference_steps
from .backends import captures
from .calls import Call, Entries, Operation, PointerTables
from .cuda_rows import KERNELS, Blocks
from .formulas import FORMULAS, AdamOptions, Formula, LionOptions, SgdOptions
from .reference_steps import Factors
from .stats import CastStats, GradStats, check_given, check_result, sum_dtype
from .tables import (
    AXPBY,
    BFLOAT,
    CAST,
    CHECK,
    HALF,
    JOIN,
    L2NORM,
    REMAINDERS,
    SAMPLE,
    SCALE,
    SINGLE,
    SPLIT,
    UNSCALE,
    call_for,
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
    "step_columns",
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
        >>> stats.overflow.item()  # kernels.TOO_LARGE
        1
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


# -- split masters: a 16-bit weight and a 16-bit remainder in place of a float32 ---------------------------------------


def multi_tensor_split(
    masters: Entries,
    params: Entries,
    remainders: Entries,
    stats: CastStats,
    *,
    tables: PointerTables | None = None,
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
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> master, weight, rest = torch.tensor([1 + 2**-20]), torch.zeros(1).bfloat16(), torch.zeros(1).short()
        >>> multi_tensor_split([master], [weight], [rest], CastStats.allocate(1, "cpu"))
        >>> weight.item(), rest.item()
        (1.0, 8)
    """
    lists = (masters, params, remainders)
    if tables is not None and tables.repeats("split", lists, (stats.overflow,), True):
        return
    with torch.no_grad():
        call = call_for(SPLIT, lists, tables, stats.overflow.device)
        plan = call.plan
        check_given(SPLIT.name, plan, {}, stats)
        for _, row in plan.by_reference:
            master, param, remainder = call.row(row)
            reference_split.split(row, master, param, remainder, stats)
        if plan.serving is not None:
            plan.serving.launch(call, "split", stats.overflow, results=(stats.overflow,))


def multi_tensor_join(
    params: Entries, remainders: Entries, outs: Entries, *, tables: PointerTables | None = None
) -> None:
    """``outs[i]`` becomes the master that ``params[i]`` and ``remainders[i]`` stand for.

    Args:
        params: n float16 or bfloat16 tensors.
        remainders: n int16 or int8 tensors of the same shapes.
        outs: n float32 tensors of the same shapes. Written.
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> out = torch.zeros(1)
        >>> multi_tensor_join([torch.ones(1).bfloat16()], [torch.tensor([8], dtype=torch.int16)], [out])
        >>> out.item() == 1 + 2**-20
        True
    """
    if tables is not None and tables.repeats("join", (params, remainders, outs), (), True):
        return
    with torch.no_grad():
        call = call_for(JOIN, (params, remainders, outs), tables, None)
        for _, row in call.plan.by_reference:
            param, remainder, out = call.row(row)
            reference_split.join(param, remainder, out)
        if call.plan.serving is not None:
            call.plan.serving.launch(call, "join")


# -- the one-pass optimizer steps: gradient in, master, state and 16-bit weight out ------------------------------------
#
# A stored gradient g becomes (float32(g) * inv_scale) * coefficient, two roundings, and the step's formulas are torch's
# with every operation rounded: compiled kernels and the references of :mod:`.formulas` give the same bits.

_NO_STATS = "stats must be given along with models, got None. Use CastStats.allocate."
_MODELS = "float32, but for models of float16 or bfloat16 and gradients of float32 or the model's dtype"


def _owned(grad: torch.dtype, *others: torch.dtype) -> bool:
    return grad == SINGLE and all(dtype == SINGLE for dtype in others)


def _with_models(grad: torch.dtype, *others: torch.dtype) -> bool:
    master, *singles, model = others
    fits = model in (HALF, BFLOAT) and grad in (SINGLE, model) and master in (SINGLE, *REMAINDERS)
    return fits and all(dtype == SINGLE for dtype in singles)


class _Served(NamedTuple):
    """What a step with so many lists of state needs: its formula, its lists as the guards see them, its CUDA kernel."""

    formula: Formula
    operation: Operation
    kernel: str


def _served(name: str, formula: Formula) -> Iterator[tuple[tuple[str, int, bool], _Served]]:
    """A formula's steps, by its name, the number of lists of state, and whether there are models."""
    counters = "steps" if formula.counts else ""
    for count, kernel in enumerate(formula.kernels, formula.least()):
        lists = ("grads", "masters", *(f"{one}s" for one in formula.state[:count]))
        called, coded = f"multi_tensor_{name}", ("cpu", "cuda")
        own = Operation(called, lists, _owned, "float32 each", (1,), 1, counters)
        with_models = (*lists, "models")
        models = Operation(called, with_models, _with_models, _MODELS, (len(lists),), 1, counters, coded=coded)
        yield (name, count, False), _Served(formula, own, kernel)
        yield (name, count, True), _Served(formula, models, kernel)


_STEPS = dict(itertools.chain.from_iterable(itertools.starmap(_served, FORMULAS.items())))


class Given(NamedTuple):
    """What every step is given beside its lists; see :func:`multi_tensor_step`.

    Attributes:
        has_models: whether masters have 16-bit parameters, whose ``stats`` are written.
        first: which state holds nothing yet.
    """

    factors: Factors
    options: Sequence[Any]
    group_of: Sequence[int]
    has_models: bool
    stats: CastStats | None
    found_inf: Tensor | None
    tables: PointerTables | None
    first: Sequence[bool] | None = None


def behind_lists(
    functor: str,
    factors: Factors,
    stats: CastStats | None,
    group_of: Sequence[int],
    groups: Iterable[bytes],
    number: int,
) -> tuple[Any, ...]:
    """What the compiled CPU step has behind its lists, but for flags.

    Args:
        stats: where there are models, else None.
        groups: the param_groups' options, packed.
    """
    overflow = 0 if stats is None else stats.overflow
    return functor, *factors, overflow, stats is not None, group_of, b"".join(groups), number & 0xFFFFFFFF


def check_options(name: str, kind: type[Any], options: Sequence[Any]) -> None:
    """Raise unless the options of all groups are of a kind, and their betas have powers.

    Raises:
        TypeError: of another kind, or an lr that is neither a number nor a tensor. ValueError: a beta.
    """
    for place, given in enumerate(options):
        if type(given) is not kind or not isinstance(given[0], (int, float, Tensor)):
            raise TypeError(
                f"{name}: options[{place}] must be {kind.__name__}, with a number or a tensor for lr, got {given!r}."
            )
        for beta in ("beta1", "beta2"):
            value = getattr(given, beta, 0.0)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name}: options[{place}].{beta} must be at least 0 and less than 1, got {value}.")


def step_call(operation: Operation, lists: tuple[Entries, ...], given: Given) -> Call | None:
    """The lists of a step, checked with what is given beside them; None where the host reads that it is to skip.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`multi_tensor_step`.
    """
    factors, found_inf = given.factors, given.found_inf
    call = call_for(operation, lists, given.tables, getattr(factors[0], "device", None))
    if given.has_models and given.stats is None:
        raise ValueError(f"{operation.name}: {_NO_STATS}")
    numbers = {"factors.inv_scale": factors[0], "factors.coefficient": factors[1], "found_inf": found_inf}
    each: dict[str, Any] = {"group_of": given.group_of, "first": given.first}
    stats = given.stats if given.has_models else None
    check_given(operation.name, call.plan, numbers, stats, each, len(given.options))
    if call.plan.is_coded and captures(call.plan.device):
        raise RuntimeError(
            f"{operation.name}: state and remainders of 8 bits are rounded by the number of the step, and each replay "
            "of the CUDA graph that is being captured would take this one's. Step outside of the graph, or use float32 "
            "state and masters."
        )
    decided = found_inf is not None and call.plan.decided_here and bool(found_inf.item())
    return None if decided else call


PACKS = {name: kernel.group.on_host().pack for name, kernel in KERNELS.items() if kernel.blocks is Blocks.STEPPING}
"""By kernel: what packs the options of a param_group as compiled code reads them on the CPU."""


def multi_tensor_step(
    formula: str,
    grads: Entries,
    masters: Entries,
    state: Sequence[Entries],
    options: Sequence[Any],
    group_of: Sequence[int],
    factors: Factors,
    *,
    steps: Entries | None = None,
    first: Sequence[bool] | None = None,
    models: Entries | None = None,
    stats: CastStats | None = None,
    found_inf: Tensor | None = None,
    number: int = 0,
    tables: PointerTables | None = None,
) -> None:
    """One step of n tensors by a formula, in one pass over their memory. Messages name it multi_tensor_FORMULA.

    Args:
        formula: a key of :data:`.formulas.FORMULAS`.
        grads: n tensors, still scaled: float32, or the dtype of ``models[i]``. Read only.
        masters: n float32 tensors of the same shapes, or int16 or int8 remainders to ``models``. Written, as all the
            following.
        state: the formula's lists, all or those that it needs, of n float32 tensors of the same shapes.
        options: of the param_groups, the formula's. An ``lr`` that is a tensor on the device is read there.
        group_of: for each of the n entries, its place in ``options``.
        factors: what gradients are multiplied by.
        steps: for formulas that count: n float32 tensors of one element, each its own: how many steps were taken.
            Counted up. Where they are on the CPU and the others are not, the step is decided on the host: one wait, if
            ``found_inf`` is given.
        first: for formulas that fill state in the first step: which of the n hold nothing yet.
        models: n float16 or bfloat16 tensors of the same shapes, to which masters are rounded; None where masters are
            the parameters themselves.
        stats: for n tensors; written with ``models``, as by :func:`fp16opt.kernels.multi_tensor_cast`.
        found_inf: float32, shape [], on the device: where it is not 0, nothing is written. Compiled kernels look at it
            there; torch operations wait for it.
        number: of the step, by which masters with int8 remainders are rounded; modulo 2**32.
        tables: the cache of this call site.

    Raises:
        TypeError: a wrong type or dtype. ValueError: lengths, shapes or devices that differ, or another number of lists
            than the formula has. RuntimeError: a CUDA graph is being captured, and something has 8 bits. Nothing is
            written then.

    Example:
        >>> master, m, one = [torch.ones(1)], [torch.zeros(1)], torch.tensor(1.0)
        >>> options = [LionOptions(0.25, 0.5, 0.5, 0.0, False)]
        >>> multi_tensor_step("lion", [torch.ones(1)], master, [m], options, [0], Factors(one, one))
        >>> master[0], m[0]
        (tensor([0.7500]), tensor([0.5000]))
    """
    served = _STEPS.get((formula, len(state), models is not None))
    if served is None or (steps is None) is served.formula.counts:
        if formula not in FORMULAS:
            raise ValueError(f"formula: expected one of {', '.join(map(repr, FORMULAS))}, got {formula!r}.")
        row = FORMULAS[formula]
        raise ValueError(
            f"multi_tensor_{formula}: state must have {row.least()} to {len(row.state)} lists, of "
            f"{', '.join(row.state)}, and steps {'be a list' if row.counts else 'be None'}; got {len(state)} lists "
            f"and steps {'None' if steps is None else 'in a list'}."
        )
    row, operation, kernel = served
    check_options(operation.name, row.options, options)
    lists = (grads, masters, *state)
    lists = lists if models is None else (*lists, models)
    lists = lists if steps is None else (*lists, steps)
    fills = first if row.fills_first and state else None
    fresh: bool | Sequence[bool] = False if fills is None else fills
    found = None if models is None else stats
    if tables is not None and tables.known is not None and found_inf is None:
        packed = itertools.starmap(PACKS[kernel], options)
        behind = behind_lists(row.struct, factors, found, group_of, packed, number)
        if tables.repeats("step", lists, (*behind, fresh), True):
            return
    given = Given(factors, options, group_of, models is not None, stats, found_inf, tables, fills)
    with torch.no_grad():
        call = step_call(operation, lists, given)
        if call is None:
            return
        plan = call.plan
        for _, place in plan.by_reference:
            grad, master, *rest = call.row(place)
            kept, others = rest[: len(state)], rest[len(state) :]
            t = float(others[-1].add_(1.0)) if row.counts else 0.0
            begins = fresh if isinstance(fresh, bool) else bool(fresh[place])
            with reference_steps.whole(place, master, None if found is None else others[0], found, number) as single:
                reference_steps.step(row.reference, grad, single, kept, options[group_of[place]], factors, t, begins)
        if plan.serving is cuda:
            cuda_steps.launch(call, kernel, options, group_of, factors, found, found_inf, fresh, number)
        elif plan.serving is not None:
            packed = itertools.starmap(PACKS[kernel], options)
            behind = behind_lists(row.struct, factors, found, group_of, packed, number)
            plan.serving.launch(call, "step", *behind, results=behind[3:4], flags=fresh)


def step_columns(
    name: str,
    formula: Formula,
    columns: dict[str, list[Tensor | None]],
    options: Sequence[Any],
    group_of: Sequence[int],
    factors: Factors,
    first: Sequence[bool],
    **rest: Any,
) -> None:
    """:func:`multi_tensor_step` of lists by name: grads, masters, step, and of the formula's state what is there."""
    state = [*map(columns.__getitem__, filter(columns.__contains__, formula.state))]
    lists = columns["grads"], columns["masters"], state
    multi_tensor_step(name, *lists, options, group_of, factors, steps=columns.get("step"), first=first, **rest)
