"""Who is waited for, where not all ranks make a call: told through the store, before a time-out ends in torch's words.

Nothing here is done in a step that goes well. ``save``, ``load`` and ``attach`` meet in the store before they send
anything, so that no message of theirs mixes with one of a rank that trains on: gloo aborts where sizes differ. A
message that fails tells the others where it was, and reads where they are.
"""

from __future__ import annotations

import datetime
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..engine import errors

_NAMED = 8  # ranks that an error names: each asks the one store
_GRACE = 1.0  # seconds in which other ranks' time-outs come too
_SIGNS = ("gloo/transport", "Application timeout caused pair closure", "NCCL")  # of messages that failed
_ENDS = ("closed by peer", "reset by peer", "Read error")  # of those whose other rank has gone

_said: list[str] = []  # where this rank has said that it failed, until a message of a step goes through again
_own: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
_met: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], tuple[str, int]]] = weakref.WeakKeyDictionary()  # at last


def _store() -> Any:
    """What the ranks of the world share; None where there is one rank, or no store."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    torch_dist: Any = dist
    store = torch_dist.distributed_c10d._get_default_store()  # torch has no public name for it
    return None if store is None else torch_dist.PrefixStore("fp16opt", store)


def meet(what: str, group: Any = None) -> None:
    """Wait until every rank of ``group`` has come to the call of this name. Collective.

    Raises:
        RuntimeError: one has not within the time-out of the group. It says which, and where that one is.
    """
    store = _store()
    if store is None or dist.get_rank(group) < 0:
        return
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    limit = _time_limit(group)
    name = f"{what}/{hash(ranks)}"
    _enter(store, what)
    came = store.add(name, 1)
    turn = (came - 1) // len(ranks)
    before = _met.setdefault(dist.group.WORLD, {})
    if came % len(ranks) == 0:
        store.set(f"{name}/{turn}", "all")
        _forget(store, before.get(ranks), name)
    else:
        try:
            store.wait([f"{name}/{turn}"], limit)
        except RuntimeError as error:
            left = store.add(name, -1)
            if (left + 1) % len(ranks) and not store.check([f"{name}/{turn}"]):
                late = _elsewhere(store, ranks, what)
                raise errors.SAVED_BY_ONE(call=what, time=_seconds(limit), late=_told(late)) from error
            store.add(name, 1)  # the last one has come just now, and counts on this one
    before[ranks] = name, turn
    _leave(store, what)


def _forget(store: Any, last: tuple[str, int] | None, name: str) -> None:
    """All ranks have come here, and so have left what they met for before: its keys go."""
    if last is not None:
        store.delete_key("/".join(map(str, last)))
        if last[0] != name:
            store.delete_key(last[0])


def explain(error: BaseException, place: str) -> None:
    """Put into the text of a message that failed where this rank and the others are, as far as they say so.

    Args:
        error: of any kind; only those of torch.distributed change.
        place: where this rank was.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or errors.SAME_CALLS in text:
        return
    if not (isinstance(error, dist.DistError) or any(sign in text for sign in _SIGNS)):
        return
    try:
        store = _store()
        if store is None:
            return
        _enter(store, place)
        _said.append(place)
        late = _elsewhere(store, range(dist.get_world_size()), place)
    except RuntimeError:
        return  # the store has gone with its rank
    silent = [str(rank) for rank, at in late.items() if not at]
    if silent and any(sign in text for sign in _ENDS):
        error.args = (
            f"{place} lost a rank: rank {', '.join(silent)} has ended, or has raised an error of its own. Look for "
            f"that error first. {text}",
        )
    elif late:
        error.args = (f"{place} was not called by all ranks: {_told(late)}. {errors.SAME_CALLS} {text}",)


def _at(rank: int) -> str:
    """The key under which a rank says where it is."""
    return f"at/{rank}"


def _in(place: str, rank: int) -> str:
    """A key that is there while a rank is in this place: of many ranks the store tells at once whether all are."""
    return f"in/{rank}/{place}"


