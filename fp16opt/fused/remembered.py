"""The lists of the last fused step, and the proof that the next one may take them with other gradients."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ..kernels.tables import Seen
from .deferred import stored_grads
from .lists import Column, Lists

if TYPE_CHECKING:
    from ..masters import MasterParams
    from ..shard import Shard

Key = tuple[bool, bool, tuple[str, ...]]
GRADS = "grads"


def _options(optimizer: Optimizer) -> list[tuple[bool, bool]]:
    """What decides, group by group, which state tensors a step needs."""
    return [(bool(group.get("amsgrad")), bool(group.get("momentum"))) for group in optimizer.param_groups]


def _same(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


@dataclass
class _Entries:
    """One call's entries in use.

    Attributes:
        lists: theirs; between steps without gradients and state.
        places: of the entries in the lists.
        params: whose ``.grad`` is read.
        states: where among the optimizer's states theirs are.
        seen: by name of a column what its tensors are like.
    """

    lists: Lists
    places: list[int]
    params: list[Tensor]
    states: list[int]
    seen: dict[str, Seen]

    def now(self, values: list[dict[str, Any]]) -> dict[str, list[Tensor]] | None:
        """This step's gradients and state, if they are like those that were seen."""
        mine = [values[k] for k in self.states]
        columns = {}
        for name, seen in self.seen.items():
            column: list[Any] = stored_grads(self.params) if name == GRADS else [state.get(name) for state in mine]
            if not seen.again(column) or (name == GRADS and any([grad.requires_grad for grad in column])):  # noqa: C419
                return None
            columns[name] = column
        return columns


class Remembered:
    """What one shard's fused step was made of.

    Which parameters take part, which tensors their state is made of and what their gradients look like is proved for
    each step again, in a few passes over lists: making the lists anew takes as long as the arithmetic of small models.
    No gradient and no state is kept alive.

    Args:
        shard, optimizer, params: the step's.
        waiting: positions whose 16-bit gradients are taken as they are.
        calls: what was collected, all of it from state that is there already.
    """

    def __init__(
        self,
        shard: Shard,
        optimizer: Optimizer,
        params: MasterParams,
        waiting: set[int],
        calls: dict[Key, Lists],
    ) -> None:
        self.shard = shard
        self.optimizer = optimizer
        self.waiting = set(waiting)
        self.calls = calls
        self._options = _options(optimizer)
        self._keys = list(optimizer.state)
        owner = {id(params.operand(i)): i for i in shard.index}
        self._entries = [self._read(key, lists, params, owner) for key, lists in calls.items()]
        used = {id(param) for entries in self._entries for param in entries.params}
        sources = [params.model[i] if i in waiting else params.master[i] for i in shard.index]
        self._absent = [source for source in sources if id(source) not in used]

    def _read(self, key: Key, lists: Lists, params: MasterParams, owner: dict[int, int]) -> _Entries:
        waits, _, names = key
        masters = lists.columns["masters"]
        places = [place for place, master in enumerate(masters) if master is not None]
        index = [owner[id(masters[place])] for place in places]
        place_of = {id(param): k for k, param in enumerate(self._keys)}
        states = [place_of[id(params.master[i])] for i in index] if names else []
        source = params.model if waits else params.master
        seen = {name: Seen([t for t in lists.columns[name] if t is not None]) for name in (GRADS, *names)}
        return _Entries(lists, places, [source[i] for i in index], states, seen)

    def again(self, shard: Shard, waiting: set[int]) -> dict[Key, Lists] | None:
        """The calls of this step, or None where they must be collected anew."""
        if shard is not self.shard or waiting != self.waiting or _options(self.optimizer) != self._options:
            return None
        state = self.optimizer.state
        if not _same(list(state), self._keys) or any(grad is not None for grad in stored_grads(self._absent)):
            return None
        values = list(state.values())
        for entries in self._entries:
            columns = entries.now(values)
            if columns is None:
                return None
            for name, column in columns.items():
                entries.lists.columns[name] = _scattered(column, entries.places, len(entries.lists.positions))
        return self.calls

    def rest(self) -> None:
        """The step is done: let go of gradients and state."""
        for entries in self._entries:
            for name in entries.seen:
                entries.lists.columns[name] = []


def _scattered(values: list[Tensor], places: list[int], count: int) -> Column:
    column: Column = [None] * count
    for place, value in zip(places, values, strict=True):
        column[place] = value
    return column
