"""What a multi-tensor call is: its declared operation, lists that passed the checks, and a call site's memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .changed import Marks
from .pieces import Piece
from .reference_changed import marking
from .stats import CastStats, Given, check_result

Entries = Sequence["Tensor | None"]


Specification = Callable[[int, "list[Tensor]", "tuple[Any, ...]", bool], None]
"""An operation on one row in torch operations: (row, its tensors, the call's arguments, its flag)."""


class Argument(NamedTuple):
    """One argument of an operation beside its lists.

    Attributes:
        name: for messages.
        dtype: of the tensor that it must be, on the device of the call, or of the ``rows`` of statistics; None for a
            plain value, or a tensor that the operation itself has made.
        each: whether it has one element for each entry of the lists; else it has one.
        written: whether the operation writes it.
    """

    name: str
    dtype: torch.dtype | None = torch.float32
    each: bool = False
    written: bool = False


class Operation(NamedTuple):
    """One multi-tensor operation, declared: a checked call is made of this and of lists.

    Attributes:
        name: of the public function, for messages.
        lists: their names.
        accepts: whether tensors of these dtypes, one of each list, go together.
        wanted: the same in words.
        specification: what it does to one row; compiled kernels give the same bits.
        cpu: the function of the compiled CPU module; "" for none.
        cuda: the CUDA kernel.
        arguments: what it is given beside the lists, in the order of the kernels' arguments.
        written: the lists whose tensors autograd and users see change: their version counters move.
        shape_of: the list whose shapes and strides the others must have.
        counters: a further list, a float32 number for each entry that takes part, there or on the CPU; "" for none.
        scales: a further list before it, of float32 tensors with a number for every ``block`` elements; "" for none.
        block: elements.
        coded: the backends whose kernels take lists of 8-bit codes; elsewhere torch operations serve these.
        wide: whether compiled kernels take float64 on the CPU; on a GPU none does, and torch operations serve it.
        planned_as: an operation that takes the same lists, with which it shares plans; None for none.
    """

    name: str
    lists: tuple[str, ...]
    accepts: Callable[..., bool]
    wanted: str
    specification: Specification
    cpu: str = ""
    cuda: str = ""
    arguments: tuple[Argument, ...] = ()
    written: tuple[int, ...] = ()
    shape_of: int = 0
    counters: str = ""
    scales: str = ""
    block: int = 1
    coded: tuple[str, ...] = ()
    wide: bool = True
    planned_as: Operation | None = None

    @property
    def width(self) -> int:
        """How many lists kernels read: all but the counters."""
        return len(self.lists) + bool(self.scales)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all lists that a call gives."""
        return self.lists + tuple(name for name in (self.scales, self.counters) if name)


_data_ptr, _stride, _is_neg = Tensor.data_ptr, Tensor.stride, Tensor.is_neg


class StableEntries(tuple[Tensor | None, ...]):
    """A list that several calls get: how its tensors lie is read by the first, and by others where addresses moved.

    Attributes:
        read: the positions in use, whether all are on the host, and the addresses and properties that were read there.
        reading: the same where compiled code reads them.
        is_fresh: whether that is taken as it is: see :class:`.tensor_lists.read_for_next`.
        counted: what compiled code has read of versions; None where they were not read.
    """

    reading: Any = None
    counted: Any = None
    is_fresh = False
    read: tuple[list[int] | None, bool, list[int], list[list[Any]]] | None = None


class Layout:
    """How the tensors of one list lie in memory, as the checks saw it.

    Args:
        entries: the list.
        rows: the positions in use.
    """

    __slots__ = ("_fixed", "_on_host", "_rows", "_seen", "_types")

    def __init__(self, entries: tuple[Tensor | None, ...], rows: list[int]) -> None:
        self._rows = None if len(rows) == len(entries) else rows
        self._types = list(map(type, entries))
        self._fixed: tuple[tuple[Tensor | None, ...], Sequence[Any], list[int]] | None = None
        used = self._used(entries)
        self._on_host = all(tensor.device.type == "cpu" for tensor in used)
        self._seen = list(self._read(used))

    def _used(self, entries: Entries) -> Sequence[Any]:
        return entries if self._rows is None else list(map(entries.__getitem__, self._rows))

    def _read(self, tensors: Sequence[Any]) -> Iterator[list[Any]]:
        """One property after another: a list of each takes less time than a tuple for each tensor."""
        yield [tensor.dtype for tensor in tensors]
        yield [tensor.is_cpu for tensor in tensors] if self._on_host else [tensor.device for tensor in tensors]
        yield [tensor.shape for tensor in tensors]
        yield list(map(_stride, tensors))
        yield list(map(_is_neg, tensors))

    def addresses(self, entries: tuple[Tensor | None, ...], stays: bool) -> list[int] | None:
        """The addresses of the tensors in use, where each entry lies in memory as the checks saw it; else None.

        Args:
            entries: the list, or a copy of it.
            stays: whether it is the caller's own tuple. If it is the very object of the last call it holds the same
                tensors: at the same addresses they are taken to have kept dtype, shape and strides. Every other list
                is compared entry by entry. An address of 0, of empty tensors and of those without memory, tells
                nothing.

        Raises:
            RuntimeError: a tensor has no memory of its own: it is sparse, or of another layout without strides.
        """
        fixed = self._fixed
        if fixed is not None and fixed[0] is entries:
            found = list(map(_data_ptr, fixed[1]))
            if found == fixed[2]:
                return found
        if self._types != list(map(type, entries)):
            return None
        tensors = self._used(entries)
        found = list(map(_data_ptr, tensors))
        if isinstance(entries, StableEntries):
            if entries.read is None or entries.read[:3] != (self._rows, self._on_host, found) or 0 in found:
                entries.read = self._rows, self._on_host, found, list(self._read(tensors))
            if entries.read[3] != self._seen:
                return None
        elif not all(map(operator.eq, self._read(tensors), self._seen)):
            return None
        if stays and 0 not in found:
            self._fixed = entries, tensors, found
        return found


class Layouts:
    """How the tensors of a call's lists lie in memory, as the checks saw it.

    Args:
        lists: of one call.
        rows: the positions in use.
    """

    __slots__ = ("_each",)

    def __init__(self, lists: Sequence[tuple[Tensor | None, ...]], rows: list[int]) -> None:
        self._each = [Layout(entries, rows) for entries in lists]

    def find(self, lists: tuple[Entries, ...], count: int) -> tuple[Any, Any] | None:
        """The lists as tuples, and of each the addresses of the tensors in use.

        Args:
            lists: as they were given. A tuple is the caller's own: see :class:`CallCache`.
            count: of the entries of each.

        Returns:
            None where not all lie in memory as the checks saw it.

        Raises:
            RuntimeError: a tensor has no memory of its own.
        """
        held = tuple([given if isinstance(given, tuple) else tuple(given) for given in lists])
        if set(map(len, held)) != {count}:
            return None
        found: list[Any] = []
        for layout, entries, given in zip(self._each, held, lists, strict=True):
            addresses = layout.addresses(entries, type(given) is tuple)
            if addresses is None:
                return None
            found.append(addresses)
        return held, found


@dataclass
class Plan:
    """Lists that passed the checks.

    Attributes:
        operation: what they were checked for.
        device: where all tensors live; of lists without any, where the call's results do.
        count: n, the common length of the lists.
        rows: positions that are not None in any list.
        direct: places in ``rows`` whose memory may be walked linearly in all lists at once; on a GPU float64 is not
            among them.
        by_reference: rows of the entries that the specification must serve: all where nothing is compiled.
        serving: the file that calls the compiled kernels, or None.
        is_plain: whether the memory of all entries may be walked so, and the lists may be recognised.
        is_coded: whether a list holds codes or remainders of 8 bits, which steps round by their number.
        counts_here: whether the counters, if there are any, lie on the device.
        decided_here: whether the host has to look at a flag that says whether to write: not where only kernels write.
        pieces: by entry, of which part of a whole tensor each is; None: all are whole.
        compiled: what a compiled backend made of ``direct``, or None.
        trusted: kernels that were found to be right: (the name of CUDA's, whether it is the one that marks).
        grouped: of a step, the ``group_of`` that was found to fit, and the number of groups.
        stats: those that were found to fit at the last call; their tensors stay.
        packed: of a step, the options of the last call, where they are numbers alone, and these as compiled code on the
            CPU reads them.
    """

    operation: Operation
    device: torch.device
    count: int
    rows: list[int]
    direct: list[int]
    by_reference: list[int]
    serving: Any
    is_plain: bool
    is_coded: bool = False
    counts_here: bool = True
    decided_here: bool = True
    pieces: tuple[Piece, ...] | None = None
    compiled: Any = field(default=None)
    trusted: set[tuple[str, bool]] = field(default_factory=set)
    grouped: tuple[Any, int] = (None, 0)
    stats: Given | None = None
    packed: tuple[tuple[Any, ...], bytes] = ((), b"")


class Call(NamedTuple):
    """Lists that passed the checks, ready for a backend.

    Attributes:
        operation: what is to be done.
        plan: what the checks found.
        lists: as they were given, or copies: they keep the tensors alive until the call returns.
        addresses: of all lists, of the tensors in use, as compiled code takes them; None where they were not read along
            with the checks.
        owner: the cache of the call site, if it has one.
    """

    operation: Operation
    plan: Plan
    lists: tuple[tuple[Tensor | None, ...], ...]
    addresses: list[Any] | None
    owner: CallCache | None

    def row(self, row: int) -> list[Tensor]:
        """The tensors at a position in use, one of each list."""
        return [tensor for entries in self.lists if (tensor := entries[row]) is not None]

    @property
    def rounded(self) -> Entries:
        """The list of 16-bit tensors that masters are rounded to; none of operations that round nothing."""
        names = self.operation.lists
        which = next((place for place, name in enumerate(names) if name in ("params", "models")), None)
        return () if which is None else self.lists[which]

    def served(self, marks: Marks | None) -> Call:
        """Itself; or the same for torch operations alone, where the compiled kernel was not found to be right.

        Args:
            marks: of operations that write weights: where those that get other bits are marked.
        """
        plan = self.plan
        if plan.serving is None:
            return self
        key = self.operation.cuda, marks is not None and not isinstance(marks[0], int)
        if key not in plan.trusted:
            if not plan.serving.trusts(self, marks):
                return self.by_torch()
            plan.trusted.add(key)
        return self

    def by_torch(self) -> Call:
        """The same, for torch operations alone."""
        plan = replace(self.plan, serving=None, by_reference=self.plan.rows, decided_here=True, compiled=None)
        return self._replace(plan=plan)

    def column(self, which: int) -> list[Tensor]:
        """The tensors of one list at the positions in use."""
        entries = self.lists[which]
        return [tensor for row in self.plan.rows if (tensor := entries[row]) is not None]

    def run(self, *given: Any, flags: bool | Sequence[bool] | None = None, writes: bool = True) -> bool:
        """Check what is given beside the lists, and do the operation.

        Args:
            given: a value for each argument that the operation declares; None for a tensor that is left out.
            flags: one for all entries or one for each, of operations that have them.
            writes: whether tensors of the lists are written.

        Returns:
            Whether a compiled backend served; it derives what is derived of all rows.

        Raises:
            TypeError, ValueError: an argument is of another kind. Nothing is written then.
        """
        plan, operation = self.plan, self.operation
        values: list[Any] = []
        written: list[Tensor] = []
        cast: CastStats | None = None
        for argument, value in zip(operation.arguments, given, strict=True):
            if isinstance(value, Given):
                if value is not plan.stats:
                    name, rows = value.rows
                    check_result(operation.name, name, rows, plan.count, argument.dtype or rows.dtype, plan.device)
                    plan.stats = value
                if isinstance(value, CastStats):
                    cast = value
                values += value.passed
                written += value.results
                continue
            if argument.dtype is not None and value is not None:
                size = plan.count if argument.each else 1
                check_result(operation.name, argument.name, value, size, argument.dtype, plan.device)
            if argument.written and value is not None:
                written.append(value)
            values.append(0 if value is None else value)
        if flags is not None and not isinstance(flags, bool) and len(flags) != plan.count:
            raise ValueError(
                f"{operation.name}: accumulate has {len(flags)} entries, {operation.lists[0]} has {plan.count}. "
                "Give one each."
            )
        marks = None if cast is None else cast.marks
        call = self.served(marks)
        if call is not self:
            return call.run(*given, flags=flags, writes=writes)
        if plan.by_reference:
            with torch.no_grad(), marking(None if cast is None else cast.changed, self.rounded, plan.by_reference):
                for row in plan.by_reference:
                    flag = flags if isinstance(flags, bool) else flags is not None and bool(flags[row])
                    operation.specification(row, self.row(row), given, flag)
        if plan.serving is None:
            return False
        plan.serving.launch(self, values, written=written, marks=marks, flags=flags, writes=writes)
        return True


class CallCache:
    """What one call site remembers between calls. Opaque: make one for each operation and list, and pass it along.

    A list that is the very same tuple object as at the last call is taken to hold what it held: the dtypes, shapes and
    strides of its tensors are not looked at again while their addresses, which every call reads, are what they were.
    Give lists that stay as tuples, then, and lists that change, as those of gradients, as lists: these are compared
    entry by entry, in every call, or, as :class:`StableEntries`, in the first of several calls that get the same one.
    Where anything differs, the lists are checked anew.

    It is a cache and nothing else: a call without it gives the same result, and copies and pickles of it are empty. Of
    tensors it holds those tuples alone. It must outlive the CUDA graphs that its calls are captured into.

    Attributes:
        rebuilds: how many times lists were checked.

    Example:
        >>> import pickle
        >>> pickle.loads(pickle.dumps(CallCache()))
        CallCache(empty)
    """

    __slots__ = ("__weakref__", "_known", "rebuilds")

    def __init__(self) -> None:
        self.rebuilds = 0
        self._known: tuple[Plan, Any] | None = None

    def forget(self) -> None:
        """Clear the cache."""
        self._known = None

    def find(self, operation: Operation, lists: tuple[Entries, ...]) -> Call | None:
        """A call of ``operation``, where the lists are what they were at the last one; else None. Does not sync."""
        known = self._known
        if known is None or known[0].operation is not (operation.planned_as or operation):
            return None
        plan, layouts = known
        try:
            with torch._C.DisableTorchFunction():  # of subclasses too, torch's own attributes are what counts
                found = layouts.find(lists, plan.count)
        except RuntimeError:  # a tensor without an address; the checks say which
            return None
        return None if found is None else Call(operation, plan, found[0], found[1], self)

    def keep(self, plan: Plan, layouts: Any) -> None:
        """Remember how lists that were checked lie in memory: :class:`Layouts`, or their like."""
        self._known = plan, layouts

    def __reduce__(self) -> tuple[type[CallCache], tuple[()]]:
        return (CallCache, ())

    def __repr__(self) -> str:
        if self._known is None:
            return "CallCache(empty)"
        plan = self._known[0]
        return f"CallCache({plan.operation.name}, {plan.count} entries)"
