"""The one-pass optimizer steps over lists of tensors: gradient in, master, state and 16-bit weight out.

A stored gradient g becomes (float32(g) * inv_scale) * coefficient, two roundings, and the step's formulas are torch's
with every operation rounded: compiled kernels and :mod:`fp16opt.kernels.reference_steps` give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import backend, cuda_steps, native, reference_steps
from .checks import check_result
from .reference_steps import AdamOptions, Factors, SgdOptions
from .stats import CastStats
from .tables import BFLOAT, HALF, SINGLE, Call, Entries, Operation, PointerTables, call_for

__all__ = [
    "AdamOptions",
    "Factors",
    "SgdOptions",
    "StepTables",
    "multi_tensor_adam",
    "multi_tensor_sgd",
]

_MODELS = "float32, but for models of float16 or bfloat16 and gradients of float32 or the model's dtype"


def _owned(grad: torch.dtype, *others: torch.dtype) -> bool:
    return grad == SINGLE and all(dtype == SINGLE for dtype in others)


def _with_models(grad: torch.dtype, *others: torch.dtype) -> bool:
    master, *singles, model = others
    fits = model in (HALF, BFLOAT) and grad in (SINGLE, model) and master in (SINGLE, torch.int16)
    return fits and all(dtype == SINGLE for dtype in singles)


def _operation(name: str, *state: str) -> dict[bool, Operation]:
    """By whether there are models: the operation as the guards see it."""
    lists = ("grads", "masters", *state)
    return {
        False: Operation(name, lists, _owned, "float32 each", 1),
        True: Operation(name, (*lists, "models"), _with_models, _MODELS, 1),
    }


_ADAM = _operation("multi_tensor_adam", "exp_avgs", "exp_avg_sqs")
_AMSGRAD = _operation("multi_tensor_adam", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
_SGD = _operation("multi_tensor_sgd")
_MOMENTUM = _operation("multi_tensor_sgd", "momentum_buffers")
_COUNTS = Operation("multi_tensor_adam", ("steps",), lambda dtype: dtype == SINGLE, "float32")


@dataclass
class StepTables:
    """What one call site of a step remembers between calls; see :class:`fp16opt.kernels.PointerTables`."""

    lists: PointerTables = field(default_factory=PointerTables)
    counts: PointerTables = field(default_factory=PointerTables)


def _check_factors(name: str, factors: Factors, device: torch.device | None) -> None:
    check_result(name, "factors.inv_scale", factors.inv_scale, 1, torch.float32, device)
    check_result(name, "factors.coefficient", factors.coefficient, 1, torch.float32, device)


def _check_stats(name: str, stats: CastStats | None, models: Entries | None, call: Call) -> None:
    if models is None:
        return
    if stats is None:
        raise ValueError(f"{name}: stats must be given along with models, got None. Use CastStats.allocate.")
    device, count = call.plan.device or stats.hashes.device, call.plan.count
    check_result(name, "stats.overflow", stats.overflow, count, torch.int32, device)
    check_result(name, "stats.hashes", stats.hashes, count, torch.int64, device)


def _check_groups(name: str, group_of: Sequence[int], options: Sequence[object], call: Call) -> list[int]:
    """The group of each entry in use."""
    if len(group_of) != call.plan.count:
        raise ValueError(f"{name}: group_of has {len(group_of)} entries, grads has {call.plan.count}. Give one each.")
    used = [group_of[i] for i in call.plan.rows]
    if used and not 0 <= min(used) <= max(used) < len(options):
        raise ValueError(f"{name}: group_of reaches from {min(used)} to {max(used)}, there are {len(options)} options.")
    return used


def _check_betas(name: str, options: Sequence[AdamOptions]) -> None:
    for k, o in enumerate(options):
        for beta in ("beta1", "beta2"):
            value = getattr(o, beta)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name}: options[{k}].{beta} must be at least 0 and less than 1, got {value}.")


def _check_flag(found_inf: Tensor | None, name: str, device: torch.device | None) -> None:
    if found_inf is not None:
        check_result(name, "found_inf", found_inf, 1, torch.float32, device)


def _backend(call: Call, counts: Call | None = None) -> str:
    """What serves the entries whose memory is walked linearly."""
    if counts is not None and counts.plan.indirect:
        return "reference"
    return "reference" if call.plan.device is None else backend(call.plan.device)


def _skips(found_inf: Tensor | None, call: Call, serving: str, counts: Call | None = None) -> bool:
    """Whether the flag says that nothing may be written. Not asked where a kernel looks at it: that would wait."""
    on_host = counts is not None and not cuda_steps.counts_on_device(call, counts)
    if found_inf is None or (serving == "cuda" and not call.plan.indirect and not on_host):
        return False
    return bool(found_inf.item())


def _check_counts(name: str, call: Call, counts: Call) -> None:
    if counts.plan.rows != call.plan.rows or len(counts.plan.single) != len(call.plan.rows):
        raise ValueError(f"{name}: steps must have one element for each entry that is stepped.")


def _adam_by_torch(
    call: Call, place: int, row: int, count: Tensor, options: AdamOptions, factors: Factors, stats: CastStats | None
) -> None:
    """One entry's step. ``stats``: None where masters are the parameters themselves."""
    grad, master, *kept = (column[place] for column in call.columns)
    model = kept.pop() if stats is not None else None
    largest = kept[2] if len(kept) == 3 else None
    with reference_steps.whole(row, master, model, stats) as single:
        reference_steps.adam(grad, single, kept[0], kept[1], largest, float(count), options, factors)


