"""Ranks tell each other what they hold: what must be alike is compared, and who holds which parameter found out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ..engine.ranks import Facts
from .exchange import gather

Holders = tuple[int, ...]  # global ranks, ascending
_Key = tuple[str, int]


class Bits(NamedTuple):
    """A piece in short: where it lies in its mesh, and a hash of its elements. Pieces of one place are copies."""

    place: tuple[int, ...]
    content: int


class Reach(NamedTuple):
    """Over which ranks one parameter of this rank may lie, in pieces or copies.

    Attributes:
        may: where one of these ranks has a parameter of this name, it is the same one.
        must: those of them that certainly have it.
        bits: what its copies must have alike; None where it has none but by its mesh or by DDP.
    """

    may: Holders
    must: Holders
    bits: Bits | None = None


class _Entry(NamedTuple):
    """A parameter as a rank tells of it; ``may`` and ``must`` are places in the rank's list of scopes."""

    group: int
    name: str
    line: str
    may: int
    must: int
    bits: Bits | None


class _Told(NamedTuple):
    shared: list[str]
    scopes: list[Holders]
    entries: list[_Entry]


def ranks_in(group: Any) -> list[int]:
    """The global numbers of a group's ranks, in its order; None for all ranks."""
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


_ALIKE = (
    "Build model, optimizer and scaler alike on every rank; stages of a pipeline need attach(opt, model, "
    "process_group=...)."
)
_STAGES = (
    "Stages of a pipeline differ in parameters alone: give each the same optimizer, scaler and groups with the same "
    "settings, in one order. A group of which a stage has no parameter is empty there: {'params': [], 'lr': ...}."
)


def compare(
    what: str, facts: Facts, reach: Callable[[Tensor], Reach], group: Any, are_stages: bool = False
) -> list[Holders]:
    """Compare what ranks must have alike. Collective.

    Every rank must have the same of ``facts.shared``; of a parameter only those that hold a piece or a copy of it.

    Args:
        what: is compared, for the message.
        facts: this rank's.
        reach: of a parameter of this rank.
        group: the ranks that compare; None for all.
        are_stages: whether these are stages of a pipeline, for the message.

    Returns:
        For each of ``facts.params``, the ranks that hold it.

    Raises:
        ValueError: on every rank alike. Two ranks differ, and the message has the first line as both have it; or two
            have parameters of one name that may be two or copies; or copies differ; or ranks that share a parameter are
            not in the group.
    """
    reaches = [reach(fact.param) for fact in facts.params]
    scopes = dict.fromkeys(scope for each in reaches for scope in (each.may, each.must))
    places = {scope: place for place, scope in enumerate(scopes)}
    entries = [
        _Entry(fact.group, fact.name, fact.line, places[may], places[must], bits)
        for fact, (may, must, bits) in zip(facts.params, reaches, strict=True)
    ]
    told = gather((facts.shared, list(places), entries), group)
    everyone = {rank: _Told(*one) for rank, one in zip(ranks_in(group), told, strict=True)}
    first = next(iter(everyone))
    for rank, one in everyone.items():
        _same(what, first, everyone[first].shared, rank, one.shared, _STAGES if are_stages else _ALIKE)
    _compare_scopes(what, everyone)
    holders = _compare_names(what, everyone)
    return [holders[key] for key in _keys(fact.name for fact in facts.params)]


def _compare_scopes(what: str, everyone: dict[int, _Told]) -> None:
    """What certainly lies on several ranks is there on all of them, in one order."""
    lines: dict[Holders, dict[int, list[str]]] = {}
    for rank, one in everyone.items():
        parts: dict[int, list[_Entry]] = {}
        for entry in one.entries:
            parts.setdefault(entry.must, []).append(entry)
        for place, part in parts.items():
            lines.setdefault(one.scopes[place], {})[rank] = _in_lines(part)
    for scope, by_rank in lines.items():
        present = [rank for rank in scope if rank in everyone]
        for rank in present:
            _same(what, present[0], by_rank.get(present[0], []), rank, by_rank.get(rank, []))


def _in_lines(entries: Sequence[_Entry]) -> list[str]:
    numbers = [entry.group for entry in entries]
    counts = [f"{numbers.count(number)} parameters in group {number}" for number in sorted(set(numbers))]
    return counts + [entry.line for entry in entries]


def _compare_names(what: str, everyone: dict[int, _Told]) -> dict[_Key, Holders]:
    """The ranks that hold each parameter."""
    known: dict[Holders, int] = {}  # of the scopes of all ranks: a number each, as they may be long
    holders: dict[_Key, list[int]] = {}
    firsts: dict[_Key, tuple[int, int, _Entry]] = {}
    contents: dict[tuple[_Key, tuple[int, ...]], tuple[int, int]] = {}  # of copies: the first rank, its bits
    for rank, one in everyone.items():
        numbers = [known.setdefault(scope, len(known)) for scope in one.scopes]
        for key, entry in zip(_keys(entry.name for entry in one.entries), one.entries, strict=True):
            first, number, other = firsts.setdefault(key, (rank, numbers[entry.may], entry))
            if number != numbers[entry.may]:
                theirs = everyone[first].scopes[other.may]
                _refuse_doubt(what, entry.name, first, theirs, rank, one.scopes[entry.may])
            _same(what, first, [other.line], rank, [entry.line])
            holders.setdefault(key, []).append(rank)
            if entry.bits is not None:
                place, content = entry.bits
                first, other_content = contents.setdefault((key, place), (rank, content))
                if content != other_content:
                    _refuse_copies(what, entry.name, first, rank)
    for first, _, entry in firsts.values():
        scope = everyone[first].scopes[entry.may]
        outside = [rank for rank in scope if rank not in everyone]
        if outside:
            raise ValueError(
                f"process_group: expected all ranks over which {entry.name} may lie, {list(scope)}, and {outside} are "
                "not in it. Pass a group of every stage of the pipeline, with all ranks of its data parallelism and "
                "meshes."
            )
    return {key: tuple(sorted(ranks)) for key, ranks in holders.items()}


def _refuse_doubt(what: str, name: str, first: int, theirs: Holders, rank: int, scope: Holders) -> None:
    raise ValueError(
        f"{what}: whether {name} is one parameter or two can't be told: rank {first} has it on ranks {list(theirs)}, "
        f"rank {rank} on ranks {list(scope)}. If they are two, give them different names by named_parameters=, as they "
        "have in the whole model. If they are copies, make one mesh over all of these ranks by init_device_mesh and "
        "use its dimensions, or attach the DistributedDataParallel."
    )


def _refuse_copies(what: str, name: str, first: int, rank: int) -> None:
    raise ValueError(
        f"{what}: {name} is taken for one parameter with copies on rank {first} and rank {rank}, by its name and its "
        "mesh, and their values differ. If they are two, as in two stages of a pipeline, give them different names by "
        "named_parameters=, as they have in the whole model. If they are copies, load the same weights on both first."
    )


def _keys(names: Iterable[str]) -> list[_Key]:
    """Names with a count, should a rank use one twice."""
    seen: dict[str, int] = {}
    keys = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        keys.append((name, seen[name]))
    return keys


def _same(what: str, first: int, lines: Iterable[str], rank: int, others: Iterable[str], advice: str = _ALIKE) -> None:
    for one, other in zip([*lines, "nothing more"], [*others, "nothing more"], strict=False):
        if one != other:
            raise ValueError(f"{what} differs between ranks: rank {first} has {one}, rank {rank} has {other}. {advice}")
