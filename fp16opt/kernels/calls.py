"""What a multi-tensor call is: its declared operation, lists that passed the checks, and a call site's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .pieces import Piece

Entries = Sequence["Tensor | None"]

BEGUN = object()
"""What :attr:`CallCache.returned` holds while torch operations work on the rows of a call, one after the other."""

Specification = Callable[[int, "list[Tensor]", "tuple[Any, ...]", bool], None]
"""An operation on one row in torch operations: (row, its tensors, the call's arguments, its flag)."""


class Argument(NamedTuple):
    """One argument of an operation beside its lists.

    Attributes:
        name: for messages.
        dtype: of the tensor that it must be, on the device of the call; None for a plain value, or a tensor that was
            checked before, or that the operation itself has made.
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


@dataclass
class Plan:
    """Lists that passed the checks.

    Attributes:
        operation: what they were checked for.
        device: where all tensors live; of lists without any, where the call's results do.
        count: n, the common length of the lists.
        rows: positions that are not None in any list.
        direct: those of ``rows`` whose memory may be walked linearly in all lists at once; on a GPU float64 is not
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
    packed: tuple[tuple[Any, ...], bytes] = ((), b"")


class Known(NamedTuple):
    """What a call site remembers: one value, replaced as a whole, so that each of two threads works on what it took.

    Attributes:
        plan: of lists that passed the checks.
        readings: of each list.
        kept: of each list, the tuple that its reading is of, where the caller gave one that stays.
        numbers: what was read of the tensors beside the lists that passed the checks last; None before any did.
        used_by: the operation whose these were.
    """

    plan: Plan
    readings: Sequence[Any]
    kept: Sequence[tuple[Tensor | None, ...] | None]
    numbers: Any
    used_by: Operation


class Call(NamedTuple):
    """Lists that passed the checks, ready for a backend.

    Attributes:
        operation: what is to be done.
        plan: what the checks found.
        lists: as they were given, or copies: they keep the tensors alive until the call returns.
        readings: of all lists, which compiled code takes addresses from; None where they were not recognised.
        owner: the memory of the call site, if it has one.
        is_proven: whether the tensors beside the lists are like those that passed the checks last.
    """

    operation: Operation
    plan: Plan
    lists: tuple[tuple[Tensor | None, ...], ...]
    readings: Sequence[Any] | None
    owner: CallCache | None
    is_proven: bool = False

    def row(self, row: int) -> list[Tensor]:
        """The tensors at a position in use, one of each list."""
        return [tensor for entries in self.lists if (tensor := entries[row]) is not None]

    @property
    def returned(self) -> deque[Any]:
        """Where it is noted that the call has done its work: see :class:`CallCache`."""
        return deque(maxlen=1) if self.owner is None else self.owner.returned

    @property
    def rounded(self) -> Entries:
        """The list of 16-bit tensors that masters are rounded to; none of operations that round nothing."""
        names = self.operation.lists
        which = next((place for place, name in enumerate(names) if name in ("params", "models")), None)
        return () if which is None else self.lists[which]


class CallCache:
    """What one call site remembers between calls. Opaque: make one for each operation and list, and pass it along.

    A list that is the very same tuple object as at the last call is taken to hold what it held: the dtypes, shapes and
    strides of its tensors are not looked at again while their addresses, which every call reads, are what they were.
    Give lists that stay as tuples, then, and lists that change, as those of gradients, as lists: these are compared
    entry by entry. :class:`.readings.Rows` were just read by the caller. Where anything differs, the lists are checked
    anew.

    It is a cache and nothing else: a call without it gives the same result, and copies and pickles of it are empty. Of
    tensors it holds those tuples alone. It must outlive the CUDA graphs that its calls are captured into.

    Attributes:
        known: what it remembers.
        rebuilds: how many times lists were checked.
        returned: whether the last call since this was cleared has done its work. The very call of C that runs compiled
            code puts its return in: no exception of a signal can come between the two.

    Example:
        >>> import pickle
        >>> pickle.loads(pickle.dumps(CallCache()))
        CallCache(empty)
    """

    __slots__ = ("__weakref__", "known", "rebuilds", "returned")

    def __init__(self) -> None:
        self.rebuilds = 0
        self.returned: deque[Any] = deque(maxlen=1)
        self.known: Known | None = None

    def forget(self) -> None:
        """Clear the cache."""
        self.known = None

    def __reduce__(self) -> tuple[type[CallCache], tuple[()]]:
        return (CallCache, ())

    def __repr__(self) -> str:
        if self.known is None:
            return "CallCache(empty)"
        plan = self.known.plan
        return f"CallCache({plan.operation.name}, {plan.count} entries)"