def multi_tensor_adam(
    grads: Entries,
    masters: Entries,
    exp_avgs: Entries,
    exp_avg_sqs: Entries,
    steps: Entries,
    options: Sequence[AdamOptions],
    group_of: Sequence[int],
    factors: Factors,
    *,
    max_exp_avg_sqs: Entries | None = None,
    models: Entries | None = None,
    stats: CastStats | None = None,
    found_inf: Tensor | None = None,
    tables: StepTables | None = None,
) -> None:
    """One Adam or AdamW step of n tensors, in one pass over their memory.

    Args:
        grads: n tensors, still scaled: float32, or the dtype of ``models[i]``. Read only.
        masters: n float32 tensors of the same shapes, or int16 remainders to ``models``. Written, as all the following.
        exp_avgs, exp_avg_sqs: n float32 tensors of the same shapes.
        steps: n float32 tensors of one element, each its own: how many steps were taken. Counted up. Where they are not
            on the device of the others, the step is decided on the host: one wait, if ``found_inf`` is given.
        options: of the param_groups. An ``lr`` that is a tensor on the device is read there.
        group_of: for each of the n entries, its place in ``options``.
        factors: what gradients are multiplied by.
        max_exp_avg_sqs: n float32 tensors of the same shapes; given for amsgrad.
        models: n float16 or bfloat16 tensors of the same shapes, to which masters are rounded; None where masters are
            the parameters themselves.
        stats: for n tensors; written with ``models``, as by :func:`fp16opt.kernels.multi_tensor_cast`.
        found_inf: float32, shape [], on the device: where it is not 0, nothing is written. Compiled kernels look at it
            there; torch operations wait for it.
        tables: the cache of this call site.

    Raises:
        TypeError: a wrong type or dtype. ValueError: lengths, shapes or devices that differ. Nothing is written then.

    Example:
        >>> master, m, v, step = [torch.ones(1)], [torch.zeros(1)], [torch.zeros(1)], [torch.zeros(())]
        >>> options = [AdamOptions(0.1, 0.9, 0.999, 1e-8, 0.0, True, False)]
        >>> one = torch.tensor(1.0)
        >>> multi_tensor_adam([torch.ones(1)], master, m, v, step, options, [0], Factors(one, one))
        >>> master[0], step[0]
        (tensor([0.9000]), tensor(1.))
    """
    with torch.no_grad():
        state = [exp_avgs, exp_avg_sqs] + ([] if max_exp_avg_sqs is None else [max_exp_avg_sqs])
        kinds = _ADAM if max_exp_avg_sqs is None else _AMSGRAD
        operation, tables = kinds[models is not None], tables or StepTables()
        lists = (grads, masters, *state) if models is None else (grads, masters, *state, models)
        call = call_for(operation, lists, tables.lists)
        entries = [step if grad is not None else None for grad, step in zip(grads, steps, strict=True)]
        counts = call_for(_COUNTS, (entries,), tables.counts)
        used = _check_groups(operation.name, group_of, options, call)
        _check_factors(operation.name, factors, call.plan.device)
        _check_stats(operation.name, stats, models, call)
        _check_betas(operation.name, options)
        _check_flag(found_inf, operation.name, call.plan.device)
        _check_counts(operation.name, call, counts)
        serving = _backend(call, counts)
        if _skips(found_inf, call, serving, counts):
            return
        found = stats if models is not None else None
        for place, row in call.for_reference(serving != "reference"):
            _adam_by_torch(call, place, row, counts.columns[0][place].add_(1.0), options[used[place]], factors, found)
        if serving == "cpu":
            native.adam(call, counts, options, used, factors, found)
        elif serving == "cuda":
            cuda_steps.adam(call, counts, options, used, factors, found, found_inf)