def _enter(store: Any, place: str) -> None:
    """This rank waits in a call, or has failed there."""
    rank = dist.get_rank()
    store.set(_at(rank), place)
    store.set(_in(place, rank), "")


def _leave(store: Any, place: str) -> None:
    rank = dist.get_rank()
    store.set(_at(rank), "")
    store.delete_key(_in(place, rank))


def _elsewhere(store: Any, ranks: Sequence[int], place: str) -> dict[int, str]:
    """Ranks that are not in this place, the first few: the call in which each is; "" where it says nothing.

    Looked for until all of them say something, or a second is over.
    """
    until = time.monotonic() + _GRACE
    while True:
        found = {}
        for rank in _missing(store, ranks, place):
            key = _at(rank)
            found[rank] = store.get(key).decode() if store.check([key]) else ""
        if all(found.values()) or time.monotonic() >= until:
            return {rank: at for rank, at in found.items() if at != place}
        time.sleep(0.05)


def _missing(store: Any, ranks: Sequence[int], place: str) -> list[int]:
    """The first few ranks that are not in this place, by halves: a thousand ranks are ten questions for each."""
    found: list[int] = []
    parts = [list(ranks)]
    while parts and len(found) < _NAMED:
        part = parts.pop()
        if not part or store.check([_in(place, rank) for rank in part]):
            continue
        if len(part) == 1:
            found += part
        else:
            half = len(part) // 2
            parts += [part[half:], part[:half]]
    return found


def _told(where: dict[int, str]) -> str:
    """Ranks in words."""
    told = [f"rank {rank} is in {place}" for rank, place in where.items() if place]
    silent = [str(rank) for rank, place in where.items() if not place]
    if silent:
        told.append(f"rank {', '.join(silent)} has not called it")
    return ", ".join(told) + (", and more" if len(where) == _NAMED else "")


def _seconds(timeout: datetime.timedelta) -> str:
    return f"{timeout.total_seconds():g} s"


def own_group(group: Any) -> Any:
    """For :func:`reduce_over`: connections of steps alone between the ranks of ``group``. Collective when first asked.

    Where a rank does other things, gloo would take a message of its for that of a step, and aborts where sizes differ.
    Groups of other backends, which do not, stay as they are. It is no group of torch's table: torch names those by how
    many a rank has, and ranks of several meshes have different numbers of them.
    """
    store = _store()
    if store is None or str(dist.get_backend(group)) != "gloo":
        return group or dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    made = _own.setdefault(dist.group.WORLD, {})
    if ranks not in made:
        torch_dist: Any = dist
        prefixed = torch_dist.PrefixStore(f"steps/{hash(ranks)}", store)
        made[ranks] = torch_dist.ProcessGroupGloo(prefixed, dist.get_rank(group), len(ranks), _time_limit(group))
    return made[ranks]


def _time_limit(group: Any) -> datetime.timedelta:
    """What ``init_process_group`` or ``new_group`` was given for messages of a group."""
    chosen: Any = group or dist.group.WORLD
    try:
        limit: datetime.timedelta = chosen._get_backend(chosen._device_types[0]).options._timeout
    except (RuntimeError, AttributeError, IndexError):  # a backend that has none
        limit = _store().timeout
    return limit


def reduce_over(group: Any, tensor: Tensor, operation: Any) -> None:
    """As ``dist.all_reduce``, in place, over what :func:`own_group` gave. Waits."""
    if isinstance(group, dist.ProcessGroup):
        dist.all_reduce(tensor, operation, group=group)
    else:
        _reduce_over_own(group, tensor, operation)
    if _said:
        places = {*_said}
        _said.clear()
        store = _store()
        for place in places if store is not None else ():
            _leave(store, place)


def _reduce_over_own(group: Any, tensor: Tensor, operation: Any) -> None:
    torch_dist: Any = dist
    options = torch_dist.AllreduceOptions()
    options.reduceOp = operation
    group.allreduce([tensor], options).wait()
