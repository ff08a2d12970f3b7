"""The calls into the compiled CPU module, which sees addresses and sizes and nothing else.

Everything that could go wrong with an address is settled here and in :mod:`fp16opt.kernels.lists`: dtype, device,
shape, strides and layout are checked there; addresses are read afresh for every call, the tensors are kept alive until
the call returns, and here autograd is told what was written. Compiled code releases the GIL while it works.
"""

from __future__ import annotations

import array
import ctypes
import importlib
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import installed
from .calls import Call
from .changed import Marks
from .pieces import WHOLE, Piece
from .readings import PlainReading

logger = logging.getLogger("fp16opt")

CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
CODES[torch.int16] = 0  # remainders: 16 bits that only split masters look into
CODES[torch.int8] = CODES[torch.uint8] = 4  # codes of 8 bits


def _load(name: str) -> tuple[Any, str, bool]:
    """The compiled module, "" and False; or None, the reason, and whether the user is still to be told of it."""
    try:
        return importlib.import_module(f"fp16opt.{name}"), "", False
    except ModuleNotFoundError:
        return None, *installed.reason_not_built(name)
    except ImportError as error:
        warnings.warn(f"fp16opt.{name} can't be loaded, slower torch operations serve: {error}", stacklevel=2)
        return None, f"it can't be loaded: {error}", False


module, _cpu_missing, _is_untold = _load("_cpu")
"""The compiled CPU module, or None."""


_told: list[str] = []
"""The reasons why there is no module that were logged, or given by :func:`status`."""


def warn_unbuilt() -> None:
    """Log, once a process, that a source tree serves in which nothing was built.

    An install without the module has said so. Importing a source tree says nothing: the line comes where a kernel is
    first asked for and torch operations take its place. It does not come where :func:`status` has given the reason.
    """
    if module is None and _is_untold and not _told:
        _told.append(_cpu_missing)
        logger.warning("slower torch operations serve in place of fp16opt's kernels: %s", _cpu_missing)


def available() -> bool:
    """Whether the compiled CPU module is there."""
    return module is not None


def simd_level() -> str:
    """The SIMD level that the compiled CPU module uses, or "" where there is no module."""
    return "" if module is None else str(module.simd_level())


def status() -> str:
    """State of the compiled CPU module, in words, for ``python -m fp16opt``."""
    if module is None:
        _told.append(_cpu_missing)
        return f"missing: {_cpu_missing}"
    return f"loaded; this machine runs its SIMD levels {', '.join(module.simd_levels())}"


def table_arguments(call: Call) -> tuple[list[int], list[list[int]], list[int], list[Piece]]:
    """What the compiled form of a plan is made of: sizes, codes of dtypes, places, pieces."""
    plan = call.plan
    lists = call.lists[: len(plan.operation.lists)]
    numels, codes = [0] * plan.count, [[0] * plan.count for _ in lists]
    for row in plan.direct:
        for of_list, tensor in zip(codes, call.row(row), strict=False):
            of_list[row], numels[row] = CODES[tensor.dtype], tensor.numel()
    served = set(plan.direct)
    pieces = [piece if row in served else WHOLE for row, piece in enumerate(plan.pieces or ())]
    return numels, codes, plan.direct, pieces


def addresses_of(call: Call) -> Any:
    """For each list the addresses of its tensors, as compiled code takes them."""
    readings = call.readings
    if readings is not None:
        return [reading.addresses for reading in readings] if type(readings[0]) is PlainReading else readings
    direct = set(call.plan.direct)
    return [
        [t.data_ptr() if t is not None and row in direct else 0 for row, t in enumerate(entries)]
        for entries in call.lists
    ]


