"""The way of every call into a kernel: rows with their readings, one comparison with a site's memory, one function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import native, tensor_lists
from .calls import BEGUN, Call, CallCache, Entries, Known, Operation
from .changed import ChangedBits, Marks
from .lists import check_lists
from .pieces import Piece
from .readings import Rows
from .reference_changed import marking
from .stats import CastStats, Given, check_result


def begin(
    operation: Operation,
    lists: Sequence[Entries],
    site: CallCache | None,
    numbers: Sequence[Tensor | None] = (),
    device: torch.device | None = None,
    pieces: tuple[Piece, ...] | None = None,
) -> Call:
    """Recognise lists, and the tensors given beside them, or check the lists. Does not sync.

    Args:
        operation: what is to be done.
        lists: as many as the operation has.
        site: the memory of the call site; None checks, and remembers nothing.
        numbers: the tensors beside the lists. Where they are not recognised the caller checks them, by :func:`prove`.
        device, pieces: as for :func:`.lists.check_lists`.

    Raises:
        TypeError, ValueError: as :func:`.lists.check_lists`; the site's memory is then empty.
    """
    known = None if site is None else site.known
    plan = None if known is None else known.plan
    if (
        site is None
        or known is None
        or plan is None
        or plan.operation is not (operation.planned_as or operation)
        or plan.pieces != pieces
        or len(lists) != len(known.readings)
    ):
        return _checked(operation, lists, site, device, pieces)
    read = tensor_lists.reader_of(native.module).read
    held: list[tuple[Tensor | None, ...]] = []
    readings: list[Any] = []
    kept: list[tuple[Tensor | None, ...] | None] = []
    with torch._C.DisableTorchFunction():  # of subclasses too, torch's own attributes are what counts
        for given, before, last in zip(lists, known.readings, known.kept, strict=True):
            if type(given) is Rows:
                entries, reading, stays = given.tensors, given.reading, None
            else:
                entries, reading = tuple(given), None
                stays = entries if entries is given else None
            if reading is None:
                reading = read(entries, before, entries is last, False)
            if reading is None or not reading.lies_as(before):
                return _checked(operation, lists, site, device, pieces)
            held.append(entries)
            readings.append(reading)
            kept.append(stays)
        is_proven = not numbers
        if numbers and known.numbers is not None and known.used_by is operation:
            found = read(numbers, known.numbers, False, False)
            is_proven = found is not None and found.lies_as(known.numbers)
    site.known = Known(plan, readings, kept, known.numbers, known.used_by)
    return Call(operation, plan, tuple(held), readings, site, is_proven)


def _checked(
    operation: Operation,
    lists: Sequence[Entries],
    site: CallCache | None,
    device: torch.device | None,
    pieces: tuple[Piece, ...] | None,
) -> Call:
    if site is not None:
        site.forget()
    given = tuple(entries.tensors if isinstance(entries, Rows) else tuple(entries) for entries in lists)
    plan = check_lists(operation, given, device, pieces)
    if site is not None:
        site.rebuilds += 1
        if plan.rows and plan.is_plain:  # entries of odd layout are checked every time: their storage may be anything
            readings = [tensor_lists.read(entries) for entries in given]
            if None not in readings:
                site.known = Known(plan, readings, [None] * len(given), None, operation)
    return Call(operation, plan, given, None, site)


def launch(
    operation: Operation,
    lists: Sequence[Entries],
    given: Sequence[Any],
    site: CallCache | None,
    *,
    device: torch.device | None = None,
    flags: bool | Sequence[bool] | None = None,
    writes: bool = True,
) -> bool:
    """Check lists and what is given beside them, and do the operation.

    Args:
        operation: what is to be done.
        lists: as many as the operation has.
        given: what is given beside the lists, in the order of the operation's arguments; None for a tensor that is
            left out.
        site: the memory of the call site.
        device: what counts for lists without tensors.
        flags: one for all entries or one for each, of operations that have them.
        writes: whether tensors of the lists are written.

    Returns:
        Whether a compiled backend served; it derives what is derived of all rows.

    Raises:
        TypeError, ValueError: as :func:`begin`, or an argument is of another kind. Nothing is written then.
    """
    values: list[Any] = []
    numbers: list[Tensor | None] = []
    cast: CastStats | None = None
    for value in given:
        if isinstance(value, Given):
            values += value.tensors
            numbers += value.tensors
            cast = value if isinstance(value, CastStats) else None
        else:
            values.append(value)
            if value is None or isinstance(value, Tensor):
                numbers.append(value)
    call = begin(operation, lists, site, numbers, device)
    if not call.is_proven:
        prove(call, values, numbers)
    return run(call, given, values, cast, flags=flags, writes=writes)


def prove(call: Call, values: Sequence[Any], numbers: Sequence[Tensor | None]) -> None:
    """Check that the tensors beside the lists are what the operation declares, and have the site know them.

    Args:
        values: one for each argument of the kernel.
        numbers: the tensors among them.

    Raises:
        TypeError, ValueError: one is not.
    """
    plan, site = call.plan, call.owner
    for argument, value in zip(call.operation.arguments, values, strict=True):
        if argument.dtype is not None and value is not None:
            size = plan.count if argument.each else 1
            check_result(call.operation.name, argument.name, value, size, argument.dtype, plan.device)
    known = None if site is None else site.known
    if site is not None and known is not None and known.plan is plan:
        site.known = known._replace(numbers=tensor_lists.read(numbers), used_by=call.operation)


def run(
    call: Call,
    given: Sequence[Any],
    values: Sequence[Any],
    cast: CastStats | None = None,
    *,
    flags: bool | Sequence[bool] | None = None,
    writes: bool = True,
) -> bool:
    """Do the operation of a call whose lists and arguments were checked: see :func:`launch`.

    Args:
        values: the same as ``given``, one for each argument of the kernel.
        cast: of operations that round to 16 bits.
    """
    plan, operation = call.plan, call.operation
    if flags is not None and not isinstance(flags, bool) and len(flags) != plan.count:
        raise ValueError(
            f"{operation.name}: accumulate has {len(flags)} entries, {operation.lists[0]} has {plan.count}. "
            "Give one each."
        )
    marks = None if cast is None else cast.marks
    if not is_trusted(call, marks):
        call = by_torch(call)
        plan = call.plan
    if plan.by_reference:
        run_by_torch(call, tuple(given), None if cast is None else cast.changed, flags)
    if plan.serving is None:
        call.returned.append(True)
        return False
    written = []
    for argument, value in zip(operation.arguments, values, strict=True):
        if argument.written and value is not None:
            written.append(value)
    plan.serving.launch(call, values, written=written, marks=marks, flags=flags, writes=writes)
    return True


def run_by_torch(
    call: Call, given: tuple[Any, ...], changed: ChangedBits | None, flags: bool | Sequence[bool] | None
) -> None:
    """Do the operation, by its specification, on the rows that no compiled kernel serves.

    Args:
        given: what the specification is given.
        changed: marks the elements of 16-bit tensors that get other bits.
        flags: as for :func:`launch`.
    """
    call.returned.append(BEGUN)
    with torch.no_grad(), marking(changed, call.rounded, call.plan.by_reference):
        for row in call.plan.by_reference:
            flag = flags if isinstance(flags, bool) else flags is not None and bool(flags[row])
            call.operation.specification(row, call.row(row), given, flag)


def is_trusted(call: Call, marks: Marks | None) -> bool:
    """Whether the compiled kernel was found to be right, or there is none.

    Args:
        marks: of operations that write weights: where those that get other bits are marked.
    """
    plan = call.plan
    key = call.operation.cuda, marks is not None and not isinstance(marks[0], int)
    if plan.serving is not None and key not in plan.trusted:
        if not plan.serving.trusts(call, marks):
            return False
        plan.trusted.add(key)
    return True


def by_torch(call: Call) -> Call:
    """The same call, for torch operations alone."""
    plan = replace(call.plan, serving=None, by_reference=call.plan.rows, decided_here=True, compiled=None)
    return call._replace(plan=plan)
