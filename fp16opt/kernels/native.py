"""The calls into the compiled modules, which see addresses and sizes and nothing else.

Everything that could go wrong with an address is settled here and in :mod:`fp16opt.kernels.tables`: dtype, device,
shape, strides and layout are checked there; here addresses are read afresh for every call, the tensors are kept alive
until the call returns, and autograd is told what was written. Compiled code releases the GIL while it works.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .stats import CastStats, GradStats

if TYPE_CHECKING:
    from .reference_steps import AdamOptions, Factors, SgdOptions
    from .tables import Call, Plan, Watch

_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
_CODES[torch.int16] = 0  # remainders: 16 bits that only split masters look into
_CHECKS = {"x": 1, "y": 2, "both": 3}


def _reason_not_built(name: str) -> str:
    """Why the install has no module ``name``, as the build noted it."""
    try:
        noted = json.loads((Path(__file__).parent.parent / "_build.json").read_text(encoding="utf-8"))
        outcome = str(noted[name])
    except (OSError, ValueError, KeyError, TypeError):
        return "this install was made without it"
    return outcome if outcome != "built" else "it was built, but its file is missing: reinstall fp16opt"


def _load(name: str) -> tuple[Any, str]:
    """The compiled module and "", or None and the reason."""
    try:
        return importlib.import_module(f"fp16opt.{name}"), ""
    except ModuleNotFoundError:
        return None, _reason_not_built(name)
    except ImportError as error:
        warnings.warn(f"fp16opt.{name} can't be loaded, slower torch operations serve: {error}", stacklevel=2)
        return None, f"it can't be loaded: {error}"


_cpu, _cpu_missing = _load("_cpu")
_cuda, _cuda_missing = _load("_cuda")
_exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def available() -> bool:
    """Whether the compiled CPU module is there."""
    return _cpu is not None


def simd_level() -> str:
    """The SIMD level that the compiled CPU module uses, or "" where there is no module."""
    return "" if _cpu is None else str(_cpu.simd_level())


def status() -> dict[str, str]:
    """State of each compiled module, in words, for ``python -m fp16opt``."""
    if _cpu is None:
        cpu = f"missing: {_cpu_missing}"
    else:
        cpu = f"loaded; this machine runs its SIMD levels {', '.join(_cpu.simd_levels())}"
    return {"_cpu": cpu, "_cuda": _cuda_status()}


def _cuda_status() -> str:
    if _cuda is None:
        return f"missing: {_cuda_missing}"
    held = f"loaded; it holds code for {_cuda.architectures}"
    if torch.cuda.is_available():
        return held
    return f"{held}; torch finds no CUDA device here"


def cuda_module() -> Any:
    """The compiled CUDA module, or None."""
    return _cuda


def clip_decision(norm: float, found_inf: float, only_finite: bool, max_norm: float) -> float:
    """What :func:`fp16opt.kernels.decisions.decide_clip` multiplies by."""
    factor: float = _cpu.clip_decision(norm, found_inf, only_finite, max_norm)
    return factor


def follow_scale(overflow: bool, scale: Tensor, trackers: Tensor, settings: Tensor | None) -> None:
    """:func:`fp16opt.kernels.decisions.follow`."""
    first = trackers.data_ptr()
    if settings is None:
        _cpu.follow_scale(overflow, 0, 0, first, 0)
    else:
        _cpu.follow_scale(overflow, scale.data_ptr(), first, first + 4, settings.data_ptr())
    _bump([trackers] if settings is None else [scale, trackers])


def read_column(tensors: list[Tensor]) -> Any:
    """A compiled reader that proves a list unchanged and gives its addresses, or None where there is none.

    It needs DLPack's exchange table, which torch offers from version 2.10 on.
    """
    # Addresses are of the type of the module that read them, and that module is to use them.
    module = _cuda if _cuda is not None and tensors and tensors[0].device.type == "cuda" else _cpu
    if module is None or _exchange is None:
        return None
    try:
        return module.Column(_exchange, Tensor, tensors)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None  # a tensor that DLPack can't describe; the caller compares attributes instead


def _table(plan: Plan, columns: Sequence[list[Tensor]]) -> Any:
    """The compiled form of a plan, made at its first use."""
    if plan.compiled is None:
        plan.compiled = _cpu.Table(
            [tensor.numel() for tensor in columns[0]],
            plan.rows,
            [[_CODES[tensor.dtype] for tensor in column] for column in columns],
            plan.direct,
        )
    return plan.compiled


def _addresses(call: Call) -> Sequence[Any]:
    """For each list the addresses of its tensors; 0 for those that compiled code does not touch."""
    if call.addresses is not None:
        return call.addresses
    if not call.plan.indirect:
        return [[tensor.data_ptr() for tensor in column] for column in call.columns]
    lists = [[0] * len(call.plan.rows) for _ in call.columns]
    for numbers, column in zip(lists, call.columns, strict=True):
        for place in call.plan.direct:
            numbers[place] = column[place].data_ptr()
    return lists


def _written(call: Call, which: int, *results: Tensor) -> None:
    """Tell autograd that tensors were written: those of one list, and ``results``."""
    column = call.columns[which]
    if call.plan.indirect:
        column = [column[place] for place in call.plan.direct]
    _bump([*column, *results])


def _bump(tensors: list[Tensor]) -> None:
    """One more version for each tensor, as torch's own in-place operations count them."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # torch 2.4 takes no lists, and tensors made in inference mode count no versions
        for tensor in tensors:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def _along(watched: Call | None, watch: Watch | None) -> tuple[Any, tuple[Tensor, ...]]:
    """What the compiled module wants to know of tensors to be hashed in passing, and the tensors it writes."""
    if watched is None or watch is None:
        return None, ()
    table = _table(watched.plan, watched.columns)
    return (table, _addresses(watched)[0], watch.hashes.data_ptr(), watch.samples.data_ptr()), (
        watch.hashes,
        watch.samples,
    )


