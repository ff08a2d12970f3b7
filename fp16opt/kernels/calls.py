"""What a multi-tensor call is: its declared operation, lists that passed the checks, and a call site's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Entries = Sequence["Tensor | None"]


class Operation(NamedTuple):
    """One multi-tensor operation, declared: all that checking, recognising and calling its lists needs.

    Attributes:
        name: of the public function, for messages.
        lists: their names.
        accepts: whether tensors of these dtypes, one of each list, go together.
        wanted: the same in words.
        written: the lists whose tensors autograd and users see change: their version counters move.
        shape_of: the list whose shapes and strides the others must have.
        counters: a further list, a float32 number for each entry that takes part, there or on the CPU; "" for none.
        scales: a further list before it, of float32 tensors with a number for every ``block`` elements; "" for none.
        block: elements.
        coded: the backends whose kernels take lists of 8-bit codes; elsewhere torch operations serve these.
        wide: whether compiled kernels take float64 on the CPU; on a GPU none does, and torch operations serve it.
    """

    name: str
    lists: tuple[str, ...]
    accepts: Callable[..., bool]
    wanted: str
    written: tuple[int, ...] = ()
    shape_of: int = 0
    counters: str = ""
    scales: str = ""
    block: int = 1
    coded: tuple[str, ...] = ()
    wide: bool = True

    @property
    def tables(self) -> int:
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
        device: where all tensors live; of lists without any, where the call's results do.
        count: n, the common length of the lists.
        rows: positions that are not None in any list.
        direct: places in ``rows`` whose memory may be walked linearly in all lists at once; on a GPU float64 is not
            among them.
        by_reference: (place, row) of the entries that the reference version must serve: all where nothing is compiled.
        serving: the file that calls the compiled kernels, or None.
        is_plain: whether the memory of all entries may be walked so, and the lists may be recognised.
        counts_here: whether the counters, if there are any, lie on the device.
        is_coded: whether a list holds codes or remainders of 8 bits, which steps round by their number.
        decided_here: whether the host has to look at a flag that says whether to write: not where only kernels write.
        compiled: what a compiled backend made of ``direct``, or None.
        seen: what recognises the lists; None where they are checked every time.
    """

    operation: Operation
    device: torch.device
    count: int
    rows: list[int]
    direct: list[int]
    by_reference: list[tuple[int, int]]
    serving: Any
    is_plain: bool
    is_coded: bool = False
    counts_here: bool = True
    decided_here: bool = True
    compiled: Any = field(default=None)
    seen: Any = field(default=None)


class Call(NamedTuple):
    """Lists that passed the checks, ready for a backend.

    Attributes:
        plan: what the checks found.
        lists: as they were given.
        addresses: of all lists, as they were read along with the checks; None where they were not.
        owner: the cache of the call site, if it has one.
    """

    plan: Plan
    lists: tuple[Entries, ...]
    addresses: Any
    owner: PointerTables | None

    def row(self, row: int) -> list[Tensor]:
        """The tensors at a position in use, one of each list."""
        return [tensor for entries in self.lists if (tensor := entries[row]) is not None]

    def column(self, which: int) -> list[Tensor]:
        """The tensors of one list at the positions in use."""
        entries = self.lists[which]
        return [tensor for row in self.plan.rows if (tensor := entries[row]) is not None]


def _nothing_known(function: str, lists: tuple[Entries, ...], arguments: tuple[Any, ...], writes: bool) -> bool:
    return False


class PointerTables:
    """What one call site remembers between calls. Opaque: make one for each operation and list, and pass it along.

    It is a cache and nothing else: it holds no tensor, a call without it gives the same result, and copies and
    pickles of it are empty. It must outlive the CUDA graphs that its calls are captured into.

    Example:
        >>> import pickle
        >>> pickle.loads(pickle.dumps(PointerTables()))
        PointerTables(empty)
    """

    __slots__ = ("__weakref__", "known", "plan", "rebuilds", "repeats")

    repeats: Callable[[str, tuple[Entries, ...], tuple[Any, ...], bool], bool]
    """Make a call of (a compiled function; lists; what stands behind them; whether tensors of lists are written) as one
    that was made before. Where that can't be had without checks nothing is done, and False is returned."""

    def __init__(self) -> None:
        self.rebuilds = 0
        self.forget()

    def forget(self) -> None:
        """Know nothing."""
        self.plan: Plan | None = None
        self.known: Any = None
        self.repeats = _nothing_known

    def __reduce__(self) -> tuple[type[PointerTables], tuple[()]]:
        return (PointerTables, ())

    def __repr__(self) -> str:
        state = "empty" if self.plan is None else f"{self.plan.operation.name}, {self.plan.count} entries"
        return f"PointerTables({state})"
