"""The calls into the compiled CPU module, which sees addresses and sizes and nothing else.

Everything that could go wrong with an address is settled here and in :mod:`fp16opt.kernels.tables`: dtype, device,
shape, strides and layout are checked there; addresses are read afresh for every call, the tensors are kept alive until
the call returns, and here autograd is told what was written. Compiled code releases the GIL while it works.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import importlib
import json
import operator
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .calls import Call, Plan, PointerTables

CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
CODES[torch.int16] = 0  # remainders: 16 bits that only split masters look into
CODES[torch.int8] = CODES[torch.uint8] = 4  # codes of 8 bits


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


module, _cpu_missing = _load("_cpu")
"""The compiled CPU module, or None."""
if module is not None:  # it asks the cache for tensors ahead, where they are laid out as it knows
    _probe = torch.empty(0, dtype=torch.float32, device="cpu")
    module.learn_tensors(_probe, _probe._cdata)
_exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def available() -> bool:
    """Whether the compiled CPU module is there."""
    return module is not None


def simd_level() -> str:
    """The SIMD level that the compiled CPU module uses, or "" where there is no module."""
    return "" if module is None else str(module.simd_level())


def status() -> str:
    """State of the compiled CPU module, in words, for ``python -m fp16opt``."""
    if module is None:
        return f"missing: {_cpu_missing}"
    return f"loaded; this machine runs its SIMD levels {', '.join(module.simd_levels())}"


def seen_lists(lists: tuple[Sequence[Tensor | None], ...], deciding: int) -> Any:
    """A compiled proof that lists are as they were, which reads their addresses; None where there is none.

    It needs DLPack's exchange table, which torch offers from version 2.10 on. Entries that are None in one of the first
    ``deciding`` lists are left out.
    """
    if module is None or _exchange is None:
        return None
    try:
        return module.SeenLists(_exchange, Tensor, Tensor.is_neg, lists, deciding)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None  # a tensor that DLPack can't describe; the caller compares attributes instead


def tensor_reader(grad: Any, version: Any) -> Any:
    """What :class:`fp16opt.kernels.counters.Reader` is, compiled; None where there is none.

    It calls the C functions behind the attributes ``grad`` and ``version`` of torch's tensors, for each tensor in half
    of the time that a loop in Python takes.
    """
    if module is None:
        return None
    try:
        return module.TensorReader(Tensor, grad, version, torch._C.DisableTorchFunctionSubclass)
    except TypeError:
        return None  # attributes that are not written in C


def state_columns_in_python(
    state: dict[Tensor, Any], keys: list[Tensor], places: list[int] | None, names: tuple[str, ...]
) -> list[list[Any]] | None:
    """Entries of an optimizer's state by name, each as a list over parameters.

    Args:
        state: a dictionary for each parameter.
        keys: the parameters that it is to have, in its order.
        places: among these, which are asked for; None for all.
        names: of the entries.

    Returns:
        None where the keys are others, or where an entry is missing or None.

    Example:
        >>> x = torch.zeros(1)
        >>> state_columns({x: {"step": 2.0}}, [x], None, ("step",)), state_columns({x: {}}, [x], None, ("step",))
        ([[2.0]], None)
    """
    if len(state) != len(keys) or not all(map(operator.is_, state, keys)):
        return None
    entries = list(state.values()) if places is None else list(map(list(state.values()).__getitem__, places))
    columns = [[entry.get(name) for entry in entries] for name in names]
    return None if any(value is None for column in columns for value in column) else columns


state_columns = state_columns_in_python if module is None else module.state_columns

read_once = contextlib.nullcontext if module is None else functools.partial(module.Reading, True)
"""A block in which each list of tensors is read once, by this thread.

Reading dtype, shape, strides and address of a tensor takes a tenth of a microsecond, and a step gives some lists to
five operations. In the block a list of the same tensors is taken to be as it was when it was first read there. So
nobody else's code may run in it, as a hook's, which could give a tensor other memory. A block in another is a part of
it.
"""
read_anew = contextlib.nullcontext if module is None else functools.partial(module.Reading, False)
"""A block in which every list is read anew, and after it in a block of :data:`read_once` around it."""


def table_arguments(call: Call) -> tuple[list[int], list[int], list[list[int]], list[int]]:
    """What the compiled form of a plan is made of: sizes, rows, codes of dtypes, places."""
    plan = call.plan
    columns = [call.column(which) for which in range(len(plan.operation.lists))]
    codes = [[CODES[tensor.dtype] for tensor in column] for column in columns]
    return [tensor.numel() for tensor in columns[0]], plan.rows, codes, plan.direct


def addresses_of(call: Call) -> Any:
    """For each list the addresses of its tensors; 0 for those that compiled code does not touch."""
    if call.addresses is not None:
        return call.addresses
    direct = set(call.plan.direct)
    columns = [call.column(which) for which in range(len(call.lists))]
    return [[t.data_ptr() if place in direct else 0 for place, t in enumerate(column)] for column in columns]


def put_addresses(call: Call, which: range, places: list[int] | None, at: int, stride: int) -> bool:
    """Write the addresses of some of a call's lists to host memory, one list behind the other.

    Args:
        call: the lists.
        which: of them.
        places: of their tensors; None for all.
        at: where the first one goes.
        stride: bytes from one address to the next: 8, or more with other things between, which stay.

    Returns:
        Whether one is not what was there.
    """
    addresses = addresses_of(call)
    if module is not None:
        moved: bool = module.put_addresses(addresses, which.start, len(which), places, at, stride)
        return moved
    found = array.array("Q")
    for one in which:
        found.extend(addresses[one] if places is None else [addresses[one][place] for place in places])
    step, count = stride // 8, len(found)
    if count == 0:
        return False
    room = memoryview((ctypes.c_uint64 * ((count - 1) * step + 1)).from_address(at)).cast("B").cast("Q")[::step]
    if room == memoryview(found):
        return False
    room[:] = found
    return True


increment_versions: Any = torch._C._increment_version
"""``torch.autograd.graph.increment_version`` of a list, without its call of Python; torch 2.4's takes no lists."""