def unscale(
    call: Call,
    inv_scale: Tensor,
    accumulate: bool | list[bool],
    write: bool,
    stats: GradStats,
    watched: Call | None,
    watch: Watch | None,
) -> None:
    """:func:`fp16opt.kernels.multi_tensor_unscale` for the direct entries, then the totals over all rows."""
    grads, outs = _addresses(call)
    along, found = _along(watched, watch)
    _cpu.unscale(
        _table(call.plan, call.columns),
        grads,
        outs,
        inv_scale.item(),
        accumulate,
        write,
        stats.nonfinite.data_ptr(),
        stats.sumsq.data_ptr(),
        call.plan.count,
        stats.norm.data_ptr(),
        stats.found_inf.data_ptr(),
        along,
        torch.get_num_threads(),
    )
    found = (stats.nonfinite, stats.sumsq, stats.norm, stats.found_inf, *found)
    if write:
        _written(call, 1, *found)
    else:
        _bump([*found])


def unscale_clipped(call: Call, inv_scale: Tensor, factor: Tensor, watched: Call | None, watch: Watch | None) -> None:
    """:func:`fp16opt.kernels.multi_tensor_unscale_clipped` for the direct entries."""
    grads, outs = _addresses(call)
    along, found = _along(watched, watch)
    table, threads = _table(call.plan, call.columns), torch.get_num_threads()
    _cpu.unscale_clipped(table, grads, outs, inv_scale.item(), factor.item(), along, threads)
    _written(call, 1, *found)


