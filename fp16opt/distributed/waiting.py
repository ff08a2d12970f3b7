"""Who is waited for, where not all ranks make a call: told through the store, before a time-out ends in torch's words.

Nothing here is done in a step that goes well. ``save``, ``load`` and ``attach`` meet in the store before they send
anything, so that no message of theirs mixes with one of a rank that trains on: gloo aborts where sizes differ. A
message that fails tells the others where it was, and reads where they are.
"""

from __future__ import annotations

import datetime
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine import errors

_SEEN = 64  # ranks that an error looks at: each asks the one store
_GRACE = 1.0  # seconds in which other ranks' time-outs come too
_SIGNS = ("gloo/transport", "Application timeout caused pair closure", "NCCL")  # of messages that failed
_ENDS = ("closed by peer", "reset by peer", "Read error")  # of those whose other rank has gone

_said: list[str] = []  # where this rank has said that it failed, until a message of a step goes through again
_own: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


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
        RuntimeError: one has not within the time-out of ``init_process_group``. It says which, and where that one is.
    """
    store = _store()
    if store is None or dist.get_rank(group) < 0:
        return
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    name = f"{what}/{hash(tuple(ranks))}"
    store.set(_at(dist.get_rank()), what)
    came = store.add(name, 1)
    turn = (came - 1) // len(ranks)
    if came % len(ranks) == 0:
        store.set(f"{name}/{turn}", "all")
        store.delete_key(f"{name}/{turn - 1}")
    else:
        try:
            store.wait([f"{name}/{turn}"], store.timeout)
        except RuntimeError as error:
            store.add(name, -1)
            where = _where_at_last(store, ranks)
            late = {rank: place for rank, place in where.items() if place != what}
            time_out = _seconds(store.timeout)
            raise errors.SAVED_BY_ONE(call=what, time=time_out, late=_told(late)) from error
    store.set(_at(dist.get_rank()), "")


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
        store.set(_at(dist.get_rank()), place)
        _said.append(place)
        where = _where_at_last(store, range(dist.get_world_size()))
    except RuntimeError:
        return  # the store has gone with its rank
    late = {rank: at for rank, at in where.items() if at != place}
    silent = [str(rank) for rank, at in late.items() if not at]
    if silent and any(sign in text for sign in _ENDS):
        error.args = (
            f"{place} lost a rank: rank {', '.join(silent)} has ended, or has raised an error of its own. Look for "
            f"that error first. {text}",
        )
    elif late:
        error.args = (f"{place} was not called by all ranks: {_told(late)}. {errors.SAME_CALLS} {text}",)


def _at(rank: int) -> str:
    return f"at/{rank}"


def _where_at_last(store: Any, ranks: Iterable[int]) -> dict[int, str]:
    """:func:`_where` of the others, when all of them say something or a second is over."""
    others = [rank for rank in ranks if rank != dist.get_rank()]
    until = time.monotonic() + _GRACE
    where = _where(store, others)
    while not all(where.values()) and time.monotonic() < until:
        time.sleep(0.05)
        where = _where(store, others)
    return where


def _where(store: Any, ranks: list[int]) -> dict[int, str]:
    """By rank: the call in which it waits or has failed; "" where it says nothing."""
    found = {}
    for rank in ranks[:_SEEN]:
        key = _at(rank)
        found[rank] = store.get(key).decode() if store.check([key]) else ""
    return found


def _told(where: dict[int, str]) -> str:
    """Ranks in words."""
    told = [f"rank {rank} is in {place}" for rank, place in where.items() if place]
    silent = [str(rank) for rank, place in where.items() if not place]
    if silent:
        told.append(f"rank {', '.join(silent)} has not called it")
    return ", ".join(told)


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
    """What ``init_process_group`` or ``new_group`` was given for messages of a gloo group."""
    chosen: Any = group or dist.group.WORLD
    limit: datetime.timedelta = chosen._get_backend(torch.device("cpu")).options._timeout
    return limit


def reduce_over(group: Any, tensor: Tensor, operation: Any) -> None:
    """As ``dist.all_reduce``, in place, over what :func:`own_group` gave. Waits."""
    if isinstance(group, dist.ProcessGroup):
        dist.all_reduce(tensor, operation, group=group)
    else:
        _reduce_over_own(group, tensor, operation)
    if _said:
        _said.clear()
        store = _store()
        if store is not None:
            store.set(_at(dist.get_rank()), "")


def _reduce_over_own(group: Any, tensor: Tensor, operation: Any) -> None:
    torch_dist: Any = dist
    options = torch_dist.AllreduceOptions()
    options.reduceOp = operation
    group.allreduce([tensor], options).wait()