def multi_tensor_sgd(
    grads: Entries,
    masters: Entries,
    options: Sequence[SgdOptions],
    group_of: Sequence[int],
    factors: Factors,
    *,
    momentum_buffers: Entries | None = None,
    first: Sequence[bool] | None = None,
    models: Entries | None = None,
    stats: CastStats | None = None,
    found_inf: Tensor | None = None,
    tables: StepTables | None = None,
) -> None:
    """One SGD step of n tensors, in one pass over their memory.

    Args:
        grads: n tensors, still scaled: float32, or the dtype of ``models[i]``. Read only.
        masters: n float32 tensors of the same shapes, or int16 remainders to ``models``. Written, as all the following.
        options: of the param_groups. An ``lr`` that is a tensor on the device is read there.
        group_of: for each of the n entries, its place in ``options``.
        factors: what gradients are multiplied by.
        momentum_buffers: n float32 tensors of the same shapes; None steps without momentum.
        first: given with momentum_buffers: which of the n hold nothing yet.
        models, stats, found_inf, tables: as for :func:`multi_tensor_adam`.

    Raises:
        TypeError: a wrong type or dtype. ValueError: lengths, shapes or devices that differ. Nothing is written then.

    Example:
        >>> master, one = [torch.ones(1)], torch.tensor(1.0)
        >>> options = [SgdOptions(0.25, 0.0, 0.0, 0.0, False, False)]
        >>> multi_tensor_sgd([torch.ones(1)], master, options, [0], Factors(one, one))
        >>> master[0]
        tensor([0.7500])
    """
    with torch.no_grad():
        state = [] if momentum_buffers is None else [momentum_buffers]
        operation = (_SGD if momentum_buffers is None else _MOMENTUM)[models is not None]
        lists = (grads, masters, *state) if models is None else (grads, masters, *state, models)
        call = call_for(operation, lists, None if tables is None else tables.lists)
        used = _check_groups(operation.name, group_of, options, call)
        _check_factors(operation.name, factors, call.plan.device)
        _check_stats(operation.name, stats, models, call)
        _check_flag(found_inf, operation.name, call.plan.device)
        fresh = [False] * call.plan.count if first is None else list(first)
        if len(fresh) != call.plan.count:
            raise ValueError(f"{operation.name}: first has {len(fresh)} entries, grads has {call.plan.count}.")
        serving = _backend(call)
        if _skips(found_inf, call, serving):
            return
        fresh = [fresh[i] for i in call.plan.rows]
        for place, row in call.for_reference(serving != "reference"):
            grad, master, *kept = (column[place] for column in call.columns)
            model = kept.pop() if models is not None else None
            buffer = kept[0] if kept else None
            with reference_steps.whole(row, master, model, stats) as single:
                reference_steps.sgd(grad, single, buffer, fresh[place], options[used[place]], factors)
        found = stats if models is not None else None
        if serving == "cpu":
            native.sgd(call, fresh, options, used, factors, found)
        elif serving == "cuda":
            cuda_steps.sgd(call, fresh, options, used, factors, found, found_inf)