def put_addresses(call: Call, which: range, places: list[int] | None, at: int, stride: int) -> bool:
    """Write the addresses of some of a call's lists to host memory, one list behind the other.

    Args:
        call: the lists.
        which: of them.
        places: of their entries; None for all.
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


def digest(words: Tensor, first: int) -> int:
    """:func:`.changes.digest` of words on the CPU."""
    found: int = module.digest(words.data_ptr(), words.numel(), first % 2**32, torch.get_num_threads())
    return found


def guard(words: Tensor) -> int:
    """:func:`.changes.guard` of words on the CPU."""
    found: int = module.guard(words.data_ptr(), words.numel(), torch.get_num_threads())
    return found


def guard_and_digest(words: Tensor, first: int) -> tuple[int, int]:
    """:func:`.changes.guard_and_digest` of words on the CPU."""
    found: tuple[int, int] = module.guard_and_digest(
        words.data_ptr(), words.numel(), first % 2**32, torch.get_num_threads()
    )
    return found


def take_marked(bits: Tensor, words: Tensor) -> tuple[Tensor, Tensor, int]:
    """:func:`.changes.take` on the CPU."""
    numel, threads = words.numel(), torch.get_num_threads()
    count = module.count_marked(bits.data_ptr(), numel, threads)
    wide = numel > 2**31
    places = torch.empty(count, dtype=torch.int64 if wide else torch.int32, device="cpu")
    taken = torch.empty(count, dtype=torch.int16, device="cpu")
    at = places.data_ptr(), wide, taken.data_ptr()
    return places, taken, module.take_marked(bits.data_ptr(), words.data_ptr(), numel, *at, threads)


def decide_clip(
    norm: Tensor, found_inf: Tensor | None, max_norm: float, only_finite: bool, single: Tensor, factor: Tensor
) -> None:
    """:func:`fp16opt.kernels.backends.decide_clip`, into ``single`` and ``factor``."""
    found = 0 if found_inf is None else found_inf.data_ptr()
    module.decide_clip(norm.data_ptr(), found, max_norm, only_finite, single.data_ptr(), factor.data_ptr())


def follow_scale(overflow: bool, scale: Tensor, trackers: Tensor, settings: Tensor | None) -> bool:
    """:func:`fp16opt.kernels.backends.follow`, of a step whose outcome is known; whether the scale moved."""
    behind = 0 if settings is None else settings.data_ptr()
    moved: bool = module.follow_scale(overflow, scale.data_ptr(), trackers.data_ptr(), behind)
    count_versions([trackers, scale] if moved else [trackers])
    return moved


def count_writes(call: Call, results: Sequence[Tensor], *, lists: bool = True) -> None:
    """One more version for each tensor that autograd or users see change.

    These are ``results``, and, with ``lists``, the tensors of the lists that the operation declares as written. State
    and step counters are not among them, nor float32 masters of 16-bit parameters: torch's own fused steps count none
    of these either, and for 1,000 small tensors counting takes as long as the step.
    """
    written: list[Any] = list(results)
    plan = call.plan
    for which in call.operation.written if lists else ():
        entries = call.lists[which]
        written += entries if len(plan.direct) == plan.count else [entries[row] for row in plan.direct]
    try:
        increment_versions(written)
    except RuntimeError:  # torch 2.4 takes no lists, and tensors made in inference mode count no versions
        count_versions(written)


def trusts(call: Call, marks: Marks | None) -> bool:
    """Whether compiled code may serve a call: on the CPU it may."""
    return True


def launch(
    call: Call,
    values: Sequence[Any],
    *,
    written: Sequence[Tensor] = (),
    marks: Marks | None = None,
    flags: bool | Sequence[bool] | None = None,
    writes: bool = True,
) -> None:
    """Have the operation's function of the compiled module work on the direct entries, and count what was written.

    Args:
        call: the lists.
        values: what the function has behind the lists. Tensors, on the device, go as addresses, None as 0.
        written: tensors among them that are written.
        marks: of operations that write weights: where those that get other bits are marked.
        flags: one for all entries or one for each, which is the last argument; None for a function without.
        writes: whether tensors of the lists are written.
    """
    plan = call.plan
    if plan.compiled is None:
        plan.compiled = module.Table(*table_arguments(call))
    given: list[Any] = []
    for value in (*values, *marks) if marks is not None else values:
        given.append(0 if value is None else value.data_ptr() if isinstance(value, Tensor) else value)
    if flags is not None:
        given.append(flags)
    function = getattr(module, call.operation.cpu)
    function(plan.compiled, addresses_of(call), torch.get_num_threads(), plan.count, *given)
    count_writes(call, written, lists=writes)