def l2norm(call: Call, sumsq: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`fp16opt.kernels.multi_tensor_l2norm`; ``sumsq`` holds the rows of the indirect entries, else zeros."""
    norm, norms = sumsq.new_zeros(()), torch.zeros_like(sumsq)
    (tensors,) = _addresses(call)
    _cpu.l2norm(
        _table(call.plan, call.columns),
        tensors,
        sumsq.data_ptr(),
        call.plan.count,
        norm.data_ptr(),
        norms.data_ptr(),
        torch.get_num_threads(),
    )
    return norm, norms


def scale(call: Call, factor: Tensor) -> None:
    """:func:`fp16opt.kernels.multi_tensor_scale` for the direct entries."""
    (tensors,) = _addresses(call)
    _cpu.scale(_table(call.plan, call.columns), tensors, factor.item(), torch.get_num_threads())
    _written(call, 0)


def axpby(call: Call, a: float, b: float, found_inf: Tensor | None, check: str) -> None:
    """:func:`fp16opt.kernels.multi_tensor_axpby` for the direct entries."""
    xs, ys, outs = _addresses(call)
    checked = 0 if found_inf is None else _CHECKS[check]
    bad = _cpu.axpby(_table(call.plan, call.columns), a, xs, b, ys, outs, checked, torch.get_num_threads())
    if bad and found_inf is not None:
        found_inf.fill_(1.0)
    _written(call, 2)


def cast(call: Call, stats: CastStats) -> None:
    """:func:`fp16opt.kernels.multi_tensor_cast` for the direct entries."""
    masters, params = _addresses(call)
    _cpu.cast(
        _table(call.plan, call.columns),
        masters,
        params,
        stats.overflow.data_ptr(),
        stats.hashes.data_ptr(),
        torch.get_num_threads(),
    )
    _written(call, 1, stats.overflow, stats.hashes)


def content_hash(call: Call, hashes: Tensor, sample: bool) -> None:
    """:func:`fp16opt.kernels.multi_tensor_hash` for the direct entries."""
    (tensors,) = _addresses(call)
    operation = _cpu.content_sample if sample else _cpu.content_hash
    operation(_table(call.plan, call.columns), tensors, hashes.data_ptr(), torch.get_num_threads())
    _bump([hashes])


def _split_lists(call: Call, stats: CastStats | None) -> tuple[Any, Any, list[Any], Any, int, int]:
    """Addresses of gradients, masters, state and models, and of the rows that models' statistics go to."""
    grads, masters, *state = _addresses(call)
    if stats is None:
        return grads, masters, state, None, 0, 0
    return grads, masters, state, state.pop(), stats.overflow.data_ptr(), stats.hashes.data_ptr()


def _step_written(call: Call, stats: CastStats | None) -> None:
    """Tell autograd that all lists but the first, the gradients, were written."""
    results = [] if stats is None else [stats.overflow, stats.hashes]
    for which in range(1, len(call.columns)):
        _written(call, which, *results)
        results = []


def adam(
    call: Call,
    counts: Call,
    options: Sequence[AdamOptions],
    group_of: list[int],
    factors: Factors,
    stats: CastStats | None,
) -> None:
    """:func:`fp16opt.kernels.steps.multi_tensor_adam` for the direct entries."""
    grads, masters, state, models, overflow, hashes = _split_lists(call, stats)
    (steps,) = _addresses(counts)
    _cpu.adam(
        *(_table(call.plan, call.columns), grads, masters, state, models, steps, group_of),
        [(float(o.lr), *o[1:]) for o in options],
        *(factors.inv_scale.item(), factors.coefficient.item(), overflow, hashes, torch.get_num_threads()),
    )
    _step_written(call, stats)
    _bump([counts.columns[0][place] for place in call.plan.direct])


def sgd(
    call: Call,
    first: list[bool],
    options: Sequence[SgdOptions],
    group_of: list[int],
    factors: Factors,
    stats: CastStats | None,
) -> None:
    """:func:`fp16opt.kernels.steps.multi_tensor_sgd` for the direct entries."""
    grads, masters, state, models, overflow, hashes = _split_lists(call, stats)
    _cpu.sgd(
        *(_table(call.plan, call.columns), grads, masters, state, models, first, group_of),
        [(float(o.lr), *o[1:]) for o in options],
        *(factors.inv_scale.item(), factors.coefficient.item(), overflow, hashes, torch.get_num_threads()),
    )
    _step_written(call, stats)


def split(call: Call, stats: CastStats) -> None:
    """:func:`fp16opt.kernels.multi_tensor_split` for the direct entries."""
    lists = _addresses(call)
    rows = stats.overflow.data_ptr(), stats.hashes.data_ptr()
    _cpu.split(_table(call.plan, call.columns), *lists, *rows, torch.get_num_threads())
    _written(call, 1, stats.overflow, stats.hashes)
    _written(call, 2)


def join(call: Call) -> None:
    """:func:`fp16opt.kernels.multi_tensor_join` for the direct entries."""
    _cpu.join(_table(call.plan, call.columns), *_addresses(call), torch.get_num_threads())
    _written(call, 2)