def count_versions(tensors: list[Tensor]) -> None:
    """One more version for each tensor, as torch's own in-place operations count them."""
    for tensor in tensors:
        if not tensor.is_inference():  # tensors made in inference mode count no versions
            torch.autograd.graph.increment_version(tensor)


if module is not None:
    decide_clip = module.decide_clip
    """:func:`fp16opt.kernels.backends.decide_clip`, into two tensors given last."""
    follow_scale = functools.partial(module.follow_scale, increment_versions, count_versions)
    """:func:`fp16opt.kernels.backends.follow`, of a step whose outcome is known; whether the scale moved."""


def count_writes(call: Call, results: Sequence[object], *, lists: bool = True) -> None:
    """One more version for each tensor that autograd or users see change.

    These are ``results``, of which those that are no tensors are passed over, and, with ``lists``, the tensors of the
    lists that the operation declares as written. State and step counters are not among them, nor float32 masters of
    16-bit parameters: torch's own fused steps count none of these either, and for 1,000 small tensors counting takes as
    long as the step.
    """
    written: list[Tensor] = []
    for result in results:
        if isinstance(result, Tensor):
            written.append(result)
    for which in call.plan.operation.written if lists else ():
        entries, plan = call.lists[which], call.plan
        if len(plan.direct) < plan.count:
            entries = list(map(entries.__getitem__, map(plan.rows.__getitem__, plan.direct)))
        written += entries  # type: ignore[arg-type]  # entries that take part are tensors
    try:
        increment_versions(written)
    except RuntimeError:  # torch 2.4 takes no lists, and tensors made in inference mode count no versions
        count_versions(written)


def launch(
    call: Call,
    function: str,
    *arguments: object,
    results: Sequence[object] = (),
    flags: bool | Sequence[bool] | None = None,
    writes: bool = True,
    again: bool = True,
) -> None:
    """Have a function of the compiled module work on the direct entries, and count what was written.

    Args:
        call: the lists.
        function: its name in the module.
        arguments: behind the lists. Tensors, on the device, go as addresses.
        results: tensors among them that are written.
        flags: one for all entries or one for each, which is the last argument; None for a function without.
        writes: whether tensors of the lists are written.
        again: whether the call site asks to repeat this call, so that it is worth to know it.
    """
    plan = call.plan
    if plan.compiled is None:
        plan.compiled = module.Table(*table_arguments(call))
    given = list(arguments)
    for place, value in enumerate(arguments):
        if isinstance(value, Tensor):
            given[place] = value.data_ptr()
    if flags is not None:
        given.append(flags)
    addresses = call.addresses if call.addresses is not None else addresses_of(call)
    getattr(module, function)(plan.compiled, addresses, torch.get_num_threads(), plan.count, *given)
    count_writes(call, results, lists=writes)
    if again and call.owner is not None and call.owner.plan is plan and not plan.by_reference:
        _remember(call.owner, plan, function, arguments, () if flags is None else (flags,), results)


def _remember(
    site: PointerTables,
    plan: Plan,
    function: str,
    arguments: tuple[object, ...],
    flags: tuple[object, ...],
    results: Sequence[object],
) -> None:
    """Have a call site repeat a call that was made, as long as nothing differs but values and addresses.

    Another thread may have the site see other lists meanwhile: what is remembered is of ``plan`` alone.
    """
    tensors = [place for place, value in enumerate(arguments) if isinstance(value, Tensor)]
    seen = seen_lists(([arguments[place] for place in tensors],), 0) if tensors else None  # type: ignore[misc]
    if not isinstance(plan.seen, module.SeenLists) or (tensors and seen is None):
        return
    known = site.known
    if known is None:
        known = site.known = module.KnownCalls(torch.get_num_threads, increment_versions, count_versions)
        site.repeats = known.repeats
    written = [place for place in tensors if any(arguments[place] is result for result in results)]
    run = (function, getattr(module, function), plan.compiled, plan.count)
    known.add(*run, plan.seen, seen, (*arguments, *flags), tensors, written, list(plan.operation.written))
